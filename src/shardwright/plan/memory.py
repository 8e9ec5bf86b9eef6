"""The memory ledger: what the heaviest rank holds, by kind, at rest and at the peak of a step."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Device
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.accounting import accounting_row, gathered_bytes, is_trained, optimizer_elements
from shardwright.plan.amounts import Amounts, amounts_of, trained_weight, unit_amounts
from shardwright.plan.communicators import communicator_bytes
from shardwright.plan.held_units import held_units
from shardwright.plan.holdings import Held
from shardwright.plan.moments import PeakTerm, in_two_passes, model_blocks, peak_terms, timeline
from shardwright.plan.params import Tensor
from shardwright.plan.shards import (
    UnitElements,
    Weight,
    factored_elements,
    weighted_elements,
)
from shardwright.plan.stages import Stage, all_stages, stages
from shardwright.plan.table import ColumnMap, Floats, LayoutTable, part_along, piecewise

NO_ROOM = 1e30
"""Bytes that no device has: what a layout needs that the host has no room for."""


@dataclass(frozen=True)
class Ledger:
    """Memory of one pipeline rank, one row a layout [B]; without a pipeline, of any rank.

    ``margin``: what the caching allocator takes beside the peak, fragments and the pool of reduced gradients.
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
    return [stage_ledger(model, job, device, table, stage) for stage in stages(table, model)]


def memory_ledger(model: ModelSpec, job: Job, device: Device, table: LayoutTable) -> Ledger:
    """The ledger of a table whose heaviest rank is the same in every row.

    Of several pipeline ranks, the one with the largest device memory in the first row.
    """
    return max(ledgers(model, job, device, table), key=lambda ledger: float(ledger.device[0]))


def stage_ledger(model: ModelSpec, job: Job, device: Device, table: LayoutTable, stage: Stage) -> Ledger:
    """The ledger of one pipeline rank."""
    parameters, gradients, optimizer = (
        np.broadcast_to(part, table.shape)
        for part in resting_state(model, job, table, stage, lambda tensor: True)
    )
    peak = Held(*(np.zeros(table.shape) for _ in Held._fields))
    names: list[str] = []
    moment = np.zeros(table.shape, dtype=np.int64)
    for name, valid, held in timeline(model, job, table, stage):
        bigger = valid & (held.total > peak.total)
        peak = Held(*(np.where(bigger, new, old) for new, old in zip(held, peak, strict=True)))
        moment = np.where(bigger, len(names), moment)
        names.append(name)
    allocated = parameters + optimizer + peak.total
    kinds, amounts = model_blocks(model, job, table), unit_amounts(model, job, table)
    resting = parameters + optimizer
    pools = has_pools(device)
    terms = [
        term
        for apart in (False, True)[: 1 + in_two_passes(table).all()]
        for term in peak_terms(model, job, table, stage, kinds, amounts, resting, pools=pools, apart=apart)
    ]
    reserved = (1 + device.allocator_margin) * highest(terms, table.shape)
    return Ledger(
        stage=stage,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        at_peak=peak,
        moment=moment,
        moments=tuple(names),
        communicators=communicator_bytes(device, table),
        context=float(device.context),
        margin=np.where(stage.valid, reserved - allocated, 0.0),
    )


def has_pools(device: Device) -> bool:
    """Whether freed memory stays with the stream that allocated it: torch's allocator of CUDA keeps it so."""
    return device.kind != "cpu"


def device_memory(model: ModelSpec, job: Job, device: Device, table: LayoutTable) -> Floats:
    """``Ledger.device`` of the heaviest rank of every row [B], without its parts; for large tables."""
    most = piecewise(table.pp > 1, table, lambda _, part: highest(reserved_terms(model, job, device, part)))
    return most * (1 + device.allocator_margin) + beside_allocated(model, job, device, table)


def beside_allocated(
    model: ModelSpec,
    job: Job,
    device: Device,
    table: LayoutTable,
    ranks: "RankStates | None" = None,
) -> Floats:
    """What a process takes of its device besides the caching allocator's memory [B]; ``NO_ROOM`` where more
    is offloaded than its share of the host's memory holds."""
    communicators = communicator_bytes(device, table) if ranks is None else ranks.communicators
    beside = communicators + float(device.context)
    if not table.offload.any():
        return beside
    return np.where(host_bytes(model, job, device, table, ranks) > device.host_memory, NO_ROOM, beside)


def host_bytes(
    model: ModelSpec, job: Job, device: Device, table: LayoutTable, ranks: "RankStates | None" = None
) -> Floats:
    """What a rank keeps in host memory at most [B]: optimizer state, with the copies of parameters and
    gradients that its update there works on (run/offload.py); saved tensors of its blocks."""
    row = accounting_row(job.accounting, job.precision)
    copies = 1 + row.gradient / row.weight
    kinds = model_blocks(model, job, table)
    tokens = table.micro_batch * job.seq / table.cp
    stage, parameters, optimizer, *_ = ranks or rank_states(model, job, device, table)
    blocks = {"dense": stage.blocks - stage.expert_blocks, "experts": stage.expert_blocks}
    saved = sum((blocks[kind] * own.saved_bytes for kind, own in kinds.items()), np.zeros(1))
    kept = np.where(table.offload & 1, optimizer + copies * parameters, 0.0)
    kept = kept + np.where(table.offload & 2, stage.in_flight * saved * tokens, 0.0)
    return np.asarray(np.where(stage.valid, kept, 0.0).max(axis=0))


class RankStates(NamedTuple):
    """All pipeline ranks that can be the heaviest, along an axis before those of the table; their parameters,
    and their optimizer state wherever that rests [B]."""

    stage: Stage
    parameters: Floats
    optimizer: Floats
    units: Mapping[str, Amounts]  # bytes of one unit of every kind
    communicators: Floats

    def along(self, axis: int, index: slice | NDArray[np.intp]) -> "RankStates":
        """The same for the part of a grid that some places of one axis make up."""
        from_the_last = axis - self.communicators.ndim  # ranks lie along an axis before
        return self.mapped(lambda column: part_along(column, from_the_last, index))

    def mapped(self, part: ColumnMap) -> "RankStates":
        """The same with ``part`` of every column."""
        return RankStates(
            self.stage.mapped(part),
            part(self.parameters),
            part(self.optimizer),
            {kind: unit.mapped(part) for kind, unit in self.units.items()},
            part(self.communicators),
        )


def rank_states(model: ModelSpec, job: Job, device: Device, table: LayoutTable) -> RankStates:
    """Ranks that can be the heaviest, with their resting state: neither depends on how a microbatch is
    recomputed, nor on what rests on the host."""
    stage = all_stages(table, model)
    amounts = _state_amounts(job)
    weights: list[Weight] = [amount for amount, _ in amounts]
    *state, trained = weighted_elements(model, table, [*weights, trained_weight(job)], job.adapters)
    _add_factors(state, model, job, table, lambda tensor: True)
    parameters, _, optimizer = _resting_state(model, _split(table, state, amounts), table, stage)
    units = amounts_of(model, job, table, trained)
    return RankStates(stage, parameters, optimizer, units, communicator_bytes(device, table))


def reserved_terms(
    model: ModelSpec,
    job: Job,
    device: Device,
    table: LayoutTable,
    ranks: RankStates | None = None,
) -> list[PeakTerm]:
    """``Ledger.reserved`` of the heaviest rank, fragments left out, as the largest of these sums [B]; of rows
    that all have a pipeline, or all have none."""
    ranks = ranks or rank_states(model, job, device, table)
    terms = _terms(model, job, device, table, ranks)
    two = in_two_passes(table)
    axes = [axis for axis, places in enumerate(two.shape) if places > 1]
    if two.all() or (two.any() and len(axes) > 1):
        return terms + _terms(model, job, device, table, ranks, apart=True)
    if two.any():  # few rows have these many moments: they go in as one
        (axis,), places = axes, np.flatnonzero(two)
        part, of_part = table.along(axis, places), ranks.along(axis, places)
        found = _terms(model, job, device, part, of_part, apart=True)
        if not found:
            return terms
        largest = highest(found)
        every = np.full((*largest.shape[:axis], two.size, *largest.shape[axis + 1 :]), -np.inf)
        every[(slice(None),) * axis + (places,)] = largest
        terms.append(PeakTerm(every, np.zeros((1,) * every.ndim)))
    return terms


def _terms(
    model: ModelSpec, job: Job, device: Device, table: LayoutTable, ranks: RankStates, *, apart: bool = False
) -> list[PeakTerm]:
    kinds = model_blocks(model, job, table)
    stage, parameters, optimizer, amounts, _ = ranks
    resting = parameters + _on_device(table, optimizer)
    pools = has_pools(device)
    return list(peak_terms(model, job, table, stage, kinds, amounts, resting, pools=pools, apart=apart))


def _on_device(table: LayoutTable, optimizer: Floats) -> Floats:
    """Optimizer state, unless it is offloaded."""
    offloaded = table.offload & 1
    return np.where(offloaded, 0.0, optimizer) if offloaded.any() else optimizer


def highest(terms: Sequence[PeakTerm], shape: tuple[int, ...] | None = None) -> Floats:
    """The largest of the sums, of ``shape`` if that is more than they broadcast to. Terms of the same state
    are compared before it is added."""
    if shape is None:
        shape = np.broadcast_shapes(*(part.shape for term in terms for part in term))
    first, *others = _by_state(terms)
    most = np.add(*first, out=np.empty(shape))
    other = np.empty(shape) if others else most
    for term in others:
        np.add(*term, out=other)
        np.maximum(most, other, out=most)
    return most


def _by_state(terms: Sequence[PeakTerm]) -> list[PeakTerm]:
    """One term for each different state, with the most that is besides."""
    groups: list[PeakTerm] = []
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)  # of shape and ends
    for term in terms:
        known = alike[term.state.shape, term.state.flat[0], term.state.flat[-1]]
        place = next((n for n in known if np.array_equal(groups[n].state, term.state)), None)
        if place is None:
            known.append(len(groups))
            groups.append(term)
        else:
            most = np.maximum(groups[place].activations, term.activations)
            groups[place] = PeakTerm(term.state, most)
    return groups


class _StateUnits(NamedTuple):
    """Bytes of one unit of each kind, and where a stage splits them."""

    bytes_of: Mapping[str, UnitElements]
    split: NDArray[np.bool_]


def resting_state(
    model: ModelSpec, job: Job, table: LayoutTable, stage: Stage, wanted: Callable[[Tensor], bool]
) -> tuple[Floats, Floats, Floats]:
    """What the ``wanted`` tensors have of a stage's parameters, gradients and optimizer state on the device
    at the end of backward [B]."""
    amounts = _state_amounts(job)
    weights = [_of(wanted, amount) for amount, _ in amounts]
    state = weighted_elements(model, table, weights, job.adapters)
    _add_factors(state, model, job, table, wanted)
    units = _split(table, state, amounts)
    parameters, gradients, optimizer = _resting_state(model, units, table, stage)
    return parameters, gradients, _on_device(table, optimizer)


def _state_amounts(job: Job) -> tuple[tuple[Weight, int], ...]:
    """Bytes of an element's parameters, gradients and optimizer state by the job's accounting, and the stage
    from which on each is split."""
    row = accounting_row(job.accounting, job.precision)

    def weight_bytes(tensor: Tensor) -> float:
        return float(row.weight) if is_trained(job, tensor) else gathered_bytes(job, tensor)

    def gradient_bytes(tensor: Tensor) -> float:
        return float(row.gradient) if is_trained(job, tensor) else 0.0

    def optimizer_bytes(tensor: Tensor) -> float:
        if not is_trained(job, tensor):
            return 0.0
        if job.optimizer == "adafactor":  # split otherwise than the parameter: _add_factors
            return float(row.master)
        return row.master + row.moment * optimizer_elements(job.optimizer, tensor, row.moment) / tensor.numel

    return (
        (weight_bytes, row.weight_split_from),
        (gradient_bytes, row.gradient_split_from),
        (optimizer_bytes, row.optimizer_split_from),
    )


def _split(
    table: LayoutTable, found: Sequence[Mapping[str, UnitElements]], amounts: Sequence[tuple[Weight, int]]
) -> list[_StateUnits]:
    """Parameters, gradients and optimizer state of one unit."""
    return [
        _StateUnits(bytes_of, table.zero_stage >= split_from)
        for bytes_of, (_, split_from) in zip(found, amounts, strict=True)
    ]


def _add_factors(
    state: list[Mapping[str, UnitElements]],
    model: ModelSpec,
    job: Job,
    table: LayoutTable,
    wanted: Callable[[Tensor], bool],
) -> None:
    """Add Adafactor's factors of the ``wanted`` tensors to the optimizer state, which is the last."""
    if job.optimizer != "adafactor":
        return
    moment = float(accounting_row(job.accounting, job.precision).moment)
    each = _of(lambda tensor: is_trained(job, tensor) and wanted(tensor), lambda tensor: moment)
    factors = factored_elements(model, table, each, job.adapters)
    state[-1] = {
        kind: unit._replace(whole=unit.whole + factors[kind].whole, shard=unit.shard + factors[kind].shard)
        for kind, unit in state[-1].items()
    }


def _of(wanted: Callable[[Tensor], bool], weight: Callable[[Tensor], float]) -> Callable[[Tensor], float]:
    return lambda tensor: weight(tensor) if wanted(tensor) else 0.0


def _resting_state(
    model: ModelSpec, units: Sequence[_StateUnits], table: LayoutTable, stage: Stage
) -> tuple[Floats, Floats, Floats]:
    """Parameters, gradients and optimizer state at the end of backward [B], on rank 0 of the shard axes and,
    if it is offloaded, its host."""
    held = held_units(table, stage)
    result = []
    for bytes_of, split in units:
        total: Floats = np.zeros((1,) * table.pp.ndim)
        for kind, unit in bytes_of.items():
            if unit.whole.any():
                total = total + held[kind] * np.where(split, unit.shard, unit.whole)
        result.append(total)
    return result[0], result[1], result[2]
