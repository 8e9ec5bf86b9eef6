"""Constants of a link from measured times: what plan/collectives.py needs where no curve says the time.

A time is start + hops x latency + moved / bandwidth + filling x ramp, the last growing with the root of the
size. n: ranks of a group. S: payload [B].
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import ceil, log2, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.bandwidth_map import Curve
from shardwright.cluster import Link
from shardwright.plan.collectives import Crossing, Route, collective_time
from shardwright.units import MiB, significant

Floats = NDArray[np.float64]

LARGE = MiB
"""From here on NCCL's rings send large messages, at full bandwidth; what is smaller it sends otherwise."""

ROUNDS: Mapping[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Of a ring. The others go one hop."""


FITTED = ("bandwidth", "latency", "small_latency", "ramp")

MOST_START = 0.9
"""Of the shortest time measured, what a launch may be: the device's file may be of another machine."""

ITERATIONS, NUDGE = 12, 1e-3


class Point(NamedTuple):
    """Time [s] of a payload [B] among so many ranks."""

    collective: str
    ranks: int
    size: int
    time: float


class FittedLink(NamedTuple):
    """A link, and the median of |predicted / measured - 1| over the points it was fitted to."""

    link: Link
    error: float


def fit_link(curves: Sequence[Curve], base: Link, rings_alone: bool, one_per_node: bool) -> FittedLink | None:
    """The link that all ranks of ``curves`` use, at once, and no other; None: too few points.

    Errors are weighted alike at all sizes. What a launch takes, ``base`` says: times of groups of one size
    cannot tell it from hops. ``rings_alone``: gloo, whose times are sums of these constants; NCCL's are of
    the cheapest of several algorithms, for which the sums are where to begin.
    ``one_per_node``: whether groups lie so. What LL128 does is in the others, fitted without it.
    """
    points = [
        Point(curve.collective, curve.ranks, size, time)
        for curve in curves
        for size, time in zip(curve.sizes, curve.times, strict=True)
    ]
    large = [point for point in points if rings_alone or point.size >= LARGE]
    if len({point.size for point in large}) < 2:
        return None
    start = min(base.start, MOST_START * min(point.time for point in points))
    times = np.array([point.time for point in large])
    rows = np.array([_row(point) for point in large])
    latency, inverse, ramp = _least_squares(rows / times[:, None], 1 - start / times)
    if not inverse:
        return None
    link = Link.checked(
        {
            "bandwidth": 1 / inverse,
            "latency": latency or base.latency,
            "small_latency": (latency or base.latency) if rings_alone else _small_latency(points, start),
            "start": start,
            "ramp": ramp,
            "switch_bandwidth": _switches(points, base, start),
        }
    )
    if not rings_alone:
        link = _nearest(link, points, one_per_node)
    errors = np.abs(np.expm1(_log_errors(link, points, rings_alone, one_per_node)))
    rounded = {name: significant(value) for name, value in link.model_dump().items()}
    return FittedLink(Link.checked(rounded), float(np.median(errors)))


def _log_errors(link: Link, points: Sequence[Point], rings_alone: bool, one_per_node: bool) -> Floats:
    """ln(predicted / measured) of the points, as a plan predicts."""
    errors = np.empty(len(points))
    for n in {point.ranks for point in points}:
        one, all_ = np.array([1]), np.array([n])
        crossing = Crossing(all_, one, one, all_, link, link.bandwidth, shared=False)
        route = Route(all_, (crossing,), np.array([one_per_node]), rings_alone)
        for i, point in enumerate(points):
            if point.ranks == n:
                errors[i] = collective_time(point.collective, point.size, 1, route)[0]
    return np.asarray(np.log(errors / np.array([point.time for point in points])))


def _nearest(link: Link, points: Sequence[Point], one_per_node: bool) -> Link:
    """The link near ``link`` with the least squares of relative errors (Levenberg and Marquardt, constants by
    their logarithms)."""
    names = [name for name in FITTED if getattr(link, name) > 0]
    at = np.log([getattr(link, name) for name in names])

    def errors(place: Floats) -> Floats:
        changed = dict(zip(names, np.exp(place), strict=True))
        return _log_errors(link.model_copy(update=changed), points, False, one_per_node)

    found, damping = errors(at), 1e-2
    for _ in range(ITERATIONS):
        slopes = np.stack([(errors(at + step) - found) / NUDGE for step in NUDGE * np.eye(len(at))], axis=1)
        square = slopes.T @ slopes
        move = np.linalg.solve(square + damping * np.eye(len(at)), -slopes.T @ found)
        new = errors(at + move)
        if new @ new < found @ found:
            at, found, damping = at + move, new, damping / 5
        else:
            damping *= 5
    return link.model_copy(update=dict(zip(names, map(float, np.exp(at)), strict=True)))


def _row(point: Point) -> tuple[float, float, float]:
    """What a hop, a byte and the filling of channels count in one call, besides the launch."""
    n, size = point.ranks, point.size
    rounds = ROUNDS.get(point.collective)
    if rounds is None:
        return 1.0, size * (1 - 1 / n if point.collective == "all_to_all" else 1.0), 0.0
    return rounds * (n - 1), rounds * (1 - 1 / n) * size, rounds / 2 * sqrt(size / MiB)


def _least_squares(rows: Floats, sums: Floats) -> Floats:
    """Non-negative weights of the columns for which the rows come nearest to ``sums``: of three columns all
    subsets can be tried."""
    best, least = np.zeros(rows.shape[1]), float("inf")
    for count in range(1, rows.shape[1] + 1):
        for chosen in combinations(range(rows.shape[1]), count):
            part = rows[:, chosen]
            weights = np.linalg.lstsq(part, sums, rcond=None)[0]
            left = float(np.sum((part @ weights - sums) ** 2))
            if np.all(weights >= 0) and left < least:
                best, least = np.zeros(rows.shape[1]), left
                best[list(chosen)] = weights
    return best


def _small_latency(points: Sequence[Point], start: float) -> float:
    """Of a hop of the smallest messages, by the way that has the fewest hops."""
    least = min(point.size for point in points)
    found = [(point.time - start) / _fewest_hops(point) for point in points if point.size <= 4 * least]
    return float(np.median(found))


def _fewest_hops(point: Point) -> int:
    rounds, n = ROUNDS.get(point.collective), point.ranks
    if rounds is None:
        return 1
    return min(rounds * (n - 1), 2 * ceil(log2(n))) if rounds == 2 else n - 1


def _switches(points: Sequence[Point], base: Link, start: float) -> float:
    """Bandwidth at which the switches of ``base``, if it has such, added the largest all-reduce [B/s]."""
    sums = [point for point in points if point.collective == "all_reduce" and point.ranks > 2]
    if not base.switch_bandwidth or not sums:
        return 0.0
    largest = max(sums, key=lambda point: (point.ranks, point.size))
    return (1 + 1 / largest.ranks) * largest.size / (largest.time - start)
