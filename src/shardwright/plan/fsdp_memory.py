"""What programs on fully sharded data parallelism allocate at the peak of a step, as torchtitan is written.

Its blocks keep what the runtime's own keep (plan/block_steps.py) or, under selective recomputation, every
second product; its loss widens logits to fp32 and takes them whole. Gathered are the embedding, the head, and
three blocks at a time; in a pipeline all of a stage, with its gradients.

Source: pytorch/torchtitan torchtitan/distributed/fsdp.py and components/loss.py; shared FORMULAE 2.3 to 2.7.
"""

from collections.abc import Sequence

import numpy as np

from shardwright.job import Job
from shardwright.layout import OFFLOAD_KINDS, Layout
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, Split, block_activations
from shardwright.plan.amounts import unit_amounts
from shardwright.plan.holdings import OFFLOADED_BLOCKS
from shardwright.plan.megatron_memory import Peak, heaviest
from shardwright.plan.memory import resting_state
from shardwright.plan.other_runtimes import cross_entropy_bytes, torchtitan_selective_saved_bytes
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD
from shardwright.plan.shards import EXPERT_BLOCK, EXPERTS
from shardwright.plan.stages import Stage, all_stages
from shardwright.plan.table import Floats, LayoutTable, table_of

UPCAST_LOGIT = float(cross_entropy_bytes(1, upcast=True).forward)
"""Bytes of a logit that a loss in fp32 has at once."""

BLOCKS_AT_ONCE = 3
"""Gathered: at work, its buffer on the way out, the next one's on its way in."""


def fsdp_peak(
    model: ModelSpec,
    job: Job,
    layouts: Sequence[Layout],
    logit_bytes: float = UPCAST_LOGIT,
    modules: Sequence[str] = (),
) -> Peak:
    """Of each layout, the pipeline rank that has most allocated [B]."""
    table = table_of(layouts, model.layers)
    saved = np.array([_kept(model, job, layout) for layout in layouts])
    work = np.array([_working(model, job, layout) for layout in layouts])
    every = all_stages(table, model)
    return heaviest(_of_ranks(model, job, table, every, saved, work, logit_bytes))


def _of_ranks(
    model: ModelSpec,
    job: Job,
    table: LayoutTable,
    stage: Stage,
    saved: Floats,
    work: Floats,
    logit_bytes: float,
) -> Peak:
    tokens = table.micro_batch * job.seq / table.cp
    units = unit_amounts(model, job, table)
    block = units[BLOCK].gathered + units[EXPERT_BLOCK].gathered + units[EXPERTS].gathered
    gradient = units[BLOCK].whole + units[EXPERT_BLOCK].whole + units[EXPERTS].whole
    ends = stage.embedding * units[EMBEDDING].gathered + stage.head * units[HEAD].gathered
    end_gradients = stage.embedding * units[EMBEDDING].whole + stage.head * units[HEAD].whole
    whole = stage.blocks * (block + gradient) + ends + end_gradients
    split = (table.shard > 1) & (table.zero_stage > 0)
    at_once = np.minimum(BLOCKS_AT_ONCE, stage.blocks)
    gathered = np.where(table.pp > 1, whole, np.where(split, ends + at_once * block, 0.0))
    loss = stage.head * logit_bytes * model.vocab / table.tp
    resident = stage.blocks * saved
    if (table.offload >= OFFLOAD_KINDS.index("activations")).any():
        away = table.offload >= OFFLOAD_KINDS.index("activations")
        resident = np.where(away, np.minimum(stage.blocks, OFFLOADED_BLOCKS) * saved, resident)
    state = sum(resting_state(model, job, table, stage, lambda tensor: True), np.zeros(1))
    return Peak(
        np.where(stage.valid, state, 0.0),
        np.where(stage.valid, stage.in_flight * resident * tokens, 0.0),
        np.where(stage.valid, gathered + (loss + work) * tokens, 0.0),
    )


def _working(model: ModelSpec, job: Job, layout: Layout) -> float:
    """A block that is computed again, for each token of a rank [B]. Beside the loss, whose memory the
    allocator keeps in pieces of another size."""
    if layout.recompute != "full":
        return 0.0
    split = Split(layout.tp, layout.sp, layout.cp, layout.cp_kind, layout.ep, layout.etp)
    return max(block_activations(model, job, "none", split, kind).saved_bytes for kind in model.block_kinds)


def _kept(model: ModelSpec, job: Job, layout: Layout) -> float:
    """A block, the mean, for each token of a rank [B]."""
    residual = ELEMENT_BYTES[job.precision] * model.hidden / (layout.tp if layout.sp else 1)
    split = Split(layout.tp, layout.sp, layout.cp, layout.cp_kind, layout.ep, layout.etp)
    plain = np.mean(
        [block_activations(model, job, "none", split, kind).saved_bytes for kind in model.block_kinds]
    )
    if layout.recompute == "full":
        every = layout.recompute_every
        return float(residual / every + plain * (1 - 1 / every))
    if layout.recompute == "selective":
        return torchtitan_selective_saved_bytes(model) / layout.tp
    return float(plain)
