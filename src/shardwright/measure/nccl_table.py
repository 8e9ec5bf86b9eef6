"""A table of nccl-tests as it was printed: numbers with the precision of their digits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.measure.table_context import Around

WIDTHS: Mapping[str, int] = {
    **dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16", "float16", "bf16", "fp16"), 2),
    **dict.fromkeys(("int32", "uint32", "float", "int", "float32", "fp32"), 4),
    **dict.fromkeys(("int64", "uint64", "double", "float64", "fp64"), 8),
}
"""Bytes of an element by the names that the tools print."""


class Printed(NamedTuple):
    """A number in SI units, and half a unit of its last printed digit."""

    value: float
    half: float

    @property
    def low(self) -> float:
        """Least that is printed so."""
        return max(self.value - self.half, 0.0)

    @property
    def high(self) -> float:
        """Most that is printed so."""
        return self.value + self.half


class Measured(NamedTuple):
    """One run at one size: time [s], bandwidths [B/s], wrong elements (None: not checked)."""

    time: Printed
    algbw: Printed
    busbw: Printed
    wrong: int | None


class Row(NamedTuple):
    """One line of a table; ``size`` [B]; ``root`` None: no such column; a half that is absent is None."""

    line: int
    text: str
    size: int
    elements: int
    type: str
    redop: str
    root: int | None
    out_of_place: Measured | None
    in_place: Measured | None

    @property
    def measured(self) -> Measured | None:
        """Out of place, or what there is."""
        return self.out_of_place or self.in_place

    @property
    def halves(self) -> Iterator[tuple[str, Measured]]:
        """Those that are there, with their names."""
        for name, half in (("out-of-place", self.out_of_place), ("in-place", self.in_place)):
            if half is not None:
                yield name, half


@dataclass(frozen=True)
class Table:
    """Rows of one run in a file; ``average``: the bus bandwidth it prints at its end [B/s]."""

    name: str
    rows: tuple[Row, ...]
    around: Around
    average: float | None = None
    out_of_bounds: int = 0

    @property
    def line(self) -> int:
        """Of its first row."""
        return self.rows[0].line
