"""Every moment of a step that can be the peak of memory, and what the heaviest rank holds then, by kind.

The moments follow the runtime (run/step.py, run/dp.py) and torch's ``fully_shard``: which units are gathered,
whose gradients wait unreduced, and which buffers live, from torch/distributed/fsdp/_fully_shard of torch 2.13
(_fsdp_param_group.py, _fsdp_collectives.py). check/ compares every number with an executed step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Job
from shardwright.layout import RECOMPUTE_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import (
    ELEMENT_BYTES,
    WIDE_BYTES,
    BlockActivations,
    Moment,
    block_activations,
    rotary_table_bytes,
)
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD, ParameterTable, Unit, parameter_table
from shardwright.plan.table import Floats, LayoutTable

TOKEN_BYTES = 16
"""One token id and one target, int64 each, of every microbatch of a step."""

RUNNING_LOSS_BYTES = 8
"""The loss of earlier microbatches, fp64."""


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


class _Amounts(NamedTuple):
    """Bytes of one unit."""

    gathered: Floats  # parameters, whole
    fresh: Floats  # gradients as backward makes them
    whole: Floats  # gradients whole in the reduced type
    reduce_input: Floats
    shard: Floats  # reduced
    last_share: float  # of the unit's last tensor in it


@dataclass(frozen=True)
class _Step:
    """Columns and sizes from which every moment is computed."""

    table: LayoutTable
    layers: int
    tied: bool
    embedding: _Amounts
    block: _Amounts
    head: _Amounts
    tokens: Floats  # of a microbatch
    saved: Floats  # of one block
    ids: Floats  # token ids and targets of a step
    tables: float  # rotary, one pair for all layers
    hidden: float  # bytes of one hidden vector
    wide: float  # bytes of one statistic
    vocab: float  # bytes of one row of logits
    merges: bool  # gradients add to an older one at once: no wider type to reduce in
    tied_gradient: float  # of a tied matrix from the head: autograd holds it until the embedding's is there

    @property
    def inputs(self) -> Floats:
        """Token ids and rotary tables: held until the first layer's backward pass is over."""
        return self.ids + self.tables


def timeline(model: ModelSpec, job: Job, table: LayoutTable) -> Iterator[tuple[str, NDArray[np.bool_], Held]]:
    """Every moment of a step that can be the peak: its name, the rows that have it, and what is held."""
    kinds = [block_activations(model, job.precision, kind) for kind in RECOMPUTE_KINDS]
    yield from _moments(_step(model, job, table, parameter_table(model), kinds), kinds)


def _amounts(unit: Unit, job: Job, table: LayoutTable) -> _Amounts:
    element, wide = ELEMENT_BYTES[job.precision], WIDE_BYTES[job.precision]
    shard = np.asarray(unit.shard_numel(table.dp_shard), dtype=np.float64)
    padded, ones = shard * table.dp_shard, np.ones(table.rows)
    return _Amounts(
        gathered=element * padded,
        fresh=element * unit.numel * ones,
        whole=wide * unit.numel * ones,
        reduce_input=wide * padded,
        shard=wide * shard,
        last_share=unit.tensors[-1].numel / unit.numel if unit.tensors else 0.0,
    )


def _step(
    model: ModelSpec, job: Job, table: LayoutTable, parameters: ParameterTable, kinds: list[BlockActivations]
) -> _Step:
    element = ELEMENT_BYTES[job.precision]
    tokens = np.asarray(table.micro_batch * job.seq, dtype=np.float64)
    saved = np.array([kind.saved_bytes for kind in kinds])[table.recompute]
    return _Step(
        table=table,
        layers=model.layers,
        tied=model.tied_embeddings,
        embedding=_amounts(parameters.unit(EMBEDDING), job, table),
        block=_amounts(parameters.unit(BLOCK), job, table),
        head=_amounts(parameters.unit(HEAD), job, table),
        tokens=tokens,
        saved=saved * tokens,
        ids=TOKEN_BYTES * tokens * table.microbatches,
        tables=rotary_table_bytes(model, job.seq, job.precision),
        hidden=element * model.hidden,
        wide=WIDE_BYTES[job.precision],
        vocab=element * model.vocab,
        merges=job.precision != "bf16",
        tied_gradient=element * model.vocab * model.hidden if model.tied_embeddings else 0.0,
    )


class _Role(NamedTuple):
    """A microbatch by its place in the step, as columns."""

    name: str
    valid: NDArray[np.bool_]
    first: NDArray[np.bool_]  # parameters are gathered in its forward pass
    last: bool
    older: NDArray[np.bool_]  # an earlier microbatch has left gradients


class _Open(NamedTuple):
    """Units that are not yet through their backward pass: so many blocks, perhaps the head. The embedding,
    last of all, always counts as open."""

    blocks: int
    head: bool


def _moments(whole: _Step, kinds: list[BlockActivations]) -> Iterator[tuple[str, NDArray[np.bool_], Held]]:
    m, layers = whole.table.microbatches, whole.layers
    roles = (
        _Role("first microbatch", m >= 2, m >= 2, False, m < 0),
        _Role("middle microbatch", m >= 3, m < 0, False, m >= 0),
        _Role("last microbatch", m >= 1, m == 1, True, m >= 2),
    )
    for role in roles:
        gathers = role.valid & (role.first | (whole.table.zero_stage == 3)) & (whole.table.dp_shard > 1)
        totals = np.where(role.older, RUNNING_LOSS_BYTES, 0)
        forward = replace(whole, ids=whole.ids + totals)
        step = replace(forward, ids=forward.ids + 2 * whole.wide)  # the loss and the gradient it starts from
        yield f"{role.name}: first layer gathered", gathers, _gathering(forward, role, 0)
        yield f"{role.name}: last layer gathered", gathers, _gathering(forward, role, layers - 1)
        yield f"{role.name}: head gathered", gathers, _gathering(forward, role, layers)
        yield f"{role.name}: head backward", role.valid, _head_backward(step, role)
        if not step.tied:  # a tied head is reduced at the very end
            yield f"{role.name}: head gradients reduced", role.valid, _head_reduced(step, role)
        for layer in sorted({layers - 1, max(layers - 2, 0), min(1, layers - 1), 0}, reverse=True):
            for kind, activations in enumerate(kinds):
                has_kind = role.valid & (step.table.recompute == kind)
                for moment in activations.moments:
                    held = _in_block(step, role, layer, moment)
                    yield f"{role.name}: layer {layer}, {moment.name}", has_kind, held
            yield (
                f"{role.name}: layer {layer}, gradients reduced",
                role.valid,
                _block_reduced(step, role, layer),
            )
        splits = role.valid & (step.table.zero_stage == 3)
        yield f"{role.name}: layer 0, parameters copied out", splits, _first_block_copied_out(step, role)
        yield f"{role.name}: embedding backward", role.valid, _embedding_backward(step, role)
        yield f"{role.name}: last gradients reduced", role.valid, _last_reduced(step, role)


# What FSDP holds


def _reduces(step: _Step, role: _Role) -> NDArray[np.bool_]:
    """Rows that reduce gradients in this microbatch."""
    return np.asarray(role.last | (step.table.zero_stage >= 2))


def _merges(step: _Step, role: _Role) -> NDArray[np.bool_]:
    """Rows whose fresh gradients are added at once to older ones of the same type."""
    return np.asarray(step.merges & role.older & (step.table.zero_stage <= 1))


def _resident(step: _Step, role: _Role, still: _Open) -> Floats:
    """Gathered parameters of stages 0 to 2: all, until each unit's backward in the last microbatch."""
    blocks, head = (still.blocks, still.head) if role.last else (step.layers, True)
    held = step.embedding.gathered + blocks * step.block.gathered + (step.head.gathered if head else 0.0)
    return np.asarray(held)


def _gathered(step: _Step, role: _Role, still: _Open, stage3: Floats | float) -> Floats:
    """Gathered parameters: ``stage3`` in stage 3, the resident ones in the others."""
    return np.where(step.table.zero_stage == 3, stage3, _resident(step, role, still))


def _shards(step: _Step, role: _Role, still: _Open) -> Floats:
    """Reduced gradients: those of units done, or all where an earlier microbatch was reduced too."""
    done = (step.layers - still.blocks) * step.block.shard + (0.0 if still.head else step.head.shard)
    every = step.embedding.shard + step.layers * step.block.shard + step.head.shard
    made = done if role.last else np.zeros(step.table.rows)
    return np.where(step.table.zero_stage >= 2, np.where(role.older, every, done), made)


def _waiting(step: _Step, role: _Role, still: _Open) -> Floats:
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


def _reduction(step: _Step, role: _Role, unit: _Amounts) -> Floats:
    """Buffers while a unit's gradients are reduced.

    The input, and either the gradients it is made from, or the reduced shard with the unit's last gradient (a
    loop variable of ``foreach_reduce`` holds it); a single rank copies the input once more instead. Gradients
    that wait for the last microbatch are widened or added.
    """
    waits = role.older & (step.table.zero_stage <= 1)
    source = np.where(waits, unit.whole, unit.fresh)
    beside = np.where(step.table.dp_shard == 1, unit.reduce_input, source * unit.last_share)
    added = np.where(role.older, np.where(_merges(step, role), 0.0, unit.fresh), unit.whole)
    return np.where(_reduces(step, role), unit.reduce_input + np.maximum(source, beside + unit.shard), added)


# The moments


def _gathering(step: _Step, role: _Role, blocks: int) -> Held:
    """Forward, with ``blocks`` blocks done: the next unit is copied out of its all-gather buffer while the
    buffer of the unit before it is still held."""
    unit = step.head if blocks == step.layers else step.block
    before = step.block if blocks else (step.head if step.tied else step.embedding)
    others = step.embedding.gathered + blocks * step.block.gathered
    if step.tied:
        others = others + step.head.gathered
        if blocks == step.layers:
            unit = unit._replace(gathered=np.zeros(step.table.rows))
    gathered = np.where(step.table.zero_stage == 3, step.head.gathered if step.tied else 0.0, others)
    gathered = gathered + 2 * unit.gathered + before.gathered
    shards = np.where(role.older, _shards(step, role, _Open(step.layers, True)), 0.0)
    activations = blocks * step.saved + step.tokens * step.hidden + step.inputs
    return Held(shards, activations, np.zeros(step.table.rows), gathered)


def _head_backward(step: _Step, role: _Role) -> Held:
    still = _Open(step.layers, True)
    prefetched = np.where(step.table.dp_shard > 1, step.block.gathered, 0.0)
    gathered = _gathered(step, role, still, step.head.gathered + prefetched)
    activations = step.layers * step.saved + step.tokens * (3 * step.hidden + step.wide) + step.inputs
    gradient = 0.0 if step.tied else step.head.fresh - step.hidden  # the norm's comes after
    gathered = gathered + _waiting(step, role, still) + gradient
    activations = activations + step.tied_gradient
    return Held(_shards(step, role, still), activations, step.tokens * step.vocab, gathered)


def _head_reduced(step: _Step, role: _Role) -> Held:
    before, after = _Open(step.layers, True), _Open(step.layers, False)
    prefetched = np.where(step.table.dp_shard > 1, step.block.gathered, 0.0)
    gathered = _gathered(step, role, after, prefetched)
    waiting = _waiting(step, role, after if role.last else before)
    activations = step.layers * step.saved + step.tokens * step.hidden + step.inputs
    gathered = gathered + waiting + _reduction(step, role, step.head)
    return Held(_shards(step, role, before), activations, np.zeros(step.table.rows), gathered)


def _in_block(step: _Step, role: _Role, layer: int, moment: Moment) -> Held:
    still = _Open(layer + 1, step.tied)
    last = layer == step.layers - 1
    previous = step.head if last else step.block
    buffer = np.where(_reduces(step, role) & (not (step.tied and last)), previous.reduce_input, 0.0)
    stage3 = step.block.gathered * (2 if layer > 0 else 1) + (step.head.gathered if step.tied else 0.0)
    fresh = np.where(_merges(step, role), moment.fresh_bytes, moment.gradient_bytes)
    gathered = _gathered(step, role, still, stage3) + _waiting(step, role, still)
    gathered = gathered + buffer + fresh
    activations = layer * step.saved + step.tokens * moment.token_bytes + step.inputs + step.tied_gradient
    return Held(_shards(step, role, still), activations, np.zeros(step.table.rows), gathered)


def _first_block_copied_out(step: _Step, role: _Role) -> Held:
    """Stage 3, before the first block's backward: its parameters and the buffer they came in. Every other
    block prefetches one more behind itself, which its own backward passes hold as well."""
    still = _Open(1, step.tied)
    previous = step.block if step.layers > 1 else step.head
    buffer = 0.0 if step.tied and step.layers == 1 else previous.reduce_input
    gathered = 2 * step.block.gathered + buffer + (step.head.gathered if step.tied else 0.0)
    activations = step.saved + step.tokens * step.hidden + step.inputs + step.tied_gradient
    return Held(_shards(step, role, still), activations, np.zeros(step.table.rows), gathered)


def _block_reduced(step: _Step, role: _Role, layer: int) -> Held:
    before, after = _Open(layer + 1, step.tied), _Open(layer, step.tied)
    stage3 = step.block.gathered * (1 if layer > 0 else 0) + (step.head.gathered if step.tied else 0.0)
    gathered = _gathered(step, role, after, stage3) + _waiting(step, role, after if role.last else before)
    gathered = gathered + _reduction(step, role, step.block)
    inputs = step.inputs if layer > 0 else step.ids
    activations = layer * step.saved + step.tokens * step.hidden + inputs + step.tied_gradient
    return Held(_shards(step, role, before), activations, np.zeros(step.table.rows), gathered)


def _embedding_backward(step: _Step, role: _Role) -> Held:
    still = _Open(0, step.tied)
    buffer = np.where(_reduces(step, role), step.block.reduce_input, 0.0)
    stage3 = step.head.gathered if step.tied else np.zeros(step.table.rows)
    gathered = _gathered(step, role, still, stage3) + _waiting(step, role, still) + buffer
    if not step.tied:
        gathered = gathered + step.embedding.fresh
    # tied: the head's gradient and the embedding's, with the gradient this came from, or else with their sum
    source = step.tokens * step.hidden
    summed = source < step.tied_gradient
    activations = np.where(summed, 0.0, source) + 2 * step.tied_gradient + step.ids
    gathered = gathered + np.where(summed, step.tied_gradient, 0.0)
    return Held(_shards(step, role, still), activations, np.zeros(step.table.rows), gathered)


def _last_reduced(step: _Step, role: _Role) -> Held:
    still = _Open(0, step.tied)
    unit = step.head if step.tied else step.embedding
    kept = np.zeros(step.table.rows)
    if not role.last:
        kept = np.where(step.table.zero_stage <= 2, _resident(step, role, still), 0.0) + _waiting(
            step, role, still
        )
    gathered = kept + _reduction(step, role, unit)
    return Held(_shards(step, role, still), step.ids, np.zeros(step.table.rows), gathered)
