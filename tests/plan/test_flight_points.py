"""Microbatches in flight, counted in the orders themselves."""

import pytest

from shardwright.check.order import actions_of, chunks_of
from shardwright.plan.flight_points import FlightPoints, flight_points, passes_apart, weight_passes
from shardwright.plan.schedule import FORWARD, FULL, INPUT, WEIGHT, build_order

CASES = [
    (name, chunks, ranks, times * ranks)
    for name, chunks in (
        ("GPipe", 1), ("1F1B", 1), ("LoopedBFS", 2), ("LoopedBFS", 3), ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 3), ("Interleaved1F1B", 6), ("InterleavedZeroBubble", 1),
        ("InterleavedZeroBubble", 2), ("InterleavedZeroBubble", 3), ("InterleavedZeroBubble", 4),
        ("InterleavedZeroBubble", 8),
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


def left_in_the_last_pass_for_inputs(name, ranks, chunks, microbatches, rank):
    """Chunks with gradients of a pass for weights alone, in the last pass for inputs before a chunk is
    through, if no forward pass is left by then."""
    first = chunks_of(name, ranks, chunks, rank).get(0)
    acts = [(kind, chunk) for kind, chunk, _ in actions_of(name, ranks, chunks, microbatches, rank)]
    end = min(max(n for n, act in enumerate(acts) if act in (("B", c), ("W", c))) for c in range(chunks))
    begin = max(n for n, (kind, _) in enumerate(acts) if kind == "F")
    fresh, found = set(), 0
    for place, (kind, chunk) in enumerate(acts[:end]):
        if kind == "I" and chunk != first:
            found = len(fresh) if place > begin else 0
            fresh.discard(chunk)
        elif kind == "W" and chunk != first:
            fresh.add(chunk)
    return found


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(("ranks", "times"), [(2, 2), (3, 3), (4, 2), (6, 2), (8, 2), (8, 4)])
def test_gradients_left_in_the_tail_are_those_of_the_order(name, ranks, times):
    for rank in range(1, ranks):
        points = FlightPoints(*flight_points(name, ranks, 2, ranks * times, rank, 2))
        found = left_in_the_last_pass_for_inputs(name, ranks, 2, ranks * times, rank)
        assert found == points.tail_left * 2, rank


def at_the_first_reduction(name, ranks, chunks, microbatches, rank):
    """Chunks whose gradients have been added up; others than the one that is through and the model's first
    that have some of a pass for weights alone; and those that only wait for the gradients of weights."""
    first = chunks_of(name, ranks, chunks, rank).get(0)
    last = {}
    acts = [(kind, chunk) for kind, chunk, _ in actions_of(name, ranks, chunks, microbatches, rank)]
    for place, (kind, chunk) in enumerate(acts):
        if kind in ("B", "W"):
            last[chunk] = place
    end = min(last.values())
    (through,) = [chunk for chunk, place in last.items() if place == end]
    fresh, summed, pending = set(), {through}, 0
    for kind, chunk in acts[: end + 1]:
        if (kind == "B") or (kind == "W" and chunk == first):
            summed.add(chunk)
        elif kind == "I" and chunk in fresh:
            fresh.remove(chunk)
            summed.add(chunk)
        elif kind == "W":
            fresh.add(chunk)
        if chunk != first:
            pending += (kind == "I") - (kind == "W")
    return len(summed), len(fresh - {through}), pending


@pytest.mark.parametrize(("name", "chunks", "ranks", "microbatches"), CASES)
def test_gradients_at_the_first_reduction_are_those_of_the_order(name, chunks, ranks, microbatches):
    if chunks == 1:
        return  # it is through and has its gradients
    for rank in range(ranks):
        points = FlightPoints(*flight_points(name, ranks, chunks, microbatches, rank, chunks))
        found = at_the_first_reduction(name, ranks, chunks, microbatches, rank)
        of_points = (points.reduced, points.left, points.pending)
        assert found == tuple(share * chunks for share in of_points), rank


def held_when_added_up(ranks, chunks, microbatches, rank, share):
    """Chunks held at most in a pass after gradients of that many chunks, or more, have been added up."""
    name = "InterleavedZeroBubble"
    first = chunks_of(name, ranks, chunks, rank).get(0)
    held, most, fresh, summed = 0, 0, set(), set()
    for kind, chunk, _ in actions_of(name, ranks, chunks, microbatches, rank):
        held += kind == "F"
        if kind == "I" and chunk != first and chunk in fresh:
            fresh.remove(chunk)
            summed.add(chunk)
        elif kind == "W":
            (summed if chunk == first else fresh).add(chunk)
        if kind in ("I", "W") and (kind, chunk) != ("I", first) and len(summed) >= share:
            most = max(most, held)
        held -= kind == "W"
    return most


@pytest.mark.parametrize("chunks", [2, 3, 4, 6])
@pytest.mark.parametrize(("ranks", "rounds"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 4), (8, 2)])
def test_turns_that_add_gradients_up_are_those_of_the_order(chunks, ranks, rounds):
    """``fully_shard`` adds a chunk's gradients up in the first pass for inputs behind one for weights."""
    for rank in range(ranks):
        points = FlightPoints(
            *flight_points("InterleavedZeroBubble", ranks, chunks, rounds * ranks, rank, chunks)
        )
        share = points.past * chunks
        assert share == (2 if chunks > 2 and rounds == 2 and rank == ranks - 1 else chunks)
        held = held_when_added_up(ranks, chunks, rounds * ranks, rank, share)
        assert held == points.steady * chunks, rank


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
