"""Traffic: every collective of a step on every axis, with payload and launches, as the runtime issues them.

Payload is the whole tensor, padding included: what an all-gather fills, what a reduce-scatter is given, what
ranks trade or pass on. run/dp.py and run/optim.py issue those of the data axes, run/cp.py those of cp; check/
compares them with an executed step. In a pipeline the flows are those of one of its ranks.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.axes import joined_axis
from shardwright.job import Job
from shardwright.layout import SCHEDULE_NAMES
from shardwright.model import ModelSpec
from shardwright.plan.accounting import gathered_bytes, is_trained
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.context_traffic import context_flows, document_flows
from shardwright.plan.experts import dispatch_launches, dispatched_bytes, tensor_rounds
from shardwright.plan.flight_points import passes_apart, weight_passes
from shardwright.plan.flow import Flow, Rounds, rounded
from shardwright.plan.held_units import busiest_units, held_units
from shardwright.plan.optimizer_traffic import optimizer_exchanges
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD
from shardwright.plan.routing_traffic import routing_exchanges
from shardwright.plan.shards import EXPERT_BLOCK, EXPERTS, TIED, unit_elements
from shardwright.plan.stages import V_SHAPED, Stage
from shardwright.plan.table import Floats, Ints, LayoutTable, by_schedule
from shardwright.plan.tp_gradients import shared_gradients

V_CODES = [SCHEDULE_NAMES.index(name) for name in V_SHAPED]
"""Schedules of which the first rank has both ends of the model."""

SCALAR_BYTES = 8
"""A token count (int64), a loss or a norm (fp64)."""


def shard_axis(table: LayoutTable) -> str:
    """Name of the axis over which parameters are split: dp_shard, joined with cp where a row has it."""
    return joined_axis(("dp_shard", "cp")) if (table.cp > 1).any() else "dp_shard"


def traffic(model: ModelSpec, job: Job, table: LayoutTable, stage: Stage | None = None) -> list[Flow]:
    """All flows of a step, for every row of ``table``; a row without a flow has 0 launches of it.

    Shard axes: stage 3 gathers the embedding and the head once a microbatch, each block twice; other stages
    gather every unit once a step. Gradients are reduced every microbatch in stages 2 and 3, once a step in
    stage 1; those of experts over expert_shard. dp_replicate: one all-reduce of each unit's shard a step. The
    token count and the loss are summed over all data ranks, the squared norm over the shard axes.

    ``stage``: the rank of the pipeline; without one that with most layers, which is taken to send as much as
    one in the middle.
    """
    copies = busiest_units(model, table) if stage is None else held_units(table, stage)
    dense, experts = _recomputed_for_weights(table, stage)
    flows = [
        *_data_flows(model, job, table, copies),
        *scalar_flows(table),
        *_tp_flows(model, job, (dense, experts), copies),
        *share_flows(model, job, table, copies),
        *document_flows(job, table),
        *context_flows(model, job, dense, copies[BLOCK]),
        *context_flows(model, job, experts, copies[EXPERT_BLOCK]),
        *_expert_flows(model, job, experts, copies),
        *routing_flows(model, job, experts, copies),
        *_stage_flows(model, job, table, stage),
        *tied_flows(model, job, table, stage),
        *optimizer_flows(model, job, table, copies),
    ]
    return [
        Flow(f.axis, f.collective, *(np.broadcast_to(column, table.shape) for column in f[2:])) for f in flows
    ]


def _recomputed_for_weights(table: LayoutTable, stage: Stage | None) -> tuple[LayoutTable, LayoutTable]:
    """Blocks are recomputed in each of the two passes of a zero-bubble schedule, which is as if there were
    more of them to recompute: those of the model's first stage are not. The table for dense blocks, and for
    blocks with experts."""
    if not (table.recompute > 0).any():
        return table, table
    rank = np.minimum(1, table.pp - 1) if stage is None else stage.rank
    again = by_schedule(table.schedule, weight_passes, table.pp, table.chunks, table.microbatches, rank)
    shares = [again, again]
    if stage is not None:
        apart = by_schedule(table.schedule, passes_apart, table.pp, table.microbatches)
        dense = stage.blocks - stage.expert_blocks, stage.later - stage.later_experts
        for place, (every, later) in enumerate((dense, (stage.expert_blocks, stage.later_experts))):
            shares[place] = np.where(rank == 0, apart * later / np.maximum(every, 1), again)
    first, second = (
        table._replace(recompute_every=table.recompute_every / (1 + share))  # type: ignore[arg-type]
        for share in shares
    )
    return first, second


def _data_flows(
    model: ModelSpec, job: Job, table: LayoutTable, copies: Mapping[str, Floats]
) -> Iterator[Flow]:
    """Parameters gathered, gradients reduced and averaged over replicas."""
    stage, m, shard = table.zero_stage, table.microbatches, shard_axis(table)
    wide = WIDE_BYTES[job.precision]
    gathered = unit_elements(model, table, lambda tensor: gathered_bytes(job, tensor), job.adapters)
    reduced = unit_elements(model, table, lambda tensor: float(is_trained(job, tensor)), job.adapters)
    plain = [kind for kind, unit in gathered.items() if unit.whole.any() and kind != EXPERTS]
    experts = [EXPERTS] if gathered[EXPERTS].whole.any() else []
    twice = (BLOCK, EXPERT_BLOCK, EXPERTS)
    for axis, degree, kinds in (
        (shard, table.shard, plain),
        ("expert_shard", table.expert_shard, experts),
    ):
        for name, units, bytes_each in (("all_gather", gathered, 1), ("reduce_scatter", reduced, wide)):
            for kind in kinds:
                each = m * (2 if kind in twice else 1)
                times = np.where(stage == 3, each, 1) if units is gathered else np.where(stage >= 2, m, 1)
                launches = times * copies[kind]
                if kind == TIED and EMBEDDING in plain:  # travels with the rest of its unit
                    launches = 0 * launches
                payload = times * copies[kind] * units[kind].padded * bytes_each
                present = (degree > 1) & (stage > 0)
                if kind == EXPERTS:  # without axes of their own they travel with the rest of their block
                    together = present & (table.ep * table.etp == 1)
                    yield _flow(shard, name, degree, together, 0 * launches, payload)
                    present = present & ~together
                yield _flow(axis, name, degree, present, launches, payload)
    for kind in (*plain, *experts):
        payload = copies[kind] * reduced[kind].shard * wide
        together = (table.ep * table.etp == 1) if kind == EXPERTS else False
        launches = np.where(together, 0, copies[kind])
        degree = table.dp_replicate
        yield _flow("dp_replicate", "all_reduce", degree, degree > 1, launches, payload)


def _flow(
    axis: str, name: str, degree: Ints, present: NDArray[np.bool_], launches: Floats, payload: Floats
) -> Flow:
    return Flow(
        axis,
        name,
        degree,
        rounded(np.where(present, launches, 0)),
        rounded(np.where(present, payload, 0)),
    )


def optimizer_flows(
    model: ModelSpec, job: Job, table: LayoutTable, copies: Mapping[str, Floats]
) -> Iterator[Flow]:
    """What the optimizer sends; see plan/optimizer_traffic.py."""
    for sent in optimizer_exchanges(model, job, table, copies):
        yield _flow(*sent[:3], sent.degree > 1, sent.launches, sent.payload_bytes)


def scalar_flows(table: LayoutTable) -> list[Flow]:
    """Token count and loss over all data ranks, squared norm over the shard axes; and over tp and pp."""
    shard = shard_axis(table)
    split, replicated = table.shard > 1, table.dp_replicate > 1
    both = split & replicated
    sums = {
        shard: (np.where(split, np.where(replicated, 1, 3), 0), table.shard),
        "dp_replicate": (np.where(replicated & ~split, 2, 0), table.dp_replicate),
        joined_axis(("dp_replicate", shard)): (np.where(both, 2, 0), table.dp * table.cp),
        "tp": (np.where(table.tp > 1, 1, 0), table.tp),
        "pp": (np.where(table.pp > 1, 2, 0), table.pp),
    }
    return [
        Flow(axis, "all_reduce", degree, launches, launches * SCALAR_BYTES)
        for axis, (launches, degree) in sums.items()
    ]


# tp


class Meetings(NamedTuple):
    """How often ranks of tp meet in a block and microbatch: gathers of the stream, which sp alone needs, and
    sums of products, scattered with sp."""

    gathers: Floats
    sums: Floats

    def rounds(self, table: LayoutTable) -> Floats:
        """Rounds of a ring: an all-reduce is two."""
        return np.where(table.sp == 1, self.gathers + self.sums, 2 * self.sums)


def _meetings(
    table: LayoutTable, pairs: Floats | float, spared: Floats | float, unkept: Floats | float
) -> Meetings:
    """Of a block with so many ``pairs`` of a split by outputs and one by inputs. Recomputation gathers again
    before each; full recomputation sums again all but ``spared``, selective those that it does not keep."""
    again = np.where(table.recompute > 0, 1 / table.recompute_every, 0.0)
    sums = np.where(
        table.recompute == 2, again * (pairs - spared), np.where(table.recompute == 1, again * unkept, 0.0)
    )
    return Meetings(pairs * (2 + again), 2 * pairs + sums)


def tp_meetings(table: LayoutTable) -> Meetings:
    """Of a dense block: before and behind attention and the feed-forward network; no backward pass needs the
    last sum.

    Source: shared FORMULAE 3.3.
    """
    return _meetings(table, 2.0, 1.0, 0.0)


def expert_tp_meetings(model: ModelSpec, table: LayoutTable) -> Meetings:
    """Of a block with experts: attention's, and around experts that tp splits or around shared ones, whose
    sum selective recomputation does not keep."""
    pairs = 1 + tensor_rounds(model, table)
    split = table.etp > 1
    return _meetings(table, pairs, np.where(split, 1.0, 0.0), np.where(split, 0.0, pairs - 1))


def tp_rounds(table: LayoutTable) -> Rounds:
    """Rounds of a ring over tp in a dense block, each of one hidden vector a token."""
    return Rounds(np.full_like(table.tp, 4.0, dtype=np.float64), tp_meetings(table).rounds(table) - 4.0)


def expert_tp_rounds(model: ModelSpec, table: LayoutTable) -> Rounds:
    """The same for a block with experts."""
    forward = 2 * (1 + tensor_rounds(model, table))
    return Rounds(forward, expert_tp_meetings(model, table).rounds(table) - forward)


def _tp_flows(
    model: ModelSpec, job: Job, tables: tuple[LayoutTable, LayoutTable], copies: Mapping[str, Floats]
) -> Iterator[Flow]:
    """``tables``: of dense blocks, and of those with experts."""
    table = tables[0]
    tokens = table.micro_batch * job.seq / table.cp
    vector = ELEMENT_BYTES[job.precision] * model.hidden * tokens
    loss = WIDE_BYTES[job.precision] * tokens
    m, dense = table.microbatches, tp_meetings(table)
    gathers, sums = copies[BLOCK] * dense.gathers, copies[BLOCK] * dense.sums
    if model.moe is not None:
        experts = expert_tp_meetings(model, tables[1])
        gathers = gathers + copies[EXPERT_BLOCK] * experts.gathers
        sums = sums + copies[EXPERT_BLOCK] * experts.sums
    ends = copies[EMBEDDING] + copies[HEAD]  # one forward and one backward in all
    sequence, wide = (table.sp == 1) & (table.tp > 1), table.tp > 1
    for name, present, count, each in (
        ("all_reduce", wide & ~sequence, sums + ends, vector),
        ("all_gather", sequence, gathers + ends, vector),
        ("reduce_scatter", sequence, sums + ends, vector),
        ("all_reduce", wide, 3.0 * copies[HEAD], loss),  # max, sum and target of the logits
    ):
        yield _flow("tp", name, table.tp, present, m * count, m * count * each)


def share_flows(
    model: ModelSpec, job: Job, table: LayoutTable, copies: Mapping[str, Floats]
) -> Iterator[Flow]:
    """Gradients that ranks of tp add up once a step; see plan/tp_gradients.py."""
    for sent in shared_gradients(model, job, table, copies):
        yield _flow(
            *sent[:3], (sent.degree > 1) & (sent.payload_bytes > 0), sent.launches, sent.payload_bytes
        )


# ep


def _expert_flows(
    model: ModelSpec, job: Job, table: LayoutTable, copies: Mapping[str, Floats]
) -> Iterator[Flow]:
    """Tokens to their experts and back, forward and backward."""
    if model.moe is None:
        return
    launches = table.microbatches * copies[EXPERTS] * dispatch_launches(table)
    payload = launches * dispatched_bytes(model, job, table)
    yield _flow("ep", "all_to_all", table.ep, table.ep > 1, launches, payload)


def routing_flows(
    model: ModelSpec, job: Job, table: LayoutTable, copies: Mapping[str, Floats]
) -> Iterator[Flow]:
    """What routing sends besides tokens; see plan/routing_traffic.py."""
    for sent in routing_exchanges(model, job, table, copies[EXPERTS], shard_axis(table)):
        yield _flow(*sent[:3], sent.degree > 1, sent.launches, sent.payload_bytes)


# pp


def _stage_flows(model: ModelSpec, job: Job, table: LayoutTable, stage: Stage | None) -> list[Flow]:
    """A rank sends every microbatch of each of its stages on, and its gradient back, unless the next stage is
    its own: the last rank's of a V."""
    by_sequence = np.where(table.sp == 1, table.tp, 1)
    vector = (
        ELEMENT_BYTES[job.precision] * model.hidden * table.micro_batch * job.seq / table.cp / by_sequence
    )
    each = np.asarray(2 * table.chunks, dtype=np.float64)
    if stage is not None:
        turns = np.isin(table.schedule, V_CODES) & (stage.rank == table.pp - 1)
        each = each - stage.embedding - stage.head - np.where(turns, 2, 0)
    sends = rounded(np.where(table.pp > 1, table.microbatches * each, 0))
    return [Flow("pp", "send", table.pp, sends, rounded(sends * vector))]


def tied_flows(model: ModelSpec, job: Job, table: LayoutTable, stage: Stage | None = None) -> Iterator[Flow]:
    """The first and the last stage trade gradients of their copies of a tied matrix, once a step, unless a V
    puts both on one rank."""
    if not model.tied_embeddings:
        return
    copy = unit_elements(model, table, lambda tensor: float(is_trained(job, tensor)), job.adapters)[TIED]
    apart = (table.pp > 1) & ~np.isin(table.schedule, V_CODES)
    if stage is not None:
        apart = apart & (stage.embedding + stage.head > 0)
    payload = np.where(table.zero_stage > 0, copy.shard, copy.whole) * WIDE_BYTES[job.precision]
    yield _flow("pp", "send", table.pp, apart, np.ones_like(payload), payload)


def merged(flows: list[Flow]) -> list[Flow]:
    """Flows of the same axis and collective added up, those nobody uses left out."""
    total: dict[tuple[str, str], Flow] = {}
    for flow in flows:
        key = (flow.axis, flow.collective)
        if key in total:
            known = total[key]
            flow = flow._replace(
                launches=known.launches + flow.launches,
                payload_bytes=known.payload_bytes + flow.payload_bytes,
            )
        total[key] = flow
    return [flow for flow in total.values() if flow.launches.any()]
