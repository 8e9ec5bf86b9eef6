"""A bandwidth map as `map --json` prints it."""

from collections.abc import Mapping, Sequence
from math import log
from statistics import median
from typing import Any

import numpy as np

from shardwright.bandwidth_map import UNREACHED, Curve, MapRecord
from shardwright.cluster import Cluster, Level
from shardwright.measure.expected import against_expected, bus_bandwidths
from shardwright.measure.pair_speeds import PairSpeeds, pair_speeds

MOST_RANKS = 256
"""Ranks for which pairs are listed by the level that joins them where no topology was read."""


def map_document(
    cluster: Cluster, findings: Sequence[Mapping[str, Any]], refused: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """``cluster`` with its map, findings about it, and what was refused of the files read."""
    record = cluster.map or MapRecord()
    speeds = pair_speeds(cluster)
    return {
        "ranks": cluster.ranks,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "device": cluster.device.name,
        "device_kind": cluster.device.kind,
        "source": record.source,
        "date": record.date,
        "pairs": [list(row) for row in record.classes] or _pairs_by_level(cluster),
        "links": [_link(level, cluster) for level in cluster.domains],
        "nics": [nic.model_dump(mode="json") for nic in record.nics],
        "affinity": list(record.affinity),
        "numa": list(record.numa),
        "hosts": list(record.hosts),
        "measured_pairs": _pairs(speeds),
        "pair_kinds": _kinds(speeds),
        "curves": [_curve(curve, cluster) for curve in cluster.curves],
        "islands": [
            tier._asdict() | {"groups": [list(group) for group in tier.groups]} for tier in speeds.tiers
        ],
        "expected": [each._asdict() | {"ratio": each.ratio} for each in against_expected(cluster, speeds)],
        "device_points": [point.model_dump(mode="json") for point in record.device_points],
        "device_residual": _residual(record),
        "unmeasured": [each.model_dump(mode="json") for each in record.unmeasured],
        "refused": [dict(each) for each in refused],
        "findings": [dict(finding) for finding in findings],
        "fault": any(finding["certainty"] != "cannot_tell" and finding["actions"] for finding in findings)
        or any(each.failed for each in record.unmeasured),
        "assumed": list(cluster.assumed),
    }


def _residual(record: MapRecord) -> dict[str, float] | None:
    """Median and largest of |ln(predicted / measured)| over a device's operations that share a
    constant."""
    errors = [
        abs(log(p.predicted / p.time)) for p in record.device_points if p.tests_the_fit and p.predicted > 0
    ]
    return {"median": median(errors), "largest": max(errors)} if errors else None


def level_of(members: Sequence[int], cluster: Cluster) -> str:
    """Name of the outermost level of links that groups of ``members`` pass."""
    levels = [level.name for level in cluster.domains]
    passed = [n > inner for n, inner in zip(members, (1, *members), strict=False)]
    return next(
        (name for name, has in zip(reversed(levels), reversed(passed), strict=True) if has), levels[0]
    )


def _pairs(speeds: PairSpeeds) -> list[dict[str, Any]]:
    """Every measured direction; ``share``: of what is usual for its kind."""
    columns = (speeds.source, speeds.target, speeds.bandwidth, speeds.latency, speeds.kind, speeds.share)
    return [
        {
            "source": a,
            "target": b,
            "bandwidth": rate,
            "latency": time,
            "kind": speeds.kinds[k],
            "share": share,
        }
        for a, b, rate, time, k, share in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _kinds(speeds: PairSpeeds) -> list[dict[str, Any]]:
    found = []
    for number, (kind, usual) in enumerate(zip(speeds.kinds, speeds.usual, strict=True)):
        chosen = speeds.kind == number
        rates = speeds.bandwidth[chosen]
        found.append(
            {
                "kind": kind,
                "measured": int(chosen.sum()),
                "usual": float(usual),
                "median": float(np.median(rates)),
                "slowest": float(rates.min()),
                "latency": float(np.median(speeds.latency[chosen])),
            }
        )
    return sorted(found, key=lambda row: -row["usual"])


def _curve(curve: Curve, cluster: Cluster) -> dict[str, Any]:
    return curve.model_dump(mode="json") | {
        "kind": level_of(curve.members, cluster),
        "ranks": curve.ranks,
        "bus_bandwidths": bus_bandwidths(curve),
    }


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
        "ll128_latency": link.ll128_latency,
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
