"""A live model: its FSDP units, their shares and the type that the optimizer updates, before any failure."""

import re
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardwright.doctor.evidence import Evidence
from shardwright.doctor.finding import Source
from shardwright.doctor.layout import layout_findings
from shardwright.doctor.setting import Setting

EXPERT = re.compile(r"(?:^|\.)experts\.\d+(?:\.|$)")


def units_of(model: nn.Module) -> dict[str, int]:
    """Parameters of every FSDP unit by its module's name ("" is the root), those of units inside it left out.

    Sizes are of whole tensors: a DTensor knows its own, and FSDP1's flat shards are counted by their unit's
    shapes where it keeps them.
    """
    wrapped = [
        name
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule | FullyShardedDataParallel)
    ]
    units = dict.fromkeys(wrapped, 0)
    for name, parameter in model.named_parameters():
        owners = [unit for unit in wrapped if not unit or name.startswith(f"{unit}.")]
        if owners:
            units[max(owners, key=len)] += parameter.numel()
    return {name: count for name, count in units.items() if count}


def setting_of_model(model: nn.Module) -> Setting:
    """What a model shows of its sharding."""
    units = units_of(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    widths = {parameter.element_size() for parameter in trained if parameter.is_floating_point()}
    sharded = [parameter for parameter in trained if isinstance(parameter, DTensor)]
    kind = None
    if units:
        kind = "root" if len(units) == 1 and "" in units else "blocks"
        kind = "experts" if any(EXPERT.search(name) for name in units) else kind
    shards = max((parameter.device_mesh.size() for parameter in sharded), default=None)
    return Setting(
        source=Source("live model", None, f"{type(model).__name__}: {len(units)} FSDP units"),
        framework="live",
        world=dist.get_world_size() if dist.is_initialized() else None,
        zero_stage=3 if units else None,
        dp_shard=shards,
        units=kind,
        master_bytes=min(widths) if widths else None,
        parameters=float(total),
        experts=_experts(model),
        other={"units": units, "largest_share": max(units.values(), default=0) / max(total, 1)},
    )


def _experts(model: nn.Module) -> int | None:
    """Routed experts of a layer, if they are modules in a list called experts."""
    counts = [
        len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts"
    ]
    return max(counts, default=None)


def diagnose_model(model: nn.Module) -> list[dict[str, Any]]:
    """Findings on a live model's layout, as ``doctor --json`` prints them."""
    return [finding.document() for finding in layout_findings(Evidence(settings=[setting_of_model(model)]))]
