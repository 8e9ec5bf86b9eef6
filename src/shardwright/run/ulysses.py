"""Ulysses attention: ranks trade their part of the sequence for whole sequences of some heads, and back.

A rank's tokens lie in a row. Where there are more ranks than key/value heads, these are repeated.

B batch, H query heads, G key/value heads, S this rank's tokens, T tokens of all ranks, D head size, V value
head size, n ranks.

Source: DeepSpeed-Ulysses, arXiv:2309.14509.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.run.attend import rules_of
from shardwright.run.pieces import Rows, Rules, Saved, whole_backward, whole_forward
from shardwright.run.sequence import WholeDocuments


def to_heads(x_BHSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of all heads for all tokens of its share of the heads: B x H/n x T x D."""
    degree = dist.get_world_size(group)
    leaving = x_BHSD.unflatten(1, (degree, -1)).permute(1, 3, 0, 2, 4).contiguous()  # n S B H/n D
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    return arriving.flatten(0, 1).permute(1, 2, 0, 3)


def to_tokens(x_BHTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: all tokens of some heads for this rank's tokens of all heads.

    They lie in memory as B x S x H x D, which the output projection reads.
    """
    degree = dist.get_world_size(group)
    leaving = x_BHTD.permute(2, 0, 1, 3).contiguous()  # T B H/n D
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    return arriving.unflatten(0, (degree, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


class UlyssesAttention:
    """Attention of one rank of ``group``; see ``Attend``. Its ranks divide the key/value heads, or are a
    multiple of them that divides the query heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.documents = WholeDocuments(group)

    def __call__(
        self,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSV: Tensor,
        document_BS: Tensor | None,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """See ``Attend``."""
        whole_BT = None if document_BS is None else self.documents.of(document_BS).transpose(0, 1).flatten(1)
        rules = rules_of(q_BHSD, document_BS, scale, window)
        return UlyssesFunction.apply(q_BHSD, k_BGSD, v_BGSV, whole_BT, rules, self.group)


class UlyssesFunction(torch.autograd.Function):
    """Keeps q, k, v, the output and a log-sum-exp a row, all of the traded heads; the output goes back, and
    whoever reads it keeps it once more.

    Four all-to-alls forward (q, k, v, output) and four backward.
    """

    @staticmethod
    def forward(
        ctx,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSV: Tensor,
        document_BT: Tensor | None,
        rules: Rules,
        group: dist.ProcessGroup,
    ) -> Tensor:
        repeats = max(dist.get_world_size(group) // k_BGSD.shape[1], 1)
        q = to_heads(q_BHSD, group)
        k, v = (to_heads(_repeated(tensor, repeats), group) for tensor in (k_BGSD, v_BGSV))
        rows = Rows((range(q.shape[2]),), document_BT)
        out, lse = whole_forward(q, k, v, rows, rules)
        ctx.save_for_backward(q, k, v, document_BT, out, lse)
        ctx.rules, ctx.group, ctx.repeats = rules, group, repeats
        return to_tokens(out, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSV: Tensor):
        q, k, v, document_BT, out, lse = ctx.saved_tensors
        rows = Rows((range(q.shape[2]),), document_BT)
        saved = Saved(to_heads(grad_BHSV, ctx.group), q, out, lse)
        dq, dk, dv = (to_tokens(grad, ctx.group) for grad in whole_backward(saved, k, v, rows, ctx.rules))
        return dq, _summed(dk, ctx.repeats), _summed(dv, ctx.repeats), None, None, None


def _repeated(x_BGSD: Tensor, repeats: int) -> Tensor:
    return x_BGSD.repeat_interleave(repeats, 1) if repeats > 1 else x_BGSD


def _summed(dx_BHSD: Tensor, repeats: int) -> Tensor:
    """Gradient of what was repeated."""
    return dx_BHSD.unflatten(1, (-1, repeats)).sum(2) if repeats > 1 else dx_BHSD
