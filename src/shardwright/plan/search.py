"""Search: every layout of a job as one table, infeasible rows masked with a reason, the rest ranked."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Cluster
from shardwright.errors import NothingFitsError
from shardwright.job import Job
from shardwright.layout import RECOMPUTE_KINDS, Layout, batches_that_work
from shardwright.model import ModelSpec
from shardwright.plan.memory import Ledger, memory_ledger
from shardwright.plan.step import StepTime, step_time
from shardwright.plan.table import LayoutTable
from shardwright.units import format_bytes

FITS, FEWER_SAMPLES, GLOBAL_BATCH, CONSTRAINT, MEMORY = range(5)
REASONS = ("fits", "fewer_samples_than_ranks", "global_batch", "constraint", "out_of_memory")
"""Why a row is out, by code; the first that applies counts."""


@dataclass(frozen=True)
class SearchResult:
    """The table, the reason of every row, and the evaluated rows.

    ``rows`` maps the evaluated rows back to the table; ``ledger`` and ``step`` have one entry for each of
    them, and ``best`` indexes these, fastest first.
    """

    table: LayoutTable
    reason: NDArray[np.int64]
    evaluated: LayoutTable
    rows: NDArray[np.intp]
    ledger: Ledger
    step: StepTime
    best: NDArray[np.intp]
    search_time: float
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def rejected(self) -> dict[str, int]:
        """Rows by the reason they are out."""
        counts = np.bincount(self.reason, minlength=len(REASONS))
        return {REASONS[code]: int(n) for code, n in enumerate(counts) if n and code != FITS}


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def search_space(job: Job, ranks: int) -> LayoutTable:
    """Every layout of ``ranks`` data ranks: degrees, ZeRO stage, microbatch and recomputation.

    Where the ranks cannot share the global batch, the rows stand with a microbatch of 1, to be counted.
    """
    share = job.global_batch // ranks if job.global_batch % ranks == 0 else 0
    micro_batches = divisors(share) if share else [1]
    rows = [
        (ranks // shard, shard, stage, b, max(share // b, 1), kind)
        for shard in divisors(ranks)
        for stage in ((1, 2, 3) if shard > 1 else (0,))
        for b in micro_batches
        for kind in range(len(RECOMPUTE_KINDS))
    ]
    return LayoutTable(*np.array(rows, dtype=np.int64).T)


def search(
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    fixed: Mapping[str, Sequence[int]] | None = None,
    max_memory: float | None = None,
) -> SearchResult:
    """Evaluate memory and time of every layout that keeps the job's batch and the user's wishes.

    ``fixed``: allowed values of columns of the table. ``max_memory``: bytes of a device to use at most.
    """
    start = time.perf_counter()
    table = search_space(job, cluster.ranks)
    reason = np.full(table.rows, FITS, dtype=np.int64)
    _mask(reason, table.dp > job.global_batch, FEWER_SAMPLES)
    reaches = table.dp * table.micro_batch * table.microbatches == job.global_batch
    _mask(reason, ~reaches, GLOBAL_BATCH)
    for column, allowed in (fixed or {}).items():
        _mask(reason, ~np.isin(getattr(table, column), list(allowed)), CONSTRAINT)
    rows = np.flatnonzero(reason == FITS)
    evaluated = table.take(rows)
    ledger = memory_ledger(model, job, cluster.device, evaluated)
    step = step_time(model, job, cluster, evaluated)
    limit = min(cluster.device.memory, max_memory or np.inf)
    too_large = ledger.device > limit
    reason[rows[too_large]] = MEMORY
    order = np.lexsort((ledger.device, step.time))
    best = order[~too_large[order]]
    return SearchResult(
        table, reason, evaluated, rows, ledger, step, best, time.perf_counter() - start,
        notes=_notes(job, cluster, reason, evaluated, ledger, limit)
        | _constraint_note(table, reason, fixed or {}),
    )  # fmt: skip


def check_found(result: SearchResult) -> None:
    """Raises: NothingFitsError: no row is left, with the reason of each group and the nearest miss."""
    if len(result.best) == 0:
        rejected = result.rejected
        reasons = "; ".join(f"{name} ({rejected[name]:,}): {note}" for name, note in result.notes.items())
        raise NothingFitsError(f"no layout works, of {result.table.rows:,} considered: {reasons}")


def _mask(reason: NDArray[np.int64], out: NDArray[np.bool_], code: int) -> None:
    reason[out & (reason == FITS)] = code


def _notes(
    job: Job,
    cluster: Cluster,
    reason: NDArray[np.int64],
    evaluated: LayoutTable,
    ledger: Ledger,
    limit: float,
) -> dict[str, str]:
    """One sentence for each reason that put rows out, with the way out."""
    present = set(np.unique(reason).tolist())
    notes = {}
    if FEWER_SAMPLES in present:
        notes[REASONS[FEWER_SAMPLES]] = (
            f"{cluster.ranks} ranks each need a sequence but global_batch={job.global_batch}: "
            f"use at most {job.global_batch} ranks or a global batch of at least {cluster.ranks}"
        )
    if GLOBAL_BATCH in present:
        near = " or ".join(str(batch) for batch in batches_that_work(cluster.ranks, 1, job.global_batch))
        notes[REASONS[GLOBAL_BATCH]] = (
            f"{cluster.ranks} ranks do not divide global_batch={job.global_batch}: use {near}"
        )
    if MEMORY in present:
        notes[REASONS[MEMORY]] = _memory_note(evaluated, ledger, limit)
    return notes


def _constraint_note(
    table: LayoutTable, reason: NDArray[np.int64], fixed: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """What was asked for, where rows are out for it; and the values there are, where they have none of it."""
    if not (reason == CONSTRAINT).any():
        return {}
    parts = []
    for column, allowed in fixed.items():
        there = np.unique(getattr(table, column)).tolist()
        asked = f"{column}={_choices(column, allowed)}"
        known = bool(set(there) & set(allowed))
        parts.append(
            f"{asked} was asked for" if known else f"no row has {asked}: use {_choices(column, there)}"
        )
    if not (reason != CONSTRAINT).any() and all("was asked" in part for part in parts):
        parts.append("no row has all of these at once: leave one free")
    return {REASONS[CONSTRAINT]: "; ".join(parts)}


def _choices(column: str, values: Sequence[int]) -> str:
    return " or ".join(RECOMPUTE_KINDS[v] if column == "recompute" else str(v) for v in values)


def _memory_note(evaluated: LayoutTable, ledger: Ledger, limit: float) -> str:
    """How far the layouts that do not fit are from fitting: the nearest and the farthest."""
    device = ledger.device
    out = np.flatnonzero(device > limit)
    near, far = out[np.argmin(device[out])], out[np.argmax(device[out])]
    note = (
        f"more than {format_bytes(limit)} a device; nearest {describe_miss(evaluated, ledger, near, limit)}"
    )
    return note if near == far else f"{note}; farthest {describe_miss(evaluated, ledger, far, limit)}"


def describe_miss(evaluated: LayoutTable, ledger: Ledger, row: int, limit: float) -> str:
    """A layout that does not fit: what it needs, how much too much, and its largest term."""
    layout: Layout = evaluated.layout(int(row))
    terms = {
        "parameters": ledger.parameters[row],
        "optimizer": ledger.optimizer[row],
        **{name: values[row] for name, values in ledger.at_peak._asdict().items()},
    }
    largest = max(terms, key=lambda name: float(terms[name]))
    needs = float(ledger.device[row])
    return (
        f"[{layout.label}] needs {format_bytes(needs)}, {format_bytes(needs - limit)} too much, "
        f"{format_bytes(float(terms[largest]))} of it {largest}"
    )
