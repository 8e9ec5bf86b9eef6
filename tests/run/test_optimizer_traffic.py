"""What Muon and Adafactor send in a step on real ranks is what the plan says: launches and bytes."""

import pytest
import torch
import torch.distributed as dist
from sharded import ORTHOGONAL, SHAPES, WAYS, groups_of, set_gradients, sharded_module
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.plan import optimizer_traffic
from shardwright.plan.optimizer_traffic import optimizer_exchanges
from shardwright.plan.params import Tensor
from shardwright.plan.table import table_of
from shardwright.run.adafactor import Adafactor
from shardwright.run.launch import run_ranks
from shardwright.run.muon import Muon

LAYOUTS = {
    "fsdp": Layout(dp_shard=2, zero_stage=3),
    "fsdp4": Layout(dp_shard=4, zero_stage=3),
    "hsdp": Layout(dp_replicate=2, dp_shard=2, zero_stage=3),
    "fsdp-tp": Layout(dp_shard=2, tp=2, etp=2, zero_stage=3),
    "fsdp4-tp": Layout(dp_shard=4, tp=2, etp=2, zero_stage=3),
    "fsdp4-experts-by-row": Layout(dp_shard=4, ep=2, zero_stage=3),
}
DENSE = ("up", "wide", "uneven", "few", "down", "narrow", "norm")
NAMES = {
    "fsdp": (*DENSE, "wide_experts"),
    "fsdp4": DENSE,
    "hsdp": (*DENSE, "wide_experts"),
    "fsdp-tp": (*DENSE, "wide_experts"),
    "fsdp4-tp": DENSE,
    "fsdp4-experts-by-row": ("wide_experts",),  # fewer experts than ranks that shard them
}


class Collectives(TorchDispatchMode):
    """Launches and bytes by axis and kind."""

    def __init__(self, axes):
        super().__init__()
        self.axes, self.seen = axes, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        names = {"c10d::allreduce_": "all_reduce", "c10d::alltoall_base_": "all_to_all"}
        if func._schema.name in names:
            name = names[func._schema.name]
            sent, group = (args[0][0], args[1]) if name == "all_reduce" else (args[1], args[2])
            key = self.axes[dist.ProcessGroup.unbox(group).group_name], name
            launches, payload = self.seen.get(key, (0, 0))
            self.seen[key] = launches + 1, payload + sent.nbytes
        return func(*args, **(kwargs or {}))


def sent_by(name, way, names):
    """What rank 0's step sends, as {(axis, kind): (launches, bytes)}."""
    module, mesh, part = sharded_module(way)
    for other in set(SHAPES) - set(names):
        delattr(module, other)
    set_gradients(module, 0, part, names)
    groups = groups_of(module, orthogonal=name == "muon")
    optimizer = Muon(groups, lr=0.1) if name == "muon" else Adafactor(groups, lr=0.1)
    axes = {mesh[axis].get_group().group_name: axis for axis in way.axes}
    with Collectives(axes) as mode:
        optimizer.step()
    return mode.seen


def tensor_of(name, way):
    role = "expert" if len(SHAPES[name]) == 3 else "attention" if name in ORTHOGONAL else "norm"
    tp = {"tp": way.inner[name]} if name in way.inner and "tp" in way.axes else {}
    return Tensor(name, SHAPES[name], role, {"dp_shard": 0, **tp, **({"ep": 0} if role == "expert" else {})})


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
@pytest.mark.parametrize("way", LAYOUTS)
def test_the_plan_is_what_ranks_send(way, optimizer, monkeypatch):
    tensors = [tensor_of(name, WAYS[way]) for name in NAMES[way]]
    monkeypatch.setattr(optimizer_traffic, "unit_tensors", lambda *_: {"block": tensors})
    job = Job(seq=8, global_batch=8, precision="fp64", optimizer=optimizer)
    expected = {}
    for sent in optimizer_exchanges(None, job, table_of([LAYOUTS[way]], 1), {"block": 1.0}):
        axis = "tp" if sent.axis == "tp" else "dp"  # experts are sharded over the same ranks here
        launches, payload = expected.get((axis, sent.collective), (0, 0))
        at_once = optimizer == "adafactor" and launches  # one all-reduce of what both axes' tensors add up
        more = 0 if at_once else int(sent.launches.max())
        expected[axis, sent.collective] = launches + more, payload + int(sent.payload_bytes.max())
    expected = {key: value for key, value in expected.items() if value[0]}
    found = run_ranks(
        sent_by, torch.Size(WAYS[way].degrees).numel(), optimizer, WAYS[way], NAMES[way], timeout_s=60
    )
    assert found[0] == expected
