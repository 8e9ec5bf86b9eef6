"""A family with a reader, taken for one without: the same ModelSpec, tensors, memory and time come out."""

import json
import warnings

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.cluster import cluster_of
from shardwright.derive.spec import derived
from shardwright.errors import ModelError
from shardwright.hf_config import model_from_config
from shardwright.hf_families import READERS
from shardwright.job import Job
from shardwright.layout import Layout, model_faults
from shardwright.model import ModelSpec
from shardwright.plan.memory import device_memory
from shardwright.plan.params import Tensor, parameter_table
from shardwright.plan.splits import stage_layers
from shardwright.plan.step import step_time
from shardwright.plan.table import table_of

MHA = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GQA = {**MHA, "num_key_value_heads": 2}
MOE = {**GQA, "moe_intermediate_size": 24}
LATENT = {
    **MHA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
GROUPS = {"n_group": 2, "topk_group": 1}
FALCON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
OPT = {**FALCON, "ffn_dim": 48, "max_position_embeddings": 20}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 20}
FOUR = {**GQA, "num_local_experts": 4}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
EVERY_OTHER = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {**GQA, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {**GQA, **TIED, "head_dim": 12}),
    "mistral": ("mistral", GQA),
    "qwen2": ("qwen2", GQA | TIED),
    "qwen2-windowed": ("qwen2", GQA | EVERY_OTHER),
    "qwen3": ("qwen3", {**GQA, "head_dim": 16}),
    "gemma": ("gemma", {**GQA, "head_dim": 8}),
    "gemma2": ("gemma2", {**GQA, "head_dim": 8}),
    "gemma3": ("gemma3_text", {**GQA, "head_dim": 8}),
    "phi3": ("phi3", {**GQA, "pad_token_id": 0}),
    "gpt2": ("gpt2", {**GPT2, "n_inner": 40}),
    "gpt_neox": ("gpt_neox", MHA),
    "gpt_neox-serial": ("gpt_neox", {**MHA, "use_parallel_residual": False, "attention_bias": False}),
    "olmo2": ("olmo2", GQA),
    "granite": ("granite", {**GQA, "mlp_bias": True, **TIED}),
    "cohere": ("cohere", {**GQA, "use_qk_norm": True}),
    "cohere2": ("cohere2", GQA),
    "starcoder2": ("starcoder2", GQA),
    "stablelm": ("stablelm", {**GQA, "qk_layernorm": True}),
    "stablelm-parallel": ("stablelm", {**GQA, "use_parallel_residual": True, "qk_layernorm": True}),
    "falcon": ("falcon", {**FALCON, "multi_query": False}),
    "falcon-serial": ("falcon", {**FALCON, "multi_query": False, "parallel_attn": False, "alibi": True}),
    "opt": ("opt", OPT),
    "opt-residual": ("opt", {**OPT, "do_layer_norm_before": False}),
    "mixtral": ("mixtral", FOUR),
    "qwen2_moe": ("qwen2_moe", {**MOE, "decoder_sparse_step": 2, "num_experts": 6}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "num_experts": 8, "mlp_only_layers": [3]}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "first_k_dense_replace": 1}),
    "deepseek_v3": (
        "deepseek_v3",
        {**LATENT, **GROUPS, "first_k_dense_replace": 2, "q_lora_rank": None},
    ),
    "gpt_oss": ("gpt_oss", FOUR),
    "glm4_moe": ("glm4_moe", {**MOE, "n_routed_experts": 8, "use_qk_norm": True, "attention_bias": True}),
    "llama4": ("llama4_text", {**FOUR, "head_dim": 8, "use_qk_norm": False, "interleave_moe_layer_step": 2}),
}
"""Configurations of every family that has a reader."""

NOT_SAID = dict.fromkeys(("model_type", "naming", "assumed", "source", "mtp_layers"), True)
NOT_SAID |= {"moe": {"score", "scale", "normalise"}}
"""Fields that differ on purpose. Multi-token prediction is no part of transformers' model; what a router
makes of its numbers changes no size and no time, and what is only derived is not trained."""

JOB = Job(seq=512, global_batch=8)


def on_meta(model_type: str, values: dict[str, object]) -> torch.nn.Module:
    config = AutoConfig.for_model(model_type, **values)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest) -> tuple[ModelSpec, ModelSpec]:
    """The spec of the family's own reader, and the one derived from the model."""
    model_type, values = CASES[request.param]
    model = on_meta(model_type, values)
    read = model_from_config(json.loads(json.dumps(model.config.to_dict())), name="x", source="")
    return read, derived(model, f"unread_{model_type}", "x")


def test_every_family_with_a_reader_has_a_case():
    assert {model_type for model_type, _ in CASES.values()} == set(READERS)


def test_every_field_is_the_same(pair):
    read, found = pair
    if not read.qk_norm:
        found = found.model_copy(update={"qk_norm_kind": read.qk_norm_kind})
    assert found.model_dump(exclude=NOT_SAID) == read.model_dump(exclude=NOT_SAID)


def test_units_tensors_roles_and_splits_are_the_same(pair):
    def fields(tensor: Tensor) -> tuple[object, ...]:
        return tensor.name, tensor.shape, tensor.role, sorted(tensor.splits.items())

    def units(spec: ModelSpec) -> list[tuple[object, ...]]:
        return [
            (
                unit.kind,
                unit.layers,
                unit.stem,
                sorted(map(fields, unit.tensors)),
            )
            for unit in parameter_table(spec).units
        ]

    read, found = pair
    assert units(found) == units(read)


def layouts_of(model: ModelSpec) -> list[Layout]:
    etp = {} if model.moe is None else {"etp": 2}
    layouts = [
        Layout(dp_shard=8, zero_stage=3),
        Layout(dp_shard=4, tp=2, sp=True, zero_stage=3, **etp),
        Layout(dp_shard=4, cp=2, cp_kind="ring", zero_stage=3),
        Layout(pp=2, dp_shard=4, schedule="1F1B", stage_layers=stage_layers(model.layers, 2), zero_stage=1),
    ]
    if model.moe is not None:
        layouts.append(Layout(dp_shard=8, ep=2, zero_stage=3))
    return [layout for layout in layouts if not model_faults(layout, model, JOB)]


def test_memory_and_time_are_the_same(pair):
    read, found = pair
    cluster = cluster_of("h100-sxm", 8)
    table = table_of(layouts_of(read), read.layers)
    for predicted in (
        lambda model: device_memory(model, JOB, cluster.device, table),
        lambda model: step_time(model, JOB, cluster, table).time,
    ):
        np.testing.assert_array_equal(predicted(found), predicted(read))


def test_layers_that_norm_queries_here_and_there_are_refused():
    """Llama 4 does so, by its rotary embedding; its own reader takes all layers for alike."""
    model = on_meta("llama4_text", {**FOUR, "head_dim": 8, "use_qk_norm": True})
    with pytest.raises(ModelError, match="its layers differ in where their norms stand"):
        derived(model, "unread", "x")
