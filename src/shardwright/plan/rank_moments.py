"""What a rank holds at each moment of a step that can be the peak: plan/moments.py says which rows have it.

check/ compares every number with an executed step.
"""

from dataclasses import replace

import numpy as np

from shardwright.plan.holdings import (
    HeldParts,
    Open,
    RankStep,
    Role,
    block_reduction_buffers,
    gathered_parameters,
    reduced_shards,
    reduces,
    reduction_buffers,
    resident,
    rest_of_block,
    waiting_gradients,
)
from shardwright.plan.inside import Inside
from shardwright.plan.table import Floats


def block_gathered(step: RankStep, role: Role, blocks: Floats) -> HeldParts:
    """Forward, with ``blocks`` blocks done: the next is copied out of its all-gather buffer while the buffer
    of the unit before it is still held."""
    opening = step.head.gathered if step.tied else step.embedding.gathered
    before = np.where(blocks > 0, step.block.gathered, opening)
    resident = opening + blocks * step.mean.gathered
    return _gathering(step, role, blocks, resident, 2 * step.block.gathered + before)


def head_gathered(step: RankStep, role: Role) -> HeldParts:
    """The same for the head; a tied one was gathered for the embedding."""
    opening = step.head.gathered if step.tied else step.embedding.gathered
    resident = opening + step.layers * step.mean.gathered
    head = 0.0 if step.tied else 2 * step.head.gathered
    return _gathering(step, role, step.layers, resident, head + step.block.gathered)


def _gathering(step: RankStep, role: Role, blocks: Floats, resident: Floats, buffers: Floats) -> HeldParts:
    kept = np.where(step.table.zero_stage == 3, step.head.gathered if step.tied else 0.0, resident)
    shards = np.where(role.older, reduced_shards(step, role, Open(step.layers, True)), 0.0)
    activations = step.kept(blocks) + step.tokens * step.residual + step.inputs
    none = np.zeros_like(step.layers)
    return HeldParts(shards, activations, none, kept + buffers, none)


def _prefetched(step: RankStep) -> Floats:
    """Stage 3: the buffer of the block whose backward comes after the head's."""
    return np.where(step.table.shard > 1, step.ahead_of_head, 0.0)


def head_backward(step: RankStep, role: Role) -> HeldParts:
    still = Open(step.layers, True)
    gathered = gathered_parameters(step, role, still, step.head.gathered + _prefetched(step))
    vectors = np.where(step.vocab > 0, step.residual + 2 * step.normed + step.rstd, step.residual)
    activations = step.kept_at_head() + step.tokens * vectors + step.inputs
    gradient = 0.0 if step.tied else np.maximum(step.head.fresh - step.normed, 0.0)  # the norm's comes after
    waiting = waiting_gradients(step, role, still) + gradient
    activations, logits = activations + step.tied_gradient, step.loss_tokens * step.vocab
    return HeldParts(reduced_shards(step, role, still), activations, logits, gathered, waiting)


def head_reduced(step: RankStep, role: Role) -> HeldParts:
    before, after = Open(step.layers, True), Open(step.layers, False)
    gathered = gathered_parameters(step, role, after, _prefetched(step))
    waiting = waiting_gradients(step, role, after if role.last else before)
    activations = step.kept_at_head() + step.tokens * step.residual + step.inputs
    gathered = gathered + reduction_buffers(step, role, step.head)
    return HeldParts(
        reduced_shards(step, role, before), activations, np.zeros_like(step.layers), gathered, waiting
    )


def inside_block(step: RankStep, role: Role, layer: Floats, moment: Inside) -> HeldParts:
    still = Open(layer + 1, step.tied)
    after_head = 0.0 if step.tied else step.head.reduce_input
    previous = np.where(layer == step.layers - 1, after_head, rest_of_block(step).reduce_input)
    buffer = np.where(reduces(step, role), previous, 0.0)
    stage3 = (
        step.block.gathered
        + np.where(layer > 0, step.ahead, 0.0)
        + (step.head.gathered if step.tied else 0.0)
    )
    gathered = gathered_parameters(step, role, still, stage3) + buffer
    waiting = waiting_gradients(step, role, still) + moment.fresh
    activations = step.kept(layer) + step.tokens * moment.token_bytes + step.inputs + step.tied_gradient
    return HeldParts(
        reduced_shards(step, role, still), activations, np.zeros_like(step.layers), gathered, waiting
    )


def first_block_copied_out(step: RankStep, role: Role) -> HeldParts:
    """Stage 3, before the first block's backward: its parameters and the buffer they came in. Every other
    block prefetches one more behind itself, which its own backward passes hold as well."""
    still = Open(np.ones_like(step.layers), step.tied)
    after_head = 0.0 if step.tied else step.head.reduce_input
    buffer = np.where(step.layers > 1, rest_of_block(step).reduce_input, after_head)
    gathered = 2 * step.block.gathered + buffer + (step.head.gathered if step.tied else 0.0)
    activations = (
        step.kept(np.ones_like(step.layers)) + step.tokens * step.residual + step.inputs + step.tied_gradient
    )
    none = np.zeros_like(step.layers)
    return HeldParts(reduced_shards(step, role, still), activations, none, gathered, none)


def block_reduced(step: RankStep, role: Role, layer: Floats) -> HeldParts:
    before, after = Open(layer + 1, step.tied), Open(layer, step.tied)
    stage3 = np.where(layer > 0, step.ahead, 0.0) + (step.head.gathered if step.tied else 0.0)
    gathered = gathered_parameters(step, role, after, stage3) + block_reduction_buffers(step, role)
    waiting = waiting_gradients(step, role, after if role.last else before)
    inputs = step.inputs - np.where(layer > 0, 0.0, step.tables)
    activations = step.kept(layer) + step.tokens * step.residual + inputs + step.tied_gradient
    return HeldParts(
        reduced_shards(step, role, before), activations, np.zeros_like(step.layers), gathered, waiting
    )


def embedding_backward(step: RankStep, role: Role) -> HeldParts:
    still = Open(np.zeros_like(step.layers), step.tied)
    buffer = np.where(reduces(step, role), rest_of_block(step).reduce_input, 0.0)
    stage3 = step.head.gathered if step.tied else np.zeros_like(step.layers)
    gathered = gathered_parameters(step, role, still, stage3) + buffer
    waiting = waiting_gradients(step, role, still)
    if not step.tied:
        gathered = gathered + step.embedding.fresh
    # tied: the head's gradient and the embedding's, with the gradient this came from, or else with their sum
    source = step.tokens * step.residual
    summed = source < step.tied_gradient
    activations = np.where(summed, 0.0, source) + 2 * step.tied_gradient + step.ids + step.flight.others
    waiting = waiting + np.where(summed, step.tied_gradient, 0.0)
    return HeldParts(
        reduced_shards(step, role, still), activations, np.zeros_like(step.layers), gathered, waiting
    )


def last_reduced(step: RankStep, role: Role) -> HeldParts:
    still = Open(np.zeros_like(step.layers), step.tied)
    unit = step.head if step.tied else step.embedding
    none = np.zeros_like(step.layers)
    kept, waiting = none, none
    if not role.last:
        kept = np.where(step.table.zero_stage <= 2, resident(step, role, still), 0.0)
        waiting = waiting_gradients(step, role, still)
    gathered = kept + reduction_buffers(step, role, unit)
    activations = step.ids + step.flight.others
    return HeldParts(reduced_shards(step, role, still), activations, none, gathered, waiting)


def schedule_through(step: RankStep, role: Role) -> HeldParts:
    """The first stage of a rank is through: every gathered parameter, the whole gradients that there are, and
    the buffers of the first reduction."""
    flight = step.flight._replace(past=step.reduced)
    step, role = replace(step, flight=flight), role._replace(older=flight.past > 0)
    still = Open(step.layers, True)
    largest = np.maximum(
        step.block.reduce_input, np.maximum(step.head.reduce_input, step.embedding.reduce_input)
    )
    # the second unit: the first has left its shard, its buffer, and no copy of its parameters
    gathered = resident(step, role, still) + largest + np.maximum(step.block.shard - step.block.gathered, 0.0)
    waiting = waiting_gradients(step, role, still)
    if not step.merges:
        waiting = waiting + step.left_over * step.layers * step.mean.fresh
    none = np.zeros_like(step.layers)
    return HeldParts(none, step.ids + step.reducing, none, gathered, waiting)
