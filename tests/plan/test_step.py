"""Time of a step: what must hold for every layout, and that nothing communicated is lost or counted twice."""

from collections import defaultdict
from functools import cache

import numpy as np
import pytest
from blocks import IDEAL, on
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import EXPERTS, MIXED, rows_of

from shardwright.cluster import Link, cluster_of
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, SCHEDULE_NAMES, Layout
from shardwright.model import ModelSpec, preset
from shardwright.plan.bubble import RankTimes, is_exact
from shardwright.plan.compute import Work, block_times, model_flops_per_token
from shardwright.plan.explain import explanation, plan_of
from shardwright.plan.parts import part_times
from shardwright.plan.schedule import SCHEDULES
from shardwright.plan.simulate import StageTimes, schedule_graph, simulate
from shardwright.plan.space import search_space
from shardwright.plan.splits import stage_layers
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
JOB = Job(seq=64, global_batch=12, precision="fp32")
GPUS = cluster_of("h100-sxm", 16)

DENSE_MODELS = st.builds(
    lambda layers, tied: SPEC.model_copy(update={"layers": layers, "tied_embeddings": tied}),
    st.integers(1, 4),
    st.booleans(),
)
MODELS = st.one_of(DENSE_MODELS, st.sampled_from([EXPERTS, MIXED]))
CLUSTERS = st.builds(
    cluster_of,
    st.sampled_from(["cpu", "h100-sxm", "a100-sxm"]),
    st.sampled_from([1, 2, 6, 12]),
    st.integers(1, 8),
)


@cache
def flat(model, ranks):
    return search_space(model, JOB, ranks).flat()


def table_for(model, cluster, *, whole=False):
    """Layouts of the space; unless ``whole``, those that keep all on the device and the loss in one part, one
    of several if they are many."""
    table = flat(model, cluster.ranks)
    if whole:
        return table
    rows = np.flatnonzero((table.offload == 0) & (table.loss_chunks == 1))
    return table.take(rows[:: len(rows) // 3000 + 1])


def beside(table, *names):
    """For every layout the places of those that differ from it in some columns alone, by their values."""
    place = [table._fields.index(name) for name in names]
    found = defaultdict(dict)
    for number, row in enumerate(rows_of(table)):
        key = tuple(value for at, value in enumerate(row) if at not in place)
        found[key][tuple(row[at] for at in place)] = number
    return list(found.values())


def at_whole_table(values, table):
    return np.broadcast_to(values, table.shape)


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


@settings(deadline=None, max_examples=8)
@given(model=MODELS, cluster=CLUSTERS)
def test_every_part_is_there_and_none_is_negative(model, cluster):
    table = table_for(model, cluster, whole=True)
    found = step_time(model, JOB, cluster, table)
    assert (found.time >= (found.compute + found.optimizer) * (1 - 1e-12)).all()
    assert (found.compute > 0).all()
    assert ((found.optimizer > 0) == (table.offload & 1 == 0)).all()
    bubble = at_whole_table(found.bubble, table)
    assert (bubble[table.pp == 1] == 0).all()
    assert (bubble[table.pp > 1] >= 0).all()
    exposed = {axis: at_whole_table(values, table) for axis, values in found.exposed.items()}
    whole = found.compute + bubble + found.optimizer + sum(exposed.values())
    assert found.time == pytest.approx(whole, rel=1e-9)
    for axis, times in exposed.items():
        assert (times >= 0).all()
        assert cluster.ranks > 1 or axis == "host" or (times == 0).all()
    assert (exposed["host"][table.offload == 0] == 0).all()
    assert (exposed["ep"][table.ep == 1] == 0).all()
    assert ((exposed["ep"] > 0) == (table.ep > 1)).all()
    rates = tokens_per_second_per_device(JOB, cluster, found.time)
    assert rates * found.time * cluster.ranks == pytest.approx(JOB.tokens_per_step)
    assert (mfu(model, JOB, cluster, found.time) < 1).all()


@settings(deadline=None, max_examples=8)
@given(model=DENSE_MODELS, cluster=CLUSTERS, data=st.data())
def test_without_overlap_all_traffic_is_exposed_and_each_collective_once(model, cluster, data):
    """The exposed time of an axis is the time its collectives take by plan/traffic.py, for every stage."""
    cluster = with_device(cluster, overlap=0.0)
    table = table_for(model, cluster)
    rows = np.flatnonzero((table.pp == 1) & (model.layers % table.recompute_every == 0))
    layout = table.layout(int(rows[data.draw(st.integers(0, len(rows) - 1))]), model.layers)
    found = explanation(plan_of(model, JOB, cluster, layout))
    for flow in found["traffic"]:
        assert flow["exposed_time"] == pytest.approx(flow["busy_time"], rel=1e-9)
    busy = sum(flow["busy_time"] for flow in found["traffic"])
    assert found["step"]["exposed"] == pytest.approx(busy, rel=1e-9)


@settings(deadline=None, max_examples=8)
@given(
    layers=st.integers(2, 6), ranks=st.sampled_from([4, 6, 12]), per_node=st.integers(1, 8), data=st.data()
)
def test_without_overlap_a_pipeline_rank_exposes_what_it_sends(layers, ranks, per_node, data):
    """Sends to other stages wait in the bubble; the traffic is that of a rank with most layers and the head,
    of which there may be none. Where blocks are recomputed for weights too, the first rank, which does not,
    may be the busiest: see the next test."""
    cluster = with_device(cluster_of("h100-sxm", ranks, per_node), overlap=0.0)
    model = SPEC.model_copy(update={"layers": layers})
    table = table_for(model, cluster)
    rows = np.flatnonzero((table.pp > 1) & (table.chunks == 1))
    row = int(rows[data.draw(st.integers(0, len(rows) - 1))])
    layout = table.layout(row, model.layers)
    found = explanation(plan_of(model, JOB, cluster, layout))
    last = layers // table.pp[row] * table.pp[row] == layers and table.ends[row] == 0
    last = last and not (table.recompute[row] > 0 and table.schedule[row] in SPLIT_BACKWARD)
    for flow in found["traffic"]:
        if (flow["axis"], flow["collective"]) == ("pp", "send"):
            assert flow["exposed_time"] == 0
        elif last and table.schedule[row] != SCHEDULE_NAMES.index("DualPipe"):
            assert flow["exposed_time"] == pytest.approx(flow["busy_time"], rel=1e-9)
        else:
            assert flow["exposed_time"] <= flow["busy_time"] * (1 + 1e-9)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_is_recomputed_for_weights_takes_time_too(recompute):
    cluster = with_device(cluster_of("h100-sxm", 12, 1), overlap=0.0)
    layout = Layout(
        pp=2, dp_replicate=3, cp=2, cp_kind="ring", schedule="InterleavedZeroBubble", stage_layers=(1, 1),
        zero_stage=1, microbatches=4, recompute=recompute,
        kept=KEPT_BY_SELECTIVE if recompute == "selective" else (),
    )  # fmt: skip
    found = explanation(plan_of(SPEC.model_copy(update={"layers": 2}), JOB, cluster, layout))
    (ring,) = [flow for flow in found["traffic"] if (flow["axis"], flow["collective"]) == ("cp", "send")]
    assert ring["exposed_time"] == pytest.approx(ring["busy_time"], rel=1e-9)


@settings(deadline=None, max_examples=6)
@given(model=MODELS, cluster=CLUSTERS, overlap=st.floats(0, 1))
def test_more_overlap_is_never_slower_and_never_hides_more_than_there_is(model, cluster, overlap):
    table = table_for(model, cluster)
    less, some, most = (
        step_time(model, JOB, with_device(cluster, overlap=share), table) for share in (0.0, overlap, 1.0)
    )
    for axis in some.exposed:
        assert (some.exposed[axis] <= less.exposed[axis] * (1 + 1e-12)).all()
        assert (most.exposed[axis] <= some.exposed[axis] * (1 + 1e-12)).all()


def used(exposed, row, table):
    """What an axis exposes in a row; where a table has rows with cp, the shard axis is named after both."""
    times = {
        axis.replace("dp_shard+cp", "dp_shard"): at_whole_table(values, table)[row]
        for axis, values in exposed.items()
    }
    return {axis: time for axis, time in times.items() if time}


@settings(deadline=None, max_examples=8)
@given(model=MODELS, cluster=CLUSTERS, data=st.data())
def test_a_row_alone_is_the_row_of_the_table(model, cluster, data):
    table = table_for(model, cluster, whole=True)
    together = step_time(model, JOB, cluster, table)
    for row in data.draw(st.lists(st.integers(0, table.rows - 1), min_size=8, max_size=8)):
        one = table_of([table.layout(row, model.layers)], model.layers)
        alone = step_time(model, JOB, cluster, one)
        assert alone.time[0] == pytest.approx(together.time[row], rel=1e-9)
        assert used(alone.exposed, 0, one) == pytest.approx(used(together.exposed, row, table), rel=1e-9)


SPLIT_BACKWARD = [
    SCHEDULE_NAMES.index(name) for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "ZB-H1", "ZB-H2")
]


@settings(deadline=None, max_examples=6)
@given(
    model=MODELS,
    cluster=CLUSTERS,
    factor=st.floats(1, 100),
    which=st.sampled_from(["intra_link", "inter_link"]),
)
def test_a_faster_link_is_never_slower(model, cluster, factor, which):
    """Schedules that split backward take the bubble of the busiest rank. A faster link may make another rank
    the busiest, with other shares of backward: then the step may grow, by per cents of so small a model."""
    quicker = with_device(cluster, **{which: faster(getattr(cluster.device, which), factor)})
    table = table_for(model, cluster)
    before, after = (step_time(model, JOB, c, table).time for c in (cluster, quicker))
    slack = np.where(np.isin(table.schedule, SPLIT_BACKWARD), 0.05, 1e-12)
    assert (after <= before * (1 + slack)).all()


@settings(deadline=None, max_examples=8)
@given(model=MODELS, cluster=CLUSTERS)
def test_a_higher_stage_never_exposes_less(model, cluster):
    table = table_for(model, cluster)
    exposed = sum(step_time(model, JOB, cluster, table).exposed.values())
    for stages in beside(table, "zero_stage"):
        times = [exposed[stages[stage]] for stage in sorted(stages)]
        assert (np.diff(times) >= -1e-12 * exposed.max()).all()


@pytest.mark.parametrize("model", [SPEC, EXPERTS.model_copy(update={"layers": 3}), MIXED])
def test_recomputation_costs_time(model):
    """Of every second layer it costs less than of all, and selective recomputation less than both. A step
    grows less than its computation, which hides more; and see the bubbles of ``SPLIT_BACKWARD``."""
    table = flat(model, 4)
    found = step_time(model, JOB, cluster_of("h100-sxm", 4), table)
    compute, time = found.compute, found.time
    piped = (table.pp > 1) & ~np.isin(table.schedule, SPLIT_BACKWARD)
    for kinds in beside(table, "recompute", "recompute_every"):
        if (2, 2) not in kinds:
            continue  # what is offloaded is not recomputed by halves
        rows = [kinds[kind] for kind in ((0, 1), (2, 2), (2, 1))]
        if table.pp[rows[0]] == 1:
            assert compute[rows[0]] < compute[rows[1]] < compute[rows[2]]
            assert compute[rows[0]] < compute[kinds[1, 1]] < compute[rows[2]]
        elif piped[rows[0]]:
            assert time[rows[0]] <= time[rows[1]] + 1e-12 <= time[rows[2]] + 2e-12


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("model", [SPEC, EXPERTS, MIXED])
def test_neither_offload_nor_parts_of_the_loss_save_time(model, precision):
    """The search leaves them out until something else is too slow or too large. Parts of the loss may make
    the last rank the busiest: see ``test_a_faster_link_is_never_slower``."""
    table, cluster = flat(model, 4), cluster_of("h100-sxm", 4)
    apart = np.isin(table.schedule, SPLIT_BACKWARD) & (table.recompute > 0)
    slack = np.where(at_whole_table(apart, table), 0.03, 1e-12)
    found = step_time(model, JOB.model_copy(update={"precision": precision}), cluster, table)
    time, host = found.time, at_whole_table(found.exposed["host"], table)
    for ways in beside(table, "offload", "loss_chunks"):
        plain = ways.pop((0, 1))
        assert all(time[row] >= time[plain] * (1 - slack[plain]) for row in ways.values())
    optimizer = table.offload & 1 == 1
    assert (host[optimizer] > 0).all()
    assert (found.optimizer[optimizer] == 0).all()


def test_a_loss_in_parts_makes_its_logits_twice():
    """On a device that only multiplies, the head takes 4 products for 3, however many parts there are."""
    cluster = cluster_of("h100-sxm", 1)
    cluster = on(cluster, device=on(cluster.device, **IDEAL))
    layouts = [Layout(loss_chunks=chunks) for chunks in (1, 2, 8)]
    head = part_times(SPEC, JOB, cluster, table_of(layouts, SPEC.layers)).head
    assert head.forward == pytest.approx([head.forward[0]] * 3)
    assert head.backward == pytest.approx([2 * head.forward[0], *[3 * head.forward[0]] * 2])


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b"])
def test_fp8_is_not_slower_where_blocks_are_large(name):
    model, cluster = preset(name), cluster_of("h100-sxm", 8)
    layouts = [layout_of(8, 3), Layout(tp=8, sp=True), Layout(tp=2, dp_shard=4, zero_stage=3)]
    rows = table_of(layouts, model.layers)
    bf16, fp8 = (
        step_time(model, Job(seq=8192, global_batch=8, precision=precision), cluster, rows)
        for precision in ("bf16", "fp8")
    )
    assert (fp8.compute < bf16.compute).all()
    assert (fp8.time <= bf16.time).all()


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


def test_columns_broadcast_to_the_table():
    table = table_for(SPEC, GPUS)
    found = step_time(SPEC, JOB, GPUS, table)
    assert np.shape(found.time) == table.shape
    for column in (found.compute, found.bubble, found.optimizer, *found.exposed.values()):
        assert np.broadcast_shapes(np.shape(column), table.shape) == table.shape


# tp, pp and cp


FREE = Link(bandwidth=1e30, latency=0.0)
LLAMA_7B = preset("llama-2-7b")


def linked(intra, inter, ranks=8, per_node=8):
    """H100s joined by links of one bandwidth [B/s] in a node and one between nodes, without latency."""
    cluster = cluster_of("h100-sxm", ranks, per_node)
    links = {
        "intra_link": Link(bandwidth=intra, latency=0.0),
        "inter_link": Link(bandwidth=inter, latency=0.0),
    }
    return with_device(cluster, **links)


def ideal(cluster):
    """Products at the peak, memory and launches without time."""
    changes = {
        "matmul_efficiency": 1.0,
        "attention_efficiency": 1.0,
        "memory_efficiency": 1.0,
        "overlap": 1.0,
    }
    return with_device(cluster, **changes, memory_bandwidth=1e30, launch=0.0)


def piped(layers, schedule, chunks=1, pp=4, microbatches=8, ends=0, **others):
    return Layout(
        pp=pp, schedule=schedule, chunks=chunks, stage_layers=stage_layers(layers, pp * chunks, ends),
        microbatches=microbatches, **others,
    )  # fmt: skip


def step_of(model, job, cluster, *layouts):
    return step_time(model, job, cluster, table_of(layouts, model.layers))


@pytest.mark.parametrize(("per_node", "milliseconds"), [(8, 16.7), (1, 150.3)])
def test_tp_across_nodes_is_an_order_of_magnitude_slower(per_node, milliseconds):
    """7.516192768 GB inside the blocks of a 7B at s 4096, b 1, tp 8: 450 GB/s in a node, 50 GB/s between."""
    cluster, job = linked(450e9, 50e9, 8, per_node), Job(seq=4096, global_batch=1)
    whole, half = (
        step_of(LLAMA_7B.model_copy(update={"layers": layers}), job, cluster, Layout(tp=8)).exposed["tp"][0]
        for layers in (32, 16)
    )
    assert 2 * (whole - half) == pytest.approx(7.516192768e9 / (450e9 if per_node == 8 else 50e9), rel=1e-9)
    assert round(2e3 * (whole - half), 1) == milliseconds


def test_eight_stages_and_64_microbatches_idle_for_a_tenth():
    """Narayanan et al. 2021, arXiv:2104.04473: 7/64 of the work, 7/71 of the step."""
    cluster = with_device(cluster_of("h100-sxm", 8), intra_link=FREE)
    model = LLAMA_7B.model_copy(update={"layers": 64})
    found = step_of(model, Job(seq=4096, global_batch=64), cluster, piped(64, "1F1B", pp=8, microbatches=64))
    overhead, fraction = found.bubble / found.inside, found.bubble / (found.bubble + found.inside)
    assert overhead == pytest.approx(7 / 64, rel=1e-9)
    assert (round(100 * overhead[0], 1), round(100 * fraction[0], 1)) == (10.9, 9.9)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULE_NAMES if name not in ("none", "DualPipe")])
@pytest.mark.parametrize("m", [8, 16])
def test_the_bubble_is_the_simulated_one(schedule, m):
    """For equal stages, where the closed form says it is exact. A layer less on the first and the last stage
    makes up for the head, so that the ranks between are the slowest."""
    chunks = SCHEDULES[schedule].chunks or 2
    model = LLAMA_7B.model_copy(update={"layers": 4 * chunks * 2 - 2, "vocab": 256})
    job, cluster = (
        Job(seq=4096, global_batch=m),
        ideal(with_device(cluster_of("h100-sxm", 4), intra_link=FREE)),
    )
    found = step_of(model, job, cluster, piped(model.layers, schedule, chunks, microbatches=m))
    one = np.ones(1, np.int64)
    block = block_times(model, job, cluster.device, Work(4096.0 * one, one, one, one, 0 * one, one, one))
    parts = [block.forward, block.backward - block.weight_gradients, block.weight_gradients]
    work = 2 * chunks * np.concatenate(parts)
    assert found.compute[0] == pytest.approx(m * work.sum(), rel=1e-9)
    assert is_exact(schedule, 4, chunks, m, RankTimes(*work))
    simulated = simulate(schedule_graph(schedule, 4, chunks, m), StageTimes(*(work / chunks)))
    assert found.bubble[0] == pytest.approx(simulated.makespan_bubble.max(), rel=1e-9, abs=1e-12)


def test_lighter_ends_make_up_for_the_head():
    """Llama 3 405B has 126 layers on 16 stages, 7 on the first and the last (arXiv:2407.21783, 3.3.2): its
    head is as much work as two thirds of a layer, and costs no time; of 128 layers it would."""
    job, cluster = Job(seq=8192, global_batch=32), cluster_of("h100-sxm", 128)
    for layers, costs in ((126, False), (128, True)):
        model = preset("llama-3.1-405b").model_copy(update={"layers": layers})
        layout = piped(layers, "1F1B", pp=16, tp=8, microbatches=32)
        small = model.model_copy(update={"vocab": 1024})
        with_head, without = (step_of(each, job, cluster, layout).inside[0] for each in (model, small))
        assert (with_head > 1.05 * without) == costs
        assert (with_head == without) != costs


def test_rows_of_the_same_layers_take_the_same_time():
    """``ends`` says how a split came about, not what it costs: 2 + 2 is 2 + 2."""
    table = table_of([piped(4, "1F1B", pp=2), piped(4, "1F1B", pp=2)], 4)._replace(ends=np.array([0, 1]))
    one, other = step_time(SPEC.model_copy(update={"layers": 4}), JOB, GPUS, table).time
    assert one == other


def context(kind, cp=8):
    return Layout(cp=cp, cp_kind=kind, zero_stage=3)


def test_a_ring_hides_under_the_attention_of_long_sequences():
    """Keys and values grow with the sequence, attention with its square."""
    cluster = with_device(linked(50e9, 50e9), overlap=1.0, launch=0.0)
    model = preset("llama-3.1-8b")
    short, long = (
        step_of(model, Job(seq=seq, global_batch=1), cluster, *map(context, ("ring", "all_gather"))).exposed[
            "cp"
        ]
        for seq in (2048, 131072)
    )
    assert long[0] == 0 < short[0]
    assert (short[1], long[1]) > (0, 0)


def test_a_ring_between_nodes_has_one_link_and_a_gather_as_many_as_ranks_in_a_node():
    """16 context ranks on two nodes without overlap: the ring waits for a network link at every pass."""
    model, job = preset("llama-3.1-8b"), Job(seq=131072, global_batch=1)
    cluster = with_device(linked(400e9, 50e9, 16), overlap=0.0)
    ring, gather, ulysses = step_of(
        model, job, cluster, *(context(kind, 16) for kind in ("ring", "all_gather")), context("ulysses", 32)
    ).exposed["cp"]
    own = 2 * 2 * 8 * 128 * 131072 / 16
    assert ring == pytest.approx(32 * (15 * own + 15 * own + 2 * 16 * own) / 50e9, rel=1e-9)
    assert gather == pytest.approx(32 * 3 * 15 * own / 400e9, rel=1e-9)
    assert ulysses > 0


def test_a_trade_between_nodes_leaves_by_the_ranks_own_link():
    """Ulysses on 8 ranks of two nodes: half of what a rank trades crosses, by one link of 50 GB/s."""
    model, job = LLAMA_7B, Job(seq=32768, global_batch=1)
    inside, across = (
        step_of(model, job, linked(400e9, 50e9, 8, per_node), context("ulysses")).exposed["cp"][0]
        for per_node in (8, 4)
    )
    each = 2 * 4 * 4096 * 32768 / 8  # queries, keys, values and the output
    assert inside == pytest.approx(32 * 2 * each * 7 / 8 / 400e9, rel=1e-9)
    assert across == pytest.approx(32 * 2 * each * 4 / 8 / 50e9, rel=1e-9)


@pytest.mark.parametrize("axis", [{"tp": 8}, {"tp": 8, "sp": True}])
def test_tp_divides_the_products(axis):
    """Not the norms, unless sp splits them by the sequence."""
    job, cluster = Job(seq=4096, global_batch=1), cluster_of("h100-sxm", 8)
    whole, split = step_of(LLAMA_7B, job, cluster, Layout(), Layout(**axis)).compute
    assert whole / 8 < split < whole / 4
    _, plain, by_sequence = step_of(
        LLAMA_7B, job, cluster, Layout(), Layout(tp=8), Layout(tp=8, sp=True)
    ).compute
    assert by_sequence < plain
