"""A step's memory over time as a picture: SVG, or a page with it that opens in a browser.

Drawn without a library: stacked areas are polygons, and what a mouse shows are titles of SVG. So the file
needs no script and no network, and a picture costs no dependency.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shardwright.report.memory import total
from shardwright.units import format_bytes

COLOURS = {
    "parameters": "#4e79a7",
    "optimizer": "#76b7b2",
    "gradients": "#59a14f",
    "gathered": "#edc949",
    "activations": "#f28e2c",
    "logits": "#e15759",
}
"""Kinds from the bottom up."""

PHASE_COLOURS = {
    "start": "#ffffff", "between": "#dddddd", "forward": "#9ecae1", "backward": "#3182bd",
    "optimizer": "#31a354",
}  # fmt: skip

WIDTH, HEIGHT, LEFT, TOP, STRIP, GAP = 1000, 300, 90, 50, 12, 60
"""Of a stage's panel in pixels: of the areas, what is left of and above them, of the strip of phases below,
and what is below that."""

TICKS = 4


def save_picture(document: Mapping[str, Any], path: Path) -> Path:
    """Write the document of ``memory`` as SVG, or as a page if the name ends in ``.html``; the path."""
    drawn = picture(document)
    if path.suffix == ".html":
        title = escape(f"{document['model']} {document['layout']}")
        drawn = f'<!doctype html>\n<meta charset="utf-8">\n<title>{title}</title>\n<body>\n{drawn}\n</body>\n'
    path.write_text(drawn, encoding="utf-8")
    return path


def picture(document: Mapping[str, Any]) -> str:
    """The document as SVG, a panel for each stage."""
    panel = TOP + HEIGHT + STRIP + GAP
    stages = document["stages"]
    width, height = LEFT + WIDTH + 20, 30 + panel * len(stages)
    head = escape(f"{document['model']}, {document['layout']}: memory of one step")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="15">{head}</text>',
    ]
    for place, stage in enumerate(stages):
        parts.append(f'<g transform="translate({LEFT},{30 + place * panel + TOP})">')
        parts += [*_axis(stage), *_areas(stage), *_phases(stage["timeline"]), *_peak(stage), *_legend(stage)]
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def _x(place: float, count: int) -> str:
    return f"{place * WIDTH / count:.1f}"


def _y(held: float, peak: int) -> str:
    return f"{HEIGHT * (1 - held / peak):.2f}"


def _axis(stage: Mapping[str, Any]) -> list[str]:
    peak, parts = stage["peak"], []
    for tick in range(TICKS + 1):
        held = peak * tick / TICKS
        y = _y(held, peak)
        parts.append(f'<line x1="0" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#eeeeee"/>')
        parts.append(f'<text x="-6" y="{y}" dy="4" text-anchor="end">{format_bytes(held)}</text>')
    return parts


def _areas(stage: Mapping[str, Any]) -> list[str]:
    """A polygon of steps for each kind, on top of those before."""
    timeline, peak, parts = stage["timeline"], stage["peak"], []
    low = [0] * len(timeline)
    for kind, colour in COLOURS.items():
        high = [below + sample["held"][kind] for below, sample in zip(low, timeline, strict=True)]
        if high != low:
            there, back = _steps(high, peak), reversed(_steps(low, peak))
            points = " ".join([*there, *back])
            parts.append(f'<polygon fill="{colour}" points="{points}"/>')
        low = high
    return parts


def _steps(heights: Sequence[int], peak: int) -> list[str]:
    count = len(heights)
    return [
        f"{_x(place + end, count)},{_y(height, peak)}"
        for place, height in enumerate(heights)
        for end in (0, 1)
    ]


def _phases(timeline: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parts of the step as a strip, and over each moment what it holds."""
    parts, count = [], len(timeline)
    for place, sample in enumerate(timeline):
        colour, wide = PHASE_COLOURS[sample["phase"]], f'x="{_x(place, count)}" width="{_x(1, count)}"'
        held = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sample["held"].items() if size)
        text = escape(f"{sample['phase']}, event {sample['event']}: {format_bytes(total(sample))}; {held}")
        parts.append(f'<rect {wide} y="{HEIGHT + 3}" height="{STRIP}" fill="{colour}"/>')
        parts.append(f'<rect {wide} y="0" height="{HEIGHT}" fill-opacity="0"><title>{text}</title></rect>')
    return parts


def _peak(stage: Mapping[str, Any]) -> list[str]:
    timeline = stage["timeline"]
    highest = max(range(len(timeline)), key=lambda place: total(timeline[place]))
    x = _x(highest + 0.5, len(timeline))
    text = (
        f"stage {stage['stage']}, rank {stage['rank']}: peak {format_bytes(stage['peak'])} "
        f"in {stage['peak_moment']}"
    )
    return [
        f'<line x1="{x}" x2="{x}" y1="-8" y2="{HEIGHT}" stroke="black" stroke-dasharray="3,3"/>',
        f'<text x="0" y="-28">{escape(text)}</text>',
    ]


def _legend(stage: Mapping[str, Any]) -> list[str]:
    parts, x, y = [], 0, HEIGHT + STRIP + 22
    kinds = [(COLOURS[kind], kind, size) for kind, size in stage["peak_held"].items() if size]
    entries = [(colour, f"{kind} {format_bytes(size)}") for colour, kind, size in kinds]
    entries += [(PHASE_COLOURS[phase], phase) for phase in ("forward", "backward", "optimizer", "between")]
    for colour, text in entries:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{y}">{escape(text)}</text>')
        x += 24 + 7 * len(text)
    return parts
