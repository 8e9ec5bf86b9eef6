"""Matrix products of a block on one rank, read off the parameter table: forward and both of backward."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cluster import Device
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.gemm import gemm_time, memory_rate, product_precision
from shardwright.plan.names import attention_matrices, naming
from shardwright.plan.params import Role, Tensor, Unit, parameter_table
from shardwright.plan.table import Floats

Kind = Literal["dense", "experts"]

PARTS: dict[str, tuple[str, ...]] = {
    "qkv": ("query", "key", "value"),
    "gate_up": ("gate", "up"),
    "query_down": ("query",),
    "query_up": ("query",),
    "key_down": ("key", "value"),
    "key_up": ("key", "value"),
    "mla_out": ("out",),
}
"""What LoRA's targets call the parts of fused and latent matrices."""

CAST_BYTES = 3
"""Of an element that is cast to 8 bits: 2 read, 1 written; its largest value is found where it is made."""

TURN_BYTES = 2
"""Of an 8-bit element that is turned: read and written. Tensor cores take 8-bit inputs by rows only, so that
backward needs inputs and weights the other way round. Source: NVIDIA/TransformerEngine; from memory."""


class Matrix(NamedTuple):
    """A weight as its product sees it. ``keys`` of its outputs are key heads, of which a rank of tp has at
    least ``least`` outputs."""

    kind: str  # of plan/names.py; router
    role: Role
    outputs: int
    inputs: int
    split: Literal["whole", "outputs", "inputs"]  # by tp
    keys: int = 0
    least: int = 0


class ProductTimes(NamedTuple):
    """Seconds of a group of products of one microbatch; ``last`` is the down projection's part of forward."""

    forward: Floats
    last: Floats
    input_gradients: Floats
    weight_gradients: Floats


class _Local(NamedTuple):
    """Products of one shape on a rank: outputs, inputs, how many, and what is done with the weight."""

    outputs: Floats
    inputs: Floats
    copies: int
    trained: bool
    base: bool  # kept in fewer bits, if the job says so
    narrow: bool  # in fp8, if the job is
    last: bool


def block_unit(model: ModelSpec, kind: Kind) -> Unit:
    """The block with or without experts."""
    covered = kind == "experts"
    units = parameter_table(model).blocks
    return next(u for u in units if (model.moe is not None and model.moe.covers(u.layers[0])) == covered)


@cache
def block_matrices(model: ModelSpec, kind: Kind) -> tuple[Matrix, ...]:
    """Matrices of a block; of routed experts one."""
    roles = ("attention", "feed_forward", "shared_expert", "router", "expert")
    return tuple(
        _matrix(model, t) for t in block_unit(model, kind).tensors if t.role in roles and _is_matrix(t)
    )


def _is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor is a weight: stacked experts have a dim more, and biases of two dims."""
    return len(tensor.shape) == (3 if tensor.role == "expert" else 2)


def _matrix(model: ModelSpec, tensor: Tensor) -> Matrix:
    names, stacked = naming(model), tensor.role == "expert"
    shape, dim = tensor.shape[-2:], tensor.splits.get("tp")
    dim = None if dim is None else dim - stacked
    if names.transposed_experts if stacked else names.transposed:
        shape, dim = (shape[1], shape[0]), None if dim is None else 1 - dim
    module = tensor.name.removesuffix(".weight").split(".")[-1]
    known = dict(attention_matrices(model) if tensor.role == "attention" else names.matrices)
    kinds = {name: kind for kind, name in known.items()}
    kind = tensor.name.split(".")[-1].removesuffix("_proj") if stacked else kinds.get(module, tensor.role)
    parts = {"key": 1, "value": 1, "qkv": 2}.get(kind, 0)
    split: Literal["whole", "outputs", "inputs"] = (
        "whole" if dim is None else "outputs" if dim == 0 else "inputs"
    )
    keys = parts * model.kv_heads * model.head_size
    return Matrix(kind, tensor.role, shape[0], shape[1], split, keys, parts * model.head_size)


# Times


def split_products(
    model: ModelSpec, job: Job, device: Device, kind: Kind, tokens: ArrayLike, tp: ArrayLike
) -> ProductTimes:
    """Products of the matrices that tp splits, by outputs or by inputs [s]. Key heads repeat where tp has
    more ranks than there are."""
    return _on_distinct(lambda *grid: _dense(model, job, device, kind, False, *grid), tokens, tp)


def whole_products(model: ModelSpec, job: Job, device: Device, kind: Kind, tokens: ArrayLike) -> ProductTimes:
    """Products of the matrices that stand whole on every rank of tp [s]: router, narrow ones of latent
    attention."""
    return _on_distinct(lambda *grid: _dense(model, job, device, kind, True, *grid), tokens, 1)


def expert_products(
    model: ModelSpec, job: Job, device: Device, tokens: ArrayLike, ep: ArrayLike, etp: ArrayLike
) -> ProductTimes:
    """Products of the routed experts of a rank, one grouped kernel for each matrix [s].

    ``tokens`` are those that a rank sends off; it is sent as many times top_k, times ``expert_factor``.
    """
    return _on_distinct(lambda *grid: _routed(model, job, device, *grid), tokens, ep, etp)


def head_products(
    model: ModelSpec, job: Job, device: Device, tokens: ArrayLike, tp: ArrayLike
) -> ProductTimes:
    """Products of the head [s], whose vocabulary tp splits; never in fp8, and frozen under LoRA."""
    return _on_distinct(lambda *grid: _head(model, job, device, *grid), tokens, tp)


def expert_factor(job: Job, ep: ArrayLike) -> Floats:
    """Tokens of the fullest rank over the mean: what its capacity is, or how uneven the routing is."""
    if job.expert_capacity:
        return np.asarray(job.expert_capacity)
    return np.where(np.asarray(ep) > 1, job.expert_imbalance, 1.0)


Values = tuple[float, ...]


def _on_distinct(times: Callable[..., ProductTimes], *columns: ArrayLike) -> ProductTimes:
    """``times`` at every combination of the columns' distinct values, spread over their common shape."""
    arrays = [np.asarray(column) for column in columns]
    if all(array.size == 1 for array in arrays):  # a single layout
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        one = times(*(tuple(array.ravel().tolist()) for array in arrays))
        return ProductTimes(*(part.reshape(shape) for part in one))
    found = [np.unique(array, return_inverse=True) for array in arrays]
    index = tuple(row.reshape(array.shape) for (_, row), array in zip(found, arrays, strict=True))
    grid = times(*(tuple(values.tolist()) for values, _ in found))
    return ProductTimes(*(part[index] for part in grid))


@lru_cache(maxsize=256)
def _dense(
    model: ModelSpec, job: Job, device: Device, kind: Kind, whole: bool, tokens: Values, tp: Values
) -> ProductTimes:
    chosen = [
        matrix
        for matrix in block_matrices(model, kind)
        if matrix.role != "expert" and (matrix.split == "whole") == whole
    ]
    rows, degree = np.array(tokens)[:, None], np.array(tp)
    return _summed(job, device, _local(job, chosen, degree), rows, degree, np.asarray(1.0))


@lru_cache(maxsize=256)
def _routed(
    model: ModelSpec, job: Job, device: Device, tokens: Values, ep: Values, etp: Values
) -> ProductTimes:
    assert model.moe is not None
    degree = np.array(ep)[:, None]
    copies = np.array(tokens)[:, None, None] * model.moe.top_k * expert_factor(job, degree)
    groups = np.minimum(model.moe.experts / degree, np.maximum(copies, 1.0))  # an expert may get no token
    chosen = [matrix for matrix in block_matrices(model, "experts") if matrix.role == "expert"]
    split = np.array(etp)
    return _summed(job, device, _local(job, chosen, split), copies / groups, split, groups)


@lru_cache(maxsize=256)
def _head(model: ModelSpec, job: Job, device: Device, tokens: Values, tp: Values) -> ProductTimes:
    degree, width = np.array(tp), model.embedding_projection or model.hidden
    trained, one = not job.lora_rank, np.ones(len(tp))
    parts = [_Local(model.vocab / degree, width * one, 1, trained, False, False, False)]
    if model.embedding_projection:
        parts.append(_Local(width * one, model.hidden * one, 1, trained, False, False, False))
    return _summed(job, device, parts, np.array(tokens)[:, None], degree, np.asarray(1.0))


def _local(job: Job, matrices: list[Matrix], tp: Floats) -> list[_Local]:
    """Shapes on a rank, equal ones together, and of LoRA's adapters; routed experts have none."""
    found: dict[tuple[object, ...], _Local] = {}
    rank = np.full(tp.shape, float(job.lora_rank))
    for matrix in matrices:
        keys = np.maximum(matrix.keys / tp, matrix.least)
        split_outputs, split_inputs = (matrix.outputs - matrix.keys) / tp + keys, matrix.inputs / tp
        outputs = split_outputs if matrix.split == "outputs" else np.full(tp.shape, float(matrix.outputs))
        inputs = split_inputs if matrix.split == "inputs" else np.full(tp.shape, float(matrix.inputs))
        narrow, last = matrix.role != "router", matrix.kind == "down" and matrix.role == "feed_forward"
        parts = [_Local(outputs, inputs, 1, not job.lora_rank, True, narrow, last)]
        adapted = set(PARTS.get(matrix.kind, (matrix.kind,))) & set(job.lora_targets)
        if adapted and matrix.role != "expert":
            parts.append(_Local(rank, inputs, 1, True, False, False, last))
            parts.append(_Local(outputs, rank, 1, True, False, False, last))
        for place, part in enumerate(parts):
            key = (place, matrix.outputs, matrix.inputs, matrix.split, matrix.keys, *part[3:])
            copies = found[key].copies if key in found else 0
            found[key] = part._replace(copies=copies + 1)
    return list(found.values())


def _summed(
    job: Job, device: Device, parts: list[_Local], rows: Floats, tp: Floats, groups: Floats
) -> ProductTimes:
    """Times of all ``parts`` for ``rows`` tokens of each of ``groups``, on the grid of the arguments."""
    if job.program.narrow_rate != 1:
        device = device.model_copy(update={"fp8_factor": device.fp8_factor * job.program.narrow_rate})
    found = [np.zeros(np.broadcast_shapes(rows.shape, tp.shape)) for _ in ProductTimes._fields]
    for narrow in (True, False):
        some = [part for part in parts if part.narrow == narrow]
        if some:
            times = _of_precision(job, device, some, rows, groups, narrow=narrow)
            found = [sofar + time for sofar, time in zip(found, times, strict=True)]
    return ProductTimes(*found)


def _of_precision(
    job: Job, device: Device, parts: list[_Local], rows: Floats, groups: Floats, *, narrow: bool
) -> ProductTimes:
    """The same of parts that are all narrow in a job of fp8, or none: one product after another along an axis
    before those of the grid."""
    precision = job.precision if narrow or job.precision != "fp8" else "bf16"
    outputs, inputs = (np.array([getattr(part, name) for part in parts]) for name in ("outputs", "inputs"))
    before = (1,) * (max(rows.ndim, groups.ndim) + 1 - outputs.ndim)
    n, k = (each.reshape(len(parts), *before, *each.shape[1:]) for each in (outputs, inputs))

    def flags(name: str) -> Floats:
        return np.array([float(getattr(part, name)) for part in parts]).reshape(-1, *(1,) * (n.ndim - 1))

    sides = ((rows, rows, n), (n, k, k), (k, n, rows))  # forward, and the gradients of inputs and of weights
    high, wide, deep = (np.stack(np.broadcast_arrays(*side)) for side in sides)
    ahead, back, weight = gemm_time(high, wide, deep, device, precision, groups)
    read, weights = rows * k * groups, n * k * groups
    if narrow and precision == product_precision(device, precision) == "fp8":
        casts = job.program.casts
        cast, turned = CAST_BYTES * (read + weights), TURN_BYTES * (read + weights)
        ahead = ahead + casts * (cast / memory_rate(device) + 2 * device.launch)
        moved = CAST_BYTES * rows * n * groups + turned
        back = back + casts * (moved / memory_rate(device) + 2 * device.launch)
    if job.base_bits < 16:
        unpacked = flags("base") * (job.base_bits / 8 + 2) * weights / memory_rate(device)
        ahead, back = ahead + unpacked, back + unpacked
    copies = flags("copies")
    each = (ahead, flags("last") * ahead, back, flags("trained") * weight)
    return ProductTimes(*((copies * time).sum(axis=0) for time in each))
