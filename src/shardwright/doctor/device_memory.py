"""What an allocator's refusal says of its device: other processes, memory beyond torch, fragmentation."""

from collections.abc import Iterator

from shardwright.doctor.evidence import OutOfMemory
from shardwright.doctor.finding import Finding, Source
from shardwright.units import GiB, MiB, format_bytes

Sources = tuple[Source, ...]

OTHERS = 512 * MiB
"""Memory of other processes on a device that is worth a word: a bare CUDA context is smaller."""

NON_TORCH = 3 * GiB
"""Memory of a process beyond its allocator that is more than a context and a few communicators."""

FRAGMENTED = 0.15
"""Share of what is reserved that lies unused where fragmentation is the matter."""


def numbers_of_refusal(refusal: OutOfMemory) -> dict[str, object]:
    unused = None
    if refusal.reserved is not None and refusal.allocated is not None:
        unused = refusal.reserved - refusal.allocated
    return {
        "requested": refusal.requested,
        "capacity": refusal.capacity,
        "free": refusal.free,
        "allocated": refusal.allocated,
        "reserved": refusal.reserved,
        "unused": unused,
    }


def state_text(refusal: OutOfMemory) -> str:
    parts = [
        f"{format_bytes(refusal.requested)} wanted"
        if refusal.requested is not None
        else "an unknown size wanted"
    ]
    for name in ("free", "allocated", "capacity"):
        if (value := getattr(refusal, name)) is not None:
            parts.append(
                f"{format_bytes(value)} {name}" if name != "capacity" else f"of {format_bytes(value)}"
            )
    return ", ".join(parts)


def shared_device(refusal: OutOfMemory, ranks: tuple[int, ...], sources: Sources) -> Iterator[Finding]:
    """Other processes on the device, as listed, or as what is missing in the sum."""
    own = refusal.in_use or (refusal.reserved or 0)
    others = 0
    if refusal.processes:
        sizes = [size for _, size in refusal.processes]
        mine = min((size for size in sizes if size >= own > 0), default=None)
        others = sum(sizes) - (mine or 0)
    elif refusal.in_use is not None and refusal.capacity is not None and refusal.free is not None:
        others = refusal.capacity - refusal.free - refusal.in_use
    if others > OTHERS:
        yield Finding(
            "other_processes",
            "certain" if refusal.processes else "likely",
            f"other processes hold {format_bytes(others)} of the same device"
            + (f" ({len(refusal.processes)} processes are on it)" if refusal.processes else ""),
            ranks,
            sources,
            numbers={**numbers_of_refusal(refusal), "others": others},
        )


def beyond_torch(refusal: OutOfMemory, ranks: tuple[int, ...], sources: Sources) -> Iterator[Finding]:
    if refusal.in_use is None or refusal.reserved is None:
        return
    beyond = refusal.in_use - refusal.reserved
    if beyond > NON_TORCH:
        yield Finding(
            "non_torch_memory",
            "likely",
            f"the process holds {format_bytes(beyond)} that torch's allocator does not: "
            "communicators, context, graphs",
            ranks,
            sources,
            numbers={**numbers_of_refusal(refusal), "non_torch": beyond},
        )


def fragmented_memory(refusal: OutOfMemory, ranks: tuple[int, ...], sources: Sources) -> Iterator[Finding]:
    """Whether unused memory of the allocator would have been enough."""
    if refusal.reserved is None or refusal.allocated is None or refusal.requested is None:
        return
    unused, free = refusal.reserved - refusal.allocated, refusal.free or 0
    enough = unused + free >= refusal.requested
    if enough and (unused >= refusal.requested or unused > FRAGMENTED * refusal.reserved):
        yield Finding(
            "fragmentation",
            "likely",
            f"{format_bytes(unused)} of the allocator's memory lie unused, {format_bytes(free)} are "
            "free, and "
            f"{format_bytes(refusal.requested)} were wanted in one piece",
            ranks,
            sources,
            numbers=numbers_of_refusal(refusal),
        )


def not_fragmented(refusal: OutOfMemory) -> str:
    """Why fragmentation is not the matter, where the numbers say so."""
    if refusal.reserved is None or refusal.allocated is None or refusal.requested is None:
        return ""
    left = refusal.reserved - refusal.allocated + (refusal.free or 0)
    if left >= refusal.requested:
        return ""
    return (
        f"; not fragmentation: unused and free together are {format_bytes(left)}, "
        f"{format_bytes(refusal.requested - left)} short"
    )
