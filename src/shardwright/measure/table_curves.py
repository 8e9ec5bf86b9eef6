"""Tables of nccl-tests as curves that the planner uses, and as a cluster where nothing else is known."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast, get_args

from shardwright.bandwidth_map import Collective, Curve, MapRecord
from shardwright.cluster import Cluster, Device, Level, Link, device
from shardwright.errors import ClusterError
from shardwright.measure.device_names import preset_of
from shardwright.measure.judgement import Judgement, bus_factor
from shardwright.measure.nccl_table import Table
from shardwright.measure.size_fit import SizeFit, size_fit
from shardwright.measure.table_checks import judge
from shardwright.units import MiB, significant

UNKNOWN_DEVICE = "h100"
"""Stands in where neither a file nor a person names a device that is shipped; it is listed as assumed."""

LARGE = 32 * MiB
"""Bytes from which a message shows the bandwidth of its links."""

SMALL = 64 << 10
"""Bytes up to which it shows their latency."""

PREFERRED: Mapping[str, int] = {
    "all_gather": 0,
    "reduce_scatter": 0,
    "all_reduce": 1,
    "send": 2,
    "all_to_all": 3,
}
"""Collectives from which a link's bandwidth is taken, rings first: switches may add up an all-reduce."""


def curves_of(table: Table, cluster: Cluster) -> list[Curve]:
    """The curve of ``table`` over groups of ``cluster``, of rows that contradict nothing.

    Empty if its collective or ranks are not known, if it has a single rank, or if its ranks do not lie on
    whole domains of the cluster.
    """
    found = judge(table)
    members = members_of(found, cluster)
    if members is None or found.collective not in get_args(Collective):
        return []
    times: dict[int, list[float]] = {}
    for row in found.rows:
        if row.measured is not None and row.size:
            times.setdefault(row.size, []).append(row.measured.time.value)
    if not times:
        return []
    sizes = sorted(times)
    return [
        Curve.checked(
            {
                "collective": cast(Collective, found.collective),
                "members": members,
                "sizes": tuple(sizes),
                "times": tuple(median(times[size]) for size in sizes),
                "source": f"{Path(table.name).name} line {table.line}",
            }
        )
    ]


def members_of(found: Judgement, cluster: Cluster) -> tuple[int, ...] | None:
    """How many of a table's ranks share a domain of each level of ``cluster``; None: not evenly, or unknown.

    Where the text counts no nodes, ranks are taken to fill them one after the other.
    """
    ranks = found.ranks
    if ranks is None or ranks < 2 or ranks > cluster.ranks:
        return None
    nodes = found.nodes or -(-ranks // cluster.gpus_per_node)
    per_node = ranks // nodes
    if per_node * nodes != ranks or per_node > cluster.gpus_per_node or nodes > cluster.nodes:
        return None
    members = []
    for level in cluster.domains:
        if level.ranks <= cluster.gpus_per_node:
            members.append(min(level.ranks, per_node))
        else:
            members.append(per_node * min(level.ranks // cluster.gpus_per_node, nodes))
    whole = all(outer % inner == 0 for inner, outer in pairwise(members))
    return tuple(members) if whole and members[-1] == ranks else None


def tables_cluster(
    tables: Sequence[Table], kind: Device | None = None, base: Cluster | None = None
) -> Cluster:
    """A cluster as large as the largest table, with its links as the tables have them.

    ``kind``: the devices; else those of ``base``, or that the text names. ``base``: a cluster whose other
    numbers, and size if it is larger, are kept. A link's bandwidth is that of the largest message,
    its launch that of the smallest.

    Raises: ClusterError: no table is of two ranks or more, of a known number.
    """
    judged = [found for found in map(judge, tables) if found.rows and (found.ranks or 0) > 1]
    if not judged:
        names = ", ".join(sorted({table.name for table in tables})) or "none"
        raise ClusterError(
            f"tables {names} have no row of two ranks or more that agrees with itself: give a table with its "
            "header and its lines of ranks"
        )
    known, assumed = _device(judged, kind, base)
    per_node, nodes = _shape(judged, known, base, assumed)
    cluster = Cluster.checked(
        {
            "ranks": per_node * nodes,
            "gpus_per_node": per_node,
            "device": known,
            "levels": base.levels if base is not None and base.ranks == per_node * nodes else (),
            "assumed": tuple(assumed),
        }
    )
    cluster = _with_links(cluster, judged)
    hosts = max((found.table.around.hosts for found in judged), key=len)
    files = dict.fromkeys(Path(found.table.name).name for found in judged)
    curves = _once([curve for found in judged for curve in curves_of(found.table, cluster)])
    about = MapRecord(source=f"nccl-tests: {', '.join(files)}", hosts=hosts)
    return cluster.model_copy(update={"curves": tuple(curves), "map": about})


def _device(
    judged: Sequence[Judgement], kind: Device | None, base: Cluster | None
) -> tuple[Device, list[str]]:
    if kind is not None or base is not None:
        return kind or cast(Cluster, base).device, []
    words = [found.table.around.device for found in judged if found.table.around.device]
    for each in words:
        if (known := preset_of(each)) is not None:
            return known, []
    said = f"{words[0]!r} is none that is shipped" if words else "the tables name none"
    stand_in = device(UNKNOWN_DEVICE, fitted=True)
    return stand_in, [f"device={stand_in.name}: {said}; name one with --kind"]


def _shape(
    judged: Sequence[Judgement], kind: Device, base: Cluster | None, assumed: list[str]
) -> tuple[int, int]:
    """Ranks of a node and nodes, that hold every table."""
    most = max(found.ranks or 1 for found in judged)
    placed = [found for found in judged if found.nodes]
    if placed:
        per_node = max(-(-(found.ranks or 1) // (found.nodes or 1)) for found in placed)
        nodes = max(found.nodes or 1 for found in placed)
    else:
        per_node = min(most, kind.gpus_per_node)
        nodes = 1
        assumed.append(f"gpus_per_node={per_node}")
    if base is not None:
        per_node, nodes = max(per_node, base.gpus_per_node), max(nodes, base.nodes)
    return per_node, max(nodes, -(-most // per_node))


def _once(curves: Sequence[Curve]) -> list[Curve]:
    """The finest curve of each collective and kind of group."""
    best: dict[tuple[str, tuple[int, ...]], Curve] = {}
    for curve in curves:
        key = curve.collective, curve.members
        if key not in best or len(curve.sizes) > len(best[key].sizes):
            best[key] = curve
    return list(best.values())


# Links


def _with_links(cluster: Cluster, judged: Sequence[Judgement]) -> Cluster:
    """``cluster`` with the links of each level, inner to outer, as the tables that cross it say."""
    for at in range(len(cluster.domains)):
        crossing = []
        for found in judged:
            members = members_of(found, cluster)
            if members is not None and members[-1] == members[at] and members[at] > (1, *members)[at]:
                crossing.append((found, members))
        crossing.sort(key=lambda each: (PREFERRED.get(each[0].collective, 9), -(each[0].ranks or 0)))
        for found, members in reversed(crossing):  # the preferred one has the last word
            cluster = _with_table(cluster, at, found, members)
    return cluster


def _with_table(cluster: Cluster, at: int, found: Judgement, members: tuple[int, ...]) -> Cluster:
    points = [(row.size, row.measured.time.value) for row in found.rows if row.measured and row.size]
    if found.collective not in PREFERRED or len({size for size, _ in points}) < 2:
        return cluster
    fit = size_fit(*zip(*points, strict=True))
    hops = _hops(found.collective, members, at)
    link = cluster.domains[at].link
    if fit is not None and min(points)[0] <= SMALL:
        link = _launched(link, fit, found.collective, hops)
    size, time = max(points)
    if size >= LARGE:
        ramp = link.ramp * (size / MiB) ** 0.5 if found.collective == "all_reduce" else 0.0
        moving = max(time - link.start - hops * link.latency - ramp, time / 2)
        link = _at_rate(link, found, members, at, size / moving)
    return _replaced(cluster, at, link)


def _at_rate(link: Link, found: Judgement, members: tuple[int, ...], at: int, rate: float) -> Link:
    """``link`` so that the planner's formulas give ``rate``, bytes of payload by time.

    A ring has as many links out of a domain as the group has ranks in it, so that each carries the bus
    bandwidth divided by them; switches add up an all-reduce. Source: shared FORMULAE 4.2, 4.4.
    """
    ranks, inside = members[-1], (1, *members)[at]
    if found.collective == "all_reduce" and link.switch_bandwidth > 0 and ranks > 2 and at == 0:
        bus = rate * bus_factor("all_reduce", ranks)  # without switches no faster than with them
        slower = {"bandwidth": significant(bus)} if bus < link.bandwidth else {}
        added_up = {"switch_bandwidth": significant(rate * (1 + 1 / ranks))}
        return link.model_copy(update=added_up | slower)
    if found.collective == "send":
        bandwidth = rate
    elif found.collective == "all_to_all":
        bandwidth = rate * (ranks - inside) / ranks
    else:
        bandwidth = rate * bus_factor(found.collective, ranks) / inside
    return link.model_copy(update={"bandwidth": significant(bandwidth)})


def _hops(collective: str, members: tuple[int, ...], at: int) -> int:
    """Hops of a ring that need the level, in all rounds of the collective."""
    rounds = {"all_reduce": 2, "send": 0, "all_to_all": 0}.get(collective, 1)
    return rounds * (members[at] // (1, *members)[at] - 1) or 1


def _launched(link: Link, fit: SizeFit, collective: str, hops: int) -> Link:
    """``link`` with the launch of a fit: hops as they are known, as far as they go, and the rest a start."""
    if fit.launch <= 0:
        return link
    hop = min(link.latency, fit.launch / hops)
    start = fit.launch if link.switch_bandwidth else fit.launch - hops * hop
    changed: dict[str, Any] = {
        "latency": hop,
        "small_latency": min(link.small_latency, hop),
        "ll128_latency": min(link.ll128_latency, hop),
        "start": max(start, 0.0),
    }
    if collective == "all_reduce":
        changed["ramp"] = fit.ramp
    return link.model_copy(update={name: significant(value) for name, value in changed.items()})


def _replaced(cluster: Cluster, at: int, link: Link) -> Cluster:
    if cluster.levels:
        levels: list[Level] = list(cluster.levels)
        levels[at] = levels[at].model_copy(update={"link": link})
        return cluster.model_copy(update={"levels": tuple(levels)})
    name = "intra_link" if at == 0 else "inter_link"
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={name: link})})
