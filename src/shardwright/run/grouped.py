"""Products of many matrices with rows of their own, and the weighted activation between two of them.

C rows sorted by group, G groups, I inputs, O outputs, F ffn. ``counts`` are the rows of each group.
"""

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.run.kernels import row_slices

GROUPED_CAPABILITY = (8, 0)
"""CUDA devices from which torch has one kernel for all groups."""

ALIGNED = 8
"""Elements of bf16 in 16 bytes, of which that kernel wants strides to be multiples."""


def _one_kernel(x_CI: Tensor, weight_GOI: Tensor) -> bool:
    """Whether torch's kernel takes them; it refuses no rows at all (pytorch#192497)."""
    if x_CI.device.type != "cuda" or x_CI.dtype != torch.bfloat16 or not len(x_CI):
        return False
    if any(size % ALIGNED for size in weight_GOI.shape[1:]):
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
    if _one_kernel(x_CI, weight_GOI):
        return torch._grouped_mm(x_CI, weight_GOI.transpose(1, 2), offs=_ends(counts, x_CI.device))
    out_CO = x_CI.new_empty((x_CI.shape[0], weight_GOI.shape[1]))
    for group, rows in _groups(counts):
        torch.mm(x_CI[rows], weight_GOI[group].t(), out=out_CO[rows])
    return out_CO


@_grouped_product.register_fake
def _(x_CI, weight_GOI, counts):
    return x_CI.new_empty((x_CI.shape[0], weight_GOI.shape[1]))


@torch.library.custom_op("shardwright::grouped_product_input", mutates_args=())
def _grouped_product_input(grad_CO: Tensor, weight_GOI: Tensor, counts: list[int]) -> Tensor:
    if _one_kernel(grad_CO, weight_GOI):
        return torch._grouped_mm(grad_CO, weight_GOI, offs=_ends(counts, grad_CO.device))
    dx_CI = grad_CO.new_empty((grad_CO.shape[0], weight_GOI.shape[2]))
    for group, rows in _groups(counts):
        torch.mm(grad_CO[rows], weight_GOI[group], out=dx_CI[rows])
    return dx_CI


@_grouped_product_input.register_fake
def _(grad_CO, weight_GOI, counts):
    return grad_CO.new_empty((grad_CO.shape[0], weight_GOI.shape[2]))


@torch.library.custom_op("shardwright::grouped_product_weight", mutates_args=())
def _grouped_product_weight(grad_CO: Tensor, x_CI: Tensor, weight_GOI: Tensor, counts: list[int]) -> Tensor:
    if _one_kernel(x_CI, weight_GOI):
        dweight_GOI = torch._grouped_mm(grad_CO.t(), x_CI, offs=_ends(counts, x_CI.device))
        for group in [group for group, count in enumerate(counts) if not count]:
            dweight_GOI[group].zero_()  # the kernel leaves them as they were on some devices (pytorch#172439)
        return dweight_GOI
    dweight_GOI = torch.empty_like(weight_GOI)
    for group, rows in _groups(counts):
        torch.mm(grad_CO[rows].t(), x_CI[rows], out=dweight_GOI[group])
    return dweight_GOI


@_grouped_product_weight.register_fake
def _(grad_CO, x_CI, weight_GOI, counts):
    return torch.empty_like(weight_GOI)


class InputSide(torch.autograd.Function):
    """The product, as a function of its input alone; keeps the weights."""

    @staticmethod
    def forward(ctx, x_CI: Tensor, weight_GOI: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(weight_GOI)
        ctx.counts = counts
        return _grouped_product(x_CI, weight_GOI, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_CO: Tensor):
        return _grouped_product_input(grad_CO.contiguous(), ctx.saved_tensors[0], ctx.counts), None, None


class WeightSide(torch.autograd.Function):
    """Nothing, as a function of the weights, whose gradient is the product's; keeps the input."""

    @staticmethod
    def forward(ctx, weight_GOI: Tensor, x_CI: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x_CI, weight_GOI)
        ctx.counts = counts
        return x_CI.new_zeros(()).expand(x_CI.shape[0], weight_GOI.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_CO: Tensor):
        return _grouped_product_weight(grad_CO.contiguous(), *ctx.saved_tensors, ctx.counts), None, None


class BothSides(torch.autograd.Function):
    """The first, as if the second were added to it."""

    @staticmethod
    def forward(ctx, product_CO: Tensor, nothing_CO: Tensor) -> Tensor:
        return product_CO.view_as(product_CO)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_CO: Tensor):
        return grad_CO, grad_CO


def grouped_product(x_CI: Tensor, weight_GOI: Tensor, counts: list[int]) -> Tensor:
    """Each group's rows times the transpose of its matrix, C x O.

    Two nodes of autograd's graph, for it asks a function written in Python for all gradients or none: a
    zero-bubble schedule, which asks for those of the input and of the weights in two passes, would have both
    products made twice.
    """
    product_CO = InputSide.apply(x_CI, weight_GOI.detach(), counts)
    if not weight_GOI.requires_grad:
        return product_CO
    return BothSides.apply(product_CO, WeightSide.apply(weight_GOI, x_CI.detach(), counts))


@torch.library.custom_op("shardwright::weighted_swiglu", mutates_args=())
def _weighted_swiglu(both_C2F: Tensor, weight_C: Tensor) -> Tensor:
    width = both_C2F.shape[1] // 2
    out_CF = both_C2F.new_empty((both_C2F.shape[0], width))
    for rows in row_slices(both_C2F.shape[0], 3 * width * weight_C.element_size()):
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
    for rows in row_slices(grad_CF.shape[0], 6 * width * weight_C.element_size()):
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
