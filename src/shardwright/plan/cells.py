"""The few combinations of a grid that matter, as a grid where they lie one after another.

What is left of a grid is whole places of its axes, and most combinations of these do not matter: too slow,
or sure not to fit. Those that do lie along its first axis here; the order of the mesh and the data axes, of
which little of memory depends, stay axes.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.plan.evaluate import Timed, at_places, every_place
from shardwright.plan.space import DATA, GRID_AXES, ORDER, Grid
from shardwright.plan.table import ColumnMap, Floats

CELL = tuple(axis for axis in range(GRID_AXES) if axis not in (ORDER, DATA))
"""Axes of which a combination is one cell."""

FIRST_CELLS, MORE_CELLS = 16_384, 65_536
"""Cells of a grid lined up at once: what the first reach puts others out; columns of more take some tens of
megabytes."""


def shape_of_cells(grid: Grid) -> tuple[int, ...]:
    """The grid's, with one place on the axes of which all places belong to the same cell."""
    return tuple(1 if axis in (ORDER, DATA) else n for axis, n in enumerate(grid.table.shape))


def layouts_of_cells(grid: Grid) -> NDArray[np.int64]:
    """Layouts of each cell."""
    shape = shape_of_cells(grid)
    spread = grid.table.rows // int(np.prod(shape)) // (grid.valid.shape[ORDER] * grid.valid.shape[DATA])
    meshes = spread * np.count_nonzero(grid.valid, axis=(ORDER, DATA), keepdims=True)
    return np.broadcast_to(meshes * (grid.shared & grid.ordered), shape)


class Cells:
    """Some cells of a grid along its first axis. What is not needed at once is lined up later, for those that
    are left."""

    def __init__(self, grid: Timed, places: tuple[NDArray[np.intp], ...]) -> None:
        self.grid, self.line = grid, _Line(places, shape_of_cells(grid.grid))

    @property
    def timed(self) -> Timed:
        """With what times of microbatches depend on, which are to be worked out."""
        routes, none = {"pp": self.grid.routes["pp"]}, np.zeros((1,) * GRID_AXES)
        parts = self.grid.parts.folded
        light = self.grid._replace(inside=none, routes=routes, parts=parts, ranks=None, data=None)
        cells = light.mapped(self.line.part)
        return cells._replace(places=every_place(cells.grid))

    def with_data(self, some: Timed) -> Timed:
        """``some`` of the cells with what the data axes' times depend on."""
        part = self._of(some)
        routes = {name: route.mapped(part) for name, route in self.grid.routes.items()}
        data = self.grid.data.mapped(part) if self.grid.data else None
        return some._replace(routes=routes, parts=self.grid.parts.mapped(part), data=data)

    def with_ranks(self, some: Timed) -> Timed:
        """``some`` of the cells with what memory depends on."""
        return some._replace(ranks=self.grid.ranks.mapped(self._of(some)) if self.grid.ranks else None)

    def _of(self, some: Timed) -> ColumnMap:
        line = self.line.at(some.places[0])
        others = {axis: some.places[axis] for axis in (ORDER, DATA)}
        return lambda column: at_places(line.part(column), others)


def lined_up(
    grid: Timed, there: NDArray[np.bool_], floor: Floats, first: int = FIRST_CELLS
) -> Iterator[Cells]:
    """The cells that are ``there``, some at a time, ``first`` so many of the lowest ``floor``."""
    places = np.nonzero(there)
    at = tuple(place if n > 1 else 0 for place, n in zip(places, floor.shape, strict=True))
    order = np.argsort(np.broadcast_to(floor[at], len(places[0])), kind="stable")
    stops = [0, *range(first, len(order), MORE_CELLS), len(order)]
    for start, stop in pairwise(stops if len(order) else ()):
        some = order[start:stop]
        yield Cells(grid, tuple(place[some] for place in places))


class _Line:
    """Takes the cells of columns. ``places``: of the cells, along every axis."""

    def __init__(self, places: tuple[NDArray[np.intp], ...], shape: tuple[int, ...]) -> None:
        self.places, self.shape = places, shape
        self.known: dict[tuple[int, ...], NDArray[np.intp]] = {}

    def at(self, some: NDArray[np.intp]) -> "_Line":
        """The same of some of the cells."""
        return _Line(tuple(place[some] for place in self.places), self.shape)

    def part(self, column: NDArray[Any]) -> NDArray[Any]:
        """A column at the cells, along the first axis of its grid; one that is the same in all as it is."""
        before = column.ndim - GRID_AXES
        varies = tuple(axis for axis in CELL if before >= 0 and column.shape[before + axis] > 1)
        if not varies:
            return column
        leading, ends = column.shape[:before], (column.shape[before + ORDER], column.shape[before + DATA])
        others = (axis for axis in CELL if axis not in varies)
        axes = (*range(before), *(before + axis for axis in (*varies, ORDER, DATA, *others)))
        lined = column.transpose(axes).reshape(*leading, -1, *ends)
        cells = lined.take(self._index(varies), axis=before)
        return np.asarray(cells.reshape(*leading, len(self.places[0]), 1, *ends, 1, 1, 1))

    def _index(self, varies: tuple[int, ...]) -> NDArray[np.intp]:
        """Of each cell, its place among the combinations of some axes."""
        if varies not in self.known:
            index = np.zeros(len(self.places[0]), dtype=np.intp)
            for axis in varies:
                index = index * self.shape[axis] + self.places[axis]
            self.known[varies] = index
        return self.known[varies]
