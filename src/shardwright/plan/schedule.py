"""Pipeline orders: what every rank runs, one action after another, and where each stage lies.

Orders that torch 2.13 has (torch.distributed.pipelining.schedules) equal its own, action by action; ZB-H1,
ZB-H2 and DualPipe are modelled only. A rank's ``chunks`` are its stages. Kinds of action: F forward, B full
backward, I gradient of the input, W gradient of the weights. The n-th forward of a stage is microbatch n, and
so are its n-th backward and weight gradient (LoopedBFS counts backwards from the last), so an order is made
as words: kinds and chunks, without microbatches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.errors import LayoutError
from shardwright.plan.table import Ints

KINDS = "FBIW"
FORWARD, FULL, INPUT, WEIGHT = range(len(KINDS))

MAX_ACTIVE_STAGES = 3
"""Stages a rank keeps gathered in torch's multi-stage schedules: ``_add_unshard_reshard``."""

FUSED = 4  # added to a word: runs as one with the next word
CHUNK = 8  # times the chunk, added to a word
NOTHING = -1


class Action(NamedTuple):
    """One thing a rank does; ``partner`` is the full backward that runs as one with a forward."""

    stage: int
    kind: str
    microbatch: int
    partner: "Action | None" = None

    def __str__(self) -> str:
        own = f"{self.stage}{self.kind}{self.microbatch}"
        return f"({own};{self.partner})" if self.partner else own


@dataclass(frozen=True, eq=False)
class Order:
    """What every rank runs. Columns have a row for each F, B, I and W, rank after rank, as they run.

    DualPipe is two ``pipelines``: stages 0 to p-1 run half of the microbatches, and stages p to 2p-1, the
    same parts of the model from the last rank to the first, run the other half, numbered from 0 as well.
    """

    schedule: str
    ranks: int
    microbatches: int  # of each stage
    pipelines: int
    stage_rank: Ints  # where each stage lies
    starts: Ints  # first row of each rank, and the number of rows
    kind: Ints
    stage: Ints
    microbatch: Ints
    fused: NDArray[np.bool_]  # runs as one with the next row

    @property
    def stages(self) -> int:
        """Stages of all pipelines."""
        return len(self.stage_rank)

    @property
    def model_stages(self) -> int:
        """Stages the model is cut into."""
        return self.stages // self.pipelines

    def row_action(self, row: int) -> Action:
        """The action of one row, without its partner."""
        return Action(int(self.stage[row]), KINDS[self.kind[row]], int(self.microbatch[row]))

    def actions(self, rank: int) -> list[Action]:
        """What one rank runs, in order."""
        actions: list[Action] = []
        forward: Action | None = None
        for row in range(int(self.starts[rank]), int(self.starts[rank + 1])):
            action = self.row_action(row)
            if forward is not None:
                action, forward = forward._replace(partner=action), None
            if self.fused[row]:
                forward = action
            else:
                actions.append(action)
        return actions


class Schedule(NamedTuple):
    """A row of the table of schedules: how a rank's words are made, and what the schedule needs."""

    words: Callable[[int, int, int, int], Ints]  # of ranks, chunks, microbatches of each stage, rank
    chunks: int = 0  # needed, 0 for any number
    fewest: int = 0  # microbatches, times ranks, 0 for one
    equal_rounds: bool = False
    v_shape: bool = False  # a rank's second chunk comes on the way back from the last rank to the first
    pipelines: int = 1
    newest_first: bool = False  # backwards of a chunk start with the last microbatch
    runnable: bool = True  # a class of torch runs it


# The words of a rank: looped schedules


def round_size(ranks: ArrayLike, microbatches: ArrayLike) -> Ints:
    """Microbatches that a rank runs of one chunk before the next chunk's turn, when interleaved.

    Source: microbatches_per_round of ScheduleInterleaved1F1B, torch 2.13.
    """
    m = np.asarray(microbatches)
    return np.asarray(m // np.maximum(m // ranks, 1))


def _one_by_one(chunks: int, microbatches: int, each: int, ahead: int, lag: int | None = None) -> Ints:
    """``ahead`` forwards, then a forward, a backward and a weight gradient in turn, of what is left of each.

    Chunks take turns of ``each`` microbatches, forwards from the first chunk and backwards from the last. A
    weight gradient comes ``lag`` backwards after its own; without a lag, backwards are full.
    """
    count = chunks * microbatches
    ahead = min(ahead, count)
    chunk = np.arange(count) // each % chunks
    forwards, backwards = CHUNK * chunk, CHUNK * (chunks - 1 - chunk)
    turns = np.full((count + (lag or 0), 3), NOTHING)
    turns[: count - ahead, 0] = forwards[ahead:] + FORWARD
    turns[:count, 1] = backwards + (FULL if lag is None else INPUT)
    if lag is not None:
        turns[lag:, 2] = backwards + WEIGHT
    return np.concatenate([forwards[:ahead] + FORWARD, turns[turns != NOTHING]])


def _breadth_first(p: int, v: int, m: int, rank: int) -> Ints:
    return _one_by_one(v, m, each=m, ahead=v * m)


def _one_forward_one_backward(p: int, v: int, m: int, rank: int) -> Ints:
    return _one_by_one(1, m, each=m, ahead=p - 1 - rank)


def _interleaved(p: int, v: int, m: int, rank: int) -> Ints:
    each = int(round_size(p, m))
    return _one_by_one(v, m, each, ahead=(v - 1) * each + 2 * (p - 1 - rank))


def _zb_h1(p: int, v: int, m: int, rank: int) -> Ints:
    each = int(round_size(p, m))
    return _one_by_one(v, m, each, ahead=(v - 1) * each + p - 1 - rank, lag=rank)


def _zb_h2(p: int, v: int, m: int, rank: int) -> Ints:
    return _one_by_one(1, m, each=m, ahead=2 * (p - 1 - rank), lag=2 * rank)


# The words of a rank: V-shaped schedules


def _kinds_of(chunk: int) -> range:
    return range(CHUNK * chunk, CHUNK * chunk + len(KINDS))


def _zb_v(p: int, v: int, m: int, rank: int) -> Ints:
    """ZB-V of arXiv:2401.10241, section 6, for 2p-1 microbatches at least: the order drops those over m."""
    (f0, _, i0, w0), (f1, _, i1, w1) = _kinds_of(0), _kinds_of(1)
    behind, steady = p - rank, max(m - (2 * p - 1), 0) + rank
    words = [f0] * (2 * behind - 1) + [f1, f0] * rank + [f1, i1, w1] * behind
    words += [f0, i0, w0, f1, i1, w1] * steady + [i0, w0, f1, i1, w1] * (behind - 1)
    words += [i0, i1] * rank + [i0, w0] * behind + [w1] * rank + [w0] * rank
    return np.array(words)


def _two_ways(half: int, microbatches: int, rank: int) -> Ints:
    """Steps 1 to 8 of DualPipe, on one of the ``half`` ranks from an end to the middle.

    The later half of the backwards of step 6 and those of step 7 are split; their weight gradients follow in
    the same order in steps 7 and 8.

    Source: github.com/deepseek-ai/DualPipe, ``step``.
    """
    (f0, b0, i0, w0), (f1, b1, i1, w1) = _kinds_of(0), _kinds_of(1)
    behind, half_way, main = half - rank - 1, rank + 1, microbatches - 2 * half + rank + 1
    first = [f0 + FUSED, b1] if behind else [f0, b1]  # not fused on the middle rank, for a smaller bubble
    down, up = [f0 + FUSED, b1], [f1 + FUSED, b0]
    step_6 = ([b1, b0] * half_way)[:half_way] + ([i1, i0] * half_way)[half_way:]
    weights = ([w1, w0] * half_way)[half_way:] + [w0] * behind
    words = [f0] * (2 * behind) + [f0, f1] * half_way + [i1, w1, f1] * behind
    words += first + up + (down + up) * (main - 1) + [b1, *up] * behind + step_6
    for weight in weights[:behind]:
        words += [weight, i0]
    return np.array(words + weights[behind:])


def _dualpipe_v(p: int, v: int, m: int, rank: int) -> Ints:
    return _two_ways(p, m, rank)


def _dualpipe(p: int, v: int, m: int, rank: int) -> Ints:
    return _two_ways(p // 2, m, min(rank, p - 1 - rank))


SCHEDULES = {
    "GPipe": Schedule(_breadth_first, chunks=1),
    "1F1B": Schedule(_one_forward_one_backward, chunks=1, fewest=1),
    "LoopedBFS": Schedule(_breadth_first, newest_first=True),
    "Interleaved1F1B": Schedule(_interleaved, equal_rounds=True),
    "InterleavedZeroBubble": Schedule(_zb_h1, equal_rounds=True),
    "ZBVZeroBubble": Schedule(_zb_v, chunks=2, v_shape=True),
    "DualPipeV": Schedule(_dualpipe_v, chunks=2, fewest=2, v_shape=True),
    "ZB-H1": Schedule(_zb_h1, chunks=1, runnable=False),
    "ZB-H2": Schedule(_zb_h2, chunks=1, runnable=False),
    "DualPipe": Schedule(_dualpipe, chunks=1, fewest=2, v_shape=True, pipelines=2, runnable=False),
}
"""Names are those of torch's classes, without ``Schedule``, and of the papers."""

FAULTS = ("", "wrong_chunks", "too_few_microbatches", "unequal_rounds", "odd_ranks", "odd_microbatches")
"""Reasons of ``order_fault``; the first means none, and of several the first counts."""
_WRONG_CHUNKS, _TOO_FEW, _UNEQUAL_ROUNDS, _ODD_RANKS, _ODD_MICROBATCHES = range(1, len(FAULTS))


def order_fault(schedule: str, ranks: ArrayLike, chunks: ArrayLike, microbatches: ArrayLike) -> Ints:
    """Why the schedule has no such order: an index of ``FAULTS``, 0 if it has one. All broadcast.

    Schedule none has no rule.

    Source: the constructors of torch 2.13's classes; ``step`` of DualPipe.
    """
    fault: Ints = np.zeros((), dtype=np.int64)
    if schedule == "none":
        return fault
    row = SCHEDULES[schedule]
    p, v, m = (np.asarray(column) for column in (ranks, chunks, microbatches))
    if row.pipelines == 2:
        fault = np.where(p % 2 != 0, _ODD_RANKS, np.where(m % 2 != 0, _ODD_MICROBATCHES, fault))
    if row.equal_rounds:
        fault = np.where(m % np.maximum(m // p, 1) != 0, _UNEQUAL_ROUNDS, fault)
    fault = np.where(m < np.maximum(row.fewest * p, 1), _TOO_FEW, fault)
    return np.where(v != row.chunks if row.chunks else v < 1, _WRONG_CHUNKS, fault)


def why_not(schedule: str, ranks: int, chunks: int, microbatches: int) -> str | None:
    """Why the schedule has no such order, or None if it has one."""
    fault = FAULTS[int(order_fault(schedule, ranks, chunks, microbatches))]
    row, who = SCHEDULES[schedule], f"{schedule} on {ranks} ranks"
    rounds = max(microbatches // ranks, 1)
    down = microbatches - microbatches % rounds
    up = min(down + rounds, (rounds + 1) * ranks)  # from there on it is one round more
    return {
        "": None,
        "wrong_chunks": f"chunks={chunks} of {who}: use {row.chunks or '1 or more'}",
        "too_few_microbatches": f"microbatches={microbatches} of {who} is below "
        f"{max(row.fewest * ranks, 1)}: use that many, or GPipe",
        "unequal_rounds": f"microbatches={microbatches} of {who} does not divide into {rounds} equal rounds: "
        f"use {down} or {up}",
        "odd_ranks": f"ranks={ranks} of {schedule} is odd: use an even number",
        "odd_microbatches": f"microbatches={microbatches} of {schedule} is odd: use an even number",
    }[fault]


# The order of all ranks


def stage_ranks(schedule: str, ranks: int, chunks: int) -> Ints:
    """Rank on which each stage lies."""
    row = SCHEDULES[schedule]
    turn, place = np.divmod(np.arange(ranks * chunks * row.pipelines), ranks)
    return np.where((turn % 2 == 1) & row.v_shape, ranks - 1 - place, place)


@lru_cache(maxsize=48)
def build_order(schedule: str, ranks: int, chunks: int, microbatches: int) -> Order:
    """The order of a schedule.

    Raises: LayoutError: the schedule has no such order, see ``why_not``.
    """
    fault = why_not(schedule, ranks, chunks, microbatches)
    if fault:
        raise LayoutError(fault)
    row = SCHEDULES[schedule]
    stage_rank = stage_ranks(schedule, ranks, chunks)
    parts = [rank_order(schedule, ranks, chunks, microbatches, rank) for rank in range(ranks)]
    return _order(schedule, microbatches // row.pipelines, row.pipelines, stage_rank, parts)


def rank_order(schedule: str, ranks: int, chunks: int, microbatches: int, rank: int) -> list[Ints]:
    """What one rank runs of an order that the schedule has, as columns: kind, stage, microbatch, fused."""
    row = SCHEDULES[schedule]
    each = microbatches // row.pipelines
    stages = np.flatnonzero(stage_ranks(schedule, ranks, chunks) == rank)
    if row.pipelines == 2 and rank >= ranks // 2:
        stages = stages[::-1]  # the pipeline that starts on the nearer end comes first
    words = row.words(ranks, chunks, each, rank)
    chunk, kind = words // CHUNK, words % FUSED
    number = _microbatch(kind, chunk, each, row.newest_first)
    kept = number < each
    columns = (kind, stages[chunk], number, words % CHUNK // FUSED)
    return [column[kept] for column in columns]


def _microbatch(kind: Ints, chunk: Ints, microbatches: int, newest_first: bool) -> Ints:
    """Microbatch of every word of a rank, by counting."""
    number = np.empty_like(kind)
    for mine in (chunk == each for each in range(int(chunk.max()) + 1)):
        forwards = mine & (kind == FORWARD)
        backwards = mine & ((kind == FULL) | (kind == INPUT))
        weights = mine & ((kind == FULL) | (kind == WEIGHT))  # first: a full backward is numbered by the next
        for rows in (weights, forwards, backwards):
            number[rows] = np.arange(np.count_nonzero(rows))
        if newest_first:
            number[backwards] = microbatches - 1 - number[backwards]
    return number


def _order(
    schedule: str, microbatches: int, pipelines: int, stage_rank: Ints, parts: Sequence[Sequence[Ints]]
) -> Order:
    """An order from the columns of each rank: kind, stage, microbatch, fused; read-only, for it is shared."""
    starts = np.cumsum([0, *(len(part[0]) for part in parts)])
    kind, stage, microbatch, fused = (np.concatenate(column) for column in zip(*parts, strict=True))
    columns = (stage_rank, starts, kind, stage, microbatch, fused != 0)
    for column in columns:
        column.setflags(write=False)
    return Order(schedule, len(parts), microbatches, pipelines, *columns)


def order_of(schedule: str, actions: Sequence[Sequence[Action]]) -> Order:
    """The order in which every rank runs ``actions[rank]``, of one pipeline; any order, right or wrong."""
    leaves = [[leaf for a in part for leaf in ((a, a.partner) if a.partner else (a,))] for part in actions]
    placed = dict(sorted((leaf.stage, rank) for rank, part in enumerate(leaves) for leaf in part))
    parts = []
    for part in leaves:
        rows = [(KINDS.index(x.kind), x.stage, x.microbatch, x.partner is not None) for x in part]
        parts.append(list(np.array(rows, dtype=np.int64).reshape(-1, 4).T))
    microbatches = 1 + max(leaf.microbatch for part in leaves for leaf in part)
    return _order(schedule, microbatches, 1, np.array(list(placed.values())), parts)


# Gathering under FSDP


def stage_gathers(order: Order, max_active_stages: int = MAX_ACTIVE_STAGES) -> Ints:
    """Times each stage's parameters are gathered, and freed again, in a step of a multi-stage schedule.

    A rank holds the stages of its next ``max_active_stages`` different ones to run and frees the others.
    Classes of one stage a rank (GPipe, 1F1B) leave gathering to FSDP and are not described by this.

    Source: ``_add_unshard_reshard`` of torch 2.13.
    """
    gathers = np.zeros(order.stages, dtype=np.int64)
    second = np.concatenate([[False], order.fused[:-1]])
    for first, stop in zip(order.starts[:-1], order.starts[1:], strict=True):
        when = np.cumsum(~second[first:stop])  # a fused pair runs at one time
        stages = np.unique(order.stage[first:stop])
        never = int(when[-1]) + 1
        ahead = np.where(order.stage[first:stop, None] == stages, when[:, None], never)
        ahead = np.minimum.accumulate(ahead[::-1])[::-1]  # when each stage runs next
        if second[first:stop].any():
            ahead = ahead[~second[first:stop]]
        last = np.sort(ahead, axis=1)[:, min(max_active_stages, len(stages)) - 1, None]
        held = (ahead <= last) & (ahead < never)
        gathers[stages] = held[0] + np.count_nonzero(held[1:] & ~held[:-1], axis=0)
    return gathers
