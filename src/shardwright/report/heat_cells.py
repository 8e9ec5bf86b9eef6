"""Cells of a heat map: ranks against ranks, or, of many, nodes against nodes with their worst pairs."""

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_RANKS = 32
"""Ranks up to which each has a row; beyond, nodes have."""

SPAN = 2.0
"""Ratio of the ends of the scale of colours, at least."""


class Cell(NamedTuple):
    """One place of the map: ``bandwidth`` [B/s] and ``latency`` [s] are medians of ``pairs`` directions,
    ``share`` the lowest of what is usual for their kind, and ``slowest`` that pair's bandwidth."""

    bandwidth: float
    latency: float
    share: float
    slowest: float
    pairs: int
    kind: str


class Cells(NamedTuple):
    """``size`` rows and columns of ``noun`` (rank, node, or block of ``each`` nodes); ``boundary``: rows of a
    node, 0 if a row is one."""

    noun: str
    size: int
    each: int
    boundary: int
    cells: Mapping[tuple[int, int], Cell]

    @property
    def range(self) -> tuple[float, float]:
        """Ends of the scale of colours [B/s]: slowest and fastest, a factor of ``SPAN`` at least, so that
        chance does not look like a fault."""
        rates = [cell.bandwidth for cell in self.cells.values()]
        high = max(rates, default=1.0)
        return min(min(rates, default=1.0), high / SPAN), high

    def label(self, row: int) -> str:
        """The first rank or node of a row."""
        return str(row * self.each)


def cells_of(document: Mapping[str, Any], most: int = MOST_RANKS) -> Cells:
    """At most ``most`` rows; nodes, or blocks of nodes, where ranks are more."""
    ranks, per_node = document["ranks"], document["gpus_per_node"]
    if ranks <= most:
        step, noun, each, boundary = 1, "rank", 1, per_node if per_node < ranks else 0
    else:
        each = -(-document["nodes"] // most)
        step, boundary = per_node * each, 0
        noun = "node" if each == 1 else f"block of {each} nodes"
    found: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for pair in document["measured_pairs"]:
        found.setdefault((pair["source"] // step, pair["target"] // step), []).append(pair)
    cells = {place: _cell(pairs) for place, pairs in found.items()}
    return Cells(noun, -(-ranks // step), each, boundary, cells)


def _cell(pairs: list[Mapping[str, Any]]) -> Cell:
    if len(pairs) == 1:
        (pair,) = pairs
        rate = pair["bandwidth"]
        return Cell(rate, pair["latency"], pair["share"], rate, 1, pair["kind"])
    worst = min(pairs, key=lambda pair: float(pair["share"]))
    return Cell(
        statistics.median(pair["bandwidth"] for pair in pairs),
        statistics.median(pair["latency"] for pair in pairs),
        worst["share"],
        worst["bandwidth"],
        len(pairs),
        worst["kind"],
    )
