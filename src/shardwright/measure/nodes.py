"""Nodes, found from the bandwidths between pairs: two ranks of a node talk faster than two of different ones.

Names of hosts are a hint only: containers of one host share its name, hosts of one rack may share a switch
that is as fast as they are.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log
from typing import NamedTuple

CLEAR_GAP = 2.0
"""Bandwidths nearer to each other than this factor are one class: on a busy machine noise alone does that."""

MOST_EXCEPTIONS = 0.25
"""Share of the pairs inside domains that may be slow, one broken link, without hiding that it is one."""


class Domains(NamedTuple):
    """Sizes of nested domains of consecutive ranks, the last being all ranks; ``node`` is one of them.
    ``notes``: what was taken on trust."""

    sizes: tuple[int, ...]
    node: int
    notes: tuple[str, ...]


def find_domains(world: int, bandwidths: Mapping[tuple[int, int], float], hint: int) -> Domains:
    """Domains from the bandwidth between pairs (smaller rank first) [B/s]; ``hint``: ranks of a node as their
    hosts' names have it, which holds where bandwidths show no difference."""
    found: dict[int, float] = {}
    refused: list[str] = []
    for gap, threshold in _gaps(list(bandwidths.values())):
        blocks = _blocks(world, bandwidths, threshold)
        if blocks is None:
            continue
        size = len(blocks[0])
        even = all(block == list(range(i * size, (i + 1) * size)) for i, block in enumerate(blocks))
        if even and 1 < size < world:
            found.setdefault(size, gap)
        elif size < world:
            refused.append(
                f"ranks {blocks} are joined {gap:.1f} times as fast as others, but are no equal blocks of "
                "consecutive ranks, and no level of links for a plan: start ranks node by node"
            )
    if found:
        node = max(found, key=lambda size: found[size])
        notes = () if node == hint else (_other_than_named(node, hint),)
        return Domains((*sorted(found), world), node, notes)
    if 1 <= hint < world and world % hint == 0:
        note = f"gpus_per_node={hint} as hosts are named: bandwidths of pairs show no blocks of ranks"
        return Domains((hint, world), hint, (note, *refused[:1]))
    return Domains((world,), world, tuple(refused[:1]))


def _other_than_named(node: int, hint: int) -> str:
    return f"gpus_per_node={node} by bandwidths of pairs, {hint} by names of hosts: the first is taken"


def _gaps(values: Sequence[float]) -> list[tuple[float, float]]:
    """Clear gaps between neighbouring bandwidths, the widest first: factor, and the bandwidth above it."""
    ordered = sorted(values)
    found = [(high / low, high) for low, high in pairwise(ordered) if log(high / low) >= log(CLEAR_GAP)]
    return sorted(found, reverse=True)


def _blocks(
    world: int, bandwidths: Mapping[tuple[int, int], float], threshold: float
) -> list[list[int]] | None:
    """Ranks joined by pairs of at least ``threshold``; None where these do not part fast from slow."""
    home = list(range(world))
    for (a, b), bandwidth in bandwidths.items():
        if bandwidth >= threshold and home[a] != home[b]:
            old, new = max(home[a], home[b]), min(home[a], home[b])
            home = [new if each == old else each for each in home]
    inside = [bandwidth < threshold for (a, b), bandwidth in bandwidths.items() if home[a] == home[b]]
    if sum(inside) > MOST_EXCEPTIONS * len(inside):
        return None
    members: dict[int, list[int]] = {}
    for rank, block in enumerate(home):
        members.setdefault(block, []).append(rank)
    return [members[block] for block in sorted(members)] if len(members) > 1 else None
