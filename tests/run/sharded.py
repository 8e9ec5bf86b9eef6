"""Small modules split in every way the runtime splits parameters, and an optimizer's steps on them.

Parts are cut out by ``torch.chunk`` here, not by what is tested.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

STEPS = 3

SHAPES = {
    "up": (8, 6),
    "wide": (8, 6),  # as up, so that the two travel together
    "uneven": (13, 6),
    "few": (3, 5),  # rows fewer than ranks
    "down": (6, 8),
    "narrow": (6, 7),
    "bias": (8,),
    "norm": (6,),
    "experts": (4, 5, 6),
    "wide_experts": (2, 6, 8),
    "embedding": (16, 4),
}
ORTHOGONAL = ("up", "wide", "uneven", "few", "down", "narrow", "experts", "wide_experts")


class Way(NamedTuple):
    """Degrees of the mesh, and the dim of each parameter that its inner axis splits.

    ``rows``: stacked experts that FSDP splits one by one, along the dim that tp does not split.
    """

    degrees: tuple[int, ...]
    axes: tuple[str, ...]
    inner: Mapping[str, int] = MappingProxyType({})
    rows: tuple[str, ...] = ()


TP = {"up": 0, "wide": 0, "bias": 0, "down": 1, "wide_experts": 2, "embedding": 0}
HIDDEN = 2
"""Dim along which experts are split one by one."""
EP = {"experts": 0, "wide_experts": 0}
WAYS = {
    "fsdp": Way((2,), ("dp",)),
    "fsdp4": Way((4,), ("dp",)),
    "hsdp": Way((2, 2), ("replicate", "dp")),
    "fsdp-tp": Way((2, 2), ("dp", "tp"), TP),
    "fsdp4-tp": Way((4, 2), ("dp", "tp"), TP),
    "fsdp-ep": Way((2, 2), ("dp", "ep"), EP),
    "fsdp4-experts-by-row": Way((2, 2), ("dp", "ep"), {"wide_experts": 0}, rows=("wide_experts", "experts")),
    "hsdp-tp": Way((2, 2, 2), ("replicate", "dp", "tp"), TP),
}


def values(seed):
    """Whole tensors by name."""
    generator = np.random.default_rng(seed)
    return {name: torch.from_numpy(generator.standard_normal(shape)) for name, shape in SHAPES.items()}


def plain_module(dtype=torch.float64):
    module = nn.Module()
    for name, value in values(0).items():
        module.register_parameter(name, nn.Parameter(value.to(dtype)))
    return module


def sharded_module(way, dtype=torch.float64):
    """The module split as ``way`` says, its mesh, and a function that cuts a rank's part out of a whole."""
    mesh = init_device_mesh("cpu", way.degrees, mesh_dim_names=way.axes)
    module = plain_module(dtype)
    for name, dim in way.inner.items():
        placed = distribute_tensor(
            getattr(module, name), mesh[way.axes[-1]], [Shard(dim)], src_data_rank=None
        )
        module.register_parameter(name, nn.Parameter(placed))
    outer = [axis for axis in way.axes if axis in ("replicate", "dp")]
    dims = {getattr(module, name): HIDDEN for name in way.rows}
    fully_shard(
        module, mesh=mesh[tuple(outer)] if len(outer) > 1 else mesh["dp"],
        shard_placement_fn=lambda parameter: Shard(dims.get(parameter, 0)),
    )  # fmt: skip

    def part(name, whole):
        if name in way.inner:
            whole = chunk(whole, way.degrees[-1], mesh.get_local_rank(way.axes[-1]), way.inner[name])
        return chunk(whole, mesh["dp"].size(), mesh.get_local_rank("dp"), HIDDEN if name in way.rows else 0)

    return module, mesh, part


def chunk(whole, parts, index, dim):
    cut = whole.chunk(parts, dim)
    return cut[index] if index < len(cut) else whole.narrow(dim, 0, 0)


def set_gradients(module, step, part=lambda name, whole: whole, names=tuple(SHAPES)):
    for name, whole in values(step + 1).items():
        if name not in names:
            continue
        parameter = getattr(module, name)
        grad = part(name, whole).to(parameter.dtype).clone(memory_format=torch.contiguous_format)
        if isinstance(parameter, DTensor):
            grad = DTensor.from_local(
                grad,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = grad


def groups_of(module, orthogonal=False):
    """One group of matrices that decay, one of the rest."""
    found = {}
    for name, parameter in module.named_parameters():
        found.setdefault((parameter.ndim > 1, name in ORTHOGONAL), []).append(parameter)
    return [
        {"params": held, "weight_decay": 0.1 * decays} | ({"orthogonal": chosen} if orthogonal else {})
        for (decays, chosen), held in found.items()
    ]


def plain_steps(build, dtype=torch.float64, steps=STEPS):
    """Parameters after the steps in one process; ``build(module)`` makes the optimizer."""
    module = plain_module(dtype)
    optimizer = build(module)
    for step in range(steps):
        set_gradients(module, step)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def worst_part(way, build, expected, dtype=torch.float64):
    """Largest difference of a rank's part from that of ``expected``, over the whole's largest entry."""
    module, _, part = sharded_module(way, dtype)
    optimizer = build(module)
    for step in range(STEPS):
        set_gradients(module, step, part)
        optimizer.step()
    worst = 0.0
    for name, parameter in module.named_parameters():
        whole = torch.from_numpy(expected[name])
        found, cut = parameter.detach().to_local(), part(name, whole)
        assert found.shape == cut.shape, name
        if found.numel():
            worst = max(worst, float((found - cut).abs().max() / whole.abs().max()))
    return worst


def as_arrays(parameters):
    return {name: value.numpy() for name, value in parameters.items()}
