"""From a Hugging Face ``config.json`` to a ModelSpec, without transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from shardwright.description import nearest, read_text
from shardwright.errors import ModelError
from shardwright.model import ModelSpec, ModelType, preset

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def model_from(argument: str) -> ModelSpec:
    """The model named by a preset, a ``config.json``, or a folder holding one.

    Raises: ModelError: it is none of these, or the configuration has faults (all are listed).
    """
    path = Path(argument)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelError(f"folder {argument!r} holds no config.json: give the folder of a Hugging Face model")
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
    values = {
        "name": str(config.get("_name_or_path") or name),
        "model_type": model_type,
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "ffn": config["intermediate_size"],
        "heads": heads,
        "kv_heads": _given(config, "num_key_value_heads", {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(model_type, heads)),
        "head_size": _given(config, "head_dim", 128 if model_type == "qwen3" else config["hidden_size"] // heads),
        "vocab": config["vocab_size"],
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": True if model_type == "qwen2" else bias and model_type != "mistral",
        "out_bias": bias and model_type in ("llama", "qwen3"),
        "mlp_bias": bool(config.get("mlp_bias", False)) and model_type == "llama",
        "qk_norm": model_type == "qwen3",
        "norm_eps": _given(config, "rms_norm_eps", 1e-6),
        "sliding_window": _sliding_window(config),
        "max_positions": _given(config, "max_position_embeddings", {"mistral": 4096 * 32, "llama": 2048}.get(model_type, 32768)),
        "initializer_range": _given(config, "initializer_range", 0.02),
        "source": source,
        **_rope(config, source),
    }  # fmt: skip
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
    for key in REQUIRED:
        value = config.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            faults.append(f"{key}={value!r} must be a whole number of at least 1")
    if not faults and config.get("head_dim") is None and model_type != "qwen3":
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        if hidden % heads:
            faults.append(
                f"num_attention_heads={heads} does not divide hidden_size={hidden}: give head_dim or another count"
            )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        faults.append(f"hidden_act={activation!r} is not supported: this family is SwiGLU, use 'silu'")
    return faults


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    if config["model_type"] in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        return None
    if config["model_type"] == "llama":
        return None
    window = config.get("sliding_window", 4096 if config["model_type"] == "mistral" else None)
    return window if window is None else int(window)


def _rope(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Rotary settings, of the older form (rope_theta, rope_scaling) or the newer (rope_parameters)."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = _given(rope, "rope_theta", _given(config, "rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise ModelError(f"{source}: rope_type={kind!r} is not supported: use 'default' or 'llama3'")
    names = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_positions": "original_max_position_embeddings",
    }
    missing = [key for key in names.values() if rope.get(key) is None]
    if missing:
        raise ModelError(f"{source}: rope_type='llama3' lacks {', '.join(missing)}")
    return {"rope_theta": theta, "rope_scaling": {ours: rope[theirs] for ours, theirs in names.items()}}
