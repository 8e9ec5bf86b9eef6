"""Memory of communicators: the buffers that NCCL holds for every group a rank belongs to."""

import numpy as np

from shardwright.axes import MESH_ORDER
from shardwright.cluster import Device
from shardwright.layout import CONTEXT_KINDS
from shardwright.plan.placement import EXPERT_SHARD, Placement, placements
from shardwright.plan.table import Floats, Ints, LayoutTable
from shardwright.units import MiB

CHANNEL_BUFFERS = 524_288 + 4_915_200 + 4_194_304
"""Bytes of one connection on one channel: protocols LL, LL128 and Simple. Source: NVIDIA/nccl 2.30.7
src/init.cc:810-813; shared FORMULAE 2.7."""

TRADE_CHANNELS = 32
TRADE_CHANNEL_BUFFERS = (10 + 2) * MiB
"""Channels to each partner of an all-to-all in a node, and the bytes of one. Source: buffers logged on 8
H100, NVIDIA/nccl issue 1685."""


def channel_bytes(channels: int, connections: int) -> int:
    """Buffers of a communicator with so many connections on each of its channels [B].

    They do not grow with the number of ranks beyond a few nodes. A device's ``communicator``, measured,
    stands for it: 688 MB are 71 connections on a channel each.
    """
    return channels * connections * CHANNEL_BUFFERS


def communicator_bytes(device: Device, table: LayoutTable) -> Floats:
    """What a rank's communicators hold, over all axes [B].

    Every group of more than one rank has ``device.communicator`` (its first and further ones alike). Where
    experts or heads are traded, buffers for each partner in the node come on top; for those beyond it there
    is no measured figure, and none is counted. CPU ranks hold none.

    Source: 8 H100 took 3.28 GB more after their first all-to-all, NVIDIA/nccl issue 1685.
    """
    places = placements(table, ("cp", "ep", EXPERT_SHARD))
    ulysses = table.cp_kind == CONTEXT_KINDS.index("ulysses")
    partners = _partners(places["ep"], device) + np.where(ulysses, _partners(places["cp"], device), 0)
    split_experts = (table.ep > 1) & (places[EXPERT_SHARD].degree > 1)
    counted = (
        *((getattr(table, axis) > 1) for axis in (*MESH_ORDER, "ep")),
        (table.dp_replicate > 1) & (table.shard > 1),
        split_experts,
    )
    groups = sum((group.astype(np.int64) for group in counted), np.zeros(1, np.int64))
    partner_bytes = 0.0 if device.kind == "cpu" else float(TRADE_CHANNELS * TRADE_CHANNEL_BUFFERS)
    return np.asarray(device.communicator * groups + partners * partner_bytes)


def _partners(place: Placement, device: Device) -> Ints:
    """Other members of a group in the same node."""
    near = np.clip(device.gpus_per_node // place.stride, 1, place.degree // place.blocks)
    return np.asarray(near - 1)
