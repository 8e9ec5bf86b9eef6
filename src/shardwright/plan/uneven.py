"""What a pipeline rank has in flight whose stages are unlike, stage by stage.

The ledger takes a rank's stages for alike, by a mean block. That is wrong where one stage keeps much more of
a microbatch than another: of few layers every second is recomputed, or an end of the pipeline has none. The
stages in flight of such a rank are counted by the order in which it runs them.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.layout import SCHEDULE_NAMES
from shardwright.model import ModelSpec
from shardwright.plan.activations import Kind
from shardwright.plan.block_kinds import BlockKinds
from shardwright.plan.flights import More
from shardwright.plan.holdings import Means
from shardwright.plan.schedule import FORWARD, FULL, INPUT, WEIGHT, rank_order, why_not
from shardwright.plan.splits import stage_layers
from shardwright.plan.stages import TWO_WAY, Stage, expert_layers, ranks_stages
from shardwright.plan.table import Floats, Ints, LayoutTable, distinct

FEW_LAYERS = 2
"""Layers of a stage, the mean, from which on stages of a rank count as alike."""

UNLIKE = 1.5
"""Times that one stage keeps what another does, or a rank what its layers would on the mean, from which on
its stages are counted."""

RECOMPUTED = 0.1
"""What a recomputed block keeps of a plain one, to tell which stages in flight are most."""

AGAIN = 0.5
"""What a recomputed block has more than a plain one in a pass for inputs, besides what it keeps, the same."""

POINTS = ("first", "second", "steady")
"""The points of ``FlightPoints``: so many stages of a rank have gradients, none, one or all."""

PLACES = ("block", "head", "apart")
"""What is at work: a block in a pass for all gradients, the head, a block in one of two passes apart."""

LONG_ENOUGH = 4
"""Microbatches for each rank from which on a rank's turns are the same again."""


def more_in_flight(
    model: ModelSpec, table: LayoutTable, stage: Stage, kinds: Mapping[Kind, BlockKinds], means: Means
) -> More | None:
    """What rows whose stages are unlike have in flight beside what a mean block gives; 0 in others. None: no
    row has such stages.
    """
    few = may_be_unlike(table, stage) & (table.offload < 2)
    if not few.any():
        return None
    every = np.where(table.recompute > 0, table.recompute_every, 1)
    columns = (table.schedule, table.pp, table.chunks, table.ends, table.microbatches, every, stage.rank)
    cases, index = distinct(*(np.where(few, column + 1, 0) for column in columns))  # 0: no such row
    experts = expert_layers(model)
    counted = [_counted(experts, *(number - 1 for number in case)) if any(case) else None for case in cases]
    unlike = np.array([each is not None for each in counted])
    if not unlike.any():
        return None
    numbers = np.array([np.zeros(_SHAPE) if each is None else each for each in counted])
    return _beyond_mean(unlike[index], np.moveaxis(numbers, 0, -1), index, stage, kinds, means)


def may_be_unlike(table: LayoutTable, stage: Stage) -> NDArray[np.bool_]:
    """Rows of whose ranks some have so few layers a stage that their stages may be unlike."""
    return np.asarray((table.pp > 1) & (stage.blocks < FEW_LAYERS * stage.stages) & stage.valid)


def _beyond_mean(
    there: NDArray[np.bool_],
    numbers: Floats,
    index: NDArray[np.intp],
    stage: Stage,
    kinds: Mapping[Kind, BlockKinds],
    means: Means,
) -> More:
    """``numbers``: of ``_counted``, by point, place, what is counted, and case [4, 3, 12, cases]; ``index``:
    the case of each row."""
    in_flight = np.broadcast_arrays(*(getattr(stage.flight, point) for point in (*POINTS, "reducing")))
    at_work = np.array([1.0, 0.0, 0.0]).reshape(-1, *(1,) * there.ndim)
    of_one = stage.stages - stage.head - stage.flight.turn
    outputs = numbers[:, :, _OUTPUTS, index] - np.stack([(count * of_one)[None] for count in in_flight])
    more = -np.stack([(count * stage.blocks - at_work) * means.saved for count in in_flight])
    at_turn = numbers[POINTS.index("steady"), PLACES.index("apart")]
    most: Floats = np.zeros(1)
    for way, (saved, besides) in enumerate(_by_way(kinds)):
        if numbers[:, :, way].any():
            more = more + numbers[:, :, way, index] * saved
            most = most + at_turn[_AT_WORK + way, index] * besides
    apart = there & (at_turn[_MISSING] == 0)[index]
    plain = apart & (at_turn[_AT_WORK] + at_turn[_AT_WORK + 2] > 0)[index]
    missing = np.where(numbers[:, :, _MISSING] > 0, -np.inf, 0.0)[..., index]
    more, outputs = np.where(there, more + missing, 0.0), np.where(there, outputs, 0.0)
    head = PLACES.index("head")  # nothing is at work while gradients are reduced: as at the head
    pending = numbers[-1, head, _PENDING, index] / np.maximum(stage.blocks, 1) - stage.flight.pending
    past = np.where(there, numbers[1, head, _FIRST, index] / np.maximum(stage.blocks, 1), 1 / stage.stages)
    pending = np.where(there, pending, 0.0)
    most = np.where(apart, most, means.most)
    return More(more[:-1], outputs[:-1], past, more[-1, head], outputs[-1, head], pending, most, plain)


def _by_way(kinds: Mapping[Kind, BlockKinds]) -> list[tuple[Floats, Floats]]:
    """What a block keeps for each token, and what it has besides in a pass for inputs: dense, plain and
    recomputed, and the same with experts."""
    found: list[tuple[Floats, Floats]] = []
    for kind in _KINDS:
        own = kinds.get(kind)
        if own is None:
            found += [(np.zeros(1), np.zeros(1))] * 2
        else:
            found += [(own.ways.saved[row], own.ways.apart[row, 0]) for row in (own.plain, own.row)]
    return found


_KINDS: tuple[Kind, ...] = ("dense", "experts")


# One rank, counted


_OUTPUTS, _AT_WORK, _PENDING, _MISSING, _FIRST = 4, 5, 9, 10, 11
_WEIGHTS = np.array([1.0, RECOMPUTED] * 2)
_SHAPE = (len(POINTS) + 1, len(PLACES), 12)
"""Points and one where the first stage's gradients are reduced; places; blocks in flight of four ways,
outputs of stages, the way of a block in a pass apart, blocks whose weights' gradients are to come, whether
there is no such moment, and the blocks of the first stage that has gradients."""


@lru_cache(maxsize=8192)
def _counted(
    experts: tuple[bool, ...], code: int, p: int, v: int, ends: int, m: int, every: int, rank: int
) -> Floats | None:
    """What is in flight on one rank; the block at work does not count. None: its stages are alike."""
    schedule = SCHEDULE_NAMES[code]
    mine = ranks_stages(schedule, p, v, rank)
    of_stage = _blocks(experts, p * v, ends, every)[mine]
    weights = of_stage @ _WEIGHTS
    mean = of_stage.sum() * (1 + (RECOMPUTED - 1) / every)
    unlike = weights.max() >= UNLIKE * weights.min() or not 1 / UNLIKE < weights.sum() / mean < UNLIKE
    if not unlike or schedule in TWO_WAY or why_not(schedule, p, v, m) is not None:
        return None
    if m % p == 0 and schedule not in ("GPipe", "LoopedBFS"):
        m = min(m, LONG_ENOUGH * p)
    last = p * v - 1
    own_output = np.array([float(stage != last and stage + 1 not in mine) for stage in mine])
    moments = _moments(schedule, p, v, m, rank)
    in_flight, outputs = moments.in_flight @ of_stage, moments.in_flight @ own_output
    left = moments.pending @ of_stage.sum(axis=1)
    block = np.array([_at_work(blocks) for blocks in of_stage])[moments.chunk]
    filled = of_stage.sum(axis=1)[moments.chunk] > 0
    at_end = np.equal(mine, last)[moments.chunk] if last in mine else True
    reduces = moments.point == len(POINTS)
    found = np.zeros(_SHAPE)
    found[..., _MISSING] = 1.0
    for place, there in enumerate(
        (filled & (moments.kind == FULL) & ~reduces, at_end | reduces, filled & ~reduces)
    ):
        held = in_flight - block if place == 0 else in_flight
        more = AGAIN * block[:, 1::2].sum(axis=1) if place == 2 else 0.0
        weight = np.round(held @ _WEIGHTS + RECOMPUTED * outputs + more, 6)
        for point in range(len(POINTS) + 1):
            rows = np.flatnonzero(there & (moments.point == point))
            if len(rows):
                row = rows[np.argmax(weight[rows])]  # the first of equal ones
                at_work = block[row] * (place == 2)
                found[point, place] = [*held[row], outputs[row], *at_work, left[row], 0.0, 0.0]
    found[..., _FIRST] = of_stage[-1].sum()  # backward passes begin with the last
    return found


def _blocks(experts: tuple[bool, ...], stages: int, ends: int, every: int) -> Floats:
    """Blocks of each stage: dense, plain and recomputed, and the same with experts."""
    layers = np.arange(len(experts))
    stage = np.repeat(np.arange(stages), stage_layers(len(experts), stages, ends))
    way = 2 * np.array(experts, dtype=int) + (layers % every == 0)
    return np.bincount(4 * stage + way, minlength=4 * stages).reshape(stages, 4).astype(float)


def _at_work(blocks: Floats) -> Floats:
    """The block of a stage that keeps most; nothing if it has none."""
    most = np.zeros(4)
    most[[way for way in (2, 0, 3, 1) if blocks[way] > 0][:1]] = 1.0
    return most


class _Moments(NamedTuple):
    """Backward passes of a rank at one of the points, and where the gradients of the chunk that is through
    first are reduced: which point, the kind and chunk of the pass; of each chunk microbatches in flight, the
    one at work with them, and those of which only weights' gradients are to come."""

    point: NDArray[np.intp]
    kind: Ints
    chunk: NDArray[np.intp]
    in_flight: Floats
    pending: Floats


@lru_cache(maxsize=256)  # a search asks for the same of several splits and recomputations
def _moments(schedule: str, p: int, v: int, m: int, rank: int) -> _Moments:
    kind, stage, *_ = rank_order(schedule, p, v, m, rank)
    mine = ranks_stages(schedule, p, v, rank)
    kind = np.where((stage == 0) & (kind == WEIGHT), FULL, kind)  # the first stage makes all in that one
    runs = (stage != 0) | (kind != INPUT)
    kind, stage = kind[runs], stage[runs]
    chunk = np.argsort(mine)[np.searchsorted(np.sort(mine), stage)]
    of_chunk = np.equal.outer(chunk, np.arange(v))

    def passes(*kinds: int) -> Floats:
        return np.asarray(of_chunk & np.isin(kind, kinds)[:, None], dtype=float)

    forward, inputs, weights, through = passes(FORWARD), passes(INPUT), passes(WEIGHT), passes(WEIGHT, FULL)
    done = np.cumsum(through, axis=0)
    before = done - through
    in_flight = np.cumsum(forward, axis=0) - before
    pending = np.cumsum(inputs - weights, axis=0) - (inputs - weights)
    made = before > 0
    count = made.sum(axis=1)
    point = np.select([count == v, count == 1, count == 0], [2, 1, 0], -1)
    again = inputs * made  # adds up what a pass for weights has left
    adds = (again * (np.cumsum(again, axis=0) == 1)).any(axis=1)
    early = (kind == WEIGHT) | (adds & (point == 2))  # gradients are not yet what they will be
    rows = np.flatnonzero((kind != FORWARD) & (point >= 0) & ~early)
    columns = point[rows], kind[rows], chunk[rows], in_flight[rows], pending[rows]
    first = int(np.argmax((done == m).any(axis=1)))  # a chunk is through, all others are not
    reduced = len(POINTS), kind[first], chunk[first], (in_flight - through)[first], (pending - weights)[first]
    return _Moments(*(np.append(column, [one], axis=0) for column, one in zip(columns, reduced, strict=True)))
