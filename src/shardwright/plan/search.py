"""Search: every layout of a job, infeasible ones counted with a reason, the rest ranked.

Layouts come as grids (plan/space.py). plan/sweep.py evaluates of them what is not much slower than the best
and may fit; here the fastest are simulated, ranked and counted.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Cluster
from shardwright.errors import NothingFitsError
from shardwright.job import Job
from shardwright.layout import Layout, batches_that_work
from shardwright.model import ModelSpec
from shardwright.plan.columns import choices
from shardwright.plan.memory import Ledger, memory_ledger
from shardwright.plan.pipeline import simulated_times
from shardwright.plan.runnable import runnable_rows
from shardwright.plan.space import Grid, Space, search_space
from shardwright.plan.sweep import evaluate_all
from shardwright.plan.table import Floats, LayoutTable
from shardwright.plan.tally import Kept, Tally, joined
from shardwright.units import format_bytes

REASONS = ("fewer_samples_than_ranks", "global_batch", "constraint", "schedule", "out_of_memory")
"""Why a layout is out; the first that applies counts."""

FEWER_SAMPLES, GLOBAL_BATCH, CONSTRAINT, SCHEDULE, MEMORY_REASON = REASONS

KEEP = 10_000
"""Layouts kept of those that fit, the fastest."""

FINALISTS = 32
"""Layouts whose pipelines are simulated at a time: the closed forms that rank all are of equal stages."""

FREED_BYTES = 2**25 - 2**16
"""The largest array that glibc's malloc may learn to keep when it is freed; more goes back at once."""

FRONT = 8
"""Fastest layouts of which all pipelines are simulated in the end, but for ``ROUNDS``."""

ROUNDS = 6
"""Times that layouts are simulated at most."""


@dataclass(frozen=True)
class SearchResult:
    """Counts of the whole space, and the layouts worth a look.

    ``best`` indexes those of ``kept`` that fit: runnable ones first, then by time. ``pruned`` layouts are
    slower than the best and were not evaluated. ``misses`` are the nearest and the farthest of what does not
    fit; where others fit, of what was looked at.
    """

    kept: Kept
    job: Job
    layers: int
    considered: int
    evaluated: int
    pruned: int
    feasible: int
    feasible_runnable: int
    rejected: Mapping[str, int]
    best: NDArray[np.intp]
    misses: Kept
    limit: float
    search_time: float
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def table(self) -> LayoutTable:
        """Of the kept layouts."""
        return self.kept.table

    @property
    def device(self) -> Floats:
        """Of the kept layouts."""
        return self.kept.device

    @property
    def time(self) -> Floats:
        """Of the kept layouts."""
        return self.kept.time

    def rows(self, rows: Sequence[int] | NDArray[np.intp]) -> LayoutTable:
        """The table of some kept layouts."""
        return self.table.take(np.asarray(rows, dtype=np.intp))

    def runs(self, rows: Sequence[int] | NDArray[np.intp]) -> NDArray[np.bool_]:
        """Whether the runtime executes them, of some kept layouts."""
        return runnable_rows(self.rows(rows), self.job)

    def layout(self, row: int) -> Layout:
        """One kept layout."""
        return self.table.layout(row, self.layers)


def search(
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    fixed: Mapping[str, Sequence[int]] | None = None,
    max_memory: float | None = None,
    *,
    keep: int = KEEP,
    exhaustive: bool = False,
) -> SearchResult:
    """Evaluate memory and time of every layout that keeps the job's batch and the user's wishes.

    ``fixed``: allowed values of columns of the table. ``max_memory``: bytes of a device to use at most.
    ``exhaustive`` evaluates what cannot be faster too, and keeps all, what does not fit among them.
    """
    start = time.perf_counter()
    _keep_what_is_freed()
    space = search_space(model, job, cluster.ranks, fixed)
    limit = min(cluster.device.memory, max_memory or np.inf)
    tally = Tally(job, keep, exhaustive, limit)
    grids, wanted = _wanted(job, space, fixed or {})
    unordered = sum(grid.rows - grid.ordered_rows for grid in grids)
    evaluate_all(model, job, cluster, grids, tally)
    pruned = wanted - unordered - tally.evaluated - tally.too_large
    kept = tally.kept()
    best = _ranked(kept, limit, job)
    if not exhaustive:
        kept = _finals(model, job, cluster, kept, limit)
        best = _ranked(kept, limit, job)
    counts = {
        FEWER_SAMPLES: sum(dp > job.global_batch for dp in space.unshared),
        GLOBAL_BATCH: sum(dp <= job.global_batch for dp in space.unshared),
        CONSTRAINT: sum(grid.rows for grid in space.grids) - wanted,
        SCHEDULE: unordered,
        MEMORY_REASON: tally.out_of_memory,
    }
    rejected = {name: count for name, count in counts.items() if count}
    notes = _notes(job, cluster, space, rejected) | _constraint_note(space, rejected, fixed or {}, wanted)
    return SearchResult(
        kept=kept, job=job, layers=model.layers, considered=space.rows, evaluated=tally.evaluated,
        pruned=pruned, feasible=tally.feasible, feasible_runnable=tally.feasible_runnable,
        rejected=rejected, best=best,
        misses=joined(tally.misses), limit=limit, search_time=time.perf_counter() - start, notes=notes,
    )  # fmt: skip


def _keep_what_is_freed() -> None:
    """Have malloc keep the memory of freed columns for the next ones: with what comes from the system anew,
    page by page, a search takes a tenth longer. One array that is never touched teaches it (mallopt(3),
    M_MMAP_THRESHOLD)."""
    np.empty(FREED_BYTES, dtype=np.uint8)


def _ranked(kept: Kept, limit: float, job: Job) -> NDArray[np.intp]:
    """What fits: runnable first, then by time, by memory, and the order of the mesh that is usual."""
    fitting = np.flatnonzero(kept.device <= limit)
    table = kept.table.take(fitting)
    keys = (table.order, kept.device[fitting], kept.time[fitting], ~runnable_rows(table, job))
    return fitting[np.lexsort(keys)]


def _finals(model: ModelSpec, job: Job, cluster: Cluster, kept: Kept, limit: float) -> Kept:
    """The same with the pipelines of the fastest simulated action by action, of those that run and of all;
    again for those that come to the front thereby."""
    time, known = kept.time.copy(), kept.table.pp == 1
    for _ in range(ROUNDS):
        best = _ranked(Kept(kept.table, kept.device, time), limit, job)
        runs = runnable_rows(kept.table.take(best), job)
        fastest = best[np.argsort(time[best], kind="stable")]
        front = np.concatenate([best[runs][:FRONT], fastest[:FRONT]])
        if known[front].all():
            break
        unknown = fastest[~known[fastest]][:FINALISTS]
        layouts = [kept.table.layout(int(row), model.layers) for row in unknown]
        time[unknown] = simulated_times(model, job, cluster, layouts)
        known[unknown] = True
    return Kept(kept.table, kept.device, time)


def _wanted(job: Job, space: Space, fixed: Mapping[str, Sequence[int]]) -> tuple[list[Grid], int]:
    """The grids with what the user has fixed, and how many layouts they have."""
    grids = []
    for grid in space.grids:
        part: Grid | None = grid
        for column, allowed in fixed.items():
            part = part.restricted(column, allowed) if part is not None else None
        if part is not None and part.rows:
            grids.append(part)
    return grids, sum(grid.rows for grid in grids)


def rejection_notes(model: ModelSpec, job: Job, cluster: Cluster, result: SearchResult) -> dict[str, str]:
    """One sentence for each reason that put layouts out, with the way out."""
    notes = dict(result.notes)
    if MEMORY_REASON in result.rejected:
        notes[MEMORY_REASON] = _memory_note(model, job, cluster, result)
    return notes


def check_found(model: ModelSpec, job: Job, cluster: Cluster, result: SearchResult) -> None:
    """Raises: NothingFitsError: no row is left, with the reason of each group and the nearest miss."""
    if len(result.best) == 0:
        rejected, notes = result.rejected, rejection_notes(model, job, cluster, result)
        reasons = "; ".join(f"{name} ({rejected[name]:,}): {note}" for name, note in notes.items())
        raise NothingFitsError(f"no layout works, of {result.considered:,} considered: {reasons}")


def _notes(job: Job, cluster: Cluster, space: Space, rejected: Mapping[str, int]) -> dict[str, str]:
    """One sentence for each reason of the batch that put layouts out, with the way out."""
    notes = {}
    if FEWER_SAMPLES in rejected:
        least = min([*space.unshared, *(int(grid.table.dp.min()) for grid in space.grids)])
        notes[FEWER_SAMPLES] = (
            f"data ranks, each with a sequence of its own, outnumber global_batch={job.global_batch}; of "
            f"{cluster.ranks} ranks at least {least} hold data: use at most {job.global_batch} data ranks or "
            "a larger global batch"
        )
    if GLOBAL_BATCH in rejected:
        near = " or ".join(str(batch) for batch in batches_that_work(cluster.ranks, 1, job.global_batch))
        notes[GLOBAL_BATCH] = (
            f"the data ranks do not divide global_batch={job.global_batch}: {cluster.ranks} of them "
            f"reach {near}"
        )
    if SCHEDULE in rejected:
        notes[SCHEDULE] = "the schedule has no order for that many microbatches, stages or chunks"
    return notes


def _constraint_note(
    space: Space, rejected: Mapping[str, int], fixed: Mapping[str, Sequence[int]], wanted: int
) -> dict[str, str]:
    """What was asked for, where layouts are out for it; and the values there are, where they have none."""
    if CONSTRAINT not in rejected:
        return {}
    parts = []
    for column, allowed in fixed.items():
        there = sorted({int(n) for grid in space.grids for n in np.unique(getattr(grid.table, column))})
        asked = f"{column}={choices(column, allowed)}"
        known = bool(set(there) & set(allowed))
        parts.append(
            f"{asked} was asked for" if known else f"no row has {asked}: use {choices(column, there)}"
        )
    if not wanted and all("was asked" in part for part in parts):
        parts.append("no row has all of these at once: leave one free")
    return {CONSTRAINT: "; ".join(parts)}


def _memory_note(model: ModelSpec, job: Job, cluster: Cluster, result: SearchResult) -> str:
    """How far the layouts that do not fit are from fitting: the nearest, and, where none fits, the farthest;
    where others fit, the search has not looked at all that do not."""
    sentences, count = [], len(result.misses.time)
    for row in range(min(count, 1) if len(result.best) else count):
        one = result.misses.table.take(np.array([row]))
        ledger = memory_ledger(model, job, cluster.device, one)
        sentences.append(describe_miss(one.layout(0, model.layers), ledger, 0, result.limit))
    sides = zip(("nearest", "farthest"), sentences, strict=False)
    more = f"more than {format_bytes(result.limit)} a device"
    return "; ".join([more, *(f"{side} {miss}" for side, miss in sides)])


def largest_term(ledger: Ledger, row: int) -> tuple[str, float]:
    """The term that takes most of a device at its peak, and its bytes."""
    terms = {
        "parameters": ledger.parameters[row],
        "optimizer": ledger.optimizer[row],
        **{name: values[row] for name, values in ledger.at_peak._asdict().items()},
    }
    largest = max(terms, key=lambda name: float(terms[name]))
    return largest, float(terms[largest])


def describe_miss(layout: Layout, ledger: Ledger, row: int, limit: float) -> str:
    """A layout that does not fit: what it needs, how much too much, and its largest term."""
    largest, size = largest_term(ledger, row)
    needs = float(ledger.device[row])
    if needs <= limit:
        return f"[{layout.label}] fits the device, and offloads more than its share of the host holds"
    return (
        f"[{layout.label}] needs {format_bytes(needs)}, {format_bytes(needs - limit)} too much, "
        f"{format_bytes(size)} of it {largest}"
    )
