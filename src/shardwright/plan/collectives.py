"""Time of a collective by its size and the way its group goes through the levels of links of a cluster.

A collective takes the cheapest of its algorithms: each costs so much a launch, so much a byte, and, where it
fills channels with a large message, so much the root of a byte. Small messages go with short hops at part of
the bandwidth (NCCL's LL protocol), rings of middle ones with longer hops at nearly all of it (LL128).
plan/placement.py says where groups lie. What was measured of a cluster corrects the cheapest's time
(plan/measured.py).

Symbols: n ranks of a group; r of them in a domain, the one with fewest; S bytes of payload.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.bandwidth_map import Curve
from shardwright.cluster import Cluster, Link
from shardwright.plan.measured import Correction, Ratios, curve_words, measured_ratios, usable_curves
from shardwright.plan.table import ColumnMap, Floats, Ints
from shardwright.units import MiB

SMALL_RING, SMALL_TREE = 1 / 2, 1 / 3.8
"""Share of the ring's bandwidth that small messages get: half of what LL sends are flags. Source: NVIDIA/nccl
2.30.7 src/graph/tuning.cc; shared FORMULAE 4.3."""

TREE, LL128, LOGARITHMIC = 0.92, 0.92, 0.75
"""The same of trees, of rings by LL128, and of NCCL's logarithmic all-gather (PAT). Source: as above."""


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")


class Cost(NamedTuple):
    """Of one algorithm: a launch [s], a byte of payload [s/B], and the root of a byte [s/sqrt(B)]."""

    launch: Floats
    byte: Floats
    root: Floats


class Crossing(NamedTuple):
    """How the groups of an axis pass one level of links: ``members`` of a group share a domain, in the one
    with the fewest; a group lies on at most ``domains``; ``below`` are these numbers one level inside.
    """

    members: Ints
    domains: Ints
    members_below: Ints
    domains_below: Ints
    link: Link
    bandwidth: float  # of one rank, all using the level at once [B/s]
    shared: bool

    @property
    def crossed(self) -> NDArray[np.bool_]:
        """Whether every group has neighbours that only this level joins."""
        return self.members > self.members_below

    @property
    def hops(self) -> Ints:
        """Hops of a ring through all members that need this level."""
        return self.domains_below - self.domains

    @property
    def parts(self) -> Floats:
        """Smaller domains that a domain of this level joins."""
        return np.asarray(self.domains_below / self.domains)


@dataclass(frozen=True)
class Route:
    """The way of an axis's groups through a cluster, once for every different placement.

    ``index`` says which of them each layout has; None: they stand as they are.
    """

    degree: Ints
    crossings: tuple[Crossing, ...]
    one_per_node: NDArray[np.bool_]
    rings_alone: bool  # gloo has neither trees nor protocols for small messages
    index: NDArray[np.intp] | None = None
    corrections: Mapping[str, Correction] = field(default_factory=dict)  # of the collectives measured

    @cached_property
    def alone(self) -> bool:
        """Whether no group has a second member."""
        degree = self.degree if self.index is None else self.degree[self.index]
        return bool((degree == 1).all())

    @cached_property
    def known_costs(self) -> dict[str, tuple[Cost, ...]]:
        """What ``costs`` has found."""
        return {}

    def costs(self, collective: str) -> tuple[Cost, ...]:
        """Algorithms of a collective, those left out that another beats at any size."""
        if collective not in self.known_costs:
            self.known_costs[collective] = self._costs(collective)
        return self.known_costs[collective]

    def _costs(self, collective: str) -> tuple[Cost, ...]:
        if (self.degree == 1).all():
            none = np.zeros(self.degree.shape)
            return (Cost(none, none, none),)
        if collective in ("all_gather", "reduce_scatter"):
            rings = _ring(self, 1), _ring_of_lines(self, 1), _ring(self, 1, small=True)
            return self._useful((*rings, _logarithmic(self)))
        if collective == "all_reduce":
            rings, trees = (
                (_ring(self, 2), _ring_of_lines(self, 2), _ring(self, 2, small=True)),
                (_tree(self), _tree(self, small=True)),
            )
            return self._useful((*rings, *trees, _hierarchical(self), _in_switches(self)))
        way = {"all_to_all": _trade, "send": _hop}[collective]
        return self._useful((way(self), way(self, small=True)))

    def _useful(self, costs: tuple[Cost, ...]) -> tuple[Cost, ...]:
        kept: list[Cost] = []
        for cost in costs[:1] if self.rings_alone else costs:
            if not any(_no_dearer(other, cost) for other in kept):
                kept.append(Cost(*(np.where(self.degree > 1, part, 0.0) for part in cost)))
        return tuple(kept)

    def at(self, index: NDArray[np.intp]) -> "Route":
        """The same for layouts that have the placements of ``index``."""
        route = replace(self, index=index)
        route.__dict__["known_costs"] = self.known_costs  # worked out once for all
        return route

    def mapped(self, part: ColumnMap) -> "Route":
        """The same for other layouts: ``part`` of what says which placement each has."""
        return self if self.index is None else self.at(part(self.index))

    def corrected(self, collective: str, time: Floats, payload_bytes: Floats, launches: Floats) -> Floats:
        """A modelled ``time`` of ``launches`` of ``payload_bytes`` in all as measurements have it; as it is
        where there are none [s]."""
        known = self.corrections.get(collective)
        if known is None:
            return time
        return time * known.at(payload_bytes / np.maximum(launches, 1.0), self.index)

    def source(self, collective: str, payload_bytes: float, level: str) -> str:
        """For people: what times of the only placement rest on, at so many bytes a launch."""
        known = self.corrections.get(collective)
        row = 0 if self.index is None else int(self.index.ravel()[0])
        curve = None if known is None else known.curve(row)
        if curve is None:
            return f"latency and bandwidth of the {level}"
        members = [int(crossing.members.ravel()[row]) for crossing in self.crossings]
        return curve_words(curve, members, payload_bytes)

    def spread(self, values: Floats) -> Floats:
        """One value a placement as one a layout."""
        return values if self.index is None else values[self.index]

    def latency(self, *, small: bool) -> Floats:
        """The slowest hop between neighbours [s]."""
        return _most(np.where(c.crossed, _latency(c, small), 0.0) for c in self.crossings)

    @property
    def start(self) -> Floats:
        """A launch, before the first hop [s]."""
        return _most(np.where(c.crossed, c.link.start, 0.0) for c in self.crossings)

    @property
    def ramp(self) -> Floats:
        """What filling the channels adds to an all-reduce [s/sqrt(B)]."""
        return _most(np.where(c.crossed, c.link.ramp / np.sqrt(MiB), 0.0) for c in self.crossings)

    @property
    def ring_byte(self) -> Floats:
        """A byte through the narrowest part of a ring, which has as many links out of a domain as the group
        has ranks in it [s/B]."""
        return _most(np.where(c.crossed, 1 / (c.members_below * c.bandwidth), 0.0) for c in self.crossings)


def route_through(degree: Ints, spreads: Sequence[tuple[Ints, Ints]], cluster: Cluster) -> Route:
    """The route of groups for which ``spreads`` says, level by level, how many members share a domain and on
    how many domains they lie."""
    crossings: list[Crossing] = []
    below, domains_below, one_per_node = np.ones_like(degree), degree, np.ones(np.shape(degree), np.bool_)
    bandwidths = rank_bandwidths(cluster)
    for level, bandwidth, (inside, count) in zip(cluster.domains, bandwidths, spreads, strict=True):
        crossings.append(Crossing(inside, count, below, domains_below, level.link, bandwidth, level.shared))
        below, domains_below = inside, count
        if level.ranks == cluster.gpus_per_node:
            one_per_node = inside == 1
    route = Route(degree, tuple(crossings), one_per_node, cluster.device.kind == "cpu")
    if not cluster.curves:
        return route
    members = np.stack([crossing.members for crossing in crossings], axis=-1)
    ratios = _ratios(cluster.model_copy(update={"map": None, "assumed": ()}))
    return replace(route, corrections={name: each.of_groups(members) for name, each in ratios.items()})


@lru_cache(maxsize=64)
def _ratios(cluster: Cluster) -> Mapping[str, Ratios]:
    """What the model is wrong by for each collective that was measured of ``cluster``."""
    curves = usable_curves(cluster)
    return dict(measured_ratios(curves, lambda name, curve: modelled_times(name, curve, cluster)))


def modelled_times(collective: str, curve: Curve, cluster: Cluster) -> Floats:
    """What the model says of the sizes of a curve, whatever was measured [s]."""
    spreads = [(np.array([n]), np.array([curve.ranks // n])) for n in curve.members]
    bare = cluster.model_copy(update={"curves": ()})
    route = route_through(np.array([curve.ranks]), spreads, bare)
    return collective_time(collective, curve.sizes, 1, route)


def with_curves_of(known: Cluster, other: Cluster) -> Cluster:
    """``other``, of the same levels with other links, with the curves of ``known``, each time as many times
    longer or shorter as it is in the model."""
    curves = []
    for curve in usable_curves(known):
        after, before = (modelled_times(curve.collective, curve, where) for where in (other, known))
        times = tuple((np.array(curve.times) * (after / before)).tolist())
        curves.append(curve.model_copy(update={"times": times}))
    return other.model_copy(update={"curves": tuple(curves)})


def rank_bandwidths(cluster: Cluster) -> list[float]:
    """What one rank has of each level's link when all ranks use it at once, innermost level first [B/s].

    A shared link is divided by the ranks of the smaller domain, and reached by the link of the level below.
    """
    found: list[float] = []
    users = 1
    for level in cluster.domains:
        bandwidth = level.link.bandwidth
        if level.shared and found:
            bandwidth = min(bandwidth / users, found[-1])
        found.append(bandwidth)
        users = min(level.ranks, cluster.ranks)
    return found


# Times


def collective_time(collective: str, payload_bytes: ArrayLike, launches: ArrayLike, route: Route) -> Floats:
    """Time of ``launches`` equal collectives of ``payload_bytes`` in all, by the cheapest algorithm, or as
    measured [s].

    Payload is the whole tensor: what an all-gather fills, a reduce-scatter or all-reduce is given; of an
    all-to-all what a rank gives, its own part too; of a send what goes to the neighbour.

    Source: shared FORMULAE 4.2 to 4.4.
    """
    payload, count = np.asarray(payload_bytes, np.float64), np.asarray(launches, np.float64)
    if route.alone:
        places = route.degree if route.index is None else route.index
        return np.zeros(np.broadcast_shapes(payload.shape, count.shape, places.shape))
    times = (_time(cost, payload, count, route) for cost in route.costs(collective))
    return route.corrected(collective, reduce(np.minimum, times), payload, count)


def ring_time(payload_bytes: ArrayLike, launches: ArrayLike, rounds: int, route: Route) -> Floats:
    """The same by rings alone, whatever was measured [s]: an all-gather or reduce-scatter is one round, an
    all-reduce two."""
    payload, count = np.asarray(payload_bytes, np.float64), np.asarray(launches, np.float64)
    cost = Cost(*(np.where(route.degree > 1, part, 0.0) for part in _ring(route, rounds)))
    return _time(cost, payload, count, route)


def send_time(payload_bytes: ArrayLike, launches: ArrayLike, route: Route) -> Floats:
    """Time of ``launches`` sends to the neighbour, ``payload_bytes`` in all [s]."""
    return collective_time("send", payload_bytes, launches, route)


def trade_time(payload_bytes: ArrayLike, launches: ArrayLike, route: Route) -> Floats:
    """Time of ``launches`` all-to-alls of ``payload_bytes`` a rank in all, its own part too [s]."""
    return collective_time("all_to_all", payload_bytes, launches, route)


def _time(cost: Cost, payload: Floats, launches: Floats, route: Route) -> Floats:
    time = launches * route.spread(cost.launch) + payload * route.spread(cost.byte)
    if cost.root.any():
        time = time + np.sqrt(payload) * np.sqrt(launches) * route.spread(cost.root)
    return np.asarray(time)


# Algorithms


def _ring(route: Route, rounds: int, *, small: bool = False) -> Cost:
    """n-1 hops a round, each rank passing S (n-1)/n on. Source: shared FORMULAE 4.2."""
    hops = sum(crossing.hops * _latency(crossing, small) for crossing in route.crossings)
    moved = rounds * (1 - 1 / route.degree) * route.ring_byte
    if small:
        return Cost(route.start + rounds * hops, moved / SMALL_RING, np.zeros(1))
    return Cost(route.start + rounds * hops, moved, rounds / 2 * route.ramp)


def _ring_of_lines(route: Route, rounds: int) -> Cost:
    """A ring whose hops are lines of 128 B that carry their flag (LL128), where all its links have such; the
    large one elsewhere. Source: shared FORMULAE 4.3."""
    ring, crossings = _ring(route, rounds), route.crossings
    able = np.all([(c.hops == 0) | (c.link.ll128_latency > 0) for c in crossings], axis=0)
    launch = route.start + rounds * sum(c.hops * c.link.ll128_latency for c in crossings)
    return Cost(np.where(able, launch, ring.launch), np.where(able, ring.byte / LL128, ring.byte), ring.root)


def _tree(route: Route, *, small: bool = False) -> Cost:
    """A double binary tree: up and down, S each way. Source: shared FORMULAE 4.2, 4.3."""
    hops = sum(np.ceil(np.log2(c.parts)) * _latency(c, small) for c in route.crossings)
    moved = 2 * route.ring_byte / (SMALL_TREE if small else TREE)
    return Cost(route.start + 2 * hops, moved, np.zeros(1) if small else route.ramp)


def _hierarchical(route: Route) -> Cost:
    """Reduce-scatter inside each domain, all-reduce of the parts across, every rank by its own link, and
    all-gather inside; the phases after one another. Groups that lie unevenly take the ring.

    Source: shared FORMULAE 4.2, upper bound.
    """
    ring = _ring(route, 2)
    even = np.all([c.members * c.domains == route.degree for c in route.crossings], axis=0)
    launch = route.start + sum(2 * (c.parts - 1) * c.link.latency for c in route.crossings)
    byte = sum(2 * (1 - 1 / c.parts) / c.members_below / c.bandwidth for c in route.crossings)
    return Cost(np.where(even, launch, ring.launch), np.where(even, byte, ring.byte), route.ramp)


def _in_switches(route: Route) -> Cost:
    """NVLS: switches of the innermost level add up what each rank sends, S (1 + 1/n) one way.

    Where a group leaves that level, or its switches cannot add, the ring.
    Source: shared FORMULAE 4.2; with 8 ranks at 473 GB/s this gives 405, 434 and 456 for 5, 6 and 7, measured
    414, 436, 460 (stas00/ml-engineering, H200).
    """
    inner, ring = route.crossings[0], _ring(route, 2)
    if not inner.link.switch_bandwidth:
        return ring
    inside = inner.domains == 1
    byte = np.where(inside, (1 + 1 / route.degree) / inner.link.switch_bandwidth, ring.byte)
    return Cost(np.where(inside, route.start, ring.launch), byte, route.ramp)


def _logarithmic(route: Route) -> Cost:
    """Parallel aggregated trees (PAT), for groups of one rank a node; for others the ring.

    Source: NVIDIA/nccl 2.30.7 src/graph/tuning.cc; shared FORMULAE 4.3.
    """
    ring, fits = _ring(route, 1), route.one_per_node
    hops = np.ceil(np.log2(route.degree)) * route.latency(small=False)
    launch = np.where(fits, route.start + hops, ring.launch)
    return Cost(launch, np.where(fits, ring.byte / LOGARITHMIC, ring.byte), ring.root)


def _hop(route: Route, *, small: bool = False) -> Cost:
    """To the neighbour, over the slowest link between neighbours, which the rank has to itself."""
    byte = _most(np.where(c.crossed, 1 / c.bandwidth, 0.0) for c in route.crossings)
    return Cost(route.start + route.latency(small=small), byte / (SMALL_RING if small else 1), np.zeros(1))


def _trade(route: Route, *, small: bool = False) -> Cost:
    """All partners are one hop away; what goes through each level moves at once, by the rank's own link.

    Source: shared FORMULAE 4.2; that NICs do not add up: NVIDIA/nccl-tests issue 267.
    """
    byte = np.zeros(1)
    passed: Floats = np.zeros(1)  # what shared levels further out add to the link that reaches them
    for crossing in reversed(route.crossings):
        passed = passed + (crossing.members - crossing.members_below)
        byte = np.maximum(byte, passed / route.degree / crossing.bandwidth)
        if not crossing.shared:
            passed = np.zeros(1)
    return Cost(route.start + route.latency(small=small), byte / (SMALL_RING if small else 1), np.zeros(1))


def _latency(crossing: Crossing, small: bool) -> float:
    return crossing.link.small_latency if small else crossing.link.latency


def _most(parts: Iterable[Floats]) -> Floats:
    return reduce(np.maximum, parts)


def _no_dearer(one: Cost, other: Cost) -> bool:
    return all(bool(np.all(a <= b)) for a, b in zip(one, other, strict=True))
