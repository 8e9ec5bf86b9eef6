"""The mesh of ranks, and the process group under it.

Private parts of torch's DeviceMesh are used here only.
"""

import datetime
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.axes import DATA_AXES, joined_axis
from shardwright.layout import Layout

EXPERT_SHARD = "expert_shard"
"""Axis of the ranks that hold the same experts and split their parameters as the ZeRO stage says."""


class ExpertMeshes(NamedTuple):
    """``held``: ranks that hold different parts of the experts (ep, or ep x tp). ``data``: ranks that hold
    the same part, expert_shard, or dp_replicate x expert_shard."""

    ep: DeviceMesh
    held: DeviceMesh
    data: DeviceMesh


class RankMesh(NamedTuple):
    """The mesh of all ranks, and axes of it joined into one.

    ``data``: ranks with different sequences. ``shard``: dp_shard with cp, over which parameters are split.
    ``fsdp``: what ``fully_shard`` is given, ``shard`` with the replicas outside where there are any.
    ``tokens``: ranks with different tokens, ``data`` with cp. ``experts``: the expert axes, where the layout
    shares out or splits experts.
    """

    root: DeviceMesh
    data: DeviceMesh
    shard: DeviceMesh
    fsdp: DeviceMesh
    tokens: DeviceMesh
    experts: ExpertMeshes | None

    def __getitem__(self, axis: str) -> DeviceMesh:
        return self.root[axis]

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.root.device_type

    def axes(self) -> tuple[DeviceMesh, ...]:
        """One mesh for every axis, and the joined ones."""
        joined = (self.data, self.shard, self.tokens)
        experts = () if self.experts is None else (self.experts.ep, self.experts.data[EXPERT_SHARD])
        return (*(self.root[name] for name in self.root.mesh_dim_names), *joined, *experts)


def build_mesh(layout: Layout, device_type: str) -> RankMesh:
    """The mesh of ``layout`` over all ranks, its axes in the layout's order.

    A joined axis is named after those of its axes that have more than one rank.
    """
    degrees = tuple(getattr(layout, axis) for axis in layout.order)
    root = init_device_mesh(device_type, degrees, mesh_dim_names=layout.order)
    joined: dict[tuple[str, ...], DeviceMesh] = {}

    def join(*axes: str) -> DeviceMesh:
        wide = tuple(axis for axis in axes if getattr(layout, axis) > 1) or axes[-1:]
        if wide not in joined:
            joined[wide] = root[wide]._flatten(joined_axis(wide)) if len(wide) > 1 else root[wide[0]]
        return joined[wide]

    shard = join("dp_shard", "cp") if layout.shard > 1 else root["dp_shard"]
    replicated = layout.dp_replicate > 1
    return RankMesh(
        root=root,
        data=join(*DATA_AXES),
        shard=shard,
        fsdp=DeviceMesh._concatenate([root["dp_replicate"], shard]) if replicated else shard,
        tokens=join(*DATA_AXES, "cp"),
        experts=expert_meshes(root, layout.ep, layout.etp) if max(layout.ep, layout.etp) > 1 else None,
    )


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


def init_process_group(
    device: torch.device,
    init_method: str,
    rank: int,
    world: int,
    timeout_s: float,
    backend: str | None = None,
) -> None:
    """Join the ranks; a collective that waits longer than ``timeout_s`` ends the run."""
    dist.init_process_group(
        backend or ("nccl" if device.type == "cuda" else "gloo"),
        init_method=init_method,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
