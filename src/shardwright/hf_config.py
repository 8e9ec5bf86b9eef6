"""From a Hugging Face ``config.json`` to a ModelSpec, without transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from shardwright.description import nearest, read_text
from shardwright.errors import ModelError
from shardwright.model import ModelSpec, ModelType, preset

KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
MAX_POSITIONS = {"llama": 2048, "mistral": 4096 * 32, "qwen2": 32768, "qwen3": 32768}
"""What transformers takes where a configuration leaves the key out. Source: its configuration_*.py; llama has
as many key-value heads as heads. A null num_key_value_heads means that in every family.
"""

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

LLAMA3_ROPE = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}
"""Our names and theirs of the settings of rope_type llama3."""


def model_from(argument: str) -> ModelSpec:
    """The model named by a preset, a ``config.json``, or a folder holding one.

    Raises: ModelError: it is none of these, or the configuration has faults (all are listed).
    """
    path = Path(argument)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelError(f"folder {argument!r} holds no config.json: give a Hugging Face model's folder")
    if path.suffix == ".toml" and path.is_file():
        return ModelSpec.from_file(path)
    if path.is_file():
        return model_from_config(_read_json(path), name=path.resolve().parent.name, source=str(path))
    return preset(argument)


def model_from_config(config: Mapping[str, Any], name: str, source: str = "config.json") -> ModelSpec:
    """The ModelSpec of a parsed ``config.json``; keys that Hugging Face leaves out take its defaults."""
    if not isinstance(config, Mapping):
        raise ModelError(f"{source}: a model configuration is a JSON object, not {type(config).__name__}")
    faults = _faults(config)
    if faults:
        raise ModelError(f"{source}: " + "; ".join(faults))
    model_type = config["model_type"]
    heads = config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    kv_default = heads if "num_key_value_heads" in config else KV_HEADS.get(model_type, heads)
    head_default = 128 if model_type == "qwen3" else config["hidden_size"] // heads
    values = {
        "name": str(config.get("_name_or_path") or name),
        "model_type": model_type,
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "ffn": config["intermediate_size"],
        "heads": heads,
        "kv_heads": _given(config, "num_key_value_heads", kv_default),
        "head_size": _given(config, "head_dim", head_default),
        "vocab": config["vocab_size"],
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": True if model_type == "qwen2" else bias and model_type != "mistral",
        "out_bias": bias and model_type in ("llama", "qwen3"),
        "mlp_bias": bool(config.get("mlp_bias", False)) and model_type == "llama",
        "qk_norm": model_type == "qwen3",
        "norm_eps": _given(config, "rms_norm_eps", 1e-6),
        "sliding_window": _sliding_window(config),
        "max_positions": _given(config, "max_position_embeddings", MAX_POSITIONS[model_type]),
        "initializer_range": _given(config, "initializer_range", 0.02),
        "source": source,
        **_rope(config),
    }
    return ModelSpec.checked({key: value for key, value in values.items() if value is not None}, source)


def _given(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path, ModelError))
    except json.JSONDecodeError as fault:
        raise ModelError(
            f"{path} is not valid JSON (line {fault.lineno}, column {fault.colno}: {fault.msg}): "
            "the file is damaged or cut off, fetch it again"
        ) from None


def _faults(config: Mapping[str, Any]) -> list[str]:
    """Everything wrong with a configuration's keys, one line each."""
    faults = []
    known = get_args(ModelType)
    model_type = config.get("model_type")
    if model_type is None:
        faults.append(f"key 'model_type' is missing (known: {', '.join(known)})")
    elif model_type not in known:
        faults.append(f"model_type={model_type!r} is not supported{nearest(str(model_type), known)}")
    missing = [key for key in REQUIRED if config.get(key) is None]
    faults += [f"key {key!r} is missing" for key in missing]
    faults += [
        f"{key}={config[key]!r} must be a whole number of at least 1"
        for key in REQUIRED
        if key not in missing and _count(config, key) is None
    ]
    hidden, heads = (_count(config, key) for key in ("hidden_size", "num_attention_heads"))
    derived = config.get("head_dim") is None and model_type != "qwen3"
    if hidden and heads and derived and hidden % heads:
        faults.append(
            f"num_attention_heads={heads} does not divide hidden_size={hidden}: "
            "give head_dim or another number of heads"
        )
    faults += _rope_faults(config)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        faults.append(f"hidden_act={activation!r} is not supported: this family is SwiGLU, use 'silu'")
    return faults


def _count(config: Mapping[str, Any], key: str) -> int | None:
    """The value of a key if it is a whole number of at least 1."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _sliding_window(config: Mapping[str, Any]) -> Any:
    """Positions that a query sees, None if all; Qwen slides in layers from ``max_window_layers`` on only."""
    model_type = config["model_type"]
    if model_type == "mistral":
        return config.get("sliding_window", 4096)
    if model_type == "llama" or not config.get("use_sliding_window", False):
        return None
    full_layers = _count(config, "max_window_layers") if "max_window_layers" in config else 28
    return None if (full_layers or 0) >= config["num_hidden_layers"] else config.get("sliding_window", 4096)


def _rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary settings, of the older form (rope_theta, rope_scaling) or the newer (rope_parameters)."""
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _rope_kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope_faults(config: Mapping[str, Any]) -> list[str]:
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            return [f"{key}={value!r} must be a JSON object or null"]
    rope = _rope_settings(config)
    kind = _rope_kind(rope)
    if kind == "default":
        return []
    if kind != "llama3":
        return [f"rope_type={kind!r} is not supported: use 'default' or 'llama3'"]
    missing = [key for key in LLAMA3_ROPE.values() if rope.get(key) is None]
    return [f"rope_type='llama3' lacks {', '.join(missing)}: see its model card"] if missing else []


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _rope_settings(config)
    theta = _given(rope, "rope_theta", _given(config, "rope_theta", 10000.0))
    if _rope_kind(rope) == "default":
        return {"rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": {ours: rope[theirs] for ours, theirs in LLAMA3_ROPE.items()}}
