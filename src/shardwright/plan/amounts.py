"""Bytes of what a runtime gathers and reduces together: of one unit of each kind, and of a rank's blocks."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.accounting import is_trained
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.params import BLOCK
from shardwright.plan.shards import (
    EXPERT_BLOCK,
    EXPERTS,
    UnitElements,
    Weight,
    gathered_units,
    unit_elements,
)
from shardwright.plan.stages import Stage
from shardwright.plan.table import ColumnMap, Floats, LayoutTable


class Amounts(NamedTuple):
    """Bytes of one unit."""

    gathered: Floats  # parameters, whole
    fresh: Floats  # gradients as backward makes them
    whole: Floats  # gradients whole in the reduced type
    reduce_input: Floats
    shard: Floats  # reduced
    last_share: float  # of the unit's last tensor in it

    def mapped(self, part: ColumnMap) -> "Amounts":
        """The same with ``part`` of every column."""
        return _of_columns(map(part, self[:-1]), self.last_share)

    def less(self, other: "Amounts") -> "Amounts":
        """Without another that is in it."""
        pairs = zip(self[:-1], other[:-1], strict=True)
        return _of_columns((whole - part for whole, part in pairs), self.last_share)


def _amounts(gathered: UnitElements, trained: UnitElements, job: Job) -> Amounts:
    """Bytes of a unit, gathered elements weighing their bytes."""
    element, wide = ELEMENT_BYTES[job.precision], WIDE_BYTES[job.precision]
    return Amounts(
        gathered=gathered.padded,
        fresh=element * trained.whole,
        whole=wide * trained.whole,
        reduce_input=wide * trained.padded,
        shard=wide * trained.shard,
        last_share=trained.last_share,
    )


def held_of(unit: Amounts, held: Floats) -> Amounts:
    """Of a unit that some ranks do not hold."""
    return _of_columns((held * part for part in unit[:-1]), unit.last_share)


def joined(one: Amounts, other: Amounts) -> Amounts:
    """Two units held at the same time."""
    return _of_columns((a + b for a, b in zip(one[:-1], other[:-1], strict=True)), _share_of(one, other))


def _either(condition: NDArray[np.bool_], one: Amounts, other: Amounts) -> Amounts:
    pairs = zip(one[:-1], other[:-1], strict=True)
    return _of_columns((np.where(condition, a, b) for a, b in pairs), _share_of(one, other))


def _mean(share: Floats, one: Amounts, other: Amounts) -> Amounts:
    pairs = zip(one[:-1], other[:-1], strict=True)
    return _of_columns((share * a + (1 - share) * b for a, b in pairs), _share_of(one, other))


def _share_of(one: Amounts, other: Amounts) -> float:
    return max(one.last_share, other.last_share)


def _of_columns(columns: Iterable[Floats], last_share: float) -> Amounts:
    gathered, fresh, whole, reduce_input, shard = columns
    return Amounts(gathered, fresh, whole, reduce_input, shard, last_share)


def block_amounts(amounts: Mapping[str, Amounts], model: ModelSpec, stage: Stage) -> tuple[Amounts, Amounts]:
    """The largest and the mean block of a rank."""
    if model.block_kinds == ("dense",):
        return amounts[BLOCK], amounts[BLOCK]
    with_experts = joined(amounts[EXPERT_BLOCK], amounts[EXPERTS])
    if model.block_kinds == ("experts",):
        return with_experts, with_experts
    largest = _either(stage.expert_blocks > 0, with_experts, amounts[BLOCK])
    return largest, _mean(stage.expert_blocks / stage.blocks, with_experts, amounts[BLOCK])


def gathered_ahead(block: Amounts, experts: Amounts, table: LayoutTable, stage: Stage) -> Floats:
    """What is gathered of a block before its turn: nothing of experts that no rank shards, which are copied
    when they are needed."""
    whole = (table.expert_shard == 1) & (table.shard > 1) & (stage.expert_blocks > 0)
    return block.gathered - np.where(whole, experts.gathered, 0.0) if whole.any() else block.gathered


def experts_apart(experts: Amounts, table: LayoutTable, stage: Stage) -> Amounts:
    """Experts of a block where FSDP has them as a group of their own, which it reduces first."""
    return held_of(experts, np.where((table.ep * table.etp > 1) & (stage.expert_blocks > 0), 1.0, 0.0))


def gathered_ahead_of_head(ahead: Floats, experts: Amounts, table: LayoutTable) -> Floats:
    """Of a block in two groups the head's backward pass gathers one ahead, the experts."""
    return np.where(experts.gathered > 0, np.where(table.expert_shard > 1, experts.gathered, 0.0), ahead)


def unit_amounts(model: ModelSpec, job: Job, table: LayoutTable) -> dict[str, Amounts]:
    """Bytes of one unit of every kind."""
    return amounts_of(model, job, table, unit_elements(model, table, trained_weight(job), job.adapters))


def trained_weight(job: Job) -> Weight:
    """1 for an element that is trained, 0 for a frozen one."""
    return lambda tensor: float(is_trained(job, tensor))


def amounts_of(
    model: ModelSpec, job: Job, table: LayoutTable, trained: Mapping[str, UnitElements]
) -> dict[str, Amounts]:
    """The same from ``trained`` elements."""
    gathered = gathered_units(model, job, table, trained)
    return {kind: _amounts(gathered[kind], trained[kind], job) for kind in trained}
