"""Hops of a pipeline: every boundary between stages over the link that its own two ranks have between them.

The closed forms of the table take all hops as slow as the slowest; simulated pipelines take these.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Cluster
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.collectives import Route, route_through
from shardwright.plan.parts import hop_time
from shardwright.plan.placement import placements
from shardwright.plan.schedule import stage_ranks
from shardwright.plan.table import Floats, Ints, LayoutTable


class Hops:
    """Seconds of the hops of some layouts."""

    def __init__(
        self, model: ModelSpec, job: Job, cluster: Cluster, table: LayoutTable, routes: Mapping[str, Route]
    ) -> None:
        """``table`` has a row for each layout, ``routes`` are its own."""
        self.domains = tuple(level.ranks for level in cluster.domains)
        self.ranks = cluster.ranks
        self.strides = np.broadcast_to(placements(table, ("pp",))["pp"].stride, table.rows).tolist()
        piped = bool((table.pp > 1).any())
        pairs = [{**routes, "pp": _pair(cluster, level)} for level in range(len(self.domains) * piped)]
        if not pairs:
            return
        times = [np.broadcast_to(hop_time(model, job, table, each), table.rows) for each in pairs]
        self.by_level = np.stack(times, axis=1)

    def between_stages(self, rows: Sequence[int], layout: Layout) -> Floats:
        """Of some layouts with the schedule, pp and chunks of ``layout``: the hop behind each stage, (rows,
        stages of all its pipelines - 1); between stages of one rank what does not matter."""
        rank = stage_ranks(layout.schedule, layout.pp, layout.chunks)
        levels = {
            stride: _levels(self.domains, self.ranks, layout.pp, stride)[rank[:-1], rank[1:]]
            for stride in {self.strides[row] for row in rows}
        }
        return np.stack([self.by_level[row, levels[self.strides[row]]] for row in rows])


@lru_cache(maxsize=64)
def _pair(cluster: Cluster, outermost: int) -> Route:
    """The way between two ranks that ``outermost`` is the first level to join."""
    inside, across = (np.array([2]), np.array([1])), (np.array([1]), np.array([2]))
    spreads = [across if level < outermost else inside for level in range(len(cluster.domains))]
    return route_through(np.array([2]), spreads, cluster)


@lru_cache(maxsize=256)
def _levels(domains: tuple[int, ...], ranks: int, pp: int, stride: int) -> Ints:
    """The first level that joins ranks a and b of every pipeline of the cluster, (pp, pp): ``stride`` apart,
    their groups starting anywhere."""
    starts = (np.arange(stride)[:, None] + stride * pp * np.arange(max(ranks // (stride * pp), 1))).ravel()
    apart = np.zeros((pp, pp), dtype=np.int64)
    for domain in domains[:-1]:
        apart += _cross(np.unique(starts % domain), domain, pp, stride)
    return apart


def _cross(starts: Ints, domain: int, pp: int, stride: int) -> NDArray[np.bool_]:
    """Whether of any pipeline two ranks do not share a domain of so many ranks."""
    at = (starts[:, None] + stride * np.arange(pp)) // domain
    return np.asarray((at[:, :, None] != at[:, None, :]).any(axis=0))
