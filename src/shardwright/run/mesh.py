"""The mesh of ranks, and the process group under it. Private parts of torch's DeviceMesh are used here only."""

import datetime

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.axes import MESH_ORDER, joined_axis
from shardwright.layout import Layout

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes along which ranks hold different sequences."""


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of ``layout`` over all ranks, outermost axis first."""
    degrees = tuple(getattr(layout, axis) for axis in MESH_ORDER)
    return init_device_mesh(device_type, degrees, mesh_dim_names=MESH_ORDER)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks with different sequences as one axis, named after the axes of more than one rank it joins."""
    wide = tuple(axis for axis in DATA_AXES if mesh[axis].size() > 1)
    if len(wide) < 2:
        return mesh[wide[0] if wide else DATA_AXES[-1]]
    return mesh[wide]._flatten(joined_axis(wide))


def init_process_group(
    device: torch.device, init_method: str, rank: int, world: int, timeout_s: float, backend: str | None = None
) -> None:
    """Join the ranks; a collective that waits longer than ``timeout_s`` ends the run."""
    dist.init_process_group(
        backend or ("nccl" if device.type == "cuda" else "gloo"),
        init_method=init_method,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
