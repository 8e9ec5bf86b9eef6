"""Measured against what the device's own links should give: a data sheet's, not the ones just measured."""

from typing import Literal, NamedTuple

import numpy as np

from shardwright.bandwidth_map import Collective, Curve
from shardwright.cluster import Cluster, device, device_names
from shardwright.measure.islands import class_order
from shardwright.measure.pair_speeds import PairSpeeds
from shardwright.plan.collectives import collective_time, route_through
from shardwright.units import MiB

Verdict = Literal["healthy", "degraded", "below half"]

HEALTHY, HALF = 0.8, 0.5
"""Shares of what is expected."""

LARGE = 16 * MiB
"""Messages from which bandwidth, not latency, is compared."""


class Comparison(NamedTuple):
    """``what`` reaches ``measured`` where ``expected`` is usual for the hardware, both bus bandwidth [B/s];
    ``level`` of links, ``size`` of a message [B], 0 for pairs."""

    level: str
    what: str
    size: int
    measured: float
    expected: float
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """Of measured to expected."""
        return self.measured / self.expected


def bus_factor(collective: Collective, ranks: int) -> float:
    """Bus bandwidth over bytes a second of payload. Source: nccl-tests, doc/PERFORMANCE.md."""
    share = (ranks - 1) / ranks if ranks > 1 else 1.0
    return {"send": 1.0, "all_reduce": 2 * share}.get(collective, share)


def bus_bandwidths(curve: Curve) -> list[float]:
    """What the link of a rank carries at each size, whatever the collective and the number of ranks [B/s]."""
    factor = bus_factor(curve.collective, curve.ranks)
    return [factor * size / time for size, time in zip(curve.sizes, curve.times, strict=True)]


def against_expected(cluster: Cluster, speeds: PairSpeeds) -> list[Comparison]:
    """Every curve at its largest message, and the usual pair of each level, against the device's links.

    None of CPU ranks and of devices that are not shipped: nothing is known of their links. In a node whose
    pairs have links of several classes only what crosses nodes is compared.
    """
    known = device(cluster.device.name) if cluster.device.name in device_names() else None
    if known is None or known.kind == "cpu":
        return []
    plain = cluster.model_copy(update={"device": known, "levels": (), "curves": ()})
    found = []
    uniform = _uniform(cluster, speeds)
    for curve in cluster.curves:
        if curve.sizes[-1] >= LARGE and curve.ranks > 1 and (uniform or _inside(curve, cluster) == 1):
            found.append(_of_curve(curve, cluster, plain))
    for number, (kind, usual) in enumerate(zip(speeds.kinds, speeds.usual, strict=True)):
        at = int(np.argmax(speeds.kind == number))
        inside = speeds.source[at] // cluster.gpus_per_node == speeds.target[at] // cluster.gpus_per_node
        if inside and not uniform:
            continue
        link = known.intra_link if inside else known.inter_link
        level = "node" if inside else "network"
        measured, expected = float(usual), link.bandwidth
        found.append(Comparison(level, f"pairs ({kind})", 0, measured, expected, verdict(measured, expected)))
    return found


def verdict(measured: float, expected: float) -> Verdict:
    """Healthy from 80 % of what is expected, degraded from half of it."""
    if measured >= HEALTHY * expected:
        return "healthy"
    return "degraded" if measured >= HALF * expected else "below half"


def _of_curve(curve: Curve, cluster: Cluster, plain: Cluster) -> Comparison:
    n, inside = curve.ranks, _inside(curve, cluster)
    spreads = [(np.array([inside]), np.array([n // inside])), (np.array([n]), np.array([1]))]
    route = route_through(np.array([n]), spreads[: len(plain.domains)], plain)
    size, time = curve.sizes[-1], curve.times[-1]
    predicted = float(collective_time(curve.collective, size, 1, route)[0])
    payload = size * bus_factor(curve.collective, n)
    measured, expected = payload / time, payload / predicted
    where = "node" if inside == n else "network"
    over = f"{n} ranks" if inside == n else f"{n // inside} nodes x {inside}"
    return Comparison(
        where, f"{curve.collective} of {over}", size, measured, expected, verdict(measured, expected)
    )


def _inside(curve: Curve, cluster: Cluster) -> int:
    """Ranks of a group that share a node."""
    return max(
        members
        for members, level in zip(curve.members, cluster.domains, strict=True)
        if level.ranks <= cluster.gpus_per_node
    )


def _uniform(cluster: Cluster, speeds: PairSpeeds) -> bool:
    """Whether all pairs of a node have links of one kind, and NVLinks where a topology says."""
    rows = () if cluster.map is None else cluster.map.classes
    names = {name for a, row in enumerate(rows) for b, name in enumerate(row) if a != b}
    inner = [level for level in cluster.levels if level.ranks < cluster.gpus_per_node]
    inside = speeds.source // cluster.gpus_per_node == speeds.target // cluster.gpus_per_node
    kinds = np.unique(speeds.kind[inside])
    return (
        len(kinds) <= 1 and len(names) <= 1 and not inner and all(class_order(name)[0] == 0 for name in names)
    )
