"""Causal attention on the CPU whose values are narrower than its keys, as one operator.

The kernel knows one head size, so that values are padded for it; sequence by sequence, to bound the memory
that takes. CUDA has kernels for two sizes.

B batch, H query heads, G key/value heads, S sequence, D head size, V value head size.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.run.blocks import block_backward, block_forward
from shardwright.run.kernels import wide


@torch.library.custom_op("shardwright::narrow_attention", mutates_args=())
def _narrow(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out_BHSV, lse_BHS = _empty(q_BHSD, v_BGSV)
    for own in (slice(row, row + 1) for row in range(len(q_BHSD))):
        out_BHSV[own], lse_BHS[own] = block_forward(q_BHSD[own], k_BGSD[own], v_BGSV[own], scale, True, None)
    return out_BHSV, lse_BHS


@_narrow.register_fake
def _(q_BHSD, k_BGSD, v_BGSV, scale):
    return _empty(q_BHSD, v_BGSV)


def _empty(q_BHSD: Tensor, v_BGSV: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, seq, _ = q_BHSD.shape
    out_BSHV = q_BHSD.new_empty(batch, seq, heads, v_BGSV.shape[-1])
    return out_BSHV.transpose(1, 2), q_BHSD.new_empty(batch, heads, seq, dtype=wide(q_BHSD.dtype))


@torch.library.custom_op("shardwright::narrow_attention_backward", mutates_args=())
def _narrow_backward(
    grad_BHSV: Tensor,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    out_BHSV: Tensor,
    lse_BHS: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _empty_like(q_BHSD), _empty_like(k_BGSD), _empty_like(v_BGSV)
    saved = grad_BHSV, q_BHSD, k_BGSD, v_BGSV, out_BHSV, lse_BHS
    for own in (slice(row, row + 1) for row in range(len(q_BHSD))):
        found = block_backward(*(tensor[own] for tensor in saved), scale, True, None)
        for grad, part in zip(grads, found, strict=True):
            grad[own] = part
    return grads


@_narrow_backward.register_fake
def _(grad_BHSV, q_BHSD, k_BGSD, v_BGSV, out_BHSV, lse_BHS, scale):
    return _empty_like(q_BHSD), _empty_like(k_BGSD), _empty_like(v_BGSV)


def _empty_like(x_BHSD: Tensor) -> Tensor:
    """The same shape, laid out as B x S x H x D."""
    return torch.empty_like(x_BHSD.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


class NarrowFunction(torch.autograd.Function):
    """Keeps q, k, v, the output and a log-sum-exp a row."""

    @staticmethod
    def forward(ctx, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, scale: float) -> Tensor:
        out_BHSV, lse_BHS = _narrow(q_BHSD, k_BGSD, v_BGSV, scale)
        ctx.save_for_backward(q_BHSD, k_BGSD, v_BGSV, out_BHSV, lse_BHS)
        ctx.scale = scale
        return out_BHSV

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSV: Tensor):
        return *_narrow_backward(grad_BHSV, *ctx.saved_tensors, ctx.scale), None
