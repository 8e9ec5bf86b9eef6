"""Expert axes: whole experts shared out over ep, or each expert's matrices split over tp (etp) besides.

Private parts of torch's DeviceMesh are used as run/mesh.py uses them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwright.axes import joined_axis
from shardwright.run.experts import Experts, MoE, OutputGate, SharedExperts
from shardwright.run.router import Router
from shardwright.run.tp_region import TpRegion

EXPERT_SHARD = "expert_shard"
"""Axis of the ranks that hold the same experts and split their parameters as the ZeRO stage says."""


class ExpertMeshes(NamedTuple):
    """``held``: ranks that hold different parts of the experts (ep, or ep x tp). ``data``: ranks that hold
    the same part, expert_shard, or dp_replicate x expert_shard."""

    ep: DeviceMesh
    held: DeviceMesh
    data: DeviceMesh


def expert_meshes(root: DeviceMesh, ep: int, etp: int) -> ExpertMeshes:
    """Cut the expert axes out of the ranks of dp_shard x cp x tp of ``root``, ep innermost.

    Experts split over tp (``etp`` = tp) leave tp as it is: ep is cut out of dp_shard x cp.
    """
    names = root.mesh_dim_names or ()
    cut = tuple(name for name in ("dp_shard", "cp", "tp") if name in names and (name != "tp" or etp == 1))
    wide = tuple(name for name in cut if root[name].size() > 1) or cut[:1]
    flat = root[wide]._flatten(joined_axis(wide)) if len(wide) > 1 else root[wide[0]]
    split = flat._unflatten(0, (flat.size() // ep, ep), (EXPERT_SHARD, "ep"))
    data = split[EXPERT_SHARD]
    if "dp_replicate" in names and root["dp_replicate"].size() > 1:
        data = DeviceMesh._concatenate([root["dp_replicate"], data])
    held = split["ep"] if etp == 1 else DeviceMesh._concatenate([split["ep"], root["tp"]])
    return ExpertMeshes(split["ep"], held, data)


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


def apply_ep(
    model: nn.Module, meshes: ExpertMeshes, *, tp: DeviceMesh | None = None, sp: bool = False
) -> None:
    """Share the routed experts out over ``meshes``, in place; with ``tp`` split the rest of each MoE over it.

    Per block and microbatch: an all-to-all of counts, one of the tokens' vectors, one of their weights, and
    one of vectors back; in the backward pass one of vectors each way and one of weights. plan/traffic.py
    predicts those of vectors. Where experts are split over tp too (``meshes.held`` has two axes), a MoE
    gathers tp's tokens first and adds up its ranks' parts at the end; else its shared experts alone do. Call
    before FSDP wraps the blocks; the parameters become DTensors, whole or split.
    """
    tensor_split = meshes.held.ndim == 2
    for moe in [module for module in model.modules() if isinstance(module, MoE)]:
        _share_out(moe.experts, meshes, tensor_split)
        if tp is None or tp.size() == 1:
            continue
        region = TpRegion(tp, sp)
        if tensor_split:
            moe.region, moe.gate.repeats = region, tp.size()
        for module in moe.modules():
            if isinstance(module, SharedExperts):
                module.region = None if tensor_split else region
                for part, dim in ((module.gate_proj, 0), (module.up_proj, 0), (module.down_proj, 1)):
                    part.weight = _split(part.weight, tp, [Shard(dim)])
            elif isinstance(module, Router | OutputGate):
                module.weight = _split(module.weight, tp, [Replicate()])


def _share_out(experts: Experts, meshes: ExpertMeshes, tensor_split: bool) -> None:
    experts.group = meshes.ep.get_group() if meshes.ep.size() > 1 else None
    # gate and up are halves of dim 1: each is split
    splits = (Shard(0), _StridedShard(1, split_factor=2)), (Shard(0), Shard(2))
    width = 2 if tensor_split else 1
    experts.gate_up_proj = _split(experts.gate_up_proj, meshes.held, splits[0][:width])
    experts.down_proj = _split(experts.down_proj, meshes.held, splits[1][:width])


def _split(
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
