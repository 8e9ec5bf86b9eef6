"""The pipeline rank that all others wait for: which one it is, and its seconds for each microbatch.

Most pipelines of a grid share out the model's layers alike and differ in their schedule only, so that times
are worked out once for each way of sharing them out.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.model import ModelSpec
from shardwright.plan.flight_points import passes_apart
from shardwright.plan.parts import Parts
from shardwright.plan.space import DATA, ORDER
from shardwright.plan.stages import Work, alike, busiest_ranks
from shardwright.plan.table import Floats, LayoutTable, Number, added, by_schedule

INSIDE = ("tp", "cp", "ep", "host")
"""Axes whose communication stands between computations of the same microbatch."""

EVERY = ("forward", "backward", *INSIDE)
"""All times of a microbatch."""


class Spread(NamedTuple):
    """Places of an axis that stand for others which are like them: ``row`` says for each which one."""

    axis: int
    row: NDArray[np.intp]

    def over(self, values: NDArray[Number]) -> NDArray[Number]:
        """One value of each different place as one of each place."""
        return values.take(self.row, axis=self.axis) if values.shape[self.axis] > 1 else values


class BusiestRank(NamedTuple):
    """The pipeline rank with most to do: of several, which one, in every row."""

    works: tuple[Work, ...]  # of the different ways of sharing out layers, if there is a ``spread``
    parts: Parts
    apart: Floats  # part of the microbatches that later stages recompute once more, for weights; as ``works``
    which: NDArray[np.intp]
    spread: Spread | None

    def pick(self, values: Sequence[Floats]) -> Floats:
        """The busiest rank's of one value a rank."""
        picked = values[0]
        for rank, value in enumerate(values[1:], start=1):
            picked = np.where(self.which == rank, value, picked)
        return picked if self.spread is None else self.spread.over(picked)

    def times(self, *names: str) -> list[Floats]:
        """Some times of all parts that each of the ranks runs for a microbatch."""
        return work_times(self.parts, self.works, names, self.apart, self.spread and self.spread.axis)

    def sum(self, *names: str) -> Floats:
        """The same of the busiest rank."""
        return self.pick(self.times(*names))


def work_times(
    parts: Parts,
    works: Sequence[Work],
    names: Sequence[str],
    apart: Floats | float = 0.0,
    axis: int | None = None,
) -> list[Floats]:
    """Some times of all parts that ranks run. ``apart``: of the microbatches, what they recompute twice.
    ``axis``: along which, and no other, what they run differs, and no time does."""
    every = (parts.block, parts.experts, parts.embedding, parts.head)
    times = [added(*(getattr(part, name) for name in names)) for part in every if part is not None]
    counts = [[work.blocks, work.embedding, work.head] for work in works]
    if parts.experts is not None:
        counts = [
            [work.blocks - work.expert_blocks, work.expert_blocks, work.embedding, work.head]
            for work in works
        ]
    found = [_weighted(count, times, axis) for count in counts]
    return with_again(found, parts, works, names, apart, axis)


def with_again(
    times: list[Floats],
    parts: Parts,
    works: Sequence[Work],
    names: Sequence[str],
    apart: Floats | float,
    axis: int | None,
) -> list[Floats]:
    """``times`` of ranks, and those of recomputing once more, for the gradients of weights, the blocks that
    are not of the first stage; with an ``axis``, worked out for those of its places that have such passes."""
    if parts.again is None or not np.any(apart):
        return times
    again = added(*(getattr(parts.again, name) for name in names))
    other = parts.experts_again
    experts = again if other is None else added(*(getattr(other, name) for name in names))
    if axis is None:
        return [
            time + apart * ((work.later - work.later_experts) * again + work.later_experts * experts)
            for time, work in zip(times, works, strict=True)
        ]
    share = np.asarray(apart)
    axes = tuple(place for place in range(share.ndim) if place != axis)
    there = np.flatnonzero(share.any(axis=axes))
    share = share.take(there, axis=axis)
    found = []
    for time, work in zip(times, works, strict=True):
        later, with_experts = (
            np.take(column, there, axis=axis) for column in (work.later, work.later_experts)
        )
        more = share * (later - with_experts) * again if other is not None else share * later * again
        if other is not None:
            more = more + share * with_experts * experts
        every = list(np.broadcast_shapes(time[(slice(None),) * axis + (slice(1),)].shape, more.shape))
        every[axis] = time.shape[axis]
        whole = time if time.shape == tuple(every) else np.broadcast_to(time, every).copy()
        whole[(slice(None),) * axis + (there,)] += more
        found.append(whole)
    return found


def _weighted(counts: Sequence[Floats], times: Sequence[Floats], axis: int | None) -> Floats:
    """The sum of so many times each; with an ``axis`` one product of matrices."""
    if axis is None:
        return added(*(count * time for count, time in zip(counts, times, strict=True)))
    shape = np.broadcast_shapes(*(time.shape for time in times))
    others = shape[:axis] + shape[axis + 1 :]
    columns = np.array([np.broadcast_to(time, shape).reshape(-1) for time in times])
    product = np.array([count.reshape(-1) for count in counts]).T @ columns
    return np.moveaxis(product.reshape(-1, *others), 0, axis)


def busiest_rank(model: ModelSpec, table: LayoutTable, parts: Parts) -> tuple[BusiestRank, Floats]:
    """The rank that all others wait for, in every row, and its seconds for each microbatch."""
    works, apart, axis, spread = _shared_out(model, table, parts)
    busy = work_times(parts, works, EVERY, apart, axis)
    most = busy[0]
    which = np.zeros((1,) * table.pp.ndim, dtype=np.intp)
    for number, each in enumerate(busy[1:], start=1):
        which = np.where(each > most, number, which)
        most = np.maximum(most, each)
    return BusiestRank(works, parts, apart, which, spread), most if spread is None else spread.over(most)


def least_busy(model: ModelSpec, table: LayoutTable, parts: Parts) -> Floats:
    """Seconds for each microbatch of that rank at least, in any order of a grid's meshes and however its data
    axes split."""
    least = parts.summed.mapped(lambda time: time.min(axis=(ORDER, DATA), keepdims=True))
    works, apart, axis, spread = _shared_out(model, table, least)
    most = reduce(np.maximum, work_times(least, works, ("forward",), apart, axis))
    return most if spread is None else spread.over(most)


class _SharedOut(NamedTuple):
    """What ranks run, of which one has most to do, as in ``BusiestRank``, and the axis of its ``spread``."""

    works: tuple[Work, ...]
    apart: Floats
    axis: int | None
    spread: Spread | None


def _shared_out(model: ModelSpec, table: LayoutTable, parts: Parts) -> _SharedOut:
    axis, spread = _pipeline_axis(table, parts), None
    works, apart = busiest_ranks(table, model), np.zeros((1,) * table.pp.ndim)
    if parts.again is not None:
        apart = by_schedule(table.schedule, passes_apart, table.pp, table.microbatches)
    if axis is not None:
        first, row = alike(table, model)
        works = tuple(Work(*(np.take(column, first, axis=axis) for column in work)) for work in works)
        apart = apart.take(first, axis=axis) if apart.shape[axis] > 1 else apart
        spread = Spread(axis, row)
    if (table.pp == 1).all():
        works = works[:1]
    return _SharedOut(works, apart, axis, spread)


def _pipeline_axis(table: LayoutTable, parts: Parts) -> int | None:
    """The axis of a grid along which pipelines lie and no part's times; None: there is none."""
    columns = (table.pp, table.chunks, table.ends, table.schedule)
    axes = {axis for column in columns for axis, places in enumerate(column.shape) if places > 1}
    times = [time for part in parts if part is not None for time in part if np.ndim(time)]
    vary = {axis for time in times for axis, places in enumerate(np.shape(time)) if places > 1}
    return axes.pop() if len(axes) == 1 and not axes & vary else None
