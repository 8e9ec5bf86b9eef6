"""Search: every layout of a job as one table, infeasible rows masked with a reason, the rest ranked."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Cluster
from shardwright.errors import NothingFitsError
from shardwright.job import Job
from shardwright.layout import CONTEXT_KINDS, RECOMPUTE_KINDS, SCHEDULE_NAMES, Layout, batches_that_work
from shardwright.model import ModelSpec
from shardwright.plan.memory import Ledger, device_memory, memory_ledger
from shardwright.plan.schedule import order_fault
from shardwright.plan.space import search_space
from shardwright.plan.step import step_time
from shardwright.plan.table import Floats, LayoutTable
from shardwright.units import format_bytes

FITS, FEWER_SAMPLES, GLOBAL_BATCH, CONSTRAINT, SCHEDULE, MEMORY = range(6)
REASONS = ("fits", "fewer_samples_than_ranks", "global_batch", "constraint", "schedule", "out_of_memory")
"""Why a row is out, by code; the first that applies counts."""


CHUNK_ROWS = 16_384
"""Rows evaluated at once: above it columns fall out of the caches, below it numpy's calls dominate."""


@dataclass(frozen=True)
class SearchResult:
    """The table, the reason of every row, and the evaluated rows.

    ``rows`` maps the evaluated rows back to the table; ``device`` (bytes of a device) and ``time`` (s of a
    step) have one entry for each of them, and ``best`` indexes these: runnable rows first, then by time.
    """

    table: LayoutTable
    layers: int
    reason: NDArray[np.int64]
    rows: NDArray[np.intp]
    device: Floats
    time: Floats
    best: NDArray[np.intp]
    search_time: float
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def rejected(self) -> dict[str, int]:
        """Rows by the reason they are out."""
        counts = np.bincount(self.reason, minlength=len(REASONS))
        return {REASONS[code]: int(n) for code, n in enumerate(counts) if n and code != FITS}

    def evaluated(self, rows: Sequence[int] | NDArray[np.intp]) -> LayoutTable:
        """The table of some evaluated rows."""
        return self.table.take(self.rows[np.asarray(rows, dtype=np.intp)]).wide()

    def layout(self, row: int) -> Layout:
        """One evaluated row."""
        return self.table.layout(int(self.rows[row]), self.layers)


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
    table = search_space(model, job, cluster.ranks)
    reason = _reasons(job, table, fixed or {})
    rows = np.flatnonzero(reason == FITS)
    device, seconds = np.empty(len(rows)), np.empty(len(rows))
    for first in range(0, len(rows), CHUNK_ROWS):
        part = slice(first, first + CHUNK_ROWS)
        chunk = table.take(rows[part]).wide()
        device[part] = device_memory(model, job, cluster.device, chunk)
        seconds[part] = step_time(model, job, cluster, chunk).time
    limit = min(cluster.device.memory, max_memory or np.inf)
    too_large = device > limit
    reason[rows[too_large]] = MEMORY
    fitting = np.flatnonzero(~too_large)
    modelled = ~runnable_rows(table.take(rows[fitting]))
    best = fitting[np.lexsort((device[fitting], seconds[fitting], modelled))]
    notes = _notes(job, cluster, table, reason) | _constraint_note(table, reason, fixed or {})
    result = SearchResult(table, model.layers, reason, rows, device, seconds, best, 0.0, notes)
    if too_large.any():
        notes[REASONS[MEMORY]] = _memory_note(model, job, cluster, result, limit)
    return replace(result, search_time=time.perf_counter() - start)


def _reasons(job: Job, table: LayoutTable, fixed: Mapping[str, Sequence[int]]) -> NDArray[np.int64]:
    """Why each row is out before anything is evaluated; FITS where it is not."""
    reason = np.full(table.rows, FITS, dtype=np.int64)
    _mask(reason, table.dp > job.global_batch, FEWER_SAMPLES)
    reaches = table.dp * table.micro_batch * table.microbatches == job.global_batch
    _mask(reason, ~reaches, GLOBAL_BATCH)
    for column, allowed in fixed.items():
        _mask(reason, ~np.isin(getattr(table, column), list(allowed)), CONSTRAINT)
    piped = reason == FITS
    piped[piped] = table.pp[piped] > 1
    for code in np.unique(table.schedule[piped]):
        mine = piped & (table.schedule == code)
        part = table.take(mine)
        out = order_fault(SCHEDULE_NAMES[code], part.pp, part.chunks, part.microbatches) > 0
        reason[np.flatnonzero(mine)[out]] = SCHEDULE
    return reason


def runnable_rows(table: LayoutTable) -> NDArray[np.bool_]:
    """Rows that the runtime can execute, as far as the layout decides it."""
    return np.asarray((table.pp == 1) & (table.cp == 1) & (table.tp == 1))


def check_found(result: SearchResult) -> None:
    """Raises: NothingFitsError: no row is left, with the reason of each group and the nearest miss."""
    if len(result.best) == 0:
        rejected = result.rejected
        reasons = "; ".join(f"{name} ({rejected[name]:,}): {note}" for name, note in result.notes.items())
        raise NothingFitsError(f"no layout works, of {result.table.rows:,} considered: {reasons}")


def _mask(reason: NDArray[np.int64], out: NDArray[np.bool_], code: int) -> None:
    reason[out & (reason == FITS)] = code


def _notes(job: Job, cluster: Cluster, table: LayoutTable, reason: NDArray[np.int64]) -> dict[str, str]:
    """One sentence for each reason of the batch that put rows out, with the way out."""
    present = set(np.unique(reason).tolist())
    notes = {}
    least = int(table.dp.min())
    if FEWER_SAMPLES in present:
        notes[REASONS[FEWER_SAMPLES]] = (
            f"data ranks, each with a sequence of its own, outnumber global_batch={job.global_batch}; meshes "
            "of "
            f"{cluster.ranks} ranks have {least} and more of them: use at most {job.global_batch} data ranks "
            "or a larger global batch"
        )
    if GLOBAL_BATCH in present:
        near = " or ".join(str(batch) for batch in batches_that_work(cluster.ranks, 1, job.global_batch))
        notes[REASONS[GLOBAL_BATCH]] = (
            f"the data ranks do not divide global_batch={job.global_batch}: {cluster.ranks} of them "
            f"reach {near}"
        )
    if SCHEDULE in present:
        notes[REASONS[SCHEDULE]] = "the schedule has no order for that many microbatches, stages or chunks"
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
    names = {"recompute": RECOMPUTE_KINDS, "schedule": SCHEDULE_NAMES, "cp_kind": CONTEXT_KINDS}.get(column)
    return " or ".join(names[value] if names else str(value) for value in values)


def _memory_note(model: ModelSpec, job: Job, cluster: Cluster, result: SearchResult, limit: float) -> str:
    """How far the layouts that do not fit are from fitting: the nearest and the farthest."""
    out = np.flatnonzero(result.device > limit)
    ends = dict.fromkeys([int(out[np.argmin(result.device[out])]), int(out[np.argmax(result.device[out])])])
    misses = []
    for row in ends:
        ledger = memory_ledger(model, job, cluster.device, result.evaluated([row]))
        misses.append(describe_miss(result.layout(row), ledger, 0, limit))
    sides = zip(("nearest", "farthest"), misses, strict=False)
    return f"more than {format_bytes(limit)} a device; " + "; ".join(f"{side} {miss}" for side, miss in sides)


def describe_miss(layout: Layout, ledger: Ledger, row: int, limit: float) -> str:
    """A layout that does not fit: what it needs, how much too much, and its largest term."""
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
