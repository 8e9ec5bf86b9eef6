"""Findings about a cluster's map: slow links and where they are, hangs, and measured against expected."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwright.bandwidth_map import Curve, MapRecord, Unmeasured
from shardwright.cluster import Cluster
from shardwright.doctor.evidence import Evidence
from shardwright.doctor.finding import Finding, Source, in_order
from shardwright.doctor.placement_checks import tp_groups_over
from shardwright.doctor.rank_lists import ranks_text
from shardwright.doctor.slow_pairs import pair_findings
from shardwright.measure.expected import Comparison, against_expected
from shardwright.measure.pair_speeds import pair_speeds
from shardwright.units import MiB, format_bandwidth, format_bytes

NOISY_CURVE = 0.5
"""(90 % - 10 %) / median of the times of large messages from which a curve is worth no conclusion."""

MOST_GROUPS = 64
"""Groups of ranks that a finding lists."""

WRONG = ("payload", "wrong", "differs", "corrupt")
"""Words that say of something unmeasured: it came, and was not what was sent."""


def cluster_findings(cluster: Cluster) -> list[Finding]:
    """What the map of ``cluster`` says is wrong, the surest first; or, where the device's links are known,
    that they are as they should be."""
    record = cluster.map or MapRecord()
    speeds = pair_speeds(cluster)
    found = [*_failures(record.unmeasured), *_scattered(cluster, record), *pair_findings(cluster, speeds)]
    found += _noisy_curves(cluster)
    compared = against_expected(cluster, speeds)
    found += below_expected(compared)
    if compared and not found:
        found.append(_healthy(compared))
    return in_order(found)


def map_findings(evidence: Evidence) -> list[Finding]:
    """The same of every cluster.toml with a map among the files, and the tp groups of the configurations
    beside it that leave the islands which that map knows."""
    found: list[Finding] = []
    for name, cluster in evidence.clusters:
        source = Source(name, None, _described(cluster))
        found += [
            replace(finding, evidence=(source, *finding.evidence)) for finding in cluster_findings(cluster)
        ]
        tiers = pair_speeds(cluster).tiers
        sizes = {len(group) for group in tiers[0].groups} if len(tiers) > 1 else set()
        known = tiers and (tiers[0].known_by == "topology" or (len(sizes) == 1 and min(sizes) > 1))
        for setting in evidence.stated if len(sizes) and known else ():
            found += tp_groups_over(setting, cluster.gpus_per_node, tiers, source)
    return found


def _described(cluster: Cluster) -> str:
    record = cluster.map or MapRecord()
    parts = (f"{cluster.ranks} x {cluster.device.name}", record.source, record.date)
    return ", ".join(part for part in parts if part)


def _failures(unmeasured: Sequence[Unmeasured]) -> Iterator[Finding]:
    """Groups that hang, ranks that are gone, messages that came wrong."""
    failed = [each for each in unmeasured if each.failed]
    wrong = [each for each in failed if any(word in f"{each.what} {each.reason}".lower() for word in WRONG)]
    gone = [each for each in failed if each not in wrong and len(each.ranks) == 1]
    hung = [each for each in failed if each not in wrong and each not in gone]
    for cause, part in (("wrong_payload", wrong), ("rank_gone", gone), ("link_hangs", hung)):
        if part:
            yield _failure(cause, part)


def _failure(cause: str, failed: Sequence[Unmeasured]) -> Finding:
    """One finding for all failures of a kind; ranks that all of them have in common are the suspects."""
    counts = Counter(rank for each in failed for rank in set(each.ranks))
    common = {rank for rank, count in counts.items() if count == len(failed)}
    blamed = common if len(failed) > 1 and common else set(counts)
    more = f"; {len(failed) - 1} more like it" if len(failed) > 1 else ""
    shared = f"; {ranks_text(blamed)} {'is' if len(blamed) == 1 else 'are'} in all of them"
    return Finding(
        cause,
        "certain",
        f"{failed[0].what}: {failed[0].reason}{more}{shared if blamed < set(counts) else ''}",
        tuple(sorted(blamed)),
        numbers={"failed": len(failed), "groups": [list(each.ranks) for each in failed[:MOST_GROUPS]]},
    )


def _scattered(cluster: Cluster, record: MapRecord) -> Iterator[Finding]:
    """Ranks of a host that are not consecutive."""
    hosts, n = record.hosts, cluster.gpus_per_node
    blocks = [hosts[at : at + n] for at in range(0, len(hosts), n)]
    mixed = [number for number, block in enumerate(blocks) if len(set(block)) > 1]
    if not mixed:
        return
    at, last = mixed[0] * n, mixed[0] * n + len(blocks[mixed[0]]) - 1
    names = ", ".join(dict.fromkeys(blocks[mixed[0]]))
    yield Finding(
        "ranks_scattered",
        "certain",
        f"ranks {at} to {last} should be one node of {n} and run on {names}: ranks of a node "
        "are not consecutive",
        tuple(range(at, last + 1)),
        numbers={"nodes": mixed},
    )


def _noisy_curves(cluster: Cluster) -> Iterator[Finding]:
    """Curves whose large messages take now this long, now that."""
    found: list[tuple[float, Curve]] = []
    for curve in cluster.curves:
        pairs = zip(curve.spread, curve.sizes, strict=False)
        large = [spread for spread, size in pairs if size >= MiB]
        typical = float(np.median(large)) if large else 0.0
        if typical > NOISY_CURVE:
            found.append((typical, curve))
    if not found:
        return
    spread, worst = max(found, key=lambda each: each[0])
    yield Finding(
        "links_noisy",
        "cannot_tell",
        f"{len(found)} of {len(cluster.curves)} curves: the fastest and slowest tenth of calls with large "
        f"messages differ by more than {NOISY_CURVE:.0%} of the median; most in {worst.collective} of "
        f"{worst.ranks} ranks ({spread:.0%})",
        numbers={"spread": spread, "curves": [[each.collective, each.ranks] for _, each in found]},
    )


def below_expected(compared: Sequence[Comparison]) -> Iterator[Finding]:
    """Levels of links on which something is below what the hardware gives, the worst of each."""
    for level in dict.fromkeys(each.level for each in compared):
        mine = [each for each in compared if each.level == level]
        worst = min(mine, key=lambda each: each.ratio)
        if worst.verdict == "healthy":
            continue
        healthy = [each.what for each in mine if each.verdict == "healthy"]
        size = f" of {format_bytes(worst.size)}" if worst.size else ""
        measured, expected = format_bandwidth(worst.measured), format_bandwidth(worst.expected)
        yield Finding(
            "node_links_below_expected" if level == "node" else "network_below_expected",
            "likely",
            f"{worst.what}{size}: {measured} bus bandwidth, {expected} expected of these devices: "
            f"{worst.verdict} ({worst.ratio:.0%})"
            + (f"; as expected: {', '.join(healthy[:4])}" if healthy else ""),
            numbers={
                "level": level,
                "measured": worst.measured,
                "expected": worst.expected,
                "ratio": worst.ratio,
                "verdict": worst.verdict,
            },
        )


def comparison_findings(compared: Sequence[Comparison]) -> list[Finding]:
    """What is below what the hardware gives, or that nothing is."""
    return list(below_expected(compared)) or [_healthy(compared)]


def _healthy(compared: Sequence[Comparison]) -> Finding:
    worst = min(compared, key=lambda each: each.ratio)
    return Finding(
        "links_healthy",
        "certain",
        f"{len(compared)} comparisons with what the devices' links give, the lowest {worst.what} at "
        f"{worst.ratio:.0%}: {format_bandwidth(worst.measured)} of {format_bandwidth(worst.expected)}",
        numbers={"ratio": worst.ratio, "compared": len(compared)},
    )
