"""From a job to the answer of ``shardwright plan``: the best layouts as a document, the best as a Plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.cluster import Cluster
from shardwright.errors import JobError
from shardwright.job import Job
from shardwright.layout import not_runnable_reasons
from shardwright.model import ModelSpec
from shardwright.plan.explain import plan_of
from shardwright.plan.search import SearchResult, check_found, search
from shardwright.plan.step import mfu, tokens_per_second_per_device
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
    """
    limit = _memory_limit(max_memory)
    given = {column: [value] for column, value in fixed.items() if value is not None}
    result = search(model, job, cluster, given, limit)
    check_found(result)
    best = plan_of(model, job, cluster, result.evaluated.layout(int(result.best[0])))
    return Finding(
        best, _document(model, job, cluster, result, min(cluster.device.memory, limit or float("inf")), top)
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
    time = result.step.time
    rates = tokens_per_second_per_device(job, cluster, time)
    utilisation = mfu(model, job, cluster, time)
    reasons = not_runnable_reasons(model, job)
    best = []
    for row in result.best[:top].tolist():
        layout = result.evaluated.layout(row)
        best.append(
            {
                "label": layout.label,
                "layout": layout.model_dump(mode="json"),
                "runnable": not reasons,
                "memory": {
                    "allocated": float(result.ledger.allocated[row]),
                    "reserved": float(result.ledger.reserved[row]),
                    "device": float(result.ledger.device[row]),
                },
                "step_time": float(time[row]),
                "exposed_time": float(sum(values[row] for values in result.step.exposed.values())),
                "tokens_per_s_per_gpu": float(rates[row]),
                "mfu": float(utilisation[row]),
            }
        )
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
        "best": best,
        "why": _why(result, limit),
    }


def _why(result: SearchResult, limit: float) -> str:
    """One sentence on what decided between the best layout and what lies beside it."""
    first = int(result.best[0])
    layout = result.evaluated.layout(first)
    sentence = (
        f"chosen: [{layout.label}], {format_time(float(result.step.time[first]))} a step with "
        f"{format_bytes(limit - float(result.ledger.device[first]))} of memory left"
    )
    other = next((row for row in result.best[1:].tolist() if _differs(result, first, row)), None)
    if other is not None:
        slower = float(result.step.time[other] / result.step.time[first]) - 1
        beside = result.evaluated.layout(other)
        sentence += f"; the next of another kind, [{beside.label}], is {slower:.1%} slower"
    return sentence


def _differs(result: SearchResult, first: int, other: int) -> bool:
    """Whether two rows differ in how they split or recompute, not in the microbatch alone."""
    table = result.evaluated
    columns = (table.dp_replicate, table.dp_shard, table.zero_stage, table.recompute)
    return any(column[first] != column[other] for column in columns)
