"""Time of one optimizer step: computation, exposed communication by axis, optimizer.

Communication runs beside computation as torch's ``fully_shard`` issues it: the next unit's all-gather under
the forward of this one; in backward the next all-gather and this unit's reduce-scatter under the next block.
What the device cannot overlap (``Device.overlap``) is exposed.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardwright.axes import joined_axis
from shardwright.cluster import Cluster
from shardwright.job import Job
from shardwright.layout import RECOMPUTE_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.collectives import Placement, ring_time
from shardwright.plan.compute import (
    block_times,
    embedding_times,
    head_times,
    model_flops_per_token,
    optimizer_time_per_parameter,
)
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD, parameter_table
from shardwright.plan.table import Floats, LayoutTable
from shardwright.plan.traffic import scalar_flows


class StepTime(NamedTuple):
    """Seconds of one step, a row a layout. ``bubble`` is idle time of a pipeline; without one, 0."""

    compute: Floats
    bubble: Floats
    exposed: Mapping[str, Floats]  # by axis
    optimizer: Floats

    @property
    def time(self) -> Floats:
        """The whole step."""
        return self.compute + self.bubble + sum(self.exposed.values()) + self.optimizer


class _UnitTimes(NamedTuple):
    """Seconds to gather, reduce and average over replicas one unit."""

    gather: Floats
    reduce: Floats
    replicate: Floats


def placements(table: LayoutTable) -> dict[str, Placement]:
    """Where the groups of each axis lie, and of the data axes joined: dp_shard is innermost."""
    adjacent = np.ones_like(table.dp_shard)
    return {
        "dp_shard": Placement(table.dp_shard, adjacent),
        "dp_replicate": Placement(table.dp_replicate, table.dp_shard),
        joined_axis(("dp_replicate", "dp_shard")): Placement(table.dp, adjacent),
    }


def step_time(model: ModelSpec, job: Job, cluster: Cluster, table: LayoutTable) -> StepTime:
    """The step of every row of ``table``."""
    device, layers = cluster.device, model.layers
    tokens = np.asarray(table.micro_batch * job.seq, dtype=np.float64)
    block = block_times(model, job, device)
    again = np.array([0.0, block.recompute_selective, block.recompute_full])[table.recompute]
    assert RECOMPUTE_KINDS == ("none", "selective", "full")
    forward, backward = tokens * block.forward, tokens * (block.backward + again)
    ends = head_times(model, job, device), embedding_times(model, job, device)
    outside = tokens * sum(sum(pair) for pair in ends)
    compute = table.microbatches * (layers * (forward + backward) + outside)
    units = _units(model, job, cluster, table)
    head_backward = tokens * ends[0][1]
    exposed = _scalar_times(cluster, table)
    exposed["dp_shard"] += _exposed_shard(
        table, layers, units, forward, backward, head_backward, device.overlap
    )
    exposed["dp_replicate"] += _exposed_replicate(layers, units, backward, device.overlap)
    resting = np.zeros(table.rows)
    for unit in parameter_table(model).units:
        resting += unit.copies * unit.shard_numel(table.dp_shard)
    return StepTime(
        compute=compute,
        bubble=np.zeros(table.rows),
        exposed=exposed,
        optimizer=resting * optimizer_time_per_parameter(job, device),
    )


def tokens_per_second_per_device(job: Job, cluster: Cluster, time: Floats) -> Floats:
    """Throughput of one device [tokens/s]."""
    return np.asarray(job.tokens_per_step / (time * cluster.ranks))


def mfu(model: ModelSpec, job: Job, cluster: Cluster, time: Floats) -> Floats:
    """Model FLOPs utilisation: full-attention count over the dense peak."""
    flops = model_flops_per_token(model, job.seq) * job.tokens_per_step
    return np.asarray(flops / (time * cluster.ranks * cluster.device.peak(job.precision)))


def _units(model: ModelSpec, job: Job, cluster: Cluster, table: LayoutTable) -> dict[str, _UnitTimes]:
    """Times of each kind of unit.

    Tied embeddings stand as EMBEDDING: gathered for the look-up, their gradient whole after its backward.
    """
    units = {kind: _unit_times(model, job, cluster, table, kind) for kind in (EMBEDDING, BLOCK, HEAD)}
    if model.tied_embeddings:
        units[EMBEDDING], units[HEAD] = units[HEAD], units[EMBEDDING]
    return units


def _unit_times(model: ModelSpec, job: Job, cluster: Cluster, table: LayoutTable, kind: str) -> _UnitTimes:
    unit = parameter_table(model).unit(kind)
    groups = placements(table)
    numel = unit.shard_numel(table.dp_shard) if unit.tensors else np.zeros(table.rows)
    launches = np.where(numel > 0, 1, 0)
    element, wide = ELEMENT_BYTES[job.precision], WIDE_BYTES[job.precision]
    padded = numel * table.dp_shard
    return _UnitTimes(
        gather=ring_time(element * padded, launches, 1, groups["dp_shard"], cluster),
        reduce=ring_time(wide * padded, launches, 1, groups["dp_shard"], cluster),
        replicate=ring_time(wide * numel, launches, 2, groups["dp_replicate"], cluster),
    )


def _beyond(communication: Floats, computation: Floats, overlap: float) -> Floats:
    """Part of ``communication`` that ``computation`` does not hide."""
    return np.maximum(communication - overlap * np.minimum(communication, computation), 0.0)


def _exposed_shard(
    table: LayoutTable,
    layers: int,
    units: Mapping[str, _UnitTimes],
    forward: Floats,
    backward: Floats,
    head_backward: Floats,
    overlap: float,
) -> Floats:
    """Exposed time on dp_shard: gathers of each forward pass, gathers and reductions of each backward pass.

    Backward, a block hides the reduction of the unit before it and, in stage 3, the gather of the one after.
    """
    embedding, block, head = units[EMBEDDING], units[BLOCK], units[HEAD]
    stage, m = table.zero_stage, table.microbatches
    first = embedding.gather + block.gather  # nothing runs yet that could hide them
    gathers = (
        first
        + (layers - 1) * _beyond(block.gather, forward, overlap)
        + _beyond(head.gather, forward, overlap)
    )
    last = block.reduce + embedding.reduce  # after the last block only the embedding's gradient is left
    reductions = _beyond(head.reduce, backward, overlap)
    reductions = reductions + (layers - 1) * _beyond(block.reduce, backward, overlap)
    stage3 = _beyond(block.gather, head_backward, overlap)
    if layers == 1:
        stage3 = stage3 + _beyond(head.reduce, backward, overlap)
    else:  # first block to run backward, those between, last
        stage3 = stage3 + _beyond(head.reduce + block.gather, backward, overlap)
        stage3 = stage3 + (layers - 2) * _beyond(block.reduce + block.gather, backward, overlap)
        stage3 = stage3 + _beyond(block.reduce, backward, overlap)
    per_step = gathers + np.where(stage == 2, m, 1) * (reductions + last)
    per_microbatch = gathers + stage3 + last
    return np.where(table.dp_shard > 1, np.where(stage == 3, m * per_microbatch, per_step), 0.0)


def _exposed_replicate(
    layers: int, units: Mapping[str, _UnitTimes], backward: Floats, overlap: float
) -> Floats:
    """Exposed time on dp_replicate: one all-reduce of each unit, under the last microbatch's backward."""
    embedding, block, head = units[EMBEDDING], units[BLOCK], units[HEAD]
    beyond = _beyond(head.replicate, backward, overlap)
    beyond = beyond + (layers - 1) * _beyond(block.replicate, backward, overlap)
    return beyond + block.replicate + embedding.replicate


def _scalar_times(cluster: Cluster, table: LayoutTable) -> dict[str, Floats]:
    """Token count, loss and norm, small all-reduces that nothing hides, by axis."""
    groups = placements(table)
    return {
        flow.axis: ring_time(flow.payload_bytes, flow.launches, 2, groups[flow.axis], cluster)
        for flow in scalar_flows(table)
    }
