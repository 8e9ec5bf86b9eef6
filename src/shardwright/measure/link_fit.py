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
from shardwright.units import MiB, significant

Floats = NDArray[np.float64]

LARGE = MiB
"""From here on NCCL's rings send large messages, at full bandwidth; what is smaller it sends otherwise."""

SMALL = 32 * 2**10

ROUNDS: Mapping[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Of a ring. The others go one hop."""


class FittedLink(NamedTuple):
    """A link, and the median of |predicted / measured - 1| over the points it was fitted to."""

    link: Link
    error: float


def fit_link(curves: Sequence[Curve], base: Link, rings_alone: bool) -> FittedLink | None:
    """The link that all ranks of ``curves`` use, at once, and no other; None: too few points.

    Errors are weighted alike at all sizes. ``rings_alone``: gloo; else small messages go their own way.
    What a launch takes, ``base`` says: times of groups of one size cannot tell it from hops.
    """
    points = [
        (curve, size, time) for curve in curves for size, time in zip(curve.sizes, curve.times, strict=True)
    ]
    if not rings_alone:
        points = [point for point in points if point[1] >= LARGE]
    if len({size for _, size, _ in points}) < 2:
        return None
    rows = np.array([_row(curve.collective, curve.ranks, size) for curve, size, _ in points])
    times = np.array([max(time - base.start, time / 2) for _, _, time in points])
    weights = _least_squares(rows / times[:, None])
    latency, inverse, ramp = weights
    if not inverse:
        return None
    predicted = rows @ weights
    found = {
        "bandwidth": significant(1 / inverse),
        "latency": significant(latency),
        "small_latency": significant(latency if rings_alone else _small_latency(curves, base)),
        "start": base.start,
        "ramp": significant(ramp),
        "switch_bandwidth": significant(_switches(curves, base)),
    }
    return FittedLink(Link.checked(found), float(np.median(np.abs(predicted / times - 1))))


def _row(collective: str, n: int, size: int) -> tuple[float, float, float]:
    """What a hop, a byte and the filling of channels count in one call, besides the launch."""
    rounds = ROUNDS.get(collective)
    if rounds is None:
        return 1.0, size * (1 - 1 / n if collective == "all_to_all" else 1.0), 0.0
    return rounds * (n - 1), rounds * (1 - 1 / n) * size, rounds / 2 * sqrt(size / MiB)


def _least_squares(rows: Floats) -> Floats:
    """Non-negative weights of the columns for which the rows' sums come nearest to 1: of three columns all
    subsets can be tried."""
    ones = np.ones(len(rows))
    best, least = np.zeros(rows.shape[1]), float("inf")
    for count in range(1, rows.shape[1] + 1):
        for chosen in combinations(range(rows.shape[1]), count):
            part = rows[:, chosen]
            weights = np.linalg.lstsq(part, ones, rcond=None)[0]
            left = float(np.sum((part @ weights - ones) ** 2))
            if np.all(weights >= 0) and left < least:
                best, least = np.zeros(rows.shape[1]), left
                best[list(chosen)] = weights
    return best


def _small_latency(curves: Sequence[Curve], base: Link) -> float:
    """Of a hop of the smallest messages, by the way that has the fewest hops; that of ``base`` if there were
    none."""
    found = [
        max(curve.times[0] - base.start, curve.times[0] / 2) / _fewest_hops(curve)
        for curve in curves
        if curve.sizes[0] <= SMALL
    ]
    return float(np.median(found)) if found else base.small_latency


def _fewest_hops(curve: Curve) -> int:
    rounds, n = ROUNDS.get(curve.collective), curve.ranks
    if rounds is None:
        return 1
    return min(rounds * (n - 1), 2 * ceil(log2(n))) if rounds == 2 else n - 1


def _switches(curves: Sequence[Curve], base: Link) -> float:
    """Bandwidth at which the switches of ``base``, if it has such, added the largest all-reduce [B/s]."""
    sums = [curve for curve in curves if curve.collective == "all_reduce" and curve.ranks > 2]
    if not base.switch_bandwidth or not sums:
        return 0.0
    curve = max(sums, key=lambda each: each.ranks)
    return (1 + 1 / curve.ranks) * curve.sizes[-1] / max(curve.times[-1] - base.start, 1e-9)
