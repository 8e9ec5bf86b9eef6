"""Traffic: every collective of a step on every axis, with payload and launches, as the runtime issues them.

Payload is the whole tensor, padding included: what an all-gather fills, what a reduce-scatter is given.
run/dp.py and run/optim.py issue these; check/ compares them with an executed step.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.axes import joined_axis
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.params import BLOCK, parameter_table
from shardwright.plan.table import Floats, Ints, LayoutTable

SCALAR_BYTES = 8
"""A token count (int64), a loss or a norm (fp64)."""

RING_SHARE: Mapping[str, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""A rank of n sends payload x share x (n-1)/n. Source: NVIDIA/nccl-tests doc/PERFORMANCE.md."""


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
        return self.payload_bytes * RING_SHARE[self.collective] * (1 - 1 / self.degree)


def traffic(model: ModelSpec, job: Job, table: LayoutTable) -> list[Flow]:
    """All flows of a step, for every row of ``table``; a row without a flow has 0 launches of it.

    dp_shard: stage 3 gathers the embedding and the head once a microbatch, each block twice; other stages
    gather every unit once a step. Gradients are reduced every microbatch in stages 2 and 3, once a step in
    stage 1. dp_replicate: one all-reduce of each unit's shard a step. The token count and the loss are summed
    over all data ranks, the squared norm over dp_shard.
    """
    parameters = parameter_table(model)
    split, stage, m = table.dp_shard > 1, table.zero_stage, table.microbatches
    reductions = np.where(stage >= 2, m, 1)
    gathers = {
        unit.kind: np.where(stage == 3, m * (2 if unit.kind == BLOCK else 1), 1) for unit in parameters.units
    }
    element, wide = ELEMENT_BYTES[job.precision], WIDE_BYTES[job.precision]

    def over_units(times: Mapping[str, Ints], bytes_each: int, *, padded: bool) -> tuple[Ints, Ints]:
        launches, payload = np.zeros(table.rows, np.int64), np.zeros(table.rows, np.int64)
        for unit in parameters.units:
            numel = unit.shard_numel(table.dp_shard) * (table.dp_shard if padded else 1)
            launches += times[unit.kind] * unit.copies
            payload += times[unit.kind] * unit.copies * numel * bytes_each
        return launches, payload

    def flow(
        axis: str, name: str, degree: Ints, present: NDArray[np.bool_], amounts: tuple[Ints, Ints]
    ) -> Flow:
        launches, payload = (np.where(present, amount, 0) for amount in amounts)
        return Flow(axis, name, degree, launches, payload)

    reduce_times = {unit.kind: reductions for unit in parameters.units}
    once = {unit.kind: np.ones(table.rows, np.int64) for unit in parameters.units}
    replicated = table.dp_replicate > 1
    flows = [
        flow("dp_shard", "all_gather", table.dp_shard, split, over_units(gathers, element, padded=True)),
        flow(
            "dp_shard", "reduce_scatter", table.dp_shard, split, over_units(reduce_times, wide, padded=True)
        ),
        flow(
            "dp_replicate", "all_reduce", table.dp_replicate, replicated, over_units(once, wide, padded=False)
        ),
    ]
    return flows + scalar_flows(table)


def scalar_flows(table: LayoutTable) -> list[Flow]:
    """Token count and loss over all data ranks, squared norm over dp_shard."""
    split, replicated = table.dp_shard > 1, table.dp_replicate > 1
    both = split & replicated
    sums = {
        "dp_shard": np.where(split, np.where(replicated, 1, 3), 0),
        "dp_replicate": np.where(replicated & ~split, 2, 0),
        joined_axis(("dp_replicate", "dp_shard")): np.where(both, 2, 0),
    }
    degrees = {"dp_shard": table.dp_shard, "dp_replicate": table.dp_replicate}
    return [
        Flow(axis, "all_reduce", degrees.get(axis, table.dp), launches, launches * SCALAR_BYTES)
        for axis, launches in sums.items()
    ]


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
