"""The memory ledger: what the heaviest rank holds, by kind, at rest and at the peak of a step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.axes import MESH_ORDER
from shardwright.cluster import Device
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.accounting import accounting_row, optimizer_elements
from shardwright.plan.holdings import Held
from shardwright.plan.moments import peak_bytes, timeline
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD, Tensor
from shardwright.plan.shards import unit_elements
from shardwright.plan.stages import Stage, stages
from shardwright.plan.table import Floats, LayoutTable


@dataclass(frozen=True)
class Ledger:
    """Memory of one pipeline rank, one row a layout [B]; without a pipeline, of any rank.

    ``parameters``, ``gradients`` and ``optimizer`` are the resting state, at the end of backward. ``at_peak``
    says what the peak is made of besides parameters and optimizer state; ``moment`` indexes ``moments``.
    """

    stage: Stage
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
        """All that a process takes of its device: reserved, communicators and context; 0 in rows without the
        stage."""
        return np.where(self.stage.valid, self.reserved + self.communicators + self.context, 0.0)


def ledgers(model: ModelSpec, job: Job, device: Device, table: LayoutTable) -> list[Ledger]:
    """The ledger of every pipeline rank that can be the heaviest.

    The resting state is counted by the job's accounting; what lives for a while is the runtime's own always.
    """
    return [_ledger(model, job, device, table, stage) for stage in stages(table, model.layers)]


def memory_ledger(model: ModelSpec, job: Job, device: Device, table: LayoutTable) -> Ledger:
    """The ledger of a table whose heaviest rank is the same in every row.

    Of several pipeline ranks, the one with the largest device memory in the first row.
    """
    return max(ledgers(model, job, device, table), key=lambda ledger: float(ledger.device[0]))


def _ledger(model: ModelSpec, job: Job, device: Device, table: LayoutTable, stage: Stage) -> Ledger:
    parameters, gradients, optimizer = _resting_state(model, job, table, stage)
    peak = Held(*(np.zeros(table.rows) for _ in Held._fields))
    names: list[str] = []
    moment = np.zeros(table.rows, dtype=np.int64)
    for name, valid, held in timeline(model, job, table, stage):
        bigger = valid & (held.total > peak.total)
        peak = Held(*(np.where(bigger, new, old) for new, old in zip(held, peak, strict=True)))
        moment = np.where(bigger, len(names), moment)
        names.append(name)
    return Ledger(
        stage=stage,
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


def device_memory(model: ModelSpec, job: Job, device: Device, table: LayoutTable) -> Floats:
    """``Ledger.device`` of the heaviest rank of every row [B], without its parts; for large tables."""
    most = np.zeros(table.rows)
    for rows in (table.pp == 1, table.pp > 1):
        part = table.take(rows)
        if part.rows:
            most[rows] = _allocated(model, job, part)
    communicators = device.communicator * _communicators(table)
    return most + device.allocator_margin * most + communicators + float(device.context)


def _allocated(model: ModelSpec, job: Job, table: LayoutTable) -> Floats:
    """``Ledger.allocated`` of the heaviest rank [B]; of rows that all have a pipeline, or all have none."""
    most = np.zeros(table.rows)
    for stage in stages(table, model.layers):
        parameters, _, optimizer = _resting_state(model, job, table, stage)
        allocated = parameters + optimizer + peak_bytes(model, job, table, stage)
        np.maximum(most, np.where(stage.valid, allocated, 0.0), out=most)
    return most


def _communicators(table: LayoutTable) -> Floats:
    """Communicators that hold buffers: one for each axis of more than one rank, one for joined data axes."""
    wide = np.zeros(table.rows)
    for axis in MESH_ORDER:
        wide += getattr(table, axis) > 1
    return wide + ((table.dp_replicate > 1) & (table.shard > 1))


def _resting_state(
    model: ModelSpec, job: Job, table: LayoutTable, stage: Stage
) -> tuple[Floats, Floats, Floats]:
    """Parameters, gradients and optimizer state at the end of backward [B], on rank 0 of the shard axes."""
    row = accounting_row(job.accounting, job.precision)

    def optimizer_bytes(tensor: Tensor) -> float:
        return row.master + row.moment * optimizer_elements(job.optimizer, tensor, row.moment) / tensor.numel

    amounts = (
        (lambda _: float(row.weight), row.weight_split_from),
        (lambda _: float(row.gradient), row.gradient_split_from),
        (optimizer_bytes, row.optimizer_split_from),
    )
    head = np.maximum(stage.head, stage.embedding) if model.tied_embeddings else stage.head
    held = {EMBEDDING: stage.embedding, BLOCK: stage.blocks, HEAD: head}
    result = []
    for bytes_each, split_from in amounts:
        units = unit_elements(model, table, bytes_each)
        split = table.zero_stage >= split_from
        result.append(
            sum(
                (held[kind] * np.where(split, u.shard, u.whole) for kind, u in units.items()),
                np.zeros(table.rows),
            )
        )
    return result[0], result[1], result[2]
