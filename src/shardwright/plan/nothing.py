"""When nothing fits: how far each kind of layout is from fitting, and on how many devices something does."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from shardwright.axes import MESH_ORDER, MESH_ORDERS
from shardwright.cluster import Cluster
from shardwright.errors import NothingFitsError
from shardwright.job import Job
from shardwright.layout import DISPATCH_KINDS, OFFLOAD_KINDS, RECOMPUTE_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.memory import memory_ledger
from shardwright.plan.search import (
    MEMORY_REASON,
    SCHEDULE,
    SearchResult,
    check_found,
    largest_term,
    rejection_notes,
    search,
)
from shardwright.plan.space import LOSS_CHUNKS, divisors
from shardwright.units import format_bytes

LEAST_MEMORY = {
    "recompute": (RECOMPUTE_KINDS.index("full"),),
    "recompute_every": (1,),
    "loss_chunks": (max(LOSS_CHUNKS),),
    "offload": tuple(range(len(OFFLOAD_KINDS))),  # all the host has room for
    "dispatch": (DISPATCH_KINDS.index("all_to_all"),),
    "order": (MESH_ORDERS.index(MESH_ORDER),),
}
"""Values of columns with which a device holds least, to a thousandth: a test says so.

Of microbatches the smallest or the largest is least: a single one of a step needs no sum of gradients beside
its own.
"""

MOST_DOUBLINGS = 6
"""Times that the number of devices is doubled."""

SPLITS = ("tp", "cp", "pp")
"""Axes that tell kinds of layouts apart: which of them have more than one rank."""

Fixed = Mapping[str, Sequence[int]]


def check_fits(
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    result: SearchResult,
    fixed: Fixed | None = None,
    max_memory: float | None = None,
) -> None:
    """Raises: NothingFitsError: the search found nothing; its ``document`` says more than its message."""
    try:
        check_found(model, job, cluster, result)
    except NothingFitsError as answer:
        message, wished = str(answer), dict(fixed or {})
    else:
        return
    nearest = nearest_miss(model, job, cluster, result)
    if nearest is not None:
        message = _message(model, job, cluster, result, nearest)
    document: dict[str, Any] = {
        "model": model.name,
        "considered": result.considered,
        "evaluated": result.evaluated,
        "pruned": result.pruned,
        "feasible": 0,
        "feasible_runnable": 0,
        "rejected": dict(result.rejected),
        "rejected_notes": rejection_notes(model, job, cluster, result),
        "search_time": result.search_time,
        "device_memory": result.limit,
        "best": [],
        "nearest": nearest,
        "kinds": [],
        "fits_on": None,
    }
    if nearest is not None:
        tried, found = fewest_devices(model, job, cluster, wished, max_memory)
        document["kinds"] = list(_kinds(model, job, cluster, wished, max_memory))
        document["fits_on"] = found
        if found is not None:
            message += f"; on {found['gpus']:,} devices [{found['label']}] fits"
        elif tried:
            message += f"; nor does anything fit on {tried[-1]:,} devices"
    raise NothingFitsError(message, document | {"nothing_fits": message})


def _message(
    model: ModelSpec, job: Job, cluster: Cluster, result: SearchResult, nearest: Mapping[str, Any]
) -> str:
    """Why nothing works: the nearest miss, and what else put layouts out but the orders of schedules."""
    notes = rejection_notes(model, job, cluster, result)
    notes[MEMORY_REASON] = (
        f"more than {format_bytes(result.limit)} a device; nearest {miss_sentence(nearest)}, "
        f"{format_bytes(nearest['largest_term_bytes'])} of it {nearest['largest_term']}"
    )
    reasons = (
        f"{name} ({result.rejected[name]:,}): {note}" for name, note in notes.items() if name != SCHEDULE
    )
    return f"no layout works, of {result.considered:,} considered: {'; '.join(reasons)}"


def least_memory(fixed: Fixed) -> dict[str, Sequence[int]]:
    """The columns fixed, and of those left open the values with which a layout holds least."""
    least: dict[str, Sequence[int]] = dict(fixed)
    for column, values in LEAST_MEMORY.items():
        allowed = [value for value in values if value in fixed.get(column, values)]
        if allowed:
            least[column] = allowed
    return least


def nearest_miss(model: ModelSpec, job: Job, cluster: Cluster, result: SearchResult) -> dict[str, Any] | None:
    """What of a search misses the memory by least: need and what is too much [B], and the largest term."""
    if not len(result.misses.device):
        return None
    table = result.misses.table.take(np.array([0]))
    ledger = memory_ledger(model, job, cluster.device, table)
    term, size = largest_term(ledger, 0)
    return {
        "label": table.layout(0, model.layers).label,
        "needs": float(ledger.device[0]),
        "too_much": float(ledger.device[0]) - result.limit,
        "largest_term": term,
        "largest_term_bytes": size,
    }


def _kinds(
    model: ModelSpec, job: Job, cluster: Cluster, fixed: Fixed, max_memory: float | None
) -> Iterator[dict[str, Any]]:
    """The nearest miss of each kind of layout, the nearest kind first."""
    several = [n for n in divisors(cluster.ranks) if n > 1]
    found = []
    for split in product((False, True), repeat=len(SPLITS)):
        axes = [axis for axis, more in zip(SPLITS, split, strict=True) if more]
        degrees = {
            axis: [n for n in (several if axis in axes else [1]) if n in fixed.get(axis, [n])]
            for axis in SPLITS
        }
        result = search(model, job, cluster, least_memory({**fixed, **degrees}), max_memory)
        miss = nearest_miss(model, job, cluster, result)
        if miss is not None:
            found.append({"kind": " and ".join(axes) or "data axes alone", **miss})
    yield from sorted(found, key=lambda row: float(row["needs"]))


def resized(cluster: Cluster, ranks: int) -> Cluster:
    """The same devices and links with another number of ranks, and what was measured of the levels that are
    left; groups that were measured cross none of those added."""
    other = cluster.model_copy(update={"ranks": ranks, "curves": ()})
    before, after = len(cluster.domains), len(other.domains)
    curves = [
        curve.model_copy(update={"members": (*curve.members, *[curve.ranks] * (after - before))[:after]})
        for curve in cluster.curves
        if curve.members[min(before, after) - 1] == curve.ranks
    ]
    return other.model_copy(update={"curves": tuple(curves)})


def fewest_devices(
    model: ModelSpec, job: Job, cluster: Cluster, fixed: Fixed, max_memory: float | None = None
) -> tuple[list[int], dict[str, Any] | None]:
    """Numbers of devices that were tried, doubling, and what needs least on the last if something fits.

    A cluster whose levels are given is not made larger than they are.
    """
    tried: list[int] = []
    for doublings in range(1, MOST_DOUBLINGS + 1):
        ranks = cluster.ranks * 2**doublings
        if cluster.levels and ranks > cluster.levels[-1].ranks:
            break
        tried.append(ranks)
        result = search(model, job, resized(cluster, ranks), least_memory(fixed), max_memory)
        if len(result.best):
            row = int(result.best[np.argmin(result.device[result.best])])
            found = {"gpus": ranks, "label": result.layout(row).label, "device": float(result.device[row])}
            return tried, found
    return tried, None


def miss_sentence(miss: Mapping[str, Any]) -> str:
    """A miss in words."""
    return f"[{miss['label']}] needs {format_bytes(miss['needs'])}, {format_bytes(miss['too_much'])} too much"
