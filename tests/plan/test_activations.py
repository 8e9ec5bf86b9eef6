"""Activations of the runtime's block, measured to the byte, whole and split."""

import weakref
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, RECOMPUTE_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import Split, block_activations, rotary_table_bytes
from shardwright.plan.other_runtimes import llama_block_saved_bytes
from shardwright.run.kernels import wide
from shardwright.run.model import Block, Transformer
from shardwright.run.recompute import apply_recompute
from shardwright.run.rotary import Places, rotary_tables

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
JOBS = {precision: Job(seq=24, global_batch=2, precision=precision) for precision in DTYPES}


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


# The runtime's block in one formula


@pytest.mark.parametrize("name", SPECS)
def test_the_runtime_has_the_fused_form(name):
    fused = llama_block_saved_bytes(SPECS[name], 24, swiglu="fused")
    assert block_activations(SPECS[name], JOBS["bf16"], "none").saved_bytes == fused


# The runtime's block, split


def saved_of(name, recompute="none", **split):
    return block_activations(SPECS[name], JOBS["bf16"], recompute, Split(**split)).saved


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


def test_ulysses_keeps_repeated_keys_and_values():
    """Fewer heads of them than ranks: each rank has one, of all tokens."""
    heads = SPECS["grouped"].kv_heads
    enough, repeated = (saved_of("grouped", cp=cp, cp_kind="ulysses") for cp in (heads, 2 * heads))
    assert repeated == enough | {"repeated": enough["k"] + enough["v"]}


@pytest.mark.parametrize("recompute", RECOMPUTE_KINDS)
@pytest.mark.parametrize("name", SPECS)
def test_more_tp_never_keeps_or_uses_more(name, recompute):
    for sp in (False, True):
        kinds = [
            block_activations(SPECS[name], JOBS["bf16"], recompute, Split(tp, sp and tp > 1))
            for tp in (1, 2, 4)
        ]
        for less, more in pairwise(kinds):
            assert more.saved_bytes <= less.saved_bytes
            assert max(m.token_bytes for m in more.moments) <= max(m.token_bytes for m in less.moments)


# The runtime's block


@pytest.mark.parametrize("name", SPECS)
def test_recompute_keeps_what_it_says(name):
    assert set(block_activations(SPECS[name], JOBS["bf16"], "full").saved) == {"input"}
    kept = set(block_activations(SPECS[name], JOBS["bf16"], "selective").saved)
    outputs = {"q_proj": "q_raw", "k_proj": "k_raw", "v_proj": "v", "o_proj": "o", "gate_proj": "gate",
               "up_proj": "up", "attention": "attention"}  # fmt: skip
    assert kept == {"input", "lse"} | {outputs[operation] for operation in KEPT_BY_SELECTIVE}


@pytest.mark.parametrize("recompute", RECOMPUTE_KINDS)
def test_no_moment_holds_less_than_what_is_saved_at_its_end(recompute):
    """The peak of a block is never below what it keeps, and the moments left are a frontier."""
    activations = block_activations(SPECS["grouped"], JOBS["bf16"], recompute)
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
    places = Places(*rotary_tables(spec, torch.arange(seq), wide(dtype)), None)
    return model, torch.randn(batch, seq, spec.hidden, dtype=dtype, requires_grad=True), places


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_saved_tensors_of_a_real_block(name, precision):
    """What autograd is given to keep: unique storages, parameters and rotary tables left out."""
    model, x_BSE, places = block_inputs(SPECS[name], precision)
    ours = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *places[:2])}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out_BSE = model.model.layers["0"](x_BSE, places)
    assert out_BSE.requires_grad
    tokens = x_BSE.shape[0] * x_BSE.shape[1]
    activations = block_activations(SPECS[name], JOBS[precision], "none")
    sizes = sorted(nbytes for nbytes, _ in saved.values())
    assert sizes == sorted(tokens * nbytes for nbytes in activations.saved.values())


@pytest.mark.parametrize("recompute", RECOMPUTE_KINDS)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_what_a_real_block_leaves_alive(name, precision, recompute):
    """Storages that outlive the forward pass while its graph is held, with what recomputation caches."""
    model, x_BSE, places = block_inputs(SPECS[name], precision)
    apply_recompute(model, recompute, KEPT_BY_SELECTIVE if recompute == "selective" else ())
    block: Block = model.model.layers["0"]
    with Births([*model.parameters(), *places[:2], x_BSE]) as births:
        graph = block(x_BSE, places).grad_fn  # the output itself belongs to whatever reads it
    assert graph is not None
    tokens = x_BSE.shape[0] * x_BSE.shape[1]
    predicted = tokens * block_activations(SPECS[name], JOBS[precision], recompute).saved_bytes
    assert births.nbytes + x_BSE.nbytes == predicted


def test_rotary_tables_are_measured_too():
    for precision, dtype in DTYPES.items():
        tables = rotary_tables(SPECS["grouped"], torch.arange(24), wide(dtype))
        assert sum(table.nbytes for table in tables) == rotary_table_bytes(SPECS["grouped"], 24, precision)
