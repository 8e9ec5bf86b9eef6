"""Expert axes: whole experts shared out over ep, or each expert's matrices split over tp (etp) besides."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwright.run.experts import Experts
from shardwright.run.linear import local
from shardwright.run.mesh import ExpertMeshes


def expert_placement(
    model: nn.Module, data: DeviceMesh, *, apart: bool = True
) -> Callable[[nn.Parameter], Shard | ShardPlacementResult | None]:
    """``shard_placement_fn`` of the FSDP unit of a block: its experts over ``data``, None for the rest.

    ``apart``: ``data`` is a mesh of their own: one unit with two meshes, so that parameters are gathered and
    gradients reduced in the block's hooks. Where a rank has fewer experts than there are shards each expert
    is split, along the hidden size (FSDP splits only dim 0 unevenly). Take it after ``apply_ep``, which makes
    the parameters anew.
    """
    info = FSDPMeshInfo(data, 0) if data.ndim == 1 else HSDPMeshInfo(data, 1, 0)
    shards = data.size(data.ndim - 1)
    found: dict[nn.Parameter, Shard | ShardPlacementResult] = {}
    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        for parameter, hidden in ((experts.gate_up_proj, 2), (experts.down_proj, 1)):
            few = local(parameter).shape[0] < shards and parameter.shape[hidden] % shards == 0
            place = Shard(hidden if few else 0)
            found[parameter] = ShardPlacementResult(place, info) if apart else place
    return lambda parameter: found.get(parameter)


def apply_ep(model: nn.Module, meshes: ExpertMeshes) -> None:
    """Share the routed experts out over ``meshes``, in place.

    Per block and microbatch: an all-to-all of counts, one of the tokens' vectors, one of their weights, and
    one of vectors back; in the backward pass one of vectors each way and one of weights. plan/traffic.py
    predicts those of vectors. Where experts are split over tp too ``meshes.held`` has two axes. Call before
    FSDP wraps the blocks; the parameters become DTensors.
    """
    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        _share_out(experts, meshes, meshes.held.ndim == 2)


def _share_out(experts: Experts, meshes: ExpertMeshes, tensor_split: bool) -> None:
    experts.group = meshes.ep.get_group() if meshes.ep.size() > 1 else None
    # gate and up are halves of dim 1: each is split
    splits = (Shard(0), _StridedShard(1, split_factor=2)), (Shard(0), Shard(2))
    width = 2 if tensor_split else 1
    experts.gate_up_proj = split_parameter(experts.gate_up_proj, meshes.held, splits[0][:width])
    experts.down_proj = split_parameter(experts.down_proj, meshes.held, splits[1][:width])


def split_parameter(
    whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...] | list[Placement]
) -> nn.Parameter:
    """This rank's part of a whole parameter, as one of ``mesh``. Its own storage."""
    part = whole.detach()
    for axis, placement in enumerate(placements):
        ranks, rank = mesh.size(axis), mesh.get_local_rank(axis)
        if isinstance(placement, _StridedShard):
            halves = part.unflatten(placement.dim, (placement.split_factor, ranks, -1))
            part = halves.select(placement.dim + 1, rank).flatten(placement.dim, placement.dim + 1)
        elif isinstance(placement, Shard):
            part = part.chunk(ranks, placement.dim)[rank]
    local = part.clone(memory_format=torch.contiguous_format)
    split = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(split)
