"""What Megatron allocates at the peak of a step: state by its accounting, activations as its modules keep.

With sp the normed inputs of products stay split and are gathered again in backward; the other kept tensors of
a block are those of the runtime's own (plan/block_steps.py), for its fused kernels keep the same. Without a
fused attention kernel, scores and dropout masks are kept (Korthikanti et al. 2022). Step by step this follows
Megatron-LM megatron/core/tensor_parallel and transformer, and pipeline_parallel/schedules.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, Kind, Split, block_activations
from shardwright.plan.memory import resting_state
from shardwright.plan.other_runtimes import gpt_block_activation_bytes
from shardwright.plan.stages import Stage, all_stages
from shardwright.plan.table import Floats, LayoutTable, table_of

SOFTMAX_BYTES = 4
"""Of a logit, at the head's backward pass: its softmax in fp32, in whose place the gradient is made."""

MODULES = {
    "mla_up_proj": ("q", "q_raw", "k", "k_nope", "v"),
    "layernorm": ("norm1", "norm2"),
    "moe_act": ("expert_product", "expert_activation"),
    "mlp": ("gate", "up", "product", "activation"),
    "shared_experts": ("shared_gate", "shared_up", "shared_product"),
}
"""Tensors that --recompute-modules does not keep. Source: megatron/core/transformer/transformer_config.py."""

NARROW_INPUTS = ("norm1", "norm2", "attention", "product", "activation", "expert_input", "expert_product")
"""Inputs of products that Transformer Engine keeps in 8 bits where it multiplies in 8 bits."""

HEAD_GRADIENT_BYTES = 4
"""Of an element of the head's weight gradient, before it is added to the main one. Calibrated, as the one
above: SimuMax's allocated peaks of models with the same head and other depths (MooreThreads/SimuMax)."""


class Peak(NamedTuple):
    """Bytes that the heaviest pipeline rank has allocated, by kind; a row a layout."""

    state: Floats
    activations: Floats
    working: Floats  # logits and the head's gradient, or a block's own tensors

    @property
    def allocated(self) -> Floats:
        """All of it."""
        return self.state + self.activations + self.working


def megatron_peak(
    model: ModelSpec,
    job: Job,
    layouts: Sequence[Layout],
    softmax_bytes: float = SOFTMAX_BYTES,
    modules: Sequence[str] = (),
) -> Peak:
    """Of each layout, the rank that has most allocated [B]; ``modules`` are computed again."""
    table = table_of(layouts, model.layers)
    dropped = frozenset(name for module in modules for name in MODULES.get(module, ()))
    kept = {kind: _kept(model, job, layouts, kind, dropped) for kind in model.block_kinds}
    return heaviest(_of_ranks(model, job, table, all_stages(table, model), kept, softmax_bytes))


def heaviest(peak: Peak) -> Peak:
    """Of ranks along the first axis, the one that has most allocated in every row."""
    most = np.argmax(peak.allocated, axis=0)[None]
    return Peak(*(np.take_along_axis(part, most, axis=0)[0] for part in np.broadcast_arrays(*peak)))


class _Kept(NamedTuple):
    """Bytes of a block for each token: kept, and at the worst moment besides."""

    saved: Floats
    working: Floats


def _of_ranks(
    model: ModelSpec,
    job: Job,
    table: LayoutTable,
    stage: Stage,
    kept: dict[Kind, _Kept],
    softmax_bytes: float,
) -> Peak:
    tokens = table.micro_batch * job.seq / table.cp
    of_kind = {"dense": stage.blocks - stage.expert_blocks, "experts": stage.expert_blocks}
    saved = sum((of_kind[kind] * part.saved for kind, part in kept.items()), np.zeros(1))
    work = np.max([np.where(of_kind[kind] > 0, part.working, 0.0) for kind, part in kept.items()], axis=0)
    by_sequence = np.where(table.sp == 1, table.tp, 1)
    vocab = model.vocab / table.tp
    beside = HEAD_GRADIENT_BYTES * (job.accounting == "megatron")  # others keep it where it is counted
    logits = softmax_bytes * vocab * tokens + beside * vocab * model.hidden
    ends = 2 * ELEMENT_BYTES[job.precision] * model.hidden / by_sequence * tokens
    state = sum(resting_state(model, job, table, stage, lambda tensor: True), np.zeros(1))
    return Peak(
        np.where(stage.valid, state, 0.0),
        np.where(stage.valid, stage.in_flight * saved * tokens, 0.0),
        np.where(stage.valid, np.maximum(stage.head * (logits + ends), work * tokens), 0.0),
    )


def _kept(
    model: ModelSpec, job: Job, layouts: Sequence[Layout], kind: Kind, dropped: frozenset[str]
) -> _Kept:
    """What a block of one kind keeps in each layout."""
    saved, working = np.empty(len(layouts)), np.empty(len(layouts))
    for row, layout in enumerate(layouts):
        split = Split(layout.tp, layout.sp, layout.cp, layout.cp_kind, layout.ep, layout.etp)
        own = block_activations(model, job, "full" if layout.recompute == "full" else "none", split, kind)
        spared = sum(size for name, size in own.saved.items() if name in dropped)
        if job.precision == "fp8":
            spared += sum(own.saved.get(name, 0.0) / 2 for name in NARROW_INPUTS if name not in dropped)
        whole = own.saved_bytes - spared - _gathered_inputs(model, job, layout, kind)
        if job.program.attention == "scores" and kind == "dense":
            whole = _with_scores(model, job, layout)
        if layout.recompute == "full":
            plain = block_activations(model, job, "none", split, kind)
            whole = ELEMENT_BYTES[job.precision] * model.hidden / (layout.tp if layout.sp else 1)
            every = layout.recompute_every
            inside = _with_scores(model, job, layout, plain=True) if _scores(job, kind) else plain.saved_bytes
            whole = whole / every + inside * (1 - 1 / every)
            working[row] = max(inside, max(moment.token_bytes for moment in own.moments))
        else:
            working[row] = max(moment.token_bytes for moment in own.moments) - own.saved_bytes
        saved[row] = whole
    return _Kept(saved, working)


def _scores(job: Job, kind: Kind) -> bool:
    return job.program.attention == "scores" and kind == "dense"


def _gathered_inputs(model: ModelSpec, job: Job, layout: Layout, kind: Kind) -> float:
    """What the runtime's own products keep whole and Megatron's split: the normed inputs of attention and of
    the feed-forward network, for each token [B]."""
    if not layout.sp:
        return 0.0
    alone = kind == "experts" and model.moe is not None and not model.moe.shared_ffn and layout.etp == 1
    count = 1 if alone else 2
    return count * ELEMENT_BYTES[job.precision] * model.hidden * (1 - 1 / layout.tp)


def _with_scores(model: ModelSpec, job: Job, layout: Layout, *, plain: bool = False) -> float:
    """A GPT block with scores and dropout masks, for each token [B]."""
    kind = "none" if plain or layout.recompute == "full" else layout.recompute
    kept = gpt_block_activation_bytes(job.seq, 1, model.hidden, model.heads, kind, layout.tp, layout.sp)
    return float(kept) / job.seq
