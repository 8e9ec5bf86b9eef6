"""Placement: where the groups of every axis lie among the ranks, and their way through the cluster's links.

Rank = sum over axes of index x stride, where the stride of an axis is the product of the degrees inside it in
the order of the mesh. Source: shared FORMULAE 8.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.axes import EXPERT_AXES, MESH_ORDER, MESH_ORDERS, joined_axis
from shardwright.cluster import Cluster
from shardwright.description import nearest
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.plan.collectives import Route, route_through
from shardwright.plan.table import Ints, LayoutTable, distinct

EXPERT_SHARD = "expert_shard"
"""Axis of the ranks that split the parameters of one expert."""

EXPERTS = (*EXPERT_AXES, EXPERT_SHARD)

DATA_SHARD = joined_axis(("dp_shard", "cp"))
DATA_RANKS = joined_axis(("dp_replicate", "dp_shard"))
ALL_DATA = joined_axis(("dp_replicate", "dp_shard", "cp"))

PLACED_AXES = (*MESH_ORDER, DATA_SHARD, DATA_RANKS, ALL_DATA, *EXPERTS)
"""Axes whose groups have a place: of the mesh, joined, and of experts."""

INNER_DATA = MESH_ORDERS.index(("dp_replicate", "dp_shard", "pp", "cp", "tp"))
"""The order that has pp between dp_shard and cp."""

AS_THEY_STAND = 4096
"""Placements up to which a route is computed for each, equal or not."""

ONE = np.ones(1, np.int64)


class Placement(NamedTuple):
    """How the groups of an axis lie: ``degree`` ranks each, ``stride`` apart.

    Where another axis stands between two joined ones they are ``blocks`` of degree / blocks such ranks, the
    blocks ``jump`` apart.
    """

    degree: Ints
    stride: Ints
    blocks: Ints = ONE
    jump: Ints = ONE

    def spread(self, domain: int, ranks: int) -> tuple[Ints, Ints]:
        """Fewest members that a group has in a domain of so many consecutive ranks, and most domains that one
        lies on.

        Groups of an axis may lie differently (3 ranks on nodes of 8); a step is as slow as the worst. Closed
        forms where sizes divide one another, a walk over the ranks where they do not.
        """
        degree, stride, blocks, jump = np.broadcast_arrays(*(np.atleast_1d(part) for part in self))
        if ranks <= domain:
            return degree, np.ones_like(degree)
        inner = degree // blocks
        fewest, most, known = _in_domains(inner, stride, domain)
        several = blocks > 1
        outer, count, outer_known = _in_domains(blocks, jump, domain)
        apart = jump % domain == 0
        known = np.where(several, np.where(apart, known, outer_known), known)
        fewest, most = (
            np.where(several, np.where(apart, fewest, inner * outer), fewest),
            np.where(several, np.where(apart, most * blocks, count), most),
        )
        for at in zip(*np.nonzero(~known), strict=True):
            place = (int(part[at]) for part in (degree, stride, blocks, jump))
            fewest[at], most[at] = _walk(*place, domain, ranks)
        return fewest, most

    def route(self, cluster: Cluster) -> Route:
        """The way of these groups through the levels of ``cluster``."""
        columns = np.broadcast_arrays(*(np.atleast_1d(part) for part in self))
        if columns[0].size <= AS_THEY_STAND:
            return Placement(*columns)._route(cluster)
        few, row = _different([part.ravel() for part in columns])
        return few._route(cluster).at(row.reshape(columns[0].shape))

    def _route(self, cluster: Cluster) -> Route:
        spreads = [self.spread(level.ranks, cluster.ranks) for level in cluster.domains]
        return route_through(self.degree, spreads, cluster)

    def link(self, cluster: Cluster) -> list[str]:
        """For people: the name of the outermost level that the groups of each row need."""
        route = self.route(cluster)
        level = np.zeros(1, np.int64)
        for number, crossing in enumerate(route.crossings):
            level = np.where(crossing.domains_below > 1, number, level)
        levels = np.broadcast_to(level, route.degree.shape)
        rows = levels if route.index is None else levels[route.index]
        return [cluster.domains[row].name for row in rows.ravel()]


def routes_of(cluster: Cluster, table: LayoutTable) -> dict[str, Route]:
    """The ways of all axes of a table."""
    return shared_routes(cluster, [table])[0]


def shared_routes(cluster: Cluster, tables: Sequence[LayoutTable]) -> list[dict[str, Route]]:
    """The ways of all axes of several tables; what they have in common is worked out once."""
    places = [placements(table) for table in tables]
    columns = [
        np.broadcast_arrays(*(np.atleast_1d(part) for part in place))
        for of_table in places
        for place in of_table.values()
    ]
    flat = [np.concatenate([part[n].ravel() for part in columns]) for n in range(len(Placement._fields))]
    few, row = _different(flat)
    route = few._route(cluster)
    rows = iter(np.split(row, np.cumsum([part[0].size for part in columns])[:-1]))
    shapes = iter(part[0].shape for part in columns)
    return [{axis: route.at(next(rows).reshape(next(shapes))) for axis in of_table} for of_table in places]


def _different(columns: Sequence[Ints]) -> tuple[Placement, NDArray[np.intp]]:
    """The different ones of some placements, and which of them each is."""
    degree = columns[0]
    columns = [degree, *(np.where(degree > 1, part, 1) for part in columns[1:])]
    (_, simple), (_, joined) = distinct(*columns[:2]), distinct(*columns[2:])
    _, row = distinct(simple, joined)
    _, first = np.unique(row, return_index=True)
    return Placement(*(column[first] for column in columns)), row


def _in_domains(degree: Ints, stride: Ints, domain: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Members in a domain and domains of a group, and whether sizes divide so that all groups are alike."""
    span = degree * stride
    inside = (domain % np.maximum(span, 1) == 0) | (degree == 1)
    fills = (domain % stride == 0) & (span % domain == 0)
    apart = stride % domain == 0
    members = np.where(inside, degree, np.where(fills & ~apart, domain // stride, 1))
    domains = np.where(inside, 1, np.where(fills & ~apart, span // domain, degree))
    return members, domains, inside | fills | apart


@cache
def _walk(degree: int, stride: int, blocks: int, jump: int, domain: int, ranks: int) -> tuple[int, int]:
    """Fewest members in a domain and most domains, over the groups of one axis of ``ranks`` ranks.

    Only where in a domain a group starts makes a difference.
    """
    inner = degree // blocks
    whole = blocks * jump if blocks > 1 else inner * stride
    between = jump // (inner * stride) if blocks > 1 else 1
    starts = np.zeros(1, np.int64)
    for count, step in ((stride, 1), (between, inner * stride), (max(ranks // whole, 1), whole)):
        starts = np.unique((starts[:, None] + step * np.arange(min(count, domain))) % domain)
    offsets = (jump * np.arange(blocks)[:, None] + stride * np.arange(inner)).ravel()
    at = (starts[:, None] + offsets) // domain
    last = np.ones_like(at, dtype=np.bool_)  # member of a group in a domain
    last[:, :-1] = at[:, 1:] != at[:, :-1]
    members = np.diff(np.flatnonzero(last), prepend=-1)
    return int(members.min()), int(last.sum(axis=1).max())


def _first_ranks(rank: Ints, degree: int, stride: int, blocks: int, jump: int) -> Ints:
    """The first rank of the group of each."""
    first = rank - rank // stride % degree * stride
    return first - first // jump % blocks * jump if blocks > 1 else first


def placements(table: LayoutTable, axes: Iterable[str] = ()) -> dict[str, Placement]:
    """Where the groups of each axis lie, those of experts and of joined axes too; or of some ``axes`` alone.

    ep is cut out of dp_shard x cp x tp, innermost first: out of tp, cp, then dp_shard; where etp is tp, out
    of cp, then dp_shard. What is left of them is expert_shard.
    """
    degrees = {axis: getattr(table, axis) for axis in (*MESH_ORDER, *EXPERT_AXES)}
    return _placements(degrees, table.order, tuple(axes) or PLACED_AXES)


def _placements(degrees: Mapping[str, Ints], order: Ints, axes: Iterable[str]) -> dict[str, Placement]:
    stride = _strides(degrees, order)
    places = {axis: Placement(degrees[axis], stride[axis]) for axis in MESH_ORDER}
    joined: Mapping[str, Callable[[], Placement]] = {
        DATA_SHARD: lambda: _joined(places["cp"], places["dp_shard"]),
        DATA_RANKS: lambda: _joined(places["dp_shard"], places["dp_replicate"]),
        ALL_DATA: lambda: _all_data(places, order == INNER_DATA),
    }
    placed = {
        axis: places[axis] if axis in places else joined[axis]() for axis in axes if axis not in EXPERTS
    }
    if set(EXPERTS).isdisjoint(axes):
        return placed
    cut = (order == INNER_DATA) & (degrees["pp"] > 1)
    experts = _expert_placements(degrees, stride["dp_shard"], cut)
    return placed | {axis: experts[axis] for axis in axes if axis in EXPERTS}


def _all_data(places: Mapping[str, Placement], inner_data: NDArray[np.bool_]) -> Placement:
    """All data ranks and cp: two of the three axes follow one another in every order."""
    cp, dp_shard, dp_replicate = (places[axis] for axis in ("cp", "dp_shard", "dp_replicate"))
    inner = cp.degree * np.where(inner_data, 1, dp_shard.degree)
    outer = dp_replicate.degree * np.where(inner_data, dp_shard.degree, 1)
    outer_stride = np.where(inner_data, dp_shard.stride, dp_replicate.stride)
    return _joined(Placement(inner, cp.stride), Placement(outer, outer_stride))


def _expert_placements(
    degrees: Mapping[str, Ints], jump: Ints, cut: NDArray[np.bool_]
) -> dict[str, Placement]:
    """ep, etp and expert_shard; ``cut``: ranks of dp_shard are ``jump`` apart, another axis between."""
    ep, etp = degrees["ep"], degrees["etp"]
    near = degrees["cp"] * degrees["tp"] // etp  # ranks that follow one another, etp apart
    near, far = np.where(cut, near, near * degrees["dp_shard"]), np.where(cut, degrees["dp_shard"], 1)
    inner = np.gcd(ep, near)
    outer = ep // inner
    left_near, left_far = near // inner, np.maximum(far // outer, 1)
    return {
        "ep": _joined(Placement(inner, etp), Placement(outer, jump)),
        "etp": Placement(etp, np.ones_like(etp)),
        EXPERT_SHARD: _joined(Placement(left_near, etp * inner), Placement(left_far, jump * outer)),
    }


def _joined(inner: Placement, outer: Placement) -> Placement:
    """Groups of two axes flattened, ``inner`` varying fastest."""
    cut = (inner.degree > 1) & (outer.degree > 1) & (outer.stride != inner.degree * inner.stride)
    return Placement(
        inner.degree * outer.degree,
        np.where(inner.degree > 1, inner.stride, outer.stride),
        np.where(cut, outer.degree, 1),
        np.where(cut, outer.stride, 1),
    )


def _strides(degrees: Mapping[str, Ints], order: Ints) -> dict[str, Ints]:
    """Ranks between neighbours along each axis of the mesh."""
    by_order: list[dict[str, Ints]] = []
    for axes in MESH_ORDERS:
        stride: dict[str, Ints] = {}
        inside: Ints = np.ones(1, np.int64)
        for axis in reversed(axes):
            stride[axis], inside = inside, inside * degrees[axis]
        by_order.append(stride)
    first = int(order.flat[0]) if order.size else 0
    if (order == first).all():
        return by_order[first]
    return {axis: np.choose(order, [stride[axis] for stride in by_order]) for axis in MESH_ORDER}


def groups_of(axis: str, layout: Layout) -> list[tuple[int, ...]]:
    """Ranks of every group of an axis of ``layout``, or of joined axes, by their first rank.

    Raises: LayoutError: no such axis; the message names the nearest.
    """
    if axis not in PLACED_AXES:
        raise LayoutError(f"axis {axis!r} is unknown{nearest(axis, PLACED_AXES)}")
    degrees = {name: np.array([getattr(layout, name)]) for name in (*MESH_ORDER, *EXPERT_AXES)}
    places = _placements(degrees, np.array([MESH_ORDERS.index(layout.order)]), (axis,))
    degree, stride, blocks, jump = (int(part[0]) for part in places[axis])
    rank = np.arange(layout.ranks)
    first = _first_ranks(rank, degree // blocks, stride, blocks, jump)
    return [tuple(rank[first == own].tolist()) for own in np.unique(first)]
