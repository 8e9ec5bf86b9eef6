"""Which devices of a node are joined at full speed, and which by slower links: what tp groups can live on.

By the classes of links that a topology names, by measured pairs, or by the levels of the cluster.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.bandwidth_map import MapRecord
from shardwright.cluster import Cluster
from shardwright.measure.cliques import cliques
from shardwright.measure.link_classes import ORDER, nvlinks

SAME_TIER = 0.75
"""Ratio of neighbouring speeds below which a new tier begins."""


class Tier(NamedTuple):
    """Groups of a node's devices in which every pair has ``link`` or a faster one; ``bandwidth``: the slowest
    pair of them [B/s], None if none was measured."""

    link: str
    bandwidth: float | None
    groups: tuple[tuple[int, ...], ...]
    known_by: Literal["topology", "measured", "levels"]


def tiers(cluster: Cluster, table: NDArray[np.float64]) -> tuple[Tier, ...]:
    """Groups of one node's devices from the fastest links to the slowest; a tier that joins no more than the
    one before is left out, and so is one that joins nobody. ``table``: measured pairs, a row each."""
    record = cluster.map or MapRecord()
    speeds = local_speeds(table, cluster.gpus_per_node)
    if record.classes:
        found = _by_class(record.classes, speeds)
    elif np.isfinite(speeds).any():
        found = _by_speed(speeds)
    else:
        found = _by_level(cluster)
    kept: list[Tier] = []
    for tier in found:
        joined = tuple(group for group in tier.groups if len(group) > 1)
        if joined and (not kept or tier.groups != kept[-1].groups):
            kept.append(tier)
    return tuple(kept)


def local_speeds(table: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Bandwidth between the ``n`` devices of a node, the median over nodes and both directions [B/s]; nan:
    not measured. One row a device."""
    found = np.full((n, n), np.nan)
    inside = table[:, 0] // n == table[:, 1] // n
    ends = np.sort(table[inside, :2] % n, axis=1).astype(np.int64)
    for a, b in np.unique(ends, axis=0).tolist():
        chosen = (ends[:, 0] == a) & (ends[:, 1] == b)
        found[a, b] = found[b, a] = np.median(table[inside, 2][chosen])
    return found


def class_order(name: str) -> tuple[int, int | str]:
    """Key that sorts classes of links from the fastest: more NVLinks first, then by distance over PCIe."""
    if count := nvlinks(name):
        return 0, -count
    return (1, ORDER.index(name)) if name in ORDER else (2, name)


def _by_class(classes: Sequence[Sequence[str]], speeds: NDArray[np.float64]) -> list[Tier]:
    n = len(classes)
    names = {classes[a][b] for a in range(n) for b in range(n) if a != b}
    found = []
    for name in sorted(names, key=class_order):
        least = class_order(name)

        def joined(a: int, b: int, least: tuple[int, int | str] = least) -> bool:
            return class_order(classes[a][b]) <= least

        groups = cliques(n, joined)
        found.append(Tier(name, _slowest(groups, speeds), groups, "topology"))
    return found


def _by_speed(speeds: NDArray[np.float64]) -> list[Tier]:
    known = sorted({float(value) for value in speeds[np.isfinite(speeds)]}, reverse=True)
    lowest = [
        value for value, below in zip(known, [*known[1:], 0.0], strict=True) if below < SAME_TIER * value
    ]
    found = []
    for least in lowest:

        def joined(a: int, b: int, least: float = least) -> bool:
            return bool(speeds[a, b] >= least)

        groups = cliques(len(speeds), joined)
        found.append(Tier("", _slowest(groups, speeds), groups, "measured"))
    return found


def _by_level(cluster: Cluster) -> list[Tier]:
    n = min(cluster.gpus_per_node, cluster.ranks)
    return [
        Tier(
            level.name,
            None,
            tuple(tuple(range(at, min(at + level.ranks, n))) for at in range(0, n, level.ranks)),
            "levels",
        )
        for level in cluster.domains
        if level.ranks <= cluster.gpus_per_node
    ]


def _slowest(groups: Sequence[Sequence[int]], speeds: NDArray[np.float64]) -> float | None:
    known = [
        float(speeds[a, b])
        for group in groups
        for a in group
        for b in group
        if a < b and max(a, b) < len(speeds) and np.isfinite(speeds[a, b])
    ]
    return min(known, default=None)
