"""A trace of torch.profiler (Chrome JSON) in one pass: busy, communicating, exposed and idle time of a
rank."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardwright.doctor.finding import Source

COMMUNICATION = re.compile(
    r"nccl|rccl|gloo:|c10d::|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|SendRecv|Broadcast",
    re.IGNORECASE,
)
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LOADING = re.compile(r"DataLoader.*__next__|_next_data")
RETRIES = ("cudaFree", "hipFree", "cudaMalloc", "hipMalloc", "cudaMallocRetry")

BUFFER = 4 << 20
US = 1e-6


@dataclass
class Trace:
    """One rank's trace [s]. ``exposed``: communication while nothing else ran, by group and operation."""

    source: Source
    rank: int | None
    world: int | None
    window: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    idle: float = 0.0
    loading: float = 0.0
    frees: int = 0
    steps: int = 0
    on_device: bool = False
    exposed_by: dict[str, float] = field(default_factory=dict)
    waits_by: dict[str, float] = field(default_factory=dict)


def is_trace_head(head: bytes) -> bool:
    """Whether a file begins as a trace does."""
    return b'"traceEvents"' in head or b'"schemaVersion"' in head


def events_of(stream: BinaryIO, header: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Events of a trace, one after another; ``header`` is given what stands before them that is known.

    A trace may be larger than memory, so it is decoded piece by piece.
    """
    decoder = json.JSONDecoder()
    text = ""
    start = -1
    while start < 0:
        block = stream.read(BUFFER)
        if not block:
            return
        text += block.decode("utf-8", errors="replace")
        found = re.search(r'"traceEvents"\s*:\s*\[', text)
        start = -1 if found is None else found.end()
        if found is None and len(text) > 64 * BUFFER:
            return
    if (info := re.search(r'"distributedInfo"\s*:\s*\{', text[:start])) is not None:
        try:
            header["distributed"], _ = decoder.raw_decode(text, info.end() - 1)
        except ValueError:
            header["distributed"] = {}
    text = text[start:]
    place, ended = 0, False
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if place < len(text) and text[place] == "]":
            return
        try:
            event, place = decoder.raw_decode(text, place)
        except ValueError:
            if ended:
                return
            block = stream.read(BUFFER)
            ended = not block
            text, place = text[place:] + block.decode("utf-8", errors="replace"), 0
            if len(text) > 64 * BUFFER:
                return
            continue
        if isinstance(event, Mapping):
            yield event
        if place > BUFFER:
            text, place = text[place:], 0


def read_trace(name: str, stream: BinaryIO) -> Trace:
    """The trace of one rank, its events summed up."""
    header: dict[str, Any] = {}
    device: list[tuple[float, float, int, str]] = []
    host: list[tuple[float, float, int, str]] = []
    trace = Trace(Source(name, None, "profiler trace"), None, None)
    for event in events_of(stream, header):
        if event.get("ph") != "X":
            continue
        start, length = _float(event.get("ts")), _float(event.get("dur"))
        title, kind = str(event.get("name", "")), str(event.get("cat", ""))
        if start is None or length is None or length < 0:
            continue
        if kind in DEVICE:
            device.append(
                (start, start + length, int(bool(COMMUNICATION.search(title))), _flow(event, title))
            )
        elif kind in ("cpu_op", "user_annotation"):
            if LOADING.search(title):
                trace.loading += length * US
            elif title.startswith("ProfilerStep#") or re.fullmatch(r"step \d+", title):
                trace.steps += 1
            else:
                host.append(
                    (start, start + length, int(title.startswith(("gloo:", "nccl:"))), _flow(event, title))
                )
        elif kind in ("cuda_runtime", "hip_runtime") and title in RETRIES:
            trace.frees += title.endswith("Free")
    _sum_up(trace, device or host, on_device=bool(device))
    info = header.get("distributed") or {}
    trace.rank = _int(info.get("rank"))
    trace.world = _int(info.get("world_size"))
    if trace.rank is None and (found := re.search(r"rank[-_]?(\d+)", name)) is not None:
        trace.rank = int(found[1])
    return trace


def _sum_up(trace: Trace, events: list[tuple[float, float, int, str]], *, on_device: bool) -> None:
    if not events:
        return
    trace.on_device = on_device
    starts = np.array([event[0] for event in events])
    ends = np.array([event[1] for event in events])
    talks = np.array([event[2] for event in events], dtype=bool)
    trace.window = float(ends.max() - starts.min()) * US
    computing = _union(starts[~talks], ends[~talks])
    talking = _union(starts[talks], ends[talks])
    both = _union(starts, ends)
    trace.compute, trace.communication = _length(computing), _length(talking)
    trace.exposed = max(_length(both) - trace.compute, 0.0)
    trace.idle = max(trace.window - _length(both), 0.0)
    flows: dict[str, list[int]] = {}
    for index in np.flatnonzero(talks).tolist():
        flows.setdefault(events[index][3], []).append(index)
    for flow, indices in flows.items():
        own = _union(starts[indices], ends[indices])
        trace.waits_by[flow] = _length(own)
        trace.exposed_by[flow] = _length(own) - _overlap(own, computing)


def _flow(event: Mapping[str, Any], title: str) -> str:
    """Process group and collective of a communication kernel."""
    args = event.get("args")
    args = args if isinstance(args, Mapping) else {}
    group = str(args.get("Process Group Description") or args.get("Process Group Name") or "").strip('"')
    collective = str(args.get("Collective name") or "").strip('"')
    if not collective:
        found = re.search(r"(AllGather|AllReduce|ReduceScatter|SendRecv|Broadcast|AllToAll|Reduce)", title)
        collective = found[1] if found else title.partition("(")[0][:40]
    return f"{group} {collective}".strip()


Intervals = NDArray[np.float64]


def _union(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> Intervals:
    """Intervals merged, as rows of start and end, in order."""
    if not len(starts):
        return np.zeros((0, 2))
    order = np.argsort(starts, kind="stable")
    first, reach = starts[order], np.maximum.accumulate(ends[order])
    new = np.concatenate(([True], first[1:] > reach[:-1]))
    last = np.concatenate((np.flatnonzero(new)[1:] - 1, [len(first) - 1]))
    return np.stack((first[new], reach[last]), axis=1)


def _length(intervals: Intervals) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum()) * US


def _overlap(one: Intervals, other: Intervals) -> float:
    """Time that both cover [s]."""
    joined = np.concatenate((one, other))
    together = _length(_union(joined[:, 0], joined[:, 1]))
    return max(_length(one) + _length(other) - together, 0.0)


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _int(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
