"""Exact time and memory of a pipeline order: an action starts once its rank is free and its needs are there.

The actions of an order are a graph: F needs F of the stage before; B or I needs B or I of the stage behind,
on the last stage its own F; W needs its own I; and each needs the action before it on its rank. A fused pair
is one action. The levels of the graph are found once an order, without times; times then run through them as
arrays with a column for each case. Times broadcast: their last axis is stages, those before it are cases.

Source: shared FORMULAE 6.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.errors import LayoutError
from shardwright.plan.schedule import FORWARD, FULL, INPUT, KINDS, Order, build_order
from shardwright.plan.table import Floats, Ints

_FUSED_PAIR = len(KINDS)  # row of durations, after those of F, B, I, W
_NONE, _NEVER = -1, -2  # needs nothing, needs what the order does not hold


class DeadlockError(LayoutError):
    """An order in which no rank can go on."""


class StageTimes(NamedTuple):
    """Seconds of one microbatch on each stage of the model; shapes (..., stages) broadcast.

    An embedding or a head adds to its stage.
    """

    forward: ArrayLike
    input_grad: ArrayLike
    weight_grad: ArrayLike
    backward: ArrayLike | None = None  # full; None: input_grad + weight_grad
    fused: ArrayLike | None = None  # pair, by the stage of its forward; None: forward + backward


@dataclass(frozen=True, eq=False)
class Graph:
    """An order's actions, by level. ``needs`` and ``hop`` have a second row if pairs are fused."""

    order: Order
    action: Ints  # of each row of the order
    level_starts: list[int]  # first action of each level, and the number of actions
    before: Ints  # the action before on the same rank; the number of actions stands for none
    needs: Ints  # (1 or 2, actions): what it needs besides, and what its partner needs
    hop: Ints  # (1 or 2, actions): boundary that these cross between ranks, i behind stage i; -1: none
    duration: Ints  # of each action, its row in the table of ``_durations``
    partner: Ints  # model stage whose backward is fused with the forward of each
    ends: Ints  # (2, ranks): first and last action of each rank
    counts: Ints  # (rows of durations, ranks): how often each rank runs each


# From an order to a graph


@lru_cache(maxsize=48)
def schedule_graph(schedule: str, ranks: int, chunks: int, microbatches: int) -> Graph:
    """The graph of a schedule's order.

    Raises: LayoutError: the schedule has no such order, see ``why_not``.
    """
    return build_graph(build_order(schedule, ranks, chunks, microbatches))


def build_graph(order: Order) -> Graph:
    """The graph of an order.

    Raises: DeadlockError: it cannot run; names the action at which each rank is stuck, and its need.
    """
    second = np.concatenate([[False], order.fused[:-1]])  # of a fused pair
    action = np.cumsum(~second) - 1
    count = int(action[-1]) + 1
    row_needs, row_hop = _row_needs(order)
    needed = np.where(row_needs >= 0, action[row_needs], np.where(row_needs == _NONE, count, count + 1))
    pairs = 2 if second.any() else 1
    needs, hop = np.full((pairs, count), count), np.full((pairs, count), _NONE)
    for each, rows in enumerate([~second, second][:pairs]):
        needs[each, action[rows]], hop[each, action[rows]] = needed[rows], row_hop[rows]
    starts = [*action[order.starts[:-1]].tolist(), count]
    level = np.array(_levels(starts, *needs.tolist()))
    if level[:count].min() < 0:
        _refuse(order, row_needs, level[action] < 0)
    by_level = np.argsort(level[:count], kind="stable")
    place = np.arange(count + 1)
    place[by_level] = np.arange(count)
    before = np.arange(count) - 1
    before[starts[:-1]] = count
    kind = np.where(order.fused, _FUSED_PAIR, order.kind)[~second]
    duration = kind * order.model_stages + order.stage[~second] % order.model_stages
    rank = np.repeat(np.arange(order.ranks), np.diff(starts))
    counts = np.zeros(((_FUSED_PAIR + 1) * order.model_stages, order.ranks), dtype=np.int64)
    np.add.at(counts, (duration, rank), 1)
    return Graph(
        order=order,
        action=place[action],
        level_starts=[0, *np.cumsum(np.bincount(level[:count])[1:]).tolist()],
        before=place[before][by_level],
        needs=place[needs][:, by_level],
        hop=hop[:, by_level],
        duration=duration[by_level],
        partner=_partners(order),
        ends=place[np.array([starts[:-1], np.array(starts[1:]) - 1])],
        counts=counts,
    )


def _partners(order: Order) -> Ints:
    """Model stage whose backward is fused with the forward of each; itself where none is."""
    forward = np.flatnonzero(order.fused)
    place = order.stage % order.model_stages
    partner = np.arange(order.model_stages)
    partner[place[forward]] = place[forward + 1]
    if (partner[place[forward]] != place[forward + 1]).any():
        raise LayoutError(f"{order.schedule} fuses forwards of a stage with backwards of several: use one")
    return partner


def _row_needs(order: Order) -> tuple[Ints, Ints]:
    """For each row, the row it needs besides the one before it, and the boundary of ranks between the two."""
    kind, stage, microbatch = order.kind, order.stage, order.microbatch
    forward, backward = kind == FORWARD, (kind == FULL) | (kind == INPUT)
    found = np.full((2, order.stages + 1, order.microbatches), _NEVER)  # rows of forwards, of backwards
    for each, rows in enumerate([forward, backward]):
        found[each, stage[rows], microbatch[rows]] = np.flatnonzero(rows)
    place = stage % order.model_stages
    first, last = place == 0, place == order.model_stages - 1
    needs = np.select(
        [forward & first, forward, backward & last, backward],
        [
            np.full_like(kind, _NONE),
            found[0, stage - 1, microbatch],
            found[0, stage, microbatch],
            found[1, stage + 1, microbatch],
        ],
        found[1, stage, microbatch],
    )
    boundary = np.where(forward, stage - 1, stage)
    other = np.append(order.stage_rank, -1)
    crosses = (forward & ~first) | (backward & ~last)
    crosses &= other[boundary] != other[boundary + 1]
    return needs, np.where(crosses, boundary, _NONE)


def _levels(starts: list[int], needs: list[int], pair_needs: list[int] | None = None) -> list[int]:
    """Longest way to each action, in actions; -1 if it cannot run. The last two stand for none and never.

    Each rank runs on until it waits; the action it waits for wakes it.
    """
    level = [-1] * starts[-1] + [0, -1]
    at, awake = starts[:-1], list(range(len(starts) - 1))
    waiting: dict[int, list[int]] = {}
    while awake:
        rank = awake.pop()
        action, stop = at[rank], starts[rank + 1]
        now = level[action - 1] if action > starts[rank] else 0
        while action < stop:
            need = needs[action]
            if level[need] >= 0 and pair_needs is not None:
                now = max(now, level[need])
                need = pair_needs[action]
            theirs = level[need]
            if theirs < 0:
                waiting.setdefault(need, []).append(rank)
                break
            now = (theirs if theirs > now else now) + 1
            level[action] = now
            if action in waiting:
                awake += waiting.pop(action)
            action += 1
        at[rank] = action
    return level


def _refuse(order: Order, needs: Ints, stuck: NDArray[np.bool_]) -> None:
    """Raise the error that names where each rank is stuck."""
    missing = (needs == _NEVER) | ((needs >= 0) & stuck[needs])
    found = []
    for rank in range(order.ranks):
        rows = np.flatnonzero(missing[order.starts[rank] : order.starts[rank + 1]])
        if len(rows):
            row = int(order.starts[rank] + rows[0])
            need = int(needs[row])
            what = "an action that no rank has" if need == _NEVER else str(order.row_action(need))
            found.append(f"rank {rank} at {order.row_action(row)} waits for {what}")
    raise DeadlockError(f"{order.schedule} on {order.ranks} ranks cannot run: {'; '.join(found)}")


# Times


@dataclass(frozen=True, eq=False)
class Timeline:
    """When every action runs [s]. Axes of cases come first."""

    graph: Graph
    cases: tuple[int, ...]
    action_start: Floats  # (actions, cases)
    action_end: Floats
    busy: Floats  # (..., ranks): seconds of computing

    def _rows(self, actions: Floats) -> Floats:
        return np.moveaxis(actions[self.graph.action].reshape(-1, *self.cases), 0, -1)

    @property
    def start(self) -> Floats:
        """Start of each row of the order, of a receive that blocks included, (..., rows)."""
        return self._rows(self.action_start)

    @property
    def end(self) -> Floats:
        """End of each row of the order, (..., rows)."""
        return self._rows(self.action_end)

    @cached_property
    def span(self) -> Floats:
        """From the start of a rank's first action to the end of its last, (..., ranks)."""
        first, last = self.graph.ends
        span = self.action_end[last] - self.action_start[first]
        return np.moveaxis(span.reshape(-1, *self.cases), 0, -1)

    @cached_property
    def makespan(self) -> Floats:
        """From the first start of all ranks to the last end, (...)."""
        whole = self.action_end.max(axis=0) - self.action_start.min(axis=0)
        return np.asarray(whole.reshape(self.cases))

    @property
    def makespan_bubble(self) -> Floats:
        """Idle time of each rank if all begin and end together (a norm or a barrier before the next step)."""
        return np.asarray(self.makespan[..., None] - self.busy)

    @property
    def span_bubble(self) -> Floats:
        """Idle time of each rank if each begins its next step as soon as it can, so that steps overlap."""
        return np.asarray(self.span.max(axis=-1, keepdims=True) - self.busy)


def simulate(graph: Graph, times: StageTimes, hop: ArrayLike = 0.0, blocking: bool = False) -> Timeline:
    """Times of every action [s], for every case.

    ``hop`` is the time of a transfer between stages on different ranks, shape (..., order.stages - 1) or one
    that broadcasts to it: entry i lies behind stage i. Transfers do not wait for each other. ``blocking``: a
    receive occupies its rank, as in torch's GPipe and 1F1B, which wait for it on the spot; otherwise only its
    taker waits, as in the multi-stage classes, which post it ahead. Takes 40 B an action and case.
    """
    order = graph.order
    shapes = [np.shape(array)[:-1] for array in (*times, hop) if array is not None]
    cases = np.broadcast_shapes(*shapes)
    table = _durations(times, cases, graph.partner)
    busy = np.moveaxis((graph.counts.T @ table).reshape(-1, *cases), 0, -1)
    duration = table[graph.duration]
    delays: list[Floats] = []
    if np.any(hop):
        hops = np.concatenate([_columns(hop, cases, order.stages - 1), np.zeros((1, duration.shape[1]))])
        delays = [hops[boundary] for boundary in graph.hop]
    if blocking and delays:
        duration, delays = duration + sum(delays), []
    start, end = _run(graph, duration, delays)
    return Timeline(graph, cases, start, end, busy)


def _columns(values: ArrayLike, cases: tuple[int, ...], width: int) -> Floats:
    """Values of shape (..., width) as (width, cases)."""
    whole = np.broadcast_to(np.asarray(values, dtype=np.float64), (*cases, width))
    return np.moveaxis(whole, -1, 0).reshape(width, math.prod(cases))


def _durations(times: StageTimes, cases: tuple[int, ...], partner: Ints) -> Floats:
    """Durations of F, B, I, W and a fused pair on each stage, (5 stages, cases)."""
    stages = len(partner)
    forward, input_grad, weight_grad = (_columns(array, cases, stages) for array in times[:3])
    backward = input_grad + weight_grad
    if times.backward is not None:
        backward = _columns(times.backward, cases, stages)
    fused = forward + backward[partner]
    if times.fused is not None:
        fused = _columns(times.fused, cases, stages)
    return np.concatenate([forward, backward, input_grad, weight_grad, fused])


def _run(graph: Graph, duration: Floats, delays: list[Floats]) -> tuple[Floats, Floats]:
    """Start and end of every action, level by level; ``delays`` go with the rows of needs, or are none."""
    count, cases = duration.shape
    flat = (count,) if cases == 1 else (count, cases)  # one case: vectors are faster
    start, end = np.empty(flat), np.zeros((count + 1, *flat[1:]))
    duration, delays = duration.reshape(flat), [delay.reshape(flat) for delay in delays]
    needs = list(zip_longest(graph.needs, delays))
    for low, high in pairwise(graph.level_starts):
        ready = start[low:high]
        end.take(graph.before[low:high], axis=0, out=ready)
        for need, delay in needs:
            there = end.take(need[low:high], axis=0)
            if delay is not None:
                there += delay[low:high]
            np.maximum(ready, there, out=ready)
        np.add(ready, duration[low:high], out=end[low:high])
    return start.reshape(count, cases), end[:count].reshape(count, cases)


# Memory


class InFlight(NamedTuple):
    """Most that is held for the backward pass at any time, in the unit given for a stage's microbatch."""

    rank: Floats  # (..., ranks)
    stage: Floats  # (..., stages of the order)


def in_flight(order: Order, unit: ArrayLike = 1.0, kept_for_weight: float = 1.0) -> InFlight:
    """Most activations held, from the start of a forward to the end of its backward.

    ``unit`` is what one microbatch leaves on each stage of the model, shape (..., stages) or one that
    broadcasts. Of it ``kept_for_weight`` is held between the gradients of input and weights; torch keeps all.
    It follows from the order alone: times do not matter.
    """
    cases = np.shape(unit)[:-1]
    each = _columns(unit, cases, order.model_stages)[order.stage % order.model_stages]
    taken = np.array([1.0, 0.0, 0.0, 0.0])[order.kind, None] * each
    freed = np.array([0.0, 1.0, 1.0 - kept_for_weight, kept_for_weight])[order.kind, None] * each
    by_stage = np.argsort(order.stage, kind="stable")
    first = np.searchsorted(order.stage[by_stage], np.arange(order.stages))
    return InFlight(
        rank=_peaks(taken, freed, order.starts[:-1], cases),
        stage=_peaks(taken[by_stage], freed[by_stage], first, cases),
    )


def _peaks(taken: Floats, freed: Floats, starts: Ints, cases: tuple[int, ...]) -> Floats:
    """Largest sum of what is taken before and freed after each row, in each part that ``starts`` begins."""
    held = np.cumsum(taken - freed, axis=0)
    base = np.repeat((held - taken + freed)[starts], np.diff([*starts, len(held)]), axis=0)
    peaks = np.maximum.reduceat(held + freed - base, starts, axis=0)
    return np.moveaxis(peaks.reshape(-1, *cases), 0, -1)
