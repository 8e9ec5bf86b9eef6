"""Topologies: what tp NVLink carries, devices without a NIC of their own, and printouts that mislead."""

from collections import Counter
from collections.abc import Iterator, Sequence

from shardwright.cluster import Device, device
from shardwright.doctor.evidence import Evidence
from shardwright.doctor.finding import Finding, Source
from shardwright.doctor.placement_checks import degrees_of, groups_of
from shardwright.doctor.setting import Setting
from shardwright.errors import ClusterError
from shardwright.measure.link_classes import (
    Carried,
    carried,
    distance,
    has_nvlink_ring,
    islands,
    joined_by_nvlink,
    nearest_nics,
    nvlink_groups,
    nvlinks,
)
from shardwright.measure.topology import AMONG_NICS, Topology, refused_peers
from shardwright.measure.topology_cluster import guessed_device, level_bandwidth
from shardwright.units import format_bandwidth


def topology_findings(evidence: Evidence) -> list[Finding]:
    """What topologies say, of each node, with the degree of tp that is planned or given."""
    found: dict[tuple[str, str], Finding] = {}
    setting = evidence.setting
    for topology in evidence.topologies:
        kind, said = _kind(topology, setting)
        for finding in (
            *_hidden(topology),
            *_nvlink(topology, kind, said, setting),
            *_nics(topology, kind, said),
            *_peers(topology),
            *_numa(topology),
            *_incomplete(topology),
        ):
            found.setdefault((finding.cause, finding.summary), finding)
    return list(found.values())


def _kind(topology: Topology, setting: Setting | None) -> tuple[Device, str]:
    """The devices' kind, and words for one that nobody has named."""
    if setting is not None and setting.device:
        try:
            return device(setting.device, fitted=True), ""
        except ClusterError:
            pass  # a name from a configuration that is none of ours
    guess = guessed_device(topology)
    return guess.device, f" (taken for {guess.device.name})" if guess.why else ""


def _quoted(topology: Topology, devices: Sequence[int]) -> tuple[Source, ...]:
    return tuple(Source(topology.file, *topology.rows[at]) for at in devices)


def _names(topology: Topology, devices: Sequence[int]) -> str:
    return ", ".join(topology.devices[at] for at in devices)


def _groups_text(groups: Sequence[Sequence[int]]) -> str:
    return "".join(f"({','.join(map(str, group))})" for group in groups)


def _known(topology: Topology) -> bool:
    """Whether every link between devices is known."""
    return all(distance(link) <= distance("SYS") for row in topology.device_classes for link in row)


def _nvlink(topology: Topology, kind: Device, said: str, setting: Setting | None) -> Iterator[Finding]:
    classes, n = topology.device_classes, len(topology.devices)
    if n < 2 or not _known(topology):
        return
    fault = None if setting is None else _tp_beyond(topology, setting)
    if fault is not None:
        yield fault
    groups = nvlink_groups(classes)
    joined = [group for group in islands(classes) if len(group) > 1]
    everyone = _quoted(topology, range(n))
    between = [classes[a][b] for a in range(n) for b in range(a) if not nvlinks(classes[a][b])]
    over = carried(min(between, key=distance), kind, topology.pcie) if between else None
    beyond = f"; beyond that over {min(between, key=distance)}" if between else ""
    beyond += f" at about {format_bandwidth(over.effective)}{said}" if over is not None else ""
    if not joined:
        farthest = max(between, key=distance)
        last = carried(farthest, kind, topology.pcie)
        to = (
            ""
            if last is None or farthest == min(between, key=distance)
            else f", the farthest over {farthest}"
        )
        yield Finding(
            "no_nvlink",
            "certain",
            f"no NVLink joins any of {n} devices: they talk{beyond.removeprefix('; beyond that')}"
            + (f"{to} at {format_bandwidth(last.effective)}" if to and last is not None else ""),
            evidence=everyone,
            numbers={"tp": 1, "beyond": None if over is None else over.effective},
        )
        return
    tp = len(groups[0])
    slowest = min((classes[a][b] for group in joined for a in group for b in group if a != b), key=nvlinks)
    pair = carried(slowest, kind) or Carried(0.0, 0.0)
    ring = level_bandwidth(classes, joined, kind)
    rate = f", {format_bandwidth(ring)} each in a ring{said}" if ring else ""
    yield Finding(
        "nvlink_carries_tp",
        "certain",
        f"NVLink joins {_groups_text(joined)}: tp of at most {tp if tp > 1 else len(joined[0])}{rate}{beyond}"
        + ("" if tp > 1 else "; not all devices are in such a group"),
        evidence=everyone,
        numbers={
            "tp": tp,
            "groups": [list(group) for group in joined],
            "pair_nominal": pair.nominal,
            "pair_effective": pair.effective,
            "ring": ring,
            "beyond": None if over is None else over.effective,
        },
    )


def _tp_beyond(topology: Topology, setting: Setting) -> Finding | None:
    """Groups of tp, by the order of the mesh, whose devices NVLink does not join."""
    classes, n, tp = topology.device_classes, len(topology.devices), setting.tp or 1
    if tp == 1 or tp > n:
        return None
    degrees = degrees_of(setting)
    groups = groups_of(degrees, "tp") if degrees is not None else []
    inside = [group for group in groups if max(group) < n] or [
        list(range(at, at + tp)) for at in range(0, n - tp + 1, tp)
    ]
    bad = [group for group in inside if not joined_by_nvlink(classes, group)]
    rows = [[[classes[a][b] for b in group] for a in group] for group in bad]
    bad = [group for group, links in zip(bad, rows, strict=True) if not has_nvlink_ring(links)]
    if not bad:
        return None
    carried_groups = nvlink_groups(classes)
    most = len(carried_groups[0])
    instead = (
        f"use tp of at most {most}, in groups {_groups_text(carried_groups)}"
        if most > 1
        else "use no tp here, or only within " + (_groups_text([g for g in islands(classes) if len(g) > 1]))
    )
    worst = max((classes[a][b] for a in bad[0] for b in bad[0] if a != b), key=distance)
    return Finding(
        "tp_beyond_nvlink",
        "certain",
        f"tp={tp}: {len(bad)} of {len(inside)} groups leave NVLink, for example devices {bad[0]} with links "
        f"{worst}; NVLink carries tp of at most {most}",
        evidence=(setting.source, *_quoted(topology, bad[0])),
        actions=(instead.removesuffix(", or only within "),),
        numbers={"tp": tp, "nvlink_tp": most, "groups": [list(group) for group in carried_groups]},
    )


def _nics(topology: Topology, kind: Device, said: str) -> Iterator[Finding]:
    """Devices that no NIC is near to."""
    nearest = nearest_nics(topology)
    if not nearest or any(True for _ in _hidden(topology)):
        return
    classes = topology.device_classes
    owners = [at for at, near in enumerate(nearest) if near.local]
    unknown = [at for at, near in enumerate(nearest) if near.link == "-"]
    without = [at for at, near in enumerate(nearest) if not near.local and at not in unknown]
    handed = [at for at in without if any(nvlinks(classes[at][owner]) for owner in owners)]
    alone = [at for at in without if at not in handed]
    far = {topology.devices[at]: nearest[at].link for at in without}
    open_words = f"; of {_names(topology, unknown)} nothing is said" if unknown else ""
    own = carried("PIX", kind, topology.pcie)
    limit = None if own is None else own.effective
    numbers = {"gpus": without, "owners": owners, "unknown": unknown, "nearest": far, "limit": limit}
    if handed:
        bound = f"; one device passes at most {format_bandwidth(limit)}{said}" if limit else ""
        yield Finding(
            "nics_not_local",
            "certain",
            f"{_names(topology, handed)} have no NIC on their PCIe switch (nearest: "
            f"{', '.join(sorted(set(far.values())))}), {_names(topology, owners)} have{open_words}{bound}",
            evidence=_quoted(topology, handed),
            numbers=numbers,
        )
    if alone:
        also = f", {_names(topology, owners)} have" if owners else ""
        each = ", ".join(f"{topology.devices[at]} {nearest[at].link}" for at in alone)
        yield Finding(
            "no_gdr_path",
            "likely",
            f"{_names(topology, alone)} have no NIC within PXB ({each}){also}{open_words}",
            evidence=_quoted(topology, alone),
            numbers=numbers,
        )


def _hidden(topology: Topology) -> Iterator[Finding]:
    """Signs of a virtual machine: one class from everything to every NIC, or SYS inside one NUMA node."""
    links = {link for row in topology.nic_classes for link in row}
    classes = topology.device_classes
    between = {classes[a][b] for a in range(len(classes)) for b in range(a)}
    nodes = set(topology.numa)
    words = ""
    if len(topology.devices) > 2 and links == {"PHB"} and len(nodes) == 1:
        words = "every device is PHB to every NIC and all are in one NUMA node"
    elif between == {"SYS"} and len(nodes) == 1 and nodes.issubset({str(n) for n in range(64)}):
        words = f"every pair is SYS, between NUMA nodes, and all are in NUMA node {next(iter(nodes))}"
    if words:
        yield Finding(
            "topology_hidden",
            "cannot_tell",
            f"{words}: this is how a virtual machine looks, and says nothing of the links below it",
            evidence=_quoted(topology, range(len(topology.devices))),
        )


def _peers(topology: Topology) -> Iterator[Finding]:
    refused, n = refused_peers(topology), len(topology.devices)
    if refused:
        said = sorted(set(refused.values()))
        yield Finding(
            "p2p_not_supported",
            "certain",
            f"{len(refused)} of {n * (n - 1) // 2} pairs of devices have no peer-to-peer access "
            f"({', '.join(said)})",
            evidence=tuple(Source(topology.file, peers.line, peers.text) for peers in topology.peers),
            numbers={"pairs": [list(pair) for pair in refused], "status": said},
        )


def _numa(topology: Topology) -> Iterator[Finding]:
    """NUMA nodes with unequal numbers of devices; affinity that is not the devices' own."""
    n, numa = len(topology.devices), topology.numa
    everyone = _quoted(topology, range(n))
    several = [text for text in numa if "-" in text or "," in text]
    one_core = n > 1 and len(set(topology.affinity)) == 1 and topology.affinity[0].isdigit()
    if several or one_core:
        yield Finding(
            "affinity_of_cgroup",
            "likely",
            f"CPU affinity {topology.affinity[0]!r} and NUMA affinity {numa[0]!r} for all devices: NUMA "
            "nodes are not taken from this",
            evidence=everyone,
        )
        return
    counts = Counter(numa)
    if not all(text.isdigit() for text in numa) or len(counts) < 2 or len(set(counts.values())) == 1:
        return
    if joined_by_nvlink(topology.device_classes, range(n)):
        return
    per_node = [counts[node] for node in sorted(counts, key=int)]
    yield Finding(
        "unequal_numa",
        "certain",
        f"{len(counts)} NUMA nodes hold {' / '.join(map(str, per_node))} of {n} devices",
        evidence=everyone,
        numbers={"per_node": per_node},
    )


def _incomplete(topology: Topology) -> Iterator[Finding]:
    missing = [words for words in topology.missing if not words.endswith(AMONG_NICS)]
    open_rows = [at for at in range(len(topology.devices)) if "-" in topology.classes[at]]
    if missing:
        yield Finding(
            "topology_incomplete",
            "cannot_tell",
            "; ".join(missing),
            evidence=_quoted(topology, open_rows or [0]),
        )
