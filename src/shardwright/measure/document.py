"""A bandwidth map as `map --json` prints it."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.bandwidth_map import UNREACHED, Curve, MapRecord
from shardwright.cluster import Cluster, Level

MOST_RANKS = 256
"""Ranks for which pairs are listed by the level that joins them where no topology was read."""


def map_document(
    cluster: Cluster, findings: Sequence[Mapping[str, Any]], refused: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """``cluster`` with its map, findings about it, and what was refused of the files read."""
    record = cluster.map or MapRecord()
    return {
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "device": cluster.device.name,
        "source": record.source,
        "date": record.date,
        "pairs": [list(row) for row in record.classes] or _pairs_by_level(cluster),
        "links": [_link(level, cluster) for level in cluster.domains],
        "nics": [nic.model_dump(mode="json") for nic in record.nics],
        "affinity": list(record.affinity),
        "numa": list(record.numa),
        "hosts": list(record.hosts),
        "measured_pairs": [pair._asdict() for pair in record.pairs],
        "curves": [
            curve.model_dump(mode="json")
            | {"kind": level_of(curve.members, cluster), "bus_bandwidths": bus_bandwidths(curve)}
            for curve in cluster.curves
        ],
        "unmeasured": [each.model_dump(mode="json") for each in record.unmeasured],
        "refused": [dict(each) for each in refused],
        "findings": [dict(finding) for finding in findings],
        "fault": any(finding["certainty"] != "cannot_tell" and finding["actions"] for finding in findings)
        or any(each.failed for each in record.unmeasured),
        "assumed": list(cluster.assumed),
    }


PASSED_ON = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How often (n-1)/n of the payload goes through a rank's link."""


def bus_bandwidths(curve: Curve) -> list[float]:
    """What the link of a rank carries at each size, whatever the collective and the number of ranks [B/s].

    Source: NVIDIA/nccl-tests doc/PERFORMANCE.md.
    """
    times = PASSED_ON.get(curve.collective)
    share = 1.0 if times is None else times * (curve.ranks - 1) / curve.ranks
    return [share * size / time for size, time in zip(curve.sizes, curve.times, strict=True)]


def level_of(members: Sequence[int], cluster: Cluster) -> str:
    """Name of the outermost level of links that groups of ``members`` pass."""
    levels = [level.name for level in cluster.domains]
    passed = [n > inner for n, inner in zip(members, (1, *members), strict=False)]
    return next(
        (name for name, has in zip(reversed(levels), reversed(passed), strict=True) if has), levels[0]
    )


def _link(level: Level, cluster: Cluster) -> dict[str, Any]:
    measured = {
        curve.collective for curve in cluster.curves if level_of(curve.members, cluster) == level.name
    }
    link = level.link
    return {
        "kind": level.name,
        "ranks": level.ranks,
        "bandwidth": link.bandwidth,
        "latency": link.latency,
        "small_latency": link.small_latency,
        "start": link.start,
        "ramp": link.ramp,
        "shared": level.shared,
        "measured": sorted(measured),
    }


def _pairs_by_level(cluster: Cluster) -> list[list[str]]:
    """Name of the innermost level that joins each pair of ranks, X on the diagonal."""
    n = cluster.ranks
    if n > MOST_RANKS:
        return []
    return [["X" if a == b else _joining(a, b, cluster) for b in range(n)] for a in range(n)]


def _joining(a: int, b: int, cluster: Cluster) -> str:
    return next((v.name for v in cluster.domains if a // v.ranks == b // v.ranks), UNREACHED)
