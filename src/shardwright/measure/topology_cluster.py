"""A cluster from topologies: levels of links by their classes, NICs, and what had to be assumed."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright.bandwidth_map import UNREACHED, MapRecord
from shardwright.cluster import Cluster, Device, Level, Link, device
from shardwright.errors import ClusterError
from shardwright.measure.link_classes import (
    LARGEST_SEARCH,
    Classes,
    carried,
    distance,
    family_of,
    has_nvlink_ring,
    nearest_nics,
    nvlinks,
    within,
)
from shardwright.measure.topology import Topology, refused_peers
from shardwright.units import format_bandwidth

STEPS = (("nvlink", 0), ("pcie", 2), ("numa", 4), ("node", 5))
"""Names of levels, and the farthest class in one (NVLink, PXB, NODE, SYS) as ``distance`` counts."""

NVLINK_HOP, PCIE_HOP = (3.4e-6, 0.6e-6), (5.7e-6, 1e-6)
"""Of a hop of large messages (Simple) and small ones (LL) [s]. Source: NVIDIA/nccl src/graph/tuning.cc."""

PORT = 50e9
"""What a NIC of unknown speed is taken for [B/s]: 400 Gb/s."""

USABLE = 47 / 50
"""Of a port: 46 to 49 of 50 GB/s (nccl-tests issues 267 and 290)."""

PCI_DEVICES = {
    "0x1db1": "v100-sxm-16gb",
    "0x1db5": "v100-sxm-32gb",
    "0x20b0": "a100-sxm-40gb",
    "0x20b2": "a100-sxm-80gb",
    "0x20b5": "a100-pcie-80gb",
    "0x20f3": "a800-sxm-80gb",
    "0x2321": "h100-nvl-94gb",
    "0x2324": "h800-sxm-80gb",
    "0x2329": "h20-96gb",
    "0x2330": "h100-sxm-80gb",
    "0x2331": "h100-pcie-80gb",
    "0x2335": "h200-sxm-141gb",
    "0x2684": "rtx4090-24gb",
    "0x26b9": "l40s-48gb",
    "0x2901": "b200-sxm-180gb",
    "0x2941": "gb200-186gb",
}
"""Kinds by PCI device number. Source: the PCI ID repository (pci-ids.ucw.cz), vendor 10de."""

CAPABILITIES = {70: "v100-sxm-16gb", 80: "a100-sxm-80gb", 90: "h100-sxm-80gb", 100: "b200-sxm-180gb"}
"""A usual device of a compute capability."""


class Guess(NamedTuple):
    """A kind of device, and why it is taken for that where nothing names it."""

    device: Device
    why: str


def cluster_of_topologies(
    topologies: Sequence[Topology], kind: Device | None, nodes: int | None, base: Cluster | None
) -> Cluster:
    """A cluster of nodes like the first of ``topologies``; ``nodes``: how many, if not one each.

    ``kind`` and ``base`` (a cluster whose other numbers are kept, its links too if they were measured) say
    what a topology does not.

    Raises: ClusterError: the pieces contradict one another.
    """
    first, n = topologies[0], len(topologies[0].devices)
    if base is not None and base.gpus_per_node != n:
        raise ClusterError(
            f"{first.file} has {n} devices in a node, the cluster given has "
            f"gpus_per_node={base.gpus_per_node}: give the topology of one of its nodes"
        )
    record = first.record(", ".join(dict.fromkeys(t.file for t in topologies)))
    assumed = [*first.missing, *_differing(topologies)]
    known = nodes or (base.nodes if base is not None and len(topologies) == 1 else len(topologies))
    if base is not None and (base.curves or base.levels) and base.nodes == known and kind is None:
        old = base.map or MapRecord()
        kept = {name: getattr(record, name) for name in ("classes", "affinity", "numa", "nics")}
        kept["source"] = "; ".join(filter(None, (old.source, record.source)))
        update = {"map": old.model_copy(update=kept), "assumed": (*base.assumed, *assumed)}
        return base.model_copy(update=update)
    if kind is None:
        guess = guessed_device(first) if base is None else Guess(base.device, "")
        kind = guess.device
        if guess.why:
            assumed.append(f"device={kind.name}: {guess.why}; give --kind")
    levels, notes = levels_of(first, kind)
    assumed += notes
    if known > 1:
        node = levels or (Level(name="node", ranks=n, link=kind.intra_link),)
        network = _network(first, kind, assumed)
        levels = (*node, Level(name="network", ranks=known * n, link=network))
    values = {
        "ranks": known * n,
        "gpus_per_node": n,
        "device": kind,
        "levels": levels,
        "price_per_device_hour": 0.0 if base is None else base.price_per_device_hour,
        "assumed": tuple(dict.fromkeys(assumed)),
        "map": record,
    }
    return Cluster.checked(values, first.file)


def _differing(topologies: Sequence[Topology]) -> Iterator[str]:
    """Nodes whose links are not those of the first."""
    first = topologies[0]
    others = [other for other in topologies[1:] if other.device_classes != first.device_classes]
    if others:
        where = others[0].host or f"{others[0].file}:{others[0].line}"
        yield f"all nodes like {first.host or 'the first'}: {len(others)} are not, such as {where}"


def guessed_device(topology: Topology) -> Guess:
    """The kind of a topology's devices: named by PCI number, or by capability and NVLinks as a guess."""
    if topology.pci_device.lower() in PCI_DEVICES:
        return Guess(device(PCI_DEVICES[topology.pci_device.lower()], fitted=True), "")
    if topology.capability in CAPABILITIES:
        why = f"the file says compute capability {topology.capability} only"
        return Guess(device(CAPABILITIES[topology.capability], fitted=True), why)
    classes = topology.device_classes
    most = max((nvlinks(link) for row in classes for link in row), default=0)
    total = max((sum(map(nvlinks, row)) for row in classes), default=0)
    switched = most > 0 and all(nvlinks(link) == most for row in classes for link in row if link != "X")
    if most == 18:
        return Guess(device("h100-sxm", fitted=True), "18 NVLinks fit it, and H200, H20 and B200 as well")
    if most == 12 and not switched:
        return Guess(device("a100-pcie", fitted=True), "pairs of 12 NVLinks fit it, and H100 PCIe as well")
    if total == 6:
        return Guess(device("v100-sxm-16gb", fitted=True), "6 NVLinks fit it and V100 of 32 GB")
    if total == 12 or most == 12:
        return Guess(device("a100-sxm", fitted=True), "12 NVLinks fit it and A100 of 40 GB")
    return Guess(device("a100-pcie", fitted=True), "nothing in the file names it")


def levels_of(topology: Topology, kind: Device) -> tuple[tuple[Level, ...], list[str]]:
    """Levels of links inside a node by classes, innermost first, and what had to be left out.

    No levels: the device's own link holds, for NVLinks join all devices at full count, or nothing is known.
    """
    classes, n = topology.device_classes, len(topology.devices)
    family = family_of(kind)
    if any(link == UNREACHED for row in classes for link in row):
        return (), [f"links between devices of a node are the usual ones of {kind.name}"]
    if family is None:
        return (), [f"what a class of links carries is not known of {kind.name}: its own links are taken"]
    if n == 1:
        return (), []
    if refused_peers(topology):
        return (), ["devices have no peer-to-peer access, and pass by the host: the usual links are taken"]
    if has_nvlink_ring(classes):
        full = min(_links_inside(classes, range(n), family.nvlinks)) >= family.nvlinks > 0
        if full:
            return (), []
    blocks = [(name, _block(classes, most), most) for name, most in STEPS]
    notes = _left_out(topology, blocks)
    levels: list[Level] = []
    for name, size, most in blocks:
        if size <= (levels[-1].ranks if levels else 1):
            continue
        link = _link(classes, size, most, kind, topology.pcie)
        if link is None:
            return (), [f"{kind.name} has no NVLinks, the topology has: its own links are taken, give --kind"]
        inner = levels[-1].name if levels else ""
        shared = inner in ("pcie", "numa")  # all of a switch, or of a socket, share its way out
        levels.append(Level(name="node" if size == n else name, ranks=size, link=link, shared=shared))
    said = ", ".join(
        f"{level.name} of {level.ranks} at {format_bandwidth(level.link.bandwidth)}" for level in levels
    )
    return tuple(levels), [*notes, f"what classes of links usually carry on {kind.name}: {said}"]


def _block(classes: Classes, most: int) -> int:
    """The largest size of consecutive blocks in which all pairs are at most ``most`` apart."""
    n = len(classes)
    for size in range(n, 1, -1):
        if n % size == 0 and all(
            distance(classes[a][b]) <= most
            for start in range(0, n, size)
            for a in range(start, start + size)
            for b in range(a + 1, start + size)
        ):
            return size
    return 1


def _left_out(topology: Topology, blocks: Sequence[tuple[str, int, int]]) -> list[str]:
    """Groups larger than a level's blocks: of unequal size, or of devices that are no neighbours."""
    if len(topology.devices) > LARGEST_SEARCH:
        return []
    notes, said = [], set[tuple[int, ...]]()
    for name, size, most in blocks:
        groups = [group for group in within(topology.device_classes, most) if len(group) > size]
        if not said.issuperset(groups):
            words = " ".join(f"({','.join(map(str, group))})" for group in groups)
            notes.append(
                f"{name} joins {words}: these are no equal blocks of neighbours, hence no level of links"
            )
        said.update(groups)
    return notes


def _link(classes: Classes, size: int, most: int, kind: Device, pcie: float) -> Link | None:
    """The link of a level: all NVLinks that a device has inside its block, or else the farthest class."""
    start = kind.intra_link.start
    if most == 0:
        blocks = [range(at, at + size) for at in range(0, len(classes), size)]
        rate = level_bandwidth(classes, blocks, kind)
        latency, small = NVLINK_HOP
        lines = kind.intra_link.ll128_latency
        link = {"latency": latency, "small_latency": small, "ll128_latency": lines, "start": start}
        return Link(bandwidth=rate, **link) if rate else None
    seen = [
        classes[a][b]
        for a in range(len(classes))
        for b in range(len(classes))
        if a != b and a // size == b // size
    ]
    found = carried(max(seen, key=distance), kind, pcie)
    if found is None:
        return None
    latency, small = PCIE_HOP
    return Link(bandwidth=found.effective, latency=latency, small_latency=small, start=start)


def level_bandwidth(classes: Classes, groups: Sequence[Sequence[int]], kind: Device) -> float:
    """What each device of groups joined by NVLink has for a ring, the least of all [B/s]; 0: no NVLinks."""
    family = family_of(kind)
    if family is None or not groups:
        return 0.0
    least = min(count for group in groups for count in _links_inside(classes, group, family.nvlinks))
    return least * family.nvlink.effective


def _links_inside(classes: Classes, block: Sequence[int], most: int) -> list[int]:
    """NVLinks of each device to the others of its block; a switch's are counted once."""
    return [min(sum(nvlinks(classes[a][b]) for b in block), most) for a in block]


def _network(topology: Topology, kind: Device, assumed: list[str]) -> Link:
    """The network as a device sees it: its share of the ports that are local to some device, or of all."""
    n = len(topology.devices)
    nearest = nearest_nics(topology)
    used = {nic for near in nearest if near.local for nic in near.nics} or set(range(len(topology.nics)))
    if not used:
        assumed.append(f"one NIC of {format_bandwidth(kind.inter_link.bandwidth)} a device: none is named")
        return kind.inter_link
    speeds = topology.nic_speeds or (0.0,) * len(topology.nics)
    if any(speeds[nic] == 0 for nic in used):
        assumed.append(f"{len(used)} NICs of 400 Gb/s for {n} devices: their speed is not named")
    rate = sum((speeds[nic] or PORT) * USABLE for nic in used) / n
    return kind.inter_link.model_copy(update={"bandwidth": rate})
