"""Cross-entropy over a vocabulary that is split over the ranks of tp: no rank ever has a whole row of logits.

Three sums over the ranks, each of one number a token: the largest logit, the sum of exponentials, and the
target's logit.

N tokens, V this rank's part of the vocabulary.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.run.kernels import row_slices, wide
from shardwright.run.loss import MASKED


@torch.library.custom_op("shardwright::largest_cross_entropy", mutates_args=())
def largest_logit(logits_NV: Tensor) -> Tensor:
    """Of each token, in a wide type; minus infinity where this rank has none."""
    dtype = wide(logits_NV.dtype)
    if logits_NV.shape[1] == 0:
        return logits_NV.new_full((logits_NV.shape[0],), -torch.inf, dtype=dtype)
    return logits_NV.amax(dim=1).to(dtype, copy=True)


@largest_logit.register_fake
def _(logits_NV):
    return logits_NV.new_empty(logits_NV.shape[0], dtype=wide(logits_NV.dtype))


@torch.library.custom_op("shardwright::parts_cross_entropy", mutates_args=())
def parts_of_sum(logits_NV: Tensor, largest_N: Tensor, row_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of exponentials, and the target's logit where this rank has it (``row_N`` is -1 elsewhere)."""
    total_N, picked_N = torch.zeros_like(largest_N), torch.zeros_like(largest_N)
    for rows in row_slices(logits_NV.shape[0], logits_NV.shape[1] * largest_N.element_size()):
        logits = logits_NV[rows].to(largest_N.dtype)
        total_N[rows] = (logits - largest_N[rows, None]).exp_().sum(1)
        if logits.shape[1]:
            found = logits.gather(1, row_N[rows].clamp(min=0)[:, None])[:, 0]
            picked_N[rows] = found.masked_fill_(row_N[rows] < 0, 0.0)
    return total_N, picked_N


@parts_of_sum.register_fake
def _(logits_NV, largest_N, row_N):
    return torch.empty_like(largest_N), torch.empty_like(largest_N)


@torch.library.custom_op("shardwright::vocabulary_cross_entropy_backward_", mutates_args=("logits_NV",))
def logits_to_gradient_(logits_NV: Tensor, lse_N: Tensor, row_N: Tensor, scale_N: Tensor) -> None:
    """Overwrite logits with the gradient of each token's loss, times its scale."""
    for rows in row_slices(logits_NV.shape[0], logits_NV.shape[1] * lse_N.element_size()):
        grad = logits_NV[rows].to(lse_N.dtype)  # the logits themselves, where they have that type
        grad.sub_(lse_N[rows, None]).exp_()
        if grad.shape[1]:
            own = torch.where(row_N[rows] < 0, 0.0, -1.0).to(grad.dtype)
            grad.scatter_add_(1, row_N[rows].clamp(min=0)[:, None], own[:, None])
        grad *= scale_N[rows, None]
        if grad.dtype != logits_NV.dtype:
            logits_NV[rows] = grad


@logits_to_gradient_.register_fake
def _(logits_NV, lse_N, row_N, scale_N):
    return None


class VocabularyCrossEntropy(torch.autograd.Function):
    """Keeps this rank's logits and one log-sum-exp a token; backward turns the logits into their gradient."""

    @staticmethod
    def forward(ctx, logits_NV: Tensor, target_N: Tensor, first_row: int, group: dist.ProcessGroup) -> Tensor:
        largest_N = largest_logit(logits_NV)
        dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=group)
        row_N = target_N - first_row
        row_N.masked_fill_((row_N < 0) | (row_N >= logits_NV.shape[1]), -1)
        total_N, picked_N = parts_of_sum(logits_NV, largest_N, row_N)
        dist.all_reduce(total_N, group=group)
        dist.all_reduce(picked_N, group=group)
        lse_N = total_N.log_().add_(largest_N)
        counts_N = target_N != MASKED
        ctx.save_for_backward(logits_NV, lse_N, row_N, counts_N)
        return torch.where(counts_N, lse_N - picked_N, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor):
        logits_NV, lse_N, row_N, counts_N = ctx.saved_tensors
        logits_to_gradient_(logits_NV, lse_N, row_N, counts_N * scale)
        return logits_NV, None, None, None


class VocabularyLoss:
    """``cross_entropy`` of run/loss.py over logits of a part of the vocabulary, from ``first_row`` on."""

    def __init__(self, first_row: int, group: dist.ProcessGroup) -> None:
        self.first_row, self.group = first_row, group

    def __call__(self, logits: Tensor, target: Tensor, global_tokens: float) -> Tensor:
        total = VocabularyCrossEntropy.apply(
            logits.flatten(0, -2), target.flatten(), self.first_row, self.group
        )
        return total[None] / global_tokens
