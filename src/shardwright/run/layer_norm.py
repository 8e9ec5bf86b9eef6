"""Norms over the last dim: root-mean-square, and LayerNorm with what it keeps written down.

N tokens, F features.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwright.model import ModelSpec
from shardwright.run.kernels import rms_norm, row_slices, wide
from shardwright.run.linear import local


@torch.library.custom_op("shardwright::layer_norm", mutates_args=())
def _layer_norm(
    x_NF: Tensor, weight_F: Tensor, bias_F: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    out_NF = torch.empty_like(x_NF)
    mean_N1, rstd_N1 = (x_NF.new_empty((x_NF.shape[0], 1), dtype=wide(x_NF.dtype)) for _ in range(2))
    for rows in row_slices(x_NF.shape[0], 2 * x_NF.shape[1] * rstd_N1.element_size()):
        x = x_NF[rows].to(rstd_N1.dtype)
        mean_N1[rows] = x.mean(-1, keepdim=True)
        x = x - mean_N1[rows]
        rstd_N1[rows] = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        x = x * rstd_N1[rows] * weight_F
        out_NF[rows] = x if bias_F is None else x + bias_F
    return out_NF, mean_N1, rstd_N1


@_layer_norm.register_fake
def _(x_NF, weight_F, bias_F, eps):
    mean_N1 = x_NF.new_empty((x_NF.shape[0], 1), dtype=wide(x_NF.dtype))
    return torch.empty_like(x_NF), mean_N1, torch.empty_like(mean_N1)


@torch.library.custom_op("shardwright::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    grad_NF: Tensor, x_NF: Tensor, weight_F: Tensor, mean_N1: Tensor, rstd_N1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx_NF = torch.empty_like(x_NF)
    dweight_F, dbias_F = (torch.zeros_like(weight_F, dtype=rstd_N1.dtype) for _ in range(2))
    for rows in row_slices(x_NF.shape[0], 4 * x_NF.shape[1] * rstd_N1.element_size()):
        normal = (x_NF[rows].to(rstd_N1.dtype) - mean_N1[rows]) * rstd_N1[rows]
        grad = grad_NF[rows].to(rstd_N1.dtype)
        dweight_F += (grad * normal).sum(0)
        dbias_F += grad.sum(0)
        scaled = grad * weight_F
        along = scaled.mean(-1, keepdim=True) + normal * (scaled * normal).mean(-1, keepdim=True)
        dx_NF[rows] = ((scaled - along) * rstd_N1[rows]).to(x_NF.dtype)
    return dx_NF, dweight_F.to(weight_F.dtype, copy=True), dbias_F.to(weight_F.dtype, copy=True)


@_layer_norm_backward.register_fake
def _(grad_NF, x_NF, weight_F, mean_N1, rstd_N1):
    return torch.empty_like(x_NF), torch.empty_like(weight_F), torch.empty_like(weight_F)


class LayerNormFunction(torch.autograd.Function):
    """Keeps the input, the weight, and a mean and a reciprocal deviation a row."""

    @staticmethod
    def forward(ctx, x_NF: Tensor, weight_F: Tensor, bias_F: Tensor | None, eps: float) -> Tensor:
        out_NF, mean_N1, rstd_N1 = _layer_norm(x_NF, weight_F, bias_F, eps)
        ctx.save_for_backward(x_NF, weight_F, mean_N1, rstd_N1)
        ctx.biased = bias_F is not None
        return out_NF

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NF: Tensor):
        dx_NF, dweight_F, dbias_F = _layer_norm_backward(grad_NF, *ctx.saved_tensors)
        return dx_NF, dweight_F, dbias_F if ctx.biased else None, None


def layer_norm(x: Tensor, weight_F: Tensor, bias_F: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dim of ``x``, statistics in fp32 (fp64 for fp64)."""
    flat_NF = x.reshape(-1, x.shape[-1])
    return LayerNormFunction.apply(flat_NF, weight_F, bias_F, eps).view(x.shape)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, local(self.weight), self.eps)


class LayerNorm(nn.Module):
    """Norm by mean and deviation with a learned scale, and a learned bias if ``bias``."""

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else local(self.bias)
        return layer_norm(x, local(self.weight), bias, self.eps)


def build_norm(spec: ModelSpec) -> RMSNorm | LayerNorm:
    """A norm of the residual stream."""
    if spec.norm == "layer":
        return LayerNorm(spec.hidden, spec.norm_eps, spec.norm_bias)
    return RMSNorm(spec.hidden, spec.norm_eps)
