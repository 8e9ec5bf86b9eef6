"""Initial weights as a function of (seed, parameter name, block of rows), the same in every layout."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.model import ModelSpec
from shardwright.plan.names import naming
from shardwright.run.expert_load import initialise_bias
from shardwright.run.model import Stages, Transformer

HEAD_WEIGHT = "lm_head.weight"

ADDING = (".o_proj.weight", ".down_proj.weight", ".c_proj.weight", "experts.down_proj")
"""Ends of the names of matrices that add to the residual stream."""

NORMS = ("norm.weight", ".ln_1.weight", ".ln_2.weight", ".ln_f.weight")

BLOCK_NUMEL = 2**22
"""Elements of one block of rows: what a rank generates beyond its own shard is bounded by it."""


def initialise(model: Stages | Transformer, seed: int, device: torch.device) -> None:
    """Give the model storage on ``device`` and fill its own shard of every parameter.

    Norms start at 1, biases at 0, matrices at a normal distribution of the model's ``initializer_range``,
    divided by sqrt(2 L) where a matrix adds to the residual stream (GPT-2 report, section 2.3).
    """
    model.to_empty(device=device)
    for stage in model.stages if isinstance(model, Stages) else [model]:
        stage.tie()
    initialise_bias(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(parameter, table_name(name, model.spec), model.spec, seed)


def table_name(name: str, spec: ModelSpec) -> str:
    """Name in the parameter table: a last stage has a copy of a tied matrix, which the table has once."""
    tied = spec.tied_embeddings and name == HEAD_WEIGHT
    return f"{naming(spec).embedding}.weight" if tied else name


def fill(parameter: Tensor, name: str, spec: ModelSpec, seed: int) -> None:
    """Fill one parameter: a whole tensor, or this rank's part of a DTensor."""
    local, ranges = local_part(parameter)
    if name.endswith(NORMS):
        local.fill_(1.0)
    elif name.endswith(".bias"):
        local.fill_(0.0)
    elif local.numel():
        std = spec.initializer_range
        if name.endswith(ADDING):
            std /= math.sqrt(2 * spec.layers)
        _fill_normal(local, ranges, parameter.shape, name, seed, std)


def local_part(parameter: Tensor) -> tuple[Tensor, list[Sequence[int]]]:
    """The part of ``parameter`` that this rank holds, and which indices of each dim of the whole it has.

    Where two axes of the mesh split one dim, the inner one splits first, as FSDP splits what tp has left.
    """
    ranges: list[Sequence[int]] = [range(size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return parameter, ranges
    mesh = parameter.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if placement.is_shard() or isinstance(placement, _StridedShard):
            whole = ranges[placement.dim]
            inner = [p for p in parameter.placements[axis + 1 :] if not p.is_replicate()]
            parts = 1
            if isinstance(placement, _StridedShard) and all(p.dim != placement.dim for p in inner):
                parts = placement.split_factor  # stacked matrices, each split
            ranges[placement.dim] = _part(whole, parts, mesh.size(axis), mesh.get_local_rank(axis))
    return parameter.to_local(), ranges


def _part(whole: Sequence[int], parts: int, ranks: int, rank: int) -> Sequence[int]:
    """What a rank has of indices that are ``parts`` stretches of equal length, each split over all ranks."""
    length = len(whole) // parts
    chunk = -(-length // ranks)
    stretches = [whole[part * length : (part + 1) * length] for part in range(parts)]
    found = [stretch[chunk * rank : chunk * (rank + 1)] for stretch in stretches]
    return found[0] if parts == 1 else [index for stretch in found for index in stretch]


def _fill_normal(
    local: Tensor, ranges: list[Sequence[int]], shape: torch.Size, name: str, seed: int, std: float
) -> None:
    width = math.prod(shape[1:])
    block_rows = max(1, BLOCK_NUMEL // width)
    own = ranges[0]
    for block in range(own.start // block_rows, -(-own.stop // block_rows)):
        start = block * block_rows
        stop = min(start + block_rows, shape[0])
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty((stop - start, *shape[1:]), dtype=torch.float32)
        values.normal_(0.0, std, generator=generator)
        low, high = max(start, own.start), min(stop, own.stop)
        part = values[low - start : high - start]
        for dim, indices in enumerate(ranges[1:], start=1):
            if len(indices) < shape[dim]:
                part = part.index_select(dim, torch.tensor(indices))
        local[low - own.start : high - own.start].copy_(part)
