"""Every moment of a step that can be the peak of memory, and what the heaviest rank holds then, by kind.

The moments follow the runtime (run/step.py, run/dp.py) and torch's ``fully_shard``: which units are gathered,
whose gradients wait unreduced, and which buffers live, from torch/distributed/fsdp/_fully_shard of torch 2.13
(_fsdp_param_group.py, _fsdp_collectives.py). check/ compares every number with an executed step.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
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
    """Columns and sizes of one pipeline rank from which every moment is computed."""

    table: LayoutTable
    layers: Floats  # blocks of the rank
    tied: bool
    embedding: _Amounts
    block: _Amounts
    head: _Amounts
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


class _Kinds(NamedTuple):
    """Activations of a block for each way of splitting and recomputing it, and which one a row has."""

    kinds: list[BlockActivations]
    row: NDArray[np.intp]


def _kinds(model: ModelSpec, job: Job, table: LayoutTable) -> _Kinds:
    cases, row = distinct(table.tp, table.sp, table.cp, table.cp_kind)
    kinds = [
        block_activations(model, job.precision, recompute, Split(tp, bool(sp), cp, CONTEXT_KINDS[kind]))
        for tp, sp, cp, kind in cases
        for recompute in RECOMPUTE_KINDS
    ]
    row = row * len(RECOMPUTE_KINDS) + table.recompute
    return _Kinds(kinds, row)


def timeline(
    model: ModelSpec, job: Job, table: LayoutTable, stage: Stage
) -> Iterator[tuple[str, NDArray[np.bool_], Held]]:
    """Every moment of a step that can be the peak of a pipeline rank: its name, the rows that have it, and
    what is held."""
    kinds = _kinds(model, job, table)
    step = _step(model, job, table, kinds, stage)
    yield from _moments(step, _roles(table), lambda role: _each_inside(step, role, kinds))


def peak_bytes(model: ModelSpec, job: Job, table: LayoutTable, stage: Stage) -> Floats:
    """The highest moment of ``timeline`` in every row [B], without its name and parts; for large tables."""
    kinds = _kinds(model, job, table)
    step = _step(model, job, table, kinds, stage)
    peak = np.zeros(table.rows)
    plain = _worst_inside(step, np.zeros(table.rows, dtype=bool), kinds)

    def worst(role: _Role) -> list[_Inside]:
        merges = _merges(step, role)
        return [_worst_inside(step, merges, kinds) if merges.any() else plain]

    present = [role for role in _roles(table) if role.valid.any()]
    for _, valid, held in _moments(step, present, worst):
        np.maximum(peak, np.where(valid, held.total, 0.0), out=peak)
    return peak


def _amounts(unit: UnitElements, held: Floats, job: Job) -> _Amounts:
    """Bytes of a unit; nothing where the rank does not hold it."""
    element, wide = ELEMENT_BYTES[job.precision] * held, WIDE_BYTES[job.precision] * held
    return _Amounts(
        gathered=element * unit.padded,
        fresh=element * unit.whole,
        whole=wide * unit.whole,
        reduce_input=wide * unit.padded,
        shard=wide * unit.shard,
        last_share=unit.last_share,
    )


def _step(model: ModelSpec, job: Job, table: LayoutTable, kinds: _Kinds, stage: Stage) -> _Step:
    element, wide = ELEMENT_BYTES[job.precision], WIDE_BYTES[job.precision]
    units = unit_elements(model, table)
    tokens = table.micro_batch * job.seq / table.cp
    saved = np.array([kind.saved_bytes for kind in kinds.kinds])[kinds.row] * tokens
    by_sequence = np.where(table.sp == 1, table.tp, 1)
    residual = element * model.hidden / by_sequence
    in_flight = stage.blocks * saved + np.where(stage.head == 0, residual * tokens, 0.0)
    ones = np.ones(table.rows)
    return _Step(
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
        merges=job.precision != "bf16",
        tied_gradient=element * np.ceil(model.vocab / table.tp) * model.hidden
        if model.tied_embeddings
        else 0.0,
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

    blocks: Floats
    head: bool


class _Inside(NamedTuple):
    """A moment inside a block, the same for every layer, and the rows that have it."""

    name: str
    valid: NDArray[np.bool_]
    token_bytes: Floats | float
    fresh: Floats | float  # bytes of weight gradients


def _each_inside(step: _Step, role: _Role, kinds: _Kinds) -> Iterator[_Inside]:
    """Every moment inside a block, of every way of splitting and recomputing it."""
    merges = _merges(step, role)
    for kind, activations in enumerate(kinds.kinds):
        rows = kinds.row == kind
        for moment in activations.moments:
            fresh = np.where(merges, moment.fresh_bytes, moment.gradient_bytes)
            yield _Inside(moment.name, rows, moment.token_bytes, fresh)


def _worst_inside(step: _Step, merges: NDArray[np.bool_], kinds: _Kinds) -> _Inside:
    """The largest moment inside a block, row by row; where gradients merge, only the last made counts."""
    count = max(len(kind.moments) for kind in kinds.kinds)
    padded = [kind.moments + kind.moments[-1:] * (count - len(kind.moments)) for kind in kinds.kinds]
    numbers = np.array([[moment[1:] for moment in moments] for moments in padded])  # kind, moment, 3 amounts
    token_bytes, fresh = np.zeros(step.table.rows), np.zeros(step.table.rows)
    most = np.full(step.table.rows, -1.0)
    for moment in range(count):
        tokens, made, alone = numbers[kinds.row, moment].T
        made = np.where(merges, alone, made)
        total = step.tokens * tokens + made
        larger = total > most
        token_bytes, fresh = np.where(larger, tokens, token_bytes), np.where(larger, made, fresh)
        most = np.where(larger, total, most)
    return _Inside("backward", np.ones(step.table.rows, dtype=bool), token_bytes, fresh)


def _roles(table: LayoutTable) -> tuple[_Role, ...]:
    """The microbatches of a step that differ in what is held."""
    m, alone = table.microbatches, table.pp == 1
    return (
        _Role("first microbatch", (m >= 2) & alone, m >= 2, False, m < 0),
        _Role("middle microbatch", (m >= 3) | ~alone, m < 0, False, m >= 0),
        _Role("last microbatch", alone, m == 1, True, m >= 2),
    )


def _moments(
    whole: _Step, roles: Iterable[_Role], insides: Callable[[_Role], Iterable[_Inside]]
) -> Iterator[tuple[str, NDArray[np.bool_], Held]]:
    piped = bool((whole.table.pp > 1).all())
    for role in roles:
        totals = np.where(role.older, RUNNING_LOSS_BYTES, 0)
        forward = replace(whole, ids=whole.ids + totals)
        step = replace(forward, ids=forward.ids + 2 * whole.wide)  # the loss and the gradient it starts from
        inside = list(insides(role))
        parts = _in_a_pipeline(step, role, inside) if piped else _alone(forward, step, role, inside)
        yield from ((f"{role.name}: {name}", role.valid & rows, held) for name, rows, held in parts)


def _in_a_pipeline(
    step: _Step, role: _Role, inside: list[_Inside]
) -> Iterator[tuple[str, NDArray[np.bool_], Held]]:
    """Parameters and gradients are whole all the time, so that the highest moment is where a microbatch has
    most: at the head, or in the last block; or where the reductions begin."""
    every = np.ones(step.table.rows, dtype=bool)
    yield "head backward", every, _head_backward(step, role)
    for moment in inside:
        yield f"last layer, {moment.name}", moment.valid, _in_block(step, role, step.layers - 1, moment)
    yield "last layer, gradients reduced", every, _block_reduced(step, role, step.layers - 1)
    yield "all gradients reduced", every, _schedule_through(step, role)


def _alone(
    forward: _Step, step: _Step, role: _Role, inside: list[_Inside]
) -> Iterator[tuple[str, NDArray[np.bool_], Held]]:
    """The moments of a rank that holds all layers, ``forward`` before there is a loss."""
    every, stage3 = np.ones(step.table.rows, dtype=bool), step.table.zero_stage == 3
    top = step.layers - 1
    positions = {
        "last layer": top,
        "layer before the last": np.maximum(top - 1, 0),
        "layer 1": np.minimum(top, 1),
        "first layer": np.zeros(step.table.rows),
    }
    gathers = (role.first | stage3) & (step.table.shard > 1)
    yield "first layer gathered", gathers, _block_gathered(forward, role, positions["first layer"])
    yield "last layer gathered", gathers, _block_gathered(forward, role, top)
    yield "head gathered", gathers, _head_gathered(forward, role)
    yield "head backward", every, _head_backward(step, role)
    if not step.tied:  # a tied head is reduced at the very end
        yield "head gradients reduced", every, _head_reduced(step, role)
    for place, layer in positions.items():
        for moment in inside:
            yield f"{place}, {moment.name}", moment.valid, _in_block(step, role, layer, moment)
        yield f"{place}, gradients reduced", every, _block_reduced(step, role, layer)
    yield "first layer, parameters copied out", stage3, _first_block_copied_out(step, role)
    yield "embedding backward", every, _embedding_backward(step, role)
    yield "last gradients reduced", every, _last_reduced(step, role)


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
    beside = np.where(step.table.shard == 1, unit.reduce_input, source * unit.last_share)
    added = np.where(role.older, np.where(_merges(step, role), 0.0, unit.fresh), unit.whole)
    return np.where(_reduces(step, role), unit.reduce_input + np.maximum(source, beside + unit.shard), added)


# The moments


def _block_gathered(step: _Step, role: _Role, blocks: Floats) -> Held:
    """Forward, with ``blocks`` blocks done: the next is copied out of its all-gather buffer while the buffer
    of the unit before it is still held."""
    opening = step.head.gathered if step.tied else step.embedding.gathered
    before = np.where(blocks > 0, step.block.gathered, opening)
    resident = opening + blocks * step.block.gathered
    return _gathering(step, role, blocks, resident, 2 * step.block.gathered + before)


def _head_gathered(step: _Step, role: _Role) -> Held:
    """The same for the head; a tied one was gathered for the embedding."""
    opening = step.head.gathered if step.tied else step.embedding.gathered
    resident = opening + step.layers * step.block.gathered
    head = 0.0 if step.tied else 2 * step.head.gathered
    return _gathering(step, role, step.layers, resident, head + step.block.gathered)


def _gathering(step: _Step, role: _Role, blocks: Floats, resident: Floats, buffers: Floats) -> Held:
    kept = np.where(step.table.zero_stage == 3, step.head.gathered if step.tied else 0.0, resident)
    shards = np.where(role.older, _shards(step, role, _Open(step.layers, True)), 0.0)
    activations = blocks * step.saved + step.tokens * step.residual + step.inputs
    return Held(shards, activations, np.zeros(step.table.rows), kept + buffers)


def _prefetched(step: _Step) -> Floats:
    """Stage 3: the buffer of the block whose backward comes next."""
    return np.where(step.table.shard > 1, step.block.gathered, 0.0)


def _head_backward(step: _Step, role: _Role) -> Held:
    still = _Open(step.layers, True)
    gathered = _gathered(step, role, still, step.head.gathered + _prefetched(step))
    vectors = np.where(step.vocab > 0, step.residual + 2 * step.normed + step.rstd, step.residual)
    activations = step.layers * step.saved + step.tokens * vectors + step.inputs
    gradient = 0.0 if step.tied else np.maximum(step.head.fresh - step.normed, 0.0)  # the norm's comes after
    gathered = gathered + _waiting(step, role, still) + gradient
    activations = activations + step.tied_gradient
    return Held(_shards(step, role, still), activations, step.tokens * step.vocab, gathered)


def _head_reduced(step: _Step, role: _Role) -> Held:
    before, after = _Open(step.layers, True), _Open(step.layers, False)
    gathered = _gathered(step, role, after, _prefetched(step))
    waiting = _waiting(step, role, after if role.last else before)
    activations = step.layers * step.saved + step.tokens * step.residual + step.inputs
    gathered = gathered + waiting + _reduction(step, role, step.head)
    return Held(_shards(step, role, before), activations, np.zeros(step.table.rows), gathered)


def _in_block(step: _Step, role: _Role, layer: Floats, moment: _Inside) -> Held:
    still = _Open(layer + 1, step.tied)
    after_head = 0.0 if step.tied else step.head.reduce_input
    previous = np.where(layer == step.layers - 1, after_head, step.block.reduce_input)
    buffer = np.where(_reduces(step, role), previous, 0.0)
    stage3 = step.block.gathered * np.where(layer > 0, 2, 1) + (step.head.gathered if step.tied else 0.0)
    gathered = _gathered(step, role, still, stage3) + _waiting(step, role, still)
    gathered = gathered + buffer + moment.fresh
    activations = layer * step.saved + step.tokens * moment.token_bytes + step.inputs + step.tied_gradient
    return Held(_shards(step, role, still), activations, np.zeros(step.table.rows), gathered)


def _first_block_copied_out(step: _Step, role: _Role) -> Held:
    """Stage 3, before the first block's backward: its parameters and the buffer they came in. Every other
    block prefetches one more behind itself, which its own backward passes hold as well."""
    still = _Open(np.ones(step.table.rows), step.tied)
    after_head = 0.0 if step.tied else step.head.reduce_input
    buffer = np.where(step.layers > 1, step.block.reduce_input, after_head)
    gathered = 2 * step.block.gathered + buffer + (step.head.gathered if step.tied else 0.0)
    activations = step.saved + step.tokens * step.residual + step.inputs + step.tied_gradient
    return Held(_shards(step, role, still), activations, np.zeros(step.table.rows), gathered)


def _block_reduced(step: _Step, role: _Role, layer: Floats) -> Held:
    before, after = _Open(layer + 1, step.tied), _Open(layer, step.tied)
    stage3 = step.block.gathered * np.where(layer > 0, 1, 0) + (step.head.gathered if step.tied else 0.0)
    gathered = _gathered(step, role, after, stage3) + _waiting(step, role, after if role.last else before)
    gathered = gathered + _reduction(step, role, step.block)
    inputs = step.inputs - np.where(layer > 0, 0.0, step.tables)
    activations = layer * step.saved + step.tokens * step.residual + inputs + step.tied_gradient
    return Held(_shards(step, role, before), activations, np.zeros(step.table.rows), gathered)


def _embedding_backward(step: _Step, role: _Role) -> Held:
    still = _Open(np.zeros(step.table.rows), step.tied)
    buffer = np.where(_reduces(step, role), step.block.reduce_input, 0.0)
    stage3 = step.head.gathered if step.tied else np.zeros(step.table.rows)
    gathered = _gathered(step, role, still, stage3) + _waiting(step, role, still) + buffer
    if not step.tied:
        gathered = gathered + step.embedding.fresh
    # tied: the head's gradient and the embedding's, with the gradient this came from, or else with their sum
    source = step.tokens * step.residual
    summed = source < step.tied_gradient
    activations = np.where(summed, 0.0, source) + 2 * step.tied_gradient + step.ids + step.others
    gathered = gathered + np.where(summed, step.tied_gradient, 0.0)
    return Held(_shards(step, role, still), activations, np.zeros(step.table.rows), gathered)


def _last_reduced(step: _Step, role: _Role) -> Held:
    still = _Open(np.zeros(step.table.rows), step.tied)
    unit = step.head if step.tied else step.embedding
    kept = np.zeros(step.table.rows)
    if not role.last:
        kept = np.where(step.table.zero_stage <= 2, _resident(step, role, still), 0.0)
        kept = kept + _waiting(step, role, still)
    gathered = kept + _reduction(step, role, unit)
    activations = step.ids + step.others
    return Held(_shards(step, role, still), activations, np.zeros(step.table.rows), gathered)


def _schedule_through(step: _Step, role: _Role) -> Held:
    """A pipeline's end: no activations, every gathered parameter and whole gradient, and the first reduction."""
    still = _Open(step.layers, True)
    largest = np.maximum(
        step.block.reduce_input, np.maximum(step.head.reduce_input, step.embedding.reduce_input)
    )
    gathered = _resident(step, role, still) + _waiting(step, role, still) + largest
    none = np.zeros(step.table.rows)
    return Held(none, step.ids, none, gathered)
