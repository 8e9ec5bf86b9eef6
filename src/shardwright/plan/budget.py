"""Traffic of a plan by axis, and the bandwidth budget: what each level of links carries in a step.

A ring's bytes lie on the levels as its hops do, those of an all-to-all as its partners do. All levels carry
their part at once, so that a flow takes as long as its slowest level: what is exposed of it counts there, and
the others are hidden behind it. Exposed times add up to those of the step. What waiting for another stage
costs is in the bubble, not here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shardwright.layout import OFFLOAD_KINDS
from shardwright.plan.accounting import accounting_row, is_trained
from shardwright.plan.collectives import Crossing, Route
from shardwright.plan.experts import copies_per_token, dispatch_time, nodes_of_a_token
from shardwright.plan.flow import Flow
from shardwright.plan.placement import EXPERT_SHARD, placements
from shardwright.plan.schedule import SCHEDULES
from shardwright.plan.shards import unit_elements
from shardwright.plan.stage_ledger import saved_by_blocks
from shardwright.plan.stages import most_expert_blocks, slowest_blocks
from shardwright.plan.step import flow_time, updated_elements
from shardwright.plan.table import LayoutTable
from shardwright.plan.traffic import merged, shard_axis, traffic
from shardwright.planfile import Plan

HOST = "host"
"""Axis and link of what is copied to host memory and back."""

STAGE_SEND = ("pp", "send")
"""The flow whose waiting is in the bubble."""


def traffic_rows(plan: Plan, table: LayoutTable, exposed: Mapping[str, float]) -> list[dict[str, Any]]:
    """Flows of a step; an axis's exposed time is shared out by how long each of its flows is busy.

    Gradients of experts count to the shard axis in the step: flows of expert_shard share its time.
    """
    flows, places = _flows(plan, table), placements(table)
    shard = shard_axis(table)
    paid_by = {EXPERT_SHARD: shard}
    shares = {key: 0.0 if key == STAGE_SEND else busy for key, (_, busy) in flows.items()}
    of_axis: dict[str, float] = {}
    for (axis, _), share in shares.items():
        payer = paid_by.get(axis, axis)
        of_axis[payer] = of_axis.get(payer, 0.0) + share
    rows = []
    for key, (flow, busy) in flows.items():
        link = places[flow.axis].link(plan.cluster)[0]
        each = float(flow.payload_bytes[0] / max(flow.launches[0], 1))
        payer = paid_by.get(flow.axis, flow.axis)
        own = exposed.get(payer, 0.0) * shares[key] / of_axis[payer] if of_axis[payer] else 0.0
        rows.append(
            {
                "axis": flow.axis,
                "collective": flow.collective,
                "degree": int(flow.degree[0]),
                "payload_bytes": int(flow.payload_bytes[0]),
                "bytes": float(flow.sent_bytes[0]),
                "launches": int(flow.launches[0]),
                "link": link,
                "link_source": places[flow.axis].route(plan.cluster).source(flow.collective, each, link),
                "busy_time": max(busy, own),  # the rank that computes longest may send more than the mean
                "exposed_time": own,
            }
        )
    return rows


def _flows(plan: Plan, table: LayoutTable) -> dict[tuple[str, str], tuple[Flow, float]]:
    """Flows that the layout has, merged by axis and collective, and how long each keeps its link busy [s].

    A unit without trained parameters has gradients of no bytes, which nobody reduces.
    """
    every = [flow for flow in traffic(plan.model, plan.job, table) if flow.payload_bytes[0]]
    routes = {axis: place.route(plan.cluster) for axis, place in placements(table).items()}
    times: dict[tuple[str, str], float] = {}  # of each size apart: a time is no multiple of the bytes
    for flow in every:
        key = (flow.axis, flow.collective)
        times[key] = times.get(key, 0.0) + float(flow_time(flow, routes[flow.axis])[0])
    trades = ("ep", "all_to_all")
    if trades in times:  # grouped by node, or as long as the fullest rank takes
        each = dispatch_time(plan.model, plan.job, table, routes["ep"])
        times[trades] = float(np.ravel(each * table.microbatches * most_expert_blocks(table, plan.model))[0])
    return {(flow.axis, flow.collective): (flow, times[flow.axis, flow.collective]) for flow in merged(every)}


def budget_rows(
    plan: Plan, table: LayoutTable, flows: list[dict[str, Any]], exposed: Mapping[str, float], step: float
) -> list[dict[str, Any]]:
    """What an average rank sends over each level of links for each axis in a step, innermost level first.

    ``share`` is busy over step time. Under ``host`` stand copies of offloaded tensors and the update there.
    """
    routes = {axis: place.route(plan.cluster) for axis, place in placements(table).items()}
    total: dict[tuple[str, str], list[float]] = {}
    for row in flows:
        amounts = _on_levels(plan, row, routes[row["axis"]])
        slowest = max(amounts, key=lambda level: amounts[level][1])
        for level, (sent, time) in amounts.items():
            found = total.setdefault((level, row["axis"]), [0.0, 0.0, 0.0])
            found[0] += sent
            found[1] += row["busy_time"] if level == slowest else min(time, row["busy_time"])
            found[2] += row["exposed_time"] if level == slowest else 0.0
    if plan.layout.offload != "none":
        sent = _host_bytes(plan, table)
        waited = exposed.get(HOST, 0.0)
        busy = max(sent / plan.cluster.device.host_bandwidth, waited)
        total[HOST, HOST] = [sent, busy, waited]
    order = [*(level.name for level in plan.cluster.domains), HOST]
    return [
        {
            "link": link,
            "axis": axis,
            "bytes": sent,
            "busy_time": busy,
            "hidden_time": busy - waited,
            "exposed_time": waited,
            "share": busy / step,
        }
        for (link, axis), (sent, busy, waited) in sorted(
            total.items(), key=lambda item: order.index(item[0][0])
        )
    ]


def _on_levels(plan: Plan, row: Mapping[str, Any], route: Route) -> dict[str, tuple[float, float]]:
    """Bytes of a flow on each level that its groups cross, and how long they take there [s]."""
    names = [level.name for level in plan.cluster.domains]
    places = [_place(crossing, route) for crossing in route.crossings]
    if row["collective"] == "all_to_all":
        parts = _traded(plan, row, places)
    else:
        loops = plan.layout.chunks > 1 and not SCHEDULES[plan.layout.schedule].v_shape
        closed = loops or (row["axis"], row["collective"]) != STAGE_SEND
        parts = _passed_on(row, places, closed)
    return {
        name: (sent, sent / place.bandwidth)
        for name, place, sent in zip(names, places, parts, strict=True)
        if sent
    }


class _Place(NamedTuple):
    """One level as the only layout of a plan passes it, see collectives.py:Crossing."""

    members: int
    domains: int
    members_below: int
    domains_below: int
    bandwidth: float


def _place(crossing: Crossing, route: Route) -> _Place:
    columns = (crossing.members, crossing.domains, crossing.members_below, crossing.domains_below)
    counts = [int(np.ravel(route.spread(column.astype(np.float64)))[0]) for column in columns]
    return _Place(counts[0], counts[1], counts[2], counts[3], crossing.bandwidth)


def _passed_on(row: Mapping[str, Any], places: list[_Place], closed: bool) -> list[float]:
    """Bytes on each level of a ring, whose last hop crosses the outermost, or of a chain without it."""
    hops = [place.domains_below - place.domains for place in places]
    if closed:
        hops[max(level for level, count in enumerate(hops) if count)] += 1
    return [row["bytes"] * count / sum(hops) for count in hops]


def _traded(plan: Plan, row: Mapping[str, Any], places: list[_Place]) -> list[float]:
    """Bytes on each level of an all-to-all: as its partners lie; by node, one copy of a token to a node."""
    nodes = places[-1].domains_below
    if row["axis"] == "ep" and plan.layout.dispatch == "by_node" and nodes > 1:
        copies = copies_per_token(plan.model, plan.job)
        remote = float(nodes_of_a_token(plan.model, nodes)) * (1 - 1 / nodes) / copies
        inside = row["payload_bytes"] * (1 - nodes / row["degree"])
        return [inside, *[0.0] * (len(places) - 2), row["payload_bytes"] * remote]
    return [row["payload_bytes"] * (place.members - place.members_below) / row["degree"] for place in places]


def _host_bytes(plan: Plan, table: LayoutTable) -> float:
    """Copied to the host and back in a step: saved tensors of every microbatch twice, gradients down and
    parameters up [B]."""
    model, job = plan.model, plan.job
    blocks, with_experts = slowest_blocks(table, model), most_expert_blocks(table, model)
    copied = 0.0
    if plan.layout.offload in OFFLOAD_KINDS[2:]:
        copied += 2 * plan.layout.microbatches * float(saved_by_blocks(plan, table, blocks, with_experts)[0])
    if "optimizer" in plan.layout.offload:
        row = accounting_row(job.accounting, job.precision)
        trained = unit_elements(model, table, lambda tensor: float(is_trained(job, tensor)), job.adapters)
        updated = updated_elements(table, blocks, with_experts, trained)
        copied += (row.gradient + row.weight) * float(updated[0])
    return copied
