"""ModelSpec: its rules, and the shipped presets against published numbers."""

import pytest

from shardwright.errors import ModelError
from shardwright.model import ModelSpec, preset, preset_names
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
}
"""Published counts: keras-hub's llama, llama3, mistral, qwen and qwen3 presets, and the weights' own metadata
on their model cards. Llama-2-70B is without its 80 x 64 stored rotary buffers.
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
    with pytest.raises(ModelError, match=r"model_type='gpt2'.*'llama', 'mistral', 'qwen2' or 'qwen3'"):
        ModelSpec.checked(TINY | {"model_type": "gpt2"})
