"""Buffers of communicators: one for every group, and one for each partner that a rank trades with."""

import numpy as np
import pytest

from shardwright.cluster import device
from shardwright.layout import CONTEXT_KINDS, Layout
from shardwright.plan.communicators import (
    CHANNEL_BUFFERS,
    TRADE_CHANNEL_BUFFERS,
    TRADE_CHANNELS,
    channel_bytes,
    communicator_bytes,
)
from shardwright.plan.table import LayoutTable, table_of
from shardwright.units import GB, GiB, MiB

H100 = device("h100-sxm")
EACH_PARTNER = TRADE_CHANNELS * TRADE_CHANNEL_BUFFERS


def held(layout: Layout, kind=H100) -> float:
    return float(communicator_bytes(kind, table_of([layout], 8))[0])


def sharded(**degrees) -> Layout:
    return Layout(zero_stage=1, **degrees)


def test_a_connection_on_a_channel():
    """LL 524,288 + LL128 4,915,200 + Simple 4,194,304: shared FORMULAE 2.7, fixture 37."""
    assert channel_bytes(1, 1) == CHANNEL_BUFFERS == 9_633_792
    assert channel_bytes(24, 3) == pytest.approx(H100.communicator, rel=0.01)  # 688 MB: nccl issue 964


def test_experts_of_a_node_trade_through_buffers_of_3_gb():
    """8 H100: 7 partners x 32 channels x 10 MiB = 2.19 GiB, and 0.44 of 2 MiB; non-torch memory grew from
    1.06 to 4.34 GB with the first all-to-all. NVIDIA/nccl issue 1685."""
    buffers = held(sharded(dp_shard=8, ep=8)) - held(sharded(dp_shard=8)) - H100.communicator
    assert buffers == 7 * 32 * 12 * MiB
    assert buffers / GiB == pytest.approx(2.19 + 0.44, abs=0.01)
    assert (buffers + H100.communicator) / GB == pytest.approx(4.34 - 1.06, rel=0.08)


@pytest.mark.parametrize(
    ("layout", "groups", "partners"),
    [
        (Layout(), 0, 0),
        (Layout(tp=8), 1, 0),
        (sharded(dp_shard=4, tp=2), 2, 0),
        (sharded(dp_replicate=2, dp_shard=4), 3, 0),  # and the data axes joined
        (sharded(dp_shard=16, ep=16), 2, 7),  # 8 of 16 in a node
        (sharded(dp_shard=8, ep=4), 3, 3),  # and expert_shard
        (sharded(dp_shard=8, tp=4, sp=True, ep=8, etp=4), 3, 1),  # 4 apart: 2 in a node
        (sharded(dp_shard=4, tp=8, sp=True, ep=4, etp=8), 3, 0),  # one in a node
        (sharded(cp=4, cp_kind="ulysses"), 1, 3),
        (sharded(cp=4, cp_kind="ring"), 1, 0),
        (sharded(cp=4, cp_kind="ulysses", tp=4), 2, 1),
    ],
)
def test_groups_and_partners(layout, groups, partners):
    assert held(layout) == groups * H100.communicator + partners * EACH_PARTNER


def test_cpu_ranks_hold_none():
    assert held(sharded(dp_shard=8, ep=8), device("cpu")) == 0


def test_columns_broadcast():
    columns = {field: np.ones((1, 1, 1), np.int64) for field in LayoutTable._fields}
    columns |= {"order": np.zeros(1, np.int64), "cp_kind": np.array([0, CONTEXT_KINDS.index("ulysses")])}
    columns["dp_shard"] = np.array([1, 2, 8]).reshape(3, 1, 1)
    columns["cp"] = np.array([1, 4]).reshape(2, 1)
    grid = communicator_bytes(H100, LayoutTable(**columns))
    assert grid.shape == (3, 2, 2)
    for i, j, k in np.ndindex(3, 2, 2):
        row = {name: np.broadcast_to(columns[name], (3, 2, 2))[i, j, k].reshape(1) for name in columns}
        assert grid[i, j, k] == communicator_bytes(H100, LayoutTable(**row))[0]
    assert all(grid[0, 0, k] == 0 for k in range(2))
