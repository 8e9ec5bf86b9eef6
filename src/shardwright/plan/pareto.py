"""The front of step time against memory: layouts of which no other is both as fast and as small."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.plan.search import SearchResult
from shardwright.plan.table import Floats

MOST = 10
"""Layouts of a front that are shown."""


def pareto_front(time: Floats, device: Floats) -> NDArray[np.intp]:
    """Places of the layouts that each take less time or less memory than every other, the fastest first."""
    order = np.lexsort((device, time))
    sorted_device = device[order]
    least_before = np.minimum.accumulate(np.concatenate([[np.inf], sorted_device]))[:-1]
    return np.asarray(order[sorted_device < least_before])


def pareto_rows(result: SearchResult, most: int = MOST) -> list[dict[str, Any]]:
    """The front of what a search kept and fits: at most ``most`` of it, evenly chosen, both ends included."""
    rows = result.best[pareto_front(result.time[result.best], result.device[result.best])]
    if len(rows) > most:
        rows = rows[np.linspace(0, len(rows) - 1, most).round().astype(np.intp)]
    return [
        {
            "label": result.layout(row).label,
            "step_time": float(result.time[row]),
            "device_memory": float(result.device[row]),
            "headroom": float(result.limit - result.device[row]),
        }
        for row in rows.tolist()
    ]
