"""What is measured, in which order: what a plan needs most comes first.

Everything here is a function of the number of ranks, of the sizes of domains and of the time, so that all
ranks could work it out alike.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from shardwright.bandwidth_map import Collective
from shardwright.units import KiB, MiB, format_bytes

COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_to_all")
"""Those of more than two ranks besides the all-reduce, which comes first."""

SMALLEST, MEDIUM = 4 * KiB, MiB

FIRST_SIZE, STEP = KiB, 4

Groups = tuple[tuple[int, ...], ...]


class Kind(NamedTuple):
    """Groups alike that share out all ranks, and how many of a group share a domain of each level."""

    members: tuple[int, ...]
    groups: Groups


class Cell(NamedTuple):
    """One measurement: ``call`` at one size over all groups of a kind at once; or, if it is "pair", of one
    pair both ways."""

    call: str
    members: tuple[int, ...]
    groups: Groups
    size: int

    @property
    def noun(self) -> str:
        """What is measured, without its ranks."""
        return "pair" if self.call == "pair" else f"{self.call} of {format_bytes(self.size)} over ranks"

    @property
    def what(self) -> str:
        """The same with them, or with the first of them."""
        if self.call == "pair":
            first, second = self.groups[0]
            return f"latency and bandwidth between ranks {first} and {second}"
        more = ", ..." if len(self.groups) > 1 else ""
        return f"{self.noun} {list(self.groups[0])}{more}"


def pairs_in_order(world: int, per_node: int) -> list[tuple[int, int]]:
    """All pairs: neighbours, one for each two nodes of ``per_node`` (a guess at this time), at distances of
    powers of two, then the rest by distance. Any first part of the list covers ranks evenly."""
    found: dict[tuple[int, int], None] = {}

    def add(a: int, b: int) -> None:
        if a != b:
            found[min(a, b), max(a, b)] = None

    for rank in range(world):
        add(rank, (rank + 1) % world)
    nodes = world // per_node
    for first in range(nodes):
        for second in range(first + 1, nodes):
            rail = (first + second) % per_node
            add(first * per_node + rail, second * per_node + rail)
    powers = [2**k for k in range(1, world.bit_length()) if 2**k < world]
    for distance in (*reversed(powers), *range(1, world)):
        for rank in range(world - distance):
            add(rank, rank + distance)
    return list(found)


def kinds_of(domains: Sequence[int]) -> tuple[list[Kind], list[Kind]]:
    """The groups that layouts make of ranks in nested domains of these sizes, the last being all ranks: those
    that every plan needs, whole domains and one rank of each; and parts of them, and strided ones."""
    world = domains[-1]
    inner = domains[0]
    parts = [2**k for k in range(1, inner.bit_length()) if 2**k < inner and inner % 2**k == 0]
    main = [(1, size) for size in domains]
    main += [(small, large // small) for small, large in pairwise(domains)]
    other = [(1, part) for part in parts] + [(part, world // part) for part in parts if len(domains) > 1]
    for small, large in pairwise(domains):
        nodes = large // small
        other += [(small, 2**k) for k in range(1, nodes.bit_length()) if 2**k < nodes and nodes % 2**k == 0]
    seen: dict[tuple[int, ...], Kind] = {}
    sides: tuple[list[Kind], list[Kind]] = ([], [])
    for side, found in zip(sides, (main, other), strict=True):
        for stride, count in found:
            members = tuple(max(1, min(count, size // stride)) for size in domains)
            if count > 1 and members not in seen:
                seen[members] = Kind(members, _strided(world, stride, count))
                side.append(seen[members])
    return sides


def neighbours_of(domains: Sequence[int]) -> list[Kind]:
    """Groups of two: next to each other in the innermost domain, and the same place in next ones."""
    found = []
    for level, stride in enumerate((1, *domains[:-1])):
        if domains[level] // stride > 1:
            members = tuple(1 if size <= stride else 2 for size in domains)
            pairs = _chained(domains[-1], stride, domains[level])
            found.append(Kind(members, pairs))
    return found


def _strided(world: int, stride: int, count: int) -> Groups:
    block = stride * count
    return tuple(
        tuple(start + offset + stride * i for i in range(count))
        for start in range(0, world, block)
        for offset in range(stride)
    )


def _chained(world: int, stride: int, within: int) -> Groups:
    """Ranks two by two at this distance, none in two groups, both in one domain of ``within``."""
    return tuple(
        (rank, rank + stride)
        for rank in range(world)
        if rank // stride % 2 == 0 and rank // within == (rank + stride) // within
    )


def sizes_up_to(largest: int) -> list[int]:
    """1 KiB and four times as much again and again, and ``largest`` [B]."""
    found = []
    size = FIRST_SIZE
    while size < largest:
        found.append(size)
        size *= STEP
    return [*found, largest]


def collective_cells(domains: Sequence[int], largest: int) -> list[Cell]:
    """All collectives over all kinds of groups at all sizes, in the order of their worth to a plan."""
    sizes = sizes_up_to(largest)
    large = sizes[-2] if len(sizes) > 1 else sizes[-1]
    coarse = sorted({min(SMALLEST, large), min(MEDIUM, large), large})
    main, other = kinds_of(domains)
    rounds = [
        _cells(("all_reduce",), main, coarse),
        *(_cells(("send",), neighbours_of(domains), coarse), _cells(COLLECTIVES, main, coarse)),
        *(_cells(("all_reduce",), other, coarse), _cells(COLLECTIVES, other, coarse)),
        _cells(("all_reduce",), main, sizes),
        *(_cells(("send",), neighbours_of(domains), sizes), _cells(COLLECTIVES, main, sizes)),
        *(_cells(("all_reduce",), other, sizes), _cells(COLLECTIVES, other, sizes)),
    ]
    return list(dict.fromkeys(cell for cells in rounds for cell in cells))


def _cells(calls: Sequence[Collective], kinds: Sequence[Kind], sizes: Sequence[int]) -> Iterator[Cell]:
    """Larger sizes last: from the smaller ones follows whether there is time for them."""
    for size in sizes:
        for kind in kinds:
            for call in calls:
                yield Cell(call, kind.members, kind.groups, size)
