"""Initial weights as a function of (seed, parameter name, block of rows), the same in every layout."""

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.model import ModelSpec
from shardwright.run.model import Transformer

BLOCK_NUMEL = 2**22
"""Elements of one block of rows: what a rank generates beyond its own shard is bounded by it."""


def initialise(model: Transformer, seed: int, device: torch.device) -> None:
    """Give the model storage on ``device`` and fill its own shard of every parameter.

    Norms start at 1, biases at 0, matrices at a normal distribution of the model's ``initializer_range``,
    divided by sqrt(2 L) where a matrix adds to the residual stream (GPT-2 report, section 2.3).
    """
    model.to_empty(device=device)
    if model.spec.tied_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(parameter, name, model.spec, seed)


def fill(parameter: Tensor, name: str, spec: ModelSpec, seed: int) -> None:
    """Fill one parameter, whole or a DTensor split along dim 0."""
    local, first_row = local_rows(parameter)
    if name.endswith("norm.weight"):
        local.fill_(1.0)
    elif name.endswith(".bias"):
        local.fill_(0.0)
    elif local.numel():
        std = spec.initializer_range
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * spec.layers)
        _fill_normal(local, first_row, parameter.shape[0], name, seed, std)


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """The part of ``parameter`` that this rank holds, and the index of its first row in the whole tensor."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    first = 0
    rows = parameter.shape[0]
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard(0):
            chunk = -(-rows // parameter.device_mesh.size(dim))
            first = min(chunk * parameter.device_mesh.get_local_rank(dim), rows)
    return parameter.to_local(), first


def _fill_normal(local: Tensor, first_row: int, rows: int, name: str, seed: int, std: float) -> None:
    width = local[0].numel()
    block_rows = max(1, BLOCK_NUMEL // width)
    last_row = first_row + local.shape[0]
    for block in range(first_row // block_rows, -(-last_row // block_rows)):
        start = block * block_rows
        stop = min(start + block_rows, rows)
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty((stop - start, *local.shape[1:]), dtype=torch.float32)
        values.normal_(0.0, std, generator=generator)
        low, high = max(start, first_row), min(stop, last_row)
        local[low - first_row : high - first_row].copy_(values[low - start : high - start])
