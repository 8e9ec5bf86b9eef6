"""Stages of a pipeline: layers dealt out without loss, and what each rank holds and does."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.layout import SCHEDULE_NAMES, Layout
from shardwright.model import ModelSpec, preset
from shardwright.plan.schedule import SCHEDULES, build_order, stage_ranks, why_not
from shardwright.plan.simulate import in_flight
from shardwright.plan.splits import ENDS, GIVEN, ends_of, stage_layers
from shardwright.plan.stages import (
    TWO_WAY,
    V_SHAPED,
    busiest_ranks,
    expert_layers,
    most_expert_blocks,
    ranks_stages,
    slowest_blocks,
    stages,
)
from shardwright.plan.table import LayoutTable, by_schedule, distinct, table_of

NAMES = [name for name in SCHEDULE_NAMES if name != "none"]

splits = st.integers(1, 40).flatmap(
    lambda stages: st.tuples(st.integers(2 * stages, 200), st.just(stages), st.integers(0, 1))
)


def model_of(layers, **moe):
    """A dense model; with ``moe``, one that has experts in some layers."""
    family = {"model_type": "mixtral", "moe": {"experts": 8, "top_k": 2, "ffn": 64, **moe}} if moe else {}
    return ModelSpec.checked(
        {"name": "m", "model_type": "llama", "layers": layers, "hidden": 64, "ffn": 64, "heads": 4,
         "kv_heads": 4, "head_size": 16, "vocab": 128, **family}
    )  # fmt: skip


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


def test_every_code_takes_its_layers_off_the_ends():
    assert ENDS[:4] == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert len(set(ENDS)) == GIVEN == 16
    for code, less in enumerate(ENDS):
        lifted = np.array(stage_layers(80, 8, code))
        assert lifted.sum() == 80
        lifted[[0, -1]] += less
        assert np.ptp(lifted) <= 1
    assert stage_layers(80, 8, ENDS.index((0, 2))) == (10, 11, 11, 10, 10, 10, 10, 8)
    assert stage_layers(31, 4, ENDS.index((1, 0))) == (7, 8, 8, 8)


@settings(deadline=None)
@given(splits)
def test_the_ends_column_comes_back_from_a_layout(split):
    layers, stages, ends = split
    if stages == 1:
        assert ends_of(Layout(), layers) == 0
        return
    layout = layout_of("1F1B", stages, 1, layers, stages, ends)
    assert stage_layers(layers, stages, ends_of(layout, layers)) == layout.stage_layers


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=8))
def test_any_split_has_a_code(split):
    layout = Layout(pp=len(split), schedule="1F1B", stage_layers=tuple(split), microbatches=8)
    code = ends_of(layout, sum(split))
    assert stage_layers(sum(split), len(split), code) == tuple(split)
    assert code == ends_of(layout, sum(split))
    assert table_of([layout], sum(split)).layout(0, sum(split)) == layout


def test_a_split_of_another_number_of_layers_is_refused_with_one_that_is_right():
    layout = Layout(pp=4, schedule="1F1B", stage_layers=(2, 2, 2, 10), microbatches=4)
    with pytest.raises(
        LayoutError,
        match=r"stage_layers=\[2, 2, 2, 10\] add up to 16, the model has layers=32: use \[8, 8, 8, 8\]",
    ):
        ends_of(layout, 32)


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
    for stage in stages(table, model_of(16 * chunks)):
        rank = int(stage.rank[0])
        assert rank == {"first": 0, "second": 1, "last": ranks - 1}[stage.name]
        assert stage.in_flight[0] * len(ranks_stages(name, ranks, chunks, rank)) == peaks[rank]


def test_one_forward_one_backward_holds_less_behind():
    """Shared FORMULAE 2.6: min(m, p - i)."""
    for m in (1, 3, 8, 64):
        table = table_of([layout_of("1F1B", 8, 1, 16, m)], 16)
        held = {stage.name: stage.in_flight[0] for stage in stages(table, model_of(16))}
        assert held == {"first": min(m, 8), "second": min(m, 7), "last": 1}


@pytest.mark.parametrize(("p", "v", "penalty"), [(8, 3, 1.2917), (35, 3, 1.3238), (8, 2, 11.5 / 8)])
def test_the_penalty_of_interleaving(p, v, penalty):
    """Shared FORMULAE 9, fixture 21: 1 + (p-1)/(p v); Megatron-LM prints 11.5 as 12."""
    table = table_of([layout_of("Interleaved1F1B", p, v, 2 * p * v, 8 * p)], 2 * p * v)
    assert next(stages(table, model_of(2 * p * v))).in_flight[0] / p == pytest.approx(penalty, abs=5e-5)


def test_interleaving_holds_more():
    """Shared FORMULAE 2.6: p (1 + (p-1)/(p v)) stages; of a rank with v chunks, each a v-th of its layers."""
    table = table_of([layout_of("Interleaved1F1B", 8, 3, 96, 64), layout_of("1F1B", 8, 1, 96, 64)], 96)
    first = next(stages(table, model_of(96)))
    assert first.in_flight.tolist() == [8 * (1 + 7 / 24), 8]


def test_ends_of_the_model_lie_on_the_first_and_last_rank_and_in_a_v_both_on_the_first():
    layouts = [layout_of("1F1B", 4, 1, 16, 8), layout_of("ZBVZeroBubble", 4, 2, 16, 8), Layout()]
    for stage in stages(table_of(layouts, 16), model_of(16)):
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
    first, last, other = busiest_ranks(table, model_of(layers))
    assert slowest_blocks(table, model_of(layers)) == max(blocks)
    assert (first.embedding[0], last.head[0]) == (share, share)
    assert first.blocks[0] == max(b for b, mine in zip(blocks, every, strict=True) if 0 in mine)
    assert last.blocks[0] == max(
        b for b, mine in zip(blocks, every, strict=True) if ranks * chunks - 1 in mine
    )
    assert max(first.blocks[0], last.blocks[0], other.blocks[0]) == max(blocks)


# Two kinds of blocks, and splits of any kind


def test_the_first_layers_of_deepseek_v3_have_no_experts():
    """arXiv:2412.19437, section 4.2: 61 layers, all but the first three with experts."""
    model = preset("deepseek-v3")
    table = table_of([layout_of("1F1B", 16, 1, 61, 64), layout_of("1F1B", 4, 1, 61, 64), Layout()], 61)
    held = {stage.name: stage for stage in stages(table, model)}
    assert held["only"].expert_blocks[2] == 58
    assert held["first"].blocks[:2].tolist() == [3, 15]
    assert held["first"].expert_blocks[:2].tolist() == [0, 12]
    assert held["second"].expert_blocks[:2].tolist() == [4, 16]
    assert most_expert_blocks(table, model).tolist() == [4, 16, 58]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["1F1B", "GPipe", "ZB-H1", "ZB-H2", "DualPipeV", "ZBVZeroBubble"]),
    st.lists(st.integers(1, 5), min_size=8, max_size=8),
    st.sets(st.integers(0, 7), min_size=1),
    st.integers(8, 20),
    st.lists(st.floats(0, 3), min_size=4, max_size=4),
)
def test_the_heaviest_and_the_busiest_rank_are_among_the_candidates(name, split, dense, m, weights):
    """Against every rank, for any split, layers with experts, and weights of what is kept and run."""
    chunks = SCHEDULES[name].chunks or 1
    layers, p = sum(split), 8 // chunks
    model = preset("llama-4-scout").model_copy(
        update={
            "layers": layers,
            "moe": preset("llama-4-scout").moe.model_copy(update={"dense_layers": dense}),
        }
    )
    assert expert_layers(model) == tuple(layer not in dense for layer in range(layers))
    layout = Layout(pp=p, schedule=name, chunks=chunks, stage_layers=tuple(split), microbatches=m)
    table = table_of([layout], layers)
    starts = np.cumsum([0, *split])
    of_stage = [sum(expert_layers(model)[a:b]) for a, b in pairwise(starts)]
    peaks = in_flight(build_order(name, p, chunks, m)).rank / chunks
    every = []
    for rank in range(p):
        mine = ranks_stages(name, p, chunks, rank)
        blocks, experts = (sum(column[stage] for stage in mine) for column in (split, of_stage))
        every.append((blocks - experts, experts, 0 in mine, 8 - 1 in mine, peaks[rank]))

    def weight(one, other, embedding, head, flying):
        held = weights[0] * one + weights[1] * other
        return held * (1 + flying) + weights[2] * embedding + weights[3] * head

    found = [
        weight(s.blocks - s.expert_blocks, s.expert_blocks, s.embedding, s.head, s.in_flight)
        for s in stages(table, model)
    ]
    assert np.max(found) == pytest.approx(max(weight(*rank) for rank in every))
    busy = [
        weight(w.blocks - w.expert_blocks, w.expert_blocks, w.embedding, w.head, 0)
        for w in busiest_ranks(table, model)
    ]
    assert np.max(busy) == pytest.approx(max(weight(*rank[:4], 0) for rank in every))
    assert most_expert_blocks(table, model) == max(rank[1] for rank in every)


def test_in_flight_falls_with_the_rank_but_in_a_v():
    """What ``stages`` takes for granted when it leaves ranks out."""
    for name in NAMES:
        for p, v, m in ((4, 2, 8), (6, 2, 6), (6, 2, 36), (8, 1, 16)):
            v = SCHEDULES[name].chunks or v
            if why_not(name, p, v, m):
                continue
            peaks = in_flight(build_order(name, p, v, m)).rank
            peaks = peaks[::-1] if name in V_SHAPED else peaks
            assert (np.diff(peaks[: p // 2] if name in TWO_WAY else peaks) <= 0).all(), (name, p, v, m)


# Columns of a grid


def grid_of(**columns):
    """A table whose columns are one number, or lie along axes of their own."""
    fields = table_of([layout_of("1F1B", 4, 1, 32, 16)], 32)._asdict()
    return LayoutTable(
        **{name: columns.get(name, column.reshape(1, 1, 1)) for name, column in fields.items()}
    )


def test_a_grid_is_its_rows():
    kinds = [("1F1B", 1, 0), ("1F1B", 1, 1), ("Interleaved1F1B", 2, 0), ("ZBVZeroBubble", 2, 4)]
    codes, chunks, ends = zip(*kinds, strict=True)
    schedule, chunks, ends = (
        np.array(column).reshape(1, -1, 1)
        for column in ([SCHEDULE_NAMES.index(name) for name in codes], chunks, ends)
    )
    m = np.array([4, 8, 64]).reshape(1, 1, -1)
    model = model_of(33)
    grid = grid_of(schedule=schedule, chunks=chunks, ends=ends, microbatches=m)
    flat = LayoutTable(*(np.broadcast_to(column, (1, 4, 3)).ravel() for column in grid))
    pairs = zip(stages(grid, model), stages(flat, model), strict=True)
    for one, other in pairs:
        assert one.blocks.shape == (1, 4, 1)
        columns, row_columns = ((*stage[1:-1], *stage.flight) for stage in (one, other))
        for column, row in zip(columns, row_columns, strict=True):
            assert np.broadcast_to(column, (1, 4, 3)).ravel().tolist() == row.tolist()
    for function in (slowest_blocks, most_expert_blocks):
        assert (
            np.broadcast_to(function(grid, model), (1, 4, 3)).ravel().tolist()
            == function(flat, model).tolist()
        )
    for one, other in zip(busiest_ranks(grid, model), busiest_ranks(flat, model), strict=True):
        for column, row in zip(one, other, strict=True):
            assert np.broadcast_to(column, (1, 4, 3)).ravel().tolist() == row.tolist()


columns_of_any_shape = st.lists(
    st.tuples(*[st.booleans()] * 3).map(lambda wide: tuple(3 if w else 1 for w in wide)),
    min_size=2,
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(columns_of_any_shape, st.integers(0, 2**31), st.booleans())
def test_distinct_and_by_schedule_broadcast(shapes, seed, sorted_runs):
    source = np.random.default_rng(seed)
    columns = [source.integers(0, 3, shape) for shape in shapes]
    if sorted_runs:
        columns = [np.sort(column.ravel()).reshape(column.shape) for column in columns]
    cases, index = distinct(*columns)
    whole = np.broadcast_arrays(*columns)
    assert index.shape == whole[0].shape
    assert len(set(cases)) == len(cases)
    for place in np.ndindex(index.shape):
        assert cases[index[place]] == tuple(column[place] for column in whole)
    seen = []

    def named(name, *parts):
        seen.append(name)
        return sum(parts) * SCHEDULE_NAMES.index(name)

    found = np.broadcast_to(by_schedule(columns[0], named, *columns[1:]), whole[0].shape)
    assert (found == whole[0] * sum(whole[1:])).all()
    assert len(seen) == len(set(seen)) == len(np.unique(columns[0]))


def test_one_schedule_costs_no_copy_and_no_rows_none():
    column = np.arange(5)
    assert by_schedule(np.array([[1]]), lambda name, whole: whole, column) is column
    assert by_schedule(np.array(1), lambda name, whole: whole, column) is column
    none = np.array([], dtype=int)
    assert by_schedule(none, lambda name, whole: whole, none).tolist() == []
    assert distinct(none, none)[0] == []
