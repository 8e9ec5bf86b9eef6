"""Hugging Face's names of a model's modules, by family, in the order of ``named_parameters``."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.model import ModelSpec

Matrices = tuple[tuple[str, str], ...]
"""Kind of a matrix (a key of plan/params.py's table of shapes) and its name."""


@dataclass(frozen=True)
class Naming:
    """Names and order of modules. A block is ``stem``.<layer>; other names are relative to their parent.

    ``order`` lists the parts of a block, each "norm" being the next of ``norms`` and "norms" all that remain.
    """

    stem: str = "model.layers"
    embedding: str = "model.embed_tokens"
    position: str = ""
    project_in: str = ""
    project_out: str = ""
    final_norm: str = "model.norm"
    order: tuple[str, ...] = ("attention", "feed_forward", "norms")
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    parallel_norms: tuple[str, ...] = ()  # two norms of a parallel block, if it calls them otherwise
    shared_norm: str = "input_layernorm"
    attention: str = "self_attn."
    attention_matrices: Matrices = (
        ("query", "q_proj"),
        ("key", "k_proj"),
        ("value", "v_proj"),
        ("out", "o_proj"),
    )
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    norm_module_per_head: bool = False
    feed_forward: str = "mlp."
    matrices: Matrices = (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj"))
    transposed: bool = False  # Conv1D: a weight's rows are its inputs
    moe_order: tuple[str, ...] = ("experts", "router", "shared", "shared_gate")
    router: str = "gate"
    shared: str = "shared_experts"
    transposed_experts: bool = False

    def block_norms(self, model: ModelSpec) -> tuple[str, ...]:
        """Names of a block's norms, in order."""
        if model.shared_norm:
            return (self.shared_norm,)
        return self.parallel_norms if model.parallel_block and self.parallel_norms else self.norms


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
    """Names of a model's modules."""
    return NAMINGS.get(model.model_type, Naming())


def attention_matrices(model: ModelSpec) -> Matrices:
    """Matrices of a model's attention, and the norms between them that latent attention has."""
    if model.mla is None:
        return naming(model).attention_matrices
    return (*(_NARROW_QUERY if model.mla.q_rank else (("query", "q_proj"),)), *_MLA)
