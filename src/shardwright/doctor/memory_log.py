"""Messages about memory: refusals of allocators in the forms of torch 1.0 to 2.13, and reports of tools."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from shardwright.doctor.clock import time_of
from shardwright.doctor.evidence import MemoryReport, OutOfMemory
from shardwright.doctor.lines import Line, Reader, rank_of_text
from shardwright.units import GiB, KiB, MiB, TiB

UNITS = {
    "bytes": 1, "B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB,
    "KB": KiB, "MB": MiB, "GB": GiB, "TB": TiB,
}  # fmt: skip
"""As these messages mean them: torch, DeepSpeed and Megatron all count in powers of two."""

_SIZE = r"(-?[\d,]+(?:\.\d+)?) ?(bytes|[KMGT]i?B|B)\b"
_REQUEST = re.compile(r"[Tt]ried to allocate " + _SIZE)
_PARTS = {
    "capacity": re.compile(
        r"total capac(?:i)?ty of " + _SIZE + "|" + _SIZE + r" total capacity|max allowed: " + _SIZE
    ),
    "free": re.compile(r"of which " + _SIZE + " is free|" + _SIZE + r"\s+free"),
    "in_use": re.compile(r"this process has " + _SIZE + " memory in use"),
    "allocated": re.compile(
        _SIZE + r" is allocated by PyTorch|" + _SIZE + r" already allocated|MPS allocated: " + _SIZE
    ),
    "unallocated": re.compile(_SIZE + r" is reserved by PyTorch but unallocated"),
    "reserved": re.compile(_SIZE + r" (?:reserved in total by PyTorch|cached)"),
}
_DEVICE = re.compile(r"GPU (\d+)")
_PROCESS = re.compile(r"Process (\d+) has " + _SIZE + " memory in use")
_HOST = re.compile(r"you tried to allocate (\d+) bytes")
_BYTES = re.compile(r"allocat\w+ (\d{4,}) bytes")
_NCCL_DEVICE = re.compile(r":\d+:\d+ \[(\d+)\]")
_CALLOC = re.compile(r"Failed to CUDA (?:host )?(?:calloc|alloc|malloc)\D{0,12}?(\d+) bytes")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')


def size_of(match: re.Match[str] | None) -> int | None:
    """Bytes of the first size that a match holds."""
    if match is None:
        return None
    groups = [group for group in match.groups() if group is not None]
    for number, unit in pairwise(groups):
        if unit in UNITS and re.fullmatch(r"-?[\d,]+(?:\.\d+)?", number):
            return round(float(number.replace(",", "")) * UNITS[unit])
    return None


def read_out_of_memory(line: Line) -> Iterator[OutOfMemory]:
    """One refusal. A line that was wrapped is joined; the stack above or below it belongs to it."""
    text = line.text
    if "you tried to allocate" in text:
        return
    if _REQUEST.search(text) is None or ("free" not in text and "capac" not in text):
        text = line.joined(4, " ")
    request = _REQUEST.search(text)
    if request is None:
        return
    text = text[max(request.start() - 60, 0) : request.start() + 1600]
    found = {name: size_of(pattern.search(text)) for name, pattern in _PARTS.items()}
    reserved = found["reserved"]
    if reserved is None and found["unallocated"] is not None and found["allocated"] is not None:
        reserved = found["allocated"] + found["unallocated"]
    unit = UNITS[request[2]]
    device = _DEVICE.search(text)
    processes = tuple(
        (int(each[1]), size) for each in _PROCESS.finditer(text) if (size := size_of(each)) is not None
    )
    yield OutOfMemory(
        line.source,
        line.rank,
        int(device[1]) if device else None,
        size_of(request),
        0 if unit == 1 else round(unit * 0.0051),
        found["capacity"],
        found["free"],
        found["in_use"] or None,
        found["allocated"],
        reserved,
        processes,
        "cuda",
        _frames(line),
        time_of(line.text),
    )


def _frames(line: Line) -> tuple[str, ...]:
    """Python frames above the message, of its own rank, innermost first; else those below."""
    own = rank_of_text(line.text)
    for upward, lines in ((True, list(reversed(line.before(70)))), (False, line.following(30))):
        frames: list[str] = []
        tagged = own is not None and any(rank_of_text(text) == own and _FRAME.search(text) for text in lines)
        code = ""
        for text in lines:
            other = rank_of_text(text)
            if "ried to allocate" in text and (own is None or other == own):
                break  # another refusal, whose stack is its own
            if own is not None and other != own and (tagged or other is not None):
                continue  # another rank's line, or no rank's where each of this one's says whose it is
            if (frame := _FRAME.search(text)) is not None:
                place = f"{frame['name']} at {frame['file']}:{frame['line']}"
                frames.append(f"{place}: {code}" if code and upward else place)
                code = ""
            elif "Traceback (most recent" in text and (upward or frames):
                break
            elif not re.search(r"[\^~]{3,}", text):
                code = text.rpartition("]:")[2].strip()[:120]
        if frames:
            return tuple(frames[:24] if upward else frames[::-1][:24])
    return ()


def read_host_memory(line: Line) -> Iterator[OutOfMemory]:
    """The host's allocator refuses."""
    found = _HOST.search(line.text) or _BYTES.search(line.text)
    size = int(found[1]) if found else None
    yield _bare(line, size, "host")


def read_driver(line: Line) -> Iterator[OutOfMemory]:
    """CUDA itself, NCCL or cuBLAS find no room; they do not say how much they wanted."""
    if _REQUEST.search(line.text):
        return
    if "NCCL" not in line.text and "Cuda failure" not in line.text:
        yield _bare(line, None, "driver")
        return
    own = _NCCL_DEVICE.search(line.text)
    near = [text for text in line.following(4) if own is None or own[0] in text]
    size = next((int(found[1]) for text in near if (found := _CALLOC.search(text))), None)
    yield _bare(line, size, "nccl", None if own is None else int(own[1]))


def _bare(line: Line, size: int | None, where: str, device: int | None = None) -> OutOfMemory:
    return OutOfMemory(
        line.source,
        line.rank,
        device=device,
        requested=size,
        slack=0,
        capacity=None,
        free=None,
        in_use=None,
        allocated=None,
        reserved=None,
        processes=(),
        where=where,
        frames=_frames(line),
        time=time_of(line.text),
    )


_DEEPSPEED = re.compile(r"\bMA ([\d.]+) GB\s+Max_MA ([\d.]+) GB\s+CA ([\d.]+) GB\s+Max_CA ([\d.]+) GB")
_MEGATRON = re.compile(
    r"(\(.*?\)|after [^|]*)? ?memory \(MB\) \| allocated: ([\d.]+) \| max allocated: ([\d.]+) \| "
    r"(?:reserved: ([\d.]+) \| )?(?:max reserved: ([\d.]+))?"
)
_SMI = re.compile(r"(\d+)MiB\s*/\s*(\d+)MiB")
_ESTIMATE = re.compile(r"([\d.]+)GB \|\s*([\d.]+)GB \| (offload_\S+.*)")
_SUMMARY = re.compile(
    r"\|\s*(Allocated memory|GPU reserved memory|Active memory)\s*\|\s*([\d.]+) ([KMGT]i?B)"
)


def read_report(line: Line) -> Iterator[MemoryReport]:
    """What DeepSpeed, Megatron, nvidia-smi or torch's summary report."""
    if (found := _DEEPSPEED.search(line.text)) is not None:
        above = [text for text in line.before(6) if "see_memory_usage" in text and "Max_MA" not in text]
        above = above or [text for text in line.before(2) if text.strip()]
        moment = re.sub(r"^.*?\]\s*(?=[A-Za-z][^\]]*$)", "", above[-1]).strip() if above else ""
        allocated, peak, reserved, _ = (round(float(value) * GiB) for value in found.groups())
        yield MemoryReport(line.source, line.rank, moment[-80:], allocated, peak, reserved)
    elif (found := _MEGATRON.search(line.text)) is not None:
        sizes = [None if value is None else round(float(value) * MiB) for value in found.groups()[1:]]
        yield MemoryReport(
            line.source, line.rank, (found[1] or "").strip("() "), sizes[0], sizes[1], sizes[2]
        )
    elif (found := _SMI.search(line.text)) is not None:
        used, capacity = int(found[1]) * MiB, int(found[2]) * MiB
        yield MemoryReport(line.source, line.rank, "nvidia-smi", device=used, capacity=capacity)
    elif (found := _ESTIMATE.search(line.text)) is not None:
        size = round(float(found[2]) * GiB)
        yield MemoryReport(line.source, None, f"estimate {found[3].strip()}", peak=size)
    elif (found := _SUMMARY.search(line.text)) is not None:
        size = round(float(found[2]) * UNITS[found[3]])
        if "reserved" in found[1]:
            yield MemoryReport(line.source, line.rank, "torch summary", reserved=size)
        else:
            yield MemoryReport(line.source, line.rank, "torch summary", allocated=size)


READERS: dict[bytes, Reader[Any]] = {
    b"ried to allocate ": read_out_of_memory,
    b" out of memory. ": read_out_of_memory,
    b" out of memory.\n": read_out_of_memory,
    b" out of memory. Tried to\n": read_out_of_memory,
    b"you tried to allocate": read_host_memory,
    b"DefaultCPUAllocator": read_host_memory,
    b"Cannot allocate memory": read_host_memory,
    b"std::bad_alloc": read_host_memory,
    b"CUDA error: out of memory": read_driver,
    b"failure 2 'out of memory'": read_driver,
    b"failure 'out of memory'": read_driver,
    b"CUBLAS_STATUS_ALLOC_FAILED": read_driver,
    b"Max_MA ": read_report,
    b"memory (MB) | allocated": read_report,
    b"MiB |  ": read_report,
    b"GB | offload_": read_report,
    b"Allocated memory  ": read_report,
    b"GPU reserved memory": read_report,
    b"Active memory  ": read_report,
}
