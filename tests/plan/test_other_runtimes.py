"""Activations as other programs keep them: published and measured numbers."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_activations import Births
from transformers.models.llama.modeling_llama import eager_attention_forward

from shardwright.layout import RECOMPUTE_KINDS
from shardwright.model import ModelSpec, preset
from shardwright.plan.bubble import in_flight_chunks
from shardwright.plan.other_runtimes import (
    cross_entropy_bytes,
    gpt_block_activation_bytes,
    liger_chunk_tokens,
    liger_loss_bytes,
    llama_block_saved_bytes,
    megatron_cross_entropy_bytes,
    megatron_experts_saved_bytes,
    score_bytes,
    torchtitan_selective_saved_bytes,
)
from shardwright.units import GiB, MiB

GB = 1e9


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


TEST_BLOCK = ModelSpec(
    name="test", model_type="llama", layers=1, hidden=1024, heads=16, kv_heads=4, head_size=64, ffn=2816,
    vocab=64,
)  # fmt: skip
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


def test_torchtitan_keeps_31_gib_of_llama_3_8b():
    """Shared FORMULAE 2.3: 2 x 8192 tokens of a rank, 32 blocks."""
    model = preset("llama-3.1-8b")
    assert torchtitan_selective_saved_bytes(model) == 63_616
    assert round(2 * 8192 * 32 * torchtitan_selective_saved_bytes(model) / GiB, 1) == 31.1


# Scores


def test_scores_of_megatron_issue_965():
    """Phi-3's 32 heads, one sequence of 4096, unfused: steps of 1024, 1024 and 1536 MiB a layer were measured
    (NVIDIA/Megatron-LM#965); with flash attention there are none."""
    assert 4096 * score_bytes(4096, 32, "dropout", made=True) == 3584 * MiB
    assert 4096 * score_bytes(4096, 32, "flash", made=True) == 0


@pytest.mark.parametrize("heads", [32, 96])
def test_kept_scores_are_5as_of_the_paper(heads):
    """arXiv:2205.05198, table 2: what selective recomputation saves."""
    none, selective = (
        gpt_block_activation_bytes(2048, 1, 4096, heads, kind) for kind in ("none", "selective")
    )
    assert none - selective == 2048 * score_bytes(2048, heads, "dropout")


class Allocations(Births):
    """Counts all storages made inside, and the most alive at once."""

    made = peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = set(self.storages)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.made += sum(self.storages[key]().nbytes() for key in set(self.storages) - before)
        self.peak = max(self.peak, self.nbytes)
        return out


class Kept:
    """Bytes of the storages that autograd keeps of what is computed inside, ``known`` ones left out."""

    def __init__(self, *known):
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.storages = {}

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *_):
        self.hooks.__exit__()

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage.nbytes(), tensor  # held: no address is used twice
        return tensor

    @property
    def nbytes(self):
        return sum(nbytes for nbytes, _ in self.storages.values())


def test_scores_of_hugging_face_are_measured():
    seq, heads, size = 64, 4, 8
    query, key, value = (
        torch.randn(1, heads, seq, size, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    module = torch.nn.Module()
    module.num_key_value_groups = 1
    mask = torch.zeros(1, 1, seq, seq, dtype=torch.bfloat16)
    with Allocations([query, key, value, mask]) as births, Kept(query, key, value) as kept:
        out, _ = eager_attention_forward(module, query, key, value, mask, 1.0)
    outputs = 2 * out.nbytes  # before and after heads and positions change places
    widened = 4 * heads * seq**2  # the CPU's softmax copies its input in fp32, CUDA's reads it as it is
    assert births.made - outputs - widened == seq * score_bytes(seq, heads, "upcast", made=True)
    assert kept.nbytes == seq * score_bytes(seq, heads, "upcast")


# Experts


def test_experts_of_deepseek_v3():
    """8 experts of 2048 for each token: 8 * (2 * 7168 + 6 * 2048 + 4)."""
    model = preset("deepseek-v3")
    assert model.moe is not None
    inside = megatron_experts_saved_bytes(model.moe, model.hidden)
    assert inside == 213_024
    assert megatron_experts_saved_bytes(model.moe, model.hidden, weighted_inside=False) - inside == 114_688


# Logits and loss


@pytest.mark.parametrize(("upcast", "expected"), [(False, (2, 4, 6)), (True, (4, 10, 12))])
def test_cross_entropy_is_measured(upcast, expected):
    """Shared FORMULAE 2.5 for the first two; the third counts the gradient of the logarithms too."""
    tokens, vocab = 16, 4096
    logits = torch.randn(tokens, vocab, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    known = [logits, targets]
    with Allocations(known) as forward, Kept(*known) as kept:
        loss = torch.nn.functional.cross_entropy(logits.float() if upcast else logits, targets)
    storages = [tensor for _, tensor in kept.storages.values()]
    with Allocations([*known, *storages]) as backward:
        loss.backward()
    of_graph = sum(tensor.nbytes for tensor in storages)
    measured = kept.nbytes, forward.peak + logits.nbytes, backward.peak + of_graph
    found = cross_entropy_bytes(vocab, upcast=upcast)
    assert tuple(found) == tuple(factor * vocab for factor in expected)
    for ours, theirs in zip(found, measured, strict=True):
        assert theirs / tokens == pytest.approx(ours, abs=16)  # of one number a token


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_split_vocabulary_keeps_its_share_in_fp32(tp):
    """Megatron's exponentials; the marks of the targets are whole on every rank."""
    assert megatron_cross_entropy_bytes(128_256, tp).saved - 9 == 4 * 128_256 / tp


def test_chunks_of_liger_for_llama_3_8b():
    """32 chunks of 128,256 / 4096 for 8192 tokens would be 256 tokens each: a power of two already."""
    assert liger_chunk_tokens(8192, 4096, 128_256) == 256
    assert liger_chunk_tokens(8200, 4096, 128_256) == 512
    head = 128_256 * 4096
    assert liger_loss_bytes(8192, 4096, 128_256) == 256 * 128_256 * 6 + 2 * 8192 * 4096 + 2 * head
    assert liger_loss_bytes(8192, 4096, 128_256, 4) - liger_loss_bytes(8192, 4096, 128_256) == 2 * head


@settings(deadline=None)
@given(tokens=st.integers(1, 10**6), hidden=st.integers(1, 10**4), vocab=st.integers(1, 10**6))
def test_a_chunk_of_logits_is_less_than_twice_the_head_s_input(tokens, hidden, vocab):
    chunk = liger_chunk_tokens(tokens, hidden, vocab)
    assert chunk & (chunk - 1) == 0
    assert chunk * vocab < 2 * (tokens * hidden + vocab)
