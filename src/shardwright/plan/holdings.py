"""What a pipeline rank holds of FSDP's at a point of a step: gathered parameters, waiting gradients, buffers.

Which units are gathered, whose gradients wait unreduced, and which buffers live follows the runtime
(run/step.py, run/dp.py) and torch's ``fully_shard``, torch/distributed/fsdp/_fully_shard of torch 2.13
(_fsdp_param_group.py, _fsdp_collectives.py). plan/moments.py puts it together moment by moment.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Job
from shardwright.layout import CONTEXT_KINDS, RECOMPUTE_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import (
    ELEMENT_BYTES,
    WIDE_BYTES,
    BlockActivations,
    Split,
    block_activations,
    rotary_table_bytes,
)
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD
from shardwright.plan.shards import UnitElements, unit_elements
from shardwright.plan.stages import Stage
from shardwright.plan.table import Floats, LayoutTable, distinct

TOKEN_BYTES = 16
"""One token id and one target, int64 each, of every microbatch of a step."""


class Held(NamedTuple):
    """Bytes by kind at one moment, besides parameters and optimizer state."""

    gradients: Floats
    activations: Floats
    logits: Floats
    gathered: Floats

    @property
    def total(self) -> Floats:
        """Sum of the kinds."""
        return self.gradients + self.activations + self.logits + self.gathered


class Amounts(NamedTuple):
    """Bytes of one unit."""

    gathered: Floats  # parameters, whole
    fresh: Floats  # gradients as backward makes them
    whole: Floats  # gradients whole in the reduced type
    reduce_input: Floats
    shard: Floats  # reduced
    last_share: float  # of the unit's last tensor in it


@dataclass(frozen=True)
class RankStep:
    """Columns and sizes of one pipeline rank from which every moment is computed."""

    table: LayoutTable
    layers: Floats  # blocks of the rank
    tied: bool
    embedding: Amounts
    block: Amounts
    head: Amounts
    tokens: Floats  # of a microbatch on a rank
    saved: Floats  # of one block
    others: Floats  # of all other microbatches in flight
    ids: Floats  # token ids and targets of a step
    tables: float  # rotary, one pair for all layers
    residual: Floats  # bytes of one vector of the residual stream
    normed: Floats  # bytes of what the head reads
    rstd: Floats
    wide: float  # bytes of one statistic
    vocab: Floats  # bytes of one row of logits
    merges: bool  # gradients add to an older one at once: no wider type to reduce in
    tied_gradient: Floats | float  # of a tied matrix from the head: held until the embedding's is there

    @property
    def inputs(self) -> Floats:
        """Token ids and rotary tables, held until the first layer's backward pass is over; and what the other
        microbatches in flight keep."""
        return self.ids + self.tables + self.others


class BlockKinds(NamedTuple):
    """Activations of a block for each way of splitting and recomputing it, and which one a row has."""

    kinds: list[BlockActivations]
    row: NDArray[np.intp]


def block_kinds(model: ModelSpec, job: Job, table: LayoutTable) -> BlockKinds:
    cases, row = distinct(table.tp, table.sp, table.cp, table.cp_kind)
    kinds = [
        block_activations(model, job.precision, recompute, Split(tp, bool(sp), cp, CONTEXT_KINDS[kind]))
        for tp, sp, cp, kind in cases
        for recompute in RECOMPUTE_KINDS
    ]
    row = row * len(RECOMPUTE_KINDS) + table.recompute
    return BlockKinds(kinds, row)


def _amounts(unit: UnitElements, held: Floats, job: Job) -> Amounts:
    """Bytes of a unit; nothing where the rank does not hold it."""
    element, wide = ELEMENT_BYTES[job.precision] * held, WIDE_BYTES[job.precision] * held
    return Amounts(
        gathered=element * unit.padded,
        fresh=element * unit.whole,
        whole=wide * unit.whole,
        reduce_input=wide * unit.padded,
        shard=wide * unit.shard,
        last_share=unit.last_share,
    )


def rank_step(model: ModelSpec, job: Job, table: LayoutTable, kinds: BlockKinds, stage: Stage) -> RankStep:
    element, wide = ELEMENT_BYTES[job.precision], WIDE_BYTES[job.precision]
    units = unit_elements(model, table)
    tokens = table.micro_batch * job.seq / table.cp
    saved = np.array([kind.saved_bytes for kind in kinds.kinds])[kinds.row] * tokens
    by_sequence = np.where(table.sp == 1, table.tp, 1)
    residual = element * model.hidden / by_sequence
    in_flight = stage.blocks * saved + np.where(stage.head == 0, residual * tokens, 0.0)
    ones = np.ones(table.rows)
    return RankStep(
        table=table,
        layers=stage.blocks,
        tied=model.tied_embeddings,
        embedding=_amounts(units[EMBEDDING], stage.embedding, job),
        block=_amounts(units[BLOCK], ones, job),
        head=_amounts(
            units[HEAD], np.maximum(stage.head, stage.embedding) if model.tied_embeddings else stage.head, job
        ),
        tokens=tokens,
        saved=saved,
        others=(stage.in_flight - 1) * in_flight,
        ids=TOKEN_BYTES * tokens * table.microbatches,
        tables=rotary_table_bytes(model, job.seq, job.precision),
        residual=residual,
        normed=element * model.hidden * ones,
        rstd=wide / by_sequence,
        wide=wide,
        vocab=stage.head * np.ceil(model.vocab / table.tp) * element,
        merges=job.precision not in ("bf16", "fp8"),
        tied_gradient=element * np.ceil(model.vocab / table.tp) * model.hidden
        if model.tied_embeddings
        else 0.0,
    )


class Role(NamedTuple):
    """A microbatch by its place in the step, as columns."""

    name: str
    valid: NDArray[np.bool_]
    first: NDArray[np.bool_]  # parameters are gathered in its forward pass
    last: bool
    older: NDArray[np.bool_]  # an earlier microbatch has left gradients


class Open(NamedTuple):
    """Units that are not yet through their backward pass: so many blocks, perhaps the head. The embedding,
    last of all, always counts as open."""

    blocks: Floats
    head: bool


def roles_of(table: LayoutTable) -> tuple[Role, ...]:
    """The microbatches of a step that differ in what is held."""
    m, alone = table.microbatches, table.pp == 1
    return (
        Role("first microbatch", (m >= 2) & alone, m >= 2, False, m < 0),
        Role("middle microbatch", (m >= 3) | ~alone, m < 0, False, m >= 0),
        Role("last microbatch", alone, m == 1, True, m >= 2),
    )


def reduces(step: RankStep, role: Role) -> NDArray[np.bool_]:
    """Rows that reduce gradients in this microbatch."""
    return np.asarray(role.last | (step.table.zero_stage >= 2))


def merges_at_once(step: RankStep, role: Role) -> NDArray[np.bool_]:
    """Rows whose fresh gradients are added at once to older ones of the same type."""
    return np.asarray(step.merges & role.older & (step.table.zero_stage <= 1))


def resident(step: RankStep, role: Role, still: Open) -> Floats:
    """Gathered parameters of stages 0 to 2: all, until each unit's backward in the last microbatch."""
    blocks, head = (still.blocks, still.head) if role.last else (step.layers, True)
    held = step.embedding.gathered + blocks * step.block.gathered + (step.head.gathered if head else 0.0)
    return np.asarray(held)


def gathered_parameters(step: RankStep, role: Role, still: Open, stage3: Floats | float) -> Floats:
    """Gathered parameters: ``stage3`` in stage 3, the resident ones in the others."""
    return np.where(step.table.zero_stage == 3, stage3, resident(step, role, still))


def reduced_shards(step: RankStep, role: Role, still: Open) -> Floats:
    """Reduced gradients: those of units done, or all where an earlier microbatch was reduced too."""
    done = (step.layers - still.blocks) * step.block.shard + (0.0 if still.head else step.head.shard)
    every = step.embedding.shard + step.layers * step.block.shard + step.head.shard
    made = done if role.last else np.zeros(step.table.rows)
    return np.where(step.table.zero_stage >= 2, np.where(role.older, every, done), made)


def waiting_gradients(step: RankStep, role: Role, still: Open) -> Floats:
    """Whole gradients that wait for the last microbatch, in stages 0 and 1."""
    not_done = (
        step.embedding.whole + still.blocks * step.block.whole + (step.head.whole if still.head else 0.0)
    )
    every = step.embedding.whole + step.layers * step.block.whole + step.head.whole
    if role.last:
        waiting = np.where(role.older, not_done, 0.0)
    else:
        waiting = np.where(role.older, every, every - not_done)
    return np.where(step.table.zero_stage <= 1, waiting, 0.0)


def reduction_buffers(step: RankStep, role: Role, unit: Amounts) -> Floats:
    """Buffers while a unit's gradients are reduced.

    The input, and either the gradients it is made from, or the reduced shard with the unit's last gradient (a
    loop variable of ``foreach_reduce`` holds it); a single rank copies the input once more instead. Gradients
    that wait for the last microbatch are widened or added.
    """
    waits = role.older & (step.table.zero_stage <= 1)
    source = np.where(waits, unit.whole, unit.fresh)
    beside = np.where(step.table.shard == 1, unit.reduce_input, source * unit.last_share)
    added = np.where(role.older, np.where(merges_at_once(step, role), 0.0, unit.fresh), unit.whole)
    return np.where(reduces(step, role), unit.reduce_input + np.maximum(source, beside + unit.shard), added)
