"""Two curves on one grid of characters."""

import math
from collections.abc import Sequence
from itertools import pairwise

FLAT = 1e-6
"""Share of the largest value that a chart must span; what spans less is rounding, and drawn as one line."""

BOTH, BETWEEN = "=", "\u00b7"


def overlay(
    a: Sequence[float | None], b: Sequence[float | None], width: int = 60, height: int = 8
) -> list[str]:
    """Lines of a chart: A and B at each step, ``=`` where both are in one place, dots between steps.

    What is no number is left out. The left margin has the largest and the smallest value.
    """
    values = [value for value in (*a, *b) if value is not None and math.isfinite(value)]
    if not values:
        return ["no finite values"]
    low, high = min(values), max(values)
    grid = [[" "] * width for _ in range(height)]
    count = max(len(a), len(b))

    def row(value: float) -> int:
        share = (high - value) / (high - low) if high - low > FLAT * max(abs(high), abs(low)) else 0.5
        return round(share * (height - 1))

    def column(step: float) -> int:
        return round(step / max(count - 1, 1) * (width - 1))

    for series in (a, b):
        for i, (first, second) in enumerate(pairwise(series)):
            if first is None or second is None:
                continue
            for at in range(column(i) + 1, column(i + 1)):
                share = (at - column(i)) / (column(i + 1) - column(i))
                grid[row(first + share * (second - first))][at] = BETWEEN
    for name, series in (("A", a), ("B", b)):
        for i, value in enumerate(series):
            if value is not None and math.isfinite(value):
                place = grid[row(value)]
                place[column(i)] = BOTH if place[column(i)] not in (" ", BETWEEN, name) else name
    labels = [f"{high:.6g}", *[""] * (height - 2), f"{low:.6g}"]
    margin = max(map(len, labels))
    return [f"{label:>{margin}} {''.join(line)}".rstrip() for label, line in zip(labels, grid, strict=True)]
