"""Times of a call that every rank of a group makes at once: blocks of repeats between two meetings."""

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

FEWEST_BLOCKS = 3
USUAL_BLOCKS = 6
"""Blocks that the time given is cut into."""

LONGEST_LEAD_IN_S = 0.1
"""A call up to so long is led in by one that is not timed: ranks leave a small meeting more nearly at once
than one another's calls in a row, so that the first of a row is faster than those that training makes."""

MOST_REPEATS = 500
"""Calls of a block: beyond it a block's mean is steady."""


class Blocks(NamedTuple):
    """Mean time of a call in each block [s], and calls in a block."""

    means: list[float]
    repeats: int


def block_times(
    call: Callable[[], None],
    finish: Callable[[], None],
    agree: Callable[[float], float],
    seconds: float,
) -> Blocks:
    """Time ``call`` for about ``seconds``, one warm-up and at least three blocks.

    ``finish`` returns when what was called is done; ``agree`` gives every rank the largest of their numbers,
    and none before all have come. Ranks so make the same number of calls, whatever their clocks say.
    """
    start = time.perf_counter()
    call()
    finish()
    longest = agree(time.perf_counter() - start)
    repeats = min(max(int(seconds / USUAL_BLOCKS / max(longest, 1e-9)), 1), MOST_REPEATS)
    lead_in = longest < LONGEST_LEAD_IN_S
    means: list[float] = []
    while True:
        over = time.perf_counter() - start >= seconds and len(means) >= FEWEST_BLOCKS
        if agree(float(over)):
            return Blocks(means, repeats)
        if lead_in:
            call()
            finish()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        finish()
        means.append((time.perf_counter() - begin) / repeats)


def slowest(means: Sequence[Sequence[float]]) -> list[float]:
    """Of each block, the rank that took longest; ranks of different groups may have made more blocks."""
    return [max(block) for block in zip_longest(*means, fillvalue=0.0)]


def median_and_spread(means: Sequence[float]) -> tuple[float, float]:
    """Median [s], and (90 % - 10 %) / median."""
    low, middle, high = np.percentile(means, (10, 50, 90))
    return float(middle), float((high - low) / middle)
