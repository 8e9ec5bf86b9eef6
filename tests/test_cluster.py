"""Clusters and the shipped devices."""

import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import cluster as cluster_module
from shardwright.cluster import (
    Cluster,
    Device,
    Level,
    Link,
    cluster_of,
    device,
    device_names,
    host_memory,
    usable_cores,
)
from shardwright.errors import ClusterError
from shardwright.units import GiB

DATA_SHEETS = {
    # name: (memory [GB], memory bandwidth [GB/s], dense bf16 [TFLOP/s]); fp16 on V100, which has no bf16
    "a100-sxm-80gb": (80, 2000, 312),
    "a100-sxm-40gb": (40, 1555, 312),
    "a100-pcie-80gb": (80, 1940, 312),
    "h100-sxm-80gb": (80, 3350, 989),
    "h100-sxm-96gb-hbm2e-500w": (96, 2400, 989),
    "h100-pcie-80gb": (80, 2000, 756),
    "h100-nvl-94gb": (94, 3900, 835),
    "h200-sxm-141gb": (141, 4800, 989),
    "h800-sxm-80gb": (80, 3400, 989),
    "a800-sxm-80gb": (80, 2000, 312),
    "h20-96gb": (96, 4000, 148),
    "b200-sxm-180gb": (180, 8000, 2250),
    "b300-sxm-288gb": (288, 8000, 2250),
    "gb200-186gb": (186, 8000, 2500),
    "gb300-288gb": (288, 8000, 2500),
    "l40s-48gb": (48, 864, 362),
    "rtx4090-24gb": (24, 1008, 165),
    "mi300x-192gb": (192, 5300, 1307),
    "mi325x-256gb": (256, 6000, 1300),
    "mi355x-288gb": (288, 8000, 2500),
    "mi250x-128gb": (128, 3280, 383),
    "v100-sxm-32gb": (32, 900, 125),
    "v100-sxm-16gb": (16, 900, 120),
}

ALIASES = {
    "h100-sxm": "h100-sxm-80gb",
    "h100-pcie": "h100-pcie-80gb",
    "h100-nvl": "h100-nvl-94gb",
    "h200-sxm": "h200-sxm-141gb",
    "h800-sxm": "h800-sxm-80gb",
    "h20": "h20-96gb",
    "a100-sxm": "a100-sxm-80gb",
    "a100-40-sxm": "a100-sxm-40gb",
    "a100-pcie": "a100-pcie-80gb",
    "a800-sxm": "a800-sxm-80gb",
    "b200-sxm": "b200-sxm-180gb",
    "b300-sxm": "b300-sxm-288gb",
    "gb200": "gb200-186gb",
    "gb300": "gb300-288gb",
    "mi300x": "mi300x-192gb",
    "mi325x": "mi325x-256gb",
    "mi355x": "mi355x-288gb",
    "mi250x": "mi250x-128gb",
    "l40s": "l40s-48gb",
    "rtx4090": "rtx4090-24gb",
    "v100-sxm": "v100-sxm-32gb",
    "cpu": "cpu",
}


def test_names_and_aliases_are_lower_case_and_name_one_device_each():
    names = device_names()
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)
    assert {device(name).name for name in names} == {*DATA_SHEETS, "cpu", "b200-simumax"}


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_device_agrees_with_its_data_sheet(name):
    memory, bandwidth, bf16 = DATA_SHEETS[name]
    found = device(name)
    assert 0.97 * memory * 1e9 <= found.memory <= memory * GiB
    assert found.memory_bandwidth == bandwidth * 1e9
    assert found.bf16 == found.peak("bf16") == bf16 * 1e12
    assert found.peak("bf16") > max(found.peak("fp32"), found.peak("fp64"))
    assert found.gpus_per_node == (72 if name.startswith("gb") else 8)
    assert found.intra_link.bandwidth < found.memory_bandwidth
    assert found.intra_link.latency < found.inter_link.latency
    assert found.kind == ("rocm" if name.startswith("mi") else "cuda")
    assert found.sms >= 78
    assert found.fp8 == 0 or found.fp8 == pytest.approx(2 * found.bf16, rel=0.03)
    assert (found.fp8 > 0) == ("fp8: " in found.source)
    for field in (
        "sms",
        "gemm_fill",
        "memory",
        "efficiency",
        "intra_link",
        "inter_link",
        "context",
        "communicator",
        "allocator_margin",
    ):
        assert field in found.source


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_short_names_in_any_case(alias, name):
    assert device(alias).name == device(alias.upper()).name == name


def test_unknown_device_names_the_nearest():
    with pytest.raises(ClusterError, match=r"device 'h100-smx' is unknown \(did you mean 'h100-sxm'\?\)"):
        device("h100-smx")
    with pytest.raises(ClusterError, match=r"device 'gaudi' is unknown \(known: 4090, a100, "):
        device("gaudi")


def test_what_is_assumed_is_said():
    assert cluster_of("h100-sxm", 16).assumed == (
        "gpus_per_node=8",
        "inter-node link 376 Gb/s usable per device (one 400 Gb/s NIC each)",
    )
    assert cluster_of("h100-sxm", 4, gpus_per_node=4).assumed == ()
    assert cluster_of("gb200", 72).assumed == ("gpus_per_node=72",)
    assert cluster_of("cpu", 2).assumed == ("gpus_per_node=2",)
    assert "NIC" not in " ".join(cluster_of("cpu", 4, gpus_per_node=2).assumed)


def test_nodes_round_up():
    assert cluster_of("h100-sxm", 17).nodes == 3
    assert cluster_of("h100-sxm", 16).nodes == 2


@pytest.mark.parametrize("name", ["cpu", "h100-sxm"])
@pytest.mark.parametrize(
    ("ranks", "per_node", "fault"), [(0, None, "ranks=0"), (-8, 8, "ranks=-8"), (8, 0, "gpus_per_node=0")]
)
def test_counts_below_one_are_a_cluster_error(name, ranks, per_node, fault):
    with pytest.raises(ClusterError, match=f"cluster: {fault}: "):
        cluster_of(name, ranks, per_node)


@pytest.mark.parametrize("name", ["cpu", "host"])
def test_the_cpu_device_has_this_machines_memory(name):
    assert device(name).memory == host_memory()


@settings(deadline=None)
@given(ranks=st.integers(1, 256))
def test_ranks_on_this_machine_share_it(ranks):
    whole, shared = device("cpu"), cluster_of("cpu", ranks)
    assert shared.gpus_per_node == ranks
    assert shared.device.memory * ranks <= whole.memory
    assert shared.device.memory_bandwidth * ranks == pytest.approx(whole.memory_bandwidth)
    assert shared.device.fp32 * ranks == pytest.approx(whole.fp32 * usable_cores())


def test_usable_cores_and_memory_agree_with_the_system():
    assert usable_cores() == len(os.sched_getaffinity(0))
    shown = subprocess.run(
        ["nproc"], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}
    )
    assert usable_cores() == int(shown.stdout)
    assert host_memory() > 2**28


def test_memory_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(cluster_module.os, "sysconf_names", {})
    assert host_memory() == 8 * GiB


def test_a_link_needs_bandwidth():
    with pytest.raises(ClusterError, match=r"bandwidth=0.0 must be above 0"):
        Link.checked({"bandwidth": 0, "latency": "1 us"})


def test_faults_of_a_device_are_reported_at_once():
    values = device("h100-sxm").model_dump() | {"memory": 0, "kind": "tpu", "allocator_margin": 1.0}
    with pytest.raises(ClusterError) as raised:
        Device.checked(values)
    assert all(part in str(raised.value) for part in ("memory=0", "kind='tpu'", "allocator_margin=1.0"))


def test_a_cluster_can_be_written_by_hand(tmp_path):
    shipped = cluster_of("a100-sxm", 16)
    own = shipped.device.model_copy(update={"inter_link": Link(bandwidth=24e9, latency=14e-6)})
    written = shipped.model_copy(update={"device": own})
    path = tmp_path / "cluster.toml"
    path.write_text(written.to_toml())
    assert 'bandwidth = "24 GB/s"' in path.read_text()
    assert Cluster.from_file(path) == written
    assert Cluster.from_file(path).inter_link == own.inter_link


def test_links_belong_to_the_device():
    values = cluster_of("a100-sxm", 16).model_dump() | {"inter_link": {"bandwidth": 24e9, "latency": 14e-6}}
    with pytest.raises(ClusterError, match="unknown key 'inter_link'"):
        Cluster.checked(values)


# Levels of links

BOX = """
ranks = 16
gpus_per_node = 8

[[levels]]
name = "pair"
ranks = 2
link = { bandwidth = "208 GB/s", latency = "3.4 us", small_latency = "0.6 us" }

[[levels]]
name = "numa"
ranks = 4
link = { bandwidth = "20 GB/s", latency = "5.7 us" }

[[levels]]
name = "box"
ranks = 8
link = { bandwidth = "20 GB/s", latency = "5.7 us" }
shared = true

[[levels]]
name = "network"
ranks = 16
link = { bandwidth = "24 GB/s", latency = "14 us" }
"""


def written(text: str) -> str:
    """A cluster file of A100 PCIe with these levels."""
    return text + "\n[device]\n" + device("a100-pcie").to_toml().replace("\n[", "\n[device.")


def test_levels_are_read_from_a_file_and_written_back(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(written(BOX))
    found = Cluster.from_file(path)
    assert found.device == device("a100-pcie")
    assert [(level.name, level.ranks, level.shared) for level in found.domains] == [
        ("pair", 2, False),
        ("numa", 4, False),
        ("box", 8, True),
        ("network", 16, False),
    ]
    pair, box = found.domains[0].link, found.domains[2].link
    assert (pair.bandwidth, pair.latency, pair.small_latency) == pytest.approx((208e9, 3.4e-6, 0.6e-6))
    assert found.intra_link == box
    assert found.inter_link == found.domains[3].link
    assert box.small_latency == box.latency  # where a file does not tell them apart
    path.write_text(found.to_toml())
    assert Cluster.from_file(path) == found
    assert 'name = "pair"' in path.read_text()


def test_without_levels_there_are_nodes_and_a_network():
    where = cluster_of("h100-sxm", 20)
    assert where.levels == ()
    assert [(level.name, level.ranks) for level in where.domains] == [("node", 8), ("network", 24)]
    assert [level.link for level in where.domains] == [where.intra_link, where.inter_link]
    assert Cluster.from_toml(where.to_toml()) == where
    alone = cluster_of("h100-sxm", 4)
    assert [(level.name, level.ranks) for level in alone.domains] == [("node", 8)]
    assert alone.inter_link == alone.device.inter_link


def test_faults_of_levels_are_reported_at_once():
    link = Link(bandwidth=1e9, latency=0)
    levels = [Level(name=name, ranks=ranks, link=link) for name, ranks in (("a", 4), ("a", 6), ("b", 12))]
    values = cluster_of("h100-sxm", 16).model_dump() | {"levels": [level.model_dump() for level in levels]}
    with pytest.raises(ClusterError) as raised:
        Cluster.checked(values)
    for part in (
        "levels are named ['a', 'a', 'b']: give each a name of its own",
        "level 'a' of 6 ranks is not made of whole domains of 'a' of 4",
        "level 'b' joins 12 ranks, the cluster has 16: add a level of at least 16",
        "gpus_per_node=8 is the size of no level: use one of [4, 6, 12]",
    ):
        assert part in str(raised.value)


def test_a_misspelt_key_of_a_level_names_the_nearest():
    with pytest.raises(ClusterError, match=r"unknown key 'levels.0.shard' \(did you mean 'shared'\?\)"):
        Cluster.from_toml(written(BOX).replace("ranks = 2\n", "ranks = 2\nshard = true\n"))


def test_links_of_devices_say_what_messages_cost():
    for name in DATA_SHEETS:
        kind = device(name)
        inside, across = kind.intra_link, kind.inter_link
        assert inside.small_latency < inside.latency
        assert across.small_latency < across.latency
        lines = name.startswith(
            ("a100-sxm", "a800", "h100-sxm", "h800", "h200", "h20-", "b200", "b300", "gb")
        )
        assert (inside.ll128_latency > 0) == (across.ll128_latency > 0) == lines
        assert not lines or inside.small_latency < inside.ll128_latency < inside.latency
        assert not lines or across.ll128_latency < across.latency
        assert inside.start == across.start > 0
        assert (inside.switch_bandwidth > 0) == name.startswith(
            ("h100-sxm", "h200", "h20-", "b200", "b300", "gb")
        )
    assert device("cpu").intra_link.small_latency == device("cpu").intra_link.latency


def curve(**changes):
    values = {"collective": "all_reduce", "members": [2, 4], "sizes": [1024, 2048], "times": [1e-5, 2e-5]}
    return values | changes


def test_a_cluster_with_curves_and_pairs_comes_back_from_toml():
    cluster = cluster_of("h100-sxm", 16)
    record = {"hosts": ["a"] * 8 + ["b"] * 8, "pairs": [(0, 1, 4e11, 2e-6)], "source": "gloo"}
    values = cluster.model_dump() | {"curves": [curve(members=[8, 16])], "map": record}
    measured = Cluster.checked(values)
    assert Cluster.from_toml(measured.to_toml()) == measured
    assert measured.map.pairs[0].bandwidth == 4e11
    assert measured.curves[0].ranks == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"times": [1e-5]}, "times has 1 values, sizes 2"),
        ({"sizes": [2048, 1024]}, "sizes do not grow"),
        ({"times": [1e-5, 0.0]}, "times must be above 0"),
        ({"members": [2, 3]}, "no whole groups inside one another"),
        ({"members": [8]}, "give one number a level"),
    ],
)
def test_a_malformed_curve_is_refused(changes, message):
    values = cluster_of("h100-sxm", 16).model_dump() | {"curves": [curve(**changes)]}
    with pytest.raises(ClusterError, match=message.replace("[", r"\[")):
        Cluster.checked(values)
