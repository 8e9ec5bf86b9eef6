"""How long one call takes: warm-up, repeats, median and spread, on any device."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

SECONDS_EACH = 0.25
"""Time spent on each measurement, at least three repeats."""

LEAST_REPEATS = 3

BATCH_SECONDS = 0.002
"""Calls are timed in batches at least so long where they are queued: waiting for an accelerator costs some
10 us."""


class Timing(NamedTuple):
    """Of one call: median [s], and (90 % - 10 %) / median over the repeats."""

    time: float
    spread: float


def timing(function: Callable[[], Any], device: torch.device, seconds: float = SECONDS_EACH) -> Timing:
    """Times of ``function`` after a warm-up call, work that it queues on ``device`` waited for."""
    queued = device.type != "cpu"

    def batch(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if queued:
            torch.accelerator.synchronize(device)
        return (time.perf_counter() - start) / calls

    batch(1)
    calls = max(1, math.ceil(BATCH_SECONDS / batch(1))) if queued else 1
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < LEAST_REPEATS:
        times.append(batch(calls))
    times.sort()
    median = times[len(times) // 2]
    return Timing(median, (times[int(0.9 * len(times))] - times[len(times) // 10]) / median)
