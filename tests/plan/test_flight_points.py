"""Microbatches in flight, counted in the orders themselves."""

import pytest

from shardwright.plan.flight_points import FlightPoints, flight_points, passes_apart, weight_passes
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


def tail_of(order, rank):
    """Chunks held at the first pass for weights after the last passes of which none has come between two for
    inputs, and of these the ones that wait for one."""
    forward = waiting = 0
    before, found = None, (0, 0)
    left = sum(kind == FORWARD for kind, _ in actions(order, rank))
    for kind, _ in actions(order, rank):
        left -= kind == FORWARD
        if kind == WEIGHT and not left and before == INPUT and waiting > found[1]:
            found = (forward + waiting, waiting)
        forward += (kind == FORWARD) - (kind in (FULL, INPUT))
        waiting += (kind == INPUT) - (kind == WEIGHT)
        before = kind
    return found


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(("ranks", "times"), [(2, 2), (3, 3), (4, 2), (8, 4)])
def test_tail_is_that_of_the_order(name, ranks, times):
    """The first rank has made its gradients by then."""
    order = build_order(name, ranks, 2, ranks * times)
    for rank in range(1, ranks):
        points = FlightPoints(*flight_points(name, ranks, 2, ranks * times, rank, 2))
        assert tail_of(order, rank) == (points.tail_held * 2, points.tail * 2)
        assert points.turn == (rank == ranks - 1)
    assert not flight_points("InterleavedZeroBubble", ranks, 2, ranks * times, 1, 2)[8:10].any()


@pytest.mark.parametrize(("name", "chunks", "ranks", "m"), CASES)
def test_passes_apart_are_those_of_later_stages(name, chunks, ranks, m):
    """Of a rank's later stages together; behind the first two ranks of DualPipeV there are fewer."""
    order = build_order(name, ranks, chunks, m)
    part = float(passes_apart(name, ranks, m))
    for rank in range(ranks):
        apart = [stage for kind, stage in actions(order, rank) if kind == WEIGHT]
        later = {stage for _, stage in actions(order, rank) if stage > 0}
        assert part > 0 or not apart
        counted = len([stage for stage in apart if stage > 0])
        if name == "DualPipeV" and rank > 1:
            assert counted < part * m * len(later)
        else:
            assert counted == pytest.approx(part * m * len(later))


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
