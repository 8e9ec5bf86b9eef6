"""Microbatches in flight, counted in the orders themselves."""

import pytest

from shardwright.plan.flight_points import FlightPoints, flight_points, weight_passes
from shardwright.plan.schedule import FORWARD, FULL, INPUT, WEIGHT, build_order

CASES = [
    (name, chunks, ranks, times * ranks)
    for name, chunks in (
        ("GPipe", 1), ("1F1B", 1), ("LoopedBFS", 2), ("LoopedBFS", 3), ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 3), ("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2), ("DualPipeV", 2),
    )
    for ranks in (2, 3, 4)
    for times in (2, 3, 4)
]  # fmt: skip


def actions(order, rank):
    rows = range(order.starts[rank], order.starts[rank + 1])
    return [(int(order.kind[row]), int(order.stage[row])) for row in rows]


def counted(order, rank):
    """Chunks held at most in a backward pass, by how many have gradients by then; of the fullest, those that
    have or make the gradients of their inputs; held when the first chunk is through; and passes apart."""
    forward = apart = 0
    held, late, gradients, left = {}, (0, 0), set(), {}
    through, passes = None, 0
    for kind, stage in actions(order, rank):
        if kind in (FULL, WEIGHT):
            left[stage] = left.get(stage, 0) + 1
    for kind, stage in actions(order, rank):
        if kind == FORWARD:
            forward += 1
        elif kind in (FULL, INPUT):
            here = forward + apart
            held[len(gradients)] = max(held.get(len(gradients), 0), here)
            if kind == INPUT:
                late = max(late, (here, apart + 1))
                passes += stage != 0
            forward -= 1
            apart += kind == INPUT
        if kind in (FULL, WEIGHT):
            apart -= kind == WEIGHT
            gradients.add(stage)
            left[stage] -= 1
            if left[stage] == 0 and through is None:
                through = forward + apart
    return held, late, through, passes


@pytest.mark.parametrize(("name", "chunks", "ranks", "microbatches"), CASES)
def test_points_are_those_of_the_order(name, chunks, ranks, microbatches):
    order = build_order(name, ranks, chunks, microbatches)
    for rank in range(ranks):
        held, late, through, passes = counted(order, rank)
        points = FlightPoints(*flight_points(name, ranks, chunks, microbatches, rank, chunks))
        assert max(held.values()) == points.first * chunks
        assert held[1] <= points.second * chunks <= points.first * chunks
        if name != "InterleavedZeroBubble":  # there ``fully_shard`` adds up a turn later
            assert held[chunks] == points.steady * chunks
        assert through == points.reducing * chunks
        if points.apart:
            assert late == (points.first * chunks, points.apart * chunks)
        each = weight_passes(name, ranks, chunks, microbatches, rank)
        if name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
            assert passes == each * chunks * microbatches
        else:
            assert each == 0
