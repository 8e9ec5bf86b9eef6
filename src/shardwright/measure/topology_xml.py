"""NCCL's topology as XML (NCCL_TOPO_DUMP_FILE, NCCL_TOPO_FILE) as the record that printouts make.

Classes follow NCCL: PIX below one PCIe switch, PXB through several, PHB through the host bridge of a NUMA
node, SYS between NUMA nodes. What `nvidia-smi` calls NODE is PHB here: the file does not tell host bridges
apart. Switches of two levels that NCCL takes for one are left as two. Source: NVIDIA/nccl src/graph/topo.cc,
paths.cc, xml.cc.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple
from xml.parsers import expat

from shardwright.bandwidth_map import UNREACHED
from shardwright.errors import EvidenceError
from shardwright.measure.topology import SAME, Topology

DEEPEST = 64
"""Elements inside one another; real files have fewer than ten."""

SWITCH, HOST = "0x068000", "0x068001"
"""Classes of what an NVLink leads to besides GPUs: an NVSwitch, the CPU."""

_GPU, _NIC = ("0x0302", "0x0300"), ("0x0200", "0x0207")
"""PCI classes of 3D and display controllers, of Ethernet and InfiniBand."""

_ENCODED_FROM, _ENCODED, _OLD_ENCODED = 8.0, 128 / 130, 8 / 10
"""Bits carried per bit signalled, from 8 GT/s (PCIe 3) on and before."""


@dataclass(frozen=True)
class Element:
    """One element, and where it starts."""

    name: str
    attributes: dict[str, str]
    line: int
    column: int
    children: "list[Element]" = field(default_factory=list)


class _Place(NamedTuple):
    """An end of links: elements from the CPU down to what holds it."""

    name: str
    element: Element
    chains: tuple[tuple[Element, ...], ...]
    speed: float = 0.0


def is_topology_xml(head: str) -> bool:
    """Whether a text begins as NCCL's topology."""
    return (
        re.match(r"\ufeff?\s*(?:<\?xml[^>]*\?>\s*)?(?:<!--.*?-->\s*)*<system\b", head, re.DOTALL) is not None
    )


def read_topology_xml(text: str, file: str) -> list[Topology]:
    """Every host in the file, mostly one.

    Raises: EvidenceError: malformed XML, a DOCTYPE or entity, elements that contradict one another; with line
    and column.
    """
    root = _tree(text, file)
    if root.name != "system":
        raise _fault(file, root, f"the root is <{root.name}>, a topology of NCCL is a <system>")
    cpus = [child for child in root.children if child.name == "cpu"]
    hosts = list(dict.fromkeys(cpu.attributes.get("host_hash", "") for cpu in cpus))
    found = [
        _topology(host, [cpu for cpu in cpus if cpu.attributes.get("host_hash", "") == host], file, text)
        for host in hosts
    ]
    if not any(topology.devices for topology in found):
        raise _fault(file, root, "there is no GPU in it")
    return [topology for topology in found if topology.devices]


def _tree(text: str, file: str) -> Element:
    parser = expat.ParserCreate()
    stack: list[Element] = []
    roots: list[Element] = []

    def here(words: str) -> EvidenceError:
        return EvidenceError(f"{file}:{parser.CurrentLineNumber}:{parser.CurrentColumnNumber + 1}: {words}")

    def start(name: str, attributes: dict[str, str]) -> None:
        element = Element(name, attributes, parser.CurrentLineNumber, parser.CurrentColumnNumber + 1)
        (stack[-1].children if stack else roots).append(element)
        stack.append(element)
        if len(stack) > DEEPEST:
            raise here(f"more than {DEEPEST} elements stand inside one another")

    def end(_: str) -> None:
        stack.pop()

    def refuse(*_: object) -> None:
        raise here("a DOCTYPE or an entity has no place in a topology: it is not read")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(text.lstrip("\ufeff").encode(), True)
    except expat.ExpatError as fault:
        words = expat.ErrorString(fault.code)
        raise EvidenceError(f"{file}:{fault.lineno}:{fault.offset + 1}: is no XML: {words}") from None
    return roots[0]


def _topology(host: str, cpus: Sequence[Element], file: str, text: str) -> Topology:
    gpus = [place for cpu in cpus for place in _places(cpu, file) if _is_gpu(place.element)]
    nics = _merged([place for cpu in cpus for place in _places(cpu, file) if not _is_gpu(place.element)])
    missing = []
    numbers = [_gpu(place.element).get("dev", "") for place in gpus]
    if all(number.isdigit() for number in numbers) and len(set(numbers)) == len(numbers):
        gpus = [gpus[at] for at in sorted(range(len(gpus)), key=lambda at: int(numbers[at]))]
        devices = [f"GPU{number}" for number in sorted(map(int, numbers))]
    else:
        devices = [f"GPU{at}" for at in range(len(gpus))]
        missing.append("the file does not number its GPUs: they are taken in its order")
    links, notes = _nvlinks(gpus, devices, file)
    missing += notes
    bare = not any(_gpu(place.element) for place in gpus)
    if bare:
        missing.append(
            "the file has no <gpu>, hence no NVLinks: links between GPUs are not known (NCCL asks the "
            "driver for them)"
        )
    places = [*gpus, *nics]

    def link(a: int, b: int) -> str:
        if a == b:
            return SAME
        if links.get((a, b)):
            return f"NV{links[a, b]}"
        return UNREACHED if bare and max(a, b) < len(gpus) else _class(places[a], places[b])

    every = range(len(places))
    classes = tuple(tuple(link(a, b) for b in every) for a in every)
    lines = text.split("\n")
    speeds = [speed for place in gpus if (speed := _pcie(place.element, file))]
    capability = _gpu(gpus[0].element).get("sm", "") if gpus else ""
    return Topology(
        file=file,
        line=cpus[0].line,
        devices=tuple(devices),
        nics=tuple(place.name for place in nics),
        nic_devices=tuple(place.name if place.element.name == "net" else "" for place in nics),
        classes=classes,
        affinity=tuple(_cores(place.chains[0][0], file) for place in gpus),
        numa=tuple(_numa(place.chains[0][0]) for place in gpus),
        gpu_numa=("",) * len(gpus),
        rows=tuple((place.element.line, lines[place.element.line - 1]) for place in gpus),
        host=host,
        missing=tuple(missing),
        nic_speeds=tuple(place.speed for place in nics),
        pcie=min(speeds, default=0.0),
        capability=int(capability) if capability.isdigit() else 0,
        pci_device=gpus[0].element.attributes.get("device", "") if gpus else "",
    )


def _places(cpu: Element, file: str) -> Iterator[_Place]:
    """GPUs and network ports below a CPU, in order."""

    def below(element: Element, chain: tuple[Element, ...]) -> Iterator[_Place]:
        inner = (*chain, element)
        nets = [net for nic in element.children if nic.name == "nic" for net in nic.children]
        for net in (net for net in nets if net.name == "net"):
            yield _Place(net.attributes.get("name", ""), net, (inner,), _speed(net, file))
        if element.name == "pci":
            kind = element.attributes.get("class", "")
            if _is_gpu(element) or (not nets and kind.startswith(_NIC)):
                yield _Place(element.attributes.get("busid", ""), element, (inner,))
        for child in element.children:
            if child.name == "pci":
                yield from below(child, inner)

    return below(cpu, ())


def _merged(nics: Sequence[_Place]) -> list[_Place]:
    """Ports in order; a network of the host that NCCL lists under every CPU is one, near to all of them."""
    found: dict[str, _Place] = {}
    for nic in nics:
        known = found.get(nic.name)
        found[nic.name] = nic if known is None else known._replace(chains=(*known.chains, *nic.chains))
    numbers = [place.element.attributes.get("dev", "") for place in found.values()]
    if all(number.isdigit() for number in numbers):
        return sorted(found.values(), key=lambda place: int(place.element.attributes["dev"]))
    return list(found.values())


def _is_gpu(element: Element) -> bool:
    return any(child.name == "gpu" for child in element.children) or element.attributes.get(
        "class", ""
    ).startswith(_GPU)


def _gpu(element: Element) -> dict[str, str]:
    return next((child.attributes for child in element.children if child.name == "gpu"), {})


def _class(a: _Place, b: _Place) -> str:
    """Class of the nearest way between two ends over PCIe."""
    order = ("PIX", "PXB", "PHB", "SYS", UNREACHED)
    return min((_way(x, y) for x in a.chains for y in b.chains), key=order.index)


def _way(a: tuple[Element, ...], b: tuple[Element, ...]) -> str:
    if a[0] is not b[0]:
        return "SYS"
    shared = sum(1 for x, y in zip(a, b, strict=False) if x is y)
    if a[-1] is b[-1] and len(a) > 1:
        return "PIX"  # ports of one card
    if shared == 1:
        return "PHB"
    return "PIX" if len(a) - shared <= 1 and len(b) - shared <= 1 else "PXB"


def _nvlinks(
    gpus: Sequence[_Place], devices: Sequence[str], file: str
) -> tuple[dict[tuple[int, int], int], list[str]]:
    """NVLinks of every pair, straight or through switches; and what was not used.

    Raises: EvidenceError: two GPUs disagree on how many they share.
    """
    by_bus = {place.element.attributes.get("busid", "").lower(): at for at, place in enumerate(gpus)}
    straight: dict[tuple[int, int], int] = {}
    lines: dict[tuple[int, int], Element] = {}
    switched = [0] * len(gpus)
    notes = []
    for at, place in enumerate(gpus):
        links = [n for gpu in place.element.children if gpu.name == "gpu" for n in gpu.children]
        for link in (link for link in links if link.name == "nvlink"):
            target, count = link.attributes.get("target", "").lower(), _count(link, file)
            other = by_bus.get(target)
            kind = link.attributes.get("tclass", "")
            if other == at:
                notes.append(f"line {link.line}: NVLinks of {devices[at]} lead to itself: they are not used")
            elif other is not None:
                straight[at, other] = straight.get((at, other), 0) + count
                lines[at, other] = link
            elif kind.startswith(SWITCH):
                switched[at] += count
            elif not kind.startswith(HOST):
                notes.append(
                    f"line {link.line}: NVLinks of {devices[at]} lead to {target}, which is not here"
                )
    for (a, b), link in lines.items():
        if straight.get((b, a), 0) != straight[a, b]:
            raise _fault(
                file,
                link,
                f"{devices[a]} has {straight[a, b]} NVLinks to {devices[b]}, which has "
                f"{straight.get((b, a), 0)} to {devices[a]}",
            )
    pairs = [(a, b) for a in range(len(gpus)) for b in range(len(gpus)) if a != b]
    return {(a, b): straight.get((a, b), 0) + min(switched[a], switched[b]) for a, b in pairs}, notes


def _count(link: Element, file: str) -> int:
    text = link.attributes.get("count", "")
    if not text.isdigit():
        raise _fault(file, link, f"count={text!r} of an nvlink is no number")
    return int(text)


def _speed(net: Element, file: str) -> float:
    """Of a port [B/s]; the file has Mb/s."""
    text = net.attributes.get("speed", "")
    if text and not text.isdigit():
        raise _fault(file, net, f"speed={text!r} of a net is no number of Mb/s")
    return float(text or 0) * 1e6 / 8


def _pcie(pci: Element, file: str) -> float:
    """What a device's PCIe link signals, less its coding [B/s]; 0: not said."""
    speed, width = pci.attributes.get("link_speed", ""), pci.attributes.get("link_width", "")
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*GT/s", speed)
    if match is None or not width.isdigit():
        return 0.0
    rate = float(match[1])
    return rate * 1e9 * int(width) / 8 * (_ENCODED if rate >= _ENCODED_FROM else _OLD_ENCODED)


def _numa(cpu: Element) -> str:
    number = cpu.attributes.get("numaid", "")
    return number if number.isdigit() else ""


def _cores(cpu: Element, file: str) -> str:
    """A mask of cores, hexadecimal in groups of 32 bits, as ranges."""
    mask = cpu.attributes.get("affinity", "")
    try:
        bits = int("".join(part.zfill(8) for part in mask.split(",")), 16) if mask else 0
    except ValueError:
        raise _fault(file, cpu, f"affinity={mask!r} is no mask of cores") from None
    cores = [core for core in range(bits.bit_length()) if bits >> core & 1]
    edges = [0, *(at for at, (a, b) in enumerate(pairwise(cores), 1) if b != a + 1), len(cores)]
    spans = [cores[a:b] for a, b in pairwise(edges) if a < b]
    return ",".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)


def _fault(file: str, element: Element, words: str) -> EvidenceError:
    return EvidenceError(f"{file}:{element.line}:{element.column}: {words}")
