"""Products of many matrices with rows of their own, and the weighted activation between two of them.

C rows sorted by group, G groups, I inputs, O outputs, F ffn. ``counts`` are the rows of each group.
"""

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.run.kernels import _slices

GROUPED_CAPABILITY = (8, 0)
"""CUDA devices from which torch has one kernel for all groups."""


def _one_kernel(x_CI: Tensor) -> bool:
    if x_CI.device.type != "cuda" or x_CI.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(x_CI.device) >= GROUPED_CAPABILITY


def _ends(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(device, non_blocking=True)


def _groups(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """Every group and its rows. Also those without rows: a product over none of them is zero."""
    for group, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
        yield group, slice(end - count, end)


@torch.library.custom_op("shardwright::grouped_product", mutates_args=())
def _grouped_product(x_CI: Tensor, weight_GOI: Tensor, counts: list[int]) -> Tensor:
    if _one_kernel(x_CI):
        return torch._grouped_mm(x_CI, weight_GOI.transpose(1, 2), offs=_ends(counts, x_CI.device))
    out_CO = x_CI.new_empty((x_CI.shape[0], weight_GOI.shape[1]))
    for group, rows in _groups(counts):
        torch.mm(x_CI[rows], weight_GOI[group].t(), out=out_CO[rows])
    return out_CO


@_grouped_product.register_fake
def _(x_CI, weight_GOI, counts):
    return x_CI.new_empty((x_CI.shape[0], weight_GOI.shape[1]))


@torch.library.custom_op("shardwright::grouped_product_backward", mutates_args=())
def _grouped_product_backward(
    grad_CO: Tensor, x_CI: Tensor, weight_GOI: Tensor, counts: list[int]
) -> tuple[Tensor, Tensor]:
    if _one_kernel(x_CI):
        ends = _ends(counts, x_CI.device)
        dx_CI = torch._grouped_mm(grad_CO, weight_GOI, offs=ends)
        return dx_CI, torch._grouped_mm(grad_CO.t(), x_CI, offs=ends)
    dx_CI, dweight_GOI = torch.empty_like(x_CI), torch.empty_like(weight_GOI)
    for group, rows in _groups(counts):
        torch.mm(grad_CO[rows], weight_GOI[group], out=dx_CI[rows])
        torch.mm(grad_CO[rows].t(), x_CI[rows], out=dweight_GOI[group])
    return dx_CI, dweight_GOI


@_grouped_product_backward.register_fake
def _(grad_CO, x_CI, weight_GOI, counts):
    return torch.empty_like(x_CI), torch.empty_like(weight_GOI)


class GroupedProduct(torch.autograd.Function):
    """Keeps its input and the weights."""

    @staticmethod
    def forward(ctx, x_CI: Tensor, weight_GOI: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x_CI, weight_GOI)
        ctx.counts = counts
        return _grouped_product(x_CI, weight_GOI, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_CO: Tensor):
        return *_grouped_product_backward(grad_CO.contiguous(), *ctx.saved_tensors, ctx.counts), None


def grouped_product(x_CI: Tensor, weight_GOI: Tensor, counts: list[int]) -> Tensor:
    """Each group's rows times the transpose of its matrix, C x O."""
    return GroupedProduct.apply(x_CI, weight_GOI, counts)


@torch.library.custom_op("shardwright::weighted_swiglu", mutates_args=())
def _weighted_swiglu(both_C2F: Tensor, weight_C: Tensor) -> Tensor:
    width = both_C2F.shape[1] // 2
    out_CF = both_C2F.new_empty((both_C2F.shape[0], width))
    for rows in _slices(both_C2F.shape[0], 3 * width * weight_C.element_size()):
        gate, up = both_C2F[rows].to(weight_C.dtype).chunk(2, dim=1)
        out_CF[rows] = (torch.nn.functional.silu(gate) * up * weight_C[rows, None]).to(out_CF.dtype)
    return out_CF


@_weighted_swiglu.register_fake
def _(both_C2F, weight_C):
    return both_C2F.new_empty((both_C2F.shape[0], both_C2F.shape[1] // 2))


@torch.library.custom_op("shardwright::weighted_swiglu_backward", mutates_args=())
def _weighted_swiglu_backward(grad_CF: Tensor, both_C2F: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    width = grad_CF.shape[1]
    dboth_C2F, dweight_C = torch.empty_like(both_C2F), torch.empty_like(weight_C)
    for rows in _slices(grad_CF.shape[0], 6 * width * weight_C.element_size()):
        gate, up = both_C2F[rows].to(weight_C.dtype).chunk(2, dim=1)
        grad, sigmoid = grad_CF[rows].to(weight_C.dtype), torch.sigmoid(gate)
        dweight_C[rows] = (grad * gate * sigmoid * up).sum(1)
        grad = grad * weight_C[rows, None] * sigmoid
        dboth_C2F[rows, width:] = (grad * gate).to(dboth_C2F.dtype)
        dboth_C2F[rows, :width] = (grad * up * (1 + gate * (1 - sigmoid))).to(dboth_C2F.dtype)
    return dboth_C2F, dweight_C


@_weighted_swiglu_backward.register_fake
def _(grad_CF, both_C2F, weight_C):
    return torch.empty_like(both_C2F), torch.empty_like(weight_C)


class WeightedSwiGLU(torch.autograd.Function):
    """Keeps gate and up, one tensor, and the weights; makes their gradient as one tensor too."""

    @staticmethod
    def forward(ctx, both_C2F: Tensor, weight_C: Tensor) -> Tensor:
        ctx.save_for_backward(both_C2F, weight_C)
        return _weighted_swiglu(both_C2F, weight_C)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_CF: Tensor):
        return _weighted_swiglu_backward(grad_CF, *ctx.saved_tensors)


def weighted_swiglu(both_C2F: Tensor, weight_C: Tensor) -> Tensor:
    """silu(gate) * up * weight, of rows that hold gate and then up; computed in the type of the weights.

    A copy is weighted here and not behind its expert, so that the gradient of its weight needs no output of
    the expert. Source: NVIDIA/Megatron-LM core/transformer/moe/experts.py, ``weighted_bias_swiglu_impl``.
    """
    return WeightedSwiGLU.apply(both_C2F, weight_C)
