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
    """The mesh of all ranks, and the data axes of it joined into one."""

    root: DeviceMesh
    data: DeviceMesh

    def __getitem__(self, axis: str) -> DeviceMesh:
        return self.root[axis]

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.root.device_type

    def axes(self) -> tuple[DeviceMesh, ...]:
        """One mesh for every axis, and the joined one."""
        return (*(self.root[name] for name in DATA_AXES), self.data)


def build_mesh(layout: Layout, device_type: str) -> RankMesh:
    """The mesh of ``layout`` over all ranks, outermost axis first.

    The joined axis is named after the data axes of more than one rank.
    """
    degrees = tuple(getattr(layout, axis) for axis in DATA_AXES)
    root = init_device_mesh(device_type, degrees, mesh_dim_names=DATA_AXES)
    wide = tuple(axis for axis in DATA_AXES if getattr(layout, axis) > 1)
    if len(wide) > 1:
        return RankMesh(root, root[wide]._flatten(joined_axis(wide)))
    return RankMesh(root, root[wide[0] if wide else DATA_AXES[-1]])


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
