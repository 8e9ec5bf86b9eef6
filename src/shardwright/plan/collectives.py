"""Time of a collective by its size, its group's degree and where the group lies on the cluster."""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cluster import Cluster
from shardwright.plan.table import Floats, Ints, distinct


class Placement(NamedTuple):
    """How the groups of an axis lie on nodes: ``degree`` ranks each, ``stride`` apart."""

    degree: Ints
    stride: Ints

    def spread(self, cluster: Cluster) -> tuple[Ints, Ints]:
        """Fewest members that a group has in a node, and most nodes that one lies on.

        Groups of an axis may lie differently (3 ranks on nodes of 8); a step is as slow as the worst.
        """
        degree, stride = np.broadcast_arrays(np.atleast_1d(self.degree), np.atleast_1d(self.stride))
        pairs, row = distinct(degree, stride)
        found = [_spread(*pair, cluster.ranks, cluster.gpus_per_node) for pair in pairs]
        fewest, nodes = np.array(found, dtype=np.int64).reshape(-1, 2)[row].T
        return fewest, nodes

    def route(self, cluster: Cluster) -> "Route":
        """What a ring over these groups has to itself on ``cluster``.

        A group over several nodes is served by as many network links as it has ranks in a node (the node with
        the fewest), and its hops between nodes cost the network's latency.
        """
        n = np.asarray(self.degree, dtype=np.float64)
        per_node, nodes = self.spread(cluster)
        intra, inter = cluster.intra_link, cluster.inter_link
        inside = np.where(per_node > 1, intra.bandwidth, np.inf)
        bandwidth = np.where(nodes > 1, np.minimum(inside, per_node * inter.bandwidth), intra.bandwidth)
        hops = np.where(nodes > 1, nodes - 1, 0)
        latency = hops * inter.latency + (n - 1 - hops) * intra.latency
        crosses = nodes > 1
        hop = np.where(crosses, inter.latency, intra.latency)
        per_byte = np.where(crosses, 1 / inter.bandwidth, 1 / intra.bandwidth)
        near, far = np.where(crosses, per_node, n) - 1, np.where(crosses, n - per_node, 0)
        trade_per_byte = np.maximum(near / n / intra.bandwidth, far / n / inter.bandwidth)
        return Route(latency, (n - 1) / n / bandwidth, hop, per_byte, trade_per_byte)

    def link(self, cluster: Cluster) -> list[str]:
        """The slowest link the groups cross, for people: one word a row."""
        return ["between nodes" if nodes > 1 else "inside a node" for nodes in self.spread(cluster)[1]]


@cache
def _spread(degree: int, stride: int, ranks: int, gpus_per_node: int) -> tuple[int, int]:
    """Fewest members in a node and most nodes, over the groups of one axis of ``ranks`` ranks."""
    block = degree * stride
    rank = np.arange(max(ranks // block, 1) * block).reshape(-1, degree, stride)
    group = rank // block * stride + rank % stride
    node = rank // gpus_per_node
    parts, members = np.unique(group * (node.max() + 1) + node, return_counts=True)
    nodes = np.bincount(parts // (node.max() + 1))
    return int(members.min()), int(nodes.max())


class Route(NamedTuple):
    """A round of a ring, its latency [s] and its time for each byte of payload [s/B]; one hop from rank to
    rank, on the slowest link between neighbours, likewise; and a byte of what a rank trades with all others,
    for which it has no network link but its own."""

    latency: Floats
    time_per_byte: Floats
    hop: Floats
    hop_per_byte: Floats
    trade_per_byte: Floats


def ring_time(payload_bytes: ArrayLike, launches: ArrayLike, rounds: int, route: Route) -> Floats:
    """Time of ``launches`` equal collectives of ``payload_bytes`` in all [s].

    A ring of n ranks takes n-1 hops a round and moves payload (n-1)/n; an all-gather or reduce-scatter is one
    round, an all-reduce two.

    Source: NVIDIA/nccl-tests doc/PERFORMANCE.md; shared FORMULAE 4.2.
    """
    moved = np.asarray(payload_bytes, dtype=np.float64) * route.time_per_byte
    return np.asarray(rounds * (np.asarray(launches) * route.latency + moved))


def send_time(payload_bytes: ArrayLike, launches: ArrayLike, route: Route) -> Floats:
    """Time of ``launches`` sends to the neighbour, ``payload_bytes`` in all [s]."""
    moved = np.asarray(payload_bytes, dtype=np.float64) * route.hop_per_byte
    return np.asarray(np.asarray(launches) * route.hop + moved)


def trade_time(payload_bytes: ArrayLike, launches: ArrayLike, route: Route) -> Floats:
    """Time of ``launches`` all-to-alls in which a rank gives ``payload_bytes`` in all, its own part too [s].

    What stays in the node and what leaves it move at once; all partners are one hop away.

    Source: shared FORMULAE 4.2.
    """
    moved = np.asarray(payload_bytes, dtype=np.float64) * route.trade_per_byte
    return np.asarray(np.asarray(launches) * route.hop + moved)
