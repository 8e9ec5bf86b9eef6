"""The ledger of a plan's pipeline ranks, number by number: terms, parts of terms, and their sources."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwright.cluster import Device
from shardwright.layout import OFFLOAD_KINDS
from shardwright.plan.accounting import is_trained
from shardwright.plan.block_kinds import block_kinds
from shardwright.plan.memory import Ledger, resting_state
from shardwright.plan.stages import Stage
from shardwright.plan.table import LayoutTable
from shardwright.planfile import MemoryTerms, Plan

FIELD_OF_TERM = {"communicators": "communicator", "context": "context", "margin": "allocator_margin"}
"""Terms that come from a measured number of the device, and the number."""

TRADE_SOURCE = "buffers of all-to-all partners in the node: NVIDIA/nccl issue 1685"
"""Of what experts and Ulysses add to communicators, see plan/communicators.py."""


def memory_terms(ledger: Ledger, row: int) -> MemoryTerms:
    """One row of a ledger, at its peak."""
    return MemoryTerms(
        parameters=round(float(ledger.parameters[row])),
        gradients=round(float(ledger.at_peak.gradients[row])),
        optimizer=round(float(ledger.optimizer[row])),
        activations=round(float(ledger.at_peak.activations[row])),
        logits=round(float(ledger.at_peak.logits[row])),
        gathered=round(float(ledger.at_peak.gathered[row])),
        communicators=round(float(ledger.communicators[row])),
        context=round(ledger.context),
        margin=round(float(ledger.margin[row])),
    )


def stage_account(plan: Plan, table: LayoutTable, ledger: Ledger) -> dict[str, Any]:
    """One pipeline rank at its peak: terms, which add up to ``total``; parts of ``parameters``; and what
    rests on the host instead, which is no part of them."""
    terms = memory_terms(ledger, 0)
    return {
        "stage": int(ledger.stage.rank[0]),
        "layers": int(ledger.stage.blocks[0]),
        "expert_layers": int(ledger.stage.expert_blocks[0]),
        "microbatches_in_flight": float(ledger.stage.in_flight[0]),
        **terms.model_dump(mode="json"),
        "total": terms.total,
        "allocated": terms.allocated,
        "reserved": terms.reserved,
        "at_rest": {
            "parameters": round(float(ledger.parameters[0])),
            "gradients": round(float(ledger.gradients[0])),
            "optimizer": round(float(ledger.optimizer[0])),
        },
        **_parts_of_parameters(plan, table, ledger.stage),
        "host_optimizer": _host_optimizer(plan, table, ledger.stage),
        "host_activations": _host_activations(plan, table, ledger.stage),
    }


def _parts_of_parameters(plan: Plan, table: LayoutTable, stage: Stage) -> dict[str, int]:
    """Of the resting parameters, those of routed experts and, under LoRA, those of the frozen base."""
    experts, _, _ = resting_state(plan.model, plan.job, table, stage, lambda tensor: "ep" in tensor.splits)
    frozen, _, _ = resting_state(
        plan.model, plan.job, table, stage, lambda tensor: not is_trained(plan.job, tensor)
    )
    return {"expert_parameters": _bytes(experts), "frozen_parameters": _bytes(frozen)}


def _host_optimizer(plan: Plan, table: LayoutTable, stage: Stage) -> int:
    """Optimizer state that rests on the host; copies of parameters and gradients there are left out."""
    if "optimizer" not in plan.layout.offload:
        return 0
    kept = table._replace(offload=np.full_like(table.offload, OFFLOAD_KINDS.index("none")))
    return _bytes(resting_state(plan.model, plan.job, kept, stage, lambda tensor: True)[2])


def _host_activations(plan: Plan, table: LayoutTable, stage: Stage) -> int:
    """Saved tensors that rest on the host: of all microbatches in flight."""
    if "activations" not in plan.layout.offload:
        return 0
    saved = saved_by_blocks(plan, table, stage.blocks, stage.expert_blocks)
    return _bytes(saved * stage.in_flight)


def saved_by_blocks(plan: Plan, table: LayoutTable, blocks: Any, expert_blocks: Any) -> Any:
    """What so many blocks, some of them with experts, keep of one microbatch for the backward pass [B]."""
    counts = {"dense": blocks - expert_blocks, "experts": expert_blocks}
    tokens = table.micro_batch * plan.job.seq / table.cp
    return sum(
        counts[kind] * block_kinds(plan.model, plan.job, table, kind).saved_bytes * tokens
        for kind in plan.model.block_kinds
    )


def _bytes(column: Any) -> int:
    return round(float(np.ravel(column)[0]))


# Sources


def term_sources(device: Device) -> dict[str, str]:
    """Where the terms that no formula gives come from, by the device's own words."""
    said = _said(device.source)
    found = {
        term: said.get(field, f"{field} of device {device.name}; its file gives no source for it")
        for term, field in FIELD_OF_TERM.items()
    }
    found["communicators"] += f"; {TRADE_SOURCE}"
    return found


def _said(source: str) -> Mapping[str, str]:
    """Entries of a device's ``source`` by the fields they are of: "context: 0.5 GiB, seen in ..."."""
    text = " ".join(source.split())
    found: dict[str, str] = {}
    for entry in re.split(r"(?<=[.)]) (?=[a-z][a-z0-9_, ]*: )", text):
        head, colon, rest = entry.partition(": ")
        if colon and re.fullmatch(r"[a-z0-9_, ]+", head):
            found |= dict.fromkeys(re.findall(r"\w+", head), rest.rstrip("."))
    return found
