"""Memory and time of a grid: each term at its own small shape, sums of them block by block.

A term depends on few axes of a grid, so that nearly all the work is on small arrays; only the last sums are
as large as the grid, and these are made in blocks that stay in the caches.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Cluster
from shardwright.job import Job
from shardwright.layout import RECOMPUTE_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.collectives import Route
from shardwright.plan.data_axes import DataTimes, data_times
from shardwright.plan.memory import RankStates, beside_allocated, highest, rank_states, reserved_terms
from shardwright.plan.moments import PeakTerm
from shardwright.plan.parts import Parts, part_times
from shardwright.plan.placement import routes_of
from shardwright.plan.space import BATCH, GRID_AXES, INNER, MEMORY, PIPE, Grid
from shardwright.plan.step import idle_time, least_inside, least_time, outside_time, pace_of
from shardwright.plan.table import ColumnMap, Floats, added, part_along
from shardwright.plan.uneven import may_be_unlike

BLOCK_ROWS = 65_536
"""Layouts summed at once: above it arrays fall out of the caches, below it numpy's calls dominate."""

FEW_ROWS = 1024
"""Layouts below which they are not parted: numpy's calls take longer than the sums."""


class Evaluated(NamedTuple):
    """A piece of a grid with memory of a device [B] and time of a step [s].

    A combination that is no layout has memory of minus infinity and takes for ever.
    """

    grid: Grid
    device: Floats
    seconds: Floats


class Timed(NamedTuple):
    """A grid with the seconds of a step as a sum: what all microbatches take, or less until it is worked out,
    and what the data axes and the optimizer add, 0 until then. Infinite where there is no layout."""

    grid: Grid
    inside: Floats
    outside: Floats
    routes: Mapping[str, Route]
    parts: Parts
    places: tuple[NDArray[np.intp], ...]  # along every axis, of the grid it is what is left of
    ranks: RankStates | None = None  # worked out once memory is asked for
    data: DataTimes | None = None  # likewise

    def floors(self) -> list[Floats]:
        """The fastest step at each place of every axis, or less."""
        pairs = zip(_floors(self.inside), _floors(self.outside), strict=True)
        return [inside + outside for inside, outside in pairs]

    def at(self, places: Mapping[int, NDArray[np.intp]]) -> "Timed":
        """The part that some places of some axes make up."""
        kept = tuple(mine[places[axis]] if axis in places else mine for axis, mine in enumerate(self.places))
        return self.mapped(lambda column: at_places(column, places))._replace(places=kept)

    def mapped(self, part: ColumnMap) -> "Timed":
        """The same with ``part`` of every column; ``places`` as they are."""
        return Timed(
            self.grid.mapped(part),
            part(self.inside),
            part(self.outside),
            {name: route.mapped(part) for name, route in self.routes.items()},
            self.parts.mapped(part),
            self.places,
            None if self.ranks is None else self.ranks.mapped(part),
            None if self.data is None else self.data.mapped(part),
        )

    def pruned(self, below: float) -> "Timed | None":
        """Without places of an axis at which every step takes ``below`` and longer; None: none is left."""
        kept = {}
        for axis, floor in enumerate(self.floors()):
            keep = np.flatnonzero(floor < below)
            if len(keep) == 0:
                return None
            if len(keep) < len(floor):
                kept[axis] = keep
        return self.at(kept) if kept else self


def at_places(column: NDArray[Any], places: Mapping[int, NDArray[np.intp]]) -> NDArray[Any]:
    """The part of a column that some places of some axes of a grid make up."""
    for axis, index in places.items():
        column = part_along(column, axis - GRID_AXES, index)  # ranks of a pipeline lie along an axis before
    return column


def least(
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    grid: Grid,
    routes: Mapping[str, Route] | None = None,
    *,
    alone: bool = False,
) -> Timed:
    """A grid with what every layout takes at least; ``routes`` of all its axes if they are at hand.
    ``alone``: nothing else will be asked of it."""
    routes = routes or routes_of(cluster, grid.table)
    parts = part_times(model, job, cluster, grid.table, routes, again=not alone)
    time = least_time(model, grid.table, parts)
    outside = np.where(grid.valid, 0.0, np.inf)
    return Timed(grid, time, outside, routes, parts, every_place(grid))


def every_place(grid: Grid) -> tuple[NDArray[np.intp], ...]:
    """Of a whole grid, its places along every axis."""
    return tuple(np.arange(n) for n in grid.table.shape)


def at_their_pace(model: ModelSpec, grid: Timed) -> Timed:
    """The same with what all microbatches take at least, for the split of each pipeline."""
    return grid._replace(inside=least_inside(model, grid.grid.table, grid.parts))


def with_shares(model: ModelSpec, job: Job, cluster: Cluster, grid: Timed) -> Timed:
    """The same with what of memory and time depends on how the model is shared out alone."""
    ranks = grid.ranks or rank_states(model, job, cluster.device, grid.grid.table)
    data = grid.data or data_times(model, job, grid.grid.table, grid.routes)
    return grid._replace(ranks=ranks, data=data)


def of_microbatches(model: ModelSpec, job: Job, grid: Timed) -> Timed:
    """The same with what all microbatches take, in the schedule of each layout."""
    table = grid.grid.table
    pace = pace_of(model, table, grid.parts)
    there = np.where(grid.grid.shared & grid.grid.ordered, 0.0, np.inf)
    idle = idle_time(model, job, table, grid.routes, pace)
    return grid._replace(inside=added(there, table.microbatches * pace.busy, idle))


def whole_step(model: ModelSpec, job: Job, cluster: Cluster, grid: Timed) -> Timed:
    """The same with what the data axes and the optimizer add; without what only times depend on."""
    outside = outside_time(model, job, cluster, grid.grid.table, grid.routes, grid.parts, grid.data)
    time = added(grid.outside, *outside.exposed.values(), outside.copies, outside.update)
    return grid._replace(outside=time, routes={}, data=None)


def evaluate(
    model: ModelSpec, job: Job, cluster: Cluster, timed: Timed, below: float = np.inf
) -> Iterator[Evaluated]:
    """Memory of every layout of a grid beside its time, piece by piece; pieces without a step of less than
    ``below`` seconds are left out."""
    ranks = timed.ranks or rank_states(model, job, cluster.device, timed.grid.table)
    for part in _by_likeness(timed._replace(ranks=ranks)):
        yield from _evaluate(model, job, cluster, part, below)


def _by_likeness(timed: Timed) -> Iterator[Timed]:
    """A grid in two where ranks of some of its pipelines may have unlike stages (plan/uneven.py), which take
    many more sums."""
    assert timed.ranks is not None
    unlike = may_be_unlike(timed.grid.table, timed.ranks.stage).any(axis=0)
    axes = [axis for axis, places in enumerate(unlike.shape) if places > 1]
    there = unlike.ravel()
    if len(axes) != 1 or there.all() or not there.any() or timed.grid.table.rows < FEW_ROWS:
        yield timed
        return
    yield timed.at({axes[0]: np.flatnonzero(~there)})
    yield timed.at({axes[0]: np.flatnonzero(there)})


def _evaluate(
    model: ModelSpec, job: Job, cluster: Cluster, timed: Timed, below: float
) -> Iterator[Evaluated]:
    grid, ranks = timed.grid, timed.ranks
    assert ranks is not None
    shape = grid.table.shape
    terms = reserved_terms(model, job, cluster.device, grid.table, ranks)
    besides = beside_allocated(model, job, cluster.device, grid.table, ranks)
    beside = [np.where(grid.valid, besides, -np.inf)]
    if not (grid.shared & grid.ordered).all():
        beside.append(np.where(grid.shared & grid.ordered, 0.0, -np.inf))
    scale = 1 + cluster.device.allocator_margin
    for axis, index in _blocks(shape):
        seconds = part_along(timed.inside, axis, index) + part_along(timed.outside, axis, index)
        if seconds.min() >= below:
            continue
        block = grid.along(axis, index)
        cut = [PeakTerm(*(part_along(part, axis, index) for part in term)) for term in terms]
        device = highest(cut, block.table.shape)
        device *= scale
        for part in beside:
            device += part_along(part, axis, index)
        yield Evaluated(block, device, np.broadcast_to(seconds, device.shape))


def of_least_memory(timed: Timed) -> Timed:
    """The layouts of the smallest microbatch, or of one alone, which adds no gradients up, and of full
    recomputation: what does not fit among them fits with no other microbatch or recomputation either."""
    table = timed.grid.table
    full = (table.recompute == RECOMPUTE_KINDS.index("full")) & (table.recompute_every == 1)
    kept = np.flatnonzero(full) if full.any() else np.arange(table.shape[MEMORY])
    axes = tuple(axis for axis in range(table.microbatches.ndim) if axis != BATCH)
    least = (table.microbatches == 1).any(axis=axes)
    least[0] = True
    return timed.at({MEMORY: kept, BATCH: np.flatnonzero(least)})


def memory_alone(model: ModelSpec, job: Job, cluster: Cluster, timed: Timed) -> Evaluated:
    """Memory of every layout of a grid; their time is not worked out."""
    grid, ranks = timed.grid, timed.ranks
    device = highest(reserved_terms(model, job, cluster.device, grid.table, ranks), grid.table.shape)
    device *= 1 + cluster.device.allocator_margin
    device += beside_allocated(model, job, cluster.device, grid.table, ranks)
    device = np.where(grid.valid, device, np.inf)
    return Evaluated(grid, device, np.broadcast_to(np.inf, device.shape))


def _floors(part: Floats) -> list[Floats]:
    """The least value at each place of every axis, each a column.

    By halves of the axes: the whole array is only gone through twice.
    """
    floors: dict[int, Floats] = {}

    def leastpart_along(values: Floats, axes: tuple[int, ...]) -> None:
        if len(axes) <= 1:
            floors.update(dict.fromkeys(axes, values.reshape(-1)))
            return
        half = len(axes) // 2
        leastpart_along(values.min(axis=axes[half:], keepdims=True), axes[:half])
        leastpart_along(values.min(axis=axes[:half], keepdims=True), axes[half:])

    leastpart_along(part, tuple(axis for axis, places in enumerate(part.shape) if places > 1))
    least = next(iter(floors.values()), part).min(keepdims=True).reshape(1)
    return [floors.get(axis, least) for axis in range(part.ndim)]


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """Slices of the axis that cuts a grid into blocks best."""
    pieces = -(-int(np.prod(shape)) // BLOCK_ROWS)
    axis = next((axis for axis in (INNER, PIPE, BATCH) if shape[axis] >= pieces), int(np.argmax(shape)))
    size = max(shape[axis] // pieces, 1)
    for first in range(0, shape[axis], size):
        yield axis, slice(first, min(first + size, shape[axis]))
