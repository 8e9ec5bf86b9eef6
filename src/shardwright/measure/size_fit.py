"""A curve of times as three numbers: launch, bandwidth, and what filling channels adds."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from shardwright.units import MiB


class SizeFit(NamedTuple):
    """t = launch + S / bandwidth + ramp x sqrt(S in MiB), S bytes; ``error``: rms of relative errors.

    Times in s, ``bandwidth`` in B/s of payload, infinite where time does not grow with size.
    """

    launch: float
    bandwidth: float
    ramp: float
    error: float

    def time(self, size: float) -> float:
        """Of one call [s]."""
        return float(self.launch + size / self.bandwidth + self.ramp * np.sqrt(size / MiB))

    @property
    def half_size(self) -> float:
        """Bytes at which half of the bandwidth is reached: S / bandwidth = launch + ramp x sqrt(S)."""
        root = self.ramp * self.bandwidth / np.sqrt(MiB)
        return float(((root + np.sqrt(root**2 + 4 * self.launch * self.bandwidth)) / 2) ** 2)


def size_fit(sizes: Sequence[float], times: Sequence[float]) -> SizeFit | None:
    """The least relative squares with no negative term; None of fewer than two different sizes.

    Source: the three terms: shared FORMULAE 4.4.
    """
    S, t = np.asarray(sizes, float), np.asarray(times, float)
    if len(np.unique(S)) < 2:
        return None
    terms = np.stack([np.ones_like(S), S, np.sqrt(S / MiB)], axis=1) / t[:, None]
    best: tuple[float, np.ndarray] | None = None
    for count in range(1, min(3, len(np.unique(S))) + 1):
        for kept in combinations(range(3), count):
            solved = np.linalg.lstsq(terms[:, kept], np.ones_like(S), rcond=None)[0]
            if (solved < 0).any():
                continue
            values = np.zeros(3)
            values[list(kept)] = solved
            error = float(np.sqrt(np.mean((terms @ values - 1) ** 2)))
            if best is None or error < 0.98 * best[0] - 1e-9:
                best = error, values
    if best is None:
        return None
    error, (launch, byte, ramp) = best
    return SizeFit(float(launch), 1 / byte if byte > 0 else float("inf"), float(ramp), error)
