"""Collectives: times by hand, published measurements, and what must hold for every group."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import Cluster, Level, Link, cluster_of
from shardwright.plan.collectives import (
    collective_time,
    rank_bandwidths,
    ring_time,
    send_time,
    trade_time,
)
from shardwright.plan.placement import Placement
from shardwright.units import GB, GiB, KiB, MiB

INTRA, INTER = Link(bandwidth=100e9, latency=1e-6), Link(bandwidth=10e9, latency=10e-6)
ALL = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
SIZES = [32 * KiB, 256 * KiB, *(n * MiB for n in (1, 4, 16, 64, 256)), GiB, 8 * GiB]

SINGLE_NODE = {
    "a100-sxm": [1.37, 10.1, 36.2, 71.4, 109, 167, 214, 228, 232],
    "h100-sxm": [1.71, 10.9, 43.7, 129, 234, 362, 423, 466, 479],
    "h200-sxm": [1.84, 14.8, 53.0, 138, 240, 368, 432, 468, 480],
}
"""Bus bandwidth of all-reduces of 8 GPUs by size [GB/s]. Source: Azure/AI-benchmarking-guide
Azure_Results."""


def cluster(ranks, per_node, intra=INTRA, inter=INTER) -> Cluster:
    base = cluster_of("h100-sxm", ranks, per_node)
    return base.model_copy(
        update={"device": base.device.model_copy(update={"intra_link": intra, "inter_link": inter})}
    )


def levelled(ranks, per_node, *levels) -> Cluster:
    values = cluster_of("a100-pcie", ranks, per_node).model_dump()
    return Cluster.checked(values | {"levels": levels, "assumed": ()})


def place(degree, stride=1) -> Placement:
    return Placement(np.array([degree]), np.array([stride]))


def seconds(collective, payload, launches, placement, where) -> float:
    return float(collective_time(collective, payload, launches, placement.route(where))[0])


def bus_bandwidth(collective, payload, ranks, where, stride=1) -> float:
    """As nccl-tests prints it [GB/s]. Source: NVIDIA/nccl-tests doc/PERFORMANCE.md."""
    share = (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks
    return payload * share / seconds(collective, payload, 1, place(ranks, stride), where) / GB


def test_a_ring_inside_a_node():
    where = cluster(8, 8)
    gather = 7 * 1e-6 + 7 / 8 * 1e9 / 100e9
    assert seconds("all_gather", 1e9, 1, place(8), where) == pytest.approx(gather)
    assert seconds("reduce_scatter", 1e9, 1, place(8), where) == pytest.approx(gather)
    assert seconds("all_reduce", 1e9, 1, place(8), where) == pytest.approx(2 * gather)
    ten = 10 * 7 * 1e-6 + 7 / 8 * 1e9 / 100e9
    assert seconds("all_gather", 1e9, 10, place(8), where) == pytest.approx(ten)


def test_a_ring_over_nodes_has_as_many_network_links_as_ranks_in_a_node():
    """B_inter = r x B_nic: shared FORMULAE 4.2."""
    where = cluster(32, 8)
    one = 3 * 10e-6 + 28 * 1e-6 + 31 / 32 * 1e9 / min(100e9, 8 * 10e9)
    assert seconds("all_gather", 1e9, 1, place(32), where) == pytest.approx(one)
    replicas = 3 * 10e-6 + 3 / 4 * 1e9 / 10e9
    assert seconds("all_gather", 1e9, 1, place(4, 8), where) == pytest.approx(replicas)


def test_a_ring_over_nodes_is_no_faster_than_inside_one():
    where = cluster(32, 8, inter=Link(bandwidth=90e9, latency=10e-6))
    assert seconds("all_gather", 1e12, 1, place(32), where) >= 31 / 32 * 1e12 / 100e9


def test_gloo_has_rings_alone():
    """2 ranks on loopback: 16 MiB reduced in 14.2 ms plus hops, 4 B in 0.32 ms (data/devices/cpu.toml)."""
    where = cluster_of("cpu", 4)
    assert seconds("all_reduce", 4, 1, place(2), where) == pytest.approx(0.32e-3, rel=1e-3)
    whole = 16 * MiB / 1.15e9 + 0.32e-3
    assert seconds("all_reduce", 16 * MiB, 1, place(2), where) == pytest.approx(whole, rel=1e-6)
    for size in (4, MiB, GiB):
        ring = ring_time(size, 3, 2, place(4).route(where))[0]
        assert seconds("all_reduce", size, 3, place(4), where) == ring


# Published measurements


@pytest.mark.parametrize("name", SINGLE_NODE)
def test_all_reduces_of_a_node_follow_the_published_table(name):
    where = cluster_of(name, 8)
    found = [bus_bandwidth("all_reduce", size, 8, where) for size in SIZES]
    errors = np.log(np.array(found) / SINGLE_NODE[name])
    assert np.sqrt(np.mean(errors**2)) < 0.10
    assert np.abs(errors).max() < 0.21
    assert abs(errors[-1]) < 0.03


@pytest.mark.parametrize(
    ("name", "low", "high"), [("h200-sxm", 361, 367), ("h100-sxm", 361, 367), ("a100-sxm", 231, 235)]
)
def test_gathers_of_a_node_reach_the_rings_bandwidth(name, low, high):
    """Shared FORMULAE 4.4 (ML Engineering; H100 has the NVLink of H200)."""
    for collective in ("all_gather", "reduce_scatter"):
        assert 0.99 * low < bus_bandwidth(collective, 16 * GiB, 8, cluster_of(name, 8)) < high


@pytest.mark.parametrize(("ranks", "measured"), [(4, 363), (5, 414), (6, 436), (7, 460), (8, 473)])
def test_switches_add_up_for_fewer_ranks_too(ranks, measured):
    """H200, all-reduce by GPU count (stas00/ml-engineering network/README.md); 4 take a ring."""
    assert bus_bandwidth("all_reduce", 16 * GiB, ranks, cluster_of("h200-sxm", 8)) == pytest.approx(
        measured, rel=0.03
    )


def test_four_nodes_of_b200():
    """4 GiB over 4 x 8 ranks: 22.05 ms measured, bounds 16.1 and 26.25 (shared FORMULAE 4.2, fixture 26)."""
    where = cluster_of("b200-sxm", 32)
    time = seconds("all_reduce", 4 * GiB, 1, place(32), where)
    assert 16.1e-3 < time < 26.25e-3
    assert time == pytest.approx(22.05e-3, rel=0.12)
    for size, measured in ((64 * MiB, 157), (256 * MiB, 229), (GiB, 362), (16 * GiB, 382)):
        assert bus_bandwidth("all_reduce", size, 32, where) == pytest.approx(measured, rel=0.17)


def test_published_bandwidth_and_time_of_all_reduces_agree():
    """4 GiB: 32 ranks at 377.34 GB/s of bus bandwidth in 22.05 ms; 8 ranks at 740.64 GB/s in 10.15 ms.
    stas00/ml-engineering network/README.md"""
    for ranks, bandwidth, expected in ((32, 377.34e9, 22.05e-3), (8, 740.64e9, 10.15e-3)):
        where = cluster(ranks, ranks, intra=Link(bandwidth=bandwidth, latency=0))
        assert seconds("all_reduce", 4 * GiB, 1, place(ranks), where) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("per_node", "milliseconds"), [(8, 16.7), (1, 150.3)])
def test_tp_traffic_in_a_node_and_over_the_network(per_node, milliseconds):
    """7.516192768 GB sent by each of 8 ranks: 450 GB/s in a node, 50 GB/s between."""
    where = cluster(8, per_node, Link(bandwidth=450e9, latency=0), Link(bandwidth=50e9, latency=0))
    time = seconds("all_reduce", 7.516192768e9 / (2 * 7 / 8), 128, place(8), where)
    assert round(time * 1e3, 1) == milliseconds


@pytest.mark.parametrize(
    ("ranks", "low", "high"), [(8, 25e-6, 45e-6), (1024, 60e-6, 200e-6), (16384, 60e-6, 300e-6)]
)
def test_a_norm_goes_up_and_down_a_tree(ranks, low, high):
    where = cluster_of("h100-sxm", ranks)
    time = seconds("all_reduce", 8, 1, place(ranks), where)
    assert low < time < high
    assert ranks == 8 or time < ring_time(8, 1, 2, place(ranks).route(where))[0] / 4


def test_a_tree_takes_two_hops_for_each_doubling():
    """2 ceil(log2 n) short hops: 3 doublings in the node, 11 of nodes; after the start."""
    inside = Link(bandwidth=100e9, latency=3e-6, small_latency=0.6e-6, start=20e-6)
    across = Link(bandwidth=50e9, latency=14e-6, small_latency=5e-6, start=25e-6)
    where = cluster(16384, 8, inside, across)
    expected = 25e-6 + 2 * (3 * 0.6e-6 + 11 * 5e-6)
    assert seconds("all_reduce", 0, 1, place(16384), where) == pytest.approx(expected)


def test_one_rank_a_node_gathers_in_logarithmic_hops():
    """PAT, 0.75 of the bandwidth: shared FORMULAE 4.3. Several ranks a node take the ring."""
    where = cluster(2048, 8)
    expected = 8 * 10e-6 + 255 / 256 * 1e6 / (0.75 * 10e9)
    assert seconds("all_gather", 1e6, 1, place(256, 8), where) == pytest.approx(expected)
    ring = ring_time(1e6, 1, 1, place(256).route(where))[0]
    assert seconds("all_gather", 1e6, 1, place(256), where) == pytest.approx(ring)


def test_rings_of_middle_messages_take_lines():
    """LL128: hops of 1.9 and 4 us at 0.92 of the bandwidth (shared FORMULAE 4.3), if all links have it. 64
    nodes of 8 gather 64 MB: the plain ring waits for hops, the small one for twice the bytes."""
    inside = Link(bandwidth=100e9, latency=3.4e-6, small_latency=0.6e-6, ll128_latency=1.9e-6)
    across = Link(bandwidth=50e9, latency=14e-6, small_latency=5e-6, ll128_latency=4e-6)
    where, group = cluster(512, 8, inside, across), place(512)
    moved = 511 / 512 * 64e6 / 100e9
    lines = 448 * 1.9e-6 + 63 * 4e-6 + moved / 0.92
    assert seconds("all_gather", 64e6, 1, group, where) == pytest.approx(lines)
    large = 511 / 512 * 64e9 / 100e9 + 448 * 3.4e-6 + 63 * 14e-6
    assert seconds("all_gather", 64e9, 1, group, where) == pytest.approx(large)
    without = across.model_copy(update={"ll128_latency": 0.0})
    plain = seconds("all_gather", 64e6, 1, group, cluster(512, 8, inside, without))
    small = 448 * 0.6e-6 + 63 * 5e-6 + 2 * moved
    assert plain == pytest.approx(min(448 * 3.4e-6 + 63 * 14e-6 + moved, small))
    assert plain > lines


def test_phases_inside_and_across_bound_an_all_reduce():
    """2(g-1)/g S/B_nvl + 2(N-1)/N S/(g B_nic), and the hops: shared FORMULAE 4.2, upper bound."""
    where = cluster(512, 8)
    phases = 2 * 7 / 8 * 64e6 / 100e9 + 2 * 63 / 64 * 8e6 / 10e9 + 2 * (7 * 1e-6 + 63 * 10e-6)
    ring = 2 * (448 * 1e-6 + 63 * 10e-6) + 2 * 511 / 512 * 64e6 / 80e9
    found = seconds("all_reduce", 64e6, 1, place(512), where)
    assert found <= min(phases, ring)
    assert phases > ring  # at 64 MB; with less to move, hops decide
    small = seconds("all_reduce", 1e6, 1, place(512), where)
    assert small < 2 * (448 * 1e-6 + 63 * 10e-6)


# Levels of links

PAIRS = (
    {"name": "pair", "ranks": 2, "link": {"bandwidth": "208 GB/s", "latency": "3.4 us"}},
    {"name": "numa", "ranks": 4, "link": {"bandwidth": "20 GB/s", "latency": "5.7 us"}},
    {"name": "box", "ranks": 8, "link": {"bandwidth": "20 GB/s", "latency": "5.7 us"}, "shared": True},
)  # fmt: skip


def test_nvlink_pairs_in_a_pcie_box():
    """8 A100 PCIe, bridges on (0,1)(2,3)(4,5)(6,7): 2 GPUs reach 208 GB/s, 3 only 20 (NVIDIA/nccl-tests issue
    178)."""
    where = levelled(8, 8, *PAIRS)
    assert bus_bandwidth("all_reduce", 8 * GiB, 2, where) == pytest.approx(208, rel=0.01)
    three = levelled(3, 8, *PAIRS)
    assert bus_bandwidth("all_reduce", 8 * GiB, 3, three) == pytest.approx(20, rel=0.01)
    assert bus_bandwidth("all_reduce", 8 * GiB, 2, where, stride=2) == pytest.approx(20, rel=0.01)
    assert place(2).link(where) == ["pair"]
    assert place(8).link(where) == ["box"]


def test_a_shared_link_is_divided_by_all_that_use_it():
    """One QPI of 20 GB/s: a ring through all 8 has it alone, 4 pairs of ranks across have a quarter each."""
    where = levelled(8, 8, *PAIRS)
    assert rank_bandwidths(where) == [208e9, 20e9, 5e9]
    assert bus_bandwidth("all_gather", 8 * GiB, 8, where) == pytest.approx(20, rel=0.01)
    assert bus_bandwidth("all_gather", 8 * GiB, 2, where, stride=4) == pytest.approx(5, rel=0.01)
    send = send_time(1e9, 0, place(2, 4).route(where))[0]
    assert send == pytest.approx(1e9 / 5e9)


def test_a_rack_with_few_uplinks():
    """Rails of 50 GB/s in racks of 4 nodes; 8 such uplinks leave a rack, for 32 ranks."""
    rail, spine = {"bandwidth": 50e9, "latency": 0}, {"bandwidth": 8 * 50e9, "latency": 0}
    node = {"name": "node", "ranks": 8, "link": {"bandwidth": 400e9, "latency": 0}}
    rack = {"name": "rack", "ranks": 32, "link": rail}
    where = levelled(128, 8, node, rack, {"name": "spine", "ranks": 128, "link": spine, "shared": True})
    assert rank_bandwidths(where) == [400e9, 50e9, 12.5e9]
    assert bus_bandwidth("all_gather", 8 * GiB, 4, where, stride=8) == pytest.approx(50)  # one rail
    assert bus_bandwidth("all_gather", 8 * GiB, 32, where) == pytest.approx(400)  # 8 rails
    assert bus_bandwidth("all_gather", 8 * GiB, 16, where, stride=8) == pytest.approx(4 * 12.5)
    assert bus_bandwidth("all_gather", 8 * GiB, 4, where, stride=32) == pytest.approx(12.5)
    traded = trade_time(16e9, 0, place(16, 8).route(where))[0]  # 12 of 16 parts leave the rack
    assert traded == pytest.approx(12e9 / 12.5e9)
    full = {"name": "spine", "ranks": 128, "link": {"bandwidth": 1e15, "latency": 0}, "shared": True}
    wide = levelled(128, 8, node, rack, full)
    assert rank_bandwidths(wide) == [400e9, 50e9, 50e9]  # no faster than the rail that leads there
    assert trade_time(16e9, 0, place(16, 8).route(wide))[0] == pytest.approx(15e9 / 50e9)


def test_levels_that_say_what_nodes_and_network_say_change_nothing():
    plain = cluster(64, 8)
    levels = tuple(Level.checked(level.model_dump()) for level in plain.domains)
    given = plain.model_copy(update={"levels": levels})
    for degree, stride in ((8, 1), (64, 1), (8, 8), (12, 1), (3, 1)):
        for name in ALL:
            both = [seconds(name, 1e8, 3, place(degree, stride), where) for where in (plain, given)]
            assert both[0] == both[1]


# What must hold

BYTES = st.floats(0, 1e12)
DEVICES = st.sampled_from(["h100-sxm", "a100-sxm", "l40s", "mi300x", "gb200", "cpu"])
GROUPS = st.tuples(st.sampled_from([2, 3, 8, 16, 64]), st.sampled_from([1, 2, 3, 8]))


@pytest.mark.parametrize("collective", ALL)
def test_one_rank_sends_nothing(collective):
    for name in ("h100-sxm", "cpu"):
        assert seconds(collective, 1e9, 10, place(1), cluster_of(name, 64, 8)) == 0


@settings(deadline=None)
@given(
    collective=st.sampled_from(ALL), name=DEVICES, group=GROUPS, size=BYTES, more=BYTES,
    launches=st.integers(1, 1000),
    fields=st.sampled_from(
        ["bandwidth", "latency", "small_latency", "ll128_latency", "start", "ramp", "switch_bandwidth"]
    ),
    which=st.sampled_from(["intra_link", "inter_link"]), factor=st.floats(1, 100),
)  # fmt: skip
def test_monotone_in_size_launches_and_links(
    collective, name, group, size, more, launches, fields, which, factor
):
    where, placement = cluster_of(name, 256, 8), place(*group)
    time = seconds(collective, size, launches, placement, where)
    assert time >= 0
    assert seconds(collective, size + more, launches, placement, where) >= time * (1 - 1e-12)
    assert seconds(collective, size, launches + 1, placement, where) >= time * (1 - 1e-12)
    link = getattr(where.device, which)
    value = getattr(link, fields)
    better = link.model_copy(update={fields: value * factor if "bandwidth" in fields else value / factor})
    quicker = where.model_copy(update={"device": where.device.model_copy(update={which: better})})
    assert seconds(collective, size, launches, placement, quicker) <= time * (1 + 1e-12)


@settings(deadline=None, max_examples=50)
@given(name=DEVICES, group=GROUPS, size=BYTES, launches=st.integers(1, 100))
def test_no_collective_is_dearer_than_its_ring_and_many_small_ones_than_one(name, group, size, launches):
    where = cluster_of(name, 256, 8)
    route = place(*group).route(where)
    for collective, rounds in (("all_gather", 1), ("all_reduce", 2)):
        time = collective_time(collective, size, launches, route)[0]
        assert time <= ring_time(size, launches, rounds, route)[0]
        one = collective_time(collective, size / launches, 1, route)[0]
        assert launches * one == pytest.approx(time, rel=1e-9)
        assert collective_time(collective, size, 1, route)[0] <= time


@pytest.mark.parametrize("collective", ALL)
def test_columns_broadcast_and_equal_rows_alone(collective):
    where = cluster_of("h100-sxm", 64)
    degree, stride = np.array([1, 8, 64, 8, 12]), np.array([1, 1, 1, 8, 1])
    sizes, launches = np.array([[8.0], [1e6], [1e10]]), np.array([1, 2, 3, 4, 5])
    grid = collective_time(collective, sizes, launches, Placement(degree, stride).route(where))
    assert grid.shape == (3, 5)
    for i, n in np.ndindex(3, 5):
        assert grid[i, n] == seconds(collective, sizes[i, 0], launches[n], place(degree[n], stride[n]), where)


def test_a_send_takes_a_hop_on_the_slowest_link_between_neighbours():
    for per_node, link in ((8, INTRA), (4, INTER)):
        route = place(8).route(cluster(8, per_node))
        assert send_time(1e9, 5, route)[0] == pytest.approx(5 * link.latency + 1e9 / link.bandwidth)
    slow_inside = cluster(8, 4, intra=INTER, inter=Link(bandwidth=20e9, latency=10e-6))
    assert send_time(1e9, 0, place(8).route(slow_inside))[0] == pytest.approx(1e9 / 10e9)


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


def test_ulysses_sends_less_per_link_the_more_ranks_trade():
    """4 N h / P a rank against 4 N h (arXiv:2309.14509): the time falls with the payload."""
    where = cluster(8, 8, intra=Link(bandwidth=100e9, latency=0))
    for ranks in (2, 4, 8):
        time = trade_time(4e9 / ranks, 4, place(ranks).route(where))[0]
        assert time == pytest.approx(4e9 / ranks * (1 - 1 / ranks) / 100e9)
