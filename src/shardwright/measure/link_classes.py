"""What a class of links carries, which devices NVLink joins, and how far each device is from the NICs."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from shardwright.bandwidth_map import UNREACHED
from shardwright.cluster import Device
from shardwright.measure.cliques import cliques
from shardwright.measure.topology import Topology

Classes = Sequence[Sequence[str]]

ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Classes over PCIe, the nearest first."""

GDR = ("PIX", "PXB")
"""Classes over which a NIC and a device pass data without the CPU unless NCCL is told otherwise. Source:
NCCL user guide, NCCL_NET_GDR_LEVEL; NVIDIA/nccl src/graph/paths.cc, ncclTopoCheckGdr."""

LARGEST_SEARCH = 16
"""Devices of a node among which groups are looked for that are no neighbours by number."""


class Carried(NamedTuple):
    """One direction between two devices [B/s]: as signalled, and what collectives and copies get of it."""

    nominal: float
    effective: float


class Family(NamedTuple):
    """NVLinks of a generation of devices, one direction of each [B/s], how many, and its PCIe generation."""

    nvlink: Carried
    nvlinks: int
    pcie: int


_NONE = Carried(0.0, 0.0)
_VOLTA, _AMPERE = Carried(25e9, 20e9), Carried(25e9, 20e9)
_HOPPER, _BLACKWELL = Carried(25e9, 20.6e9), Carried(50e9, 40.1e9)

FAMILIES = {
    "v100": Family(_VOLTA, 6, 3),
    "a100": Family(_AMPERE, 12, 4),
    "a800": Family(_AMPERE, 8, 4),
    "h100": Family(_HOPPER, 18, 5),
    "h800": Family(_HOPPER, 8, 5),
    "h200": Family(_HOPPER, 18, 5),
    "h20": Family(_HOPPER, 18, 5),
    "b200": Family(_BLACKWELL, 18, 5),
    "b300": Family(_BLACKWELL, 18, 5),
    "gb200": Family(_BLACKWELL, 18, 5),
    "gb300": Family(_BLACKWELL, 18, 5),
    "l40s": Family(_NONE, 0, 4),
    "rtx4090": Family(_NONE, 0, 4),
}
"""By the first part of a device's name. Nominal: data sheets (V100 6 x 50 GB/s, A100 12 x 50, H100 18 x 50,
B200 18 x 100, both directions together). Effective: NCCL's own constants, NVIDIA/nccl src/graph/topo.h
(SM70 and SM80 20.0 GB/s, SM90 20.6, SM100 40.1); seen: 72 of 100 GB/s between A100s with four NVLinks
(nccl-tests issue 331), 232 of 300 in all-reduces of eight with twelve (nccl-tests issue 149)."""

PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
"""Sixteen lanes of a generation, one direction, less coding [B/s]."""

SWITCH_SHARE = 0.8
"""Of PCIe below one switch or several: 12 of 15.75 GB/s in NVIDIA/nccl src/graph/topo.h, 50 of 63 measured of
an H100 with its NIC (nccl-tests issue 232)."""

HOST_SHARE = 20 / 31.5
"""Of PCIe through the CPU: rings of three A100 in pairs of class NODE reach 20 GB/s (nccl-tests issue
178)."""

SOCKETS = {3: 10e9, 4: 16e9, 5: 22e9}
"""Between the sockets of hosts of a PCIe generation [B/s]: Skylake, AMD, Sapphire Rapids. Source: NVIDIA/nccl
src/graph/topo.h."""


def family_of(device: Device) -> Family | None:
    """Generation of a device; None: its links are not known here."""
    return FAMILIES.get(re.split(r"[-_]", device.name)[0])


def nvlinks(link: str) -> int:
    """How many NVLinks a class stands for: NV4 is 4, PIX none."""
    found = re.fullmatch(r"NV(\d+)", link)
    return int(found[1]) if found else 0


def distance(link: str) -> int:
    """Order of classes: NVLink 0, then over PCIe from the nearest; what is not known comes last."""
    if nvlinks(link) or link == "X":
        return 0
    return 1 + ORDER.index(link) if link in ORDER else 1 + len(ORDER)


def carried(link: str, device: Device, pcie: float = 0.0) -> Carried | None:
    """What a link of a class carries between two devices of a kind; None: class or kind is not known.

    ``pcie``: of the devices' own PCIe link as signalled, where that is known [B/s].
    """
    family = family_of(device)
    if family is None or link == UNREACHED:
        return None
    if count := nvlinks(link):
        one = family.nvlink
        return Carried(count * one.nominal, count * one.effective) if one.nominal else None
    nominal = pcie or PCIE[family.pcie]
    if link in GDR:
        return Carried(nominal, SWITCH_SHARE * nominal)
    host = HOST_SHARE * nominal
    return Carried(nominal, min(host, SOCKETS[family.pcie]) if link == "SYS" else host)


def islands(classes: Classes) -> tuple[tuple[int, ...], ...]:
    """Devices shared out into groups in which NVLink joins every pair, large groups before small ones."""
    return within(classes, 0)


def within(classes: Classes, most: int) -> tuple[tuple[int, ...], ...]:
    """The same for pairs that are at most ``most`` apart, as ``distance`` counts."""
    return cliques(len(classes), lambda a, b: distance(classes[a][b]) <= most)


def nvlink_groups(classes: Classes) -> tuple[tuple[int, ...], ...]:
    """All devices in groups of one size, the largest power of two for which NVLink joins every pair of every
    group: what tp can live on. Neighbours by number where that is possible; singles: NVLink carries none."""
    n = len(classes)
    size = 1 << (n.bit_length() - 1) if n else 1
    while size > 1:
        if n % size == 0:
            found = _blocks(classes, size) or _shared_out(classes, size)
            if found:
                return found
        size //= 2
    return tuple((device,) for device in range(n))


def _blocks(classes: Classes, size: int) -> tuple[tuple[int, ...], ...]:
    blocks = [tuple(range(at, at + size)) for at in range(0, len(classes), size)]
    return tuple(blocks) if all(joined_by_nvlink(classes, block) for block in blocks) else ()


def joined_by_nvlink(classes: Classes, group: Sequence[int]) -> bool:
    """Whether NVLink joins every pair of a group."""
    return all(nvlinks(classes[a][b]) for a in group for b in group if a != b)


def _shared_out(classes: Classes, size: int) -> tuple[tuple[int, ...], ...]:
    """Groups of any numbers, by search; none for nodes of many devices."""
    if len(classes) > LARGEST_SEARCH:
        return ()

    @cache
    def rest(left: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
        if not left:
            return ()
        for group in _groups_with(classes, left, size):
            tail = rest(tuple(device for device in left if device not in group))
            if tail is not None:
                return (group, *tail)
        return None

    return rest(tuple(range(len(classes)))) or ()


def _groups_with(classes: Classes, left: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Groups of ``size`` joined by NVLink that hold the first of ``left``."""

    def grow(group: tuple[int, ...], rest: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if len(group) == size:
            yield group
            return
        for at, device in enumerate(rest):
            if all(nvlinks(classes[device][other]) for other in group):
                yield from grow((*group, device), rest[at + 1 :])

    return grow((left[0],), left[1:])


def has_nvlink_ring(classes: Classes) -> bool:
    """Whether a ring through all devices passes NVLinks alone, as in a cube mesh."""
    n = len(classes)
    if n < 2 or n > LARGEST_SEARCH:
        return n > 1 and joined_by_nvlink(classes, range(n))
    joined = [[b for b in range(n) if b != a and nvlinks(classes[a][b])] for a in range(n)]

    @cache
    def ends(at: int, seen: int) -> bool:
        if seen == (1 << n) - 1:
            return 0 in joined[at]
        return any(ends(b, seen | 1 << b) for b in joined[at] if not seen >> b & 1)

    return ends(0, 1)


class Nearest(NamedTuple):
    """The nearest NICs of a device: their class, ``-`` where nothing is known, and which they are."""

    link: str
    nics: tuple[int, ...]

    @property
    def local(self) -> bool:
        """Whether data passes between them without the CPU, as NCCL decides it."""
        return self.link in GDR


def nearest_nics(topology: Topology) -> tuple[Nearest, ...]:
    """Of every device; empty where the topology has no NICs."""
    if not topology.nics:
        return ()
    found = []
    for device in range(len(topology.devices)):
        column = [row[device] for row in topology.nic_classes]
        best = min(column, key=distance)
        found.append(Nearest(best, tuple(nic for nic, link in enumerate(column) if link == best)))
    return tuple(found)
