"""Blocks of every family against transformers' own on CPU, term by term, and against the parameter table.

transformers' layers are given our fused RMS norm; what else they keep besides is named in each test.
"""

import dataclasses
import json
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.hf_config import model_from_config
from shardwright.job import LORA_TARGETS, Job
from shardwright.layout import RECOMPUTE_KINDS
from shardwright.model import ModelSpec, preset, preset_names
from shardwright.plan.activations import Kind, Split, block_activations, rotary_table_bytes
from shardwright.plan.block_ops import Rank
from shardwright.plan.block_steps import block_steps
from shardwright.plan.other_runtimes import megatron_experts_saved_bytes
from shardwright.plan.params import Tensor, parameter_table
from shardwright.run.kernels import rms_norm

BATCH, SEQ = 2, 20
TOKENS = BATCH * SEQ
JOB = Job(seq=SEQ, global_batch=BATCH, precision="fp32")
E = 4
"""Bytes of an element in fp32."""

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4,
}  # fmt: skip
EACH = {**SMALL, "num_key_value_heads": 4}
FALCON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
OPT = {**FALCON, "ffn_dim": 48, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 1,
           "topk_group": 1}  # fmt: skip
LATENT = {
    **EACH, **EXPERTS, "first_k_dense_replace": 2, "kv_lora_rank": 16, "q_lora_rank": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
}  # fmt: skip

DENSE: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", EACH),
    "qwen3": ("qwen3", {**EACH, "head_dim": 16}),
    "gemma": ("gemma", {**EACH, "head_dim": 8}),
    "gemma3: sandwich norms": ("gemma3_text", {**EACH, "head_dim": 8}),
    "phi3: fused matrices": ("phi3", {**EACH, "pad_token_id": 0}),
    "gpt2": ("gpt2", {**GPT2, "activation_function": "gelu_pytorch_tanh"}),
    "gpt_neox: parallel": ("gpt_neox", SMALL),
    "gpt_neox: in sequence": ("gpt_neox", {**SMALL, "use_parallel_residual": False}),
    "olmo2: norms behind, of whole projections": ("olmo2", EACH),
    "granite": ("granite", EACH),
    "cohere: parallel, one norm": ("cohere", EACH),
    "cohere: norms of heads": ("cohere", {**EACH, "use_qk_norm": True}),
    "cohere2": ("cohere2", EACH),
    "starcoder2": ("starcoder2", EACH),
    "stablelm: norms of heads": ("stablelm", {**EACH, "qk_layernorm": True}),
    "stablelm: parallel": ("stablelm", {**EACH, "use_parallel_residual": True}),
    "falcon: parallel": ("falcon", {**FALCON, "multi_query": False}),
    "falcon: in sequence": ("falcon", {**FALCON, "multi_query": False, "parallel_attn": False}),
    "falcon: alibi": ("falcon", {**FALCON, "multi_query": False, "alibi": True}),
    "opt: ReLU": ("opt", OPT),
    "opt: norms of sums": ("opt", {**OPT, "do_layer_norm_before": False}),
    "deepseek_v2: latent": ("deepseek_v2", LATENT),
    "deepseek_v3: latent": ("deepseek_v3", LATENT),
    "deepseek_v3: wide queries": ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
}

ROUTED: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("mixtral", {**EACH, "num_local_experts": 8}),
    "qwen3_moe": (
        "qwen3_moe",
        {**EACH, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "qwen2_moe: gated shared experts": (
        "qwen2_moe",
        {**EACH, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
        | {"shared_expert_intermediate_size": 28},
    ),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 0}),
    "glm4_moe": ("glm4_moe", {**EACH, **EXPERTS, "first_k_dense_replace": 0, "head_dim": 8}),
}


class FusedNorm(nn.Module):
    """Our RMS norm, or torch's LayerNorm in place of one written out, with the weights of ``norm``."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().clone())
        self.rms = "RMS" in type(norm).__name__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rms:
            return rms_norm(x, self.weight, 1e-6)
        shape = self.weight.shape[-1:]
        weight = self.weight if self.weight.dim() == 1 else None  # a weight for each head: left out
        return nn.functional.layer_norm(x, shape, weight)


def fuse_norms(module: nn.Module) -> None:
    for name, child in module.named_children():
        kind = type(child).__name__
        if "RMSNorm" in kind or kind in ("CohereLayerNorm", "Cohere2LayerNorm"):
            setattr(module, name, FusedNorm(child))
        else:
            fuse_norms(child)


@pytest.fixture(autouse=True)
def output_by_tokens(monkeypatch):
    """On CPU the attention output has its queries' order of heads and tokens; CUDA writes it by tokens."""
    attention = nn.functional.scaled_dot_product_attention

    def by_tokens(query, *args, **kwargs):
        if query.is_contiguous():
            query = query.transpose(1, 2).contiguous().transpose(1, 2)
        return attention(query, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", by_tokens)


def saved_by_one_layer(model_type: str, values: dict[str, object]) -> tuple[ModelSpec, float]:
    """What a model of two layers keeps for each token more than one with one, masks and integers left out."""
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    fuse_norms(model)
    spec = model_from_config(json.loads(json.dumps(config.to_dict())), name="x", source="")
    holder, name = next(
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList)
    )
    layers = getattr(holder, name)
    amounts = []
    for depth in (1, 2):
        setattr(holder, name, layers[:depth])
        config.num_hidden_layers = depth
        amounts.append(
            saved_bytes(model, lambda: model.base_model(torch.zeros(BATCH, SEQ).long(), use_cache=False))
        )
    return spec, (amounts[1] - amounts[0]) / TOKENS


def saved_bytes(model: nn.Module, forward) -> float:
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        mask = tensor.shape[-2:] == (SEQ, SEQ)
        if tensor.is_floating_point() and storage.data_ptr() not in parameters and not mask:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held: no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    assert out is not None
    return sum(nbytes for nbytes, _ in kept.values())


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_block_keeps_what_transformers_keeps(name):
    """To the byte; but activation and product of a gated network are two operations there, and the activated
    gate is kept between them."""
    spec, measured = saved_by_one_layer(*DENSE[name])
    between = E * spec.ffn if spec.gated_mlp else 0
    assert measured == block_activations(spec, JOB, "none").saved_bytes + between


@pytest.mark.parametrize("name", ROUTED)
def test_a_block_with_experts_keeps_what_transformers_keeps(name):
    """To the byte; but there activated gates are kept, and every copy's output, which is weighted afterwards
    (shared FORMULAE 2.4). Routers that norm the chosen weights keep them and their sum. Integers are not
    measured."""
    spec, measured = saved_by_one_layer(*ROUTED[name])
    moe = spec.moe
    assert moe is not None
    ours = dict(block_activations(spec, JOB, "none", kind="experts").saved)
    del ours["expert_indices"]
    after = E * moe.top_k * (moe.ffn + spec.hidden) + E * moe.shared_ffn
    normed = 0 if spec.model_type.startswith("qwen") else E * (moe.top_k + 1)
    assert measured == sum(ours.values()) + after + normed


# Gradients


def blocks_of(name: str):
    """Every kind of block of a preset, with its tensors."""
    model = preset(name)
    for unit in parameter_table(model).blocks:
        routed = model.moe is not None and model.moe.covers(unit.layers[0])
        yield model, unit.tensors, "experts" if routed else "dense"


def local_numel(tensor: Tensor, split: Split) -> float:
    by_tp = split.etp if tensor.role == "expert" else split.tp
    return tensor.numel / (by_tp if "tp" in tensor.splits else 1) / (split.ep if "ep" in tensor.splits else 1)


def repeated_numel(model: ModelSpec, tp: int) -> float:
    """Keys and values of heads that tp has to repeat."""
    more = max(1 - model.kv_heads / tp, 0)
    return 2 * more * model.head_size * (model.hidden + model.qkv_bias)


@pytest.mark.parametrize(
    "split", [Split(), Split(2), Split(2, True, ep=4), Split(2, True, ep=2, etp=2), Split(4)], ids=str
)
@pytest.mark.parametrize("name", preset_names())
def test_every_weight_of_a_block_gets_its_gradient(name, split):
    """The last moment has the gradients of all tensors in the parameter table."""
    for model, tensors, kind in blocks_of(name):
        made = max(m.gradient_bytes for m in block_activations(model, JOB, "none", split, kind).moments)
        expected = sum(local_numel(tensor, split) for tensor in tensors)
        assert made == pytest.approx(E * (expected + repeated_numel(model, split.tp)), rel=1e-12)


# Properties over families


SPLITS = [
    Split(tp, sp and tp > 1, cp, kind, ep, etp)
    for tp, sp, (cp, kind), ep, etp in product(
        (1, 2, 4), (False, True), ((1, "none"), (2, "ring"), (2, "ulysses")), (1, 4), (1, 2, 4)
    )
    if etp in (1, tp)
]


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(preset_names()), split=st.sampled_from(SPLITS), rank=st.sampled_from([0, 8]),
    targets=st.sets(st.sampled_from(LORA_TARGETS), min_size=1), capacity=st.sampled_from([0.0, 1.25]),
)  # fmt: skip
def test_recomputation_never_keeps_more_and_no_moment_is_below_what_is_kept(
    name, split, rank, targets, capacity
):
    job = JOB.model_copy(
        update={"lora_rank": rank, "lora_targets": tuple(sorted(targets)) if rank else (),
                "expert_capacity": capacity}
    )  # fmt: skip
    for model, _, kind in blocks_of(name):
        each = {r: block_activations(model, job, r, split, kind) for r in RECOMPUTE_KINDS}
        assert each["full"].saved.keys() == {"input"}
        assert each["selective"].saved_bytes >= each["full"].saved_bytes
        for activations in each.values():
            assert all(size > 0 for size in activations.saved.values())
            assert max(m.token_bytes for m in activations.moments) > activations.saved_bytes
        if not rank:
            assert each["none"].saved_bytes > each["selective"].saved_bytes


@pytest.mark.parametrize("cut", [False, True], ids=["whole experts", "experts cut"])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", preset_names())
def test_more_tp_never_keeps_or_uses_more(name, sp, cut):
    for model, _, kind in blocks_of(name):
        splits = [Split(tp, sp and tp > 1, etp=tp if cut else 1) for tp in (1, 2, 4)]
        found = [block_activations(model, JOB, "none", split, kind) for split in splits]
        for less, more in pairwise(found):
            assert more.saved_bytes < less.saved_bytes
            peaks = [max(m.token_bytes for m in each.moments) for each in (less, more)]
            assert peaks[1] < peaks[0]


@pytest.mark.parametrize("name", [name for name in preset_names() if preset(name).moe])
def test_experts_keep_megatron_s_bytes(name):
    """K * (2h + 6f + 4), shared FORMULAE 2.4: of evenly loaded ranks, or of one that has all experts."""
    model = preset(name)
    bf16 = Job(seq=SEQ, global_batch=BATCH, expert_imbalance=1.0)
    for split in (Split(), Split(ep=4)):
        saved = block_activations(model, bf16, "none", split, "experts").saved
        names = ("expert_input", "expert_gate", "expert_up", "expert_product", "expert_weights")
        assert sum(saved[name] for name in names) == megatron_experts_saved_bytes(model.moe, model.hidden)


def test_a_dense_block_knows_nothing_of_experts_nor_a_ring_of_its_length():
    model = preset("mixtral-8x7b")

    def block(split: Split, kind: Kind):
        return block_activations(model, JOB, "none", split, kind)

    assert block(Split(2, ep=4, etp=2), "dense") is block(Split(2), "dense")
    assert block(Split(2, ep=4, etp=2), "experts").saved != block(Split(2, ep=4), "experts").saved
    assert block(Split(cp=4, cp_kind="ring"), "experts") is block(Split(cp=8, cp_kind="ring"), "experts")
    gathered = [block(Split(cp=cp, cp_kind="all_gather"), "experts").moments for cp in (4, 8)]
    assert gathered[0] != gathered[1]


def expert_copies(split: Split, **job: float) -> float:
    """Copies of a token that Mixtral's experts (2 for each) keep on a rank."""
    model = preset("mixtral-8x7b")
    saved = block_activations(model, JOB.model_copy(update=job), "none", split, "experts").saved
    return saved["expert_input"] / (E * model.hidden)


def test_uneven_load_counts_where_experts_are_shared_out():
    assert expert_copies(Split(), expert_imbalance=1.5) == 2
    assert expert_copies(Split(ep=4), expert_imbalance=1.5) == 3
    assert (
        expert_copies(Split(ep=4), expert_capacity=1.25)
        == expert_copies(Split(), expert_capacity=1.25)
        == 2.5
    )


def test_whole_experts_take_a_rank_s_share_and_split_ones_all_tokens():
    assert expert_copies(Split(4)) == 0.5
    assert expert_copies(Split(4, etp=4)) == 2
    whole, split = (
        block_activations(preset("mixtral-8x7b"), JOB, "none", Split(4, etp=etp), "experts").saved
        for etp in (1, 4)
    )
    assert whole["expert_gate"] == split["expert_gate"]  # a quarter of the copies, or of the width


@pytest.mark.parametrize("recompute", RECOMPUTE_KINDS)
def test_buffers_of_the_all_to_all_are_there_for_a_moment(recompute):
    """Where copies of a token arrive, 2 * K * h more than on a rank that has all experts (shared FORMULAE
    2.4), and nothing of them is kept."""
    rank = Rank(preset("mixtral-8x7b"), JOB.model_copy(update={"expert_imbalance": 1.0}), Split(ep=8))
    alone = dataclasses.replace(rank, split=Split())
    ops, others = ([op for step in block_steps(r, "experts") for op in step] for r in (rank, alone))
    traded = {op.name: (op.around, op.around_backward) for op in ops if op.around or op.around_backward}
    assert traded == dict.fromkeys(("dispatch", "combine"), (2 * 2 * 4096 * E, 2 * 2 * 4096 * E))
    assert not any(op.around or op.around_backward for op in others)
    both = (block_activations(r.model, r.job, recompute, r.split, "experts") for r in (rank, alone))
    assert len({each.saved_bytes for each in both}) == 1


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("opt-125m", 0),
        ("deepseek-v3", 64),
        ("gemma-3-27b", 2 * 128),
        ("gpt-neox-20b", 24),
        ("llama-3-8b", 128),
    ],
)
def test_rotary_tables_have_the_turned_numbers_of_a_head(name, numbers):
    """None for learned positions, DeepSeek's rope_size, Gemma 3's two frequencies, a quarter of NeoX's 96."""
    assert rotary_table_bytes(preset(name), 100, "bf16") == 4 * 100 * numbers
