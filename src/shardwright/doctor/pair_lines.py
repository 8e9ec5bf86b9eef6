"""Both directions of measured pairs beside one another, the noise in them, and what is slow beyond it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.measure.pair_speeds import PairSpeeds

SLOW = 0.75
"""Share of what is usual for its kind below which a pair is slow."""

MARGIN = 2.0
"""Standard deviations between the slowest that chance makes of so many pairs and what is called slow."""

SLOWEST = 0.1
"""Share below which a pair is slow whatever the noise."""

ENOUGH = 8
"""Pairs from which their scatter says what the noise is."""

FEWEST = 3
"""Nodes, or ranks, among which one can be told from the others."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Lines:
    """Pairs of ranks ``a`` < ``b`` with the share of what is usual ``there``, ``back`` (nan: not measured)
    and on the better of both ways; ``usual`` of their kind [B/s]."""

    a: Ints
    b: Ints
    there: Floats
    back: Floats
    usual: Floats

    @property
    def best(self) -> Floats:
        """The better way: what is slow on both is slow, whatever the noise of one."""
        return np.asarray(np.fmax(self.there, self.back))

    def where(self, chosen: Flags) -> "Lines":
        """Those of ``chosen``."""
        ends, shares = (self.a[chosen], self.b[chosen]), (self.there[chosen], self.back[chosen])
        return Lines(*ends, *shares, self.usual[chosen])


def lines_of(speeds: PairSpeeds) -> Lines:
    """Both directions of each pair beside one another."""
    low, high = np.minimum(speeds.source, speeds.target), np.maximum(speeds.source, speeds.target)
    ranks = int(high.max(initial=0)) + 1
    keys, place = np.unique(low * ranks + high, return_inverse=True)
    there, back, usual = (np.full(len(keys), np.nan) for _ in range(3))
    forward = speeds.source < speeds.target
    there[place[forward]] = speeds.share[forward]
    back[place[~forward]] = speeds.share[~forward]
    usual[place] = speeds.usual[speeds.kind]
    return Lines(keys // ranks, keys % ranks, there, back, usual)


def noise_of(lines: Lines) -> float:
    """Standard deviation of one measurement, relative: by how the two directions of pairs differ, or, where
    they were measured one way, by how the fastest twentieth differs from what is usual.

    Of a normal distribution the 95 % quantile is one deviation above the 75 % one.
    """
    both = np.isfinite(lines.there) & np.isfinite(lines.back)
    if np.count_nonzero(both) >= FEWEST:
        apart = np.abs(np.log(lines.there[both] / lines.back[both]))
        return float(1.4826 * np.median(apart) / np.sqrt(2))
    return float(np.quantile(lines.best, 0.95) - 1) if len(lines.a) >= ENOUGH else 0.0


def limit_of(noise: float, count: int) -> float:
    """Share of what is usual below which one of ``count`` pairs is slow, and not so by chance.

    The lowest of n normal values lies some sqrt(2 ln n) deviations below their mean.
    """
    deviations = float(np.sqrt(2 * np.log(max(count, 1)))) + MARGIN
    return min(SLOW, max(1 - deviations * noise, SLOWEST))
