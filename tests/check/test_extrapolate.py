"""A step from two shorter ones: which actions are alike, what a tape has more, sums of stretches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.check.extrapolate import insertions
from shardwright.check.order import actions_of, likenesses, short_pipeline
from shardwright.check.stretch import stretch_of, then, times
from shardwright.run.meter import KINDS

# Schedules


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("GPipe", 1), ("1F1B", 1), ("LoopedBFS", 2), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4),
        ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_a_short_pipeline_does_all_that_a_long_one_does(schedule, chunks, rank):
    """8 ranks and 32 microbatches: a fraction of the passes tells all kinds of action there are."""
    short = short_pipeline(schedule, 8, chunks, 32, rank)
    assert short is not None
    long = actions_of(schedule, 8, chunks, 32, rank)
    assert sum(action.kind == "F" for action in long) == 32 * chunks
    assert short.more <= 17  # DualPipeV needs two a rank, and its middle ranks are all different
    assert (32 - short.microbatches) % (short.more - short.microbatches) == 0
    for count in (short.microbatches, short.more):
        actions = actions_of(schedule, short.ranks, chunks, count, short.rank)
        assert set(likenesses(schedule, long)) <= set(likenesses(schedule, actions))


# Arithmetic

EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(-9, 9).filter(bool)).map(list), max_size=8)
quick = settings(deadline=None, max_examples=50)


@quick
@given(st.lists(EVENTS, max_size=4))
def test_stretches_joined_are_the_stretch_of_all_events(parts):
    joined = stretch_of([])
    for part in parts:
        joined = then(joined, stretch_of(part))
    assert joined == stretch_of([event for part in parts for event in part])


@quick
@given(EVENTS, st.integers(0, 5))
def test_a_stretch_repeated(events, count):
    assert times(stretch_of(events), count) == stretch_of(events * count)


@quick
@given(EVENTS, EVENTS, EVENTS)
def test_one_insertion_is_found_whatever_stands_round_it(before, period, behind):
    """Of three periods too, for every rotation of an insertion repeats to the same."""
    few, more = before + behind, before + period + behind
    assert repeated(few, more, 3) == before + 3 * period + behind


def repeated(few, more, count):
    """The first tape with ``count`` times what the second has more; None if they differ otherwise."""
    found = insertions(few, more)
    if found is None:
        return None
    grown, end = [], 0
    for place, events in found:
        grown += few[end:place] + count * list(events)
        end = place
    return grown + few[end:]


A, B, C, D = ([kind, nbytes] for kind, nbytes in zip(KINDS, (1, 2, 3, 4), strict=False))


def test_several_insertions_stand_beside_their_like():
    assert repeated([A, B, B, C, D, D], [A, *3 * [B], C, *3 * [D]], 4) == [A, *6 * [B], C, *6 * [D]]
    assert repeated([A, C, A], [A, B, C, D, A], 1) is None  # nothing says that a period adds B and D again
    assert repeated([A, B, C], [A, D, C], 1) is None
    assert repeated([A, B], [A], 1) is None
