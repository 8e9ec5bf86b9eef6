"""Microbatches in flight on a pipeline rank at the points of a step where its memory may be highest."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright.plan.bubble import in_flight_chunks
from shardwright.plan.schedule import round_size
from shardwright.plan.table import Floats


class FlightPoints(NamedTuple):
    """Microbatches in flight on a rank, of all its chunks, where its memory may be highest; the one at work
    counts.

    ``first``: its first backward pass begins, no gradients yet. ``second``: the next one of that chunk, whose
    gradients are there. ``steady``: those of all its chunks are, in the type they are reduced in. ``heads``:
    of ``first``, those past the last stage's forward pass. ``apart``: of ``first``, those of which only the
    gradients of weights are to come, or that are at work to that end; 0 where they are made together.

    ``tail_held``: no forward pass is left, and most passes for weights are. ``tail``: of these, those of
    which only the gradients of weights are to come; 0 where that is never more than before. ``tail_left``: as
    ``left``, in the last pass for inputs from then on, with as many to come; 0 where there is none.

    ``past``: share of the chunks whose gradients have been added up at ``steady``: all, but for the last rank
    of so few microbatches that its first chunks are reduced by then. ``settled``: whether as many are in
    flight after every chunk's have been once; ``begun``: whether a turn then begins with some of both types.

    ``reducing``: the gradients of the first chunk that is through are reduced. ``pending``: of these, those
    of which only the gradients of weights are to come. ``reduced``: share of the chunks with gradients then
    that have been added up, and ``left`` of other chunks with some as a pass for weights left them.

    ``turn``: stages whose input is the output of another on the rank, where a V turns.
    """

    first: Floats
    second: Floats
    steady: Floats
    heads: Floats
    apart: Floats
    reducing: Floats
    pending: Floats
    reduced: Floats
    left: Floats
    tail_held: Floats
    tail: Floats
    tail_left: Floats
    past: Floats
    settled: Floats
    begun: Floats
    turn: Floats


TWO_PASSES = ("InterleavedZeroBubble", "ZB-H1", "ZB-H2", "ZBVZeroBubble", "DualPipeV", "DualPipe")
"""Schedules that make some gradients of inputs and of weights apart."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules whose two middle stages are on one rank."""


def flight_points(
    schedule: str,
    ranks: ArrayLike,
    chunks: ArrayLike,
    microbatches: ArrayLike,
    rank: ArrayLike,
    stages: ArrayLike,
) -> Floats:
    """``FlightPoints`` along a first axis; ``stages``: of the rank.

    ``in_flight_chunks`` until forward passes run out; then each backward pass takes one away. Exact with
    twice as many microbatches as ranks.

    Source: the orders of plan/schedule.py, counted by tests.
    """
    p, v, m, r = (np.asarray(column, dtype=np.float64) for column in (ranks, stages, microbatches, rank))
    first = in_flight_chunks(schedule, ranks, chunks, microbatches, rank)
    breadth_first = schedule in ("GPipe", "LoopedBFS")
    turn = m if breadth_first else round_size(p, m) if schedule.startswith("Interleaved") else 1.0
    second = np.minimum(first, m * v - 1)
    steady = np.minimum(first, m * v - (v - 1) * turn - 1)
    reducing = (v - 1) * turn
    apart, past, settled = _passes_apart(schedule, first, r), 1.0 * v, np.ones_like(first)
    begun = settled
    if schedule == "InterleavedZeroBubble":  # a turn later: see plan/apart.py
        turn = np.where(v > 1, turn, 1.0)
        through = m * v - (2 * v - 1 - (r == 0)) * turn + apart - 1
        soon, rounds = r < p - 1, m >= 2 * turn  # the last rank has all of a turn's in one type
        steady = np.where(soon & rounds, first, np.minimum(first, through))
        early = ~soon & (v > 2) & (m == 2 * turn)
        steady, past = np.where(early, v * turn - 1, steady), np.where(early, 2.0, past)
        settled = np.where((r == 0) | (through - turn >= first) | ((r < p - 2) & rounds), 1.0, 0.0)
        begun = np.where(soon & rounds, 1.0, settled)
    elif schedule == "ZBVZeroBubble":
        steady = np.minimum(steady, 2 * m - p - 1 + r)
        reducing, turn = np.where(r == 0, p, r), p
    elif schedule == "DualPipeV":
        steady = np.minimum(steady, 2 * (m - p) + r)
        reducing, turn = p - r, p
    second, steady = (np.maximum(held, 1.0) for held in (second, steady))
    heads = (m if breadth_first else np.ones_like(m)) * v
    pending = np.minimum(r, reducing) if schedule in TWO_PASSES else 0.0 * reducing
    reduced, left = np.where(m <= turn, 1.0, v), _left_to_add_up(schedule, p, v, m, r)
    if schedule == "InterleavedZeroBubble":  # the last rank has all of a turn's of a chunk in one type
        reduced = np.where((r == p - 1) & (m <= 2 * turn), np.minimum(reduced, 2.0), reduced)
    tail = _tail(schedule, r) + 0.0 * first
    held = np.where(tail > 0, p - 1 - r + tail, 0.0)
    points = (
        *(first, second, steady, heads, apart, reducing, pending, reduced, left),
        *(held, tail, _tail_left(schedule, p, r) + 0.0 * first, past),
    )
    turn = np.where(r == p - 1, 1.0, 0.0) if schedule in V_SHAPED else 0.0 * r
    return np.stack(np.broadcast_arrays(*(point / v for point in points), settled, begun, turn))


def _passes_apart(schedule: str, held: Floats, rank: Floats) -> Floats:
    """Chunks that have the gradients of their inputs, one at work included, when a rank holds most. In
    DualPipeV and DualPipe that is in a full backward pass."""
    if schedule not in ("InterleavedZeroBubble", "ZB-H1", "ZB-H2", "ZBVZeroBubble"):
        return 0.0 * held
    late = 0.0 if schedule == "ZBVZeroBubble" else (2 if schedule == "ZB-H2" else 1) * rank
    return np.minimum(late + 1.0, held)


def _left_to_add_up(schedule: str, p: Floats, v: Floats, m: Floats, r: Floats) -> Floats:
    """Chunks, but for the one that is through and the model's first, that a pass for weights has been through
    and none for inputs since."""
    if schedule == "InterleavedZeroBubble":
        return np.where(m > round_size(p, m), np.maximum(v - 2, 0), 0.0)
    if schedule == "ZBVZeroBubble":
        return np.where(r > 0, 1.0, 0.0)
    return np.where((p > 2) & (r == p - 1), 1.0, 0.0) if schedule == "DualPipeV" else 0.0 * r


def _tail_left(schedule: str, p: Floats, r: Floats) -> Floats:
    """Chunks that passes for weights have been through and none for inputs since, in the last of these before
    a chunk is through."""
    if schedule == "ZBVZeroBubble":
        return np.where(r > 0, np.minimum(p - 1 - r, 1), 0.0)
    most = np.minimum(np.minimum(r, p - r) - 1, 2)
    return np.maximum(most, 0.0) if schedule == "DualPipeV" else 0.0 * r


def _tail(schedule: str, rank: Floats) -> Floats:
    """Chunks that wait for the gradients of their weights, one at work included, when forward passes have run
    out; those of the first rank have been made by then."""
    if schedule == "ZBVZeroBubble":
        return np.where(rank > 0, 2 * rank + 1, 0.0)
    return np.where(rank > 0, rank + 1, 0.0) if schedule == "DualPipeV" else 0.0 * rank


def passes_apart(schedule: str, ranks: ArrayLike, microbatches: ArrayLike) -> Floats:
    """Of the microbatches of a stage behind the first, those whose gradients of weights have a pass of their
    own, over all; of DualPipeV, those of the first two ranks, which have most.

    Source: as ``weight_passes``.
    """
    p, m = (np.asarray(column, dtype=np.float64) for column in (ranks, microbatches))
    if schedule == "DualPipeV":
        return np.asarray((p - 1) / m)
    return np.broadcast_to(float(schedule in ("InterleavedZeroBubble", "ZBVZeroBubble")), (p * m).shape)


def weight_passes(
    schedule: str, ranks: ArrayLike, chunks: ArrayLike, microbatches: ArrayLike, rank: ArrayLike
) -> Floats:
    """Passes of a rank for the gradients of weights alone, of all chunks, over those for all microbatches and
    chunks. The first stage has none, it makes all its gradients in one.

    Source: the orders of plan/schedule.py, counted by tests.
    """
    p, v, m, r = (np.asarray(column, dtype=np.float64) for column in (ranks, chunks, microbatches, rank))
    if schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        passes = m * (v - (r == 0))
    elif schedule == "DualPipeV":
        passes = np.where(r == 0, p - 1, 2 * p - 1 - r)
    else:
        passes = 0.0 * (p * v * m * r)
    return np.asarray(passes / (m * v))
