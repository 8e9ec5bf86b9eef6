"""Time of a step: what must hold for every layout, and that nothing communicated is lost or counted twice."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import RECOMPUTE_KINDS, SCHEDULE_NAMES, Layout
from shardwright.model import ModelSpec, preset
from shardwright.plan.compute import model_flops_per_token
from shardwright.plan.explain import explanation, plan_of
from shardwright.plan.space import search_space
from shardwright.plan.step import mfu, step_time, tokens_per_second_per_device
from shardwright.plan.table import table_of

SPEC = ModelSpec(
    name="tiny",
    model_type="llama",
    layers=3,
    hidden=96,
    ffn=160,
    heads=6,
    kv_heads=2,
    head_size=16,
    vocab=259,
)
JOB = Job(seq=64, global_batch=48, precision="fp32")
GPUS = cluster_of("h100-sxm", 16)

MODELS = st.builds(
    lambda layers, tied: SPEC.model_copy(update={"layers": layers, "tied_embeddings": tied}),
    st.integers(1, 4),
    st.booleans(),
)
CLUSTERS = st.builds(
    cluster_of,
    st.sampled_from(["cpu", "h100-sxm", "a100-sxm"]),
    st.sampled_from([1, 2, 6, 12]),
    st.integers(1, 8),
)


def table_for(model, cluster):
    return search_space(model, JOB, cluster.ranks).wide()


def data_axes(table):
    """Rows that split the data alone."""
    return (table.pp == 1) & (table.cp == 1) & (table.tp == 1)


def with_device(cluster, **changes):
    return cluster.model_copy(update={"device": cluster.device.model_copy(update=changes)})


def faster(link, factor):
    return link.model_copy(update={"bandwidth": link.bandwidth * factor, "latency": link.latency / factor})


def layout_of(shard, stage, replicate=1, micro_batch=1, microbatches=1):
    return Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        zero_stage=stage,
        micro_batch=micro_batch,
        microbatches=microbatches,
    )


@settings(deadline=None, max_examples=40)
@given(model=MODELS, cluster=CLUSTERS)
def test_every_part_is_there_and_none_is_negative(model, cluster):
    table = table_for(model, cluster)
    found = step_time(model, JOB, cluster, table)
    assert (found.time >= found.compute + found.optimizer).all()
    assert (found.compute > 0).all()
    assert (found.optimizer > 0).all()
    assert (found.bubble[table.pp == 1] == 0).all()
    assert (found.bubble[table.pp > 1] >= 0).all()
    for exposed in found.exposed.values():
        assert (exposed >= 0).all()
        assert cluster.ranks > 1 or (exposed == 0).all()
    rates = tokens_per_second_per_device(JOB, cluster, found.time)
    assert rates * found.time * cluster.ranks == pytest.approx(JOB.tokens_per_step)
    assert (mfu(model, JOB, cluster, found.time) < 1).all()


@settings(deadline=None, max_examples=25)
@given(model=MODELS, cluster=CLUSTERS, data=st.data())
def test_without_overlap_all_traffic_is_exposed_and_each_collective_once(model, cluster, data):
    """The exposed time of an axis is the time its collectives take by plan/traffic.py, for every stage."""
    cluster = with_device(cluster, overlap=0.0)
    table = table_for(model, cluster)
    row = data.draw(st.integers(0, np.count_nonzero(table.pp == 1) - 1))
    layout = table.layout(int(np.flatnonzero(table.pp == 1)[row]), model.layers)
    found = explanation(plan_of(model, JOB, cluster, layout))
    for flow in found["traffic"]:
        assert flow["exposed_time"] == pytest.approx(flow["busy_time"], rel=1e-9)
    busy = sum(flow["busy_time"] for flow in found["traffic"])
    assert found["step"]["exposed"] == pytest.approx(busy, rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(layers=st.integers(2, 6), ranks=st.sampled_from([4, 6, 12]), per_node=st.integers(1, 8), data=st.data())
def test_without_overlap_a_pipeline_rank_exposes_what_it_sends(layers, ranks, per_node, data):
    """Sends to other stages wait in the bubble; the traffic is that of a rank with most layers and the head, of
    which there may be none."""
    cluster = with_device(cluster_of("h100-sxm", ranks, per_node), overlap=0.0)
    model = SPEC.model_copy(update={"layers": layers})
    table = table_for(model, cluster)
    rows = np.flatnonzero((table.pp > 1) & (table.chunks == 1))
    row = int(rows[data.draw(st.integers(0, len(rows) - 1))])
    found = explanation(plan_of(model, JOB, cluster, table.layout(row, model.layers)))
    last = layers // table.pp[row] * table.pp[row] == layers and table.ends[row] == 0
    for flow in found["traffic"]:
        if (flow["axis"], flow["collective"]) == ("pp", "send"):
            assert flow["exposed_time"] == 0
        elif last and table.schedule[row] != SCHEDULE_NAMES.index("DualPipe"):
            assert flow["exposed_time"] == pytest.approx(flow["busy_time"], rel=1e-9)
        else:
            assert flow["exposed_time"] <= flow["busy_time"] * (1 + 1e-9)


@settings(deadline=None, max_examples=25)
@given(model=MODELS, cluster=CLUSTERS, overlap=st.floats(0, 1))
def test_more_overlap_is_never_slower_and_never_hides_more_than_there_is(model, cluster, overlap):
    table = table_for(model, cluster)
    less, some, most = (
        step_time(model, JOB, with_device(cluster, overlap=share), table) for share in (0.0, overlap, 1.0)
    )
    for axis in some.exposed:
        assert (some.exposed[axis] <= less.exposed[axis] * (1 + 1e-12)).all()
        assert (most.exposed[axis] <= some.exposed[axis] * (1 + 1e-12)).all()


def used(exposed, row):
    """What an axis exposes in a row; where a table has rows with cp, the shard axis is named after both."""
    times = {axis.replace("dp_shard+cp", "dp_shard"): values[row] for axis, values in exposed.items()}
    return {axis: time for axis, time in times.items() if time}


@settings(deadline=None, max_examples=25)
@given(model=MODELS, cluster=CLUSTERS)
def test_a_row_alone_is_the_row_of_the_table(model, cluster):
    table = table_for(model, cluster)
    together = step_time(model, JOB, cluster, table)
    for row in range(0, table.rows, 7 + table.rows // 100):
        alone = step_time(model, JOB, cluster, table_of([table.layout(row, model.layers)], model.layers))
        assert alone.time[0] == together.time[row]
        assert used(alone.exposed, 0) == used(together.exposed, row)


@settings(deadline=None, max_examples=25)
@given(
    model=MODELS,
    cluster=CLUSTERS,
    factor=st.floats(1, 100),
    which=st.sampled_from(["intra_link", "inter_link"]),
)
def test_a_faster_link_is_never_slower(model, cluster, factor, which):
    quicker = with_device(cluster, **{which: faster(getattr(cluster.device, which), factor)})
    table = table_for(model, cluster)
    before, after = (step_time(model, JOB, c, table).time for c in (cluster, quicker))
    assert (after <= before * (1 + 1e-12)).all()


@settings(deadline=None, max_examples=25)
@given(model=MODELS, cluster=CLUSTERS)
def test_a_higher_stage_never_exposes_less(model, cluster):
    table = table_for(model, cluster)
    exposed = sum(step_time(model, JOB, cluster, table).exposed.values())
    key = [column for column in table._fields if column != "zero_stage"]
    by_layout: dict[tuple[int, ...], dict[int, float]] = {}
    for row in range(table.rows):
        layout = tuple(int(getattr(table, column)[row]) for column in key)
        by_layout.setdefault(layout, {})[int(table.zero_stage[row])] = float(exposed[row])
    for stages in by_layout.values():
        times = [stages[stage] for stage in sorted(stages)]
        assert all(low <= high * (1 + 1e-12) for low, high in pairwise(times))


def test_recomputation_costs_time():
    table = table_for(SPEC, GPUS)
    compute = step_time(SPEC, JOB, GPUS, table).compute
    by_kind = [compute[table.recompute == kind] for kind in range(len(RECOMPUTE_KINDS))]
    assert (by_kind[0] < by_kind[1]).all()
    assert (by_kind[1] < by_kind[2]).all()


def test_replicas_across_nodes_beat_shards_across_nodes():
    """HSDP: shards inside a node and replicas across, against shards over all ranks, on a slow network."""
    cluster = cluster_of("a100-sxm", 256)
    slow = with_device(cluster, inter_link=faster(cluster.inter_link, 0.25))
    model, job = preset("llama-2-13b"), Job(seq=2048, global_batch=512)
    layouts = [layout_of(8, 3, replicate=32, microbatches=2), layout_of(256, 3, microbatches=2)]
    table = table_of(layouts, model.layers)
    hsdp, full = step_time(model, job, slow, table).time
    assert hsdp < full


def test_stage_1_and_2_differ_by_the_reductions_of_the_microbatches():
    layouts = [layout_of(8, stage, microbatches=m) for stage in (1, 2) for m in (1, 6)]
    rows = table_of(layouts, SPEC.layers)
    one, one_of_6, two, two_of_6 = step_time(
        SPEC, JOB, with_device(cluster_of("cpu", 8), overlap=0.0), rows
    ).exposed["dp_shard"]
    assert one == two == one_of_6
    assert two_of_6 > two


def test_a_group_across_nodes_waits_for_the_network():
    inside, across = (
        step_time(SPEC, JOB, cluster_of("h100-sxm", 6, per_node), table_of([layout_of(3, 3, 2)], SPEC.layers))
        for per_node in (6, 4)
    )
    assert across.exposed["dp_shard"] > inside.exposed["dp_shard"]  # ranks 3 | 4 5: one link


def test_flops_over_time_is_the_utilisation():
    cluster, job, model = cluster_of("h100-sxm", 8), Job(seq=8192, global_batch=8), preset("llama-3-8b")
    plan = plan_of(model, job, cluster, layout_of(8, 3))
    flops = model_flops_per_token(model, 8192) * 8 * 8192
    assert plan.prediction.mfu == pytest.approx(flops / (plan.prediction.step_time * 8 * 989e12), rel=1e-5)
    assert 0.35 < plan.prediction.mfu < 0.75


def test_columns_stay_as_long_as_the_table():
    table = table_for(SPEC, GPUS)
    found = step_time(SPEC, JOB, GPUS, table)
    for column in (found.compute, found.bubble, found.optimizer, found.time, *found.exposed.values()):
        assert np.shape(column) == (table.rows,)
