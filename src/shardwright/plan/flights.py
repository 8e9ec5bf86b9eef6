"""What microbatches in flight keep on a pipeline rank besides the one at work, at the points of a step where
that and the gradients that are there may be most."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.plan.stages import Stage
from shardwright.plan.table import Floats


class Kept(NamedTuple):
    """Bytes of one microbatch on a rank: of its ``blocks``, the ``output`` of one stage, which waits for its
    gradient, what the ``head`` keeps, its ``logits``, and what ``waits`` for the gradients of weights; of the
    rank the whole ``gradients`` of its blocks, and by how much moments of two flights may differ besides: the
    ``slack`` of gradients that are there at one moment and not at another."""

    blocks: Floats
    output: Floats
    head: Floats
    logits: Floats
    waits: Floats
    gradients: Floats
    slack: Floats


class Flight(NamedTuple):
    """Bytes of the microbatches in flight besides the one at work, their ``logits`` apart, and the share of
    the blocks' gradients that is there by then."""

    name: str
    others: Floats
    logits: Floats
    past: Floats


NO_BLOCK = 1e-9
"""Share of the blocks' gradients when a stage has some that has no block: not 0, as before the first."""


class More(NamedTuple):
    """What a rank whose stages are unlike has in flight beyond what a mean block gives, at its three points
    and with a block, the head or a pass apart at work [3, 3, B]; minus infinity where there is no such
    moment; the same of ``reducing`` and ``pending`` [B]. ``blocks`` and ``reducing`` in bytes, of each token
    to begin with; outputs in numbers of a stage's. ``past``: the share of the rank's blocks in the stage that
    is the first to have gradients. ``most``: of a block in a pass for inputs, besides what it keeps, for each
    token; ``plain``: that one is not recomputed, in rows that recompute some."""

    blocks: Floats
    outputs: Floats
    past: Floats
    reducing: Floats
    reducing_outputs: Floats
    pending: Floats
    most: Floats
    plain: NDArray[np.bool_]

    def of_tokens(self, tokens: Floats) -> "More":
        """The same in bytes, of so many tokens."""
        return self._replace(blocks=self.blocks * tokens, reducing=self.reducing * tokens)


NOTHING_ELSE = Flight("alone", np.zeros(1), np.zeros(1), np.zeros(1))


def flights(stage: Stage, kept: Kept) -> list[Flight]:
    """The points of a rank that may be its fullest, ``first``, ``second`` and ``steady`` of ``FlightPoints``;
    those left out that hold less than another in every row."""
    first, steady = stage.flight.first, stage.flight.steady
    if (stage.stages == 1).all() and (steady == first).all():
        return [
            Flight(
                "most in flight",
                (first - 1) * kept.blocks + first * _outputs(stage, kept),
                np.zeros(1),
                np.ones(1),
            )
        ]
    found = _points(stage, kept)
    held = [_held(each, kept.gradients) for each in found]
    return [
        flight
        for flight, own in zip(found, held, strict=True)
        if not any((own + kept.slack < other).all() for other in held)
    ]


def _points(stage: Stage, kept: Kept) -> list[Flight]:
    outputs = _outputs(stage, kept)
    first, second, steady, heads = stage.flight[:4]
    points = (
        ("first backward pass", first, 0.0 * first, heads - 1),
        ("second backward pass", second, 1 / stage.stages, heads - 2),
        (
            "all stages have gradients",
            steady,
            stage.flight.past,
            np.where(stage.stages > 1, 0.0, heads - 2),
        ),
    )
    found = []
    for name, in_flight, past, heads_past in points:
        past_head = stage.head * np.maximum(heads_past, 0.0)
        others = (in_flight - 1) * kept.blocks + in_flight * outputs + past_head * kept.head
        found.append(Flight(name, others, past_head * kept.logits, past))
    return found


def flights_at(
    stage: Stage, kept: Kept, more: More | None
) -> tuple[Sequence[Flight], Sequence[Flight], Sequence[Flight]]:
    """``flights`` while a block, the head or one of two passes apart is at work: the same where the rank's
    stages are alike."""
    if more is None:
        alike = flights(stage, kept)
        return alike, alike, alike
    found = _points(stage, kept)
    found[1] = found[1]._replace(past=np.maximum(more.past, NO_BLOCK))
    beyond = more.blocks + more.outputs * kept.output
    of_place = (
        [flight._replace(others=flight.others + beyond[point, place]) for point, flight in enumerate(found)]
        for place in range(3)
    )
    at_block, at_head, apart = of_place
    return at_block, at_head, apart


def _outputs(stage: Stage, kept: Kept) -> Floats:
    """Of one microbatch, what stages of the rank hand on, but for what is another's input there."""
    return (stage.stages - stage.head - stage.flight.turn) * kept.output


def _held(flight: Flight, gradients: Floats) -> Floats:
    return np.asarray(flight.others + flight.logits + flight.past * gradients)


def fullest(found: Sequence[Flight], gradients: Floats, of_head: Floats | float = 0.0) -> Flight:
    """Row by row the one that holds most; ``of_head``: gradients that a first backward pass has not made by
    then."""
    best, *rest = found
    if not rest:
        return best
    most = _held(best, gradients) + np.where(best.past > 0, of_head, 0.0)
    for other in rest:
        held = _held(other, gradients) + np.where(other.past > 0, of_head, 0.0)
        more = held > most
        columns = (np.where(more, new, old) for new, old in zip(other[1:], best[1:], strict=True))
        best, most = Flight("most in flight", *columns), np.maximum(most, held)
    return best


class Tail(NamedTuple):
    """A point where no forward pass is left: what else is there, microbatches that wait for passes for
    weights (0 in rows without it), and the share of stages with gradients as such a pass made them."""

    flight: Flight
    waiting: Floats
    left: Floats
    inputs: bool  # a pass for inputs comes first


def tails(stage: Stage, kept: Kept) -> list[Tail]:
    """Where most passes for weights are left; where passes for inputs end; and, where nothing else was left,
    one pass for weights later."""
    held, waiting, each = stage.flight.tail_held, stage.flight.tail, 1 / stage.stages
    if not waiting.any():
        return []
    outputs = _outputs(stage, kept)
    found = []
    nothing_else = (waiting == held) & (waiting > each)
    left = stage.flight.tail_left
    for name, count, waits, made, inputs in (
        ("no forward pass left", held, waiting, 0.0 * left, True),
        ("last pass for inputs", waiting, np.where(left > 0, waiting, 0.0), left, True),
        ("one pass for weights less", held - each, np.where(nothing_else, waiting - each, 0.0), each, False),
    ):
        others = (count - 1) * kept.blocks + count * outputs
        found.append(Tail(Flight(name, others, np.zeros(1), np.ones(1)), waits, made, inputs))
    return found


def remaining(stage: Stage, kept: Kept, more: More | None) -> Floats:
    """Bytes of the microbatches in flight when the gradients of a rank's first chunk are reduced."""
    outputs = _outputs(stage, kept)
    left = stage.flight.reducing * (kept.blocks + outputs) + stage.flight.pending * kept.waits
    if more is None:
        return np.asarray(left)
    beyond = more.reducing + more.reducing_outputs * kept.output + more.pending * kept.waits
    return np.asarray(left + beyond)
