"""Measured curves in the planner: taken as they are where groups are alike, as corrections where not."""

import numpy as np
import pytest

from shardwright.bandwidth_map import Curve
from shardwright.cluster import Cluster, Level, Link, cluster_of
from shardwright.errors import ClusterError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.collectives import collective_time, modelled_times, send_time, trade_time
from shardwright.plan.explain import explanation, plan_of
from shardwright.plan.measured import links_words
from shardwright.plan.nothing import resized
from shardwright.plan.placement import Placement, placements
from shardwright.plan.search import search
from shardwright.plan.sensitivity import doubled_clusters
from shardwright.plan.step import step_time
from shardwright.plan.table import table_of
from shardwright.units import GiB, KiB, MiB

NODES = cluster_of("h100-sxm", 32)
INSIDE, WHOLE, RAIL = (8, 8), (8, 32), (1, 4)
SIZES = tuple(2**n for n in range(10, 31, 2))
ALL = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
SMALL = preset("llama-3.2-1b")


def modelled(cluster, members, collective, sizes=SIZES, scale=1.0) -> Curve:
    """A curve as the model has it, times ``scale``, a number or one for each size."""
    one = Curve(collective=collective, members=members, sizes=sizes, times=[1.0] * len(sizes))
    times = modelled_times(collective, one, cluster) * scale
    return one.model_copy(update={"times": tuple(times.tolist())})


def measured(cluster, *curves) -> Cluster:
    return Cluster.checked(cluster.model_dump() | {"curves": [curve.model_dump() for curve in curves]})


def seconds(cluster, collective, size, degree, stride=1, launches=1) -> float:
    route = Placement(np.array([degree]), np.array([stride])).route(cluster)
    return float(collective_time(collective, size, launches, route)[0])


def every(cluster, scale=1.0):
    groups = [m for m in (INSIDE, WHOLE, RAIL, (2, 2), (1, 2)) if m[-1] <= cluster.ranks]
    return measured(cluster, *(modelled(cluster, m, c, scale=scale) for m in groups for c in ALL))


@pytest.mark.parametrize("collective", ALL)
@pytest.mark.parametrize(("degree", "stride"), [(2, 1), (8, 1), (4, 8), (2, 16), (8, 4), (32, 1), (3, 1)])
def test_curves_equal_to_the_model_change_nothing(collective, degree, stride):
    where = every(NODES)
    for size in (8, 3 * KiB, 100 * KiB, 16 * MiB, 5 * GiB):
        plain = seconds(NODES, collective, size, degree, stride, launches=7)
        assert seconds(where, collective, size, degree, stride, launches=7) == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize("collective", ALL)
def test_a_group_like_the_measured_takes_just_what_was_measured(collective):
    times = np.geomspace(1e-5, 0.3, len(SIZES))  # nothing of the model is in them
    curve = Curve(collective=collective, members=WHOLE, sizes=SIZES, times=times.tolist())
    where = measured(NODES, curve)
    for size, time in zip(SIZES, times, strict=True):
        assert seconds(where, collective, size, 32) == pytest.approx(time, rel=1e-12)
        assert seconds(where, collective, 5 * size, 32, launches=5) == pytest.approx(5 * time, rel=1e-12)
    between = seconds(where, collective, 2 * SIZES[3], 32)
    assert times[3] < between < times[4]


def test_a_slow_band_of_sizes_is_slow_alone():
    slow = np.where(np.isin(SIZES, [2**20, 2**22]), 2.0, 1.0)
    where = measured(NODES, modelled(NODES, INSIDE, "all_reduce", scale=slow))

    def ratio(size, degree=8, collective="all_reduce", stride=1):
        plain = seconds(NODES, collective, size, degree, stride)
        return seconds(where, collective, size, degree, stride) / plain

    assert [round(ratio(size), 9) for size in (2**10, 2**18, 2**20, 2**21, 2**22, 2**24, 2**33)] == [
        *(1, 1, 2, 2, 2, 1, 1)
    ]
    assert ratio(2**19) == pytest.approx(1.5)  # half-way of the logarithm
    assert ratio(2**21, degree=4) == pytest.approx(2)  # other groups of the level: what the model is wrong by
    assert ratio(2**21, stride=8, degree=4) == 1  # over the network
    assert ratio(2**21, collective="all_gather") == 1


def test_a_rail_takes_the_curve_of_rails_and_not_the_nodes():
    curves = [
        modelled(NODES, m, "all_gather", scale=s) for m, s in ((INSIDE, 3.0), (WHOLE, 5.0), (RAIL, 7.0))
    ]
    where = measured(NODES, *curves)

    def ratio(degree, stride):
        plain = seconds(NODES, "all_gather", MiB, degree, stride)
        return round(seconds(where, "all_gather", MiB, degree, stride) / plain, 9)

    assert ratio(4, 8) == ratio(2, 8) == ratio(2, 16) == 7
    assert ratio(8, 1) == ratio(2, 1) == ratio(4, 2) == 3
    assert ratio(32, 1) == ratio(16, 1) == 5
    assert ratio(16, 2) == 5  # four of a node: nearer eight than one
    assert ratio(8, 4) == 7  # two of a node


def test_levels_inside_a_node_each_take_their_own():
    links = {"nvlink": 300e9, "pcie": 20e9, "rack": 10e9}
    levels = [
        Level(name=name, ranks=ranks, link=Link(bandwidth=links[name], latency=2e-6), shared=name != "nvlink")
        for name, ranks in (("nvlink", 2), ("pcie", 8), ("rack", 16))
    ]
    pairs = Cluster.checked(cluster_of("a100-pcie", 16, 8).model_dump() | {"levels": levels, "assumed": ()})
    kinds = {(2, 2, 2): 2.0, (2, 8, 8): 3.0, (1, 1, 2): 5.0}
    where = measured(pairs, *(modelled(pairs, m, "all_reduce", scale=s) for m, s in kinds.items()))
    for degree, stride, scale in (
        (2, 1, 2.0),
        (8, 1, 3.0),
        (4, 1, 3.0),
        (4, 2, 3.0),
        (2, 8, 5.0),
        (16, 1, 5.0),
    ):
        plain = seconds(pairs, "all_reduce", MiB, degree, stride)
        assert seconds(where, "all_reduce", MiB, degree, stride) / plain == pytest.approx(scale)
    assert links_words(where) == [
        "links: times by size as measured (nvlink: all_reduce; pcie: all_reduce; rack: all_reduce); "
        "the rest by latency and bandwidth"
    ]


def test_a_pair_across_says_what_a_pipeline_pays():
    where = measured(NODES, modelled(NODES, (1, 2), "send", scale=4.0))
    route, plain = (Placement(np.array([4]), np.array([8])).route(c) for c in (where, NODES))
    assert send_time(MiB, 3, route)[0] == pytest.approx(4 * send_time(MiB, 3, plain)[0])
    inside = Placement(np.array([4]), np.array([1])).route(where)
    assert send_time(MiB, 3, inside)[0] == send_time(MiB, 3, Placement(*_place(4, 1)).route(NODES))[0]
    assert trade_time(MiB, 3, route)[0] == trade_time(MiB, 3, plain)[0]


def _place(degree, stride):
    return np.array([degree]), np.array([stride])


def test_one_point_and_points_without_bytes():
    plain = seconds(NODES, "all_reduce", MiB, 8)
    curve = Curve(collective="all_reduce", members=INSIDE, sizes=[0, MiB], times=[9.0, 3 * plain])
    for size in (8, MiB, GiB):
        ratio = seconds(measured(NODES, curve), "all_reduce", size, 8) / seconds(NODES, "all_reduce", size, 8)
        assert ratio == pytest.approx(3)
    nothing = measured(NODES, Curve(collective="all_reduce", members=INSIDE, sizes=[0], times=[9.0]))
    assert seconds(nothing, "all_reduce", MiB, 8) == plain
    assert links_words(nothing) == links_words(NODES) == []


def test_a_table_of_many_placements_is_each_of_its_rows():
    rng = np.random.default_rng(0)
    kinds = [(m, c) for m in (INSIDE, WHOLE, RAIL) for c in ALL]
    where = measured(NODES, *(modelled(NODES, m, c, scale=rng.uniform(0.5, 3, len(SIZES))) for m, c in kinds))
    places = [(n, s) for n in (1, 2, 4, 8, 16, 32) for s in (1, 2, 4, 8, 16) if n * s <= 32]
    many = 500  # more than stand as they are: the same few, told apart by an index
    degree, stride = (np.array([place[n] for place in places] * many) for n in (0, 1))
    sizes = rng.integers(8, GiB, len(degree))
    for collective in ALL:
        times = collective_time(collective, sizes, 2, Placement(degree, stride).route(where))
        for row in range(0, len(degree), 997):
            alone = seconds(where, collective, sizes[row], int(degree[row]), int(stride[row]), 2)
            assert times[row] == pytest.approx(alone, rel=1e-12)


# Steps, plans and what is said


def test_a_step_is_the_same_with_curves_of_the_model():
    job = Job(seq=2048, global_batch=32)
    where = every(NODES)
    for layout in (
        Layout(dp_shard=4, tp=8, sp=True, zero_stage=3, microbatches=8),
        Layout(pp=4, dp_shard=8, zero_stage=1, schedule="1F1B", microbatches=4, stage_layers=(4,) * 4),
        Layout(dp_replicate=4, dp_shard=4, zero_stage=2, cp=2, cp_kind="ring", microbatches=2),
        Layout(dp_replicate=4, cp=8, zero_stage=1, cp_kind="ulysses", microbatches=8),
    ):
        table = table_of([layout], SMALL.layers)
        plain, same = (step_time(SMALL, job, cluster, table).time[0] for cluster in (NODES, where))
        assert same == pytest.approx(plain, rel=1e-9)
        slow = step_time(SMALL, job, every(NODES, 3.0), table).time[0]
        assert plain * 1.0001 < slow <= 3 * plain


def test_search_and_evaluating_all_agree_with_curves():
    job = Job(seq=2048, global_batch=16)
    cluster = cluster_of("h100-sxm", 16)
    rng = np.random.default_rng(1)
    kinds = [(m, c) for m in ((8, 8), (2, 2), (8, 16), (1, 2)) for c in ALL]
    where = measured(
        cluster, *(modelled(cluster, m, c, scale=rng.uniform(0.5, 8, len(SIZES))) for m, c in kinds)
    )
    plain = {"schedule": [0], "pp": [1]}  # no bubble, which a search simulates for its best
    some, every_one = (search(SMALL, job, where, plain, exhaustive=way) for way in (False, True))
    assert some.time[some.best[0]] == pytest.approx(every_one.time[every_one.best[0]], rel=1e-9)


def test_a_bad_network_that_was_measured_turns_the_plan():
    model, job = preset("llama-3.1-8b"), Job(seq=4096, global_batch=32)
    cluster = cluster_of("h100-sxm", 16)

    def best(where):
        result = search(model, job, where)
        return result.layout(int(result.best[0]))

    def crossing(layout, where):
        table = table_of([layout], model.layers)
        places = placements(table)
        return {axis for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp")
                if getattr(layout, axis) > 1 and places[axis].link(where) == ["network"]}  # fmt: skip

    assert best(every(cluster)) == best(cluster)
    assert crossing(best(cluster), cluster) == {"dp_shard"}
    kinds = (8, 16), (1, 2)
    bad = measured(cluster, *(modelled(cluster, m, c, scale=100.0) for m in kinds for c in ALL))
    layout = best(bad)
    assert crossing(layout, bad) <= {"pp", "dp_replicate"}
    assert layout != best(cluster)


def test_explain_and_plan_say_which():
    layout = Layout(dp_shard=4, tp=8, sp=True, zero_stage=3, microbatches=8)
    job = Job(seq=2048, global_batch=32)
    where = measured(
        NODES,
        modelled(NODES, INSIDE, "all_gather", (KiB, 64 * MiB)),
        modelled(NODES, (1, 2), "all_gather", (KiB, MiB)),
    )
    document = explanation(plan_of(SMALL, job, where, layout))
    said = {(flow["axis"], flow["collective"]): flow["link_source"] for flow in document["traffic"]}
    assert said["tp", "all_gather"] == "measured all_gather over [8, 8], 1 KiB to 64 MiB"
    assert said["tp", "reduce_scatter"] == "latency and bandwidth of the node"
    shard = said["dp_shard+cp" if ("dp_shard+cp", "all_gather") in said else "dp_shard", "all_gather"]
    assert shard.startswith(
        "measured all_gather over [1, 2], 1 KiB to 1 MiB, carried to [1, 4] by the model; "
    )
    assert shard.endswith("; its end is taken for 15.97 MiB")  # mean of 256 blocks and 8 heads
    line = (
        "links: times by size as measured (node: all_gather; network: all_gather); "
        "the rest by latency and bandwidth"
    )
    assert line in document["assumed"]
    plain = explanation(plan_of(SMALL, job, NODES, layout))
    assert not any(text.startswith("links:") for text in plain["assumed"])
    assert {flow["link_source"] for flow in plain["traffic"]} == {
        "latency and bandwidth of the node",
        "latency and bandwidth of the network",
    }


def test_twice_the_bandwidth_shortens_what_was_measured_as_it_does_the_model():
    where = doubled_clusters(every(NODES, 3.0), Layout(dp_shard=32, zero_stage=1))["bandwidth of network"]
    plain = doubled_clusters(NODES, Layout(dp_shard=32, zero_stage=1))["bandwidth of network"]
    for degree, stride in ((32, 1), (4, 8), (8, 1)):
        slow = seconds(where, "all_gather", 64 * MiB, degree, stride)
        assert slow == pytest.approx(3 * seconds(plain, "all_gather", 64 * MiB, degree, stride))
    rails = [seconds(c, "all_gather", GiB, 4, 8) for c in (where, every(NODES, 3.0))]
    assert rails[0] == pytest.approx(rails[1] / 2, rel=0.05)


def test_curves_follow_a_cluster_to_another_size():
    node = cluster_of("h100-sxm", 8)
    larger = resized(measured(node, modelled(node, (8,), "all_reduce", scale=3.0)), 16)
    assert [curve.members for curve in larger.curves] == [(8, 8)]
    assert Cluster.checked(larger.model_dump()) == larger
    smaller = resized(every(NODES), 8)
    assert {curve.members for curve in smaller.curves} == {(8,), (2,)}
    assert Cluster.checked(smaller.model_dump()) == smaller
    assert resized(NODES, 16).curves == ()


def test_toml_round_trip():
    where = every(NODES, 1.7)
    assert Cluster.from_toml(where.to_toml()) == where
    with pytest.raises(ClusterError, match=r"curve of send has members=\[2\], the cluster has levels"):
        measured(NODES, Curve(collective="send", members=[2], sizes=[8], times=[1e-5]))
