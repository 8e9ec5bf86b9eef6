"""Live models: one unit for everything, units by block, experts as units, and what the optimizer updates."""

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from shardwright.doctor.live import diagnose_model, setting_of_model, units_of  # noqa: E402
from shardwright.run.launch import run_ranks  # noqa: E402


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


def block():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def build(kind):
    model = nn.Sequential(nn.Embedding(32, 8), block(), block(), Mixture())
    if kind == "half":
        model = model.bfloat16()
    if kind == "experts":
        for expert in model[3].experts:
            fully_shard(expert)
    if kind != "root":
        for module in model:
            fully_shard(module)
    fully_shard(model)
    return model


def look(kind):
    model = build(kind)
    units = units_of(model)
    setting = setting_of_model(model)
    causes = [(f["cause"], f["certainty"]) for f in diagnose_model(model)]
    return units, setting.units, setting.dp_shard, causes, dist.get_world_size()


BLOCKS = {"0": 256, "1": 280, "2": 280, "3": 288}
EXPECTED = {
    "root": ({"": 1104}, "root", [("root_only_unit", "likely")]),
    "blocks": (BLOCKS, "blocks", []),
    "half": (BLOCKS, "blocks", [("low_precision_master", "certain")]),
    "experts": (
        {"0": 256, "1": 280, "2": 280} | {f"3.experts.{i}": 72 for i in range(4)},
        "experts",
        [("experts_as_units", "likely")],
    ),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_model(kind):
    units, name, causes = EXPECTED[kind]
    for found in run_ranks(look, 2, kind):
        assert found == (units, name, 2, causes, 2)
