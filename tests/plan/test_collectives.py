"""Ring times by hand, and where groups of ranks lie on nodes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import Cluster, Link, cluster_of
from shardwright.plan.collectives import Placement, ring_time, send_time, trade_time

INTRA, INTER = Link(bandwidth=100e9, latency=1e-6), Link(bandwidth=10e9, latency=10e-6)


def cluster(ranks, per_node, intra=INTRA, inter=INTER) -> Cluster:
    base = cluster_of("h100-sxm", ranks, per_node)
    return base.model_copy(
        update={"device": base.device.model_copy(update={"intra_link": intra, "inter_link": inter})}
    )


def place(degree, stride=1) -> Placement:
    return Placement(np.array([degree]), np.array([stride]))


def seconds(payload, launches, rounds, placement, where) -> float:
    return float(ring_time(payload, launches, rounds, placement.route(where))[0])


@pytest.mark.parametrize(
    ("ranks", "per_node", "degree", "stride", "fewest", "nodes"),
    [
        (8, 8, 8, 1, 8, 1),  # dp_shard on one node
        (64, 8, 64, 1, 8, 8),
        (64, 8, 4, 1, 4, 1),
        (64, 8, 16, 1, 8, 2),
        (64, 8, 8, 8, 1, 8),  # dp_replicate over nodes: dp_shard fills each
        (64, 8, 16, 4, 2, 8),  # two members in a node
        (64, 8, 4, 16, 1, 4),
        (8, 8, 2, 4, 2, 1),
        (4, 2, 2, 2, 1, 2),
        (12, 8, 12, 1, 4, 2),  # the last node is not full
        (24, 8, 3, 1, 1, 2),  # ranks 6, 7 on one node, 8 on the next
        (24, 8, 6, 1, 2, 2),
        (24, 8, 12, 1, 4, 2),
        (24, 8, 8, 3, 2, 3),
        (16, 1, 16, 1, 1, 16),
        (8, 8, 1, 1, 1, 1),
    ],
)
def test_where_groups_lie(ranks, per_node, degree, stride, fewest, nodes):
    where = cluster(ranks, per_node)
    found = place(degree, stride).spread(where)
    assert [part.tolist() for part in found] == [[fewest], [nodes]]
    assert place(degree, stride).link(where) == ["between nodes" if nodes > 1 else "inside a node"]


@settings(deadline=None, max_examples=60)
@given(
    degree=st.integers(1, 12), stride=st.integers(1, 12), outer=st.integers(1, 4), per_node=st.integers(1, 16)
)
def test_spread_counts_every_group(degree, stride, outer, per_node):
    """Against a walk over the ranks of every group."""
    ranks = degree * stride * outer
    fewest, nodes = place(degree, stride).spread(cluster(ranks, per_node))
    groups = [
        [block * degree * stride + offset + member * stride for member in range(degree)]
        for block in range(outer)
        for offset in range(stride)
    ]
    on_nodes = [[rank // per_node for rank in group] for group in groups]
    assert fewest[0] == min(group.count(node) for group in on_nodes for node in group)
    assert nodes[0] == max(len(set(group)) for group in on_nodes)


def test_one_rank_sends_nothing():
    assert seconds(1e9, 10, 2, place(1), cluster(64, 8)) == 0


def test_a_ring_inside_a_node():
    where = cluster(8, 8)
    gather = 7 * 1e-6 + 7 / 8 * 1e9 / 100e9
    assert seconds(1e9, 1, 1, place(8), where) == pytest.approx(gather)
    assert seconds(1e9, 1, 2, place(8), where) == pytest.approx(2 * gather)
    ten = 10 * 7 * 1e-6 + 7 / 8 * 1e9 / 100e9
    assert seconds(1e9, 10, 1, place(8), where) == pytest.approx(ten)


def test_a_ring_over_nodes_has_as_many_network_links_as_ranks_in_a_node():
    where = cluster(32, 8)
    one = 3 * 10e-6 + 28 * 1e-6 + 31 / 32 * 1e9 / min(100e9, 8 * 10e9)
    assert seconds(1e9, 1, 1, place(32), where) == pytest.approx(one)
    replicas = 3 * 10e-6 + 3 / 4 * 1e9 / 10e9
    assert seconds(1e9, 1, 1, place(4, 8), where) == pytest.approx(replicas)


def test_a_ring_over_nodes_is_no_faster_than_inside_one():
    where = cluster(32, 8, inter=Link(bandwidth=90e9, latency=10e-6))
    assert seconds(1e12, 1, 1, place(32), where) >= 31 / 32 * 1e12 / 100e9


def test_published_all_reduces():
    # 4 GiB: 32 ranks at 377.34 GB/s of bus bandwidth in 22.05 ms; 8 ranks at 740.64 GB/s in 10.15 ms
    # stas00/ml-engineering network/README.md
    for ranks, bandwidth, expected in ((32, 377.34e9, 22.05e-3), (8, 740.64e9, 10.15e-3)):
        where = cluster(ranks, ranks, intra=Link(bandwidth=bandwidth, latency=0))
        assert seconds(4 * 2**30, 1, 2, place(ranks), where) == pytest.approx(expected, rel=1e-3)


SIZES = st.floats(0, 1e12)


@settings(deadline=None)
@given(
    size=SIZES,
    more=SIZES,
    launches=st.integers(0, 1000),
    rounds=st.integers(1, 2),
    faster=st.floats(1, 100),
    degree=st.sampled_from([1, 2, 3, 8, 16, 64]),
    stride=st.sampled_from([1, 2, 8]),
)
def test_monotone_in_size_launches_bandwidth_and_latency(
    size, more, launches, rounds, faster, degree, stride
):
    where, group = cluster(256, 8), place(degree, stride)
    time = seconds(size, launches, rounds, group, where)
    assert time >= 0
    assert seconds(size + more, launches, rounds, group, where) >= time
    assert seconds(size, launches + 1, rounds, group, where) >= time
    for intra, inter in ((faster, 1), (1, faster)):
        quicker = cluster(
            256,
            8,
            Link(bandwidth=INTRA.bandwidth * intra, latency=INTRA.latency / intra),
            Link(bandwidth=INTER.bandwidth * inter, latency=INTER.latency / inter),
        )
        assert seconds(size, launches, rounds, group, quicker) <= time * (1 + 1e-12)


def test_columns_broadcast_and_equal_rows_alone():
    where = cluster(64, 8)
    degree, stride = np.array([1, 8, 64, 8]), np.array([1, 1, 1, 8])
    column = ring_time(1e9, np.array([1, 2, 3, 4]), 2, Placement(degree, stride).route(where))
    rows = [seconds(1e9, n + 1, 2, place(degree[n], stride[n]), where) for n in range(4)]
    assert column.tolist() == rows


def test_a_send_takes_a_hop_on_the_slowest_link_between_neighbours():
    for per_node, link in ((8, INTRA), (4, INTER)):
        route = place(8).route(cluster(8, per_node))
        assert send_time(1e9, 5, route)[0] == pytest.approx(5 * link.latency + 1e9 / link.bandwidth)


def test_a_trade_leaves_a_node_by_the_ranks_own_link():
    """Not by those of all ranks of the node, as a ring does: NVIDIA/nccl-tests issue 267."""
    inside = trade_time(8e9, 4, place(8).route(cluster(8, 8)))[0]
    assert inside == pytest.approx(4 * 1e-6 + 7e9 / 100e9)
    across = trade_time(8e9, 4, place(8).route(cluster(8, 4)))[0]
    assert across == pytest.approx(4 * 10e-6 + 4e9 / 10e9)
    mostly_inside = cluster(8, 4, inter=Link(bandwidth=1000e9, latency=0))
    assert trade_time(8e9, 0, place(8).route(mostly_inside))[0] == pytest.approx(3e9 / 100e9)


def test_a_ring_is_no_slower_than_a_trade():
    where = cluster(64, 8)
    for degree, stride in ((64, 1), (16, 1), (8, 8), (4, 16)):
        route = place(degree, stride).route(where)
        assert ring_time(1e9, 0, 1, route)[0] <= trade_time(1e9, 0, route)[0] + 1e-12
