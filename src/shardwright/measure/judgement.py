"""What comes of holding a table of nccl-tests against its own definition, and the definition.

algbw = size / time; busbw = algbw x factor(n), n ranks: 2(n-1)/n of an all-reduce, (n-1)/n of all-gather,
reduce-scatter and all-to-all, 1 of the others. Sizes are whole tensors: count x width, x n of those that
gather or scatter.

Source: NVIDIA/nccl-tests doc/PERFORMANCE.md.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.measure.nccl_table import Row, Table

IMPRECISE = 0.01
"""Share by which numbers may miss one another and be taken for rounded."""

SPLIT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Collectives in which a rank's count is one part of n."""

What = Literal["size_time", "factor", "impossible_factor", "wrong_unit", "count", "wrong_results", "ranks"]


class Fault(NamedTuple):
    """A row that contradicts its definition, or says itself that results were wrong."""

    line: int
    what: What
    text: str


class Remark(NamedTuple):
    """Something accepted that wants to be said; ``line`` None: of the whole table."""

    line: int | None
    what: Literal["rounded", "old_algbw", "single_rank", "thinned", "ranks", "not_checked"]
    text: str


@dataclass(frozen=True)
class Judgement:
    """A table with what is known of it: ``collective`` empty, ``ranks`` and ``factor`` None where not known.

    ``rows`` are those that contradict nothing; ``old_algbw``: algbw counts what a rank receives only.
    """

    table: Table
    collective: str
    ranks: int | None
    factor: float | None
    rows: tuple[Row, ...]
    faults: tuple[Fault, ...]
    remarks: tuple[Remark, ...]
    old_algbw: bool = False

    @property
    def nodes(self) -> int | None:
        """Nodes that its ranks are on, where the text says so."""
        return self.table.around.nodes


class Band(NamedTuple):
    """Numbers between two."""

    low: float
    high: float

    def times(self, factor: float) -> "Band":
        """All of them multiplied."""
        return Band(self.low * factor, self.high * factor)

    def misses(self, other: "Band") -> float:
        """Relative gap to another band; 0 if they meet."""
        gap = max(self.low - other.high, other.low - self.high, 0.0)
        return gap / max(min(self.high, other.high), 1e-30) if gap else 0.0


def bus_factor(collective: str, ranks: int) -> float:
    """busbw / algbw of a collective of so many ranks; 0 of a single one, which moves nothing."""
    if ranks == 1:
        return 0.0
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in SPLIT else 1.0
