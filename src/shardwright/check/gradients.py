"""Gradients of step 1 of two runs, parameter by parameter; and what each run shows by itself."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardwright.check.evidence import Apart, ParameterEvidence, RunEvidence, Tolerance, relative
from shardwright.check.gathered import Array, Gathered, Whole, largest
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.params import parameter_table
from shardwright.run.probe import signs, sketch

LAYER = re.compile(r"\.(\d+)\.")

SCALE_FLOOR = 1e-3
"""Of the largest entry of all gradients: a smaller one is not judged by itself alone, for its rounding comes
from larger numbers that cancel. At most this, and no more than rounding asks for."""

EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 0.0, "fp8": 0.0}
"""Of the type gradients are computed in; 0 turns the floor off, where the tolerance is wide as it is."""

SAME_START = 1e-10
"""Relative difference of two sums over the same initial weights, added up in another order."""


class Pair(NamedTuple):
    """One parameter in two runs, its numbers before they are set in relation."""

    name: str
    found: Whole
    expected: Whole
    distance: float
    largest: float
    ratio: float | None
    residual: float | None


def compare(
    found: Gathered, expected: Gathered, spec: ModelSpec, precision: str, tolerance: Tolerance
) -> tuple[ParameterEvidence, ...]:
    """Every parameter of the ``found`` run beside the ``expected`` one; one at a time is in memory."""
    roles = {tensor.name: tensor.role for tensor in parameter_table(spec).tensors()}
    pairs = [_pair(name, found, expected) for name in found.names]
    top = max((pair.largest for pair in pairs), default=0.0)
    floor = scale_floor(precision, tolerance) * top
    return tuple(_evidence(pair, roles[pair.name], floor) for pair in pairs)


def scale_floor(precision: str, tolerance: Tolerance) -> float:
    """Share of the largest entry of all gradients that no parameter is judged below."""
    return min(8 * EPSILON[precision] / tolerance.gradient, SCALE_FLOOR)


def _pair(name: str, found: Gathered, expected: Gathered) -> Pair:
    left, right = found.whole(name), expected.whole(name)
    if left.gradient is None or right.gradient is None:
        kept = Pair(name, left, right, float("inf"), 0.0, None, None)
    else:
        ratio, residual = _factor(left.gradient, right.gradient)
        biggest = max(largest(left.gradient), largest(right.gradient))
        kept = Pair(name, left, right, largest(left.gradient - right.gradient), biggest, ratio, residual)
    return kept._replace(found=_without_numbers(left), expected=_without_numbers(right))


def _without_numbers(whole: Whole) -> Whole:
    """Without the array, so that only one parameter's is kept at a time."""
    return whole if whole.gradient is None else whole._replace(gradient=np.empty(0))


def _factor(found: Array, expected: Array) -> tuple[float | None, float | None]:
    """The factor on ``expected`` nearest to ``found``, and the share of ``found`` that it leaves."""
    square, size = float(np.vdot(expected, expected)), float(np.linalg.norm(found))
    if not square or not np.isfinite(square) or not np.isfinite(size):
        return None, None
    ratio = float(np.vdot(expected, found)) / square
    if not size:
        return 0.0, 0.0
    return ratio, float(np.linalg.norm(found - ratio * expected)) / size


def _evidence(pair: Pair, role: str, floor: float) -> ParameterEvidence:
    layer = LAYER.search(pair.name)
    scale = max(pair.largest, floor)
    squares = pair.found.start[1], pair.expected.start[1]
    return ParameterEvidence(
        name=pair.name,
        role=role,
        layer=None if layer is None else int(layer[1]),
        stage=pair.found.stage,
        axes=pair.found.axes,
        difference=pair.distance / scale if scale else 0.0 if pair.distance == 0 else float("inf"),
        ratio=pair.ratio,
        residual=pair.residual,
        missing=pair.found.gradient is None or pair.expected.gradient is None,
        other_start=relative(*squares) > SAME_START
        or abs(pair.found.start[0] - pair.expected.start[0]) > SAME_START * max(1.0, squares[0]),
    )


def run_evidence(gathered: Gathered, job: Job, tolerance: Tolerance) -> RunEvidence:
    """What one run shows by itself: its numbers, its degrees, and where its ranks disagree."""
    layout, ranks = gathered.run.layout, gathered.run.ranks
    squares: dict[int, float] = defaultdict(float)
    tied, top = 0.0, 0.0
    apart: list[tuple[str, Whole, float]] = []
    for name in gathered.names:
        whole = gathered.whole(name)
        if whole.gradient is None:
            continue
        square = float(np.square(whole.gradient).sum())
        squares[whole.stage] += square
        biggest = largest(whole.gradient)
        top = max(top, biggest)
        if whole.apart:
            apart.append((name, _without_numbers(whole), biggest))
        if gathered.copies(name) > 1:
            tied = square**0.5
    degrees = {axis: getattr(layout, axis) for axis in (*layout.order, "ep", "microbatches", "micro_batch")}
    floor = scale_floor(job.precision, tolerance) * top
    first = [rank for rank in ranks if not any(rank.coordinates.get(axis) for axis in ("pp", "cp", "tp"))]
    return RunEvidence(
        degrees=degrees,
        losses=tuple(ranks[0].losses),
        norms=tuple(ranks[0].norms),
        tokens=sum(rank.counted for rank in first),
        divisor=ranks[0].divisor,
        digest=sum(rank.digest for rank in first),
        positions=job.tokens_per_step,
        true_norm=sum(squares.values()) ** 0.5,
        stage_norms=tuple(squares[stage] ** 0.5 for stage in sorted(squares)),
        rank_norm=gathered.rank_norm() if len(ranks) > 1 else 0.0,
        tied_norm=tied,
        apart=tuple(
            Apart(
                name,
                whole.apart / max(biggest, floor) if biggest or floor else float("inf"),
                whole.apart_axes,
            )
            for name, whole, biggest in apart
        ),
        ranks_differ=(
            max(relative(rank.losses[0], ranks[0].losses[0]) for rank in ranks),
            max(relative(rank.norms[0], ranks[0].norms[0]) for rank in ranks),
        ),
    )


def sketches(gathered: Gathered, width: int) -> Mapping[str, Array]:
    """A sketch of every gradient of a run; none of those that are missing."""
    found = {}
    for name in gathered.names:
        gradient = gathered.whole(name).gradient
        if gradient is not None:
            found[name] = sketch(gradient, signs(name, gradient.size), width)
    return found
