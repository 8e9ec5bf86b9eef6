"""Every family's table equals transformers' own: names, shapes, order and count, for every option."""

import json
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_layers import MtpModel

from shardwright.cli import main
from shardwright.cluster import cluster_of
from shardwright.derive.spec import counted
from shardwright.errors import MissingExtraError, ModelError
from shardwright.families import FAMILIES, PLAIN
from shardwright.hf_config import model_from_config
from shardwright.hf_families import READERS
from shardwright.hf_meta import live_table, meta_table
from shardwright.job import Job
from shardwright.layout import Layout, model_faults
from shardwright.model import BUILT_TYPES, ModelSpec, ModelType, preset, preset_names
from shardwright.plan.compute import model_flops_per_token
from shardwright.plan.counts import active_parameters, gpt_parameters, mtp_parameters, mtp_tensors
from shardwright.plan.finding import find
from shardwright.plan.memory import device_memory
from shardwright.plan.params import (
    BLOCK,
    EMBEDDING,
    HEAD,
    ParameterTable,
    parameter_table,
)
from shardwright.plan.runnable import not_runnable_reasons
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
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 20}
FALCON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
OPT = {**FALCON, "ffn_dim": 48, "max_position_embeddings": 20}
LATENT = {
    **MHA,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
EIGHT = {**MOE, "n_routed_experts": 8}
FOUR = {**GQA, "num_local_experts": 4}
LLAMA_4 = {**FOUR, "intermediate_size_mlp": 40, "head_dim": 8}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}

VARIANTS: dict[str, tuple[dict[str, object], ...]] = {
    "gemma": ({"head_dim": 8}, {"attention_bias": True, **UNTIED}),
    "gemma2": ({"head_dim": 8}, {"attention_bias": True, **UNTIED}),
    "gemma3_text": ({"head_dim": 8}, {"attention_bias": True, **UNTIED}),
    "phi3": ({"pad_token_id": 0}, {"pad_token_id": 0, "head_dim": 6, **TIED}),
    "gpt2": ({"n_inner": 40}, UNTIED),
    "gpt_neox": ({"attention_bias": False}, {"use_parallel_residual": False, **TIED}),
    "olmo2": ({"head_dim": 6}, {"attention_bias": True, **TIED}),
    "granite": ({"attention_bias": True}, {"mlp_bias": True, "head_dim": 6, **TIED}),
    "cohere": ({"use_qk_norm": True}, {"attention_bias": True, **UNTIED}),
    "cohere2": ({"attention_bias": True}, UNTIED),
    "starcoder2": ({"use_bias": False}, {"head_dim": 6, **UNTIED}),
    "stablelm": (
        {"use_qkv_bias": True},
        {"qk_layernorm": True, **TIED},
        {"use_parallel_residual": True, "qk_layernorm": True},
    ),
    "falcon": (
        {"bias": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"parallel_attn": False, "multi_query": False, "alibi": True},
        {"multi_query": False, "ffn_hidden_size": 40, **UNTIED},
    ),
    "opt": (
        {},
        {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
        {"word_embed_proj_dim": 16, **UNTIED},
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        {"_remove_final_layer_norm": True},
    ),
    "mixtral": ({"head_dim": 16}, TIED),
    "qwen2_moe": (
        {"decoder_sparse_step": 2, "qkv_bias": False},
        {"mlp_only_layers": [1, 2], "shared_expert_intermediate_size": 20, "num_experts": 6, **TIED},
    ),
    "qwen3_moe": (
        {"head_dim": 16, "attention_bias": True},
        {"num_experts": 9, "decoder_sparse_step": 2, "mlp_only_layers": [3], **TIED},
    ),
    "deepseek_v2": (
        {"first_k_dense_replace": 1, "attention_bias": True, "mlp_bias": True},
        {"q_lora_rank": None, "n_shared_experts": 3, "attention_bias": True, **TIED},
    ),
    "deepseek_v3": (
        {"first_k_dense_replace": 1, "attention_bias": True},
        {"first_k_dense_replace": 2, "q_lora_rank": None, **TIED},
    ),
    "gpt_oss": ({"attention_bias": False}, {"head_dim": 6, **TIED}),
    "glm4_moe": (
        {"use_qk_norm": True, "attention_bias": True, "head_dim": 12},
        {"first_k_dense_replace": 3, "n_shared_experts": 2, **TIED},
    ),
    "llama4_text": (
        {"interleave_moe_layer_step": 2, "attention_bias": True},
        {"moe_layers": [0, 3], "use_qk_norm": False, **TIED},
    ),
}
"""Every option of a configuration that changes a shape."""

SMALL = {
    **dict.fromkeys(VARIANTS, GQA),
    **dict.fromkeys(("gpt_neox",), MHA),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), MOE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT),
    **dict.fromkeys(("mixtral", "gpt_oss"), FOUR),
    "gpt2": GPT2,
    "falcon": FALCON,
    "opt": OPT,
    "glm4_moe": EIGHT,
    "llama4_text": LLAMA_4,
}

NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}}
"""Keys without a default."""


def like_llama(*sizes: int, **more: object) -> dict[str, object]:
    return dict(zip(USUAL, sizes, strict=True)) | more


USUAL = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size"),
)
YARN = {
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
}
EIGHTFOLD = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
MILLION = {"rope_theta": 1e6}

PUBLISHED: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral-8x7b": (
        "mixtral",
        like_llama(4096, 14336, 32, 32, 8, 32000, max_position_embeddings=32768),
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        like_llama(2048, 6144, 48, 32, 4, 151936, head_dim=128, max_position_embeddings=40960, **MILLION)
        | {"norm_topk_prob": True},
    ),
    "qwen1.5-moe-a2.7b": ("qwen2_moe", {"max_position_embeddings": 8192, **MILLION}),
    "deepseek-v2": (
        "deepseek_v2",
        like_llama(5120, 12288, 60, 128, 128, 102400, max_position_embeddings=163840, n_group=8, topk_group=3)
        | {"n_routed_experts": 160, "num_experts_per_tok": 6, "moe_intermediate_size": 1536}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 16.0, **YARN}
        | {"topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": ("deepseek_v3", {"max_position_embeddings": 163840, **YARN}),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "glm-4.5": (
        "glm4_moe",
        like_llama(5120, 12288, 92, 96, 8, 151552, head_dim=128, attention_bias=True, use_qk_norm=True)
        | {"n_routed_experts": 160, "moe_intermediate_size": 1536, "first_k_dense_replace": 3, **MILLION}
        | {"routed_scaling_factor": 2.5},
    ),
    "llama-4-maverick": (
        "llama4_text",
        {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}
        | {"max_position_embeddings": 262144},
    ),
    "gemma-7b": ("gemma", {}),
    "gemma-2-27b": ("gemma2", like_llama(4608, 36864, 46, 32, 16, 256000, head_dim=128)),
    "gemma-3-27b": (
        "gemma3_text",
        like_llama(5376, 21504, 62, 32, 16, 262208, head_dim=128, sliding_window=1024, **EIGHTFOLD),
    ),
    "phi-3-mini": ("phi3", {"sliding_window": 2047}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "gpt-3-175b": ("gpt2", {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048}),
    "gpt-neox-20b": ("gpt_neox", {"hidden_act": "gelu_fast"}),
    "olmo-2-13b": (
        "olmo2",
        like_llama(5120, 13824, 40, 40, 40, 100352, max_position_embeddings=4096, rms_norm_eps=1e-6)
        | {"rope_theta": 5e5},
    ),
    "granite-3.3-8b": (
        "granite",
        like_llama(4096, 12800, 40, 32, 8, 49159, max_position_embeddings=131072, rms_norm_eps=1e-5)
        | {"rope_theta": 1e7, **TIED},
    ),
    "command-r": ("cohere", {"rope_theta": 8e6}),
    "starcoder2-15b": (
        "starcoder2",
        like_llama(6144, 24576, 40, 48, 4, 49152, max_position_embeddings=16384, sliding_window=4096)
        | {"rope_theta": 1e5, "initializer_range": 0.01275, **UNTIED},
    ),
    "stablelm-3b": ("stablelm", {}),
    "falcon-7b": ("falcon", {}),
    "falcon-40b": (
        "falcon",
        {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8}
        | {"new_decoder_architecture": True},
    ),
    "opt-350m": (
        "opt",
        {"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    ),
}
"""Configurations of the model cards, where they differ from transformers' defaults."""

CASES: dict[str, tuple[str, dict[str, object]]] = {
    **{f"{family}-default": (family, NEEDED.get(family, {})) for family in VARIANTS},
    **{
        f"{family}-{number}": (family, {**SMALL[family], **variant})
        for family, variants in VARIANTS.items()
        for number, variant in enumerate(variants)
    },
    **PUBLISHED,
}


def config_of(model_type: str, values: dict[str, object]) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **values)


def on_meta(config: PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def spec_of(config: PreTrainedConfig) -> ModelSpec:
    return model_from_config(json.loads(json.dumps(config.to_dict())), name="x", source="")


class Pair:
    """Our table and transformers' model of one configuration."""

    def __init__(self, model_type: str, values: dict[str, object]) -> None:
        config = config_of(model_type, values)
        self.spec = spec_of(config)
        self.table = parameter_table(self.spec)
        self.model = on_meta(config)
        self.ours = [(tensor.name, tensor.shape) for tensor in self.table.tensors()]
        self.theirs = [
            (name, tuple(parameter.shape))
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        ]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(*CASES[request.param])


def test_every_family_has_a_reader_a_rule_and_a_case():
    families = set(ModelType.__args__)
    assert families == set(READERS) == set(FAMILIES)
    assert families == set(VARIANTS) | set(BUILT_TYPES)


def test_count_equals_that_of_transformers(pair):
    assert pair.table.parameters == sum(int(np.prod(shape)) for _, shape in pair.theirs)


def test_names_and_shapes_equal_those_of_transformers(pair):
    assert len(pair.ours) == len({name for name, _ in pair.ours})
    assert sorted(pair.ours) == sorted(pair.theirs)


def test_order_is_that_of_transformers(pair):
    """Within every unit; and over an untied model, where OPT alone lists its final norm first."""
    place = {name: index for index, (name, _) in enumerate(pair.theirs)}
    for unit in pair.table.units:
        places = [place[tensor.name] for tensor in unit.tensors]
        assert places == sorted(places)
    if not pair.spec.tied_embeddings and pair.spec.model_type != "opt":
        assert pair.ours == pair.theirs


def test_a_spec_comes_back_from_toml_equal(pair):
    assert ModelSpec.from_toml(pair.spec.to_toml()) == pair.spec


def test_blocks_cover_every_layer_once(pair):
    layers = [layer for unit in pair.table.blocks for layer in unit.layers]
    assert sorted(layers) == list(range(pair.spec.layers))
    assert all(unit.copies == len(unit.layers) for unit in pair.table.blocks)
    for unit in pair.table.blocks:
        for layer in (unit.layers[0], unit.layers[-1]):
            assert pair.table.block(layer) == unit
            assert {(tensor.name, tensor.shape) for tensor in unit.at(layer)} <= set(pair.theirs)


def test_the_table_of_the_live_model_is_the_same(pair):
    """Names, shapes and roles, without a reader; units too, but for OPT's order."""
    live = live_table(pair.model)

    def tensors(table: ParameterTable) -> dict[str, tuple[object, ...]]:
        return {tensor.name: (tensor.shape, tensor.role) for tensor in table.tensors()}

    ours = tensors(pair.table)
    if pair.spec.embedding_projection:  # no name says what these matrices are for
        ours = {
            name: (shape, "feed_forward" if "project_" in name else role)
            for name, (shape, role) in ours.items()
        }
    assert tensors(live) == ours
    if pair.spec.model_type != "opt":
        assert [(u.kind, u.layers, [t.name for t in u.tensors]) for u in live.units] == [
            (u.kind, u.layers, [t.name for t in u.tensors]) for u in pair.table.units
        ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_the_preset(name):
    same = {"name": name, "source": preset(name).source}
    assert spec_of(config_of(*PUBLISHED[name])).model_copy(update=same) == preset(name)


SIZE_KEYS = {"vocab_size", "n_embd", "n_layer", "n_head", "ffn_dim", *MHA}


@pytest.mark.parametrize("model_type", VARIANTS)
def test_keys_left_out_take_the_defaults_of_transformers(model_type):
    theirs = config_of(model_type, NEEDED.get(model_type, {})).to_dict()
    kept = {*SIZE_KEYS, "model_type", *NEEDED.get(model_type, {})}
    required = {key: value for key, value in theirs.items() if key in kept}
    assert model_from_config(required, name="x", source="") == model_from_config(theirs, name="x", source="")


@pytest.mark.parametrize("family", ["gemma3", "llama4"])
def test_of_a_model_for_text_and_images_the_text_part_is_read(family):
    inner = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    inner |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96}
    whole = {"model_type": family, "vision_config": {"hidden_size": 7}, "text_config": inner}
    text = {"model_type": f"{family}_text", **inner}
    assert model_from_config(whole, name="x") == model_from_config(text, name="x")
    live = on_meta(config_of(f"{family}_text", inner))
    assert parameter_table(model_from_config(whole, name="x")).parameters == sum(
        parameter.numel() for parameter in live.parameters()
    )


# Published numbers


@pytest.mark.parametrize(
    ("fixture", "name", "parameters", "active"),
    [
        (1, "gpt2", 124_439_808, 124_439_808),
        (7, "mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        (8, "qwen2.5-7b", 7_615_616_512, 7_615_616_512),
        (9, "qwen3-8b", 8_190_735_360, 8_190_735_360),
        (10, "qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
        (11, "deepseek-v2", 235_741_434_880, 21_375_800_320),
        (11, "deepseek-v3", 671_026_404_352, 37_552_282_624),
    ],
)
def test_published_counts(fixture, name, parameters, active):
    """FORMULAE section 9, sources there: Hugging Face's metadata and model cards. Active counts include the
    input embedding: 12.9e9 of Mixtral's paper, 3.3e9 of Qwen3's, 21e9 of DeepSeek-V2's, 37e9 of V3's.
    """
    assert parameter_table(preset(name)).parameters == parameters
    assert active_parameters(preset(name)) == active


def test_correction_biases_are_buffers_and_mtp_is_apart():
    """FORMULAE fixture 11 adds DeepSeek-V3's biases, a number for each expert: 671,026,419,200."""
    model = preset("deepseek-v3")
    assert model.moe is not None
    buffers = 58 * model.moe.experts
    assert parameter_table(model).parameters + buffers == 671_026_419_200
    embedding = model.vocab * model.hidden
    assert round((active_parameters(model) - embedding) / 1e9, 2) == 36.63
    assert round(mtp_parameters(model) / 1e9, 2) == 11.61
    assert round((mtp_parameters(model) + 2 * embedding) / 1e9, 2) == 13.46


@pytest.mark.parametrize(("name", "stored"), [("glm-4.5", 358_337_791_296), ("glm-4.5-air", 110_468_824_832)])
def test_stored_weights_are_model_mtp_and_buffers(name, stored):
    """Totals of the safetensors files on the model cards; they hold embedding and head of the extra layer."""
    model = preset(name)
    assert model.moe is not None
    with_experts = sum(model.moe.covers(layer) for layer in range(model.layers)) + model.mtp_layers
    copies = 2 * model.mtp_layers * model.vocab * model.hidden
    whole = parameter_table(model).parameters + mtp_parameters(model)
    assert whole + copies + with_experts * model.moe.experts == stored


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_mtp_equals_that_of_transformers(family):
    values = {**SMALL[family], "first_k_dense_replace": 1, "num_nextn_predict_layers": 2}
    config = config_of(family, values)
    main_model = on_meta(config)
    with torch.device("meta"):
        theirs = MtpModel(main_model, 2)
    shared = {id(parameter) for parameter in main_model.parameters()}
    shapes = [tuple(parameter.shape) for parameter in theirs.parameters() if id(parameter) not in shared]
    model = spec_of(config)
    assert Counter(tensor.shape for tensor in mtp_tensors(model)) == Counter(shapes)
    assert {tensor.role for tensor in mtp_tensors(model)} == {"mtp"}
    assert len({tensor.name for tensor in mtp_tensors(model)}) == len(shapes)
    assert parameter_table(model).parameters == sum(
        parameter.numel() for parameter in main_model.parameters()
    )


@pytest.mark.parametrize(
    ("layers", "hidden", "billions"),
    [
        *[(24, 2304, 1.7), (30, 3072, 3.6), (36, 4096, 7.5), (40, 6144, 18.4), (48, 8192, 39.1)],
        *[(60, 10240, 76.1), (80, 12288, 145.6), (96, 16384, 310.1), (105, 20480, 529.6)],
        (128, 25600, 1008.0),
    ],
)
def test_closed_form_of_gpt(layers, hidden, billions):
    """FORMULAE fixture 12: Narayanan et al. 2021, arXiv:2104.04473, table 1; V = 51200, s = 2048."""
    parameters = gpt_parameters(layers, hidden, 51200, 2048)
    published = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + 2048) / (12 * layers * hidden))
    assert parameters == round(published)
    assert abs(parameters / 1e9 - billions) < 0.1  # the paper's 76.1 and 529.6 are 76.0 and 529.5


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 200), st.integers(1, 99))
def test_closed_form_leaves_out_the_final_norm_alone(layers, heads, vocab, positions):
    hidden = 4 * heads
    sizes = {"layers": layers, "hidden": hidden, "ffn": 4 * hidden, "heads": heads, "kv_heads": heads}
    sizes |= {"head_size": 4, "vocab": vocab, "max_positions": positions}
    table = parameter_table(preset("gpt2").model_copy(update=sizes))
    assert table.parameters == gpt_parameters(layers, hidden, vocab, positions) + 2 * hidden


# Units, splits, roles


def test_blocks_of_two_shapes_are_two_units():
    table = parameter_table(preset("deepseek-v3"))
    kinds = [(unit.kind, unit.copies) for unit in table.units]
    assert kinds == [(EMBEDDING, 1), (BLOCK, 3), (BLOCK, 58), (HEAD, 1)]
    assert table.blocks[0].layers == (0, 1, 2)
    assert table.block(60).tensors[-1].name == "model.layers.3.post_attention_layernorm.weight"
    with pytest.raises(AssertionError, match="2 kinds of block: say which layer"):
        table.unit(BLOCK)


def test_interleaved_blocks_stand_in_forward_order():
    table = parameter_table(preset("llama-4-maverick"))
    assert [unit.layers[:3] for unit in table.blocks] == [(0, 2, 4), (1, 3, 5)]
    numbers = [int(tensor.name.split(".")[2]) for tensor in table.tensors() if ".layers." in tensor.name]
    assert numbers == sorted(numbers)


def test_tied_embeddings_leave_learned_positions_in_front():
    units = {unit.kind: [t.name for t in unit.tensors] for unit in parameter_table(preset("gpt2")).units}
    assert units[EMBEDDING] == ["transformer.wpe.weight"]
    assert units[HEAD] == ["transformer.wte.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v3", "opt-350m"])
def test_shards_are_those_of_torch_chunk(name):
    degrees = np.array([1, 2, 3, 8, 48, 1000])
    for unit in parameter_table(preset(name)).units:
        for degree, padded in zip(degrees.tolist(), unit.shard_numel(degrees).tolist(), strict=True):
            first = [torch.empty(t.shape, device="meta").chunk(degree)[0].numel() for t in unit.tensors]
            assert padded == sum(first)


def roles_of(name: str) -> dict[str, str]:
    block = parameter_table(preset(name)).block(preset(name).layers - 1)
    stem = f"{block.stem}.{block.layers[0]}."
    return {tensor.name.removeprefix(stem): tensor.role for tensor in block.tensors}


def test_roles_of_a_block_with_experts():
    roles = roles_of("deepseek-v3")
    assert roles["mlp.gate.weight"] == "router"
    assert roles["mlp.experts.gate_up_proj"] == roles["mlp.experts.down_proj"] == "expert"
    assert roles["mlp.shared_experts.up_proj.weight"] == "shared_expert"
    assert roles["self_attn.kv_a_layernorm.weight"] == "norm"
    assert roles["self_attn.kv_b_proj.weight"] == "attention"
    assert roles_of("qwen1.5-moe-a2.7b")["mlp.shared_expert_gate.weight"] == "shared_expert"
    assert roles_of("gpt-oss-20b")["self_attn.sinks"] == "attention"
    assert [tensor.role for tensor in parameter_table(preset("opt-350m")).units[0].tensors] == [
        "position",
        "embedding",
    ]


def splits_of(name: str) -> dict[str, dict[str, int]]:
    table = parameter_table(preset(name))
    return {
        tensor.name.rpartition(f".{table.blocks[-1].layers[0]}.")[2]: dict(tensor.splits)
        for unit in (table.blocks[-1], *(unit for unit in table.units if unit.kind != BLOCK))
        for tensor in unit.tensors
    }


@pytest.mark.parametrize(
    ("name", "columns", "rows", "whole"),
    [
        (
            "llama-3.1-8b",
            ["self_attn.q_proj.weight", "mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"],
            ["self_attn.o_proj.weight", "mlp.down_proj.weight"],
            ["input_layernorm.weight", "model.norm.weight"],
        ),
        (
            "falcon-40b",
            ["self_attention.query_key_value.weight", "mlp.dense_h_to_4h.weight"],
            ["self_attention.dense.weight", "mlp.dense_4h_to_h.weight"],
            ["ln_attn.weight", "ln_attn.bias"],
        ),
        (
            "deepseek-v3",
            [
                "self_attn.q_b_proj.weight",
                "self_attn.kv_b_proj.weight",
                "mlp.shared_experts.gate_proj.weight",
            ],
            ["self_attn.o_proj.weight", "mlp.shared_experts.down_proj.weight"],
            ["self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "mlp.gate.weight"],
        ),
        (
            "gpt2",  # a weight of Conv1D is transposed
            ["attn.c_proj.weight", "mlp.c_proj.weight", "mlp.c_fc.bias"],
            ["attn.c_attn.weight", "mlp.c_fc.weight"],
            ["attn.c_attn.bias", "attn.c_proj.bias", "mlp.c_proj.bias", "transformer.wpe.weight"],
        ),
    ],
)
def test_tensor_parallelism_splits_heads_widths_and_the_vocabulary(name, columns, rows, whole):
    splits = splits_of(name)
    assert all(split["dp_shard"] == 0 for split in splits.values())
    assert {splits[tensor]["tp"] for tensor in columns} == {0}
    assert {splits[tensor]["tp"] for tensor in rows} == {1}
    assert not any("tp" in splits[tensor] for tensor in whole)
    assert not any("ep" in splits[tensor] for tensor in (*columns, *rows, *whole))


@pytest.mark.parametrize(("name", "up", "down"), [("mixtral-8x7b", 1, 2), ("gpt-oss-20b", 2, 1)])
def test_expert_parallelism_splits_the_stack_and_tensor_parallelism_inside(name, up, down):
    splits = splits_of(name)
    assert splits["mlp.experts.gate_up_proj"] == {"dp_shard": 0, "tp": up, "ep": 0}
    assert splits["mlp.experts.down_proj"] == {"dp_shard": 0, "tp": down, "ep": 0}
    if name == "gpt-oss-20b":
        assert splits["mlp.experts.gate_up_proj_bias"] == {"dp_shard": 0, "tp": 1, "ep": 0}
        assert splits["mlp.experts.down_proj_bias"] == {"dp_shard": 0, "ep": 0}
        assert splits["self_attn.sinks"] == {"dp_shard": 0, "tp": 0}


PLANNED = ("gemma3_text", "gpt_neox", "granite", "cohere", "starcoder2", "deepseek_v3", "mixtral", "glm4_moe")


@pytest.mark.parametrize("family", PLANNED)
def test_splits_agree_with_the_tp_plan_of_transformers(family):
    """Where transformers splits a matrix by columns or rows, so does the table."""
    pair = Pair(family, {**SMALL[family], **NEEDED.get(family, {})})
    tensors = {tensor.name: tensor for tensor in pair.table.tensors()}
    stem = pair.table.blocks[-1].stem
    agreed = 0
    for pattern, way in type(pair.model.config).base_model_tp_plan.items():
        name = pattern.replace("layers.*", f"{stem}.{pair.spec.layers - 1}") + ".weight"
        if name in tensors and way in ("colwise", "rowwise"):
            assert tensors[name].splits["tp"] == {"colwise": 0, "rowwise": 1}[way], name
            agreed += 1
    assert agreed >= 3


# Any other decoder


@pytest.mark.parametrize(
    ("model_type", "parameters"),
    [("gpt_bigcode", None), ("gptj", 6_050_882_784), ("olmoe", None), ("jamba", None), ("mpt", None)],
)
def test_any_decoder_of_transformers_is_counted(model_type, parameters):
    table = meta_table({"model_type": model_type})
    model = on_meta(config_of(model_type, {}))
    assert table.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert parameters is None or table.parameters == parameters  # EleutherAI/gpt-j-6b's model card
    assert {name for name, _ in model.named_parameters()} == {tensor.name for tensor in table.tensors()}
    assert table.layers == model.config.num_hidden_layers


def test_a_gate_routes_only_where_there_are_experts():
    roles = Counter(tensor.role for tensor in meta_table({"model_type": "olmoe"}).tensors())
    assert roles["router"] == 16
    assert roles["expert"] == 32
    bigcode = Counter(tensor.role for tensor in meta_table({"model_type": "gpt_bigcode"}).tensors())
    assert bigcode["position"] == bigcode["embedding"] == 1
    assert "router" not in bigcode


def test_counted_takes_presets_known_and_foreign_configurations(tmp_path):
    assert counted("deepseek-v3")[2:] == (37_552_282_624, mtp_parameters(preset("deepseek-v3")))
    known, foreign = tmp_path / "known", tmp_path / "foreign"
    config_of("gpt2", GPT2).save_pretrained(known)
    config_of("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}).save_pretrained(foreign)
    assert counted(str(known)).table == parameter_table(spec_of(config_of("gpt2", GPT2)))
    count = counted(str(foreign))
    assert (count.name, count.table.layers, count.mtp) == ("foreign", 2, 0)
    assert count.active == count.table.parameters


@pytest.mark.parametrize(("module", "extra"), [("transformers", "hf"), ("torch", "train")])
def test_a_foreign_decoder_without_transformers_says_what_to_install(monkeypatch, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"'bloom'.* needs the extra \[{extra}\]: pip install"):
        meta_table({"model_type": "bloom"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "lama"}, r"'lama' is not supported \(did you mean 'llama'\?\): it is no causal"),
        ({"model_type": "no such"}, "model_type='no such' is not supported: it is no causal language model"),
        ({"model_type": "t5"}, "model_type='t5' is not supported: it is no causal language model"),
        (
            {"model_type": "bloom", "hidden_size": "wide"},
            "transformers cannot build this bloom: .*hidden_size",
        ),
    ],
)
def test_what_transformers_cannot_build_is_one_clear_error(config, message):
    with pytest.raises(ModelError, match=message) as raised:
        meta_table(config)
    assert "\n" not in str(raised.value)


# Errors

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.sampled_from(["", "all", "full_attention", "gelu", "1"]),
    st.lists(st.one_of(st.integers(-1, 9), st.just("full_attention")), max_size=5),
    st.just({}),
    st.just({"rope_type": "yarn"}),
)

SMALL_CONFIGS = {
    family: config_of(family, {**SMALL[family], **VARIANTS[family][0]}).to_dict() for family in VARIANTS
}


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_configuration_is_a_model_or_one_error(data):
    config = dict(SMALL_CONFIGS[data.draw(st.sampled_from(sorted(SMALL_CONFIGS)))])
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[key] = data.draw(JUNK)
    try:
        model = model_from_config(config, name="x")
    except ModelError:
        return
    table = parameter_table(model)
    assert table.parameters == sum(tensor.numel for tensor in table.tensors())
    assert active_parameters(model) <= table.parameters


def faults_of(model_type: str, **more: object) -> str:
    with pytest.raises(ModelError) as raised:
        model_from_config(SMALL_CONFIGS[model_type] | more, name="x", source="config.json")
    return str(raised.value)


@pytest.mark.parametrize(
    ("model_type", "more", "message"),
    [
        ("deepseek_v2", {"num_experts_per_tok": None}, "key 'num_experts_per_tok' is missing"),
        (
            "deepseek_v3",
            {"moe_intermediate_size": "x"},
            "moe_intermediate_size='x' must be a whole number of",
        ),
        ("mixtral", {"num_experts_per_tok": 9}, "top_k=9 is more than experts=4"),
        ("glm4_moe", {"n_group": 3}, "groups=3 does not divide experts=8"),
        (
            "glm4_moe",
            {"first_k_dense_replace": 4},
            "moe covers none of the 4 layers: lower first_dense_layers",
        ),
        (
            "llama4_text",
            {"moe_layers": [], "interleave_moe_layer_step": 1},
            "moe covers none of the 4 layers",
        ),
        ("gpt2", {"n_embd": 33}, "n_head=4 does not divide n_embd=33: give another number of heads"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=true is not supported"),
        ("gpt2", {"n_layer": None}, "key 'n_layer' is missing"),
        (
            "gemma2",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries for 4 layers: give one for",
        ),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers='all' must be a list of whole numbers"),
        ("qwen3_moe", {"mlp_only_layers": [7]}, r"moe.dense_layers=\[7\] names layers beyond the last, 3"),
        (
            "falcon",
            {"activation": "tanh"},
            "activation='tanh' is not supported: use one of silu, swish, gelu",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "spiral"}},
            "rope_type='spiral' is not supported: use one",
        ),
        ("opt", {"ffn_dim": 0}, "ffn_dim=0 must be a whole number of at least 1"),
    ],
)
def test_one_clear_message(model_type, more, message):
    with pytest.raises(ModelError, match=message):
        model_from_config(SMALL_CONFIGS[model_type] | more, name="x")


def test_faults_of_a_new_family_are_reported_at_once():
    message = faults_of("deepseek_v3", hidden_size=0, n_shared_experts=-1, hidden_act="tanh", vocab_size=None)
    for part in (
        "key 'vocab_size' is missing",
        "hidden_size=0 must be a whole number of at least 1",
        "n_shared_experts=-1 must be a whole number of at least 0",
        "hidden_act='tanh' is not supported",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gemma-2-9b",
            {"norm_placement": "pre"},
            "norm_placement='pre' does not go with model_type='gemma2': use",
        ),
        (
            "llama-3.1-8b",
            {"gated_mlp": False},
            "gated_mlp=False does not go with model_type='llama': use True",
        ),
        ("mixtral-8x7b", {"moe": None}, "model_type='mixtral' needs the group 'moe'"),
        ("deepseek-v3", {"mla": None}, "model_type='deepseek_v3' needs the group 'mla'"),
        ("deepseek-v3", {"head_size": 128}, "head_size=128 is not nope_size [+] rope_size of mla: use 192"),
        ("deepseek-v3", {"kv_heads": 64}, "kv_heads=64 does not go with mla: use that of heads, 128"),
        ("pythia-12b", {"shared_norm": True}, "shared_norm=True does not go with model_type='gpt_neox'"),
        ("stablelm-3b", {"shared_norm": True}, "shared_norm=True does not go with parallel_block=False"),
        ("opt-125m", {"norm_weight": False}, "norm_bias=True does not go with a norm that is no LayerNorm"),
        ("gemma-2-9b", {"full_attention_layers": [42]}, "full_attention_layers=.*beyond the last, 41"),
    ],
)
def test_fields_that_contradict_the_family(name, changes, message):
    values = preset(name).model_dump(exclude_none=True) | changes
    with pytest.raises(ModelError, match=message):
        ModelSpec.checked({key: value for key, value in values.items() if value is not None})


def test_the_llama_family_has_the_plain_fields():
    assert {name: ModelSpec.model_fields[name].default for name in PLAIN} == PLAIN
    assert all(FAMILIES[family] == FAMILIES["llama"] for family in ("mistral", "qwen2", "qwen3"))


# Memory and time

JOB = Job(seq=512, global_batch=8)
NEW = [name for name in preset_names() if preset(name).model_type not in BUILT_TYPES]


def layouts_of(model):
    """Plain data parallelism, and what tp, a pipeline and ep of two make of it, where the model allows it."""
    layouts = [Layout(dp_shard=8, zero_stage=3), Layout(dp_shard=8, zero_stage=3, recompute="full")]
    etp = {} if model.moe is None else {"etp": 2}
    layouts.append(Layout(dp_shard=4, tp=2, sp=True, zero_stage=3, **etp))
    if model.moe is not None:
        layouts.append(Layout(dp_shard=8, ep=2, zero_stage=3))
    if model.layers > 1:
        split = stage_layers(model.layers, 2)
        layouts.append(Layout(pp=2, dp_shard=4, schedule="1F1B", stage_layers=split, zero_stage=1))
    return [layout for layout in layouts if not model_faults(layout, model, JOB)]


@pytest.mark.parametrize("name", NEW)
def test_every_family_has_memory_and_time(name):
    """More than its state at rest, which is 16 B a parameter; and at least its products at the peak rate."""
    model, cluster = preset(name), cluster_of("h100-sxm", 8)
    layouts = layouts_of(model)
    assert len(layouts) > 1
    table = table_of(layouts, model.layers)
    device = device_memory(model, JOB, cluster.device, table)
    seconds = np.broadcast_to(step_time(model, JOB, cluster, table).time, device.shape)
    state = 16 * parameter_table(model).parameters / 8
    assert (device > state).all()
    least = model_flops_per_token(model, JOB.seq, causal=True) * JOB.tokens_per_step / 8
    assert (seconds > least / cluster.device.bf16).all()
    assert (np.isfinite(device) & np.isfinite(seconds)).all()
    reasons = not_runnable_reasons(model, JOB, Layout())
    assert any("is only modelled: train one of llama" in reason for reason in reasons)


@pytest.mark.parametrize("family", sorted({preset(name).model_type for name in NEW}))
def test_every_family_is_planned(family):
    """Its smallest preset: a layout that fits is found, with a memory and a time, and is not runnable."""
    models = [preset(name) for name in NEW if preset(name).model_type == family]
    smallest = min(models, key=lambda model: parameter_table(model).parameters)
    fixed = {"pp": 1, "micro_batch": 1, "recompute": 2, "order": 0, "dispatch": 0}
    found = find(smallest, JOB, cluster_of("b200-sxm", 64), fixed, top=1)
    best = found.document["best"][0]
    assert 0 < best["memory"]["device"] <= found.document["device_memory"]
    assert best["step_time"] > 0
    assert found.document["ranking"] == "time"
    assert not best["runnable"]


def test_params_prints_active_and_mtp_parameters(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shardwright", "params", "deepseek-v3", "--json"])
    with pytest.raises(SystemExit):
        main()
    document = json.loads(capsys.readouterr().out)
    assert document["parameters"] == 671_026_404_352
    assert document["active_parameters"] == 37_552_282_624
    assert document["mtp_parameters"] == mtp_parameters(preset("deepseek-v3"))
    assert sum(int(np.prod(tensor["shape"])) for tensor in document["tensors"]) == document["parameters"]
    monkeypatch.setattr(sys, "argv", ["shardwright", "params", "deepseek-v3"])
    with pytest.raises(SystemExit):
        main()
    text = " ".join(capsys.readouterr().out.split())
    assert "37,552,282,624 active for a token" in text
    assert "multi-token prediction: 11,610,067,968" in text
    assert text.count("self_attn.o_proj") == 1
    assert text.count("mlp.experts.down_proj") == 1
