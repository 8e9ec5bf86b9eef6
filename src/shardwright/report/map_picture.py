"""The heat map of pairs as a picture: SVG, or a page with it that opens in a browser.

Drawn without a library, like the picture of memory: what a mouse shows are titles of SVG. Text and ground
follow the reader's light or dark scheme; the colours of cells are read on both.
"""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.report.heat_cells import Cell, Cells, cells_of
from shardwright.report.heat_colours import colour_at, ink_on, place_of
from shardwright.report.heat_map import SLOW, figure
from shardwright.units import format_bandwidth, format_time

SUFFIXES = (".svg", ".html")
"""Of files that can be written."""

MOST_ROWS = 64
"""Ranks, nodes or blocks of nodes that are drawn: more cells than that are no picture."""

SIDE, LARGEST, SMALLEST = 720, 48, 11
"""Of the map, and of one cell at most and at least [pixels]."""

LEFT, TOP, GAP, RIGHT = 80, 118, 5, 24
"""Margins, and the space between nodes [pixels]."""

READABLE = 30
"""Side of a cell from which a figure has room in it [pixels]."""

LABEL = 26
"""Pixels that a label of a row or column needs."""

MARK = "#d55e00"
"""Outline of slow cells: vermilion of the palette of Okabe and Ito, unlike any colour of the scale."""

STYLE = """
svg { background: #ffffff; } text { fill: #1a1a1a; } .faint { fill: #666666; } .none { fill: #e4e4e4; }
@media (prefers-color-scheme: dark) {
svg { background: #16181c; } text { fill: #ececec; } .faint { fill: #a0a0a0; } .none { fill: #33363c; } }
"""

LEGEND_WIDTH, LEGEND_STEPS = 240, 48


class Grid(NamedTuple):
    """Where cells are: ``side`` pixels each, a gap after every ``boundary`` of them."""

    side: int
    boundary: int

    def at(self, number: int) -> int:
        """Left or upper edge of a column or row."""
        return number * self.side + (GAP * (number // self.boundary) if self.boundary else 0)


def write_map_picture(document: Mapping[str, Any], path: Path) -> None:
    """Write the document of ``map`` as SVG, or as a page if the name ends in ``.html``."""
    drawn = map_picture(document)
    if path.suffix == ".html":
        title = escape(f"{document['ranks']} x {document['device']}: bandwidth between pairs")
        scheme = '<meta charset="utf-8">\n<meta name="color-scheme" content="light dark">'
        head = f"{scheme}\n<title>{title}</title>"
        page = '<body style="margin:0">'
        drawn = f"<!doctype html>\n{head}\n{page}\n{drawn}\n</body>\n"
    path.write_text(drawn, encoding="utf-8")


def map_picture(document: Mapping[str, Any]) -> str:
    """The heat map as SVG: sender a row, receiver a column."""
    cells = cells_of(document, MOST_ROWS)
    grid = Grid(min(max(SIDE // max(cells.size, 1), SMALLEST), LARGEST), cells.boundary)
    side = grid.at(cells.size - 1) + grid.side
    notes = _notes(document, cells)
    width, height = max(LEFT + side + RIGHT, 640), TOP + side + 84 + 18 * len(notes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f"<style>{STYLE}</style>",
        *_head(document, cells),
        f'<g transform="translate({LEFT},{TOP})">',
        *_labels(document, cells, grid),
        *_drawn(cells, grid),
        "</g>",
        f'<g transform="translate({LEFT},{TOP + side + 20})">',
        *_legend(cells),
        *(f'<text y="{58 + 18 * row}" class="faint">{escape(note)}</text>' for row, note in enumerate(notes)),
        "</g>",
    ]
    return "\n".join([*parts, "</svg>"])


def _head(document: Mapping[str, Any], cells: Cells) -> Iterator[str]:
    size = f"{document['nodes']:,} x {document['gpus_per_node']}"
    title = f"{document['ranks']:,} ranks, {size} {document['device']}"
    unit = "GB/s, " if cells.cells else "nothing was measured: "
    below = f"{unit}each {cells.noun} (row) to each (column)"
    if cells.noun != "rank":
        below += "; the median of their pairs"
    how = ", ".join(part for part in (document["source"], document["date"]) if part)
    yield f'<text x="16" y="26" font-size="17" font-weight="bold">{escape(title)}</text>'
    yield f'<text x="16" y="46">{escape(below)}</text>'
    yield f'<text x="16" y="64" class="faint">{escape(how)}</text>'


def _labels(document: Mapping[str, Any], cells: Cells, grid: Grid) -> Iterator[str]:
    """Numbers of rows and columns, as many as have room, and the names of nodes above and beside them."""
    step = max(1, -(-LABEL // grid.side))
    size = min(12, grid.side) if step == 1 else 11
    for number in range(0, cells.size, step):
        middle = grid.at(number) + grid.side / 2
        text = cells.label(number)
        yield f'<text x="-7" y="{middle + 4}" text-anchor="end" font-size="{size}">{text}</text>'
        yield f'<text x="{middle}" y="-7" text-anchor="middle" font-size="{size}">{text}</text>'
    if not cells.boundary:
        return
    hosts = document["hosts"]
    for node, first in enumerate(range(0, cells.size, cells.boundary)):
        last = min(first + cells.boundary, cells.size) - 1
        wide = grid.at(last) + grid.side - grid.at(first)
        name = f"node {node}" + (f" ({hosts[first]})" if first < len(hosts) else "")
        text = escape(name if 7 * len(name) <= wide else f"node {node}" if wide >= 44 else str(node))
        middle = grid.at(first) + wide / 2
        yield f'<text x="{middle}" y="-26" text-anchor="middle" class="faint">{text}</text>'
        turned = f'transform="translate(-40,{middle}) rotate(-90)"'
        yield f'<text {turned} text-anchor="middle" class="faint">{text}</text>'


def _drawn(cells: Cells, grid: Grid) -> Iterator[str]:
    low, high = cells.range
    marked = []
    for row in range(cells.size):
        for column in range(cells.size):
            cell = cells.cells.get((row, column))
            x, y, side = grid.at(column), grid.at(row), grid.side - 1
            box = f'x="{x}" y="{y}" width="{side}" height="{side}"'
            if cell is None:
                title = "itself" if row == column else "not measured"
                yield f'<rect {box} class="none"><title>{title}</title></rect>'
                continue
            place = place_of(cell.bandwidth, low, high)
            title = escape(_title(cells, row, column, cell))
            yield f'<rect {box} fill="{colour_at(place)}"><title>{title}</title></rect>'
            if side >= READABLE - 1:
                look = f'font-size="11" pointer-events="none" style="fill:{ink_on(place)}"'
                middle = f'x="{x + side / 2}" y="{y + side / 2 + 4}" text-anchor="middle"'
                yield f"<text {middle} {look}>{figure(cell.bandwidth / 1e9)}</text>"
            if cell.share < SLOW:
                inner = f'x="{x + 1}" y="{y + 1}" width="{side - 2}" height="{side - 2}"'
                marked.append(
                    f'<rect {inner} fill="none" stroke="{MARK}" stroke-width="{2.5 if side > 16 else 1.5}" '
                    'pointer-events="none"/>'
                )
    yield from marked


def _title(cells: Cells, row: int, column: int, cell: Cell) -> str:
    ends = f"{cells.noun} {cells.label(row)} to {cells.label(column)}"
    rate = f"{format_bandwidth(cell.bandwidth)}, small messages {format_time(cell.latency)}"
    if cell.pairs == 1:
        return f"{ends}: {rate}, {cell.share:.0%} of what is usual ({cell.kind})"
    worst = f"the slowest {format_bandwidth(cell.slowest)}, {cell.share:.0%} of what is usual ({cell.kind})"
    return f"{ends}: median of {cell.pairs} pairs {rate}; {worst}"


def _legend(cells: Cells) -> Iterator[str]:
    """The scale with its ends and middle, and what a mark and an empty cell mean."""
    low, high = cells.range
    wide = LEGEND_WIDTH / LEGEND_STEPS
    if cells.cells:
        for step in range(LEGEND_STEPS):
            colour = colour_at(step / (LEGEND_STEPS - 1))
            yield f'<rect x="{step * wide:.1f}" y="0" width="{wide + 0.5:.1f}" height="14" fill="{colour}"/>'
        for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
            rate = figure(low * (high / low) ** share / 1e9)
            x = share * LEGEND_WIDTH
            yield f'<text x="{x}" y="30" text-anchor="{anchor}">{rate} GB/s</text>'
    x = LEGEND_WIDTH + 24
    yield f'<rect x="{x}" y="1" width="12" height="12" fill="none" stroke="{MARK}" stroke-width="2.5"/>'
    worst = "a pair " if cells.noun != "rank" else ""
    yield f'<text x="{x + 18}" y="12">{worst}below {SLOW:.0%} of what is usual for its kind</text>'
    yield f'<rect x="{x}" y="20" width="13" height="13" class="none"/>'
    yield f'<text x="{x + 18}" y="31">not measured</text>'


def _notes(document: Mapping[str, Any], cells: Cells) -> list[str]:
    """What is usual of each kind of pair, and what was found."""
    notes = [
        f"{row['kind']}: usual {figure(row['usual'] / 1e9)} GB/s, slowest {figure(row['slowest'] / 1e9)}, "
        f"small messages {format_time(row['latency'])} ({row['measured']:,} measured)"
        for row in document["pair_kinds"]
    ]
    return notes + [_shortened(finding["summary"]) for finding in document["findings"][:6]]


def _shortened(text: str, most: int = 110) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
