"""Time of one optimizer step: computation, bubble, exposed communication by axis, optimizer.

What one block, the embedding and the head take is in plan/parts.py. Communication of the shard axes runs
beside computation as torch's ``fully_shard`` issues it: the next unit's all-gather under the forward of this
one; in backward the next all-gather and this unit's reduce-scatter under the next block. In a pipeline
gradients are reduced when the schedule is through, so nothing hides them. What the device cannot overlap
(``Device.overlap``), the slowing of computation beside a collective, is exposed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Cluster
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.accounting import accounting_row
from shardwright.plan.activations import WIDE_BYTES
from shardwright.plan.bubble import RankTimes, least_bubble, makespan_bubble
from shardwright.plan.busiest import (
    EVERY,
    INSIDE,
    BusiestRank,
    busiest_rank,
    least_busy,
    with_again,
    work_times,
)
from shardwright.plan.collectives import Route, collective_time
from shardwright.plan.compute import needed_flops_per_token, optimizer_time_per_parameter
from shardwright.plan.copies import copy_time
from shardwright.plan.data_axes import DataTimes, UnitTimes, data_times
from shardwright.plan.flow import Flow
from shardwright.plan.held_units import busiest_units
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD
from shardwright.plan.parts import Part, Parts, beyond, hop_time, part_times
from shardwright.plan.placement import routes_of
from shardwright.plan.shards import EXPERT_BLOCK, EXPERTS, TIED, UnitElements
from shardwright.plan.stages import (
    Work,
    expert_layers,
    most_expert_blocks,
    slowest_blocks,
    stage_unevenness,
)
from shardwright.plan.table import Floats, Ints, LayoutTable, added, by_schedule, either
from shardwright.plan.traffic import (
    optimizer_flows,
    routing_flows,
    shard_axis,
    share_flows,
    tied_flows,
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, a row a layout; the columns broadcast. ``bubble`` is idle time of a pipeline rank;
    without one, 0. ``inside`` is computation of the busiest rank with what is exposed in it.
    """

    inside: Floats
    bubble: Floats
    outside: Mapping[str, Floats]  # exposed once a step, by axis
    copies: Floats  # of parameters and gradients
    optimizer: Floats
    busiest: BusiestRank
    microbatches: Ints

    @property
    def time(self) -> Floats:
        """The whole step."""
        return added(self.inside, self.bubble, *self.outside.values(), self.copies, self.optimizer)

    @property
    def compute(self) -> Floats:
        """Computation alone, and copies of parameters and gradients."""
        return added(self.microbatches * self.busiest.sum("forward", "backward"), self.copies)

    @property
    def exposed(self) -> Mapping[str, Floats]:
        """Exposed communication by axis; host: copies to and from offloaded tensors."""
        found = {axis: self.microbatches * self.busiest.sum(axis) for axis in INSIDE}
        for axis, time in self.outside.items():
            found[axis] = found.get(axis, 0.0) + time
        return found


class Pace(NamedTuple):
    """Seconds of a microbatch on the rank of a pipeline that has most to do: in all, of the forward pass with
    half of what is exposed, and of the gradients of weights; without a pipeline, the first alone."""

    busy: Floats
    forward: Floats
    weight_gradients: Floats


class Inside(NamedTuple):
    """Seconds of a step that all microbatches take, and who takes most for one."""

    time: Floats  # of the busiest rank, with what is exposed in it
    bubble: Floats
    busiest: BusiestRank


class Outside(NamedTuple):
    """Seconds that a step takes once besides: exposed, by axis, and the optimizer's update."""

    exposed: Mapping[str, Floats]
    copies: Floats
    update: Floats


def step_time(
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    table: LayoutTable,
    routes: Mapping[str, Route] | None = None,
    parts: Parts | None = None,
) -> StepTime:
    """The step of every row of ``table``; ``routes`` and ``parts`` if they are at hand."""
    routes = routes or routes_of(cluster, table)
    parts = parts or part_times(model, job, cluster, table, routes)
    inside = inside_time(model, job, table, routes, parts)
    outside = outside_time(model, job, cluster, table, routes, parts)
    return StepTime(
        inside.time,
        inside.bubble,
        outside.exposed,
        outside.copies,
        outside.update,
        inside.busiest,
        table.microbatches,
    )


def pace_of(model: ModelSpec, table: LayoutTable, parts: Parts) -> Pace:
    """How fast the busiest rank of each layout's pipeline is."""
    rank, busy = busiest_rank(model, table, parts)
    return _pace(table, rank, busy)


def inside_time(
    model: ModelSpec, job: Job, table: LayoutTable, routes: Mapping[str, Route], parts: Parts
) -> Inside:
    """What does not depend on how the data axes split."""
    rank, busy = busiest_rank(model, table, parts)
    bubble = idle_time(model, job, table, routes, _pace(table, rank, busy))
    return Inside(table.microbatches * busy, bubble, rank)


def least_time(model: ModelSpec, table: LayoutTable, parts: Parts) -> Floats:
    """What a step takes at least: the work of all ranks of a pipeline, shared out evenly, none idle."""
    one = np.ones((1,) * table.pp.ndim)
    whole = Work(model.layers * one, sum(expert_layers(model)) * one, one, one)
    return table.microbatches * work_times(parts, [whole], EVERY)[0] / table.pp


def least_inside(model: ModelSpec, table: LayoutTable, parts: Parts) -> Floats:
    """What all microbatches take at least, in any order of a grid's meshes and however its data axes split:
    the work of the busiest rank, and what a schedule leaves idle without hops [s]."""
    idle = by_schedule(table.schedule, least_bubble, table.pp, table.chunks, table.microbatches)
    busy = least_busy(model, table, parts)
    return (table.microbatches + idle * stage_unevenness(table, model)) * busy


def outside_time(
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    table: LayoutTable,
    routes: Mapping[str, Route],
    parts: Parts,
    data: DataTimes | None = None,
) -> Outside:
    """What the data axes and the optimizer add; ``data`` if it is at hand."""
    shard, overlap = shard_axis(table), cluster.device.overlap * job.program.data_hidden
    staged = overlap * job.program.stage_hidden
    blocks, with_experts = slowest_blocks(table, model), most_expert_blocks(table, model)
    share = with_experts / np.maximum(blocks, 1e-9)
    block = parts.block
    if parts.experts is not None:
        times = ((1 - share) * a + share * b for a, b in zip(block[:2], parts.experts[:2], strict=True))
        block = Part(*(np.asarray(time) for time in times))
    data = data or data_times(model, job, table, routes)
    units, elements = _units(model, data, share, table.pp > 1), data.trained
    copies = copy_time(job, cluster.device, table, blocks, with_experts, data.gathered, elements)
    exposed = {shard if axis == data.shard else axis: time for axis, time in data.scalars.items()}
    exposed[shard] = exposed[shard] + _exposed_shard(table, blocks, units, block, parts.head, overlap, staged)
    exposed["dp_replicate"] = exposed["dp_replicate"] + _exposed_replicate(
        table, blocks, units, block, overlap, staged
    )
    held = busiest_units(model, table)
    once = [
        *share_flows(model, job, table, held),
        *routing_flows(model, job, table, held),
        *tied_flows(model, job, table),
        *optimizer_flows(model, job, table, held),
    ]
    for flow in once:
        axis = shard if flow.axis == "expert_shard" else flow.axis
        exposed[axis] = exposed.get(axis, 0.0) + flow_time(flow, routes[flow.axis])
    resting = updated_elements(table, blocks, with_experts, elements)
    offloaded = table.offload & 1
    update = resting * optimizer_time_per_parameter(job, cluster.device)
    if offloaded.any():
        exposed["host"] = _host_update(job, cluster, table, resting)
        update = np.where(offloaded, 0.0, update)
    return Outside(exposed, copies, update)


def flow_time(flow: Flow, route: Route) -> Floats:
    """How long a flow keeps its link busy [s]."""
    return collective_time(flow.collective, flow.payload_bytes, flow.launches, route)


def tokens_per_second_per_device(job: Job, cluster: Cluster, time: Floats) -> Floats:
    """Throughput of one device [tokens/s]."""
    return np.asarray(job.tokens_per_step / (time * cluster.ranks))


def mfu(model: ModelSpec, job: Job, cluster: Cluster, time: Floats) -> Floats:
    """Model FLOPs utilisation: full-attention count over the dense peak."""
    flops = needed_flops_per_token(model, job) * job.tokens_per_step
    return np.asarray(flops / (time * cluster.ranks * cluster.device.peak(job.precision)))


def _pace(table: LayoutTable, rank: BusiestRank, busy: Floats) -> Pace:
    if (table.pp == 1).all():
        none = np.zeros((1,) * table.pp.ndim)
        return Pace(busy, none, none)
    once = rank._replace(apart=np.zeros((1,) * table.pp.ndim))
    ahead = [a + b / 2 for a, b in zip(once.times("forward"), once.times(*INSIDE), strict=True)]
    axis = rank.spread and rank.spread.axis
    weights = with_again(once.times("weight_gradients"), rank.parts, rank.works, EVERY, rank.apart, axis)
    return Pace(busy, rank.pick(ahead), rank.pick(weights))


def idle_time(
    model: ModelSpec, job: Job, table: LayoutTable, routes: Mapping[str, Route], pace: Pace
) -> Floats:
    """Idle time of a pipeline rank [s]: the closed form of each schedule, for the slowest rank's times; were
    all its stages as long as the longest."""
    if (table.pp == 1).all():
        return np.zeros((1,) * table.pp.ndim)

    def idle(name: str, p: Floats, v: Floats, m: Floats, *times: Floats) -> Floats:
        return makespan_bubble(name, p, v, m, RankTimes(*times))

    uneven, hop = stage_unevenness(table, model), hop_time(model, job, table, routes)
    busy, forward, weight = pace
    wait = np.where(table.pp > 1, table.chunks * job.program.chunk_wait, 0.0)
    ahead, back = forward * uneven + wait / 2, (busy - forward - weight) * uneven + wait / 2
    times = (ahead, back, weight * uneven, hop)
    bubble = by_schedule(table.schedule, idle, table.pp, table.chunks, table.microbatches, *times)
    return bubble + table.microbatches * wait


def updated_elements(
    table: LayoutTable, blocks: Floats, with_experts: Floats, elements: Mapping[str, UnitElements]
) -> Floats:
    """Trained parameters that a rank updates."""
    ends = elements[HEAD].shard + elements[EMBEDDING].shard
    ends = np.where(table.pp > 1, 0.5 * (ends + elements[TIED].shard), ends)
    resting = (blocks - with_experts) * elements[BLOCK].shard + ends
    if elements[EXPERTS].whole.any():
        resting = resting + with_experts * (elements[EXPERT_BLOCK].shard + elements[EXPERTS].shard)
    return np.asarray(resting)


def _host_update(job: Job, cluster: Cluster, table: LayoutTable, resting: Floats) -> Floats:
    """Optimizer on the host: gradients down, the update there, parameters up, one after the other.

    Source: ZeRO-Offload, arXiv:2101.06840, section 4, without its delayed update.
    """
    device, row = cluster.device, accounting_row(job.accounting, job.precision)
    copied = (row.gradient + row.weight) / device.host_bandwidth
    touched = 4 * WIDE_BYTES[job.precision] + 3 * row.moment  # p, m, v, g read; p, m, v written
    return np.where(table.offload & 1, resting * (copied + touched / device.host_memory_bandwidth), 0.0)


# Shard and replicate axes


def _units(
    model: ModelSpec, data: DataTimes, share: Floats, piped: NDArray[np.bool_]
) -> dict[str, UnitTimes]:
    """Times of embedding, mean block and head.

    Without a pipeline tied embeddings stand as EMBEDDING: gathered for the look-up, their gradient whole
    after its backward; the ends of a pipeline have a copy each.
    """
    every = data.units
    units = {kind: every[kind] for kind in (EMBEDDING, BLOCK, HEAD)}
    if model.moe is not None:
        columns = zip(every[BLOCK], every[EXPERT_BLOCK], every[EXPERTS], strict=True)
        units[BLOCK] = UnitTimes(*((1 - share) * dense + share * (b + e) for dense, b, e in columns))
    if model.tied_embeddings:
        first, head = units[EMBEDDING], units[HEAD]
        copy = UnitTimes(*(a + b for a, b in zip(first, every[TIED], strict=True)))
        units[EMBEDDING] = UnitTimes(*(np.where(piped, a, b) for a, b in zip(copy, head, strict=True)))
        units[HEAD] = UnitTimes(*(np.where(piped, a, b) for a, b in zip(head, first, strict=True)))
    return units


def _exposed_shard(
    table: LayoutTable,
    blocks: Floats,
    units: Mapping[str, UnitTimes],
    times: Part,
    end: Part,
    overlap: float,
    staged: float,
) -> Floats:
    """Exposed time on the shard axes: gathers of each forward pass, gathers and reductions of backward."""
    embedding, block, head = units[EMBEDDING], units[BLOCK], units[HEAD]
    inner = block.gather + (blocks - 1) * beyond(block.gather, times.forward, overlap)
    last_gather = beyond(head.gather, times.forward, overlap)

    def piped() -> Floats:
        """No rank holds both ends; gradients are reduced when the schedule is through."""
        reduced = blocks * beyond(block.reduce, times.backward, staged)
        reduced = reduced + np.maximum(head.reduce, embedding.reduce)
        return inner + (np.maximum(embedding.gather, last_gather) + reduced)

    def alone() -> Floats:
        gathers = embedding.gather + inner + last_gather  # nothing runs yet that could hide the first two
        return _exposed_alone(table, blocks, units, times, gathers, end, overlap)

    split = (table.shard > 1) | (table.expert_shard > 1) & (table.zero_stage > 0)
    exposed = either(table.pp > 1, piped, alone)
    return exposed if split.all() else np.where(split, exposed, 0.0)


def _exposed_alone(
    table: LayoutTable,
    blocks: Floats,
    units: Mapping[str, UnitTimes],
    times: Part,
    gathers: Floats,
    end: Part,
    overlap: float,
) -> Floats:
    """Without a pipeline. Backward, a block hides the reduction of the unit before it and, in stage 3, the
    gather of the one after."""
    embedding, block, head = units[EMBEDDING], units[BLOCK], units[HEAD]
    backward, stage, m = times.backward, table.zero_stage, table.microbatches
    last = block.reduce + embedding.reduce  # after the last block only the embedding's gradient is left
    reductions = beyond(head.reduce, backward, overlap)
    reductions = reductions + (blocks - 1) * beyond(block.reduce, backward, overlap)
    alone = beyond(head.reduce, backward, overlap)
    several = beyond(head.reduce + block.gather, backward, overlap)  # first backward, those between, last
    several = several + np.maximum(blocks - 2, 0) * beyond(block.reduce + block.gather, backward, overlap)
    several = several + beyond(block.reduce, backward, overlap)
    stage3 = beyond(block.gather, end.backward, overlap) + np.where(blocks == 1, alone, several)
    per_step = gathers + np.where(stage == 2, m, 1) * (reductions + last)
    return np.where(stage == 3, m * (gathers + stage3 + last), per_step)


def _exposed_replicate(
    table: LayoutTable,
    blocks: Floats,
    units: Mapping[str, UnitTimes],
    times: Part,
    overlap: float,
    staged: float,
) -> Floats:
    """Exposed time on dp_replicate: one all-reduce of each unit, under the last microbatch's backward; in a
    pipeline after it."""
    if (table.dp_replicate == 1).all():
        return np.zeros((1,) * table.pp.ndim)
    embedding, block, head = units[EMBEDDING], units[BLOCK], units[HEAD]

    def piped() -> Floats:
        hidden = blocks * beyond(block.replicate, times.backward, staged)
        return hidden + np.maximum(head.replicate, embedding.replicate)

    def alone() -> Floats:
        under = beyond(head.replicate, times.backward, overlap)
        under = under + (blocks - 1) * beyond(block.replicate, times.backward, overlap)
        return under + block.replicate + embedding.replicate

    return np.where(table.dp_replicate > 1, either(table.pp > 1, piped, alone), 0.0)
