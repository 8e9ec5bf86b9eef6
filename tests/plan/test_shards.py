"""Shards of tp and of the data axes: local shapes as torch cuts them, heads repeated, nothing lost."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.layout import Layout
from shardwright.model import ModelSpec, preset
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD, parameter_table
from shardwright.plan.shards import local_shape, unit_elements
from shardwright.plan.table import table_of

SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=2, hidden=64, ffn=96, heads=8, kv_heads=2, head_size=8, vocab=259,
    qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True,
)  # fmt: skip
KINDS = (EMBEDDING, BLOCK, HEAD)


def elements(model, tp=1, shard=1):
    layout = Layout(tp=tp, dp_shard=shard, zero_stage=3 if shard > 1 else 0)
    return unit_elements(model, table_of([layout], model.layers))


def cut(tensor, model, tp):
    """The part of rank 0 by torch.chunk; of a key or value matrix never less than a head."""
    dim = tensor.splits.get("tp")
    whole = torch.empty(tensor.shape, device="meta")
    if dim is None:
        return tensor.shape
    parts = tp
    if dim == 0 and tensor.role == "attention" and tensor.shape[0] == model.kv_heads * model.head_size:
        parts = min(tp, model.kv_heads)
    return tuple(torch.chunk(whole, parts, dim)[0].shape)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", [SPEC, preset("llama-3.1-8b"), preset("qwen3-8b"), preset("llama-3.2-1b")])
def test_local_shapes_are_those_of_torch(model, tp):
    for unit in parameter_table(model).units:
        for tensor in unit.tensors:
            rows, width = map(float, local_shape(tensor, model, np.array(tp)))
            shape = cut(tensor, model, tp)
            assert (rows, width) == (shape[0], math.prod(shape[1:])), tensor.name


def test_what_each_matrix_is_cut_by():
    """Heads, feed-forward width and vocabulary; norms and the biases after a sum stay whole."""
    whole = {tensor.name: tensor for unit in parameter_table(SPEC).units for tensor in unit.tensors}
    found = {
        name.removeprefix("model.layers.0."): tuple(map(int, local_shape(t, SPEC, np.array(4))))
        for name, t in whole.items()
    }
    expected = {
        "model.embed_tokens.weight": (65, 64),  # 259 rows on 4 ranks
        "self_attn.q_proj.weight": (2 * 8, 64),
        "self_attn.q_proj.bias": (2 * 8, 1),
        "self_attn.k_proj.weight": (8, 64),  # one of 2 heads, on two ranks each
        "self_attn.v_proj.bias": (8, 1),
        "self_attn.o_proj.weight": (64, 2 * 8),
        "self_attn.o_proj.bias": (64, 1),
        "self_attn.q_norm.weight": (8, 1),
        "mlp.gate_proj.weight": (24, 64),
        "mlp.up_proj.bias": (24, 1),
        "mlp.down_proj.weight": (64, 24),
        "mlp.down_proj.bias": (64, 1),
        "input_layernorm.weight": (64, 1),
        "lm_head.weight": (65, 64),
        "model.norm.weight": (64, 1),
    }
    assert {name: found[name] for name in expected} == expected


@settings(deadline=None)
@given(tp=st.sampled_from([1, 2, 4]), shard=st.integers(1, 9), vocab=st.integers(1, 40))
def test_ranks_of_tp_and_shards_add_up_to_the_whole(tp, shard, vocab):
    """What is split adds up where it divides; what is not stands on every rank."""
    model = SPEC.model_copy(update={"vocab": 4 * vocab, "kv_heads": 4})
    found = elements(model, tp, shard)
    for kind in KINDS:
        unit = parameter_table(model).unit(kind)
        split = sum(t.numel for t in unit.tensors if "tp" in t.splits)
        assert tp * (found[kind].whole[0] - (unit.numel - split)) == split
        assert found[kind].padded[0] == shard * found[kind].shard[0] >= found[kind].whole[0]
        assert found[kind].padded[0] - found[kind].whole[0] < shard * sum(
            t.numel / t.shape[0] for t in unit.tensors
        )


@settings(deadline=None)
@given(vocab=st.integers(1, 300), tp=st.sampled_from([1, 2, 4, 8]), shard=st.integers(1, 70))
def test_without_tp_shards_are_those_of_the_unit_itself(vocab, tp, shard):
    model = SPEC.model_copy(update={"vocab": vocab})
    found = elements(model, 1, shard)
    for kind in KINDS:
        unit = parameter_table(model).unit(kind)
        assert found[kind].whole[0] == unit.numel
        assert found[kind].shard[0] == unit.shard_numel(np.array(shard))


@settings(deadline=None)
@given(vocab=st.integers(1, 300), ffn=st.integers(1, 100))
def test_more_ranks_never_hold_more(vocab, ffn):
    model = SPEC.model_copy(update={"vocab": vocab, "ffn": 8 * ffn})
    layouts = [
        Layout(tp=tp, dp_shard=shard, zero_stage=3 if shard > 1 else 0)
        for tp in (1, 2, 4, 8) for shard in (1, 2, 3, 8)
    ]  # fmt: skip
    for unit in unit_elements(model, table_of(layouts, model.layers)).values():
        held = np.broadcast_to(unit.shard, 16).reshape(4, 4)
        assert (np.diff(held, axis=0) <= 0).all()
        assert (np.diff(held, axis=1) <= 0).all()
        assert (np.diff(np.broadcast_to(unit.whole, 16).reshape(4, 4), axis=0) <= 0).all()


def test_an_absent_unit_has_no_elements():
    tied = SPEC.model_copy(update={"tied_embeddings": True})
    assert elements(tied, 2, 2)[EMBEDDING].padded.tolist() == [0]
    assert elements(tied, 2, 2)[EMBEDDING].last_share == 0
