"""What a pipeline rank has in flight whose stages are unlike, stage by stage.

The ledger takes a rank's stages for alike, by a mean block. That is wrong where one stage keeps much more of
a microbatch than another: of few layers every second is recomputed, or an end of the pipeline has none. The
stages in flight of such a rank are counted by the order in which it runs them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.layout import SCHEDULE_NAMES
from shardwright.model import ModelSpec
from shardwright.plan.activations import Kind
from shardwright.plan.flights import More
from shardwright.plan.holdings import BlockKinds, Means
from shardwright.plan.schedule import FORWARD, FULL, INPUT, WEIGHT, build_order, why_not
from shardwright.plan.splits import stage_layers
from shardwright.plan.stages import TWO_WAY, Stage, expert_layers, ranks_stages
from shardwright.plan.table import Floats, LayoutTable, distinct

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
    shape = np.broadcast_shapes(few.shape, *(column.shape for column in columns))
    rows = np.flatnonzero(np.broadcast_to(few, shape))
    cases, index = distinct(*(np.broadcast_to(column, shape).ravel()[rows] for column in columns))
    experts = expert_layers(model)
    counted = [_counted(experts, *case) for case in cases]
    unlike = np.array([each is not None for each in counted])
    if not unlike.any():
        return None
    numbers = np.array([np.zeros(_SHAPE) if each is None else each for each in counted])[index.ravel()]
    there = np.zeros(int(np.prod(shape)), dtype=bool)
    there[rows] = unlike[index.ravel()]
    spread = np.zeros((*_SHAPE, there.size))
    spread[..., rows] = np.moveaxis(numbers, 0, -1)
    return _beyond_mean(there.reshape(shape), spread.reshape(*_SHAPE, *shape), stage, kinds, means)


def may_be_unlike(table: LayoutTable, stage: Stage) -> NDArray[np.bool_]:
    """Rows of whose ranks some have so few layers a stage that their stages may be unlike."""
    return np.asarray((table.pp > 1) & (stage.blocks < FEW_LAYERS * stage.stages) & stage.valid)


def _beyond_mean(
    there: NDArray[np.bool_],
    numbers: Floats,
    stage: Stage,
    kinds: Mapping[Kind, BlockKinds],
    means: Means,
) -> More:
    """``numbers``: of ``_counted``, by point, place and what is counted [4, 3, 12, B]."""
    in_flight = np.broadcast_arrays(*(getattr(stage.flight, point) for point in (*POINTS, "reducing")))
    at_work = np.array([1.0, 0.0, 0.0]).reshape(-1, *(1,) * there.ndim)
    of_one = stage.stages - stage.head - stage.flight.turn
    more = -np.stack([(count * stage.blocks - at_work) * means.saved for count in in_flight])
    outputs = numbers[:, :, _OUTPUTS] - np.stack([(count * of_one)[None] for count in in_flight])
    at_turn = numbers[POINTS.index("steady"), PLACES.index("apart")]
    most: Floats = np.zeros(1)
    for way, (saved, besides) in enumerate(_by_way(kinds)):
        more = more + numbers[:, :, way] * saved
        most = most + at_turn[_AT_WORK + way] * besides
    apart = there & (at_turn[_MISSING] == 0)
    plain = apart & (at_turn[_AT_WORK] + at_turn[_AT_WORK + 2] > 0)
    missing = np.where(numbers[:, :, _MISSING] > 0, -np.inf, 0.0)
    more, outputs = np.where(there, more + missing, 0.0), np.where(there, outputs, 0.0)
    head = PLACES.index("head")  # nothing is at work while gradients are reduced: as at the head
    pending = numbers[-1, head, _PENDING] / np.maximum(stage.blocks, 1) - stage.flight.pending
    past = np.where(there, numbers[1, head, _FIRST] / np.maximum(stage.blocks, 1), 1 / stage.stages)
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
    ways = np.array([1.0, RECOMPUTED] * 2)
    weights = of_stage @ ways
    mean = of_stage.sum() * (1 + (RECOMPUTED - 1) / every)
    unlike = weights.max() >= UNLIKE * weights.min() or not 1 / UNLIKE < weights.sum() / mean < UNLIKE
    if not unlike or schedule in TWO_WAY or why_not(schedule, p, v, m) is not None:
        return None
    if m % p == 0 and schedule not in ("GPipe", "LoopedBFS"):
        m = min(m, LONG_ENOUGH * p)
    last = p * v - 1
    own_output = np.array([float(stage != last and stage + 1 not in mine) for stage in mine])
    found, most = np.zeros(_SHAPE), np.full(_SHAPE[:2], -np.inf)
    found[..., _MISSING] = 1.0
    seen = set[tuple[int, ...]]()
    for point, kind, chunk, flights, waiting in _moments(schedule, p, v, m, rank, mine):
        if (point, kind, chunk, *flights) in seen:  # as much as then: the first of equal ones stands
            continue
        seen.add((point, kind, chunk, *flights))
        in_flight, pending = np.array(flights, dtype=float), np.array(waiting, dtype=float)
        blocks = of_stage[chunk]
        for place in _places(kind, blocks.sum() > 0, mine[chunk] == last, last in mine):
            at_work = _at_work(blocks) if place != 1 else np.zeros(4)
            held = in_flight @ of_stage - (at_work if place == 0 else 0.0)
            outputs = in_flight @ own_output
            again = AGAIN * at_work[1::2].sum() if place == 2 else 0.0
            weight = held @ ways + RECOMPUTED * outputs + again
            if weight > most[point, place]:
                most[point, place] = weight
                left = pending @ of_stage.sum(axis=1)
                found[point, place] = [*held, outputs, *(at_work * (place == 2)), left, 0.0, 0.0]
    found[..., _FIRST] = of_stage[-1].sum()  # backward passes begin with the last
    return found


def _blocks(experts: tuple[bool, ...], stages: int, ends: int, every: int) -> Floats:
    """Blocks of each stage: dense, plain and recomputed, and the same with experts."""
    found = np.zeros((stages, 4))
    split = stage_layers(len(experts), stages, ends)
    for layer, stage in enumerate(np.repeat(np.arange(stages), split)):
        found[stage, 2 * experts[layer] + (layer % every == 0)] += 1
    return found


def _at_work(blocks: Floats) -> Floats:
    """The block of a stage that keeps most."""
    return np.asarray(np.eye(4)[next(way for way in (2, 0, 3, 1) if blocks[way] > 0)])


def _places(kind: int, has_blocks: bool, is_last: bool, has_last: bool) -> list[int]:
    """Places of a backward pass; gradients that are reduced count as at the head."""
    if kind == _REDUCING:
        return [1]
    found = [0, 2] if kind == FULL else [2]
    return [*(found if has_blocks else ()), *([1] if is_last or not has_last else ())]


def _moments(
    schedule: str, p: int, v: int, m: int, rank: int, mine: Sequence[int]
) -> Iterator[tuple[int, int, int, list[int], list[int]]]:
    """Backward passes of a rank: point, kind, chunk, and of each chunk microbatches in flight, the one at
    work with them, and those of which only weights' gradients are to come; and where the first chunk is
    through."""
    order = build_order(schedule, p, v, m)
    rows = slice(int(order.starts[rank]), int(order.starts[rank + 1]))
    in_flight, pending, left = [0] * v, [0] * v, [m] * v
    made, added = set[int](), set[int]()
    for kind, stage in zip(order.kind[rows].tolist(), order.stage[rows].tolist(), strict=True):
        chunk = mine.index(stage)
        if kind == FORWARD:
            in_flight[chunk] += 1
        if kind == FORWARD or (kind == INPUT and stage == 0):
            continue
        if stage == 0:
            kind = FULL  # the first stage makes all its gradients in the pass for weights
        point = {0: 0, 1: 1, v: 2}.get(len(made))
        adds = kind == INPUT and chunk in made and chunk not in added
        added |= {chunk} if adds else set()
        early = kind == WEIGHT or (adds and point == 2)  # gradients are not yet what they will be
        if point is not None and not early:
            yield point, kind, chunk, in_flight, pending
        if kind == INPUT:
            pending[chunk] += 1
            continue
        pending[chunk] -= kind == WEIGHT
        made.add(chunk)
        in_flight[chunk] -= 1
        left[chunk] -= 1
        if left[chunk] == 0 and 0 not in left[:chunk] + left[chunk + 1 :]:
            yield len(POINTS), _REDUCING, chunk, in_flight, pending


_REDUCING = -1
