"""What classes of links carry, whom NVLink joins, and which NICs are near: against published figures."""

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import device
from shardwright.measure.link_classes import (
    carried,
    has_nvlink_ring,
    islands,
    joined_by_nvlink,
    nearest_nics,
    nvlink_groups,
    within,
)
from shardwright.measure.topology import read_topologies

FOLDER = Path(__file__).parent / "data" / "topo"


def topology(name):
    (path,) = FOLDER.glob(f"{name}_*.txt")
    (found,) = read_topologies(path.read_text(), path.name)
    return found


@pytest.mark.parametrize(
    ("link", "kind", "nominal"),
    [
        ("NV1", "v100-sxm-16gb", 25e9),
        ("NV6", "v100-sxm-16gb", 150e9),  # 300 GB/s, both directions
        ("NV12", "a100-sxm", 300e9),  # 600
        ("NV18", "h100-sxm", 450e9),  # 900
        ("NV18", "b200-sxm", 900e9),  # 1800
        ("NV4", "a100-sxm", 100e9),
        ("PIX", "h100-sxm", 63e9),
        ("PIX", "a100-sxm", 31.5e9),
        ("PIX", "v100-sxm-16gb", 15.75e9),
    ],
)
def test_a_class_has_the_bandwidth_of_data_sheets(link, kind, nominal):
    found = carried(link, device(kind))
    assert found.nominal == pytest.approx(nominal)
    assert 0.7 * nominal < found.effective < 0.85 * nominal


@pytest.mark.parametrize(
    ("link", "kind", "measured", "within_share"),
    [
        ("NV4", "a100-sxm", 72e9, 0.15),  # a pair, nccl-tests issue 331: 72 to 80 % is usual
        ("NV12", "a100-sxm", 232e9, 0.05),  # eight, nccl-tests issue 149
        ("NV12", "a100-pcie", 208e9, 0.20),  # a bridged pair, nccl-tests issue 178
        ("NODE", "a100-pcie", 20e9, 0.01),  # three of them over PCIe, the same
        ("PIX", "h100-sxm", 50e9, 0.02),  # one GPU with its NIC, nccl-tests issue 232
    ],
)
def test_a_class_carries_what_was_measured(link, kind, measured, within_share):
    assert carried(link, device(kind)).effective == pytest.approx(measured, rel=within_share)


def test_what_is_not_known_carries_nothing():
    assert carried("-", device("h100-sxm")) is None
    assert carried("PIX", device("mi300x")) is None
    assert carried("NV4", device("rtx4090")) is None


def test_farther_classes_carry_no_more():
    for kind in ("v100-sxm-16gb", "a100-sxm", "h100-sxm", "l40s"):
        rates = [carried(link, device(kind)).effective for link in ("PIX", "PXB", "PHB", "NODE", "SYS")]
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("name", "groups", "ring"),
    [
        ("t24", ((0, 1), (2, 3), (4, 5), (6, 7)), False),
        ("t04", ((0, 1, 2, 3), (4, 5, 6, 7)), True),  # 0-1-2-3-4-5-6-7-0 are NVLinks but 5-2, so another way
        ("t14", (tuple(range(8)),), True),
        ("t15", ((0, 1, 2, 3),), True),
        ("t18", ((0,), (1,), (2,)), False),  # a pair and an odd one
        ("t09", tuple((at,) for at in range(8)), False),
        ("t32", tuple((at,) for at in range(6)), False),
    ],
)
def test_tp_groups_are_the_largest_that_all_devices_can_be_in(name, groups, ring):
    classes = topology(name).device_classes
    assert nvlink_groups(classes) == groups
    assert has_nvlink_ring(classes) == ring


def test_islands_leave_odd_devices_alone():
    assert islands(topology("t18").device_classes) == ((0, 1), (2,))
    assert within(topology("t32").device_classes, 1) == ((0, 1), (2,), (3, 4), (5,))  # PIX
    assert within(topology("t32").device_classes, 4) == ((0, 1, 2), (3, 4, 5))  # NODE


def test_groups_of_devices_that_do_not_follow_each_other_are_found():
    pairs = {(0, 2), (1, 3)}
    classes = [
        ["X" if a == b else "NV4" if (min(a, b), max(a, b)) in pairs else "SYS" for b in range(4)]
        for a in range(4)
    ]
    assert nvlink_groups(classes) == ((0, 2), (1, 3))


@settings(deadline=None)
@given(
    st.integers(2, 8).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.sampled_from(list(combinations(range(n), 2)))))
    )
)
def test_groups_are_the_best_that_search_by_brute_force_finds(case):
    n, joined = case
    classes = [
        ["X" if a == b else "NV1" if (min(a, b), max(a, b)) in joined else "SYS" for b in range(n)]
        for a in range(n)
    ]
    groups = nvlink_groups(classes)
    assert sorted(device for group in groups for device in group) == list(range(n))
    assert len({len(group) for group in groups}) == 1
    assert all(joined_by_nvlink(classes, group) for group in groups)
    best = max(
        size
        for size in (1, 2, 4, 8)
        if size <= n and n % size == 0 and can_share(joined, tuple(range(n)), size)
    )
    assert len(groups[0]) == best


def can_share(joined, left, size):
    """Whether devices can be shared out into groups of a size in which all pairs are joined."""
    return not left or any(
        all(pair in joined for pair in combinations((left[0], *rest), 2))
        and can_share(joined, tuple(x for x in left[1:] if x not in rest), size)
        for rest in combinations(left[1:], size - 1)
    )


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("t27", ["PIX", "SYS", "PIX", "SYS", "PIX", "SYS", "PIX", "-"]),
        ("t32", ["NODE", "NODE", "PIX", "NODE", "NODE", "PIX"]),
        ("t21", ["PIX"] * 8),
        ("t15", ["PXB"] * 4),
        ("t04", ["NODE", "NODE", "PIX", "PIX", "NODE", "NODE", "PIX", "PIX"]),
        ("t11", ["SYS", "SYS", "NODE", "NODE"]),
        ("t14", []),
    ],
)
def test_the_nearest_nic_of_each_device(name, links):
    assert [near.link for near in nearest_nics(topology(name))] == links


def test_nics_that_own_devices():
    """GPU2 and GPU5 share a switch with mlx5_0 and mlx5_1; columns stand in the other order."""
    found = topology("t32")
    nearest = nearest_nics(found)
    assert [found.nics[nearest[at].nics[0]] for at in (2, 5)] == ["mlx5_0", "mlx5_1"]
    assert [near.local for near in nearest] == [False, False, True, False, False, True]
