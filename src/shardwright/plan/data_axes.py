"""What the data axes move once for each unit of the model, and how long that takes, whatever the microbatch.

It depends on the mesh alone, so that a search works it out on small columns, before it lines layouts up.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.accounting import is_trained
from shardwright.plan.activations import WIDE_BYTES
from shardwright.plan.collectives import Route, collective_time
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD
from shardwright.plan.shards import EXPERT_BLOCK, EXPERTS, TIED, UnitElements, gathered_units, unit_elements
from shardwright.plan.table import ColumnMap, Floats, LayoutTable
from shardwright.plan.traffic import scalar_flows, shard_axis


class UnitTimes(NamedTuple):
    """Seconds to gather, reduce and average over replicas one unit."""

    gather: Floats
    reduce: Floats
    replicate: Floats


class DataTimes(NamedTuple):
    """Of every kind of unit: elements ``trained``, bytes ``gathered``, and times; and seconds of small
    all-reduces that nothing hides, by axis. ``shard``: what the shard axes are called, which a part of the
    table may call otherwise."""

    trained: Mapping[str, UnitElements]
    gathered: Mapping[str, UnitElements]
    units: Mapping[str, UnitTimes]
    scalars: Mapping[str, Floats]
    shard: str

    def mapped(self, part: ColumnMap) -> "DataTimes":
        """The same with ``part`` of every column."""
        return DataTimes(
            {kind: unit.mapped(part) for kind, unit in self.trained.items()},
            {kind: unit.mapped(part) for kind, unit in self.gathered.items()},
            {kind: UnitTimes(*map(part, unit)) for kind, unit in self.units.items()},
            {axis: part(time) for axis, time in self.scalars.items()},
            self.shard,
        )


def data_times(model: ModelSpec, job: Job, table: LayoutTable, routes: Mapping[str, Route]) -> DataTimes:
    """Of every row; ``routes`` of all axes."""
    trained = unit_elements(model, table, lambda tensor: float(is_trained(job, tensor)), job.adapters)
    gathered = gathered_units(model, job, table, trained)
    shard, wide, slower = shard_axis(table), WIDE_BYTES[job.precision], 1 / job.program.data_bandwidth

    def times(kind: str) -> UnitTimes:
        route = routes["expert_shard" if kind == EXPERTS else shard]
        there = np.where(gathered[kind].padded > 0, 1, 0)
        trains = np.where(trained[kind].shard > 0, 1, 0)
        averaged = slower * wide * trained[kind].shard
        return UnitTimes(
            collective_time("all_gather", slower * gathered[kind].padded, there, route),
            collective_time("reduce_scatter", slower * wide * trained[kind].padded, trains, route),
            collective_time("all_reduce", averaged, trains, routes["dp_replicate"]),
        )

    kinds = [EMBEDDING, BLOCK, HEAD]
    kinds += [EXPERT_BLOCK, EXPERTS] if model.moe is not None else []
    kinds += [TIED] if model.tied_embeddings else []
    units = {kind: times(kind) for kind in kinds}
    return DataTimes(trained, gathered, units, _scalar_times(table, routes), shard)


def _scalar_times(table: LayoutTable, routes: Mapping[str, Route]) -> dict[str, Floats]:
    """Token count, loss and norm, small all-reduces that nothing hides, by axis."""
    none = np.zeros((1,) * table.pp.ndim)
    times: dict[str, Floats] = {shard_axis(table): none, "dp_replicate": none}
    for flow in scalar_flows(table):
        time = collective_time("all_reduce", flow.payload_bytes, flow.launches, routes[flow.axis])
        times[flow.axis] = times.get(flow.axis, none) + time
    return times
