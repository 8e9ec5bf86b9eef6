"""Head and cross-entropy a part of the tokens at a time: a microbatch's logits never exist all at once.

The forward pass makes each part's logits and keeps one log-sum-exp a token of them; the backward pass makes
them again, a part at a time, and adds each part to the gradient of the head's matrix in place. Nothing else
is kept, so that a schedule may hold any number of microbatches between the passes, or ask for the gradients
of inputs and of weights apart. plan/parts.py prices the product that is made twice.

With tp the ranks meet three times a microbatch, over all its tokens, as in run/vocabulary_loss.py.

N tokens, E hidden, V this rank's part of the vocabulary.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.run.kernels import wide
from shardwright.run.loss import MASKED
from shardwright.run.model import Transformer
from shardwright.run.vocabulary_loss import VocabularyLoss, largest_logit, logits_to_gradient_, parts_of_sum


def apply_chunked_loss(model: Transformer, chunks: int) -> None:
    """Have the head take the loss in ``chunks`` parts of a microbatch's tokens, in place. Call after tp.

    A stage without a head, and ``chunks`` 1, leave the model as it is.
    """
    if model.lm_head is None or chunks == 1:
        return
    split = model.lm_head.cross_entropy
    vocabulary = (
        Vocabulary(split.first_row, split.group) if isinstance(split, VocabularyLoss) else Vocabulary()
    )
    model.lm_head.chunked = ChunkedLoss(chunks, vocabulary)


class Vocabulary(NamedTuple):
    """The part of the vocabulary that a rank has: its first row, and the ranks that have the others."""

    first_row: int = 0
    group: dist.ProcessGroup | None = None


@torch.library.custom_op("shardwright::logits_cross_entropy", mutates_args=())
def _logits(x_NE: Tensor, weight_VE: Tensor) -> Tensor:
    """A product, named for what it makes: run/meter.py counts logits by the name."""
    return x_NE @ weight_VE.t()


@_logits.register_fake
def _(x_NE, weight_VE):
    return x_NE.new_empty((x_NE.shape[0], weight_VE.shape[0]))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Keeps its inputs and one log-sum-exp a token; sums over unmasked tokens."""

    @staticmethod
    def forward(
        ctx, x_NE: Tensor, weight_VE: Tensor, target_N: Tensor, chunks: int, vocabulary: Vocabulary
    ) -> Tensor:
        row_N = target_N - vocabulary.first_row
        row_N.masked_fill_((row_N < 0) | (row_N >= weight_VE.shape[0]), -1)
        largest_N = x_NE.new_empty(x_NE.shape[0], dtype=wide(x_NE.dtype))
        total_N, picked_N = torch.empty_like(largest_N), torch.empty_like(largest_N)
        for part in parts(x_NE.shape[0], chunks):
            logits_NV = _logits(x_NE[part], weight_VE)
            largest_N[part] = largest_logit(logits_NV)
            total_N[part], picked_N[part] = parts_of_sum(logits_NV, largest_N[part], row_N[part])
            del logits_NV  # before the next part's are made
        if vocabulary.group is not None:
            own_N = largest_N.clone()
            dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=vocabulary.group)
            total_N.mul_(own_N.sub_(largest_N).exp_())
            dist.all_reduce(total_N, group=vocabulary.group)
            dist.all_reduce(picked_N, group=vocabulary.group)
        lse_N = total_N.log_().add_(largest_N)
        counts_N = target_N != MASKED
        ctx.save_for_backward(x_NE, weight_VE, lse_N, row_N, counts_N)
        ctx.chunks = chunks
        return torch.where(counts_N, lse_N - picked_N, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor):
        x_NE, weight_VE, lse_N, row_N, counts_N = ctx.saved_tensors
        of_x, of_weight, *_ = ctx.needs_input_grad
        dx_NE = torch.empty_like(x_NE) if of_x else None
        dweight_VE = torch.zeros_like(weight_VE) if of_weight else None
        scale_N = counts_N * scale
        for part in parts(x_NE.shape[0], ctx.chunks):
            logits_NV = _logits(x_NE[part], weight_VE)
            logits_to_gradient_(logits_NV, lse_N[part], row_N[part], scale_N[part])
            if dx_NE is not None:
                torch.mm(logits_NV, weight_VE, out=dx_NE[part])
            if dweight_VE is not None:
                dweight_VE.addmm_(logits_NV.t(), x_NE[part])
            del logits_NV
        return dx_NE, dweight_VE, None, None, None


def parts(tokens: int, chunks: int) -> list[slice]:
    """At most ``chunks`` slices of so many tokens; all but the last of the size in plan/holdings.py."""
    size = max(1, -(-tokens // chunks))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


class ChunkedLoss:
    """``cross_entropy`` of the head's outputs, of shape 1, in ``chunks`` parts of a microbatch's tokens."""

    def __init__(self, chunks: int, vocabulary: Vocabulary) -> None:
        self.chunks, self.vocabulary = chunks, vocabulary

    def __call__(self, x: Tensor, weight_VE: Tensor, target: Tensor, global_tokens: float) -> Tensor:
        total = ChunkedCrossEntropy.apply(
            x.flatten(0, -2), weight_VE, target.flatten(), self.chunks, self.vocabulary
        )
        return total[None] / global_tokens
