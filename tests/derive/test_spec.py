"""Decoders without a reader: planned as their model on the meta device is, or refused with the reason."""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.cli import main
from shardwright.cluster import cluster_of
from shardwright.derive.spec import counted, derived, model_of
from shardwright.errors import ModelError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.counts import active_parameters
from shardwright.plan.finding import find
from shardwright.plan.params import parameter_table
from shardwright.plan.runnable import not_runnable_reasons

MHA = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GQA = {**MHA, "num_key_value_heads": 2}
MOE = {**GQA, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 20}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}

PLANNED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "arcee": (GQA, {"activation": "relu2", "gated_mlp": False}),
    "biogpt": (MHA, {"positions": "learned", "position_offset": 2, "mlp_bias": True, "out_bias": True}),
    "codegen": (
        {**GPT, "rotary_dim": 4},
        {"parallel_block": True, "shared_norm": True, "head_bias": True, "rotary_share": 0.5},
    ),
    "dots1": (
        {**MOE, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2},
        {"qk_norm": True, "moe.experts": 8, "moe.shared_ffn": 48, "moe.first_dense_layers": 1},
    ),
    "ernie4_5": (GQA, {"kv_heads": 2, "tied_embeddings": True}),
    "ernie4_5_moe": (
        {**GQA, "moe_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2},
        {"moe.experts": 4, "moe.top_k": 2, "moe.shared_ffn": 48, "moe.correction_bias": True},
    ),
    "exaone4": (
        {**GQA, "sliding_window": 8},
        {"norm_placement": "post", "sliding_window": 8, "qk_norm": True},
    ),
    "flex_olmo": (
        {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
        {"norm_placement": "post", "qk_norm_kind": "projection", "moe.experts": 4},
    ),
    "glm": ({**GQA, "head_dim": 8, "pad_token_id": 0}, {"qkv_bias": True, "rotary_share": 0.5}),
    "glm4": ({**GQA, "head_dim": 8, "pad_token_id": 0}, {"norm_placement": "sandwich"}),
    "gpt_bigcode": (GPT, {"kv_heads": 1, "positions": "learned", "tied_embeddings": True}),
    "gpt_neo": (
        {"vocab_size": 96, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "window_size": 8}
        | {"attention_types": [[["global", "local"], 2]]},
        {"sliding_window": 8, "full_attention_layers": (0, 2), "out_bias": True, "qkv_bias": False},
    ),
    "gptj": ({**GPT, "rotary_dim": 4}, {"parallel_block": True, "mlp_bias": True, "qkv_bias": False}),
    "granitemoe": (
        {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"moe.experts": 4, "moe.ffn": 48, "moe.top_k": 2},
    ),
    "helium": ({**GQA, "head_dim": 8}, {"norm": "rms"}),
    "hunyuan_v1_dense": ({**GQA, "head_dim": 8}, {"qk_norm": True, "qk_norm_kind": "head"}),
    "hunyuan_v1_moe": (
        {**GQA, "head_dim": 8, "num_experts": 4, "moe_topk": 2},
        {"moe.shared_ffn": 48, "moe.top_k": 2, "qk_norm": True},
    ),
    "minicpm3": ({**MHA, **LATENT, "num_key_value_heads": 4}, {"mla.kv_rank": 16, "head_size": 12}),
    "mpt": (
        {"d_model": 32, "n_heads": 4, "n_layers": 3, "vocab_size": 96, "max_seq_len": 64},
        {"positions": "alibi", "activation": "gelu", "ffn": 128, "norm_bias": False, "max_positions": 64},
    ),
    "nanochat": (GQA, {"qk_norm": True, "qk_norm_kind": "weightless", "norm_weight": False}),
    "nemotron": (GQA, {"norm": "layer", "norm_bias": True, "activation": "relu2", "gated_mlp": False}),
    "olmo": (GQA, {"norm": "layer", "norm_weight": False}),
    "olmoe": (
        {**GQA, "num_experts": 4, "num_experts_per_tok": 2},
        {"qk_norm_kind": "projection", "moe.experts": 4, "moe.top_k": 2},
    ),
    "openai-gpt": (GPT, {"norm_placement": "residual", "final_norm": False, "positions": "learned"}),
    "persimmon": (MHA, {"qk_norm": True, "qk_norm_bias": True, "rotary_share": 0.5, "qkv_bias": True}),
    "phi": (MHA, {"parallel_block": True, "shared_norm": True, "head_bias": True}),
    "phimoe": (
        {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "lm_head_bias": True},
        {"norm": "layer", "moe.experts": 4, "head_bias": True},
    ),
    "seed_oss": ({**GQA, "head_dim": 8}, {"qkv_bias": True, "out_bias": False}),
    "smollm3": ({**GQA, "pad_token_id": 0}, {"no_rope_layers": (3,), "tied_embeddings": True}),
}
"""Small configurations, and what their model cards or code say of them."""


def on_meta(model_type: str, values: dict[str, Any]) -> torch.nn.Module:
    config = AutoConfig.for_model(model_type, **values)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


class Found:
    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self.model = on_meta(model_type, PLANNED[model_type][0])
        self.spec = derived(self.model, model_type, "x")


@pytest.fixture(scope="module", params=PLANNED)
def found(request: pytest.FixtureRequest) -> Found:
    return Found(request.param)


def test_the_table_is_that_of_the_model(found):
    table = parameter_table(found.spec)
    theirs = {n: tuple(p.shape) for n, p in found.model.named_parameters() if p.requires_grad}
    ours = [(tensor.name, tensor.shape) for tensor in table.tensors()]
    assert len(ours) == len(theirs)
    assert dict(ours) == theirs
    assert table.parameters == sum(p.numel() for p in found.model.parameters() if p.requires_grad)


def test_fields_are_what_the_family_is(found):
    for field, expected in PLANNED[found.model_type][1].items():
        group, _, name = field.rpartition(".")
        assert getattr(getattr(found.spec, group) if group else found.spec, name) == expected, field
    assert ModelSpec.from_toml(found.spec.to_toml()) == found.spec


def test_it_is_planned_and_says_what_was_assumed(found):
    job = Job(seq=512, global_batch=8)
    fixed = {
        "pp": 1,
        "micro_batch": 1,
        "recompute": 0,
        "order": 0,
        "dispatch": 0,
        "loss_chunks": 1,
        "offload": 0,
        "cp": 1,
    }
    document = find(found.spec, job, cluster_of("h100-sxm", 8), fixed, top=1).document
    best = document["best"][0]
    assert best["step_time"] > 0
    assert best["memory"]["device"] > 16 * parameter_table(found.spec).parameters / 8
    assert not best["runnable"]
    assert document["assumed"][:4] == list(found.spec.assumed)
    assert document["assumed"][1].startswith("attention is causal, ")
    reasons = not_runnable_reasons(found.spec, job, Layout())
    assert any(reason.startswith(f"model_type='{found.model_type}' is only modelled") for reason in reasons)


# Refused


def refusal(model_type: str, values: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as raised:
        derived(on_meta(model_type, values), model_type, "x", "config.json")
    return str(raised.value)


@pytest.mark.parametrize(
    ("model_type", "values", "parts"),
    [
        (
            "mamba",
            {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
            ["layers of kind linear_attention: only full_attention"],
        ),
        ("jamba", {**GQA, "num_hidden_layers": 8}, ["layers of kind ", "mamba: only full_attention"]),
        (
            "minimax",
            {**GQA, "layer_types": ["linear_attention", "full_attention"] * 2},
            ["linear_attention: only full_attention"],
        ),
        ("apertus", GQA, ["mlp.act_fn.alpha_p [1]", "a trained activation"]),
        ("diffllama", GQA, ["these tensors are not understood: model.layers.0.self_attn.lambda_q1 "]),
        ("bitnet", GQA, ["self_attn.attn_sub_norm.weight [32]"]),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, ["a norm of the embedding"]),
        (
            "xglm",
            {"d_model": 32, "num_layers": 2, "attention_heads": 4},
            ["positions come in neither by a rotary"],
        ),
        (
            "arcee",
            {**GQA, "hidden_act": "quick_gelu"},
            ["activation QuickGELUActivation is not modelled: silu"],
        ),
        (
            "rwkv",
            {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
            ["attention.time_decay [32]", "look like a state-space or linear-attention layer"],
        ),
        ("bart", {"d_model": 32, "decoder_layers": 2, "vocab_size": 96}, ["attention to an encoder"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_expressed_is_refused(model_type, values, parts):
    message = refusal(model_type, values)
    start = f"config.json: model_type={model_type!r} has no reader of its own and cannot be planned: "
    assert message.startswith(start)
    assert all(part in message for part in parts), message
    assert "'shardwright params' lists its parameters" in message


def without_softmax(layer: torch.nn.Module) -> Callable[..., Any]:
    """Linear attention with the matrices of Llama's."""
    attention = layer.self_attn

    def forward(hidden_states: torch.Tensor, *args: Any, **more: Any) -> tuple[torch.Tensor, None]:
        query, key, value = (
            attention.q_proj(hidden_states),
            attention.k_proj(hidden_states),
            attention.v_proj(hidden_states),
        )
        state = torch.einsum("bsk,bsv->bkv", key, value).repeat(1, 2, 1)
        mixed = torch.einsum("bsk,bkv->bsv", query, state).repeat(1, 1, 2)
        return attention.o_proj(mixed), None

    return forward


def test_attention_without_softmax_is_refused(monkeypatch):
    """Tensors and configuration are Llama's; only the run tells."""
    model = on_meta("llama", GQA)
    layer = model.model.layers[0]
    monkeypatch.setattr(layer.self_attn, "forward", without_softmax(layer))
    with pytest.raises(ModelError, match="its layer 0 has 0 softmax over the sequence and 2 products"):
        derived(model, "unread", "x")


def test_a_norm_that_no_module_stands_for_is_refused(monkeypatch):
    model = on_meta("llama", GQA)
    matrix = model.model.layers[1].mlp.down_proj
    plain = matrix.forward
    monkeypatch.setattr(matrix, "forward", lambda x: plain(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))))
    with pytest.raises(ModelError, match="its layer 1 norms 3 times, 2 of them in a module"):
        derived(model, "unread", "x")


def test_layers_that_run_twice_are_refused(monkeypatch):
    model = on_meta("llama", GQA)
    first = model.model.layers[0]
    plain = first.forward
    monkeypatch.setattr(first, "forward", lambda x, **more: first.mlp(plain(x, **more)))
    with pytest.raises(ModelError, match=r"its layer 0 calls mlp\..*_proj not once"):
        derived(model, "unread", "x")


def test_something_between_layers_is_refused(monkeypatch):
    model = on_meta("llama", GQA)
    last = model.model.layers[3]
    last.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]), prepend=True)
    with pytest.raises(ModelError, match="a layer does not read what the one before has made"):
        derived(model, "unread", "x")


# The commands


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, **GQA}))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *argv: object) -> int:
    monkeypatch.setattr(sys, "argv", ["shardwright", *map(str, argv)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_plan_and_explain_a_config_without_a_reader(config, monkeypatch, capsys):
    plan, hardware = config.parent / "plan.toml", ("--gpus", 8, "--device", "h100-sxm")
    job = ("--seq", 512, "--global-batch", 8, "--micro-batch", 1, "--pp", 1, "--cp", 1)
    assert run(monkeypatch, "plan", config, *hardware, *job, "-o", plan) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "assumed: model_type='olmoe' read off transformers " in printed
    assert run(monkeypatch, "explain", plan, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["assumed"][1] == "attention is causal, in full"
    assert any("model_type='olmoe' is only modelled" in reason for reason in document["not_runnable_reasons"])


@pytest.mark.parametrize(
    ("values", "parameters", "active"),
    [
        # OLMoE-1B-7B: 6.9 B, 1.3 B active (arXiv:2409.02060, table 1)
        ({"model_type": "olmoe", "intermediate_size": 1024}, 6_919_161_856, 1_282_017_280),
        # Phi-2, as its weights' own metadata counts
        (
            {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32}
            | {"num_attention_heads": 32, "partial_rotary_factor": 0.4},
            2_779_683_840,
            2_779_683_840,
        ),
    ],
    ids=["olmoe-1b-7b", "phi-2"],
)
def test_published_counts(config, values, parameters, active):
    config.write_text(json.dumps(values))
    assert counted(str(config))[2:] == (active, 0)
    assert parameter_table(model_of(str(config))).parameters == parameters


def test_params_counts_active_parameters_where_it_can(config):
    count = counted(str(config))
    assert count.active == active_parameters(model_of(str(config))) < count.table.parameters
    config.write_text(json.dumps({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}))
    count = counted(str(config))
    assert count.active == count.table.parameters > 0


def test_a_model_that_is_refused_ends_in_one_message(config, monkeypatch, capsys):
    config.write_text(json.dumps({"model_type": "diffllama", **GQA}))
    job = ("--seq", 512, "--global-batch", 8)
    assert run(monkeypatch, "plan", config, "--gpus", 8, "--device", "h100-sxm", *job) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shardwright: {config}: model_type='diffllama' has no reader of its own")
