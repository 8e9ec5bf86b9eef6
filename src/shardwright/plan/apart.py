"""Moments of zero-bubble schedules, which make the gradients of inputs and those of weights in two passes.

A rank takes turns of several microbatches with its chunks. A pass for inputs frees nothing that the pass for
weights needs: neither what is saved nor the gradients of outputs. What the pass for weights makes stays as it
is made until the next pass for inputs goes through the same block, and only then does ``fully_shard`` add it
up in the type that gradients are reduced in. The pass for weights goes through a stage's blocks forward, and
what it does not need of one it lets go of after the last. The first stage makes all its gradients in one
pass.

When forward passes have run out, so do those for weights that would fill the time: passes for inputs follow
one another and pile up what waits.

Source: torch 2.13 torch/distributed/pipelining/_backward.py, stage_backward_input and stage_backward_weight;
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from shardwright.plan.flights import Tail
from shardwright.plan.holdings import HeldParts, Open, RankStep, Role, gathered_parameters, waiting_gradients
from shardwright.plan.inside import Inside
from shardwright.plan.table import Floats

Weights = Callable[[bool], Iterable[Inside]]
"""Moments of a block's pass for weights; given whether its gradients are added to older ones at once."""


def moments_apart(
    step: RankStep, role: Role, weights: Weights, *, begins: bool, each: bool
) -> Iterator[tuple[str, NDArray[np.bool_], HeldParts]]:
    """The last passes of a turn, or the first where it ``begins``; none in rows without such passes.

    Passes for weights are late by some of the turn before in the first pass, of the same in the last.
    Without ``each``, the fuller of a pass's first and last layer stands for both.
    """
    late = np.maximum(step.apart * step.stages - 1, 0.0)
    rows = (step.apart > 0) & ((step.stages > 1) & (late > 0) if begins else ends_a_turn(step))
    if not rows.any():
        return
    name, waiting = f"{'first' if begins else 'last'} of a turn", _waiting_gradients(step, role)
    heads = np.where(step.vocab > 0, late if begins else late + 1, 0.0)
    of_head = heads * step.tokens * (step.residual + 2 * step.normed + step.rstd)
    of_logits = heads * np.where(step.table.loss_chunks == 1, step.tokens * step.vocab, 0.0)
    left = {place: _left(step, late, begins=begins, ends=place == "first") for place in ("last", "first")}
    for place, activations, fresh in _either(_inputs(step, late), left, each=each):
        held = _held(step, role, activations + of_head, of_logits, waiting + fresh)
        yield f"gradients of inputs, {name}, {place} layer", rows, held
    before = left_by_others(step) + (step.head.fresh if begins else 0.0)  # where it begins: the one before's
    waiting = waiting + np.where(step.flight.past > 0, before, 0.0)
    for moment, valid, held in _weights(step, role, late, weights, waiting, merges=begins, each=each):
        held = held._replace(activations=held.activations + of_head, logits=held.logits + of_logits)
        yield f"gradients of weights, {name}, {moment}", rows & valid, held


def ends_a_turn(step: RankStep) -> NDArray[np.bool_]:
    """Rows where as many are in flight at the end of a turn as are at the point looked at."""
    return np.asarray((step.settled > 0) | (step.flight.past < 1) | (step.stages == 1))


def moments_of_tail(
    step: RankStep, role: Role, weights: Weights, tail: Tail, *, each: bool
) -> Iterator[tuple[str, NDArray[np.bool_], HeldParts]]:
    """A pass for inputs when no forward pass is left, and the pass for weights that follows it."""
    rows = tail.waiting > 0
    if not rows.any():
        return
    late, none = np.maximum(tail.waiting * step.stages - 1, 0.0), np.zeros(1)
    waiting = _waiting_gradients(step, role)
    fresh = np.zeros(1) if step.merges else step.layers * step.mean.fresh
    left = tail.left
    if tail.inputs:
        held_inputs = _either(_inputs(step, late), {"last": none, "first": none}, each=each)
        for place, activations, _ in held_inputs:
            held = _held(step, role, activations, step.flight.logits, waiting + left * fresh)
            yield f"gradients of inputs, {place} layer", rows, held
        left = np.maximum(left - 1 / step.stages, 0.0)  # that pass has added up its own
    waiting = waiting + left * fresh
    for name, valid, held in _weights(step, role, late, weights, waiting, merges=False, each=each):
        yield f"gradients of weights, {name}", rows & valid, held


def _waiting_gradients(step: RankStep, role: Role) -> Floats:
    return waiting_gradients(step, role, Open(step.layers, True))


def _held(step: RankStep, role: Role, activations: Floats, logits: Floats, waiting: Floats) -> HeldParts:
    gathered = gathered_parameters(step, role, Open(step.layers, True), 0.0)
    return HeldParts(np.zeros_like(step.layers), activations + step.inputs, logits, gathered, waiting)


def _waiting(step: RankStep, late: Floats) -> Floats:
    """Gradients that passes for weights will need of ``late`` stages, that of a stage's input with them."""
    blocks = step.layers / step.stages
    return np.asarray(late * step.tokens * (blocks * step.waits + step.own_inputs * step.residual))


def _inputs(step: RankStep, late: Floats) -> dict[str, Floats]:
    """Activations in the last and in the first layer of a pass for inputs."""
    blocks = step.layers / step.stages
    last = step.kept(step.layers) + step.tokens * step.apart_bytes + _waiting(step, late)
    return {"last": last, "first": last + (blocks - 1) * step.tokens * step.waits}


def _weights(
    step: RankStep,
    role: Role,
    late: Floats,
    weights: Weights,
    waiting: Floats,
    *,
    merges: bool,
    each: bool,
) -> Iterator[tuple[str, NDArray[np.bool_], HeldParts]]:
    """A pass for weights in its first and its last layer; ``merges``: into gradients that are there as they
    were made."""
    blocks = step.layers / step.stages
    kept = step.kept(step.layers) + _waiting(step, late) + step.tokens * step.own_inputs * step.residual
    none = np.zeros_like(step.layers)
    activations = {
        "first": kept + (blocks - 1) * step.tokens * step.waits,
        "last": kept + (blocks - 1) * (step.tokens * step.left - step.saved),
    }
    made = np.zeros(1) if step.merges or merges else (blocks - 1) * step.mean.fresh
    places = list(_either(activations, {"first": np.zeros(1), "last": made}, each=each))
    for moment in weights(step.merges or merges):
        for place, tokens, before in places:
            there = tokens + step.tokens * moment.token_bytes
            held = _held(step, role, there, none, waiting + before + moment.fresh)
            yield f"{place} layer, {moment.name}", moment.valid, held


def _either(
    activations: Mapping[str, Floats], gradients: Mapping[str, Floats], *, each: bool
) -> Iterator[tuple[str, Floats, Floats]]:
    """What is held at places; or, without ``each``, the larger sum as one."""
    if each:
        yield from ((place, held, gradients[place]) for place, held in activations.items())
    else:
        one, other = (held + gradients[place] for place, held in activations.items())
        yield "fullest", np.maximum(one, other), np.zeros(1)


def beside_two_passes(step: RankStep, ends: NDArray[np.bool_], held: HeldParts) -> HeldParts:
    """What is held in the first stage's pass for all gradients, and what two passes leave beside it: weights'
    gradients as they were made, of the rank's other stages. Where most passes make all (DualPipeV), the last
    stage has its forward pass before the first one's backward pass. ``ends``: rows whose rank has the first
    stage and others.
    """
    if not ends.any():
        return held
    others = step.layers * (1 - 1 / step.stages) * step.mean.fresh + step.head.fresh
    left = ends & (step.apart > 0) & (step.flight.past > 0) & (not step.merges)
    waiting = held.waiting + np.where(left, others, 0.0)
    turned = ends & (step.vocab > 0) & (step.apart == 0)
    if not turned.any():
        return held._replace(waiting=waiting)
    tokens = np.where(turned, step.tokens, 0.0)
    logits = held.logits + np.where(step.table.loss_chunks == 1, tokens * step.vocab, 0.0)
    kept = tokens * (step.residual + step.normed + step.rstd)
    return held._replace(activations=held.activations + kept, logits=logits, waiting=waiting)


def left_by_others(step: RankStep) -> Floats:
    """Gradients that all stages of a rank but the one at work and the first have left as they were made."""
    blocks = step.layers / step.stages
    first_stage = np.where(step.opens, blocks, 0.0)
    left = np.maximum(step.layers - first_stage - blocks, 0.0) * step.mean.fresh
    return np.asarray(0.0 if step.merges else left)


def _left(step: RankStep, late: Floats, *, begins: bool, ends: bool) -> Floats:
    """Those, and what the stage at work has itself left before; none while a rank makes its first."""
    if step.merges:
        return np.zeros(1)
    blocks = step.layers / step.stages
    own = (late == 0) | (step.stages == 1) | begins
    both = (step.begun if begins else step.settled) > 0
    found = np.where(both, 1.0 if ends else blocks, step.mean.last_share if ends else 0.0)
    fresh = left_by_others(step) + np.where(own, found, 0.0) * step.mean.fresh
    if begins:
        fresh = fresh + step.head.fresh
    return np.where(step.flight.past > 0, fresh, 0.0)
