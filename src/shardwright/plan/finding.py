"""From a job to the answer of ``shardwright plan``: the best layouts as a document, the best as a Plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.cluster import Cluster
from shardwright.errors import JobError, ModelError
from shardwright.job import Job
from shardwright.layout import not_runnable_reasons
from shardwright.model import BUILT_TYPES, ModelSpec
from shardwright.plan.explain import plan_of
from shardwright.plan.memory import memory_ledger
from shardwright.plan.search import SearchResult, check_found, search
from shardwright.plan.step import mfu, step_time, tokens_per_second_per_device
from shardwright.planfile import Plan
from shardwright.units import BYTES, format_bytes, format_time, parse_quantity


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
) -> Finding:
    """Search, and describe the ``top`` fastest layouts that fit.

    ``fixed``: columns of the table that the user has given; None leaves one free.

    Raises: NothingFitsError: with the reason of each rejected group and the nearest miss.
        ModelError: the planner knows the model's parameters only.
    """
    check_modelled(model)
    limit = _memory_limit(max_memory)
    given = {column: [value] for column, value in fixed.items() if value is not None}
    result = search(model, job, cluster, given, limit)
    check_found(result)
    best = plan_of(model, job, cluster, result.layout(int(result.best[0])))
    return Finding(
        best, _document(model, job, cluster, result, min(cluster.device.memory, limit or float("inf")), top)
    )


def check_modelled(model: ModelSpec) -> None:
    """Raises: ModelError: memory and time of the model's family are not modelled."""
    if model.model_type not in BUILT_TYPES:
        raise ModelError(
            f"model {model.name}: parameters are known, memory and time of model_type={model.model_type!r} "
            f"are not modelled yet: `shardwright params` counts it, plan one of {', '.join(BUILT_TYPES)}"
        )


def _memory_limit(text: str | None) -> float | None:
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
    model: ModelSpec, job: Job, cluster: Cluster, result: SearchResult, limit: float, top: int
) -> dict[str, Any]:
    shown = _shown(result, top)
    reasons = not_runnable_reasons(model, job, result.layout(int(result.best[0])))
    return {
        "model": model.name,
        "considered": result.table.rows,
        "evaluated": len(result.rows),
        "feasible": len(result.best),
        "rejected": result.rejected,
        "rejected_notes": dict(result.notes),
        "search_time": result.search_time,
        "device_memory": limit,
        "assumed": [f"precision={job.precision}", *cluster.assumed],
        "not_runnable_reasons": reasons,
        "best": [_best_row(model, job, cluster, result, row) for row in shown],
        "why": _why(result, limit),
    }


def _shown(result: SearchResult, top: int) -> list[int]:
    """The ``top`` best rows; where they run and faster ones are only modelled, as many of those behind."""
    shown: list[int] = result.best[:top].tolist()
    slowest = max(float(result.time[row]) for row in shown)
    later = [row for row in result.best[top:].tolist() if result.time[row] < slowest]
    by_time = sorted(later, key=lambda row: float(result.time[row]))
    return shown + by_time[:top]


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
        change = float(result.time[other] / result.time[first]) - 1
        slower = f"{abs(change):.1%} {'slower' if change >= 0 else 'faster'}"
        sentence += f"; the next of another kind, [{result.layout(other).label}], is {slower}"
    return sentence


def _differs(result: SearchResult, first: int, other: int) -> bool:
    """Whether two rows differ in how they split or recompute, not in the microbatch alone."""
    one, two = result.rows[first], result.rows[other]
    return any(
        column[one] != column[two]
        for name, column in zip(result.table._fields, result.table, strict=True)
        if name not in ("micro_batch", "microbatches")
    )
