"""A step as a picture in text: a pipeline's ranks against time, or without one the parts of the step."""

import textwrap

import numpy as np

from shardwright.layout import Layout
from shardwright.plan.pipeline import pipeline_timeline
from shardwright.plan.schedule import FORWARD, SCHEDULES, WEIGHT, why_not
from shardwright.plan.simulate import Timeline
from shardwright.plan.table import Floats
from shardwright.planfile import Plan
from shardwright.units import format_time

WIDTH = 70
"""Characters for the time of a step: with a rank's name before it, a line fits a terminal of 80."""

MOST_RANKS = 16
"""Ranks of a pipeline that are drawn: of more, the first and the last."""

ROUNDS = 4
"""Microbatches that are drawn at most, in rounds of as many as there are ranks: what is left out between
repeats itself."""

SHOWN_AT_ONCE = 2 / 3
"""Of a step: where its ends and a period are more, the whole is drawn."""

GAP = "  ~  "
"""Between parts of a picture whose time in between is left out."""


def pipeline_text(plan: Plan) -> str:
    """The pipeline's ranks against time: warm-up, one steady period and cool-down of a long step."""
    layout = _drawn(plan.layout)
    line = pipeline_timeline(plan.model, plan.job, plan.cluster, layout)
    windows = _windows(line)
    room = WIDTH - len(GAP) * (len(windows) - 1)
    column = sum(end - start for start, end in windows) / room  # seconds
    counts = _shared_out([end - start for start, end in windows], room)
    shown = _shown_ranks(layout.pp)
    name = len(f"rank {layout.pp - 1} ")
    lines = []
    for place, rank in enumerate(shown):
        if place and rank != shown[place - 1] + 1:
            lines.append(f"{'...':<{name}}")
        parts = [
            _drawn_rank(line, rank, start, end, count)
            for (start, end), count in zip(windows, counts, strict=True)
        ]
        lines.append(f"{f'rank {rank}':<{name}}{GAP.join(parts)}".rstrip())
    lines += textwrap.wrap(f"a character is {format_time(column)}; {_legend(line)}", WIDTH + name)
    if len(windows) > 1:
        lines.append(
            f"~ left out: the rest of {plan.layout.microbatches} microbatches, which repeats the middle"
        )
    elif layout.microbatches < plan.layout.microbatches:
        drawn = f"{layout.microbatches} of {plan.layout.microbatches} microbatches"
        lines.append(f"drawn with {drawn}: those left out repeat what is shown")
    return "\n".join(lines)


def parts_text(parts: dict[str, float]) -> str:
    """Parts of a step [s] as one bar, each by its first letter, in the order given."""
    counts = _shared_out(list(parts.values()), WIDTH)
    drawn = "".join(name[0].upper() * count for name, count in zip(parts, counts, strict=True))
    whole = sum(parts.values())
    legend = ", ".join(f"{name[0].upper()} {name} {time / whole:.1%}" for name, time in parts.items() if time)
    return "\n".join([f"step  {drawn}", *textwrap.wrap(legend, WIDTH + len("step  "))])


def _drawn(layout: Layout) -> Layout:
    """The layout with no more microbatches than it takes to see how they repeat."""
    row = SCHEDULES[layout.schedule]
    unit = layout.pp * row.pipelines
    few = layout.microbatches % unit + ROUNDS * unit
    if few >= layout.microbatches or why_not(layout.schedule, layout.pp, layout.chunks, few):
        return layout
    return layout.model_copy(update={"microbatches": few})


def _windows(line: Timeline) -> list[tuple[float, float]]:
    """Warm-up until the first rank's first backward is through, one period in the middle, and cool-down from
    its last forward; the whole where that is not much less."""
    order, start, end = line.graph.order, line.start, line.end
    first = slice(int(order.starts[0]), int(order.starts[1]))
    kind, begins, ends = order.kind[first], start[first], end[first]
    whole = float(end.max())
    filled = float(ends[kind != FORWARD].min())
    emptying = float(begins[kind == FORWARD].max())
    unit = order.ranks if SCHEDULES[order.schedule].equal_rounds else 1
    period = float(line.busy.max()) * unit / (order.microbatches * order.pipelines)
    if filled + period + (whole - emptying) > SHOWN_AT_ONCE * whole:
        return [(0.0, whole)]
    middle = (filled + emptying - period) / 2
    return [(0.0, filled), (middle, middle + period), (emptying, whole)]


def _shared_out(parts: list[float], room: int) -> list[int]:
    """Whole characters for parts, in proportion: what rounding leaves goes to the largest remainders."""
    exact = room * np.array(parts) / sum(parts)
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: room - int(counts.sum())]] += 1
    return [int(count) for count in counts]


def _shown_ranks(ranks: int) -> list[int]:
    half = MOST_RANKS // 2
    return list(range(ranks)) if ranks <= MOST_RANKS else [*range(half), *range(ranks - half, ranks)]


def _drawn_rank(line: Timeline, rank: int, start: float, end: float, count: int) -> str:
    """What a rank does in the middle of each of ``count`` equal parts of a window."""
    order = line.graph.order
    rows = slice(int(order.starts[rank]), int(order.starts[rank + 1]))
    begins, ends = line.start[rows], line.end[rows]
    middles: Floats = start + (np.arange(count) + 0.5) * (end - start) / count
    row = np.searchsorted(begins, middles, side="right") - 1
    letters = _letters(line)[rows]
    return "".join(
        letters[at] if at >= 0 and middle < ends[at] else "." for at, middle in zip(row, middles, strict=True)
    )


def _letters(line: Timeline) -> list[str]:
    """One letter a row of the order: small for stages of a rank after its first, X for a fused pair."""
    order = line.graph.order
    letter = np.where(order.kind == FORWARD, "F", np.where(order.kind == WEIGHT, "W", "B"))
    later = order.stage % order.model_stages >= order.ranks
    fused = order.fused | np.concatenate([[False], order.fused[:-1]])
    letter = np.where(later, np.char.lower(letter), letter)
    return [str(each) for each in np.where(fused, "X", letter)]


def _legend(line: Timeline) -> str:
    letters = set(_letters(line))
    texts = {"W": "W weight gradients", "X": "X a forward and a backward as one"}
    said = ["F forward", "B backward", *(text for letter, text in texts.items() if letter in letters)]
    if any(letter.islower() for letter in letters):
        said.append("small letters a later stage of the rank")
    return ", ".join([*said, ". idle"])
