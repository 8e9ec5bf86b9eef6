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
from shardwright.run.mesh import ExpertMeshes


def expert_placement(
    model: nn.Module, data: DeviceMesh
) -> Callable[[nn.Parameter], ShardPlacementResult | None]:
    """``shard_placement_fn`` of the FSDP unit of a block: its experts over ``data``, the rest as the unit.

    One unit with two meshes, so that parameters are gathered and gradients reduced in the block's hooks. Take
    it after ``apply_ep``, which makes the parameters anew.
    """
    experts = {p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    info = FSDPMeshInfo(data, 0) if data.ndim == 1 else HSDPMeshInfo(data, 1, 0)
    result = ShardPlacementResult(Shard(0), info)
    return lambda parameter: result if parameter in experts else None


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
