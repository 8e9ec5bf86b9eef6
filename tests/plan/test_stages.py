"""Stages of a pipeline: layers dealt out without loss, and what each rank holds and does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.layout import SCHEDULE_NAMES, Layout
from shardwright.plan.schedule import SCHEDULES, build_order, stage_ranks, why_not
from shardwright.plan.simulate import in_flight
from shardwright.plan.stages import TWO_WAY, busiest_ranks, ranks_stages, slowest_blocks, stages
from shardwright.plan.table import ends_of, stage_layers, table_of

NAMES = [name for name in SCHEDULE_NAMES if name != "none"]

splits = st.integers(1, 40).flatmap(
    lambda stages: st.tuples(st.integers(2 * stages, 200), st.just(stages), st.integers(0, 1))
)


def layout_of(schedule, ranks, chunks, layers, microbatches, ends=0):
    return Layout(
        pp=ranks,
        schedule=schedule,
        chunks=chunks,
        stage_layers=stage_layers(layers, ranks * chunks, ends),
        microbatches=microbatches,
    )


@settings(deadline=None)
@given(splits)
def test_every_layer_is_on_one_stage_and_stages_are_even(split):
    layers, stages, ends = split
    found = stage_layers(layers, stages, ends)
    assert len(found) == stages
    assert sum(found) == layers
    assert min(found) >= 1
    lifted = [n + ends * (stage in (0, stages - 1)) for stage, n in enumerate(found)]
    assert max(lifted) - min(lifted) <= 1


def test_126_layers_on_16_stages_leave_the_ends_lighter():
    """arXiv:2407.21783, section 3.3.2: Llama 3 405B has a layer less on the first and the last stage."""
    assert stage_layers(126, 16) == (7, *[8] * 14, 7)
    assert stage_layers(128, 16) == (8,) * 16
    assert stage_layers(30, 4) == (7, 8, 8, 7)


def test_what_does_not_divide_goes_to_the_middle_then_to_the_first():
    assert stage_layers(9, 4) == (2, 3, 2, 2)
    assert stage_layers(11, 4) == (3, 3, 3, 2)
    assert stage_layers(5, 2) == (3, 2)


@settings(deadline=None)
@given(splits)
def test_the_ends_column_comes_back_from_a_layout(split):
    layers, stages, ends = split
    if stages == 1:
        assert ends_of(Layout(), layers) == 0
        return
    layout = layout_of("1F1B", stages, 1, layers, stages, ends)
    assert stage_layers(layers, stages, ends_of(layout, layers)) == layout.stage_layers


def test_a_split_that_is_not_priced_is_refused_with_those_that_are():
    layout = Layout(pp=4, schedule="1F1B", stage_layers=(2, 2, 2, 10), microbatches=4)
    with pytest.raises(
        LayoutError, match=r"stage_layers=\[2, 2, 2, 10\] is no split .*\[4, 4, 4, 4\], or with"
    ):
        ends_of(layout, 16)


# What a rank holds


@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_the_stages_of_the_order(name):
    """plan/schedule.py places each stage; a two-way pipeline has every stage once in each direction."""
    for ranks in (2, 4, 6):
        chunks = SCHEDULES[name].chunks or 3
        placed = stage_ranks(name, ranks, chunks)
        for rank in range(ranks):
            expected = set((np.flatnonzero(placed == rank) % (ranks * chunks)).tolist())
            assert set(ranks_stages(name, ranks, chunks, rank)) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [4, 8, 12])
def test_microbatches_in_flight_are_those_of_the_order(name, m):
    """Of the first, the second and the last rank, against a walk over every action of the order."""
    ranks, chunks = 4, SCHEDULES[name].chunks or 2
    if why_not(name, ranks, chunks, m):
        return
    table = table_of([layout_of(name, ranks, chunks, 16 * chunks, m)], 16 * chunks)
    peaks = in_flight(build_order(name, ranks, chunks, m)).rank
    for stage in stages(table, 16 * chunks):
        rank = {"first": 0, "second": 1, "last": ranks - 1}[stage.name]
        assert stage.in_flight[0] * len(ranks_stages(name, ranks, chunks, rank)) == peaks[rank]


def test_one_forward_one_backward_holds_less_behind():
    """Shared FORMULAE 2.6: min(m, p - i)."""
    for m in (1, 3, 8, 64):
        table = table_of([layout_of("1F1B", 8, 1, 16, m)], 16)
        held = {stage.name: stage.in_flight[0] for stage in stages(table, 16)}
        assert held == {"first": min(m, 8), "second": min(m, 7), "last": 1}


@pytest.mark.parametrize(("p", "v", "penalty"), [(8, 3, 1.2917), (35, 3, 1.3238), (8, 2, 11.5 / 8)])
def test_the_penalty_of_interleaving(p, v, penalty):
    """Shared FORMULAE 9, fixture 21: 1 + (p-1)/(p v); Megatron-LM prints 11.5 as 12."""
    table = table_of([layout_of("Interleaved1F1B", p, v, 2 * p * v, 8 * p)], 2 * p * v)
    assert next(stages(table, 2 * p * v)).in_flight[0] / p == pytest.approx(penalty, abs=5e-5)


def test_interleaving_holds_more():
    """Shared FORMULAE 2.6: p (1 + (p-1)/(p v)) stages; of a rank with v chunks, each a v-th of its layers."""
    table = table_of([layout_of("Interleaved1F1B", 8, 3, 96, 64), layout_of("1F1B", 8, 1, 96, 64)], 96)
    first = next(stages(table, 96))
    assert first.in_flight.tolist() == [8 * (1 + 7 / 24), 8]


def test_ends_of_the_model_lie_on_the_first_and_last_rank_and_in_a_v_both_on_the_first():
    layouts = [layout_of("1F1B", 4, 1, 16, 8), layout_of("ZBVZeroBubble", 4, 2, 16, 8), Layout()]
    for stage in stages(table_of(layouts, 16), 16):
        rows = stage.valid.tolist()
        assert rows == ([False, False, True] if stage.name == "only" else [True, True, False])
        expected = {
            "only": ([2], [1], [1]),
            "first": ([0, 1], [1, 1], [0, 1]),
            "second": ([0, 1], [0, 0], [0, 0]),
            "last": ([0, 1], [0, 0], [1, 0]),
        }
        index, embedding, head = expected[stage.name]
        assert stage.embedding[index].tolist() == embedding
        assert stage.head[index].tolist() == head
        assert stage.blocks[index].tolist() == ([16] if stage.name == "only" else [4, 4])


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(NAMES),
    st.sampled_from([2, 4, 6]),
    st.integers(1, 3),
    st.integers(0, 30),
    st.integers(0, 1),
)
def test_busiest_ranks_are_among_all(name, ranks, chunks, extra, ends):
    """Against every rank: those with an end, and the most blocks of any other; each layer on half of the
    microbatches where the pipeline goes both ways."""
    chunks = SCHEDULES[name].chunks or chunks
    layers = 2 * ranks * chunks + extra
    layout = layout_of(name, ranks, chunks, layers, 2 * ranks * chunks, ends)
    table = table_of([layout], layers)
    share = 0.5 if name in TWO_WAY else 1
    every = [ranks_stages(name, ranks, chunks, rank) for rank in range(ranks)]
    blocks = [share * sum(layout.stage_layers[stage] for stage in mine) for mine in every]
    assert sum(blocks) == layers
    first, last, other = busiest_ranks(table, layers)
    assert slowest_blocks(table, layers) == max(blocks)
    assert (first.embedding[0], last.head[0]) == (share, share)
    assert first.blocks[0] == max(b for b, mine in zip(blocks, every, strict=True) if 0 in mine)
    assert last.blocks[0] == max(
        b for b, mine in zip(blocks, every, strict=True) if ranks * chunks - 1 in mine
    )
    assert max(first.blocks[0], last.blocks[0], other.blocks[0]) == max(blocks)
