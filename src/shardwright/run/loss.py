"""Cross-entropy summed over unmasked tokens, divided by their count in the global batch.

N tokens, V vocabulary.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.run.kernels import row_slices, wide

MASKED = -100
"""Target of a token that does not count."""


@torch.library.custom_op("shardwright::cross_entropy", mutates_args=())
def _cross_entropy(logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    dtype = wide(logits_NV.dtype)
    lse_N = logits_NV.new_empty(logits_NV.shape[0], dtype=dtype)
    total = logits_NV.new_zeros((), dtype=dtype)
    for rows in row_slices(logits_NV.shape[0], logits_NV.shape[1] * dtype.itemsize):
        logits, target = logits_NV[rows].to(dtype), target_N[rows]
        lse_N[rows] = torch.logsumexp(logits, dim=-1)
        picked = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
        total += torch.where(target == MASKED, 0.0, lse_N[rows] - picked).sum()
    return total, lse_N


@_cross_entropy.register_fake
def _(logits_NV, target_N):
    dtype = wide(logits_NV.dtype)
    return logits_NV.new_empty((), dtype=dtype), logits_NV.new_empty(logits_NV.shape[0], dtype=dtype)


@torch.library.custom_op("shardwright::cross_entropy_backward_", mutates_args=("logits_NV",))
def _cross_entropy_backward_(logits_NV: Tensor, lse_N: Tensor, target_N: Tensor, scale: Tensor) -> None:
    for rows in row_slices(logits_NV.shape[0], logits_NV.shape[1] * lse_N.element_size()):
        target = target_N[rows]
        grad = logits_NV[rows].to(lse_N.dtype)  # the logits themselves, where they have that type
        grad.sub_(lse_N[rows, None]).exp_()
        index = target.clamp(min=0)[:, None]
        grad.scatter_add_(1, index, grad.new_full((), -1.0).expand(index.shape))
        grad *= (target != MASKED)[:, None] * scale
        if grad.dtype != logits_NV.dtype:
            logits_NV[rows] = grad


@_cross_entropy_backward_.register_fake
def _(logits_NV, lse_N, target_N, scale):
    return None


class CrossEntropySum(torch.autograd.Function):
    """Keeps the logits and one log-sum-exp a row; the backward pass turns the logits into their gradient."""

    @staticmethod
    def forward(ctx, logits_NV: Tensor, target_N: Tensor) -> Tensor:
        total, lse_N = _cross_entropy(logits_NV, target_N)
        ctx.save_for_backward(logits_NV, lse_N, target_N)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor):
        logits_NV, lse_N, target_N = ctx.saved_tensors
        _cross_entropy_backward_(logits_NV, lse_N, target_N, scale)
        return logits_NV, None


def cross_entropy(logits: Tensor, target: Tensor, global_tokens: float) -> Tensor:
    """Share of the global mean that these tokens add, of shape 1; over ranks and microbatches it adds up to
    the loss.

    ``global_tokens``: unmasked tokens of the whole global batch, never of a rank or microbatch: dividing by a
    part makes the gradient depend on the layout.
    """
    return CrossEntropySum.apply(logits.flatten(0, -2), target.flatten())[None] / global_tokens
