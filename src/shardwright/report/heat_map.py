"""The heat map of pairs in a terminal: colours where it has them, figures or tenths in any case."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.style import Style
from rich.text import Text

from shardwright.report.heat_cells import Cell, Cells, cells_of
from shardwright.report.heat_colours import colour_at, ink_on, place_of
from shardwright.units import format_time

SLOW = 0.75
"""Share of what is usual for a kind of pair below which a cell is marked."""

FIGURE, TENTH = 5, 3
"""Characters of a cell with a figure, and of one with a digit."""

MARGIN = 5
"""Characters of a row's label."""


class HeatMap:
    """Pairs of a document of ``map`` as wide as there is room: sender a row, receiver a column."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - MARGIN
        whole = cells_of(self.document)
        cells = whole if _width(whole, TENTH) <= room else cells_of(self.document, room // TENTH)
        figures = _width(cells, FIGURE) <= room
        yield heat_map(cells, figures=figures)
        slowest = min(cells.cells.values(), key=lambda cell: cell.share)
        latencies = [cell.latency for cell in cells.cells.values()]
        yield Text(
            f"of {sum(cell.pairs for cell in cells.cells.values()):,} measured directions the lowest is "
            f"{slowest.share:.0%} of what is usual for its kind ({slowest.kind}: "
            f"{figure(slowest.slowest / 1e9)} GB/s); small messages take {format_time(min(latencies))} to "
            f"{format_time(max(latencies))}"
        )


def _width(cells: Cells, width: int) -> int:
    gaps = (cells.size - 1) // cells.boundary if cells.boundary else 0
    return cells.size * width + 2 * gaps


def heat_map(cells: Cells, *, figures: bool) -> RenderableType:
    """One line a row; ``figures`` in GB/s, or the share of what is usual in tenths."""
    width = FIGURE if figures else TENTH
    low, high = cells.range
    unit = "GB/s" if figures else "in tenths of what is usual for the kind of pair (9: from 90 %)"
    what = f"bandwidth from each {cells.noun} (row) to each (column), {unit}"
    made = Text(" " * MARGIN, no_wrap=True)
    for column in range(cells.size):
        made.append(_gap(cells, column, "  "))
        made.append(f"{cells.label(column):>{width - 1}} ", style="dim")
    for row in range(cells.size):
        if cells.boundary and row and row % cells.boundary == 0:
            made.append(f"\n{' ' * MARGIN}{_rule(cells, width)}", style="dim")
        made.append(f"\n{cells.label(row):>{MARGIN - 1}} ", style="dim")
        for column in range(cells.size):
            made.append(_gap(cells, column, "| "), style="dim")
            cell = cells.cells.get((row, column))
            made.append(*_drawn(cell, row == column, width, figures=figures, low=low, high=high))
    return Group(Text(what, style="bold"), made, _legend(cells, low, high))


def _gap(cells: Cells, column: int, text: str) -> str:
    return text if cells.boundary and column and column % cells.boundary == 0 else ""


def _rule(cells: Cells, width: int) -> str:
    per_node = cells.boundary * width
    return "+-".join("-" * per_node for _ in range(-(-cells.size // cells.boundary)))[: _width(cells, width)]


def _drawn(
    cell: Cell | None, itself: bool, width: int, *, figures: bool, low: float, high: float
) -> tuple[str, Style]:
    if cell is None:
        return f"{'-' if itself else '?':>{width - 1}} ", Style(dim=True)
    slow = cell.share < SLOW
    said = figure(cell.bandwidth / 1e9) if figures else str(min(int(cell.share * 10 + 1e-9), 9))
    place = place_of(cell.bandwidth, low, high)
    style = Style(color=ink_on(place), bgcolor=colour_at(place), bold=slow)
    return f"{said:>{width - 1}}{'!' if slow else ' '}", style


def figure(gigabytes: float) -> str:
    """Three digits or so in four characters."""
    if gigabytes >= 99.95:
        return f"{gigabytes:.0f}"
    return f"{gigabytes:.1f}" if gigabytes >= 9.95 else f"{gigabytes:.2f}"


def _legend(cells: Cells, low: float, high: float) -> Text:
    made = Text(" " * MARGIN)
    for step in range(9):
        made.append(" ", Style(bgcolor=colour_at(step / 8)))
    made.append(f" {figure(low / 1e9)} to {figure(high / 1e9)} GB/s;  ")
    made.append(f"! below {SLOW:.0%} of what is usual, ? not measured")
    if cells.noun != "rank":
        made.append("; colours and figures are of the median pair, ! and tenths of the worst")
    return made
