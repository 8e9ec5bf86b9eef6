"""The view of a node that NCCL prints with NCCL_DEBUG_SUBSYS=GRAPH: class and bandwidth of the path from each
device to every other."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardwright.doctor.evidence import Evidence
from shardwright.doctor.finding import Finding, Source
from shardwright.doctor.lines import Line, Reader
from shardwright.units import GB, format_bandwidth

_LINE = re.compile(r"^(?P<host>\S+?):\d+:\d+ .*?NCCL INFO GPU/(?:\d+-)?(?P<own>[0-9A-Fa-f]+) ?:(?P<paths>.*)")
_PATH = re.compile(r"GPU/(?:\d+-)?(?P<bus>[0-9A-Fa-f]+) \((?P<hops>\d+)/(?P<rate>[\d.]+)/(?P<kind>\w+)\)")

SELF = "LOC"
NVLINK = ("NVL", "NVB", "C2C")
"""Classes of paths over NVLink, one hop or by way of another device. Source: NCCL, src/graph/topo.h."""


class Path(NamedTuple):
    """To another device: its class and bandwidth [B/s, one direction]."""

    bus: str
    kind: str
    bandwidth: float


class GraphPaths(NamedTuple):
    """What NCCL found from one device."""

    source: Source
    host: str
    bus: str
    paths: tuple[Path, ...]


def read_graph(line: Line) -> Iterator[GraphPaths]:
    """``GPU/CE000 :GPU/0-4e000 (5/10.0/SYS) GPU/0-ce000 (0/5000.0/LOC) ...``: hops, GB/s, class."""
    found = _LINE.search(line.text)
    if found is None:
        return
    paths = tuple(
        Path(each["bus"].lower(), each["kind"], float(each["rate"]) * GB)
        for each in _PATH.finditer(found["paths"])
        if each["kind"] != SELF
    )
    if paths:
        yield GraphPaths(line.source, found["host"], found["own"].lower(), paths)


def graph_findings(evidence: Evidence) -> list[Finding]:
    """Of every host whose devices no NVLink joins: over what they reach each other, and how many are near."""
    hosts: dict[str, dict[str, GraphPaths]] = {}
    for graph in evidence.of(GraphPaths):
        hosts.setdefault(graph.host, {}).setdefault(graph.bus, graph)
    return [finding for host, devices in hosts.items() for finding in _of_host(host, list(devices.values()))]


def _of_host(host: str, devices: Sequence[GraphPaths]) -> Iterator[Finding]:
    if any(path.kind in NVLINK for device in devices for path in device.paths):
        return
    lead = devices[0]
    reached: dict[tuple[str, float], int] = {}
    for path in lead.paths:
        reached[path.kind, path.bandwidth] = reached.get((path.kind, path.bandwidth), 0) + 1
    ways = sorted(reached.items(), key=lambda way: -way[0][1])
    text = ", ".join(f"{count} over {kind} at {format_bandwidth(rate)}" for (kind, rate), count in ways)
    near = 1 + ways[0][1] if len(ways) > 1 else None
    words = "" if near is None else f"; at most {near} devices are equally near"
    yield Finding(
        "no_nvlink",
        "certain",
        f"no NVLink joins devices of {host}: NCCL reaches from GPU {lead.bus} {text}{words}",
        (),
        tuple(device.source for device in devices),
        numbers={
            "near": near,
            "ways": [{"class": kind, "bandwidth": rate, "devices": count} for (kind, rate), count in ways],
        },
    )


READERS: Mapping[bytes, Reader[Any]] = {b"NCCL INFO GPU/": read_graph}
