"""Operations whose saved tensors are written down, so that every device keeps the same ones.

Each is an operator of its own (one entry for a dispatch mode, in a real and in a fake run alike) and an
autograd function that says what it keeps for the backward pass. plan/activations.py prices exactly these.

B batch, S sequence, N tokens (B*S), H heads, D head size, F ffn or hidden.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS_BYTES = 2**22
"""Working memory of one slice of rows [B]: operations in a wider type go slice by slice."""


def row_slices(rows: int, row_bytes: int) -> list[slice]:
    step = max(1, ROWS_BYTES // max(row_bytes, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Type in which statistics are computed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.custom_op("shardwright::rms_norm", mutates_args=())
def _rms_norm(x_NF: Tensor, weight_F: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out_NF, rstd_N1 = torch.empty_like(x_NF), x_NF.new_empty((x_NF.shape[0], 1), dtype=wide(x_NF.dtype))
    for rows in row_slices(x_NF.shape[0], x_NF.shape[1] * rstd_N1.element_size()):
        x = x_NF[rows].to(rstd_N1.dtype)
        rstd_N1[rows] = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        out_NF[rows] = (x * rstd_N1[rows]).to(x_NF.dtype) * weight_F
    return out_NF, rstd_N1


@_rms_norm.register_fake
def _(x_NF, weight_F, eps):
    return torch.empty_like(x_NF), x_NF.new_empty((x_NF.shape[0], 1), dtype=wide(x_NF.dtype))


@torch.library.custom_op("shardwright::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad_NF: Tensor, x_NF: Tensor, weight_F: Tensor, rstd_N1: Tensor
) -> tuple[Tensor, Tensor]:
    dx_NF, dweight_F = torch.empty_like(x_NF), torch.zeros_like(weight_F, dtype=rstd_N1.dtype)
    weight = weight_F.to(rstd_N1.dtype)
    for rows in row_slices(x_NF.shape[0], 3 * x_NF.shape[1] * rstd_N1.element_size()):
        normal = x_NF[rows].to(rstd_N1.dtype) * rstd_N1[rows]
        grad = grad_NF[rows].to(rstd_N1.dtype)
        product = grad * normal
        dweight_F += product.sum(0)
        mean = torch.mv(product, weight).div_(x_NF.shape[1])[:, None]
        dx = torch.mul(grad, weight, out=product).addcmul_(normal, mean, value=-1)
        torch.mul(dx, rstd_N1[rows], out=dx_NF[rows])
    return dx_NF, dweight_F.to(weight_F.dtype, copy=True)


@_rms_norm_backward.register_fake
def _(grad_NF, x_NF, weight_F, rstd_N1):
    return torch.empty_like(x_NF), torch.empty_like(weight_F)


class RMSNormFunction(torch.autograd.Function):
    """Keeps the input, the weight and one reciprocal deviation a row."""

    @staticmethod
    def forward(ctx, x_NF: Tensor, weight_F: Tensor, eps: float) -> Tensor:
        out_NF, rstd_N1 = _rms_norm(x_NF, weight_F, eps)
        ctx.save_for_backward(x_NF, weight_F, rstd_N1)
        return out_NF

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NF: Tensor):
        dx_NF, dweight_F = _rms_norm_backward(grad_NF, *ctx.saved_tensors)
        return dx_NF, dweight_F, None


def rms_norm(x: Tensor, weight_F: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dim of ``x``, statistics in fp32 (fp64 for fp64)."""
    return RMSNormFunction.apply(x.reshape(-1, x.shape[-1]), weight_F, eps).view(x.shape)


@torch.library.custom_op("shardwright::swiglu", mutates_args=())
def _swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    out_NF = torch.nn.functional.silu(gate_NF)
    return out_NF.mul_(up_NF)


@_swiglu.register_fake
def _(gate_NF, up_NF):
    return torch.empty_like(gate_NF)


@torch.library.custom_op("shardwright::swiglu_backward", mutates_args=())
def _swiglu_backward(grad_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> tuple[Tensor, Tensor]:
    dgate_NF, dup_NF = torch.empty_like(gate_NF), torch.empty_like(up_NF)
    dtype = wide(gate_NF.dtype)
    for rows in row_slices(gate_NF.shape[0], 3 * gate_NF.shape[1] * dtype.itemsize):
        gate, grad = gate_NF[rows].to(dtype), grad_NF[rows].to(dtype)
        sigmoid = torch.sigmoid(gate)
        active = gate * sigmoid
        torch.mul(grad, active, out=dup_NF[rows])
        slope = active.mul_(1 - sigmoid).add_(sigmoid)
        torch.mul(slope.mul_(grad), up_NF[rows], out=dgate_NF[rows])
    return dgate_NF, dup_NF


@_swiglu_backward.register_fake
def _(grad_NF, gate_NF, up_NF):
    return torch.empty_like(gate_NF), torch.empty_like(up_NF)


class SwiGLUFunction(torch.autograd.Function):
    """Keeps gate and up; the activation is computed again in the backward pass."""

    @staticmethod
    def forward(ctx, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NF, up_NF)
        return _swiglu(gate_NF, up_NF)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NF: Tensor):
        return _swiglu_backward(grad_NF, *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    flat = (-1, gate.shape[-1])
    return SwiGLUFunction.apply(gate.reshape(flat), up.reshape(flat)).view(gate.shape)


def _pairs(x: Tensor, pairs: int, first: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second numbers of all pairs that are turned."""
    turned = x[..., first : first + 2 * pairs]
    if interleaved:
        return turned[..., 0::2], turned[..., 1::2]
    return turned[..., :pairs], turned[..., pairs:]


@torch.library.custom_op("shardwright::rotate", mutates_args=())
def _rotate(
    x_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, first: int, interleaved: bool, inverse: bool
) -> Tensor:
    pairs = cos_SD.shape[-1]
    out_BSHD = torch.empty_like(x_BSHD, memory_format=torch.contiguous_format)
    cos, sin = cos_SD[:, None, :], sin_SD[:, None, :] * (-1 if inverse else 1)
    whole = first == 0 and 2 * pairs == x_BSHD.shape[-1]
    if x_BSHD.dtype == cos.dtype:
        if not whole:
            out_BSHD.copy_(x_BSHD)
        low, high = _pairs(x_BSHD, pairs, first, interleaved)
        out_low, out_high = _pairs(out_BSHD, pairs, first, interleaved)
        torch.mul(low, cos, out=out_low).addcmul_(high, sin, value=-1)
        torch.mul(high, cos, out=out_high).addcmul_(low, sin)
        return out_BSHD
    for x_SHD, out_SHD in zip(x_BSHD, out_BSHD, strict=True):
        if not whole:
            out_SHD.copy_(x_SHD)
        low, high = _pairs(x_SHD, pairs, first, interleaved)
        out_low, out_high = _pairs(out_SHD, pairs, first, interleaved)
        out_low.copy_(low * cos - high * sin)
        out_high.copy_(high * cos + low * sin)
    return out_BSHD


@_rotate.register_fake
def _(x_BSHD, cos_SD, sin_SD, first, interleaved, inverse):
    return torch.empty_like(x_BSHD, memory_format=torch.contiguous_format)


class RotateFunction(torch.autograd.Function):
    """Keeps nothing but the shared tables."""

    @staticmethod
    def forward(ctx, x_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, first: int, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos_SD, sin_SD)
        ctx.which = first, interleaved
        return _rotate(x_BSHD, cos_SD, sin_SD, first, interleaved, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BSHD: Tensor):
        return _rotate(grad_BSHD, *ctx.saved_tensors, *ctx.which, True), None, None, None, None


def rotate(
    x_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, first: int = 0, *, interleaved: bool = False
) -> Tensor:
    """Rotary embedding: turn pairs of each head's numbers by the angles of the tables (S x pairs each).

    The pairs lie in the numbers from ``first`` on, the others are copied; a pair is a number and that so many
    pairs behind it, or two neighbours if ``interleaved``.
    """
    return RotateFunction.apply(x_BSHD, cos_SD, sin_SD, first, interleaved)


def causal_attention(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention with grouped key/value heads; keeps q, k, v, the output and a log-sum-exp a row.

    The CPU flash kernel takes grouped heads as they are; through ``scaled_dot_product_attention`` they would
    be repeated first.
    """
    if q_BHSD.device.type == "cpu":
        out_BHSD, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHSD, k_BHSD, v_BHSD, 0.0, True, scale=scale
        )
        return out_BHSD
    grouped = q_BHSD.shape[1] != k_BHSD.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        q_BHSD, k_BHSD, v_BHSD, is_causal=True, scale=scale, enable_gqa=grouped
    )
