"""A small model of the same kind, for the same layouts: all that makes two programs differ but the size.

Counts that a layout splits (heads, experts, groups, stages, microbatches, ranks) stay; widths, layers,
sequence and vocabulary shrink to the least that every rule still holds for.
"""

import math
from typing import Any

import numpy as np

from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import Mla, ModelSpec
from shardwright.plan.explain import plan_of
from shardwright.planfile import Plan

HIDDEN, WIDTH, HEAD, SEQ = 64, 64, 8, 64
"""Of a small model: hidden size, width of networks, size of a head, tokens of a sequence; or the model's own
if less, and rounded up to what the layouts divide."""

VOCAB = 320
"""Enough for text as bytes with its separator."""


def shrunk_plans(a: Plan, b: Plan, *, own_data: bool) -> tuple[Plan, Plan]:
    """Both plans with a small model and short sequences.

    ``own_data``: tokens are the user's, so that the vocabulary must stay.
    """
    layouts = a.layout, b.layout
    model = shrunk_model(a.model, layouts, keep_vocab=own_data)
    unit = math.lcm(*(2 * layout.cp * layout.tp for layout in layouts))
    seq = min(a.job.seq, _multiple(SEQ, unit))
    left, right = (_shrunk(plan, model, seq) for plan in (a, b))
    return left, right


def shrunk_model(model: ModelSpec, layouts: tuple[Layout, ...], *, keep_vocab: bool) -> ModelSpec:
    """The least of its kind that all ``layouts`` split."""
    tp = math.lcm(*(layout.tp for layout in layouts))
    layers = min(model.layers, max(2, *(layout.pp * layout.chunks for layout in layouts)))
    values: dict[str, Any] = model.model_dump()
    values |= {
        "layers": layers,
        "hidden": min(model.hidden, HIDDEN),
        "ffn": min(model.ffn, _multiple(WIDTH, tp)),
        "vocab": model.vocab if keep_vocab else min(model.vocab, VOCAB),
        "head_size": min(model.head_size, HEAD),
        "no_rope_layers": tuple(i for i in model.no_rope_layers if i < layers),
        "full_attention_layers": tuple(i for i in model.full_attention_layers if i < layers),
        "assumed": (*model.assumed, "shrunk for a comparison of layouts"),
    }
    if model.sliding_window is not None:
        values["sliding_window"] = min(model.sliding_window, SEQ // 2)
    if model.mla is not None:
        half = HEAD // 2
        values["mla"] = _shrunk_mla(model.mla)
        values["head_size"] = min(model.mla.nope_size, half) + min(model.mla.rope_size, half)
    if model.moe is not None:
        values["moe"] = _shrunk_moe(model, layers, tp)
    return ModelSpec.checked(values)


def _shrunk_mla(mla: Mla) -> dict[str, Any]:
    half = HEAD // 2
    small = {
        "nope_size": half,
        "rope_size": half,
        "value_size": HEAD,
        "q_rank": 2 * HEAD,
        "kv_rank": 2 * HEAD,
    }
    values: dict[str, Any] = mla.model_dump()
    return values | {name: min(values[name], size) for name, size in small.items()}


def _shrunk_moe(model: ModelSpec, layers: int, tp: int) -> dict[str, Any]:
    """Experts as many as before, narrow; dense layers only as long as one is left with experts."""
    assert model.moe is not None
    values: dict[str, Any] = model.moe.model_dump()
    values["ffn"] = min(model.moe.ffn, _multiple(WIDTH // 4, tp))
    values["shared_ffn"] = min(model.moe.shared_ffn, _multiple(WIDTH // 4, tp))
    values["first_dense_layers"] = min(model.moe.first_dense_layers, layers - 1, 1)
    values["layer_step"] = min(model.moe.layer_step, layers)
    values["dense_layers"] = tuple(layer for layer in model.moe.dense_layers if layer < layers - 1)
    return values


def _shrunk(plan: Plan, model: ModelSpec, seq: int) -> Plan:
    stages = plan.layout.pp * plan.layout.chunks
    parts = np.array_split(np.arange(model.layers), stages)
    layers = tuple(len(part) for part in parts) if stages > 1 else ()
    layout = Layout.checked(plan.layout.model_dump() | {"stage_layers": layers})
    job = Job.checked(plan.job.model_dump() | {"seq": seq})
    return plan_of(model, job, plan.cluster, layout)


def _multiple(wanted: int, unit: int) -> int:
    return -(-wanted // unit) * unit
