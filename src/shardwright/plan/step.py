"""Time of one optimizer step: computation, bubble, exposed communication by axis, optimizer.

Communication of the shard axes runs beside computation as torch's ``fully_shard`` issues it: the next unit's
all-gather under the forward of this one; in backward the next all-gather and this unit's reduce-scatter under
the next block. In a pipeline gradients are reduced when the schedule is through, so nothing hides them. tp is
exposed; a ring of keys and values hides under attention. What the device cannot overlap
(``Device.overlap``) is exposed.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardwright.axes import joined_axis
from shardwright.cluster import Cluster
from shardwright.job import Job
from shardwright.layout import CONTEXT_KINDS, RECOMPUTE_KINDS, SCHEDULE_NAMES
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.bubble import RankTimes, makespan_bubble
from shardwright.plan.collectives import Placement, Route, ring_time, send_time, trade_time
from shardwright.plan.compute import (
    BACKWARD_ATTENTION,
    BlockTimes,
    block_floor,
    block_times,
    embedding_times,
    head_times,
    model_flops_per_token,
    optimizer_time_per_parameter,
)
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD
from shardwright.plan.shards import UnitElements, unit_elements
from shardwright.plan.stages import Work, busiest_ranks
from shardwright.plan.table import Floats, LayoutTable
from shardwright.plan.traffic import (
    RING_SHARE,
    Flow,
    context_rounds,
    keys_and_values,
    scalar_flows,
    shard_axis,
    tp_rounds,
    traded_heads,
)


class StepTime(NamedTuple):
    """Seconds of one step, a row a layout. ``bubble`` is idle time of a pipeline rank; without one, 0."""

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


class _Block(NamedTuple):
    """Seconds of one block of one microbatch: computation, and exposed communication inside it."""

    forward: Floats
    backward: Floats
    weight_gradients: Floats  # of backward
    tp: Floats  # forward and backward
    cp: Floats

    @property
    def inside(self) -> Floats:
        """All of it."""
        return self.forward + self.backward + self.tp + self.cp


class _End(NamedTuple):
    """Seconds of the embedding, or of head and loss, of one microbatch; ``tp`` is exposed."""

    forward: Floats
    backward: Floats
    tp: Floats

    @property
    def inside(self) -> Floats:
        """All of it."""
        return self.forward + self.backward + self.tp


class _Rank(NamedTuple):
    """The pipeline rank with most to do, and its seconds for each microbatch."""

    work: Work
    compute: Floats
    forward: Floats  # with exposed communication
    busy: Floats  # forward and backward, with exposed communication


def placements(table: LayoutTable) -> dict[str, Placement]:
    """Where the groups of each axis lie, tp innermost; and of the shard axes and the data axes joined."""
    stride = {"tp": np.ones_like(table.tp)}
    stride["cp"] = table.tp
    stride["dp_shard"] = stride["cp"] * table.cp
    stride["dp_replicate"] = stride["dp_shard"] * table.dp_shard
    stride["pp"] = stride["dp_replicate"] * table.dp_replicate
    places = {axis: Placement(getattr(table, axis), stride[axis]) for axis in stride}
    shard = shard_axis(table)
    places[shard] = Placement(table.shard, stride["cp"])
    places[joined_axis(("dp_replicate", shard))] = Placement(table.dp * table.cp, stride["cp"])
    return places


def step_time(model: ModelSpec, job: Job, cluster: Cluster, table: LayoutTable) -> StepTime:
    """The step of every row of ``table``."""
    device = cluster.device
    routes = {axis: place.route(cluster) for axis, place in placements(table).items()}
    block, embedding, head = part_times(model, job, cluster, table)
    rank = _slowest(table, model.layers, block, embedding, head)
    blocks, shard, m = rank.work.blocks, shard_axis(table), table.microbatches
    exposed = _scalar_times(table, routes)
    exposed["tp"] = exposed["tp"] + m * (
        blocks * block.tp + rank.work.embedding * embedding.tp + rank.work.head * head.tp
    )
    exposed["cp"] = m * blocks * block.cp
    elements = unit_elements(model, table)
    units = _units(model, job, routes, shard, elements)
    exposed[shard] = exposed[shard] + _exposed_shard(
        table, blocks, units, block, head.backward, device.overlap
    )
    exposed["dp_replicate"] = exposed["dp_replicate"] + _exposed_replicate(
        table, blocks, units, block, device.overlap
    )
    resting = blocks * elements[BLOCK].shard + np.where(table.pp > 1, 0.5, 1.0) * (
        elements[HEAD].shard + elements[EMBEDDING].shard
    )
    return StepTime(
        compute=m * rank.compute,
        bubble=_bubble(table, block, rank, hop_time(model, job, cluster, table)),
        exposed=exposed,
        optimizer=resting * optimizer_time_per_parameter(job, device),
    )


def part_times(model: ModelSpec, job: Job, cluster: Cluster, table: LayoutTable) -> tuple[_Block, _End, _End]:
    """Seconds of one microbatch in a block, in the embedding, and in head and loss."""
    routes = {axis: place.route(cluster) for axis, place in placements(table).items()}
    tokens = table.micro_batch * job.seq / table.cp
    block = _block(model, job, cluster, table, routes, tokens)
    return block, *_ends(model, job, cluster, table, routes, tokens)


def hop_time(model: ModelSpec, job: Job, cluster: Cluster, table: LayoutTable) -> Floats:
    """Passing one microbatch's residual stream to the next stage [s]; without a pipeline, 0."""
    by_sequence = np.where(table.sp == 1, table.tp, 1)
    tokens = table.micro_batch * job.seq / table.cp
    vector = ELEMENT_BYTES[job.precision] * model.hidden * tokens / by_sequence
    return np.where(table.pp > 1, send_time(vector, 1, placements(table)["pp"].route(cluster)), 0.0)


def flow_time(flow: Flow, route: Route) -> Floats:
    """How long a flow keeps its link busy [s]."""
    if flow.collective == "send":
        return send_time(flow.payload_bytes, flow.launches, route)
    if flow.collective == "all_to_all":
        return trade_time(flow.payload_bytes, flow.launches, route)
    return ring_time(flow.payload_bytes, flow.launches, RING_SHARE[flow.collective], route)


def tokens_per_second_per_device(job: Job, cluster: Cluster, time: Floats) -> Floats:
    """Throughput of one device [tokens/s]."""
    return np.asarray(job.tokens_per_step / (time * cluster.ranks))


def mfu(model: ModelSpec, job: Job, cluster: Cluster, time: Floats) -> Floats:
    """Model FLOPs utilisation: full-attention count over the dense peak."""
    flops = model_flops_per_token(model, job.seq) * job.tokens_per_step
    return np.asarray(flops / (time * cluster.ranks * cluster.device.peak(job.precision)))


def _beyond(communication: Floats, computation: Floats, overlap: float) -> Floats:
    """Part of ``communication`` that ``computation`` does not hide."""
    return np.maximum(communication - overlap * np.minimum(communication, computation), 0.0)


# Inside a block


def _block(
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    table: LayoutTable,
    routes: Mapping[str, Route],
    tokens: Floats,
) -> _Block:
    by_sequence = np.where(table.sp == 1, table.tp, 1)
    times: BlockTimes = block_times(model, job, cluster.device, table.tp, by_sequence)
    assert RECOMPUTE_KINDS == ("none", "selective", "full")
    again = np.choose(
        table.recompute, [np.zeros(table.rows), times.recompute_selective, times.recompute_full]
    )
    rounds = tp_rounds(table)
    vector = ELEMENT_BYTES[job.precision] * model.hidden * tokens
    tp = np.where(table.tp > 1, ring_time(rounds.forward + rounds.backward, 0, 1, routes["tp"]) * vector, 0.0)
    tp = tp + np.where(table.tp > 1, (rounds.forward + rounds.backward) * routes["tp"].latency, 0.0)
    floor = block_floor(model, job, cluster.device, table.tp)
    stall = np.maximum(floor.weights - tokens * times.weight_gradients, 0.0)  # of each product of the weights
    repeated = np.where(table.recompute == 2, stall + floor.forward_launches, 0.0)
    return _Block(
        forward=tokens * times.forward + stall + floor.forward_launches,
        backward=tokens * (times.backward + again) + 2 * stall + floor.backward_launches + repeated,
        weight_gradients=tokens * times.weight_gradients + stall,
        tp=tp,
        cp=_context_time(model, job, table, routes["cp"], tokens, times.attention, cluster.device.overlap),
    )


def _context_time(
    model: ModelSpec,
    job: Job,
    table: LayoutTable,
    route: Route,
    tokens: Floats,
    attention: Floats,
    overlap: float,
) -> Floats:
    """Exposed time of context parallelism in one block: a ring hides under attention, the others do not.

    A rank computes on one part of the keys while the next arrives: the last one hides nothing.
    """
    rounds, cp = context_rounds(table, job.precision), table.cp
    own = keys_and_values(model, job.precision, table, tokens)
    again = np.where(table.recompute == 2, 1.0, 0.0)
    under = tokens * attention * (cp - 1) / cp
    ahead = send_time(rounds.forward * own * (cp - 1), rounds.forward * (cp - 1), route)
    back = send_time(rounds.backward * own * (cp - 1), (1 + again) * (cp - 1) + cp, route)
    ring = _beyond(ahead, under, overlap) + _beyond(back, (BACKWARD_ATTENTION + again) * under, overlap)
    passes = rounds.forward + rounds.backward
    gathered = ring_time(passes * own * cp, passes, 1, route)
    trades = traded_heads(model, job.precision, table, tokens)
    traded = trade_time(rounds.trades * trades, 4 * rounds.trades, route)
    assert CONTEXT_KINDS == ("none", "ring", "all_gather", "ulysses")
    return np.choose(table.cp_kind, [np.zeros(table.rows), ring, gathered, traded])


# A pipeline rank


def _ends(
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    table: LayoutTable,
    routes: Mapping[str, Route],
    tokens: Floats,
) -> tuple[_End, _End]:
    """Embedding and head: over tp, each passes two rounds of one vector a token, and the loss three sums."""
    vector = ELEMENT_BYTES[job.precision] * model.hidden * tokens
    loss = 3 * WIDE_BYTES[job.precision] * tokens
    passed = ring_time(2 * vector, 2, 1, routes["tp"])
    summed = ring_time(loss, 3, 2, routes["tp"])
    times = embedding_times(model, job, cluster.device), head_times(model, job, cluster.device, table.tp)
    embedding, head = ([tokens * part for part in end] for end in times)
    return _End(embedding[0], embedding[1], passed), _End(head[0], head[1], passed + summed)


def _slowest(table: LayoutTable, layers: int, block: _Block, embedding: _End, head: _End) -> _Rank:
    """The rank that all others wait for, in every row."""
    ranks = busiest_ranks(table, layers)
    busy = [w.blocks * block.inside + w.embedding * embedding.inside + w.head * head.inside for w in ranks]
    most = np.argmax(busy, axis=0)
    work = Work(*(np.choose(most, parts) for parts in zip(*ranks, strict=True)))
    forward = work.embedding * embedding.forward + work.head * head.forward
    backward = work.embedding * embedding.backward + work.head * head.backward
    beside = (work.embedding * embedding.tp + work.head * head.tp) / 2
    return _Rank(
        work,
        compute=work.blocks * (block.forward + block.backward) + forward + backward,
        forward=work.blocks * (block.forward + (block.tp + block.cp) / 2) + forward + beside,
        busy=np.max(busy, axis=0),
    )


def _bubble(table: LayoutTable, block: _Block, rank: _Rank, hop: Floats) -> Floats:
    """Idle time of a pipeline rank: the closed form of each schedule, for the slowest rank's times."""
    idle = np.zeros(table.rows)
    if not (table.pp > 1).any():
        return idle
    weight = rank.work.blocks * block.weight_gradients
    for code in np.unique(table.schedule[table.pp > 1]):
        rows = (table.schedule == code) & (table.pp > 1)
        backward = rank.busy[rows] - rank.forward[rows] - weight[rows]
        times = RankTimes(rank.forward[rows], backward, weight[rows], hop[rows])
        idle[rows] = makespan_bubble(
            SCHEDULE_NAMES[code], table.pp[rows], table.chunks[rows], table.microbatches[rows], times
        )
    return idle


# Shard and replicate axes


def _units(
    model: ModelSpec, job: Job, routes: Mapping[str, Route], shard: str, elements: Mapping[str, UnitElements]
) -> dict[str, _UnitTimes]:
    """Times of each kind of unit.

    Tied embeddings stand as EMBEDDING: gathered for the look-up, their gradient whole after its backward.
    """
    units = {kind: _unit_times(job, routes, shard, unit) for kind, unit in elements.items()}
    if model.tied_embeddings:
        units[EMBEDDING], units[HEAD] = units[HEAD], units[EMBEDDING]
    return units


def _unit_times(job: Job, routes: Mapping[str, Route], shard: str, unit: UnitElements) -> _UnitTimes:
    launches = np.where(unit.shard > 0, 1, 0)
    element, wide = ELEMENT_BYTES[job.precision], WIDE_BYTES[job.precision]
    return _UnitTimes(
        gather=ring_time(element * unit.padded, launches, 1, routes[shard]),
        reduce=ring_time(wide * unit.padded, launches, 1, routes[shard]),
        replicate=ring_time(wide * unit.shard, launches, 2, routes["dp_replicate"]),
    )


def _exposed_shard(
    table: LayoutTable,
    blocks: Floats,
    units: Mapping[str, _UnitTimes],
    times: _Block,
    head_backward: Floats,
    overlap: float,
) -> Floats:
    """Exposed time on the shard axes: gathers of each forward pass, gathers and reductions of each backward.

    Backward, a block hides the reduction of the unit before it and, in stage 3, the gather of the one after.
    """
    embedding, block, head = units[EMBEDDING], units[BLOCK], units[HEAD]
    forward, backward = times.forward, times.backward
    stage, m = table.zero_stage, table.microbatches
    inner = block.gather + (blocks - 1) * _beyond(block.gather, forward, overlap)
    last_gather = _beyond(head.gather, forward, overlap)
    gathers = embedding.gather + inner + last_gather  # nothing runs yet that could hide the first two
    last = block.reduce + embedding.reduce  # after the last block only the embedding's gradient is left
    reductions = _beyond(head.reduce, backward, overlap)
    reductions = reductions + (blocks - 1) * _beyond(block.reduce, backward, overlap)
    alone = _beyond(head.reduce, backward, overlap)
    several = _beyond(
        head.reduce + block.gather, backward, overlap
    )  # first to run backward, those between, last
    several = several + np.maximum(blocks - 2, 0) * _beyond(block.reduce + block.gather, backward, overlap)
    several = several + _beyond(block.reduce, backward, overlap)
    stage3 = _beyond(block.gather, head_backward, overlap) + np.where(blocks == 1, alone, several)
    per_step = gathers + np.where(stage == 2, m, 1) * (reductions + last)
    per_microbatch = gathers + stage3 + last
    piped = inner + np.maximum(embedding.gather, last_gather)  # no rank holds both ends
    piped = piped + blocks * block.reduce + np.maximum(head.reduce, embedding.reduce)
    flat = np.where(stage == 3, m * per_microbatch, per_step)
    return np.where(table.shard > 1, np.where(table.pp > 1, piped, flat), 0.0)


def _exposed_replicate(
    table: LayoutTable, blocks: Floats, units: Mapping[str, _UnitTimes], times: _Block, overlap: float
) -> Floats:
    """Exposed time on dp_replicate: one all-reduce of each unit, under the last microbatch's backward; in a
    pipeline after it."""
    embedding, block, head = units[EMBEDDING], units[BLOCK], units[HEAD]
    beyond = _beyond(head.replicate, times.backward, overlap)
    beyond = beyond + (blocks - 1) * _beyond(block.replicate, times.backward, overlap)
    piped = blocks * block.replicate + np.maximum(head.replicate, embedding.replicate)
    flat = beyond + block.replicate + embedding.replicate
    return np.where(table.dp_replicate > 1, np.where(table.pp > 1, piped, flat), 0.0)


def _scalar_times(table: LayoutTable, routes: Mapping[str, Route]) -> dict[str, Floats]:
    """Token count, loss and norm, small all-reduces that nothing hides, by axis."""
    times: dict[str, Floats] = {shard_axis(table): np.zeros(table.rows), "dp_replicate": np.zeros(table.rows)}
    for flow in scalar_flows(table):
        time = ring_time(flow.payload_bytes, flow.launches, 2, routes[flow.axis])
        times[flow.axis] = times.get(flow.axis, 0.0) + time
    return times
