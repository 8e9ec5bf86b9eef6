"""What each family of models fixes: the fields of a ModelSpec that follow from its ``model_type``."""

from collections.abc import Mapping
from typing import Any, NamedTuple

PLAIN: Mapping[str, Any] = {
    "embedding_projection": 0,
    "qk_norm_kind": "head",
    "attention_sinks": False,
    "activation": "silu",
    "gated_mlp": True,
    "norm": "rms",
    "norm_weight": True,
    "norm_bias": False,
    "norm_placement": "pre",
    "final_norm": True,
    "parallel_block": False,
    "shared_norm": False,
    "positions": "rope",
    "position_offset": 0,
    "mtp_layers": 0,
    "head_bias": False,
    "qk_norm_bias": False,
}
"""The Llama family's values of the fields that decide which tensors a block has and how it uses them."""


class Family(NamedTuple):
    """How a family departs from ``PLAIN``.

    ``fixed``: fields with another value in every model of it; ``free``: fields its models differ in; ``moe``
    and ``mla``: whether it has that group.
    """

    fixed: Mapping[str, Any] = {}
    free: tuple[str, ...] = ()
    moe: bool = False
    mla: bool = False


_LAYER_NORM = {"norm": "layer", "norm_bias": True}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma": Family({}, ("activation",)),
    "gemma2": Family({"norm_placement": "sandwich"}, ("activation",)),
    "gemma3_text": Family({"norm_placement": "sandwich"}, ("activation",)),
    "phi3": Family({}, ("activation",)),
    "gpt2": Family({**_LAYER_NORM, "gated_mlp": False, "positions": "learned"}, ("activation",)),
    "gpt_neox": Family({**_LAYER_NORM, "gated_mlp": False}, ("activation", "parallel_block")),
    "olmo2": Family({"norm_placement": "post", "qk_norm_kind": "projection"}, ("activation",)),
    "granite": Family({}, ("activation",)),
    "cohere": Family(
        {"norm": "layer", "parallel_block": True, "shared_norm": True, "qk_norm_kind": "per_head"},
        ("activation",),
    ),
    "cohere2": Family({"norm": "layer", "parallel_block": True, "shared_norm": True}, ("activation",)),
    "starcoder2": Family({**_LAYER_NORM, "gated_mlp": False}, ("activation",)),
    "stablelm": Family(
        {**_LAYER_NORM, "qk_norm_kind": "per_head"}, ("activation", "parallel_block", "shared_norm")
    ),
    "falcon": Family(
        {**_LAYER_NORM, "gated_mlp": False}, ("activation", "parallel_block", "shared_norm", "positions")
    ),
    "opt": Family(
        {"norm": "layer", "gated_mlp": False, "positions": "learned", "position_offset": 2},
        ("activation", "norm_weight", "norm_bias", "norm_placement", "final_norm", "embedding_projection"),
    ),
    "mixtral": Family({}, ("activation",), moe=True),
    "qwen2_moe": Family({}, ("activation",), moe=True),
    "qwen3_moe": Family({}, ("activation",), moe=True),
    "deepseek_v2": Family({}, ("activation",), moe=True, mla=True),
    "deepseek_v3": Family({}, ("activation", "mtp_layers"), moe=True, mla=True),
    "gpt_oss": Family({"attention_sinks": True}, ("activation",), moe=True),
    "glm4_moe": Family({}, ("activation", "mtp_layers"), moe=True),
    "llama4_text": Family({"qk_norm_kind": "weightless"}, ("activation",), moe=True),
}
"""Source: transformers modeling_*.py of each."""
