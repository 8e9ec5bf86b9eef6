"""Hops between stages, over the link that joins their ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.hops import Hops, _levels
from shardwright.plan.parts import hop_time
from shardwright.plan.pipeline import pipeline_timeline, simulated_bubble
from shardwright.plan.placement import groups_of, routes_of
from shardwright.plan.splits import stage_layers
from shardwright.plan.table import table_of

NEAR = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
MODEL, JOB = preset("llama-2-7b"), Job(seq=4096, global_batch=64)


def hops_of(cluster, *layouts):
    table = table_of(layouts, MODEL.layers)
    routes = routes_of(cluster, table)
    return Hops(MODEL, JOB, cluster, table, routes), hop_time(MODEL, JOB, table, routes)


def layout_of(pp, tp=1, dp_shard=1, chunks=1, schedule="1F1B", **others):
    split = stage_layers(MODEL.layers, pp * chunks)
    shape = {
        "pp": pp,
        "tp": tp,
        "dp_shard": dp_shard,
        "chunks": chunks,
        "zero_stage": 0 if dp_shard == 1 else 1,
    }
    return Layout(schedule=schedule, stage_layers=split, microbatches=2 * pp, **shape, **others)


@settings(deadline=None, max_examples=60)
@given(
    pp=st.integers(2, 6), stride=st.integers(1, 6), outer=st.integers(1, 3),
    node=st.integers(1, 9), rack=st.integers(1, 4),
)  # fmt: skip
def test_levels_are_those_of_the_groups(pp, stride, outer, node, rack):
    domains, ranks = (node, node * rack, 10_000), pp * stride * outer
    layout = Layout(pp=pp, tp=stride, dp_replicate=outer, order=NEAR,
                    stage_layers=(1,) * pp, schedule="1F1B", microbatches=pp)  # fmt: skip
    groups = groups_of("pp", layout)
    found = _levels(domains, ranks, pp, stride)
    for a in range(pp):
        for b in range(pp):
            joined = [
                next(level for level, size in enumerate(domains) if group[a] // size == group[b] // size)
                for group in groups
            ]
            assert found[a, b] == max(joined)


def test_of_stages_in_one_node_only_every_second_hop_leaves_it():
    cluster = cluster_of("h100-sxm", 32, 8)
    layout = layout_of(8, tp=4)
    hops, slowest = hops_of(cluster, layout)
    between = hops.between_stages([0], layout)[0]
    inside, _ = hops_of(cluster_of("h100-sxm", 32, 32), layout)
    assert between[1::2] == pytest.approx([slowest[0]] * 3)
    assert between[::2] == pytest.approx(inside.between_stages([0], layout)[0][::2])
    assert between[0] < slowest[0] / 3


def test_a_loop_closes_over_the_link_of_its_ends():
    cluster = cluster_of("h100-sxm", 16, 8)
    looped = layout_of(2, tp=8, chunks=2, schedule="Interleaved1F1B")
    assert hops_of(cluster, looped)[0].between_stages([0], looped)[0] == pytest.approx(
        [hops_of(cluster, looped)[1][0]] * 3
    )
    near = layout_of(2, tp=4, dp_shard=2, chunks=2, schedule="Interleaved1F1B", order=NEAR)
    between = hops_of(cluster, near)[0].between_stages([0], near)[0]
    assert (between < hops_of(cluster, looped)[1][0] / 3).all()


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("GPipe", 1),
        ("1F1B", 1),
        ("LoopedBFS", 2),
        ("Interleaved1F1B", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipe", 1),
    ],
)
def test_pipelines_wait_for_each_hop_as_long_as_it_takes(schedule, chunks):
    """Between what they do with all hops inside a node and with all over the network."""
    layout = layout_of(4, tp=4, chunks=chunks, schedule=schedule)
    fast, mixed, slow = (
        simulated_bubble(MODEL, JOB, cluster_of("h100-sxm", 16, per_node), layout) for per_node in (16, 8, 4)
    )
    assert fast < mixed < slow
    line = pipeline_timeline(MODEL, JOB, cluster_of("h100-sxm", 16, 8), layout)
    idle = line.makespan - np.ravel(line.busy).max()
    assert float(np.ravel(idle)[0]) == pytest.approx(mixed, rel=1e-9)
