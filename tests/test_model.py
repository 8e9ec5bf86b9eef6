"""ModelSpec: its rules, and the shipped presets against published numbers."""

import pytest

from shardwright.errors import ModelError
from shardwright.model import BUILT_TYPES, ModelSpec, preset, preset_names, unbuilt_reasons
from shardwright.plan.params import parameter_table

TINY = {
    "name": "tiny",
    "model_type": "llama",
    "layers": 2,
    "hidden": 16,
    "ffn": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 4,
    "vocab": 64,
}

PARAMETERS = {
    "bytes-5m": 4_590_848,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
    "aya-expanse-8b": 8_028_033_024,
    "command-r": 34_980_831_232,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "falcon-7b": 7_217_189_760 - 65024 * 4544,
    "falcon-40b": 41_303_293_952,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_002_240 + 64 * 5376,
    "glm-4.5": 352_797_829_024 - 89 * 160,
    "glm-4.5-air": 106_852_245_504,
    "gpt-3-175b": 174_604_259_328,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "granite-3.3-8b": 8_170_864_640,
    "llama-4-maverick": 401_583_781_376 - 871_932_416,
    "llama-4-scout": 108_641_793_536 - 871_932_416,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "stablelm-3b": 2_795_443_200,
    "starcoder2-15b": 15_957_889_024,
}
"""Published counts: keras-hub's presets, model cards, and the weights' own metadata on them.

Llama-2-70B is without its 80 x 64 stored rotary buffers, Falcon-7B without the stored copy of its tied head,
Gemma-3-27B with the 64 rows for images that its text_config counts, GLM-4.5 without the correction biases of
its experts, Llama 4 without the weights for images. Of Command R, Falcon-40B and GPT-3 (table D.1) rounded
counts are printed, 35e9, 40e9 and 174.6e9: these are transformers' own. tests/plan/test_families.py shows how
GLM-4.5-Air's stored total comes about.
"""


def test_every_preset_has_a_published_count():
    assert sorted(PARAMETERS) == preset_names()


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_preset_has_its_published_parameters(name):
    model = preset(name)
    assert model.name == name
    assert model.source
    assert parameter_table(model).parameters == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama-2-7b", {"norm_eps": 1e-5, "rope_theta": 1e4, "max_positions": 4096, "rope_scaling": None}),
        ("llama-3-8b", {"norm_eps": 1e-5, "rope_theta": 5e5, "max_positions": 8192, "rope_scaling": None}),
        ("mistral-7b", {"sliding_window": 4096, "rope_theta": 1e4, "max_positions": 32768}),
        ("mistral-nemo-12b", {"sliding_window": None, "head_size": 128, "heads": 32, "hidden": 5120}),
        ("qwen2.5-0.5b", {"qkv_bias": True, "out_bias": False, "tied_embeddings": True, "norm_eps": 1e-6}),
        ("qwen2.5-14b", {"qkv_bias": True, "tied_embeddings": False, "norm_eps": 1e-5, "rope_theta": 1e6}),
        ("qwen3-8b", {"qk_norm": True, "qkv_bias": False, "tied_embeddings": False, "max_positions": 40960}),
        ("qwen3-0.6b", {"qk_norm": True, "tied_embeddings": True, "head_size": 128, "hidden": 1024}),
        ("smollm2-135m", {"tied_embeddings": True, "rope_theta": 1e5, "initializer_range": 1 / 24}),
    ],
)
def test_preset_fields_beside_the_count(name, fields):
    values = preset(name).model_dump()
    assert {key: values[key] for key in fields} == fields


@pytest.mark.parametrize(
    ("name", "factor"), [("llama-3.1-8b", 8), ("llama-3.1-405b", 8), ("llama-3.2-1b", 32)]
)
def test_rotary_scaling_of_llama_3(name, factor):
    rope = preset(name).rope_scaling
    assert rope is not None
    assert rope.model_dump() == {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_positions": 8192,
    }


def test_unknown_preset_names_the_nearest():
    with pytest.raises(
        ModelError, match=r"model 'llama-3.1-9b' is neither preset nor file \(did you mean 'llama-3.1-8b'\?\)"
    ):
        preset("llama-3.1-9b")


def test_key_value_heads_must_divide_heads():
    with pytest.raises(ModelError, match=r"kv_heads=3 does not divide heads=4: use kv_heads in \[1, 2, 4\]"):
        ModelSpec.checked(TINY | {"kv_heads": 3})


def test_both_head_faults_are_reported_at_once():
    with pytest.raises(ModelError, match=r"kv_heads=3 does not divide heads=4.*head_size=5 is odd"):
        ModelSpec.checked(TINY | {"kv_heads": 3, "head_size": 5})


@pytest.mark.parametrize("key", ["layers", "hidden", "ffn", "heads", "kv_heads", "head_size", "vocab"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "two"])
def test_counts_are_whole_and_positive(key, value):
    with pytest.raises(ModelError, match=f"{key}="):
        ModelSpec.checked(TINY | {key: value})


def test_unknown_model_type_lists_the_known():
    with pytest.raises(ModelError, match=r"model_type='bert' is not supported \(known: cohere, "):
        ModelSpec.checked(TINY | {"model_type": "bert"})


@pytest.mark.parametrize(
    ("name", "score", "normalise", "scale"),
    [
        ("mixtral-8x7b", "softmax", True, 1.0),
        ("qwen1.5-moe-a2.7b", "softmax", False, 1.0),
        ("qwen3-30b-a3b", "softmax", True, 1.0),
        ("deepseek-v2", "softmax", False, 16.0),
        ("deepseek-v2-lite", "softmax", False, 1.0),
        ("deepseek-v3", "sigmoid", True, 2.5),
        ("glm-4.5", "sigmoid", True, 2.5),
        ("glm-4.5-air", "sigmoid", True, 1.0),
        ("llama-4-scout", "sigmoid", False, 1.0),
    ],
)
def test_routing_is_as_in_the_config_of_the_model_card(name, score, normalise, scale):
    moe = preset(name).moe
    assert (moe.score, moe.normalise, moe.scale) == (score, normalise, scale)


def test_presets_of_built_families_are_built():
    built = [name for name in preset_names() if preset(name).model_type in BUILT_TYPES]
    assert {name: unbuilt_reasons(preset(name)) for name in built} == {name: [] for name in built}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("granite-3.3-8b", {}, "model_type='granite' is only modelled: train one of llama, mistral, "),
        ("mixtral-8x7b", {"activation": "gelu"}, "activation='gelu' with a gate is only modelled"),
        ("starcoder2-15b", {"activation": "relu2"}, "activation='relu2' is only modelled"),
        ("qwen3-8b", {"other_rope": "dynamic"}, "other_rope='dynamic' is only modelled: train a model with"),
        ("glm-4.5", {"rotary_share": 0.01}, "rotary_share=0.01 rotates an odd part of head_size=128"),
        ("gpt2-xl", {"unbuilt": ("reorder=True",)}, "reorder=True is only modelled: train a model without"),
    ],
)
def test_what_is_not_built_has_a_reason(name, changes, reason):
    (found,) = unbuilt_reasons(preset(name).model_copy(update=changes))
    assert found.startswith(reason)
