"""Predicted against measured as an SVG, both axes logarithmic, with the band of a factor 1.1.

shardwright accuracy RUNS.csv --json > accuracy.json
python scripts/plot_accuracy.py accuracy.json step_time docs/accuracy_step_time.svg
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

SIDE, MARGIN, BAND = 520, 60, 1.1
UNITS = {"step_time": ("step time [s]", 1.0), "memory": ("peak memory [GiB]", 2.0**30)}


def main() -> None:
    """Read a document, write a plot of one quantity."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("quantity", choices=list(UNITS))
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    title, unit = UNITS[options.quantity]
    rows = json.loads(options.document.read_text(encoding="utf-8"))["rows"]
    points = [
        (row["measured"] / unit, row["predicted"] / unit)
        for row in rows
        if row["quantity"] == options.quantity
    ]
    options.output.write_text("\n".join(drawing(points, title)) + "\n", encoding="utf-8")


def drawing(points: list[tuple[float, float]], title: str) -> Iterator[str]:
    """Lines of the SVG."""
    values = [value for point in points for value in point]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def at(value: float) -> float:
        return MARGIN + (math.log10(value) - low) / (high - low) * (SIDE - 2 * MARGIN)

    def line(x1: float, y1: float, x2: float, y2: float, colour: str, dashed: bool = False) -> str:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        ends = f'x1="{x1:.1f}" y1="{SIDE - y1:.1f}" x2="{x2:.1f}" y2="{SIDE - y2:.1f}"'
        return f'<line {ends} stroke="{colour}"{dash}/>'

    def text(x: float, y: float, words: str, turn: str = "") -> str:
        return (
            f'<text x="{x:.1f}" y="{SIDE - y:.1f}" font-size="12" text-anchor="middle"{turn}>{words}</text>'
        )

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE} {SIDE}" font-family="sans-serif">'
    yield f'<rect width="{SIDE}" height="{SIDE}" fill="white"/>'
    for power in range(low, high + 1):
        place = at(10.0**power)
        yield line(place, MARGIN, place, SIDE - MARGIN, "#ddd")
        yield line(MARGIN, place, SIDE - MARGIN, place, "#ddd")
        yield text(place, MARGIN - 18, f"{10.0**power:g}")
        yield text(MARGIN - 22, place - 4, f"{10.0**power:g}")
    first, last = 10.0**low, 10.0**high
    yield line(at(first), at(first), at(last), at(last), "#444")
    yield line(at(first), at(first * BAND), at(last / BAND), at(last), "#999", True)
    yield line(at(first * BAND), at(first), at(last), at(last / BAND), "#999", True)
    for measured, predicted in points:
        place = f'cx="{at(measured):.1f}" cy="{SIDE - at(predicted):.1f}"'
        yield f'<circle {place} r="2.2" fill="#1f77b4" fill-opacity="0.5"/>'
    yield text(SIDE / 2, 14, f"measured {title}; dashed: a factor {BAND} either way")
    yield text(16, SIDE / 2, f"predicted {title}", f' transform="rotate(-90 16 {SIDE / 2})"')
    yield "</svg>"


if __name__ == "__main__":
    main()
