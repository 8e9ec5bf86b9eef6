"""A step in the format of torch's memory viewer (pytorch.org/memory_viz), as CUDA's allocator has it.

A rank is a device with one segment. Every storage gets the lowest address that is free for it, so that the
viewer's picture of the segment shows nothing of a real allocator's rounding or fragmentation. Kinds are
categories, a storage's frames are its line, its module and its kind. A storage that FSDP resizes is freed and
made again.

Source: torch.cuda.memory._snapshot and torch/cuda/_memory_viz.py (torch 2.13).
"""

import pickle
from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.check.history import History, size_at, value_at

BASE = 0x7F00_0000_0000
"""First address of the first device, where a GPU's memory is mapped."""

DEVICE_BYTES = 2**42
"""From one device's first address to the next one's. 500 are below 2^53: JavaScript counts no further."""

PROTOCOL = 4
"""Of pickle: the newest that the viewer reads."""

UNKNOWN = "unknown"
"""A category that the viewer wants to be among the others."""

SETTINGS = {"expandable_segments": False, "garbage_collection_threshold": 0.0, "max_split_size": -1}


def save_snapshot(histories: Sequence[History], path: Path) -> Path:
    """Write a step of ranks as a file that the viewer opens; its path."""
    path.write_bytes(pickle.dumps(snapshot(histories), protocol=PROTOCOL))
    return path


def snapshot(histories: Sequence[History]) -> dict[str, Any]:
    """A step of ranks as ``torch.cuda.memory._snapshot()`` would return it of as many devices."""
    found = [_device(history, device) for device, history in enumerate(histories)]
    return {
        "segments": [segment for segment, _ in found],
        "device_traces": [trace for _, trace in found],
        "allocator_settings": SETTINGS,
    }


def _device(history: History, device: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Segment and trace of one rank."""
    room = _Room(BASE + device * DEVICE_BYTES)
    trace: list[dict[str, Any]] = []
    blocks: dict[int, dict[str, Any]] = {}  # that exist, by storage
    for number, event in enumerate(history.events):
        if event.life is None or event.change == 0:
            continue
        life = history.lives[event.life]
        block = blocks.pop(event.life, None)
        if block is not None:
            room.free(block["addr"], block["size"])
            freed = block | {"time_us": number}
            trace += [freed | {"action": action} for action in ("free_requested", "free_completed")]
        size = size_at(life, number)
        if size:
            kind = value_at(life.kinds, number)
            blocks[event.life] = {
                "action": "alloc",
                "addr": room.take(size),
                "size": size,
                "stream": 0,
                "time_us": number,
                "frames": _frames(life.origin.source, life.origin.module, kind),
                "category": kind,
            }
            trace.append(blocks[event.life])
    whole = {"addr": room.base, "size": room.size, "stream": 0, "time_us": 0, "frames": []}
    segment = _segment(list(blocks.values()), room) | {"device": device}
    return segment, [whole | {"action": "segment_alloc", "category": UNKNOWN}, *trace]


def _frames(source: str, module: str, kind: str) -> list[dict[str, Any]]:
    """Innermost first, as the viewer prints them."""
    filename, _, line = source.rpartition(":")
    return [{"filename": filename, "line": int(line or 0), "name": f"{kind} {module}".strip()}]


def _segment(blocks: list[dict[str, Any]], room: "_Room") -> dict[str, Any]:
    """What is left at the end, with the gaps between."""
    parts: list[dict[str, Any]] = []
    end = room.base
    for block in sorted(blocks, key=lambda block: int(block["addr"])):
        if block["addr"] > end:
            parts.append(_gap(end, block["addr"] - end))
        used = {key: block[key] for key in ("size", "frames")} | {"address": block["addr"]}
        parts.append(used | {"requested_size": block["size"], "state": "active_allocated"})
        end = block["addr"] + block["size"]
    if end < room.base + room.size:
        parts.append(_gap(end, room.base + room.size - end))
    allocated = sum(block["size"] for block in blocks)
    return {
        "address": room.base,
        "total_size": room.size,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": allocated,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": parts,
    }


def _gap(address: int, size: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}


class _Room:
    """Addresses from ``base`` on: a storage gets the lowest gap it fits into."""

    def __init__(self, base: int) -> None:
        self.base, self.size = base, 0
        self.gaps: list[tuple[int, int]] = []  # address and size, by address, none beside another

    def take(self, size: int) -> int:
        """Address of ``size`` bytes that were free."""
        for place, (address, free) in enumerate(self.gaps):
            if free >= size:
                self.gaps[place : place + 1] = [(address + size, free - size)] if free > size else []
                return address
        address = self.base + self.size
        if self.gaps and sum(self.gaps[-1]) == address:
            address = self.gaps.pop()[0]
        self.size = address - self.base + size
        return address

    def free(self, address: int, size: int) -> None:
        """Give bytes back."""
        place = bisect_left(self.gaps, (address, 0))
        if place < len(self.gaps) and self.gaps[place][0] == address + size:
            size += self.gaps.pop(place)[1]
        if place and sum(self.gaps[place - 1]) == address:
            before, free = self.gaps.pop(place - 1)
            address, size = before, free + size
        insort(self.gaps, (address, size))
