"""Traffic: every collective of a step on every axis, with payload and launches, as the runtime issues them.

Payload is the whole tensor, padding included: what an all-gather fills, what a reduce-scatter is given, what
ranks trade or pass on. run/dp.py and run/optim.py issue those of the data axes; check/ compares them with an
executed step. In a pipeline the flows are those of the rank with most layers.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.axes import joined_axis
from shardwright.job import Job
from shardwright.layout import CONTEXT_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD, parameter_table
from shardwright.plan.shards import unit_elements
from shardwright.plan.stages import slowest_blocks
from shardwright.plan.table import Floats, Ints, LayoutTable

SCALAR_BYTES = 8
"""A token count (int64), a loss or a norm (fp64)."""

RING_SHARE: Mapping[str, int] = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
"""A rank of n sends payload x share x (n-1)/n; of a "send" to its neighbour, all. Source: NVIDIA/nccl-tests
doc/PERFORMANCE.md."""


class Flow(NamedTuple):
    """One kind of collective on one axis in one step, a row a layout."""

    axis: str
    collective: str
    degree: Ints  # ranks of the group
    launches: Ints
    payload_bytes: Ints

    @property
    def sent_bytes(self) -> Floats:
        """What one rank sends in a ring [B]."""
        if self.collective == "send":
            return np.asarray(self.payload_bytes, dtype=np.float64)
        return self.payload_bytes * RING_SHARE[self.collective] * (1 - 1 / self.degree)


class Rounds(NamedTuple):
    """How often a block passes something round in the forward and the backward pass, a row a layout."""

    forward: Floats
    backward: Floats
    trades: Floats | float = 0.0  # of Ulysses


def shard_axis(table: LayoutTable) -> str:
    """Name of the axis over which parameters are split: dp_shard, joined with cp where a row has it."""
    return joined_axis(("dp_shard", "cp")) if (table.cp > 1).any() else "dp_shard"


def traffic(model: ModelSpec, job: Job, table: LayoutTable) -> list[Flow]:
    """All flows of a step, for every row of ``table``; a row without a flow has 0 launches of it.

    Shard axes: stage 3 gathers the embedding and the head once a microbatch, each block twice; other stages
    gather every unit once a step. Gradients are reduced every microbatch in stages 2 and 3, once a step in
    stage 1. dp_replicate: one all-reduce of each unit's shard a step. The token count and the loss are summed
    over all data ranks, the squared norm over the shard axes.
    """
    stage, m = table.zero_stage, table.microbatches
    shard, split, replicated = shard_axis(table), table.shard > 1, table.dp_replicate > 1
    kinds = [unit.kind for unit in parameter_table(model).units]
    gathers = {kind: np.where(stage == 3, m * (2 if kind == BLOCK else 1), 1) for kind in kinds}
    reduces = dict.fromkeys(kinds, np.where(stage >= 2, m, 1))
    once = dict.fromkeys(kinds, np.ones(table.rows, np.int64))
    element, wide = ELEMENT_BYTES[job.precision], WIDE_BYTES[job.precision]
    units, copies = unit_elements(model, table), _copies(model, table)

    def flow(
        axis: str,
        name: str,
        present: NDArray[np.bool_],
        times: Mapping[str, Ints],
        bytes_each: int,
        part: str,
    ) -> Flow:
        degree = table.shard if axis == shard else table.dp_replicate
        launches = sum((times[kind] * copies[kind] for kind in kinds), np.zeros(table.rows))
        payload = sum(
            (times[kind] * copies[kind] * getattr(units[kind], part) * bytes_each for kind in kinds),
            np.zeros(table.rows),
        )
        return Flow(
            axis, name, degree, _whole(np.where(present, launches, 0)), _whole(np.where(present, payload, 0))
        )

    return [
        flow(shard, "all_gather", split, gathers, element, "padded"),
        flow(shard, "reduce_scatter", split, reduces, wide, "padded"),
        flow("dp_replicate", "all_reduce", replicated, once, wide, "shard"),
        *scalar_flows(table),
        *_tp_flows(model, job, table, copies),
        *_context_flows(model, job, table, copies),
        *_stage_flows(model, job, table),
    ]


def _flow(
    axis: str, name: str, degree: Ints, present: NDArray[np.bool_], launches: Floats, payload: Floats
) -> Flow:
    return Flow(
        axis, name, degree, _whole(np.where(present, launches, 0)), _whole(np.where(present, payload, 0))
    )


def _whole(values: Floats) -> Ints:
    return np.asarray(np.rint(values), dtype=np.int64)


def _copies(model: ModelSpec, table: LayoutTable) -> dict[str, Floats]:
    """Units of each kind on the rank with most layers; of a pipeline's ends it is taken to be the last."""
    one = np.ones(table.rows)
    alone = np.where(table.pp > 1, 0.0, one)
    return {EMBEDDING: alone, BLOCK: slowest_blocks(table, model.layers), HEAD: one}


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


def tp_rounds(table: LayoutTable) -> Rounds:
    """Rounds of a ring over tp in a block, each of one hidden vector a token.

    Two all-reduces (two rounds each) forward and two backward; with sp two all-gathers and two
    reduce-scatters each. Full recomputation repeats all but the last product's; selective recomputation with
    sp gathers the norm outputs again, which it does not keep.

    Source: shared FORMULAE 3.3.
    """
    sequence, none = table.sp == 1, np.zeros(table.rows)
    again = np.choose(table.recompute, [none, np.where(sequence, 2.0, 0.0), np.where(sequence, 3.0, 2.0)])
    return Rounds(np.full(table.rows, 4.0), 4.0 + again)


def _tp_flows(model: ModelSpec, job: Job, table: LayoutTable, copies: Mapping[str, Floats]) -> list[Flow]:
    tokens = table.micro_batch * job.seq / table.cp
    vector = ELEMENT_BYTES[job.precision] * model.hidden * tokens
    loss = WIDE_BYTES[job.precision] * tokens
    m, rounds = table.microbatches, tp_rounds(table)
    inside = copies[BLOCK] * (rounds.forward + rounds.backward)  # rounds; an all-reduce is two
    ends = np.where(table.pp > 1, 2.0, 4.0)
    sequence, wide = (table.sp == 1) & (table.tp > 1), table.tp > 1

    def flow(name: str, present: NDArray[np.bool_], launches: Floats, payload: Floats) -> Flow:
        return Flow(
            "tp",
            name,
            table.tp,
            _whole(np.where(present, m * launches, 0)),
            _whole(np.where(present, m * payload, 0)),
        )

    half = (inside + ends) / 2
    more = copies[BLOCK] * np.choose(table.recompute, [0.0, 1.0, 0.5])  # gathers repeated over those halves
    gathers, scatters = half + more, half - more
    return [
        flow("all_reduce", wide & ~sequence, half, half * vector),
        flow("all_gather", sequence, gathers, gathers * vector),
        flow("reduce_scatter", sequence, scatters, scatters * vector),
        flow("all_reduce", wide, np.full(table.rows, 3.0), 3 * loss),  # max, sum and target of the logits
    ]


# cp


def keys_and_values(model: ModelSpec, precision: str, table: LayoutTable, tokens: Floats) -> Floats:
    """Keys and values of one context rank in one block [B]."""
    kv_heads = np.maximum(model.kv_heads / table.tp, 1)
    return np.asarray(2 * ELEMENT_BYTES[precision] * kv_heads * model.head_size * tokens)


def traded_heads(model: ModelSpec, precision: str, table: LayoutTable, tokens: Floats) -> Floats:
    """What Ulysses trades in one pass of a block: queries, keys, values, and the output back [B]."""
    heads = 2 * model.heads / table.tp + 2 * np.maximum(model.kv_heads / table.tp, 1)
    return np.asarray(ELEMENT_BYTES[precision] * heads * model.head_size * tokens)


def context_rounds(table: LayoutTable, precision: str) -> Rounds:
    """Rounds over cp in a block, each of the keys and values of all ranks once; and passes of Ulysses.

    Ring: keys and values go round forward, and backward again with their gradients in a wide type, which go
    one hop further. All-gather: once forward, again backward, and a reduce-scatter of gradients. Full
    recomputation repeats the forward ones.

    Source: shared FORMULAE 3.5.
    """
    ratio = WIDE_BYTES[precision] / ELEMENT_BYTES[precision]
    n = np.maximum(table.cp, 2)
    ring, gather = (
        table.cp_kind == CONTEXT_KINDS.index("ring"),
        table.cp_kind == CONTEXT_KINDS.index("all_gather"),
    )
    once = np.where(ring | gather, 1.0, 0.0)
    backward = np.where(ring, 1 + ratio * n / (n - 1), np.where(gather, 2.0, 0.0))
    again = np.where(table.recompute == 2, 1.0, 0.0)
    trades = np.where(table.cp_kind == CONTEXT_KINDS.index("ulysses"), 2.0 + again, 0.0)
    return Rounds(once, backward + again * once, trades)


def _context_flows(
    model: ModelSpec, job: Job, table: LayoutTable, copies: Mapping[str, Floats]
) -> list[Flow]:
    tokens = table.micro_batch * job.seq / table.cp
    rounds = context_rounds(table, job.precision)
    each = table.microbatches * copies[BLOCK]
    payload = keys_and_values(model, job.precision, table, tokens) * table.cp
    again = np.where(table.recompute == 2, 1.0, 0.0)
    passed = np.where(
        table.cp_kind == CONTEXT_KINDS.index("ring"), each * (rounds.forward + rounds.backward), 0.0
    )
    hops = np.where(passed > 0, each * ((table.cp - 1) * (2 + again) + table.cp), 0.0)
    gathered = table.cp_kind == CONTEXT_KINDS.index("all_gather")
    gathers = np.where(gathered, each * (2 + again), 0.0)
    scatters = np.where(gathered, each, 0.0)
    trades = traded_heads(model, job.precision, table, tokens) * each * rounds.trades
    amounts = {
        "send": (hops, passed * payload * (table.cp - 1) / table.cp),
        "all_gather": (gathers, gathers * payload),
        "reduce_scatter": (scatters, scatters * payload),
        "all_to_all": (4 * each * rounds.trades, trades),
    }
    return [
        Flow("cp", name, table.cp, _whole(count), _whole(size)) for name, (count, size) in amounts.items()
    ]


# pp


def _stage_flows(model: ModelSpec, job: Job, table: LayoutTable) -> list[Flow]:
    """A rank in the middle sends every microbatch of each of its stages on, and its gradient back."""
    by_sequence = np.where(table.sp == 1, table.tp, 1)
    vector = (
        ELEMENT_BYTES[job.precision] * model.hidden * table.micro_batch * job.seq / table.cp / by_sequence
    )
    sends = np.where(table.pp > 1, 2 * table.microbatches * table.chunks, 0)
    return [Flow("pp", "send", table.pp, sends, _whole(sends * vector))]


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
