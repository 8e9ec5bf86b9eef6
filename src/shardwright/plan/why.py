"""Why not that layout: every rule it breaks; or how far it is from fitting and from the best, and by what."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from shardwright.cluster import Cluster
from shardwright.errors import NothingFitsError
from shardwright.job import Job
from shardwright.layout import (
    OFFLOAD_KINDS,
    RECOMPUTE_KINDS,
    SCHEDULE_NAMES,
    Fault,
    Layout,
)
from shardwright.model import ModelSpec
from shardwright.plan.asked import completed, layout_fields, parse_layout
from shardwright.plan.batch import batch_change, batch_sentence
from shardwright.plan.comparison import Side
from shardwright.plan.explain import accounts, plan_of
from shardwright.plan.finding import Ranking, Wishes, find, memory_limit
from shardwright.plan.memory import device_memory
from shardwright.plan.pipeline import simulated_times
from shardwright.plan.placement import placements
from shardwright.plan.rules import BATCH_CODES, broken_rules
from shardwright.plan.runnable import not_runnable_reasons
from shardwright.plan.schedule import why_not
from shardwright.plan.space import LOSS_CHUNKS
from shardwright.plan.step import step_time
from shardwright.plan.table import table_of
from shardwright.planfile import MemoryTerms, Plan
from shardwright.units import format_bytes, format_time

INSIDE_A_LAYER = ("tp", "cp", "ep")
"""Axes that pass something round in every layer."""


QUIET = ("ep", "etp", "dispatch", "order", "recompute_every", "loss_chunks", "offload")
"""Columns that are spoken of only where they are asked for, as in a label."""


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
    fixed: Wishes,
    max_memory: str | None = None,
    top: int = 5,
    ranking: Ranking = "runnable_first",
) -> Answer:
    """What ``find`` says, and under ``why_layout`` the layout of ``text``, by itself and against the best.

    Where nothing fits, the document has no ``best`` and says so under ``nothing_fits``.

    Raises: LayoutError: ``text`` names no layout; and what ``find`` raises of its own input.
    """
    asked = parse_layout(text)
    limit = min(cluster.device.memory, memory_limit(max_memory) or float("inf"))
    best, nothing = None, None
    try:
        found = find(model, job, cluster, fixed, max_memory, top, ranking)
        best, document = found.best, found.document
    except NothingFitsError as error:
        nothing, document = error, {"model": model.name, "best": [], **error.document}
    why = why_layout(model, job, cluster, asked, limit, best)
    return Answer(document | {"why_layout": {"asked": text, **why}}, best, nothing)


def why_layout(
    model: ModelSpec, job: Job, cluster: Cluster, asked: Mapping[str, int], limit: float, best: Plan | None
) -> dict[str, Any]:
    """The layout of some columns: broken rules, else memory against ``limit`` and time against ``best``.

    Keys: ``label``, ``completed`` (what was not asked for), ``faults`` [code, message], ``batch`` (what its
    own global batch would do to the job, if that is all that is wrong), ``layout``,
    ``memory`` (terms, ``total``, ``limit``, ``left``: negative if too much), ``step`` (``time``,
    ``best_time``, ``ratio``, ``parts`` [part, time, best, difference]), ``fits_with`` (the fastest on its
    mesh that fits, if it does not itself), ``verdict`` (sentences). With faults there is no ``layout``,
    ``memory`` or ``step``.
    """
    columns = completed(asked, model, job, cluster.ranks)
    values = layout_fields(columns, model)
    broken = list(_broken(values, model, job, cluster, asked))
    batch = _other_batch(values, job, broken)
    document: dict[str, Any] = {
        "label": Layout.model_construct(**values).label,
        "completed": {
            name: values[name]
            for name in columns
            if name in values and name not in asked and name not in QUIET
        },
        "faults": [fault._asdict() for fault in broken],
        "batch": batch,
        "layout": None,
        "memory": None,
        "step": None,
        "fits_with": None,
    }
    if broken:
        told = [] if batch is None else [batch_sentence(batch)]
        return document | {"verdict": [*(fault.message for fault in broken), *told]}
    if "ends" not in asked and columns["pp"] > 1:
        columns["ends"] = _better_ends(columns, model, job, cluster, limit)
    layout = Layout(**layout_fields(columns, model))
    side = Side("asked", plan_of(model, job, cluster, layout), {})
    side = side._replace(found=accounts(side.plan))
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
    values: Mapping[str, Any], model: ModelSpec, job: Job, cluster: Cluster, asked: Mapping[str, int]
) -> Iterator[Fault]:
    """Broken rules, without those of ranks that were made up here."""
    replicate, shard = values["dp_replicate"], values["dp_shard"]
    if "dp" in asked and replicate * shard != asked["dp"]:
        split = f"dp_replicate={replicate} x dp_shard={shard}"
        yield Fault("dp", f"dp={asked['dp']} is not {split}: leave dp out")
    found = list(broken_rules(values, model, job, cluster))
    if (
        any(fault.code == "ranks" for fault in found)
        and not {"dp", "dp_replicate", "dp_shard"} & asked.keys()
    ):
        found = [fault for fault in found if fault.code not in BATCH_CODES]
    yield from found


def _other_batch(values: Mapping[str, Any], job: Job, broken: Sequence[Fault]) -> dict[str, Any] | None:
    """What the layout's own batch would do to the job's schedule, if nothing but the batch is wrong."""
    if not broken or any(fault.code not in BATCH_CODES for fault in broken):
        return None
    axes = ("dp_replicate", "dp_shard", "micro_batch", "microbatches")
    batch = prod(int(values[axis]) for axis in axes)
    return batch_change(job, job.model_copy(update={"global_batch": batch}))


# Other layouts on the same mesh


def _better_ends(
    columns: Mapping[str, int], model: ModelSpec, job: Job, cluster: Cluster, limit: float
) -> int:
    """Lighter ends or not: the faster of those that fit, else the smaller."""
    light = model.layers // (columns["pp"] * columns["chunks"]) >= 2
    layouts = [
        Layout(**layout_fields({**columns, "ends": ends}, model)) for ends in ((0, 1) if light else (0,))
    ]
    device = device_memory(model, job, cluster.device, table_of(layouts, model.layers))
    time = simulated_times(model, job, cluster, layouts)
    return int(np.lexsort((np.where(device > limit, device, time), device > limit))[0])


def _what_fits(
    columns: Mapping[str, int], model: ModelSpec, job: Job, cluster: Cluster, limit: float
) -> dict[str, Any] | None:
    """The fastest that fits on the same mesh, with more recomputation, ZeRO, sp, smaller microbatches, the
    loss in parts or tensors on the host; by the closed forms of pipelines."""
    layouts = [Layout(**layout_fields(row, model)) for row in _neighbours(columns, job)]
    table = table_of(layouts, model.layers)
    device = device_memory(model, job, cluster.device, table)
    time = np.where(device > limit, np.inf, step_time(model, job, cluster, table).time)
    if not np.isfinite(time).any():
        return None
    row = int(np.argmin(time))
    simulated = float(simulated_times(model, job, cluster, [layouts[row]])[0])
    return {"label": layouts[row].label, "total": float(device[row]), "step_time": simulated}


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
            [(kind, columns["recompute_every"] if kind == 2 else 1) for kind in range(len(RECOMPUTE_KINDS))],
            sorted({columns["loss_chunks"], *LOSS_CHUNKS}),
            range(len(OFFLOAD_KINDS)),
        )
        for stage, sp, (recompute, every), chunks, offload in choices:
            changed = {"micro_batch": micro_batch, "microbatches": microbatches, "recompute_every": every}
            changed |= {"loss_chunks": chunks, "offload": offload}
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
    other = Side("best", best, accounts(best))
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
    node, layout = cluster.gpus_per_node, side.plan.layout
    places = placements(table_of([layout], side.plan.model.layers), INSIDE_A_LAYER)
    for axis, place in places.items():
        sent = [flow for flow in side.found["traffic"] if flow["axis"] == axis]
        nodes = int(place.spread(node, cluster.ranks)[1].max())
        if sent and nodes > 1:
            total, busy = (sum(flow[key] for flow in sent) for key in ("bytes", "busy_time"))
            yield (
                f"a group of {axis}={getattr(layout, axis)} reaches over {nodes} nodes "
                f"of {node} devices: {format_bytes(total)} a step goes over the {sent[0]['link']}, "
                f"which takes {format_time(busy)}"
            )
