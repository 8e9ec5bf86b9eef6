"""A table of layouts as a struct of arrays: one layout is a row, and every formula takes columns."""

from collections.abc import Callable, Sequence
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.axes import EXPERT_AXES, MESH_ORDER, MESH_ORDERS
from shardwright.layout import (
    CONTEXT_KINDS,
    DISPATCH_KINDS,
    KEPT_BY_SELECTIVE,
    OFFLOAD_KINDS,
    RECOMPUTE_KINDS,
    SCHEDULE_NAMES,
    Layout,
)
from shardwright.plan.splits import ends_of, stage_layers

Number = TypeVar("Number", bound=np.generic)
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


SIZE = attrgetter("size")

ColumnMap = Callable[[NDArray[Any]], Any]
"""Makes another column of one: a part of it, say."""

PLAIN_COLUMNS = (
    "chunks", "zero_stage", "micro_batch", "microbatches", "recompute_every", "loss_chunks",
)  # fmt: skip
"""Columns that stand in a Layout as they are, besides the degrees."""


class LayoutTable(NamedTuple):
    """Columns that broadcast: all of equal length, a list of layouts; or each along axes of its own, a grid,
    which stands for every combination. All have the same number of axes.

    ``cp_kind``, ``schedule``, ``recompute``, ``dispatch`` and ``offload`` index the tuples of layout.py,
    ``order`` those of axes.py; ``ends`` is the code of how layers are split, see splits.py.
    """

    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    etp: Ints
    dispatch: Ints
    order: Ints
    sp: Ints
    cp_kind: Ints
    schedule: Ints
    chunks: Ints
    ends: Ints
    zero_stage: Ints
    micro_batch: Ints
    microbatches: Ints
    recompute: Ints
    recompute_every: Ints
    loss_chunks: Ints
    offload: Ints

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the columns together."""
        return np.broadcast(*self).shape

    @property
    def rows(self) -> int:
        """Number of layouts."""
        return prod(self.shape)

    @property
    def dp(self) -> Ints:
        """Ranks that hold different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard(self) -> Ints:
        """Ranks over which parameters, gradients and optimizer state are split."""
        return self.dp_shard * self.cp

    @property
    def expert_shard(self) -> Ints:
        """Ranks over which the parameters of one expert are split."""
        return np.maximum(self.shard * self.tp // (self.ep * self.etp), 1)

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "LayoutTable":
        """Some rows, by their place in the flat order or by a mask of it, as columns of equal length."""
        rows = np.flatnonzero(index) if index.dtype == np.bool_ else index
        places = np.unravel_index(rows, self.shape)

        def part(column: Ints) -> Ints:
            at = tuple(0 if n == 1 else place for place, n in zip(places, column.shape, strict=True))
            return np.asarray(column[at])

        return LayoutTable(*(np.broadcast_to(part(column), rows.shape) for column in self))

    def along(self, axis: int, index: NDArray[np.intp] | slice) -> "LayoutTable":
        """The part that some places of one axis make up."""
        where = (slice(None),) * axis + (index,)
        return LayoutTable(*(column[where] if column.shape[axis] > 1 else column for column in self))

    def mapped(self, part: "ColumnMap") -> "LayoutTable":
        """The same with ``part`` of every column."""
        return LayoutTable(*map(part, self))

    def layout(self, row: int, layers: int) -> Layout:
        """One row as a Layout of a model of ``layers``."""
        one = self.take(np.array([row]))
        value = {name: int(column[0]) for name, column in zip(one._fields, one, strict=True)}
        kind = RECOMPUTE_KINDS[value["recompute"]]
        stages = value["pp"] * value["chunks"]
        degrees = {name: value[name] for name in (*MESH_ORDER, *EXPERT_AXES, *PLAIN_COLUMNS)}
        return Layout(
            **degrees,
            dispatch=DISPATCH_KINDS[value["dispatch"]],
            order=MESH_ORDERS[value["order"]],
            offload=OFFLOAD_KINDS[value["offload"]],
            sp=bool(value["sp"]),
            cp_kind=CONTEXT_KINDS[value["cp_kind"]],
            schedule=SCHEDULE_NAMES[value["schedule"]],
            stage_layers=stage_layers(layers, stages, value["ends"]) if stages > 1 else (),
            recompute=kind,
            kept=KEPT_BY_SELECTIVE if kind == "selective" else (),
        )


def distinct(*columns: Ints) -> tuple[list[tuple[int, ...]], NDArray[np.intp]]:
    """The different rows of ``columns``, which broadcast, and which of them each row is.

    Rows of a list often stand in runs of equal ones, so that only the first of each run is sorted. Values are
    not negative.
    """
    if all(column.size == 1 for column in columns):  # a single layout
        row = tuple(int(column.item()) for column in columns)
        return [row], np.zeros((1,) * max(column.ndim for column in columns), dtype=np.intp)
    key: Ints = np.zeros((1,) * columns[0].ndim, dtype=np.int64)
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    for column, size in zip(columns, sizes, strict=True):
        key = key * size + column
    flat = key.reshape(-1)
    starts = (
        np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]])) if len(flat) else np.empty(0, int)
    )
    keys, run = np.unique(flat[starts], return_inverse=True)
    index = np.repeat(run, np.diff(starts, append=len(flat))).reshape(key.shape)
    digits: list[list[int]] = []
    for size in reversed(sizes):
        keys, digit = np.divmod(keys, size)
        digits.insert(0, digit.tolist())
    return list(zip(*digits, strict=True)), index


def part_along(column: NDArray[Number], axis: int, index: slice | NDArray[np.intp]) -> NDArray[Number]:
    """The part of a column that some places of one axis make up, which may be counted from the last; one that
    does not vary there as it is."""
    if column.ndim < max(axis + 1, -axis) or column.shape[axis] == 1:
        return column
    return np.asarray(column[(slice(None),) * (axis % column.ndim) + (index,)])


def added(*parts: Floats | float) -> Floats:
    """The sum, small columns first."""
    first, *others = sorted((np.asarray(part, np.float64) for part in parts), key=SIZE)
    for part in others:
        first = first + part
    return first


def either(
    condition: NDArray[np.bool_], where_true: Callable[[], Floats], where_false: Callable[[], Floats]
) -> Floats:
    """np.where that works out only what some row needs."""
    if condition.all():
        return where_true()
    if not condition.any():
        return where_false()
    return np.where(condition, where_true(), where_false())


def piecewise(
    key: NDArray[Any], table: LayoutTable, function: Callable[[Any, LayoutTable], Floats]
) -> Floats:
    """``function(value, part)`` for every value of ``key`` and its part of ``table``, put together.

    ``key`` varies along one axis at most; where it does not, nothing is copied.
    """
    values = sorted(set(key.ravel().tolist()))
    if len(values) == 1:
        return function(values[0], table)
    (axis,) = (axis for axis, n in enumerate(key.shape) if n > 1)
    places = [np.flatnonzero(key == value) for value in values]
    parts = [function(v, table.along(axis, place)) for v, place in zip(values, places, strict=True)]
    beside = [[1 if i == axis else n for i, n in enumerate(part.shape)] for part in parts]
    shape = list(np.broadcast_shapes(*beside))
    shape[axis] = key.shape[axis]
    whole = np.empty(shape)
    for part, place in zip(parts, places, strict=True):
        whole[(slice(None),) * axis + (place,)] = part
    return whole


def by_schedule(
    schedule: Ints, function: Callable[..., NDArray[Number]], *columns: NDArray[np.generic]
) -> NDArray[Number]:
    """``function(name, *columns)`` of each schedule where the column has it, put together; all broadcast.

    ``function`` must broadcast. Along the one axis on which ``schedule`` varies, it sees only the part of the
    columns that its schedule has; one schedule throughout costs no copy.
    """
    codes = np.flatnonzero(np.bincount(np.ravel(schedule))).tolist()
    if len(codes) <= 1:
        return function(SCHEDULE_NAMES[codes[0] if codes else 0], *columns)
    axes = [axis for axis in range(-np.ndim(schedule), 0) if schedule.shape[axis] > 1]
    if len(axes) != 1:
        shape = np.broadcast_shapes(np.shape(schedule), *map(np.shape, columns))
        flat = (np.broadcast_to(column, shape).ravel() for column in (schedule, *columns))
        return by_schedule(next(flat), function, *flat).reshape(shape)
    axis = axes[0]
    rows = [_run(np.flatnonzero(np.ravel(schedule) == code)) for code in codes]
    parts = [
        function(SCHEDULE_NAMES[code], *(_along(column, mine, axis) for column in columns))
        for code, mine in zip(codes, rows, strict=True)
    ]
    return _joined(parts, rows, axis, schedule.size)


Places = NDArray[np.intp] | slice


def _run(rows: NDArray[np.intp]) -> Places:
    """Rows as a slice where they follow one another: a view of a column, not a copy."""
    return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] == len(rows) - 1 else rows


def _along(column: NDArray[Number], rows: Places, axis: int) -> NDArray[Number]:
    """The rows of a column that varies along ``axis``, counted from the last."""
    varies = np.ndim(column) >= -axis and column.shape[axis] > 1
    return np.asarray(column[_at(rows, axis)]) if varies else column


def _at(rows: Places, axis: int) -> tuple[Any, ...]:
    return (..., rows, *(slice(None),) * (-axis - 1))


def _joined(
    parts: Sequence[NDArray[Number]], rows: Sequence[Places], axis: int, count: int
) -> NDArray[Number]:
    """Parts that lie on ``rows`` along ``axis``, of the shape that they broadcast to elsewhere."""
    shapes = [list(np.shape(part)) for part in parts]
    for shape in shapes:
        if len(shape) >= -axis:
            shape[axis] = 1
    whole = list(np.broadcast_shapes((1,) * -axis, *map(tuple, shapes)))
    whole[axis] = count
    joined = np.empty(whole, dtype=np.result_type(*parts))
    for part, mine in zip(parts, rows, strict=True):
        joined[_at(mine, axis)] = part
    return joined


def table_of(layouts: Sequence[Layout], layers: int) -> LayoutTable:
    """The table whose rows are ``layouts`` of a model of ``layers``.

    Raises: LayoutError: a pipeline's layers are split in another way than ``stage_layers`` splits them.
    """
    rows = [
        (
            *(x.pp, x.dp_replicate, x.dp_shard, x.cp, x.tp, x.ep, x.etp),
            *(DISPATCH_KINDS.index(x.dispatch), MESH_ORDERS.index(x.order), int(x.sp)),
            *(CONTEXT_KINDS.index(x.cp_kind), SCHEDULE_NAMES.index(x.schedule), x.chunks, ends_of(x, layers)),
            *(x.zero_stage, x.micro_batch, x.microbatches, RECOMPUTE_KINDS.index(x.recompute)),
            *(x.recompute_every, x.loss_chunks, OFFLOAD_KINDS.index(x.offload)),
        )
        for x in layouts
    ]
    return LayoutTable(*np.array(rows, dtype=np.int64).reshape(-1, len(LayoutTable._fields)).T)
