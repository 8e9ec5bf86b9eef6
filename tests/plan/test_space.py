"""The space of a job: every layout that keeps the rules, once, and nothing else."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import EXPERTS, MIXED, SPEC, alone, rows_of, small_cluster

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import (
    CONTEXT_KINDS,
    DISPATCH_KINDS,
    OFFLOAD_KINDS,
    SCHEDULE_NAMES,
    faults,
    model_faults,
)
from shardwright.model import preset
from shardwright.plan.evaluate import evaluate, least, of_microbatches, whole_step
from shardwright.plan.space import GRID_AXES, divisors, search_space
from shardwright.plan.traffic import traffic

WHOLE = SPEC.model_copy(update={"heads": 1, "kv_heads": 1, "head_size": 64, "layers": 1})
"""With sequences of odd length, a model that only its data can split."""


@given(number=st.integers(1, 5000))
def test_divisors(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_the_space_has_every_stage_microbatch_and_way_to_save_memory():
    space = search_space(WHOLE, Job(seq=61, global_batch=16), 4)
    table = space.flat()
    # dp_shard 1 with stage 0, dp_shard 2 and 4 with three stages; microbatches of 1, 2, 4; of one layer three
    # kinds of recomputation; the loss whole or in parts; four kinds of offload
    assert table.rows == space.rows == (1 + 3 + 3) * 3 * 3 * 2 * 4
    assert (table.dp == 4).all()
    assert (table.dp * table.micro_batch * table.microbatches == 16).all()


@settings(deadline=None, max_examples=8)
@given(
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8]),
    batch=st.sampled_from([4, 6, 12]),
    layers=st.integers(1, 9),
    tied=st.booleans(),
    base=st.sampled_from([SPEC, EXPERTS, MIXED]),
)
def test_every_row_keeps_the_rules_and_stands_once(ranks, batch, layers, tied, base):
    """Layout itself refuses fields that contradict one another; those of memory are tried on some rows."""
    layers = max(layers, 1 + (base.moe.first_dense_layers if base.moe else 0))
    model = base.model_copy(update={"layers": layers, "tied_embeddings": tied})
    job, cluster = Job(seq=64, global_batch=batch), cluster_of("h100-sxm", ranks)
    space = search_space(model, job, ranks)
    if not space.grids:
        assert all(batch % dp for dp in space.unshared)
        return
    table = space.flat()
    assert len(set(rows_of(table))) == table.rows == sum(grid.ordered_rows for grid in space.grids)
    found = [table.layout(row, layers) for row in range(0, table.rows, table.rows // 200 + 1)]
    assert len(set(found)) == len(found)
    for layout in found:
        assert not faults(layout, job, cluster) + model_faults(layout, model, job)


def test_each_axis_schedule_and_kind_is_there():
    """DualPipe holds each parameter twice, DualPipeV does the same on half the ranks: it is left out."""
    table = search_space(preset("llama-3.1-8b"), Job(seq=8192, global_batch=16), 16).flat()
    assert set(np.unique(table.tp).tolist()) == {1, 2, 4, 8, 16}
    assert set(np.unique(table.cp).tolist()) == {1, 2, 4, 8, 16}
    assert set(np.unique(table.pp).tolist()) == {1, 2, 4, 8, 16}
    assert {SCHEDULE_NAMES[code] for code in np.unique(table.schedule)} == set(SCHEDULE_NAMES) - {"DualPipe"}
    assert {CONTEXT_KINDS[code] for code in np.unique(table.cp_kind)} == set(CONTEXT_KINDS)
    assert set(np.unique(table.ends).tolist()) == {0, 1}
    assert set(np.unique(table.offload).tolist()) == set(range(len(OFFLOAD_KINDS)))
    assert set(np.unique(table.order).tolist()) == {0, 2}
    assert (table.order[(table.pp == 1) | (table.dp == 1)] == 0).all()
    assert (table.ep == 1).all()
    assert (table.zero_stage[table.pp > 1] <= 1).all()


@pytest.mark.parametrize(("heads", "kv_heads", "degrees"), [(28, 4, {1, 2, 4, 28}), (4, 2, {1, 2, 4})])
def test_degrees_of_tp_follow_the_heads(heads, kv_heads, degrees):
    model = SPEC.model_copy(update={"heads": heads, "kv_heads": kv_heads, "ffn": 28 * 64})
    table = search_space(model, Job(seq=64, global_batch=56), 56).flat()
    assert set(np.unique(table.tp).tolist()) == degrees


def test_experts_are_split_in_every_way():
    table = search_space(MIXED, Job(seq=64, global_batch=8), 8).flat()
    found = set(zip(table.ep.tolist(), table.etp.tolist(), strict=True))
    assert {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2)} <= found
    assert set(np.unique(table.dispatch).tolist()) == set(range(len(DISPATCH_KINDS)))
    assert (table.dispatch[table.ep == 1] == 0).all()
    assert ((table.etp == 1) | (table.etp == table.tp)).all()
    assert (table.shard * table.tp % (table.ep * table.etp) == 0).all()


@pytest.mark.parametrize("model", [SPEC, EXPERTS, MIXED])
def test_an_axis_of_one_rank_sends_nothing(model):
    """Degree 1 is no parallelism."""
    job = Job(seq=64, global_batch=4)
    table = search_space(model, job, 4).flat()
    flows = traffic(model, job, table)
    assert ("ep" in {flow.axis for flow in flows}) == (model.moe is not None)
    for flow in flows:
        alone, launches = np.broadcast_to(flow.degree == 1, table.shape), flow.launches
        assert (np.broadcast_to(flow.sent_bytes, table.shape)[alone] == 0).all()
        assert (np.broadcast_to(launches, table.shape)[alone] == 0).all()


def test_the_405b_on_16384_ranks_has_more_than_ten_million_layouts():
    space = search_space(preset("llama-3.1-405b"), Job(seq=8192, global_batch=2048), 16_384)
    assert space.rows >= 10_000_000


# Grids


@settings(deadline=None, max_examples=8)
@given(
    model=st.sampled_from([SPEC, EXPERTS, MIXED, SPEC.model_copy(update={"layers": 5})]),
    shape=st.sampled_from([(2, 4, 2), (4, 4, 4), (6, 6, 4), (8, 4, 4), (8, 8, 2)]),
    precision=st.sampled_from(["bf16", "fp8", "fp32"]),
    data=st.data(),
)
def test_a_grid_is_each_of_its_layouts_alone(model, shape, precision, data):
    """Memory and time of a grid, against a table of one row: of every column some values."""
    ranks, batch, per_node = shape
    job = Job(seq=64, global_batch=batch, precision=precision)
    cluster = small_cluster(ranks, 2**30, per_node)
    grids = search_space(model, job, ranks).grids
    grid = grids[data.draw(st.integers(0, len(grids) - 1))]
    timed = whole_step(model, job, cluster, of_microbatches(model, job, least(model, job, cluster, grid)))
    seen = 0
    for piece in evaluate(model, job, cluster, timed):
        shape_of_piece = piece.grid.table.shape
        assert len(shape_of_piece) == GRID_AXES
        assert piece.device.shape == piece.seconds.shape == shape_of_piece
        there = piece.grid.layouts.reshape(-1)
        assert (np.isfinite(piece.seconds.reshape(-1)) == there).all()
        assert (np.isfinite(piece.device.reshape(-1)) == there).all()
        rows = np.flatnonzero(there)
        seen += len(rows)
        for row in rows[data.draw(st.integers(0, 5)) :: len(rows) // 25 + 1]:
            one = piece.grid.table.take(np.array([row]))
            found = piece.device.flat[row], piece.seconds.flat[row]
            assert found == pytest.approx(alone(model, job, cluster, one), rel=1e-9)
    assert seen == grid.ordered_rows


@settings(deadline=None, max_examples=6)
@given(model=st.sampled_from([SPEC, EXPERTS, MIXED]), shape=st.sampled_from([(4, 4), (8, 4), (6, 6)]))
def test_what_a_step_takes_at_least_is_not_more_than_it_takes(model, shape):
    """What is passed over by it could not have been faster."""
    ranks, batch = shape
    job, cluster = Job(seq=64, global_batch=batch), small_cluster(ranks, 2**30)
    for grid in search_space(model, job, ranks).grids:
        first = least(model, job, cluster, grid)
        second = of_microbatches(model, job, first)
        third = whole_step(model, job, cluster, second)
        times = [timed.inside + timed.outside for timed in (first, second, third)]
        for lower, higher in pairwise(times):
            assert (lower <= higher * (1 + 1e-12)).all()


def test_restricting_a_grid_keeps_what_has_the_values():
    for grid in search_space(EXPERTS, Job(seq=64, global_batch=4), 4).grids:
        rows = rows_of(grid.table.take(grid.layouts.reshape(-1)))
        for column in grid.table._fields:
            place = grid.table._fields.index(column)
            values = sorted({row[place] for row in rows})[:2]
            part = grid.restricted(column, values)
            kept = set() if part is None else set(rows_of(part.table.take(part.layouts.reshape(-1))))
            assert kept == {row for row in rows if row[place] in values}
            assert grid.restricted(column, [10**6]) is None
