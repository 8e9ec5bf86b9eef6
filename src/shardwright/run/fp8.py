"""fp8 products: inputs, weights and gradients are rounded to 8 bits for each product of a block.

Every tensor has one scale, found when it is rounded (dynamic tensorwise scaling): its largest element becomes
the format's largest number. Inputs and weights are e4m3, gradients e5m2. What is saved, gathered and reduced
stays bf16; embedding, norms, attention and head are not touched. A rank of tp finds the scale of its own
part, so that the rounding, alone of all arithmetic, depends on the layout.

N tokens, I inputs, O outputs.

Source: arXiv:2209.05433; torchao float8 does the same.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.errors import LayoutError
from shardwright.run.linear import Linear
from shardwright.run.model import Transformer

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2

ALIGNED = 16
"""Every dim of a product is a multiple of it: a rule of ``torch._scaled_mm``."""

SMALLEST = 1e-30
"""Of the largest elements: a tensor of zeros has a finite scale."""


def check_fp8(device: torch.device) -> None:
    """Raises: LayoutError: the device multiplies no fp8 numbers."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name, has = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise LayoutError(
            f"precision='fp8' needs a GPU of compute capability 8.9 or more, {name} has {has[0]}.{has[1]}: "
            "use precision='bf16'"
        )


def apply_fp8(model: Transformer) -> None:
    """Have every product of the blocks round to fp8, in place. Call before compile and FSDP."""
    for layer in model.decoder.layers.values():
        for module in layer.modules():
            if isinstance(module, Linear):
                module.product = fp8_product


def fp8_product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` by fp8 products; in the tensors' own type where a dim does not divide."""
    tokens = x.shape[:-1].numel()
    if any(size % ALIGNED for size in (tokens, *weight_OI.shape)):
        return torch.nn.functional.linear(x, weight_OI, bias_O)
    out = Fp8Product.apply(x.flatten(0, -2), weight_OI).view(*x.shape[:-1], -1)
    return out if bias_O is None else out + bias_O


def rounded(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``tensor`` in 8 bits, and what to multiply it by to have it back (fp32 scalar)."""
    largest = tensor.abs().amax().float().clamp(min=SMALLEST)
    scale = torch.finfo(dtype).max / largest
    # clamped: a scale that was rounded up would turn the largest element into NaN
    limit = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-limit, limit).to(
        dtype, memory_format=torch.contiguous_format
    ), scale.reciprocal()


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """``a @ b.T`` of two rounded matrices; each is a row-major one, as the hardware reads both."""
    (left, left_scale), (right, right_scale) = a, b
    return torch._scaled_mm(left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=dtype)


def _turned(a: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The transpose of a rounded matrix, row-major."""
    return a[0].t().contiguous(), a[1]


class Fp8Product(torch.autograd.Function):
    """Keeps its input and the weight as they came; rounds them again in the backward pass."""

    @staticmethod
    def forward(ctx, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return _product(rounded(x_NI, INPUT), rounded(weight_OI, INPUT), x_NI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NO: Tensor):
        x_NI, weight_OI = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        grad = rounded(grad_NO, GRADIENT)
        dx_NI = dweight_OI = None
        if of_x:
            dx_NI = _product(grad, _turned(rounded(weight_OI, INPUT)), x_NI.dtype)
        if of_weight:
            dweight_OI = _product(_turned(grad), _turned(rounded(x_NI, INPUT)), weight_OI.dtype)
        return dx_NI, dweight_OI
