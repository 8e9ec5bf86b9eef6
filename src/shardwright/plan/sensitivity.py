"""What one change would do to a plan, of its layout or of a bandwidth; and what makes it fit."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.cluster import Cluster
from shardwright.layout import Layout
from shardwright.plan.collectives import with_curves_of
from shardwright.plan.memory import device_memory
from shardwright.plan.neighbours import neighbours
from shardwright.plan.pipeline import simulated_step
from shardwright.plan.rules import broken_rules
from shardwright.plan.table import Floats, table_of
from shardwright.planfile import Plan

SAVERS: Mapping[str, str] = {
    "parameters": "split them over more ranks (dp_shard, tp, pp; ep for experts)",
    "gradients": "split them over more ranks (dp_shard, tp, pp), or use zero 2 or 3",
    "optimizer": "split it over more ranks (dp_shard), or offload the optimizer",
    "activations": "recompute more, use a smaller micro_batch, split the sequence (sp, cp), or offload them",
    "logits": "take the loss in parts (loss_chunks), a smaller micro_batch, or more tp",
    "gathered": "use zero 3, or split the model (tp, pp)",
    "communicators": "use fewer axes",
    "context": "nothing of the layout changes it",
    "margin": "what is allocated must fall: it is a share of it",
}
"""What makes each term of the ledger smaller."""


def sensitivities(plan: Plan) -> list[dict[str, Any]]:
    """Single changes, with ranks and global batch as they are, against the plan itself.

    Keys of each: ``kind`` (layout or bandwidth), ``change``, ``label``, ``allowed``, ``rules`` [code,
    message] that forbid it, ``step_time`` and ``memory`` of what it makes, ``step_time_change``,
    ``memory_change``, ``fits``; None where it is forbidden.
    """
    return [*_layout_changes(plan), *_bandwidth_changes(plan)]


def _layout_changes(plan: Plan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    made: list[Layout] = []
    for neighbour in neighbours(plan.layout, plan.model, plan.job):
        rules = [{"code": "ranks", "message": neighbour.reason}]
        label = None
        if neighbour.fields is not None:
            found = broken_rules(neighbour.fields, plan.model, plan.job, plan.cluster)
            rules = [fault._asdict() for fault in found]
            label = Layout.model_construct(**neighbour.fields).label
            if not rules:
                made.append(Layout(**neighbour.fields))
        rows.append({"kind": "layout", "change": neighbour.change, "label": label, "rules": rules})
    own, *others = _priced(plan, [plan.layout, *made])
    results = iter(others)
    limit = plan.cluster.device.memory
    return [row | _against(next(results) if not row["rules"] else None, own, limit) for row in rows]


def _priced(plan: Plan, layouts: Sequence[Layout]) -> list[tuple[float, float]]:
    """Step time [s] and memory of a device [B] of some layouts."""
    table = table_of(layouts, plan.model.layers)
    device: Floats = device_memory(plan.model, plan.job, plan.cluster.device, table)
    time = simulated_step(plan.model, plan.job, plan.cluster, layouts).time
    return list(zip(time.tolist(), np.broadcast_to(device, time.shape).tolist(), strict=True))


def _against(priced: tuple[float, float] | None, own: tuple[float, float], limit: float) -> dict[str, Any]:
    """Time and memory of a change against the plan's own."""
    if priced is None:
        names = ("step_time", "memory", "step_time_change", "memory_change", "fits")
        return {"allowed": False, **dict.fromkeys(names)}
    return {
        "allowed": True,
        "step_time": priced[0],
        "memory": priced[1],
        "step_time_change": priced[0] - own[0],
        "memory_change": priced[1] - own[1],
        "fits": priced[1] <= limit,
    }


# Bandwidths


def _bandwidth_changes(plan: Plan) -> list[dict[str, Any]]:
    """The same layout on a cluster of which one number is twice as large."""
    ((time, memory),) = _priced(plan, [plan.layout])
    rows = []
    for name, cluster in doubled_clusters(plan.cluster, plan.layout).items():
        step = simulated_step(plan.model, plan.job, cluster, [plan.layout])
        priced = float(step.time[0]), memory
        row = {"kind": "bandwidth", "change": f"{name} x 2", "label": plan.layout.label, "rules": []}
        rows.append(row | _against(priced, (time, memory), plan.cluster.device.memory))
    return rows


def doubled_clusters(cluster: Cluster, layout: Layout) -> dict[str, Cluster]:
    """Clusters with one thing doubled, by its name: the bandwidth of each level of links, of the device's
    memory, the peaks of computation, and where something is offloaded the bandwidth to the host. What was
    measured of a level becomes as much shorter as the model says."""
    found = {}
    levels = cluster.domains
    for number, level in enumerate(levels):
        link = level.link
        faster = {"bandwidth": 2 * link.bandwidth, "switch_bandwidth": 2 * link.switch_bandwidth}
        other = level.model_copy(update={"link": link.model_copy(update=faster)})
        changed = (*levels[:number], other, *levels[number + 1 :])
        other_cluster = cluster.model_copy(update={"levels": changed})
        found[f"bandwidth of {level.name}"] = with_curves_of(cluster, other_cluster)
    device = cluster.device
    peaks = {name: 2 * getattr(device, name) for name in ("bf16", "fp8", "fp32", "fp64")}
    parts = {"memory bandwidth": {"memory_bandwidth": 2 * device.memory_bandwidth}, "peak FLOP/s": peaks}
    if layout.offload != "none":
        parts["host bandwidth"] = {"host_bandwidth": 2 * device.host_bandwidth}
    for name, changes in parts.items():
        found[name] = cluster.model_copy(update={"device": device.model_copy(update=changes)})
    return found


# Fitting


def fitting(plan: Plan, heaviest: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far a plan is from fitting, which terms to attack first, and which single changes make it fit.

    ``terms``: of the heaviest rank, largest first, each with what makes it smaller. ``ways``: changes of the
    layout that fit, cheapest first; where the device has room there is nothing to attack, and both are empty.
    """
    limit, total = plan.cluster.device.memory, int(heaviest["total"])
    on_host = int(heaviest["host_optimizer"]) + int(heaviest["host_activations"])
    room = plan.cluster.device.host_memory
    document = {
        "fits": total <= limit and on_host <= room,
        "limit": limit,
        "total": total,
        "left": limit - total,
    }
    document |= {"on_host": on_host, "host_limit": room}
    if total <= limit:
        return document | {"terms": [], "ways": []}
    terms = sorted(SAVERS, key=lambda term: -float(heaviest[term]))
    ways = [row for row in changes if row["kind"] == "layout" and row["fits"]]
    names = ("change", "label", "memory", "step_time", "step_time_change")
    return document | {
        "terms": [
            {"term": term, "bytes": heaviest[term], "saver": SAVERS[term]} for term in terms if heaviest[term]
        ],
        "ways": [
            {name: row[name] for name in names}
            for row in sorted(ways, key=lambda row: float(row["step_time"]))
        ],
    }
