"""Hugging Face's names of a model's modules, by family, in the order of ``named_parameters``."""

from collections.abc import Mapping

from shardwright.model import ModelSpec
from shardwright.naming import Matrices, Naming

_NARROW_QUERY: Matrices = (
    ("query_down", "q_a_proj"),
    ("query_norm", "q_a_layernorm"),
    ("query_up", "q_b_proj"),
)
_MLA: Matrices = (
    ("key_down", "kv_a_proj_with_mqa"),
    ("key_norm", "kv_a_layernorm"),
    ("key_up", "kv_b_proj"),
    ("mla_out", "o_proj"),
)

_SANDWICH = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)

NAMINGS: Mapping[str, Naming] = {
    "gemma2": Naming(norms=_SANDWICH),
    "gemma3_text": Naming(norms=_SANDWICH),
    "phi3": Naming(
        attention_matrices=(("out", "o_proj"), ("qkv", "qkv_proj")),
        matrices=(("gate_up", "gate_up_proj"), ("down", "down_proj")),
    ),
    "gpt2": Naming(
        stem="transformer.h",
        embedding="transformer.wte",
        position="transformer.wpe",
        final_norm="transformer.ln_f",
        order=("norm", "attention", "norm", "feed_forward"),
        norms=("ln_1", "ln_2"),
        attention="attn.",
        attention_matrices=(("qkv", "c_attn"), ("out", "c_proj")),
        matrices=(("up", "c_fc"), ("down", "c_proj")),
        transposed=True,
    ),
    "gpt_neox": Naming(
        stem="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        order=("norms", "attention", "feed_forward"),
        attention="attention.",
        attention_matrices=(("qkv", "query_key_value"), ("out", "dense")),
        matrices=(("up", "dense_h_to_4h"), ("down", "dense_4h_to_h")),
    ),
    "olmo2": Naming(norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    "starcoder2": Naming(matrices=(("up", "c_fc"), ("down", "c_proj"))),
    "stablelm": Naming(qk_norms=("q_layernorm", "k_layernorm"), norm_module_per_head=True),
    "falcon": Naming(
        stem="transformer.h",
        embedding="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        norms=("post_attention_layernorm", "input_layernorm"),
        parallel_norms=("ln_attn", "ln_mlp"),
        attention="self_attention.",
        attention_matrices=(("qkv", "query_key_value"), ("out", "dense")),
        matrices=(("up", "dense_h_to_4h"), ("down", "dense_4h_to_h")),
    ),
    "opt": Naming(
        stem="model.decoder.layers",
        embedding="model.decoder.embed_tokens",
        position="model.decoder.embed_positions",
        project_in="model.decoder.project_in",
        project_out="model.decoder.project_out",
        final_norm="model.decoder.final_layer_norm",
        order=("attention", "norm", "feed_forward", "norm"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        attention_matrices=(("key", "k_proj"), ("value", "v_proj"), ("query", "q_proj"), ("out", "out_proj")),
        feed_forward="",
        matrices=(("up", "fc1"), ("down", "fc2")),
    ),
    "mixtral": Naming(moe_order=("router", "experts")),
    "qwen2_moe": Naming(moe_order=("router", "experts", "shared", "shared_gate"), shared="shared_expert"),
    "gpt_oss": Naming(moe_order=("router", "experts"), router="router", transposed_experts=True),
    "llama4_text": Naming(
        feed_forward="feed_forward.", router="router", shared="shared_expert", transposed_experts=True
    ),
}
"""Families not named here are called as Llama is. Source: transformers modeling_*.py of each."""


def naming(model: ModelSpec) -> Naming:
    """Names of a model's modules: its own, or its family's."""
    return model.naming or NAMINGS.get(model.model_type, Naming())


def block_norms(model: ModelSpec) -> tuple[str, ...]:
    """Names of a block's norms, in order."""
    names = naming(model)
    if model.shared_norm:
        return (names.shared_norm,)
    return names.parallel_norms if model.parallel_block and names.parallel_norms else names.norms


def attention_matrices(model: ModelSpec) -> Matrices:
    """Matrices of a model's attention, and the norms between them that latent attention has."""
    if model.mla is None or model.naming is not None:
        return naming(model).attention_matrices
    return (*(_NARROW_QUERY if model.mla.q_rank else (("query", "q_proj"),)), *_MLA)
