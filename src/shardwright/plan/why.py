"""Why not that layout: every rule it breaks; or how far it is from fitting and from the best, and by what."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from shardwright.cluster import Cluster
from shardwright.errors import LayoutError, NothingFitsError
from shardwright.job import Job
from shardwright.layout import (
    RECOMPUTE_KINDS,
    SCHEDULE_NAMES,
    Fault,
    Layout,
    faults,
    model_faults,
    not_runnable_reasons,
)
from shardwright.model import ModelSpec
from shardwright.plan.asked import completed, layout_fields, parse_layout
from shardwright.plan.comparison import Side
from shardwright.plan.explain import check_modelled, explanation, plan_of
from shardwright.plan.finding import Ranking, find, memory_limit
from shardwright.plan.memory import device_memory
from shardwright.plan.schedule import why_not
from shardwright.plan.step import step_time
from shardwright.plan.table import table_of
from shardwright.planfile import MemoryTerms, Plan
from shardwright.units import format_bytes, format_time


class Answer(NamedTuple):
    """The JSON document, the best plan, or why there is none."""

    document: dict[str, Any]
    best: Plan | None
    nothing: NothingFitsError | None


def answer_why(
    text: str,
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    fixed: Mapping[str, int | None],
    max_memory: str | None = None,
    top: int = 5,
    ranking: Ranking = "runnable_first",
) -> Answer:
    """What ``find`` says, and under ``why_layout`` the layout of ``text``, by itself and against the best.

    Where nothing fits, the document has no ``best`` and says so under ``nothing_fits``.

    Raises: LayoutError: ``text`` names no layout; and what ``find`` raises of its own input.
    """
    check_modelled(model)
    asked = parse_layout(text)
    limit = min(cluster.device.memory, memory_limit(max_memory) or float("inf"))
    best, nothing = None, None
    try:
        found = find(model, job, cluster, fixed, max_memory, top, ranking)
        best, document = found.best, found.document
    except NothingFitsError as error:
        nothing, document = error, {"model": model.name, "best": [], "nothing_fits": str(error)}
    why = why_layout(model, job, cluster, asked, limit, best)
    return Answer(document | {"why_layout": {"asked": text, **why}}, best, nothing)


def why_layout(
    model: ModelSpec, job: Job, cluster: Cluster, asked: Mapping[str, int], limit: float, best: Plan | None
) -> dict[str, Any]:
    """The layout of some columns: broken rules, else memory against ``limit`` and time against ``best``.

    Keys: ``label``, ``completed`` (what was not asked for), ``faults`` [code, message], ``layout``,
    ``memory`` (terms, ``total``, ``limit``, ``left``: negative if too much), ``step`` (``time``,
    ``best_time``, ``ratio``, ``parts`` [part, time, best, difference]), ``fits_with`` (the fastest on its
    mesh that fits, if it does not itself), ``verdict`` (sentences). With faults there is no ``layout``,
    ``memory`` or ``step``.
    """
    columns = completed(asked, model, job, cluster.ranks)
    values = layout_fields(columns, model)
    layout = Layout.model_construct(**values)  # not checked: rules are listed, not raised
    broken = list(_broken(layout, values, model, job, cluster, asked))
    document: dict[str, Any] = {
        "label": layout.label,
        "completed": {name: values[name] for name in columns if name in values and name not in asked},
        "faults": [fault._asdict() for fault in broken],
        "layout": None,
        "memory": None,
        "step": None,
        "fits_with": None,
    }
    if broken:
        return document | {"verdict": [fault.message for fault in broken]}
    if "ends" not in asked and layout.pp > 1:
        columns["ends"] = _better_ends(columns, model, job, cluster, limit)
    layout = Layout(**layout_fields(columns, model))
    side = Side("asked", plan_of(model, job, cluster, layout), {})
    side = side._replace(found=explanation(side.plan))
    memory, step = _memory(side, limit), _step(side, best)
    other = None if memory["left"] >= 0 else _what_fits(columns, model, job, cluster, limit)
    fits = memory["left"] >= 0
    sentences = [_memory_sentence(memory, layout.pp > 1), *([] if fits else [_fits_sentence(other)])]
    sentences += [_step_sentence(step, fits), *_link_sentences(side, cluster)]
    reasons = not_runnable_reasons(model, job, layout)
    return document | {
        "layout": layout.model_dump(mode="json"),
        "runnable": not reasons,
        "not_runnable_reasons": reasons,
        "memory": memory,
        "step": step,
        "fits_with": other,
        "verdict": [*sentences, *reasons],
    }


# Rules


def _broken(
    layout: Layout,
    values: Mapping[str, Any],
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    asked: Mapping[str, int],
) -> Iterator[Fault]:
    stages = layout.pp * layout.chunks
    if "dp" in asked and layout.dp != asked["dp"]:
        split = f"dp_replicate={layout.dp_replicate} x dp_shard={layout.dp_shard}"
        yield Fault("dp", f"dp={asked['dp']} is not {split}: leave dp out")
    enough = stages <= model.layers and min(layout.stage_layers, default=1) > 0
    if not enough:
        yield Fault(
            "stages",
            f"pp={layout.pp} x chunks={layout.chunks} = {stages} stages, model {model.name} has "
            f"layers={model.layers}: give each stage a layer",
        )
    else:
        try:
            Layout.checked(values)
        except LayoutError as contradiction:
            yield Fault("layout", str(contradiction).removeprefix("layout: "))
    of_ranks = faults(layout, job, cluster)
    if layout.ranks != cluster.ranks and not {"dp", "dp_replicate", "dp_shard"} & asked.keys():
        of_ranks = [fault for fault in of_ranks if fault.code == "ranks"]  # the batch's ranks were made up
    yield from of_ranks
    yield from (fault for fault in model_faults(layout, model, job) if enough or fault.code != "stage_layers")
    if layout.pp > 1 and layout.schedule != "none":
        fault = why_not(layout.schedule, layout.pp, layout.chunks, layout.microbatches)
        if fault:
            yield Fault("schedule", fault)


# Other layouts on the same mesh


def _better_ends(
    columns: Mapping[str, int], model: ModelSpec, job: Job, cluster: Cluster, limit: float
) -> int:
    """Lighter ends or not: the faster of those that fit, else the smaller."""
    light = model.layers // (columns["pp"] * columns["chunks"]) >= 2
    rows = [{**columns, "ends": ends} for ends in ((0, 1) if light else (0,))]
    table = table_of([Layout(**layout_fields(row, model)) for row in rows], model.layers)
    device = device_memory(model, job, cluster.device, table)
    time = step_time(model, job, cluster, table).time
    return int(np.lexsort((np.where(device > limit, device, time), device > limit))[0])


def _what_fits(
    columns: Mapping[str, int], model: ModelSpec, job: Job, cluster: Cluster, limit: float
) -> dict[str, Any] | None:
    """The fastest that fits on the same mesh, with more recomputation, ZeRO, sp or smaller microbatches."""
    layouts = [Layout(**layout_fields(row, model)) for row in _neighbours(columns, job)]
    table = table_of(layouts, model.layers)
    device = device_memory(model, job, cluster.device, table)
    time = np.where(device > limit, np.inf, step_time(model, job, cluster, table).time)
    if not np.isfinite(time).any():
        return None
    row = int(np.argmin(time))
    return {"label": layouts[row].label, "total": float(device[row]), "step_time": float(time[row])}


def _neighbours(columns: Mapping[str, int], job: Job) -> Iterator[dict[str, int]]:
    samples = columns["micro_batch"] * columns["microbatches"]
    zero, order = columns["zero_stage"], SCHEDULE_NAMES[columns["schedule"]]
    splits = columns["tp"] > 1 and job.seq % (columns["cp"] * columns["tp"]) == 0
    for micro_batch in (b for b in range(1, columns["micro_batch"] + 1) if samples % b == 0):
        microbatches = samples // micro_batch
        if order != "none" and why_not(order, columns["pp"], columns["chunks"], microbatches):
            continue
        choices = product(
            sorted({zero, 3}) if zero and columns["pp"] == 1 else [zero],
            sorted({columns["sp"], 1}) if splits else [columns["sp"]],
            range(len(RECOMPUTE_KINDS)),
        )
        for stage, sp, recompute in choices:
            changed = {"micro_batch": micro_batch, "microbatches": microbatches}
            yield {**columns, **changed, "zero_stage": stage, "sp": sp, "recompute": recompute}


# Numbers and sentences


def _memory(side: Side, limit: float) -> dict[str, Any]:
    heaviest = side.heaviest
    terms = {term: heaviest[term] for term in MemoryTerms.model_fields}
    total = heaviest["total"]
    return {"stage": heaviest["stage"], **terms, "total": total, "limit": limit, "left": limit - total}


def _step(side: Side, best: Plan | None) -> dict[str, Any]:
    """Its parts, and what the best has of each."""
    parts, time = side.parts(), float(side.found["step"]["time"])
    if best is None:
        rows = [
            {"part": part, "time": value, "best": None, "difference": None} for part, value in parts.items()
        ]
        return {"time": time, "best_label": None, "best_time": None, "ratio": None, "parts": rows}
    other = Side("best", best, explanation(best))
    theirs, best_time = other.parts(), float(other.found["step"]["time"])
    names = [*parts, *(part for part in theirs if part not in parts)]
    pairs = {part: (parts.get(part, 0.0), theirs.get(part, 0.0)) for part in names}
    return {
        "time": time,
        "best_label": best.layout.label,
        "best_time": best_time,
        "ratio": time / best_time,
        "parts": [
            {"part": part, "time": mine, "best": its, "difference": mine - its}
            for part, (mine, its) in pairs.items()
        ],
    }


def _memory_sentence(memory: Mapping[str, Any], piped: bool) -> str:
    largest = sorted(MemoryTerms.model_fields, key=lambda term: -float(memory[term]))[:2]
    of = " and ".join(f"{format_bytes(memory[term])} of {term}" for term in largest)
    if memory["left"] >= 0:
        return f"it fits, {format_bytes(memory['left'])} left of {format_bytes(memory['limit'])}; mostly {of}"
    who = f"pipeline rank {memory['stage']}" if piped else "a rank"
    return (
        f"it does not fit: {who} needs {format_bytes(memory['total'])}, "
        f"{format_bytes(-memory['left'])} more than {format_bytes(memory['limit'])}; mostly {of}"
    )


def _fits_sentence(other: Mapping[str, Any] | None) -> str:
    if other is None:
        return "nothing on this mesh fits with less kept: split the model or the sequence further"
    return (
        f"on this mesh [{other['label']}] fits: {format_bytes(other['total'])}, "
        f"{format_time(other['step_time'])} a step"
    )


def _step_sentence(step: Mapping[str, Any], fits: bool) -> str:
    sentence = f"it {'takes' if fits else 'would take'} {format_time(step['time'])} a step"
    if step["best_time"] is None:
        return f"{sentence}; nothing fits to compare it with"
    change = step["ratio"] - 1
    if abs(change) < 5e-4:
        return f"{sentence}, as fast as [{step['best_label']}]"
    sentence += f", {abs(change):.1%} {'slower' if change > 0 else 'faster'} than [{step['best_label']}]"
    rows = sorted(step["parts"], key=lambda row: -abs(row["difference"]))
    seen = [row for row in rows[:3] if abs(row["difference"]) >= 0.1 * abs(rows[0]["difference"])]
    signed = (
        f"{row['part']} {'-' if row['difference'] < 0 else '+'}{format_time(abs(row['difference']))}"
        for row in seen
    )
    return f"{sentence}: {', '.join(signed)}"


def _link_sentences(side: Side, cluster: Cluster) -> Iterator[str]:
    """Axes inside a layer whose groups leave a node."""
    node = cluster.gpus_per_node
    for axis in ("tp", "cp"):
        sent = [flow for flow in side.found["traffic"] if flow["axis"] == axis]
        reach = side.plan.layout.tp * (side.plan.layout.cp if axis == "cp" else 1)
        if sent and reach > node:
            total, busy = (sum(flow[key] for flow in sent) for key in ("bytes", "busy_time"))
            yield (
                f"a group of {axis}={getattr(side.plan.layout, axis)} reaches over {-(-reach // node)} nodes "
                f"of {node} devices: {format_bytes(total)} a step goes {sent[0]['link']}, "
                f"which takes {format_time(busy)}"
            )
