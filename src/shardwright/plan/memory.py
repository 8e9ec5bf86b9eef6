"""The memory ledger: what the heaviest rank holds, by kind, at rest and at the peak of a step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Device
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.accounting import accounting_row, optimizer_elements
from shardwright.plan.moments import Held, timeline
from shardwright.plan.params import ParameterTable, parameter_table
from shardwright.plan.table import Floats, LayoutTable


@dataclass(frozen=True)
class Ledger:
    """Memory of the heaviest rank, one row a layout [B].

    ``parameters``, ``gradients`` and ``optimizer`` are the resting state, at the end of backward. ``at_peak``
    says what the peak is made of besides parameters and optimizer state; ``moment`` indexes ``moments``.
    """

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    at_peak: Held
    moment: NDArray[np.int64]
    moments: tuple[str, ...]
    communicators: Floats
    context: float
    margin: Floats

    @property
    def allocated(self) -> Floats:
        """Peak of what tensors occupy."""
        return self.parameters + self.optimizer + self.at_peak.total

    @property
    def reserved(self) -> Floats:
        """What the caching allocator takes: allocated and its margin."""
        return self.allocated + self.margin

    @property
    def device(self) -> Floats:
        """All that a process takes of its device: reserved, communicators and context."""
        return self.reserved + self.communicators + self.context


def memory_ledger(model: ModelSpec, job: Job, device: Device, table: LayoutTable) -> Ledger:
    """The ledger of every row of ``table``.

    The resting state is counted by the job's accounting; what lives for a while is the runtime's own always.
    """
    parameters, gradients, optimizer = _resting_state(parameter_table(model), job, table)
    peak = Held(*(np.zeros(table.rows) for _ in Held._fields))
    names: list[str] = []
    moment = np.zeros(table.rows, dtype=np.int64)
    for name, valid, held in timeline(model, job, table):
        bigger = valid & (held.total > peak.total)
        peak = Held(*(np.where(bigger, new, old) for new, old in zip(held, peak, strict=True)))
        moment = np.where(bigger, len(names), moment)
        names.append(name)
    return Ledger(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        at_peak=peak,
        moment=moment,
        moments=tuple(names),
        communicators=device.communicator * _communicators(table),
        context=float(device.context),
        margin=device.allocator_margin * (parameters + optimizer + peak.total),
    )


def _communicators(table: LayoutTable) -> Floats:
    """Communicators that hold buffers: one for each axis of more than one rank, one for the axes joined."""
    wide = (table.dp_replicate > 1).astype(float) + (table.dp_shard > 1)
    return wide + (wide > 1)


def _resting_state(parameters: ParameterTable, job: Job, table: LayoutTable) -> tuple[Floats, Floats, Floats]:
    """Parameters, gradients and optimizer state at the end of backward [B], on rank 0 of dp_shard."""
    row = accounting_row(job.accounting, job.precision)
    result = []
    for bytes_each, split_from in (
        (row.weight, row.weight_split_from),
        (row.gradient, row.gradient_split_from),
        (row.master, row.optimizer_split_from),
    ):
        degree = np.where(table.zero_stage >= split_from, table.dp_shard, 1)
        held = sum(unit.copies * unit.shard_numel(degree) for unit in parameters.units)
        result.append(np.asarray(bytes_each * held, dtype=np.float64))
    degree = np.where(table.zero_stage >= row.optimizer_split_from, table.dp_shard, 1)
    moments = np.zeros(table.rows)
    for unit in parameters.units:
        for tensor in unit.tensors:
            rows, held = tensor.shape[0], -(-tensor.shape[0] // degree)
            moments += (
                unit.copies * row.moment * optimizer_elements(job.optimizer, tensor, row.moment) * held / rows
            )
    return result[0], result[1], result[2] + moments
