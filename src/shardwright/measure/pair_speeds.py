"""Measured pairs beside others like them: pairs that the same kind of link joins ought to be equally fast.

In a node the kind is the class that a topology names. Where none was read it is the level of links, and the
tier of the pair if the nodes are alike in having faster and slower pairs (two islands of NVLink). Between
nodes it is the level, and whether both ranks have the same place in their nodes (a rail).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shardwright.bandwidth_map import UNREACHED
from shardwright.cluster import Cluster
from shardwright.measure.islands import Tier, tiers

USUAL = 0.75
"""Quantile of the pairs of a kind that is taken for what is usual: it stands up to as many faults as make
three quarters of the pairs slow, as one node of three does."""

FEWEST = 3
"""Pairs that a kind must have to be split further: of fewer none is usual."""

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class PairSpeeds:
    """Measured directions between ranks, one an entry: ``share`` is bandwidth over what is usual for its kind
    of pair; ``kind`` indexes ``kinds``, as does ``usual`` [B/s]."""

    source: Indices
    target: Indices
    bandwidth: NDArray[np.float64]
    latency: NDArray[np.float64]
    kind: Indices
    kinds: tuple[str, ...]
    usual: NDArray[np.float64]
    tiers: tuple[Tier, ...]

    @property
    def share(self) -> NDArray[np.float64]:
        """Of what is usual for its kind."""
        return np.asarray(self.bandwidth / self.usual[self.kind])


def pair_speeds(cluster: Cluster) -> PairSpeeds:
    """The pairs that were measured of ``cluster``, by kind; none where there is no map."""
    pairs = () if cluster.map is None else cluster.map.pairs
    flat = np.fromiter(chain.from_iterable(pairs), np.float64, count=4 * len(pairs))
    table = flat.reshape(-1, 4)
    table = table[(table[:, 2] > 0) & (table[:, 0] != table[:, 1])]
    source, target = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
    islands = tiers(cluster, table)
    names, code = _kinds(source, target, cluster, islands)
    present, kind = np.unique(code, return_inverse=True)
    usual = [np.quantile(table[kind == i, 2], USUAL, method="higher") for i in range(len(present))]
    return PairSpeeds(
        *(source, target, table[:, 2], table[:, 3]),
        kind.astype(np.int64),
        tuple(names[i] for i in present),
        np.array(usual, np.float64),
        islands,
    )


def _kinds(
    source: Indices, target: Indices, cluster: Cluster, islands: Sequence[Tier]
) -> tuple[list[str], Indices]:
    """Names of kinds, and which of them each pair has."""
    per_node = cluster.gpus_per_node
    names = [UNREACHED]
    code = np.zeros(source.shape, np.int64)

    def name(chosen: NDArray[np.bool_], text: str) -> None:
        code[chosen] = len(names)
        names.append(text)

    for level in reversed(cluster.domains):
        name(source // level.ranks == target // level.ranks, level.name)
    inside = source // per_node == target // per_node
    a, b = source % per_node, target % per_node
    classes = () if cluster.map is None else cluster.map.classes
    if classes:
        table = np.array(classes)
        for text in np.unique(table).tolist():
            name(inside & (table[a, b] == text), text)
    elif (fast := _make_of_node(islands, per_node)) is not None:
        island = np.zeros(per_node, np.int64)
        for number, group in enumerate(fast.groups):
            island[list(group)] = number
        size = len(fast.groups[0])
        name(inside & (island[a] == island[b]), f"island of {size}")
        name(inside & (island[a] != island[b]), f"between islands of {size}")
    rail, across = ~inside & (a == b), ~inside & (a != b)
    if per_node > 1 and min(np.count_nonzero(rail), np.count_nonzero(across)) >= FEWEST:
        for chosen, words in ((rail, "same rail"), (across, "across rails")):
            for level in [level for level in cluster.domains if level.ranks > per_node]:
                name(chosen & (code == names.index(level.name)), f"{level.name}, {words}")
    return names, code


def _make_of_node(islands: Sequence[Tier], per_node: int) -> Tier | None:
    """Islands that are the make of the node: alike in size, and together all of it."""
    if len(islands) < 2 or islands[0].known_by != "measured":
        return None
    groups = islands[0].groups
    sizes = {len(group) for group in groups}
    whole = sum(len(group) for group in groups) == per_node
    return islands[0] if whole and len(sizes) == 1 and min(sizes) > 1 else None
