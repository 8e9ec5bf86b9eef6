"""From a job to the answer of ``shardwright plan``: the best layouts as a document, the best as a Plan."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.axes import MESH_ORDER
from shardwright.cluster import Cluster
from shardwright.errors import JobError, LayoutError
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.columns import choices
from shardwright.plan.explain import plan_of
from shardwright.plan.measured import links_words
from shardwright.plan.memory import memory_ledger
from shardwright.plan.nothing import check_fits
from shardwright.plan.pareto import pareto_rows
from shardwright.plan.pipeline import simulated_step
from shardwright.plan.runnable import RUNNABLE_COLUMNS, job_refusals, not_runnable_reasons
from shardwright.plan.search import SearchResult, rejection_notes, search
from shardwright.plan.step import mfu, tokens_per_second_per_device
from shardwright.plan.traffic import traffic
from shardwright.plan.uncertainty import interval_of, settled_by, tied, within_job
from shardwright.planfile import Plan
from shardwright.units import BYTES, HOUR, format_bytes, format_time, parse_quantity

Wishes = Mapping[str, int | Sequence[int] | None]
"""Columns of the table that the user has given: one value or the allowed ones; None leaves one free."""

Ranking = Literal["runnable_first", "runnable_only", "time"]

ONLY_MODELLED = "only_modelled"
"""Why a layout that fits is out, where only what runs is asked for."""
"""Of what fits: what the runtime executes before what is only modelled, alone, or all as one; by time."""

MOST_ROWS_TO_CHOOSE_FROM = 10_000
"""Of those that are ranked, among which those to show are looked for."""


@dataclass(frozen=True)
class Finding:
    """The best plan, and the JSON document of the search."""

    best: Plan
    document: dict[str, Any]


def find(
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    fixed: Wishes,
    max_memory: str | None = None,
    top: int = 5,
    ranking: Ranking = "runnable_first",
) -> Finding:
    """Search, and describe the ``top`` fastest layouts that fit.

    A job that the runtime does not execute in any layout is ranked by time alone.

    Raises: NothingFitsError: with the reason of each rejected group, the nearest misses in its document.
        LayoutError: only what runs is asked for, and this job, model or degree does not.
    """
    limit = memory_limit(max_memory)
    given = columns_asked(model, job, fixed, ranking)
    if ranking != "runnable_only" and any(job_refusals(model, job)):
        ranking = "time"
    result = search(model, job, cluster, given, limit)
    if ranking == "runnable_only":
        result = _what_runs(model, job, result)
    check_fits(model, job, cluster, result, given, limit)
    if ranking == "time":
        result = replace(result, best=_by_time(result))
    rows = {row: _best_row(model, job, cluster, result, row) for row in _shown(result, ranking, top)}
    shown = _in_order(rows, by_time=ranking == "time")
    result = _with_simulated(result, shown)
    document = {"ranking": ranking, **_document(model, job, cluster, result, shown)}
    return Finding(plan_of(model, job, cluster, result.layout(int(result.best[0]))), document)


def _what_runs(model: ModelSpec, job: Job, result: SearchResult) -> SearchResult:
    """Without layouts of which each column runs and not all together.

    Raises: LayoutError: no others fit.
    """
    runs = result.runs(result.best)
    if runs.all():
        return result
    modelled = result.layout(int(result.best[np.argmin(runs)]))
    reasons = "; ".join(not_runnable_reasons(model, job, modelled))
    if not runs.any():
        raise LayoutError(f"only what runs is asked for, and nothing of it fits: {reasons}")
    count = result.feasible - result.feasible_runnable
    return replace(
        result,
        best=result.best[runs],
        feasible=result.feasible_runnable,
        rejected={**result.rejected, ONLY_MODELLED: count},
        notes={**result.notes, ONLY_MODELLED: f"fits and does not run: {reasons}"},
    )


def columns_asked(model: ModelSpec, job: Job, fixed: Wishes, ranking: Ranking) -> dict[str, Sequence[int]]:
    """Allowed values of the columns asked for, and of those that the runtime needs if only what runs is.

    Raises: LayoutError: what is asked for does not run.
    """
    given = {
        column: [value] if isinstance(value, int) else value
        for column, value in fixed.items()
        if value is not None
    }
    if ranking != "runnable_only":
        return given
    refused = list(job_refusals(model, job))
    if refused:
        raise LayoutError("only what runs is asked for: " + "; ".join(refused))
    both = {
        column: [value for value in runs if value in given.get(column, runs)]
        for column, runs in RUNNABLE_COLUMNS.items()
    }
    clashing = [f"{column}={choices(column, given[column])}" for column, values in both.items() if not values]
    if clashing:
        raise LayoutError(
            f"{', '.join(clashing)} is only modelled, and only what runs is asked for: leave one of them out"
        )
    return {**given, **both}


def memory_limit(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        limit = parse_quantity(text, BYTES)
    except ValueError as fault:
        raise JobError(f"--max-memory: {fault}") from None
    if limit <= 0:
        raise JobError(f"--max-memory={text!r} must be above 0")
    return limit


def _document(
    model: ModelSpec, job: Job, cluster: Cluster, result: SearchResult, shown: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "model": model.name,
        "considered": result.considered,
        "evaluated": result.evaluated,
        "pruned": result.pruned,
        "feasible": result.feasible,
        "feasible_runnable": 0 if any(job_refusals(model, job)) else result.feasible_runnable,
        "rejected": dict(result.rejected),
        "rejected_notes": rejection_notes(model, job, cluster, result),
        "search_time": result.search_time,
        "device_memory": result.limit,
        "assumed": list(_assumed(model, job, cluster, bool((result.rows(list(shown)).ep > 1).any()))),
        "not_runnable_reasons": not_runnable_reasons(model, job, result.layout(int(result.best[0]))),
        "best": list(shown.values()),
        "uncertainty": _uncertainty(job, cluster, list(shown.values())),
        "why": _why(result, result.limit),
        "pareto": pareto_rows(result),
    }


def _uncertainty(job: Job, cluster: Cluster, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whose residuals the intervals are, and which of the first rows, all run or all modelled, are tied."""
    interval = interval_of(job, cluster)
    alike = [row for row in rows if row["runnable"] == rows[0]["runnable"]]
    count = tied([row["step_time"] for row in alike])
    return {
        **interval._asdict(),
        "within_job": within_job(),
        "tied": count,
        "settled_by": settled_by(alike[0]["step_parts"], alike[1]["step_parts"]) if count > 1 else "",
    }


def _assumed(model: ModelSpec, job: Job, cluster: Cluster, experts_shared: bool) -> Iterator[str]:
    """What the numbers rest on: assumptions on model, cluster and experts, and what it means to fit."""
    yield from model.assumed
    yield f"precision={job.precision}"
    yield from cluster.assumed
    yield from links_words(cluster)
    if experts_shared and job.expert_capacity:
        yield f"expert_capacity={job.expert_capacity:g}: tokens beyond it are dropped"
    elif experts_shared:
        yield f"expert_imbalance={job.expert_imbalance:g}: tokens of the fullest rank of ep over the mean"
    yield (
        "a layout fits by allocated + context + communicators + allocator margin "
        f"({100 * cluster.device.allocator_margin:g} % of allocated, device file)"
    )


def _shown(result: SearchResult, ranking: Ranking, top: int) -> list[int]:
    """The ``top`` best rows; where those that run come first, these alone, and behind them as many that are
    faster but only modelled."""
    runs = result.runs(result.best)
    if ranking == "time" or not runs[0]:
        return _of_each_mesh(result, result.best, top)
    first = result.best[runs][:top].tolist()
    others = result.best[~runs]
    faster = others[result.time[others] < result.time[first[0]]]
    return [*first, *_of_each_mesh(result, faster[np.argsort(result.time[faster], kind="stable")], top)]


def _in_order(rows: Mapping[int, dict[str, Any]], by_time: bool) -> dict[int, dict[str, Any]]:
    """Rows to show by their simulated times; behind what runs, if it comes first, only what is faster."""
    places = sorted(
        rows, key=lambda row: (not (by_time or rows[row]["runnable"]), float(rows[row]["step_time"]))
    )
    first = rows[places[0]]
    return {
        row: rows[row]
        for row in places
        if by_time
        or rows[row]["runnable"] == first["runnable"]
        or rows[row]["step_time"] < first["step_time"]
    }


def _with_simulated(result: SearchResult, shown: Mapping[int, Mapping[str, Any]]) -> SearchResult:
    """The same with the times of the rows shown, and these first."""
    time, rows = result.time.copy(), list(shown)
    time[rows] = [row["step_time"] for row in shown.values()]
    others = result.best[~np.isin(result.best, rows)]
    kept = replace(result.kept, time=time)
    return replace(result, kept=kept, best=np.concatenate([np.array(rows, dtype=np.intp), others]))


def _by_time(result: SearchResult) -> NDArray[np.intp]:
    """The rows that fit, by time alone; of equal ones what runs, and what has no need of the host, first."""
    best = result.best
    table = result.rows(best)
    return best[np.lexsort((result.device[best], table.offload, ~result.runs(best), result.time[best]))]


def _of_each_mesh(result: SearchResult, ordered: NDArray[np.intp], top: int) -> list[int]:
    """``top`` of some rows, in their order: the first of each mesh, others where there are too few meshes.

    Rows that run are never passed over.
    """
    near = ordered[:MOST_ROWS_TO_CHOOSE_FROM]
    table = result.rows(near)
    meshes = np.stack([getattr(table, axis) for axis in MESH_ORDER], axis=1)
    first = np.unique(meshes, axis=0, return_index=True)[1]
    passed_over = ~(result.runs(near) | np.isin(np.arange(len(near)), first))
    chosen = np.sort(np.argsort(passed_over, kind="stable")[:top])
    picked: list[int] = near[chosen].tolist()
    return picked


def _best_row(model: ModelSpec, job: Job, cluster: Cluster, result: SearchResult, row: int) -> dict[str, Any]:
    """A row of the search as it stands in the document."""
    table, layout = result.rows([row]), result.layout(row)
    ledger = memory_ledger(model, job, cluster.device, table)
    step = simulated_step(model, job, cluster, [layout])
    interval = interval_of(job, cluster)
    return {
        "label": layout.label,
        "layout": layout.model_dump(mode="json"),
        "runnable": not not_runnable_reasons(model, job, layout),
        "memory": {
            "allocated": float(ledger.allocated[0]),
            "reserved": float(ledger.reserved[0]),
            "device": float(ledger.device[0]),
        },
        "step_time": float(step.time[0]),
        "step_time_low": float(step.time[0]) * interval.low,
        "step_time_high": float(step.time[0]) * interval.high,
        "step_parts": {
            "compute": float(step.compute.ravel()[0]),
            "bubble": float(step.bubble.ravel()[0]),
            "optimizer": float(step.optimizer.ravel()[0]),
            **{axis: float(np.ravel(time)[0]) for axis, time in step.exposed.items()},
        },
        "bubble_time": float(step.bubble[0]),
        "exposed_time": float(sum(values[0] for values in step.exposed.values())),
        "sent_bytes": float(sum(flow.sent_bytes[0] for flow in traffic(model, job, table))),
        "tokens_per_s_per_gpu": float(tokens_per_second_per_device(job, cluster, step.time)[0]),
        "mfu": float(mfu(model, job, cluster, step.time)[0]),
        **step_cost(job, cluster, float(step.time[0])),
    }


def step_cost(job: Job, cluster: Cluster, time: float) -> dict[str, float]:
    """What a step and 1e9 tokens cost on all devices, if a price is given."""
    if not cluster.price_per_device_hour:
        return {}
    cost = cluster.price_per_device_hour * cluster.ranks * time / HOUR
    return {"cost_per_step": cost, "cost_per_1e9_tokens": cost / job.tokens_per_step * 1e9}


def _why(result: SearchResult, limit: float) -> str:
    """One sentence on what decided between the best layout and what lies beside it."""
    first = int(result.best[0])
    sentence = (
        f"chosen: [{result.layout(first).label}], {format_time(float(result.time[first]))} a step with "
        f"{format_bytes(limit - float(result.device[first]))} of memory left"
    )
    other = next((row for row in result.best[1:].tolist() if _differs(result, first, row)), None)
    if other is not None:
        sentence += f"; the next of another kind, {_against(result, other, first)}"
    fastest = int(result.best[np.argmin(result.time[result.best])])
    if fastest not in (first, other) and result.time[fastest] < result.time[first]:
        sentence += f"; the fastest, {_against(result, fastest, first)} but only modelled"
    return sentence


def _against(result: SearchResult, row: int, first: int) -> str:
    change = float(result.time[row] / result.time[first]) - 1
    if abs(change) < 5e-4:
        return f"[{result.layout(row).label}], is as fast"
    slower = f"{abs(change):.1%} {'slower' if change >= 0 else 'faster'}"
    return f"[{result.layout(row).label}], is {slower}"


def _differs(result: SearchResult, first: int, other: int) -> bool:
    """Whether two rows differ in how they split or recompute, not in microbatch or stages alone."""
    return any(
        column[first] != column[other]
        for name, column in zip(result.table._fields, result.table, strict=True)
        if name not in ("micro_batch", "microbatches", "chunks", "ends")
    )
