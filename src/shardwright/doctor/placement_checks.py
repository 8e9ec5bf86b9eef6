"""Which ranks of a tensor-parallel group sit on which nodes, by the order of the mesh."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

from shardwright.doctor.finding import Finding, Source
from shardwright.doctor.setting import Setting
from shardwright.measure.islands import Tier
from shardwright.units import format_bandwidth

USUAL_NODE = 8
"""Devices of a node where nobody says; an assumption that is printed."""

DEFAULT_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def degrees_of(setting: Setting) -> dict[str, int] | None:
    """Degree of every axis in the order of the mesh, outermost first; None if they are not all known."""
    order = setting.order or DEFAULT_ORDER
    data = setting.data_ranks
    known = {"pp": setting.pp or 1, "cp": setting.cp or 1, "tp": setting.tp or 1}
    if "dp" in order:
        known["dp"] = data or 1
    else:
        replicate = setting.dp_replicate or 1
        known["dp_replicate"] = replicate
        known["dp_shard"] = max((data or replicate) // replicate, 1)
    if any(axis not in known for axis in order):
        return None
    return {axis: known[axis] for axis in order}


def groups_of(degrees: dict[str, int], axis: str) -> list[list[int]]:
    """Ranks of every group along an axis."""
    names = list(degrees)
    inner = prod(degrees[name] for name in names[names.index(axis) + 1 :])
    size, world = degrees[axis], prod(degrees.values())
    starts = [rank for rank in range(world) if (rank // inner) % size == 0]
    return [[start + step * inner for step in range(size)] for start in starts[: 1 << 14]]


def stage_of(setting: Setting, rank: int) -> int | None:
    """The pipeline rank of a rank, by the order of the mesh."""
    degrees = degrees_of(setting)
    if degrees is None or "pp" not in degrees or degrees["pp"] == 1:
        return None
    names = list(degrees)
    inner = prod(degrees[name] for name in names[names.index("pp") + 1 :])
    return rank // inner % degrees["pp"]


def placement_findings(setting: Setting) -> Iterator[Finding]:
    """Tensor-parallel groups that span nodes, and axes in an order that makes them."""
    tp = setting.tp or 1
    if tp == 1:
        return
    node = setting.gpus_per_node or USUAL_NODE
    assumed = "" if setting.gpus_per_node else f" (assuming nodes of {USUAL_NODE})"
    degrees = degrees_of(setting)
    if degrees is None:
        return
    world = prod(degrees.values())
    if setting.world and world < setting.world:
        world = setting.world
    groups = groups_of(degrees, "tp")
    spanning = [group for group in groups if len({rank // node for rank in group}) > 1]
    inner = list(degrees)[list(degrees).index("tp") + 1 :]
    outside = [axis for axis in inner if degrees[axis] > 1]
    if spanning and world > node:
        first = spanning[0]
        nodes = sorted({rank // node for rank in first})
        yield Finding(
            "tp_across_nodes",
            "certain" if setting.gpus_per_node else "likely",
            f"tp={tp}: {len(spanning)} of {len(groups)} groups span nodes of {node}{assumed}, for "
            "example ranks "
            f"{_short(first)} on nodes {nodes}",
            (),
            (setting.source,),
            (f"use tp of at most {node}, innermost in the mesh",),
            numbers={
                "tp": tp,
                "gpus_per_node": node,
                "groups_across": len(spanning),
                "groups": len(groups),
                "example": first[:16],
            },
        )
    if not spanning:
        yield from _slower_level(setting, tp, groups)
    if outside and setting.order:
        yield Finding(
            "mesh_order",
            "certain",
            "tp is not the innermost axis of the mesh "
            f"{' x '.join(f'{a} {d}' for a, d in degrees.items())}: ranks of a tp "
            f"group are {prod(degrees[a] for a in outside)} apart",
            (),
            (setting.source,),
            numbers={"order": list(degrees)},
        )


def _slower_level(setting: Setting, tp: int, groups: list[list[int]]) -> Iterator[Finding]:
    """Groups that leave the fastest links inside a node: NVLink pairs on a PCIe switch."""
    levels = () if setting.plan is None else setting.plan.cluster.domains
    for fast, slow in pairwise(levels):
        spanning = [group for group in groups if len({rank // fast.ranks for rank in group}) > 1]
        if fast.ranks < 2 or not spanning or slow.ranks > (setting.gpus_per_node or 0):
            continue
        yield Finding(
            "tp_across_nodes",
            "certain",
            f"tp={tp}: {len(spanning)} of {len(groups)} groups leave {fast.name} of {fast.ranks} ranks "
            f"({format_bandwidth(fast.link.bandwidth)}) for {slow.name} "
            f"({format_bandwidth(slow.link.bandwidth)})",
            (),
            (setting.source,),
            (f"use tp of at most {fast.ranks}",),
            numbers={"tp": tp, "fast_ranks": fast.ranks, "groups_across": len(spanning)},
        )
        return


def tp_groups_over(setting: Setting, node: int, tiers: Sequence[Tier], source: Source) -> Iterator[Finding]:
    """Tensor-parallel groups inside nodes of ``node`` devices that leave the islands of a bandwidth map."""
    tp, degrees = setting.tp or 1, degrees_of(setting)
    if tp == 1 or degrees is None:
        return
    island = {device: number for number, group in enumerate(tiers[0].groups) for device in group}
    groups = [group for group in groups_of(degrees, "tp") if len({rank // node for rank in group}) == 1]
    leaving = [group for group in groups if len({island.get(rank % node) for rank in group}) > 1]
    if not leaving:
        return
    most = max(map(len, tiers[0].groups))
    fast, slow = ("" if t.bandwidth is None else f" ({format_bandwidth(t.bandwidth)})" for t in tiers[:2])
    yield Finding(
        "tp_across_nodes",
        "certain",
        f"tp={tp}: {len(leaving)} of {len(groups)} groups leave the fastest links of a node{fast}, for "
        f"example ranks {_short(leaving[0])}: at most {most} devices have these among them, the others have "
        f"slower ones{slow}",
        (),
        (setting.source, source),
        (f"use tp of at most {most}",),
        numbers={"tp": tp, "fast_ranks": most, "groups_across": len(leaving), "example": leaving[0][:16]},
    )


def placement_by_hosts(setting: Setting, hosts: Mapping[int, str], source: Source) -> Iterator[Finding]:
    """The same by the hosts that ranks really run on, as NCCL lists them: launchers may deal ranks out in
    turn."""
    tp, degrees = setting.tp or 1, degrees_of(setting)
    if (
        tp == 1
        or degrees is None
        or len(set(hosts.values())) < 2
        or tp > max(Counter(hosts.values()).values())
    ):
        return
    for group in groups_of(degrees, "tp"):
        found = {hosts[rank] for rank in group if rank in hosts}
        if len(found) > 1:
            yield Finding(
                "tp_across_nodes",
                "certain",
                f"ranks {_short(group)} of a tp group run on {', '.join(sorted(found)[:4])}: ranks of "
                "a node are not "
                "consecutive",
                (),
                (source,),
                (
                    "launch so that ranks of a node are consecutive (srun --distribution=block, or "
                    "torchrun on every node)",
                ),
                numbers={"tp": tp, "example": group[:16]},
            )
            return


def _short(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"[{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}]"
