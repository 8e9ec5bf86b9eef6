"""What need not be executed: layers that repeat one another, and microbatches of the steady state.

Two shorter programs are executed, the second with one period of the layers and some microbatches more.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.check.order import short_pipeline
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.run.model import Part
from shardwright.run.pp import stage_parts

KEPT_PERIODS = 2
"""Periods of alike layers in the first program: where they begin and end, neighbours are others."""

LONGEST_PERIOD = 8
"""Layers of a period that is looked for: every 4th with a window, every 2nd with experts."""

STEADY_MICROBATCHES = 3
"""Microbatches of the first program without a pipeline: the first, one in the steady state, the last."""


class Program(NamedTuple):
    """What a rank executes: its stages, and its place in a layout."""

    layout: Layout
    rank: int
    parts: tuple[Part, ...]

    @property
    def pp_rank(self) -> int:
        """The rank's place in the pipeline."""
        return _places(self.layout, self.rank)["pp"]

    @property
    def layers(self) -> int:
        """Layers of all stages."""
        return sum(len([*part.layers]) for part in self.parts)

    @property
    def work(self) -> int:
        """Passes through a layer in a step, an end of the model counted as one."""
        ends = sum(int(part.first) + int(part.last) for part in self.parts)
        return (self.layers + ends) * self.layout.microbatches


class Pair(NamedTuple):
    """Two shorter programs. ``periods``: that the first lacks of each stage's layers. ``more``: microbatches
    that the second has more, ``lacking``: times ``more`` that the first lacks."""

    first: Program
    second: Program
    periods: int
    more: int
    lacking: int


def program_of(model: ModelSpec, layout: Layout, rank: int) -> Program:
    """All that ``rank`` executes."""
    place = _places(layout, rank)["pp"]
    return Program(layout, rank, tuple(part for _, part in stage_parts(layout, model, place)))


def shorter(model: ModelSpec, program: Program) -> Pair | None:
    """The pair with the least work, None if the program itself has less."""
    best = None
    for fewer, more, lacking in _microbatch_cuts(program):
        for first, second, periods in _layer_cuts(model, program):
            layouts = fewer[0], more[0]
            pair = Pair(
                Program(layouts[0], fewer[1], first),
                Program(layouts[1], more[1], second),
                periods,
                layouts[1].microbatches - layouts[0].microbatches,
                lacking,
            )
            work = pair.first.work + pair.second.work
            if (periods or lacking) and work < (program.work if best is None else best[0]):
                best = work, pair
    return None if best is None else best[1]


def _places(layout: Layout, rank: int) -> dict[str, int]:
    degrees = [getattr(layout, axis) for axis in layout.order]
    return dict(zip(layout.order, map(int, np.unravel_index(rank, degrees)), strict=True))


Placed = tuple[Layout, int]


def _microbatch_cuts(program: Program) -> Iterator[tuple[Placed, Placed, int]]:
    """Layouts with fewer microbatches, the rank in them, and how many times their difference lacks."""
    layout, rank = program.layout, program.rank
    yield (layout, rank), (layout, rank), 0
    if layout.pp == 1:
        few = STEADY_MICROBATCHES
        if layout.microbatches > few:
            first, second = (layout.model_copy(update={"microbatches": n}) for n in (few, few + 1))
            yield (first, rank), (second, rank), layout.microbatches - few
        return
    places = _places(layout, rank)
    short = short_pipeline(layout.schedule, layout.pp, layout.chunks, layout.microbatches, places["pp"])
    if short is None:
        return
    cut = {"pp": short.ranks, "stage_layers": (1,) * (short.ranks * layout.chunks)}
    first, second = (
        layout.model_copy(update=cut | {"microbatches": count}) for count in (short.microbatches, short.more)
    )
    places["pp"] = short.rank
    there = int(
        np.ravel_multi_index(
            [places[axis] for axis in layout.order], [getattr(first, axis) for axis in layout.order]
        )
    )
    lacking = (layout.microbatches - short.microbatches) // (short.more - short.microbatches)
    yield (first, there), (second, there), lacking


Parts = tuple[Part, ...]


def _layer_cuts(model: ModelSpec, program: Program) -> Iterator[tuple[Parts, Parts, int]]:
    """Stages with fewer layers, the same with a period more, and how many periods the first lacks."""
    yield program.parts, program.parts, 0
    runs = [_run([_kind(model, program.layout, layer) for layer in part.layers]) for part in program.parts]
    spare = min(repeats for _, _, repeats in runs) - KEPT_PERIODS
    if spare >= 2:
        yield (
            tuple(_without(part, run, spare) for part, run in zip(program.parts, runs, strict=True)),
            tuple(_without(part, run, spare - 1) for part, run in zip(program.parts, runs, strict=True)),
            spare,
        )


def _kind(model: ModelSpec, layout: Layout, layer: int) -> tuple[bool, ...]:
    """What layers of one kind have in common: all that decides what one holds and sends."""
    return (
        model.moe is not None and model.moe.covers(layer),
        layer % layout.recompute_every == 0,
        layer in model.full_attention_layers,
        layer in model.no_rope_layers,
    )


Run = tuple[int, int, int]
"""Place of the first layer, layers of a period, periods."""


def _run(kinds: Sequence[object]) -> Run:
    """The run that spares the most layers."""
    runs = [(0, 1, 1)]
    for period in range(1, min(LONGEST_PERIOD, len(kinds)) + 1):
        start = 0
        while start < len(kinds):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            runs.append((start, period, (end - start) // period))
            start = max(end - period + 1, start + 1)
    return max(runs, key=lambda run: (run[1] * (run[2] - KEPT_PERIODS - 1), -run[1]))


def _without(part: Part, run: Run, periods: int) -> Part:
    """A stage without so many periods of a run."""
    start, period, _ = run
    layers = [*part.layers]
    del layers[start : start + periods * period]
    return part._replace(layers=layers)
