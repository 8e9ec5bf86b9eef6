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


class RankMesh(NamedTuple):
    """The mesh of all ranks, and axes of it joined into one.

    ``data``: ranks with different sequences. ``shard``: dp_shard with cp, over which parameters are split.
    ``fsdp``: what ``fully_shard`` is given, ``shard`` with the replicas outside where there are any.
    ``tokens``: ranks with different tokens, ``data`` with cp.
    """

    root: DeviceMesh
    data: DeviceMesh
    shard: DeviceMesh
    fsdp: DeviceMesh
    tokens: DeviceMesh

    def __getitem__(self, axis: str) -> DeviceMesh:
        return self.root[axis]

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.root.device_type

    def axes(self) -> tuple[DeviceMesh, ...]:
        """One mesh for every axis, and the joined ones."""
        return (*(self.root[name] for name in self.root.mesh_dim_names), self.data, self.shard, self.tokens)


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
    )


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
