"""From a job to the answer of ``shardwright plan``: the best layouts as a document, the best as a Plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.axes import MESH_ORDER
from shardwright.cluster import Cluster
from shardwright.description import nearest
from shardwright.errors import JobError, LayoutError
from shardwright.job import Job
from shardwright.layout import (
    CONTEXT_KINDS,
    RECOMPUTE_KINDS,
    SCHEDULE_NAMES,
    Layout,
    check_runnable,
    not_runnable_reasons,
)
from shardwright.model import ModelSpec
from shardwright.plan.explain import check_modelled, plan_of
from shardwright.plan.memory import memory_ledger
from shardwright.plan.search import SearchResult, check_found, runnable_rows, search
from shardwright.plan.step import mfu, step_time, tokens_per_second_per_device
from shardwright.plan.traffic import traffic
from shardwright.planfile import Plan
from shardwright.units import BYTES, format_bytes, format_time, parse_quantity

Ranking = Literal["runnable_first", "runnable_only", "time"]
"""Of what fits: what the runtime executes before what is only modelled, alone, or all as one; by time."""

NAMED_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "schedule": SCHEDULE_NAMES,
    "cp_kind": CONTEXT_KINDS,
    "recompute": RECOMPUTE_KINDS,
}
"""Columns of the table that hold an index of these names."""

MOST_ROWS_TO_CHOOSE_FROM = 10_000
"""Of those that are ranked, among which those to show are looked for."""

RUNNABLE_DEGREES = {"pp": 1, "cp": 1, "tp": 1}
"""Columns of the layouts that the runtime executes; search.py:runnable_rows is the mask of it."""


@dataclass(frozen=True)
class Finding:
    """The best plan, and the JSON document of the search."""

    best: Plan
    document: dict[str, Any]


def find(
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    fixed: Mapping[str, int | None],
    max_memory: str | None = None,
    top: int = 5,
    ranking: Ranking = "runnable_first",
) -> Finding:
    """Search, and describe the ``top`` fastest layouts that fit.

    ``fixed``: columns of the table that the user has given; None leaves one free. A job that the runtime
    does not execute in any layout is ranked by time alone.

    Raises: NothingFitsError: with the reason of each rejected group and the nearest miss.
        ModelError: the planner knows the model's parameters only. LayoutError: only what runs is asked for,
        and this job, model or degree does not.
    """
    check_modelled(model)
    limit = memory_limit(max_memory)
    given = {column: value for column, value in fixed.items() if value is not None}
    if ranking == "runnable_only":
        given = _runnable(model, job, given)
    elif not_runnable_reasons(model, job, Layout()):
        ranking = "time"
    result = search(model, job, cluster, {column: [value] for column, value in given.items()}, limit)
    check_found(result)
    if ranking == "time":
        best = result.best
        result = replace(result, best=best[np.lexsort((result.device[best], result.time[best]))])
    most = min(cluster.device.memory, limit or float("inf"))
    document = {
        "ranking": ranking,
        **_document(model, job, cluster, result, most, _shown(result, ranking, top)),
    }
    return Finding(plan_of(model, job, cluster, result.layout(int(result.best[0]))), document)


def column_code(column: str, name: str, subject: str) -> int:
    """What stands in a column of the table for a name; capitals and hyphens do not matter.

    Raises: LayoutError: no such name.
    """
    known = NAMED_COLUMNS[column]
    folded = {each.casefold().replace("-", "_"): code for code, each in enumerate(known)}
    code = folded.get(name.casefold().replace("-", "_"))
    if code is None:
        raise LayoutError(f"{subject}={name!r} is unknown{nearest(name, known)}")
    return code


def _runnable(model: ModelSpec, job: Job, given: Mapping[str, int]) -> dict[str, int]:
    """Columns asked for, and those that the runtime needs."""
    check_runnable(model, job, Layout())
    clashing = [
        f"{axis}={given[axis]}" for axis, one in RUNNABLE_DEGREES.items() if given.get(axis, one) != one
    ]
    if clashing:
        raise LayoutError(
            f"{', '.join(clashing)} is only modelled, and only what runs is asked for: leave one of them out"
        )
    return {**given, **RUNNABLE_DEGREES}


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
    model: ModelSpec, job: Job, cluster: Cluster, result: SearchResult, limit: float, shown: Sequence[int]
) -> dict[str, Any]:
    job_reasons = not_runnable_reasons(model, job, Layout())
    return {
        "model": model.name,
        "considered": result.table.rows,
        "evaluated": len(result.rows),
        "feasible": len(result.best),
        "feasible_runnable": 0 if job_reasons else int(_runs(result, result.best).sum()),
        "rejected": result.rejected,
        "rejected_notes": dict(result.notes),
        "search_time": result.search_time,
        "device_memory": limit,
        "assumed": [f"precision={job.precision}", *cluster.assumed],
        "not_runnable_reasons": not_runnable_reasons(model, job, result.layout(int(result.best[0]))),
        "best": [_best_row(model, job, cluster, result, row) for row in shown],
        "why": _why(result, limit),
    }


def _shown(result: SearchResult, ranking: Ranking, top: int) -> list[int]:
    """The ``top`` best rows; where those that run come first, these alone, and behind them as many that are
    faster but only modelled."""
    runs = _runs(result, result.best)
    if ranking == "time" or not runs[0]:
        return _of_each_mesh(result, result.best, top)
    first = result.best[runs][:top].tolist()
    others = result.best[~runs]
    faster = others[result.time[others] < result.time[first[0]]]
    return [*first, *_of_each_mesh(result, faster[np.argsort(result.time[faster], kind="stable")], top)]


def _runs(result: SearchResult, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    return runnable_rows(result.table.take(result.rows[rows]))


def _of_each_mesh(result: SearchResult, ordered: NDArray[np.intp], top: int) -> list[int]:
    """``top`` of some rows, in their order: the first of each mesh, others where there are too few meshes.

    Rows that run are never passed over.
    """
    near = ordered[:MOST_ROWS_TO_CHOOSE_FROM]
    table = result.table.take(result.rows[near])
    meshes = np.stack([getattr(table, axis) for axis in MESH_ORDER], axis=1)
    first = np.unique(meshes, axis=0, return_index=True)[1]
    passed_over = ~(runnable_rows(table) | np.isin(np.arange(len(near)), first))
    chosen = np.sort(np.argsort(passed_over, kind="stable")[:top])
    picked: list[int] = near[chosen].tolist()
    return picked


def _best_row(model: ModelSpec, job: Job, cluster: Cluster, result: SearchResult, row: int) -> dict[str, Any]:
    table, layout = result.evaluated([row]), result.layout(row)
    ledger = memory_ledger(model, job, cluster.device, table)
    step = step_time(model, job, cluster, table)
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
        "bubble_time": float(step.bubble[0]),
        "exposed_time": float(sum(values[0] for values in step.exposed.values())),
        "sent_bytes": float(sum(flow.sent_bytes[0] for flow in traffic(model, job, table))),
        "tokens_per_s_per_gpu": float(tokens_per_second_per_device(job, cluster, step.time)[0]),
        "mfu": float(mfu(model, job, cluster, step.time)[0]),
    }


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
    one, two = result.rows[first], result.rows[other]
    return any(
        column[one] != column[two]
        for name, column in zip(result.table._fields, result.table, strict=True)
        if name not in ("micro_batch", "microbatches", "chunks", "ends")
    )
