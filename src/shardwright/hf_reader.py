"""What a reader of Hugging Face configurations is made of: keys, defaults, and rules that families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]
Fields = dict[str, Any]

USUAL_KEYS: Mapping[str, str] = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "tied_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "initializer_range": "initializer_range",
    "activation": "hidden_act",
}
"""Our fields and their keys."""

SIZES = ("vocab", "hidden", "ffn", "layers", "heads")
"""Fields that must stand in a configuration, unless a reader has a default for one."""

WHOLE: Mapping[str, int] = {
    "moe_intermediate_size": 1,
    "n_shared_experts": 0,
    "qk_nope_head_dim": 1,
    "qk_rope_head_dim": 1,
    "max_window_layers": 0,
    "sliding_window_pattern": 1,
    "_sliding_window_pattern": 1,
    "no_rope_layer_interval": 1,
    "interleave_moe_layer_step": 1,
}
"""Keys that a reader computes with, and the least whole number each may be."""

LAYER_LISTS = ("layer_types", "mlp_only_layers", "moe_layers", "no_rope_layers")
"""Keys whose value is a list: of layers, or of one entry for each layer."""

USUAL_DEFAULTS: Mapping[str, Any] = {
    "tied_embeddings": False,
    "norm_eps": 1e-6,
    "max_positions": 2048,
    "initializer_range": 0.02,
    "activation": "silu",
    "rope_theta": 10000.0,
    "rotary_share": 1.0,
}

ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Their names of activations, and ours."""


@dataclass(frozen=True)
class Reader:
    """How to read one family; ``more`` makes fields from a configuration whose sizes are sound.

    ``own``: fields for which ``more`` has its own rule. ``needs``: keys without a default, beside the sizes.
    ``derived_head``: a head is hidden / heads wide, whatever the configuration says; ``floors_head``: rounded
    down if need be.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Config], Fields] = lambda config: {}
    own: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    derived_head: bool = False
    floors_head: bool = False

    def key(self, name: str) -> str:
        """The key of one of our fields."""
        return self.keys.get(name, USUAL_KEYS[name])

    def default(self, name: str) -> Any:
        """What an absent key means; None if it must be there or follows from others."""
        return self.defaults.get(name, USUAL_DEFAULTS.get(name))

    def required(self) -> list[str]:
        """Keys that must stand in a configuration."""
        sizes = [self.key(name) for name in SIZES if name not in self.own and self.default(name) is None]
        return [*sizes, *self.needs]


def given(config: Config, key: str, default: Any) -> Any:
    """The value of a key; absent and null are the default."""
    value = config.get(key)
    return default if value is None else value


def flag(config: Config, key: str, default: bool = False) -> bool:
    """The truth of a key."""
    return bool(given(config, key, default))


def biases(config: Config, key: str = "attention_bias", default: bool = False) -> Fields:
    """Biases of query, key, value and output, from one key."""
    bias = flag(config, key, default)
    return {"qkv_bias": bias, "out_bias": bias}


def every_bias(config: Config, key: str, default: bool) -> Fields:
    """Biases of attention and feed-forward, from one key."""
    return {**biases(config, key, default), "mlp_bias": flag(config, key, default)}


# Which layers see all positions


def window(config: Config, default: int | None, pattern: int) -> Fields:
    """A window in all layers but every ``pattern``-th, or but those that ``layer_types`` calls full."""
    size = config.get("sliding_window", default)
    types = config.get("layer_types")
    layers = range(config["num_hidden_layers"])
    if types is None:
        full = tuple(layer for layer in layers if (layer + 1) % pattern == 0)
    else:
        full = tuple(layer for layer in layers if types[layer] == "full_attention")
    if size is None or len(full) == len(layers):
        return {}
    return {"sliding_window": size, "full_attention_layers": full}


def with_types(config: Config, slides: Callable[[int], bool]) -> Config:
    """The configuration with its ``layer_types``, made by rule where it has none."""
    layers = range(config["num_hidden_layers"])
    types = ["sliding_attention" if slides(layer) else "full_attention" for layer in layers]
    return {**config, "layer_types": given(config, "layer_types", types)}
