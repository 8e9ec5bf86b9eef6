"""Copies of parameters and gradients that a rank makes beside its products, all limited by memory bandwidth.

``fully_shard`` copies what an all-gather brought out of its buffer, gradients into the buffer of the
reduce-scatter, and adds gradients that wait for the last microbatch, all on the stream that computes.

Source: torch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather_copy_out and
foreach_reduce; _fsdp_param.py, to_accumulated_grad_if_needed.
"""

from collections.abc import Mapping

import numpy as np

from shardwright.cluster import Device
from shardwright.job import Job
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.gemm import memory_rate
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD
from shardwright.plan.shards import EXPERT_BLOCK, EXPERTS, TIED, UnitElements
from shardwright.plan.table import Floats, LayoutTable


def copy_time(
    job: Job,
    device: Device,
    table: LayoutTable,
    blocks: Floats,
    with_experts: Floats,
    gathered: Mapping[str, UnitElements],
    trained: Mapping[str, UnitElements],
) -> Floats:
    """Copies of a step on the rank with most blocks [s]. ``gathered`` elements weigh their bytes.

    Stage 3 gathers blocks twice a microbatch, other stages once a step; gradients are reduced every
    microbatch in stages 2 and 3. Those that wait are read, and read and written in the reduced type; the
    first are only widened.
    """
    if not job.program.copies:
        return np.zeros((1,) * table.pp.ndim)
    m, stage = table.microbatches, table.zero_stage
    element, wide = ELEMENT_BYTES[job.precision], WIDE_BYTES[job.precision]
    of_gather = _held(table, blocks, with_experts, gathered, "padded")
    of_gradients = _held(table, blocks, with_experts, trained, "whole")
    split = (table.shard > 1) | (table.expert_shard > 1)
    gathers = np.where(split, np.where(stage == 3, 2 * m, 1), 0)
    copied_in = (element + wide) * np.where(split | (table.dp_replicate > 1), np.where(stage >= 2, m, 1), 0)
    waits = np.where((stage <= 1) & (m > 1), (element + wide) + (m - 1) * (element + 2 * wide), 0)
    return np.asarray((2 * of_gather * gathers + of_gradients * (copied_in + waits)) / memory_rate(device))


def _held(
    table: LayoutTable,
    blocks: Floats,
    with_experts: Floats,
    units: Mapping[str, UnitElements],
    part: str,
) -> Floats:
    """Of all units on a rank; of a pipeline's ends half, as no rank has both."""
    ends = getattr(units[EMBEDDING], part) + getattr(units[HEAD], part)
    ends = np.where(table.pp > 1, 0.5 * (ends + getattr(units[TIED], part)), ends)
    held = (blocks - with_experts) * getattr(units[BLOCK], part) + ends
    if units[EXPERTS].whole.any():
        held = held + with_experts * (getattr(units[EXPERT_BLOCK], part) + getattr(units[EXPERTS], part))
    return np.asarray(held)
