"""Recomputation of activations: which outputs of a block are kept, the rest computed again in backward."""

import functools
from collections.abc import Sequence

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.layout import Recompute
from shardwright.run.model import Transformer

LINEAR_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrix products of a block in the order in which ``Block.body`` calls them."""

_LINEAR = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def apply_recompute(model: Transformer, kind: Recompute, kept: Sequence[str]) -> None:
    """Have every block recompute its body, in place.

    ``full`` keeps a block's input alone; ``selective`` keeps the outputs of the operations named in ``kept``
    besides. Inside the FSDP unit, so that the parameters are gathered once for recomputation and backward.
    """
    if kind == "none":
        return
    wrap = functools.partial(
        checkpoint, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
    )
    if kind == "selective":
        wrap = functools.partial(wrap, context_fn=functools.partial(_contexts, tuple(kept)))
    for layer in model.model.layers.values():
        layer.recompute = wrap


def _contexts(kept: tuple[str, ...]):
    """Selective contexts of one call of one block; each pass counts its matrix products anew."""
    calls = {False: 0, True: 0}

    def policy(context, operation, *args, **kwargs) -> CheckpointPolicy:
        name = None
        if operation in _ATTENTION:
            name = "attention"
        elif operation in _LINEAR:
            name = LINEAR_ORDER[calls[context.is_recompute]]
            calls[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if name in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
