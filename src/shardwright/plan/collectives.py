"""Time of a collective by its size, its group's degree and where the group lies on the cluster."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cluster import Cluster
from shardwright.plan.table import Floats, Ints


class Placement(NamedTuple):
    """How a group of ranks lies on nodes: ``degree`` ranks, ``stride`` apart."""

    degree: Ints
    stride: Ints

    def ranks_per_node(self, gpus_per_node: int) -> Ints:
        """Members of the group that share a node."""
        return np.maximum(np.minimum(self.degree, gpus_per_node // np.minimum(self.stride, gpus_per_node)), 1)

    def nodes(self, gpus_per_node: int) -> Ints:
        """Nodes that hold a part of the group."""
        return -(-self.degree // self.ranks_per_node(gpus_per_node))

    def link(self, gpus_per_node: int) -> list[str]:
        """The slowest link the group crosses, for people: one word a row."""
        crosses = self.nodes(gpus_per_node) > 1
        return ["between nodes" if c else "inside a node" for c in np.atleast_1d(crosses)]


def ring_time(
    payload_bytes: ArrayLike, launches: ArrayLike, rounds: int, placement: Placement, cluster: Cluster
) -> Floats:
    """Time of ``launches`` equal collectives of ``payload_bytes`` in all [s].

    A ring of n ranks takes n-1 hops a round and moves payload (n-1)/n; an all-gather or reduce-scatter is one
    round, an all-reduce two. A group over several nodes is served by as many network links as it has ranks in
    a node, and its hops between nodes cost the network's latency.

    Source: NVIDIA/nccl-tests doc/PERFORMANCE.md; shared FORMULAE 4.2.
    """
    n = np.asarray(placement.degree, dtype=np.float64)
    per_node, nodes = placement.ranks_per_node(cluster.gpus_per_node), placement.nodes(cluster.gpus_per_node)
    intra, inter = cluster.intra_link, cluster.inter_link
    inside = np.where(per_node > 1, intra.bandwidth, np.inf)
    bandwidth = np.where(nodes > 1, np.minimum(inside, per_node * inter.bandwidth), intra.bandwidth)
    hops = np.where(nodes > 1, nodes - 1, 0)
    latency = hops * inter.latency + (n - 1 - hops) * intra.latency
    moved = np.asarray(payload_bytes, dtype=np.float64) * (n - 1) / n
    return np.asarray(rounds * (np.asarray(launches) * latency + moved / bandwidth))
