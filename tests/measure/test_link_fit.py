"""Links fitted to times that the planner's own formulas give for a known link."""

import numpy as np
import pytest

from shardwright.bandwidth_map import Curve
from shardwright.cluster import Link, cluster_of
from shardwright.measure.expected import bus_bandwidths
from shardwright.measure.link_fit import fit_link
from shardwright.plan.collectives import collective_time, route_through
from shardwright.units import MiB

TRUE = Link(bandwidth=2.5e9, latency=40e-6, ramp=300e-6)
SIZES = tuple(4**k * 1024 for k in range(9))
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def curves(link, device, ranks=(2, 4, 8), noise=0.0):
    """Times of the planner for groups inside one node."""
    base = cluster_of(device, 8, 8)
    cluster = base.model_copy(update={"device": base.device.model_copy(update={"intra_link": link})})
    rng = np.random.default_rng(1)
    for n in ranks:
        for collective in COLLECTIVES if n == 2 else COLLECTIVES[:-1]:
            route = route_through(np.array([n]), [(np.array([n]), np.array([1]))], cluster)
            times = [float(collective_time(collective, size, 1, route)[0]) for size in SIZES]
            times = [time * float(np.exp(rng.normal(0, noise))) for time in times]
            yield Curve(collective=collective, members=(n,), sizes=SIZES, times=tuple(times))


def test_a_link_comes_back_from_its_times():
    found = fit_link(
        list(curves(TRUE, "cpu")), Link(bandwidth=1e9, latency=1e-4), rings_alone=True, one_per_node=False
    )
    assert found.link.bandwidth == pytest.approx(TRUE.bandwidth, rel=1e-3)
    assert found.link.latency == pytest.approx(TRUE.latency, rel=1e-3)
    assert found.link.ramp == pytest.approx(TRUE.ramp, rel=1e-3)
    assert found.error < 1e-3


def test_noise_moves_it_little():
    points = list(curves(TRUE, "cpu", noise=0.1))
    found = fit_link(points, Link(bandwidth=1e9, latency=1e-4), rings_alone=True, one_per_node=False)
    assert found.link.bandwidth == pytest.approx(TRUE.bandwidth, rel=0.15)
    assert found.link.latency == pytest.approx(TRUE.latency, rel=0.15)
    assert 0.03 < found.error < 0.15


def test_small_messages_of_nccl_have_a_latency_of_their_own():
    true = Link(bandwidth=370e9, latency=3e-6, small_latency=1.2e-6, start=8e-6, ramp=20e-6)
    base = Link(bandwidth=300e9, latency=5e-6, small_latency=1e-6, start=8e-6)
    found = fit_link(list(curves(true, "h100-sxm")), base, rings_alone=False, one_per_node=False)
    assert found.link.start == base.start
    assert found.link.bandwidth == pytest.approx(true.bandwidth, rel=0.1)
    assert found.link.small_latency == pytest.approx(true.small_latency, rel=0.1)


def test_points_of_one_size_are_no_fit():
    one = next(curves(TRUE, "cpu"))
    single = one.model_copy(update={"sizes": one.sizes[:1], "times": one.times[:1]})
    assert fit_link([single], TRUE, rings_alone=True, one_per_node=False) is None


@pytest.mark.parametrize(
    ("collective", "factor"),
    # nccl-tests doc/PERFORMANCE.md, for 4 ranks
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("send", 1)],
)
def test_bus_bandwidth_is_as_nccl_tests_defines_it(collective, factor):
    curve = Curve(collective=collective, members=(4,), sizes=(MiB,), times=(1e-3,))
    assert bus_bandwidths(curve) == pytest.approx([factor * MiB / 1e-3])
