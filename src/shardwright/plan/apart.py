"""Moments of zero-bubble schedules, which make the gradients of inputs and those of weights in two passes.

A rank takes turns of several microbatches with its chunks. A pass for inputs frees nothing that the pass for
weights needs: neither what is saved nor the gradients of outputs. What the pass for weights makes stays as it
is made until the next pass for inputs goes through the same block, and only then does ``fully_shard`` add it
up in the type that gradients are reduced in. The first stage makes all its gradients in one pass.

Source: torch 2.13 torch/distributed/pipelining/_backward.py, stage_backward_input and stage_backward_weight;
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from shardwright.plan.holdings import Held, Open, RankStep, Role, gathered_parameters, waiting_gradients
from shardwright.plan.table import Floats


def moments_apart(step: RankStep, role: Role) -> Iterator[tuple[str, NDArray[np.bool_], Held]]:
    """The first and the last pass of a turn, at their begin and end; none in rows without such passes.

    Passes for weights are late by some of the turn before in the first pass, of the same in the last.
    """
    apart = step.apart > 0
    if not apart.any():
        return
    late = np.maximum(step.apart * step.stages - 1, 0.0)
    blocks = step.layers / step.stages
    waits = step.tokens * step.waits
    in_blocks = step.kept(step.layers) - step.saved + step.tokens * step.apart_bytes + late * blocks * waits
    activations = {"last": in_blocks + step.inputs}
    activations["first"] = activations["last"] + (blocks - 1) * waits
    still = Open(step.layers, True)
    gathered = gathered_parameters(step, role, still, 0.0) + waiting_gradients(step, role, still)
    of_head = step.tokens * (2 * step.residual + 2 * step.normed + step.rstd)
    of_logits = np.where(step.table.loss_chunks == 1, step.tokens * step.vocab, 0.0)
    none = np.zeros_like(step.layers)
    for turn, place in product(("last", "first"), activations):
        begins = turn == "first"
        rows = apart & (step.stages > 1) & (late > 0) if begins else apart
        if rows.any():
            heads = np.where(step.vocab > 0, late if begins else late + 1, 0.0)
            fresh = _left(step, late, begins=begins, ends=place == "first")
            held = Held(none, activations[place] + heads * of_head, heads * of_logits, gathered + fresh)
            yield f"gradients of inputs, {turn} of a turn, {place} layer", rows, held


def left_by_others(step: RankStep) -> Floats:
    """Gradients that all stages of a rank but the one at work and the first have left as they were made."""
    blocks = step.layers / step.stages
    first_stage = np.where(step.embedding.gathered > 0, blocks, 0.0)
    left = np.maximum(step.layers - first_stage - blocks, 0.0) * step.mean.fresh
    return np.asarray(0.0 if step.merges else left)


def _left(step: RankStep, late: Floats, *, begins: bool, ends: bool) -> Floats:
    """Those, and what the stage at work has itself left before; none while a rank makes its first."""
    if step.merges:
        return np.zeros(1)
    blocks = step.layers / step.stages
    own = (late == 0) | (step.stages == 1) | begins
    found = np.where(step.settled > 0, 1.0 if ends else blocks, step.mean.last_share if ends else 0.0)
    fresh = left_by_others(step) + np.where(own, found, 0.0) * step.mean.fresh
    if begins:
        fresh = fresh + step.head.fresh
    return np.where(step.flight.past > 0, fresh, 0.0)
