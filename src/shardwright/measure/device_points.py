"""Operations of a model's step timed on one device: products, attention, a copy, the optimizer, a launch.

Large shapes are cut for a slow device by tokens and by heads, never in an inner dimension of a weight.

M rows, N columns, K inner dim; H query heads, G key/value heads, S sequence, D head size.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.bandwidth_map import DevicePoint, Unmeasured
from shardwright.measure.call_time import timing
from shardwright.model import ModelSpec
from shardwright.plan.attention import BACKWARD_ATTENTION
from shardwright.plan.products import block_matrices
from shardwright.run.kernels import causal_attention

LEAST_ROWS = 64
"""Tokens of a product at least: with fewer, reading the weight takes longer than the product."""

RANDOM_ROWS = 64
"""Rows of random numbers, repeated: drawing billions takes longer than measuring, and zeros would let a
device that is limited by power run faster."""

LAUNCHES = 16
"""Products of one row that follow one another: their launches are what they take."""


class Sizes(NamedTuple):
    """How large what is measured may be: FLOPs of one call, bytes of a copy, parameters, bytes in all."""

    flops: float
    copy_bytes: int
    parameters: int
    memory: int


def sizes_of(memory: int, accelerator: bool) -> Sizes:
    """For a device with so much free memory [B]: a CPU's products are cut to a few tenths of a second."""
    if accelerator:
        return Sizes(float("inf"), min(2**30, memory // 8), min(2**27, memory // 64), memory)
    return Sizes(8e9, min(2**28, memory // 8), min(2**24, memory // 64), memory)


Measured = Iterator[DevicePoint | Unmeasured]


def measured_points(
    model: ModelSpec, seq: int, precision: str, dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> Measured:
    """Every operation in turn, or why it was left out."""
    yield _launch(precision, dtype, device)
    yield from _memory(precision, device, sizes)
    for name, (outputs, inputs) in product_shapes(model).items():
        yield from _products(name, outputs, inputs, seq, precision, dtype, device, sizes)
    yield from _attention(model, seq, precision, dtype, device, sizes)


def product_shapes(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the weights of a model's blocks and of its head, equal ones together, by name."""
    names: dict[tuple[int, int], list[str]] = {}
    for kind in model.block_kinds:
        for matrix in block_matrices(model, kind):
            found = names.setdefault((matrix.outputs, matrix.inputs), [])
            if matrix.role != "router" and matrix.kind not in found:
                found.append(matrix.kind)
    names.setdefault((model.vocab, model.embedding_projection or model.hidden), []).append("head")
    return {"+".join(found): shape for shape, found in names.items() if found}


def _products(
    name: str,
    outputs: int,
    inputs: int,
    seq: int,
    precision: str,
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sizes,
) -> Measured:
    """Forward and both of backward, into memory that is there: fresh pages cost a CPU more than a short
    product."""
    rows = min(seq, max(int(sizes.flops / (2 * outputs * inputs)), LEAST_ROWS))
    results = outputs * inputs + rows * (outputs + inputs)
    needed = 2 * dtype.itemsize * results
    if needed > sizes.memory:
        yield Unmeasured(what=name, reason=f"it needs {needed} B, and {sizes.memory} B are free")
        return
    weight_NK, x_MK, grad_MN = (
        _random(shape, dtype, device) for shape in ((outputs, inputs), (rows, inputs), (rows, outputs))
    )
    for way, left, right in (
        ("forward", x_MK, weight_NK.t()),
        ("input gradient", grad_MN, weight_NK),
        ("weight gradient", grad_MN.t(), x_MK),
    ):
        shape = left.shape[0], right.shape[1], left.shape[1]
        call = partial(torch.mm, left, right, out=left.new_empty(shape[:2]))
        flops = 2.0 * rows * outputs * inputs
        yield _point("product", f"{name}, {way}", shape, precision, device, call, flops)


def _attention(
    model: ModelSpec, seq: int, precision: str, dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> Measured:
    """One causal sequence, the masked half not counted, forward and backward."""
    each = 2.0 * model.head_size * seq * seq  # of one head
    group = max(model.heads // model.kv_heads, 1)
    kv_heads = min(model.kv_heads, max(int(sizes.flops / (each * group)), 1))
    heads = group * kv_heads
    needed = dtype.itemsize * 8 * heads * seq * model.head_size
    if needed > sizes.memory or each * heads > 20 * sizes.flops:
        yield Unmeasured(
            what="attention", reason=f"{heads} heads of seq={seq} are too large: use a shorter --seq"
        )
        return
    q_HSD, k_GSD, v_GSD = (
        _random((n * seq, model.head_size), dtype, device).view(1, n, seq, model.head_size).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    out_HSD = causal_attention(q_HSD, k_GSD, v_GSD)
    grad_HSD = torch.ones_like(out_HSD)
    shape = (heads, kv_heads, seq, model.head_size)

    def ahead() -> None:
        with torch.no_grad():
            causal_attention(q_HSD, k_GSD, v_GSD)

    def back() -> None:
        torch.autograd.grad(out_HSD, (q_HSD, k_GSD, v_GSD), grad_HSD, retain_graph=True)

    flops = each * heads
    yield _point("attention_forward", "attention, forward", shape, precision, device, ahead, flops)
    yield _point(
        "attention_backward",
        "attention, backward",
        shape,
        precision,
        device,
        back,
        BACKWARD_ATTENTION * flops,
    )


def _memory(precision: str, device: torch.device, sizes: Sizes) -> Measured:
    """A copy larger than the caches, reads and writes counted; and the optimizer."""
    source, target = (
        torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device),
        torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device),
    )
    moved = 2.0 * source.nbytes
    yield _point("copy", "copy", (source.nbytes,), "", device, lambda: target.copy_(source), moved)
    yield _optimizer(precision, device, sizes.parameters)


def _optimizer(precision: str, device: torch.device, parameters: int) -> DevicePoint:
    """AdamW and the gradient's norm over so many fp32 parameters."""
    weight = torch.nn.Parameter(torch.zeros(parameters, device=device))
    grad = weight.grad = torch.full_like(weight, 1e-3)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step() -> None:
        torch.nn.utils.get_total_norm([grad])
        optimizer.step()

    moved = 8.0 * weight.nbytes  # p, m, v and g read, p, m, v written; g read for its norm
    return _point("optimizer", "AdamW and norm", (weight.numel(),), precision, device, step, moved)


def _launch(precision: str, dtype: torch.dtype, device: torch.device) -> DevicePoint:
    """A kernel with its share of Python and autograd: tiny products forward and backward, three kernels
    each."""
    weight = torch.ones(8, 8, dtype=dtype, device=device, requires_grad=True)
    x = torch.ones(1, 8, dtype=dtype, device=device, requires_grad=True)
    grad = torch.ones(1, 8, dtype=dtype, device=device)

    def chain() -> None:
        y = x
        for _ in range(LAUNCHES):
            y = torch.nn.functional.linear(y, weight)
        torch.autograd.grad(y, (x, weight), grad)

    found = timing(chain, device)
    each = found.time / (3 * LAUNCHES)
    return DevicePoint(what="launch", name="launch", precision=precision, time=each, spread=found.spread)


def _point(
    what: Any,
    name: str,
    shape: tuple[int, ...],
    precision: str,
    device: torch.device,
    call: Callable[[], Any],
    amount: float,
) -> DevicePoint:
    found = timing(call, device)
    return DevicePoint(
        what=what, name=name, shape=shape, precision=precision, time=found.time, spread=found.spread,
        rate=amount / found.time,
    )  # fmt: skip


def _random(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows, the same again and again."""
    few = torch.randn(min(RANDOM_ROWS, shape[0]), shape[1], device=device).to(dtype)
    return few.repeat(-(-shape[0] // len(few)), 1)[: shape[0]]
