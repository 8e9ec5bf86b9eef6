"""Activations of a block: published numbers, other runtimes' forms, and a real block measured to the byte."""

import weakref
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.layout import KEPT_BY_SELECTIVE, RECOMPUTE_KINDS
from shardwright.model import ModelSpec, preset
from shardwright.plan.activations import (
    Split,
    block_activations,
    gpt_block_activation_bytes,
    llama_block_saved_bytes,
    rotary_table_bytes,
)
from shardwright.plan.bubble import in_flight_chunks
from shardwright.run.kernels import wide
from shardwright.run.model import Block, Transformer, rotary_tables
from shardwright.run.recompute import apply_recompute
from shardwright.units import GiB

GB = 1e9
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def spec_of(**changes):
    values = {
        "name": "tiny", "model_type": "llama", "layers": 1, "hidden": 32, "ffn": 48, "heads": 4,
        "kv_heads": 2, "head_size": 16, "vocab": 64,
    }  # fmt: skip
    return ModelSpec(**(values | changes))


SPECS = {
    "grouped": spec_of(),
    "multi_head": spec_of(kv_heads=4, head_size=8),
    "one_key_head": spec_of(kv_heads=1),
    "qk_norm": spec_of(qk_norm=True, model_type="qwen3"),
    "bias": spec_of(qkv_bias=True, out_bias=True, mlp_bias=True),
    "qk_norm_bias": spec_of(qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True),
}


# The GPT block


@pytest.mark.parametrize(
    ("recompute", "gigabytes"), [("none", 104.152956928), ("selective", 18.253611008), ("full", 1.073741824)]
)
def test_32_gpt_blocks(recompute, gigabytes):
    """s 4096, b 1, h 4096, a 32: an article that is much read prints 104.13 for the first, a slip."""
    assert 32 * gpt_block_activation_bytes(4096, 1, 4096, 32, recompute) == gigabytes * GB


def test_selective_recomputation_of_gpt_3_saves_70_percent():
    """arXiv:2205.05198, section 5: 5*a*s/h is 80 for the 175 B model, so 34 of 114 bytes are left."""
    none, selective = (gpt_block_activation_bytes(2048, 1, 12288, 96, kind) for kind in ("none", "selective"))
    assert none == 2048 * 12288 * 114
    assert selective / none == 34 / 114


class Gpt(NamedTuple):
    """A model of arXiv:2205.05198, table 3, and how it is split; tp is 8 and s 2048."""

    a: int
    h: int
    layers: int
    b: int
    p: int
    v: int

    def activations(self, recompute, tp=8, sp=False):
        """Of the first pipeline rank, which holds the most in flight [GiB]."""
        block = gpt_block_activation_bytes(2048, self.b, self.h, self.a, recompute, tp, sp)
        schedule = "Interleaved1F1B" if self.v > 1 else "1F1B"
        chunks = in_flight_chunks(schedule, self.p, self.v, 8 * self.p, 0)
        return float(block * self.layers / (self.p * self.v) * chunks / GiB)


GPTS = {
    "22B": Gpt(64, 6144, 48, b=4, p=1, v=1),
    "175B": Gpt(96, 12288, 96, b=1, p=8, v=3),
    "530B": Gpt(128, 20480, 105, b=1, p=35, v=3),
    "1T": Gpt(160, 25600, 128, b=1, p=64, v=1),
}


@pytest.mark.parametrize(
    ("name", "none", "both"),
    [("22B", 59.25, 9.5625), ("175B", 66.84375, 12.3515625), ("530B", 114.0234375, 23.076171875),
     ("1T", 131.25, 26.5625)],
)  # fmt: skip
def test_activations_of_four_gpts(name, none, both):
    """arXiv:2205.05198, figure 1, with tp alone, and with sp and selective recomputation; as
    calculon-ai/calculon validation.py prints them."""
    assert GPTS[name].activations("none") == pytest.approx(none, rel=1e-12)
    assert GPTS[name].activations("selective", sp=True) == pytest.approx(both, rel=1e-12)


@pytest.mark.parametrize(
    ("recompute", "sp", "percent"),
    [("none", True, 61.96), ("selective", False, 56.52), ("selective", True, 18.48), ("full", False, 8.70)],
)
def test_what_sp_and_recomputation_leave_of_gpt_3(recompute, sp, percent):
    """arXiv:2205.05198, figure 7, in percent of tp alone; full keeps the whole input there."""
    gpt = GPTS["175B"]
    assert round(100 * gpt.activations(recompute, sp=sp) / gpt.activations("none"), 2) == percent


@settings(deadline=None)
@given(tp=st.sampled_from([1, 2, 4, 8]), recompute=st.sampled_from(RECOMPUTE_KINDS), sp=st.booleans())
def test_sp_divides_all_by_tp_and_tp_alone_not_the_norms(tp, recompute, sp):
    one, split = (gpt_block_activation_bytes(2048, 1, 4096, 32, recompute, n, sp) for n in (1, tp))
    whole = 0 if sp else {"none": 10, "selective": 10, "full": 2}[recompute] * 2048 * 4096
    assert split == pytest.approx(whole + (one - whole) / tp)


@settings(deadline=None)
@given(s=st.integers(1, 4096), b=st.integers(1, 8), a=st.integers(1, 64))
def test_gpt_formula_broadcasts_and_grows(s, b, a):
    columns = np.array([s, s + 1]), b, 1024, a
    found = {kind: gpt_block_activation_bytes(*columns, kind) for kind in RECOMPUTE_KINDS}
    assert all(bytes_.shape == (2,) and bytes_[1] > bytes_[0] for bytes_ in found.values())
    assert (found["none"] > found["selective"]).all()
    assert (found["selective"] > found["full"]).all()
    assert found["none"][0] == gpt_block_activation_bytes(s, b, 1024, a)


# Llama blocks of other runtimes


TEST_BLOCK = spec_of(hidden=1024, heads=16, kv_heads=4, head_size=64, ffn=2816)
"""Saved bytes over s*b*h with s 256 and b 2 were measured in each form on CPU, torch 2.13.0."""


@pytest.mark.parametrize(
    ("form", "factor"),
    [
        ({"norm": "decomposed"}, 47.07),
        ({"norm": "upcast", "repeat_kv": True}, 46.07),
        ({"norm": "upcast"}, 43.07),
        ({"norm": "upcast", "repeat_kv": True, "attention": "scores"}, 70.01),
        ({}, 35.07),
    ],
)
def test_measured_llama_block(form, factor):
    assert round(llama_block_saved_bytes(TEST_BLOCK, 256, **form) / 1024, 2) == factor


def test_llama_3_8b_keeps_168072_bytes_a_token_and_layer():
    model = preset("llama-3-8b")
    assert llama_block_saved_bytes(model, 8192) == 168_072
    assert llama_block_saved_bytes(model, 8192, swiglu="fused") == 168_072 - 2 * model.ffn


@pytest.mark.parametrize("name", SPECS)
def test_the_runtime_has_the_fused_form(name):
    fused = llama_block_saved_bytes(SPECS[name], 24, swiglu="fused")
    assert block_activations(SPECS[name], "bf16", "none").saved_bytes == fused


# The runtime's block, split


def saved_of(name, recompute="none", **split):
    return block_activations(SPECS[name], "bf16", recompute, Split(**split)).saved


def test_tp_splits_heads_and_ffn_and_keeps_norm_outputs_whole():
    """Shared FORMULAE 2.2: torch's DTensor saves what a matrix reads gathered, so norm outputs stay 2h each,
    also with sp; residuals are 2h each without sp and 2h/tp with it."""
    one, two, both = (saved_of("grouped", **s) for s in ({}, {"tp": 2}, {"tp": 2, "sp": True}))
    h = SPECS["grouped"].hidden
    for tensor in ("norm1", "norm2"):
        assert one[tensor] == two[tensor] == both[tensor] == 2 * h
    for tensor in ("input", "middle"):
        assert one[tensor] == two[tensor] == 2 * both[tensor] == 2 * h
    for tensor in ("rstd1", "rstd2"):
        assert one[tensor] == two[tensor] == 2 * both[tensor] == 4
    for tensor in ("q", "k", "v", "attention", "lse", "gate", "up", "product"):
        assert one[tensor] == 2 * two[tensor] == 2 * both[tensor]


def test_key_value_heads_are_repeated_when_tp_exceeds_them():
    grouped, repeated = saved_of("grouped", tp=2), saved_of("grouped", tp=4)  # 2 of them
    assert grouped["k"] == repeated["k"] == grouped["v"] == repeated["v"] == 2 * 16
    assert grouped["q"] == 2 * repeated["q"]


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
@pytest.mark.parametrize("name", SPECS)
def test_context_ranks_keep_the_same_for_each_of_their_tokens(name, kind):
    """They have fewer tokens; keys and values of the others are passed on, or gathered again."""
    assert saved_of(name, cp=4, cp_kind=kind) == saved_of(name)


def test_ulysses_keeps_the_attention_output_before_and_after_the_heads_return():
    saved = saved_of("multi_head", cp=2, cp_kind="ulysses")
    assert saved == saved_of("multi_head") | {"traded": 2 * 4 * 8}


@pytest.mark.parametrize("recompute", RECOMPUTE_KINDS)
@pytest.mark.parametrize("name", SPECS)
def test_more_tp_never_keeps_or_uses_more(name, recompute):
    for sp in (False, True):
        kinds = [
            block_activations(SPECS[name], "bf16", recompute, Split(tp, sp and tp > 1)) for tp in (1, 2, 4)
        ]
        for less, more in pairwise(kinds):
            assert more.saved_bytes <= less.saved_bytes
            assert max(m.token_bytes for m in more.moments) <= max(m.token_bytes for m in less.moments)


# The runtime's block


@pytest.mark.parametrize("name", SPECS)
def test_recompute_keeps_what_it_says(name):
    assert set(block_activations(SPECS[name], "bf16", "full").saved) == {"input"}
    kept = set(block_activations(SPECS[name], "bf16", "selective").saved)
    outputs = {"q_proj": "q_raw", "k_proj": "k_raw", "v_proj": "v", "o_proj": "o", "gate_proj": "gate",
               "up_proj": "up", "attention": "attention"}  # fmt: skip
    assert kept == {"input", "lse"} | {outputs[operation] for operation in KEPT_BY_SELECTIVE}


@pytest.mark.parametrize("recompute", RECOMPUTE_KINDS)
def test_no_moment_holds_less_than_what_is_saved_at_its_end(recompute):
    """The peak of a block is never below what it keeps, and the moments left are a frontier."""
    activations = block_activations(SPECS["grouped"], "bf16", recompute)
    assert max(moment.token_bytes for moment in activations.moments) > activations.saved_bytes
    for one in activations.moments:
        assert not any(
            other is not one and all(theirs >= ours for theirs, ours in zip(other[1:], one[1:], strict=True))
            for other in activations.moments
        )


class Births(TorchDispatchMode):
    """Storages made inside, as far as they are alive; those of the tensors it is given are known before."""

    def __init__(self, known):
        super().__init__()
        self.known = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self.known | self.storages:
                    self.storages[id(storage)] = weakref.ref(storage, self.forget(id(storage)))
        return out

    def forget(self, key):
        return lambda _: self.storages.pop(key)

    @property
    def nbytes(self):
        return sum(storage().nbytes() for storage in self.storages.values())


def block_inputs(spec, precision, batch=2, seq=24):
    """A block with weights, its input as the embedding would make it, and the rotary tables."""
    dtype = DTYPES[precision]
    model = Transformer(spec).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tables = rotary_tables(spec, seq, torch.device("cpu"), wide(dtype))
    return model, torch.randn(batch, seq, spec.hidden, dtype=dtype, requires_grad=True), tables


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_saved_tensors_of_a_real_block(name, precision):
    """What autograd is given to keep: unique storages, parameters and rotary tables left out."""
    model, x_BSE, tables = block_inputs(SPECS[name], precision)
    ours = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *tables)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out_BSE = model.model.layers[0](x_BSE, *tables)
    assert out_BSE.requires_grad
    tokens = x_BSE.shape[0] * x_BSE.shape[1]
    activations = block_activations(SPECS[name], precision, "none")
    sizes = sorted(nbytes for nbytes, _ in saved.values())
    assert sizes == sorted(tokens * nbytes for nbytes in activations.saved.values())


@pytest.mark.parametrize("recompute", RECOMPUTE_KINDS)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_what_a_real_block_leaves_alive(name, precision, recompute):
    """Storages that outlive the forward pass while its graph is held, with what recomputation caches."""
    model, x_BSE, tables = block_inputs(SPECS[name], precision)
    apply_recompute(model, recompute, KEPT_BY_SELECTIVE if recompute == "selective" else ())
    block: Block = model.model.layers[0]
    with Births([*model.parameters(), *tables, x_BSE]) as births:
        graph = block(x_BSE, *tables).grad_fn  # the output itself belongs to whatever reads it
    assert graph is not None
    tokens = x_BSE.shape[0] * x_BSE.shape[1]
    predicted = tokens * block_activations(SPECS[name], precision, recompute).saved_bytes
    assert births.nbytes + x_BSE.nbytes == predicted


def test_rotary_tables_are_measured_too():
    for precision, dtype in DTYPES.items():
        tables = rotary_tables(SPECS["grouped"], 24, torch.device("cpu"), wide(dtype))
        assert sum(table.nbytes for table in tables) == rotary_table_bytes(SPECS["grouped"], 24, precision)
