"""What a search keeps of the layouts it evaluates: counts, the fastest, the fastest of every mesh, misses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Job
from shardwright.plan.evaluate import Evaluated
from shardwright.plan.memory import NO_ROOM
from shardwright.plan.runnable import runnable_rows
from shardwright.plan.table import Floats, LayoutTable


@dataclass(frozen=True)
class Kept:
    """Evaluated layouts that were kept, a row each: bytes of a device and seconds of a step."""

    table: LayoutTable
    device: Floats
    time: Floats

    def take(self, index: NDArray[np.intp]) -> "Kept":
        """Some rows."""
        return Kept(self.table.take(index), self.device[index], self.time[index])


class Tally:
    """What a search has seen so far."""

    def __init__(self, job: Job, keep: int, exhaustive: bool, limit: float) -> None:
        self.job = job
        self.keep, self.exhaustive, self.limit = keep, exhaustive, limit
        self.evaluated = self.feasible = self.feasible_runnable = self.out_of_memory = 0
        self.too_large = 0  # of those out of memory, the ones whose time was not worked out
        self.fastest = {True: np.inf, False: np.inf}  # step of what fits, by whether it runs
        self.cutoff = {True: np.inf, False: np.inf}
        self.pools: dict[bool, list[Kept]] = {True: [], False: []}
        self.nearest, self.farthest = np.inf, -np.inf
        self.misses = [nothing_kept(), nothing_kept()]

    def add(self, part: Evaluated) -> None:
        """Take in evaluated layouts."""
        grid, device, seconds = part
        rows = grid.ordered_rows
        fits = device <= self.limit
        feasible = int(np.count_nonzero(fits)) - (device.size - rows)  # what is no layout needs nothing
        self.evaluated += rows
        self.feasible += feasible
        self.out_of_memory += rows - feasible
        if rows > feasible:
            self._add_misses(part, fits)
        if self.exhaustive:
            layouts = np.flatnonzero(seconds < np.inf)
            runs = runnable_rows(grid.table.take(layouts), self.job)
            for runnable in (True, False):
                self.pools[runnable].append(kept_rows(part, layouts[runs == runnable]))
        if feasible:
            self._add_feasible(part, np.where(fits, seconds, np.inf))

    def add_too_large(self, rows: int) -> None:
        """Count ``rows`` layouts that cannot fit."""
        self.too_large += rows
        self.out_of_memory += rows

    def add_misses_of_least(self, part: Evaluated) -> None:
        """Look for the nearest miss among layouts of which no other of their kind takes less memory."""
        real = part._replace(device=np.where(part.grid.layouts, part.device, np.inf))
        if not (real.device <= self.limit).all():
            self._add_misses(real, real.device <= self.limit)

    def _add_feasible(self, part: Evaluated, ranked: Floats) -> None:
        runs = runnable_rows(part.grid.table, self.job)
        for runnable in (True, False):
            mine = runs == runnable
            if mine.any():
                masked = ranked if mine.all() else np.where(mine, ranked, np.inf)
                if runnable:
                    self.feasible_runnable += int(np.count_nonzero(masked < np.inf))
                fastest = float(masked.min())
                self.fastest[runnable] = min(self.fastest[runnable], fastest)
                if not self.exhaustive and fastest < self.cutoff[runnable]:
                    self._add_fastest(runnable, part, masked)

    def _add_fastest(self, runnable: bool, part: Evaluated, ranked: Floats) -> None:
        pool = self.pools[runnable]
        near = np.flatnonzero(ranked < self.cutoff[runnable])
        if len(near) > self.keep:
            near = near[np.argpartition(ranked.reshape(-1)[near], self.keep)[: self.keep]]
        pool.append(kept_rows(part, near))
        if sum(len(kept.time) for kept in pool) > 2 * self.keep:
            whole = joined(pool)
            order = np.argpartition(whole.time, self.keep)[: self.keep]
            self.cutoff[runnable] = float(whole.time[order].max())
            pool[:] = [whole.take(order)]

    def _add_misses(self, part: Evaluated, fits: NDArray[np.bool_]) -> None:
        """The nearest and the farthest of what does not fit."""
        near = np.where(fits, np.inf, part.device)
        far = np.where(fits | (part.device >= NO_ROOM), -np.inf, part.device)
        nearest, farthest = int(np.argmin(near)), int(np.argmax(far))
        if near.flat[nearest] < self.nearest:
            self.nearest = float(near.flat[nearest])
            self.misses[0] = kept_rows(part, np.array([nearest]))
        if far.flat[farthest] > self.farthest:
            self.farthest = float(far.flat[farthest])
            self.misses[1] = kept_rows(part, np.array([farthest]))

    def kept(self) -> Kept:
        """Every kept layout."""
        parts = [part for pool in self.pools.values() for part in pool]
        if not parts:
            return nothing_kept()
        return joined(parts)


def nothing_kept() -> Kept:
    """No rows."""
    none = np.zeros(0)
    return Kept(LayoutTable(*(np.zeros(0, np.int64) for _ in LayoutTable._fields)), none, none)


def kept_rows(part: Evaluated, rows: NDArray[np.intp]) -> Kept:
    """Some layouts of a piece of a grid, by their place in its flat order."""
    return Kept(part.grid.table.take(rows), part.device.reshape(-1)[rows], part.seconds.reshape(-1)[rows])


def joined(parts: Sequence[Kept]) -> Kept:
    """All rows of several."""
    columns = zip(*(part.table for part in parts), strict=True)
    table = LayoutTable(*(np.concatenate(column) for column in columns))
    return Kept(
        table, np.concatenate([part.device for part in parts]), np.concatenate([part.time for part in parts])
    )
