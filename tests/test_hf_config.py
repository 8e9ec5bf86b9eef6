"""A config.json becomes a ModelSpec, or one clear error with a way out."""

import json
import math
from typing import get_args

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from shardwright.errors import ModelError
from shardwright.hf_config import model_from, model_from_config
from shardwright.model import ModelSpec, ModelType, preset

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def minimal(model_type: str, **more: object) -> dict[str, object]:
    """A configuration with the required keys only, and ``more``."""
    return LLAMA | {"model_type": model_type} | more


def faults_of(config: object) -> str:
    with pytest.raises(ModelError) as raised:
        model_from_config(config, name="x", source="config.json")
    return str(raised.value)


CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_keys_left_out_take_the_defaults_of_transformers(model_type):
    required = minimal(model_type, num_attention_heads=32, hidden_size=4096)
    theirs = CONFIGS[model_type](**{key: value for key, value in required.items() if key != "model_type"})
    ours = model_from_config(required, name="x")
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_size == theirs.head_dim if model_type != "qwen2" else ours.head_size == 128
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.initializer_range == theirs.initializer_range
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_transformers_writes_is_read(model_type, tmp_path):
    CONFIGS[model_type](tie_word_embeddings=True, max_position_embeddings=777).save_pretrained(tmp_path)
    spec = model_from(str(tmp_path))
    assert spec.model_type == model_type
    assert spec.tied_embeddings
    assert spec.max_positions == 777
    assert spec == model_from(str(tmp_path / "config.json"))


def test_a_folder_of_llama_3_1_equals_the_preset(tmp_path):
    config = minimal(
        "llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=131072,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = {"name": "llama-3.1-8b", "source": ""}
    assert model_from(str(tmp_path)).model_copy(update=named) == preset("llama-3.1-8b").model_copy(
        update=named
    )


def test_older_and_newer_rotary_settings_are_equal():
    older = model_from_config(minimal("llama", rope_theta=5e5), name="x")
    newer = model_from_config(
        minimal("llama", rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), name="x"
    )
    assert older == newer
    assert older.rope_theta == 5e5


def test_null_key_value_heads_are_as_many_as_heads_and_absent_ones_the_default():
    assert model_from_config(minimal("mistral", num_key_value_heads=None), name="x").kv_heads == 4
    wide = minimal("mistral", hidden_size=64, num_attention_heads=16)
    assert model_from_config(wide, name="x").kv_heads == 8


def test_biases_follow_the_family():
    def biases(model_type: str, **more: object) -> tuple[bool, bool, bool]:
        spec = model_from_config(minimal(model_type, num_key_value_heads=2, **more), name="x")
        return spec.qkv_bias, spec.out_bias, spec.mlp_bias

    both = {"attention_bias": True, "mlp_bias": True}
    assert biases("llama") == (False, False, False)
    assert biases("llama", **both) == (True, True, True)
    assert biases("mistral", **both) == (False, False, False)
    assert biases("qwen2", **both) == (True, False, False)
    assert biases("qwen3", **both) == (True, True, False)


def test_a_sliding_window_of_qwen_counts_only_if_some_layer_slides():
    def window(**more: object) -> int | None:
        return model_from_config(minimal("qwen2", num_key_value_heads=2, **more), name="x").sliding_window

    assert window(sliding_window=100) is None
    assert window(sliding_window=100, use_sliding_window=True, max_window_layers=2) is None
    assert window(sliding_window=100, use_sliding_window=True, max_window_layers=1) == 100
    assert window(use_sliding_window=True, max_window_layers=0) == 4096


def rope_of(**settings: object) -> ModelSpec:
    return model_from_config(minimal("llama", max_position_embeddings=4096, rope_scaling=settings), name="x")


def test_yarn_has_its_factors_resolved():
    plain = rope_of(rope_type="yarn", factor=4.0).yarn
    assert (plain.original_positions, plain.truncate, plain.score_factor) == (4096, True, 1.0)
    assert plain.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    scales = {"mscale": 1.0, "mscale_all_dim": 0.707, "original_max_position_embeddings": 512}
    scaled = rope_of(rope_type="yarn", factor=40, beta_fast=16, **scales).yarn
    small, large = (0.1 * scale * math.log(40) + 1 for scale in (0.707, 1.0))
    assert scaled.attention_factor == pytest.approx(large / small)
    assert scaled.score_factor == pytest.approx(small**2)
    assert (scaled.original_positions, scaled.beta_fast) == (512, 16.0)
    assert rope_of(rope_type="yarn", factor=4.0, attention_factor=0.5).yarn.attention_factor == 0.5


def test_other_scalings():
    assert rope_of(rope_type="linear", factor=8).linear_rope == 8.0
    assert rope_of(rope_type="su").other_rope == "longrope"
    assert rope_of(rope_type="default").other_rope is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "linear"}, "rope_type='linear' lacks factor: see its model card"),
        (
            {"rope_type": "yarn", "factor": "4"},
            "factor='4' of rope_type='yarn' must be a number of at least 0",
        ),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": True}, "mscale=True of rope_type='yarn' must be"),
        ({"rope_type": "spiral"}, "rope_type='spiral' is not supported: use one of default, llama3, linear"),
    ],
)
def test_scalings_that_cannot_be_read(settings, message):
    assert message in faults_of(minimal("llama", rope_scaling=settings))


def test_scores_of_gpt2_that_are_not_built_are_named():
    config = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 32}
    assert model_from_config({**config, "model_type": "gpt2"}, name="x").unbuilt == ()
    odd = {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}
    found = model_from_config({**config, "model_type": "gpt2", **odd}, name="x").unbuilt
    assert found == ("scale_attn_weights=False", "scale_attn_by_inverse_layer_idx=True")


def test_every_missing_key_is_listed():
    message = faults_of({"model_type": "llama", "hidden_size": 16})
    for key in ("vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert f"key '{key}' is missing" in message


def test_all_faults_are_reported_at_once():
    message = faults_of(
        {
            "hidden_size": 17,
            "intermediate_size": 32,
            "num_hidden_layers": 0,
            "num_attention_heads": 4,
            "hidden_act": "gelu",
            "rope_scaling": {"rope_type": "yarn"},
        }
    )
    for part in (
        "key 'model_type' is missing (known: llama, mistral, qwen2, qwen3, gemma, ",
        "key 'vocab_size' is missing",
        "num_hidden_layers=0 must be a whole number of at least 1",
        "num_attention_heads=4 does not divide hidden_size=17: give head_dim or another number of heads",
        "hidden_act='gelu' is not supported: this family is SwiGLU, use 'silu'",
        "rope_type='yarn' lacks factor: see its model card",
    ):
        assert part in message
    assert message.count("config.json") == 1


def test_unknown_model_type_names_the_nearest_or_the_known():
    assert "model_type='lama' is not supported (did you mean 'llama'?)" in faults_of(minimal("lama"))
    message = faults_of(minimal("bert"))
    assert "model_type='bert' is not supported (known: cohere, " in message
    assert all(name in message for name in get_args(ModelType))


def test_key_value_heads_that_do_not_divide_name_those_that_do():
    message = faults_of(minimal("llama", num_key_value_heads=3))
    assert "kv_heads=3 does not divide heads=4: use kv_heads in [1, 2, 4]" in message


def test_head_dim_frees_hidden_size_from_heads():
    assert model_from_config(minimal("llama", hidden_size=18, head_dim=6), name="x").head_size == 6


@pytest.mark.parametrize("value", [0, -2, 2.5, "2", True])
def test_counts_are_whole_and_positive(value):
    message = faults_of(minimal("llama", num_hidden_layers=value))
    assert f"num_hidden_layers={value!r} must be a whole number of at least 1" in message


def test_incomplete_llama3_scaling_lists_what_lacks():
    message = faults_of(minimal("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0}))
    assert "lacks low_freq_factor, high_freq_factor, original_max_position_embeddings: see" in message


def test_rotary_settings_must_be_an_object():
    assert "rope_scaling='llama3' must be a JSON object or null" in faults_of(
        minimal("llama", rope_scaling="llama3")
    )


def test_a_window_that_is_no_number_is_a_fault():
    assert "sliding_window='all'" in faults_of(
        minimal("mistral", num_key_value_heads=2, sliding_window="all")
    )


def test_truncated_json_names_line_and_column(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{\n  "model_type": "llama",\n  "hidden_size": ')
    with pytest.raises(
        ModelError, match=r"config\.json is not valid JSON \(line 3, column 18: .*fetch it again"
    ):
        model_from(str(path))


@pytest.mark.parametrize(
    ("text", "kind"), [("[1, 2]", "list"), ('"llama"', "str"), ("null", "NoneType"), ("3", "int")]
)
def test_json_that_is_no_object_is_refused(tmp_path, text, kind):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=f"a model configuration is a JSON object, not {kind}"):
        model_from(str(path))


def test_a_folder_without_config_says_what_to_give(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json: give a Hugging Face model's folder"):
        model_from(str(tmp_path))


def test_what_is_neither_file_nor_preset_names_the_nearest():
    with pytest.raises(
        ModelError, match=r"'qwen3-8' is neither preset nor file \(did you mean 'qwen3-8b'\?\)"
    ):
        model_from("qwen3-8")


def test_a_preset_and_a_toml_file_are_models_too(tmp_path):
    spec = preset("qwen3-0.6b")
    assert model_from("qwen3-0.6b") == spec
    (tmp_path / "mine.toml").write_text(spec.to_toml())
    assert model_from(str(tmp_path / "mine.toml")) == spec
