"""The parameter table equals transformers' own, name by name; its shards are those of torch FSDP2."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from shardwright.hf_config import model_from_config
from shardwright.model import ModelSpec, preset
from shardwright.plan.params import (
    BLOCK,
    EMBEDDING,
    HEAD,
    ROOT,
    ParameterTable,
    Tensor,
    Unit,
    parameter_table,
    root_only_table,
)

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama-default": LlamaConfig(),
    "mistral-default": MistralConfig(),
    "qwen2-default": Qwen2Config(),
    "qwen3-default": Qwen3Config(),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mistral-tied": MistralConfig(**SMALL, tie_word_embeddings=True),
    "qwen2-tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3-tied": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "llama-attention-bias": LlamaConfig(**SMALL, attention_bias=True),
    "llama-mlp-bias": LlamaConfig(**SMALL, mlp_bias=True),
    "llama-all-biases-tied": LlamaConfig(
        **SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen3-attention-bias": Qwen3Config(**SMALL, attention_bias=True),
    "llama-head-dim": LlamaConfig(**SMALL, head_dim=24),
    "mistral-head-dim": MistralConfig(**SMALL, head_dim=6),
    "qwen3-head-dim": Qwen3Config(**SMALL, head_dim=10),
    "llama-multi-query": LlamaConfig(**(SMALL | {"num_key_value_heads": 1})),
    "llama-3-8b": LlamaConfig(**LLAMA_3, intermediate_size=14336),
    "llama-3-70b": LlamaConfig(
        **LLAMA_3, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
    "llama-3.1-405b": LlamaConfig(
        **LLAMA_3, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> tuple[ParameterTable, list[tuple[str, tuple[int, ...]]]]:
    """Our table, and transformers' names and shapes in the order of ``named_parameters``."""
    config = CONFIGS[request.param]
    table = parameter_table(model_from_config(config.to_dict(), name=request.param))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return table, [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def test_count_equals_that_of_transformers(pair):
    table, theirs = pair
    assert table.parameters == sum(int(np.prod(shape)) for _, shape in theirs)


def test_names_and_shapes_equal_those_of_transformers(pair):
    table, theirs = pair
    ours = [(tensor.name, tensor.shape) for tensor in table.tensors()]
    assert len(ours) == len({name for name, _ in ours})
    assert sorted(ours) == sorted(theirs)


def test_order_within_every_unit_is_that_of_transformers(pair):
    table, theirs = pair
    place = {name: index for index, (name, _) in enumerate(theirs)}
    for unit in table.units:
        places = [place[tensor.name] for tensor in unit.tensors]
        assert places == sorted(places)


def test_order_of_an_untied_model_is_that_of_transformers(pair):
    table, theirs = pair
    ours = [(tensor.name, tensor.shape) for tensor in table.tensors()]
    if table.unit(EMBEDDING).copies:
        assert ours == theirs
    else:  # tied: the embedding, being the head too, is gathered last
        assert ours[:-2] == theirs[1:-1]
        assert ours[-2:] == [theirs[0], theirs[-1]]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as printed by the models' own metadata and keras-hub
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-2-13b", 13_015_864_320),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_published_counts(name, parameters):
    table = parameter_table(preset(name))
    assert table.parameters == parameters
    assert sum(tensor.numel for tensor in table.tensors()) == parameters


def test_units_are_embedding_blocks_and_head():
    untied, tied = parameter_table(preset("llama-3.1-8b")), parameter_table(preset("llama-3.2-1b"))
    assert [(unit.kind, unit.copies) for unit in untied.units] == [(EMBEDDING, 1), (BLOCK, 32), (HEAD, 1)]
    assert [(unit.kind, unit.copies) for unit in tied.units] == [(BLOCK, 16), (HEAD, 1)]
    assert [tensor.name for tensor in tied.unit(HEAD).tensors] == [
        "model.embed_tokens.weight",
        "model.norm.weight",
    ]


def test_a_unit_that_is_not_there_is_empty():
    none = parameter_table(preset("llama-3.2-1b")).unit(EMBEDDING)
    assert (none.copies, none.numel, none.shard_numel(np.int64(8))) == (0, 0, 0)


def test_roles():
    roles = {
        tensor.name.split(".")[-2]: tensor.role for tensor in parameter_table(preset("qwen3-8b")).tensors()
    }
    assert roles == {
        "embed_tokens": "embedding",
        **dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj"], "attention"),
        **dict.fromkeys(["gate_proj", "up_proj", "down_proj"], "feed_forward"),
        **dict.fromkeys(["q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "norm"], "norm"),
        "lm_head": "head",
    }


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b"])
def test_root_only_holds_everything_in_one_unit(name):
    table = parameter_table(preset(name))
    root = root_only_table(table)
    assert [(unit.kind, unit.copies) for unit in root.units] == [(ROOT, 1)]
    assert root.units[0].numel == root.parameters == table.parameters
    assert list(root.tensors()) == list(table.tensors())


@settings(deadline=None)
@given(rows=st.integers(1, 300), width=st.integers(1, 4), shard=st.integers(1, 64))
def test_shards_are_those_of_torch_chunk(rows, width, shard):
    """FSDP2 cuts dim 0 with ``torch.chunk`` and pads every shard to the first."""
    unit = Unit(BLOCK, 1, (Tensor("x", (rows, width), "attention"),))
    chunks = torch.chunk(torch.empty(rows, width, device="meta"), shard, dim=0)
    padded = int(unit.shard_numel(np.int64(shard)))
    assert padded == chunks[0].numel()
    assert sum(chunk.numel() for chunk in chunks) == unit.numel
    assert all(chunk.numel() <= padded for chunk in chunks)
    assert unit.numel <= padded * shard < unit.numel + shard * width


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_shards_of_a_model_are_those_of_torch_chunk(name):
    degrees = np.array([1, 2, 3, 7, 8, 64, 1000])
    for unit in parameter_table(preset(name)).units:
        ours = unit.shard_numel(degrees)
        assert ours.shape == degrees.shape
        for degree, padded in zip(degrees.tolist(), ours.tolist(), strict=True):
            first = [torch.empty(t.shape, device="meta").chunk(degree)[0].numel() for t in unit.tensors]
            assert padded == sum(first)


def test_shard_numel_broadcasts():
    unit = parameter_table(preset("llama-3.2-1b")).unit(BLOCK)
    table = unit.shard_numel(np.array([[1, 2], [4, 8]]))
    assert table.shape == (2, 2)
    assert table[0, 0] == unit.numel
    assert table[1, 1] == unit.shard_numel(np.int64(8))


@settings(deadline=None)
@given(
    layers=st.integers(1, 4),
    hidden=st.integers(1, 32),
    ffn=st.integers(1, 64),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 4),
    half=st.integers(1, 8),
    vocab=st.integers(1, 99),
    flags=st.tuples(*[st.booleans()] * 5),
)
def test_count_equals_the_closed_form(layers, hidden, ffn, kv_heads, group, half, vocab, flags):
    """GQA, SwiGLU, RMSNorm: L (2 h a d + 2 h kv d + 3 h f + 2 h + biases) + V h (1 or 2) + h."""
    tied, qkv_bias, out_bias, mlp_bias, qk_norm = flags
    heads, head = kv_heads * group, 2 * half
    model = ModelSpec(
        name="x",
        model_type="llama",
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head,
        vocab=vocab,
        tied_embeddings=tied,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )
    block = 2 * hidden * heads * head + 2 * hidden * kv_heads * head + 3 * hidden * ffn + 2 * hidden
    block += qkv_bias * (heads + 2 * kv_heads) * head + out_bias * hidden
    block += mlp_bias * (2 * ffn + hidden) + qk_norm * 2 * head
    assert parameter_table(model).parameters == layers * block + vocab * hidden * (1 if tied else 2) + hidden
