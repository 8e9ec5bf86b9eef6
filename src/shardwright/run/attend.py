"""Causal attention inside documents and windows, as a callable that a model's attention holds.

B batch, H query heads, G key/value heads, S this rank's tokens, D head size, V value head size.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.run.kernels import causal_attention
from shardwright.run.narrow_attention import NarrowFunction
from shardwright.run.pieces import Rows, Rules, Saved, whole_backward, whole_forward


class Attend(Protocol):
    """Attention of a rank's tokens; the tensors are its part of the sequence, whatever part that is."""

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
        """Output, B x H x S x V.

        ``document_BS``: id of each token's document, which attention does not leave; None: a sequence is one.
        ``scale`` of the scores: 1 / sqrt(D) unless given. ``window``: keys that a query sees, its own the
        last; None: all.
        """


def rules_of(q_BHSD: Tensor, document_BS: Tensor | None, scale: float | None, window: int | None) -> Rules:
    """Rules of one call, its defaults filled in."""
    scale = q_BHSD.shape[-1] ** -0.5 if scale is None else scale
    return Rules(scale, window, document_BS is not None)


class CausalAttention:
    """Attention of a rank that has whole sequences."""

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
        rules = rules_of(q_BHSD, document_BS, scale, window)
        unmasked = document_BS is None and (window is None or window >= q_BHSD.shape[2])
        if unmasked and q_BHSD.device.type == "cpu" and q_BHSD.shape[-1] != v_BGSV.shape[-1]:
            return NarrowFunction.apply(q_BHSD, k_BGSD, v_BGSV, rules.scale)
        if unmasked:
            return causal_attention(q_BHSD, k_BGSD, v_BGSV, rules.scale)
        return CausalFunction.apply(q_BHSD, k_BGSD, v_BGSV, document_BS, rules)


class CausalFunction(torch.autograd.Function):
    """Keeps q, k, v, the output and a log-sum-exp a row; of documents their ids, from which masks are made
    again."""

    @staticmethod
    def forward(
        ctx, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, document_BS: Tensor | None, rules: Rules
    ) -> Tensor:
        rows = Rows((range(q_BHSD.shape[2]),), document_BS)
        out_BHSV, lse_BHS = whole_forward(q_BHSD, k_BGSD, v_BGSV, rows, rules)
        ctx.save_for_backward(q_BHSD, k_BGSD, v_BGSV, document_BS, out_BHSV, lse_BHS)
        ctx.rules = rules
        return out_BHSV

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSV: Tensor):
        q_BHSD, k_BGSD, v_BGSV, document_BS, out_BHSV, lse_BHS = ctx.saved_tensors
        rows = Rows((range(q_BHSD.shape[2]),), document_BS)
        saved = Saved(grad_BHSV, q_BHSD, out_BHSV, lse_BHS)
        return *whole_backward(saved, k_BGSD, v_BGSV, rows, ctx.rules), None, None
