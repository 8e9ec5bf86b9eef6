"""A sweep over the grids of a space: each is evaluated as far as it may have what fits and is not slow.

The promising grids come first, and what they reach puts others out. Time is worked out step by step, each a
better bound from below: of work shared evenly, of the busiest rank with what its schedule leaves idle, and,
for what is left when all that is sure not to fit is out, layout by layout; memory of what passes all. What is
only modelled is looked for by itself where it is much faster than what runs. Until something is known to fit,
layouts without offload and with the loss in one part are evaluated alone: offload and parts of the loss save
memory and never time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Cluster
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.cells import FIRST_CELLS, Cells, layouts_of_cells, lined_up, shape_of_cells
from shardwright.plan.collectives import Route
from shardwright.plan.evaluate import (
    Timed,
    at_their_pace,
    evaluate,
    least,
    memory_alone,
    of_least_memory,
    of_microbatches,
    whole_step,
    with_shares,
)
from shardwright.plan.placement import shared_routes
from shardwright.plan.room import least_room
from shardwright.plan.runnable import RUNNABLE_COLUMNS, some_run
from shardwright.plan.space import BATCH, EXPERTS, INNER, MEMORY, PIPE, Grid, search_space
from shardwright.plan.table import Floats
from shardwright.plan.tally import Tally

SLOWEST = 1.15
"""Layouts that take so many times the best's step are passed over."""

FEW_MESHES = 4
"""Meshes of a grid among which the nearest miss is looked for first."""

FAR = 1.05
"""Times the fastest step that the fastest which runs takes, from which on each is looked for by itself."""

PIECE_CELLS = 330_000
"""Cells of a piece of a grid at most: its largest columns then take some megabytes."""

FEW_CELLS, TRIED_CELLS = 4096, 512
"""Cells of a grid up to which it is tried whole as long as nothing is known to fit, the fastest that may fit
by themselves first; in larger ones the layouts of least memory say where some fit."""

FEW_PIECES = 16
"""Pieces of all grids whose times are kept at once at most."""

PIECE_TIMES = 1_000_000
"""Times of a microbatch of a piece at most, which with experts lie along the data axes too."""


def plain_grids(model: ModelSpec, job: Job, ranks: int) -> Iterator[Grid]:
    """The space of a job without offload and with the loss whole, in pieces."""
    for grid in search_space(model, job, ranks).grids:
        for piece in _pieces(grid):
            plain, _ = _plain_and_other(piece)
            if len(plain):
                yield piece.along(MEMORY, plain)


def _plain_and_other(grid: Grid) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Places along MEMORY without offload and with the loss whole, and the others."""
    plain = ((grid.table.offload == 0) & (grid.table.loss_chunks == 1)).reshape(-1)
    return np.flatnonzero(plain), np.flatnonzero(~plain)


def evaluate_all(model: ModelSpec, job: Job, cluster: Cluster, grids: Sequence[Grid], tally: Tally) -> None:
    """Evaluate all grids, the promising first. As long as nothing is known to fit, of each the plain layouts
    alone, and what is left when there is something to beat."""
    pieces = [piece for grid in grids for piece in _pieces(grid)]
    routes = shared_routes(cluster, [grid.table for grid in pieces]) if pieces else []
    every = list(zip(pieces, routes, strict=True))
    waiting: list[Timed] = []
    first: Timed | None = None
    for grid in _in_order(model, job, cluster, every):  # what the first reach puts others out
        first = first or grid
        plain, other = _plain_and_other(grid.grid)
        if not tally.exhaustive and _to_beat(grid.grid, tally) == np.inf and len(plain) and len(other):
            waiting.append(grid.at({MEMORY: other}))
            grid = grid.at({MEMORY: plain})
        _evaluate(model, job, cluster, grid, tally)
    for grid in sorted(waiting, key=_promise):
        _evaluate(model, job, cluster, grid, tally)
    if first is not None and tally.too_large and tally.nearest == np.inf:  # all that was evaluated fits
        _look_for_misses(model, job, cluster, with_shares(model, job, cluster, first), tally)


def _in_order(
    model: ModelSpec, job: Job, cluster: Cluster, every: Sequence[tuple[Grid, Mapping[str, Route]]]
) -> Iterator[Timed]:
    """Grids with the routes of their axes, timed, the most promising first. Many are timed twice, their plain
    layouts to know their order, so that times of all do not lie about."""
    if len(every) <= FEW_PIECES:
        yield from sorted((least(model, job, cluster, *each) for each in every), key=_promise)
        return
    promises = [_promise(least(model, job, cluster, _plain(grid), ways, alone=True)) for grid, ways in every]
    for n in sorted(range(len(every)), key=promises.__getitem__):
        yield least(model, job, cluster, *every[n])


def _plain(grid: Grid) -> Grid:
    """Its plain layouts, all if it has none."""
    plain, _ = _plain_and_other(grid)
    return grid.along(MEMORY, plain) if len(plain) else grid


def _with_room(
    model: ModelSpec, job: Job, cluster: Cluster, grid: Timed, tally: Tally, below: float
) -> Iterator[tuple[Timed, Cells]]:
    """What of a grid may fit and take less than ``below`` seconds, as cells, the fastest first; what cannot
    fit is counted as too large."""
    assert grid.ranks is not None
    room = least_room(model, job, cluster.device, grid.grid.table, grid.ranks)
    fits, layouts = room.whole <= tally.limit, layouts_of_cells(grid.grid)
    tally.add_too_large(int(layouts.sum(where=~fits)))
    there = np.broadcast_to(fits & (grid.inside < below), layouts.shape)
    for cells in lined_up(grid, there, grid.inside, FIRST_CELLS if below < np.inf else TRIED_CELLS):
        some = cells.timed
        here, away = map(cells.line.part, room.resting)
        valid = some.grid.valid & (np.where(some.grid.table.offload & 1, away, here) <= tally.limit)
        fitting = some.grid._replace(valid=valid)
        tally.add_too_large(some.grid.ordered_rows - fitting.ordered_rows)
        yield some._replace(grid=fitting, outside=np.where(valid, some.outside, np.inf)), cells


def _where_some_fit(model: ModelSpec, job: Job, cluster: Cluster, grid: Timed, tally: Tally) -> Timed | None:
    """The part of a grid where layouts of the least memory fit; the others are counted as too large."""
    least = of_least_memory(grid)
    left: Timed | None = grid
    if _room_of(model, job, cluster, least).min() > tally.limit:  # none does
        left = None
        _look_for_misses(model, job, cluster, grid, tally)
    else:
        found = memory_alone(model, job, cluster, least)
        fits = found.device <= tally.limit
        for axis in range(BATCH):
            others = tuple(other for other in range(fits.ndim) if other != axis)
            keep = np.flatnonzero(fits.any(axis=others))
            if len(keep) == 0:
                left = None
                break
            if len(keep) < fits.shape[axis]:
                left = left.at({axis: keep}) if left is not None else None
        tally.add_misses_of_least(found)
    tally.add_too_large(grid.grid.ordered_rows - (left.grid.ordered_rows if left else 0))
    return left


def _room_of(model: ModelSpec, job: Job, cluster: Cluster, grid: Timed) -> Floats:
    """What layouts of a grid take of a device at least."""
    assert grid.ranks is not None
    return least_room(model, job, cluster.device, grid.grid.table, grid.ranks).whole


def _look_for_misses(model: ModelSpec, job: Job, cluster: Cluster, grid: Timed, tally: Tally) -> None:
    """The nearest miss of a grid in which nothing fits, and the farthest among the meshes that hold least
    and most, by what layouts take at least."""
    grid = of_least_memory(grid)
    room = _room_of(model, job, cluster, grid)
    others = tuple(axis for axis in range(room.ndim) if axis != INNER)
    lowest, highest = (
        np.broadcast_to(f(axis=others), grid.grid.table.shape[INNER]) for f in (room.min, room.max)
    )
    meshes = np.argsort(lowest, kind="stable")
    some = np.unique([*meshes[:FEW_MESHES], np.argmax(highest)])
    if lowest.min() < tally.nearest or highest.max() > tally.farthest:
        tally.add_misses_of_least(memory_alone(model, job, cluster, grid.at({INNER: some})))
    more = np.setdiff1d(np.flatnonzero(lowest < tally.nearest), some)
    if len(more):
        tally.add_misses_of_least(memory_alone(model, job, cluster, grid.at({INNER: more})))


def _promise(grid: Timed) -> tuple[bool, float]:
    """Sorts grids by what they may reach: those without a pipeline first, for which it is no mere hope. Of
    the others ranks are idle about as long as their first microbatch takes to come through."""
    table = grid.grid.table
    idle = (table.pp - 1) / (table.microbatches * table.chunks)
    return bool((table.pp > 1).any()), float((grid.inside * (1 + idle)).min())


def _evaluate(model: ModelSpec, job: Job, cluster: Cluster, grid: Timed, tally: Tally) -> None:
    """Evaluate what takes less than ``SLOWEST`` times the best's step."""
    for part in _by_running(grid, tally):
        _evaluate_part(model, job, cluster, part, tally)


def _by_running(grid: Timed, tally: Tally) -> Iterator[Timed]:
    """A grid without layouts that are only modelled, and these by themselves, where the fastest of them is
    much faster than what runs: there is less to look at of those that must be as fast."""
    if tally.exhaustive or tally.fastest[True] <= FAR * min(tally.fastest.values()):
        yield grid
        return
    for axis, column in ((EXPERTS, "dispatch"), (PIPE, "schedule")):
        runs = np.isin(getattr(grid.grid.table, column), RUNNABLE_COLUMNS[column]).reshape(-1)
        if not runs.any():
            break
        if not runs.all():
            yield grid.at({axis: np.flatnonzero(~runs)})
            grid = grid.at({axis: np.flatnonzero(runs)})
    yield grid


def _evaluate_part(model: ModelSpec, job: Job, cluster: Cluster, grid: Timed, tally: Tally) -> None:
    below = SLOWEST * _to_beat(grid.grid, tally)
    left = grid.pruned(below)
    few = not tally.exhaustive and (below < np.inf or prod(shape_of_cells(grid.grid)) <= FEW_CELLS)
    if left is not None and few:
        left = at_their_pace(model, left).pruned(below)
    if left is None:
        return
    left = with_shares(model, job, cluster, left)
    pieces: Iterable[tuple[Timed | None, Cells | None]]
    if tally.exhaustive:
        pieces = [(left, None)]
    elif not few:
        pieces = [(_where_some_fit(model, job, cluster, left, tally), None)]
    else:
        pieces = _with_room(model, job, cluster, left, tally, below)
    for piece, cells in pieces:
        below = SLOWEST * _to_beat(grid.grid, tally)
        piece = of_microbatches(model, job, piece).pruned(below) if piece is not None else None
        piece = cells.with_data(piece) if piece is not None and cells is not None else piece
        piece = whole_step(model, job, cluster, piece).pruned(below) if piece is not None else None
        piece = cells.with_ranks(piece) if piece is not None and cells is not None else piece
        if piece is not None:
            for part in evaluate(model, job, cluster, piece, below):
                tally.add(part)
    if few and _to_beat(grid.grid, tally) == np.inf:
        _look_for_misses(model, job, cluster, left, tally)


def _pieces(grid: Grid) -> Iterator[Grid]:
    """A grid in pieces of not too many layouts."""
    shape = grid.table.shape
    count, cells, times = shape[INNER], prod(shape_of_cells(grid)), grid.table.rows // shape[PIPE]
    pieces = max(-(-cells // PIECE_CELLS), -(-times // PIECE_TIMES) if shape[EXPERTS] > 1 else 1)
    for index in np.array_split(np.arange(count), min(pieces, count)):
        yield grid.along(INNER, index)


def _to_beat(grid: Grid, tally: Tally) -> float:
    """The step that a layout of the grid must be faster than to matter."""
    if tally.exhaustive:
        return float(np.inf)
    if some_run(grid.table, tally.job):
        return tally.fastest[True]
    return min(tally.fastest.values())
