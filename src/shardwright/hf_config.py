"""From a Hugging Face ``config.json`` to a ModelSpec, without transformers."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.description import nearest, read_text
from shardwright.errors import ModelError
from shardwright.families import FAMILIES
from shardwright.hf_families import READERS
from shardwright.hf_reader import (
    ACTIVATIONS,
    LAYER_LISTS,
    SIZES,
    USUAL_KEYS,
    WHOLE,
    Config,
    Fields,
    Reader,
    given,
)
from shardwright.model import ModelSpec, preset

LLAMA3_ROPE = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}
"""Our names and theirs of the settings of rope_type llama3."""

ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "llama3": tuple(LLAMA3_ROPE.values()),
    "linear": ("factor",),
    "yarn": ("factor",),
}
"""Kinds of frequency scaling, and the numbers that each needs."""

YARN_NUMBERS = (
    *("original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim"),
)
"""More numbers that a scaling may have."""

OTHER_ROPES: Mapping[str, str] = {"dynamic": "dynamic", "longrope": "longrope", "su": "longrope"}
"""Their names of frequency scalings that are known by name only, and ours."""

WRAPPERS: Mapping[str, str] = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""Models for text and images, and the family of their ``text_config``, which is what is read."""


def model_from(argument: str) -> ModelSpec:
    """The model named by a preset, a ``config.json``, or a folder holding one.

    Raises: ModelError: it is none of these, or the configuration has faults (all are listed).
    """
    path = config_path(argument)
    if path.suffix == ".toml" and path.is_file():
        return ModelSpec.from_file(path)
    if path.is_file():
        return model_from_config(read_config(path), name=path.resolve().parent.name, source=str(path))
    return preset(argument)


def config_path(argument: str) -> Path:
    """The file that an argument names, which need not exist; of a folder, its ``config.json``."""
    path = Path(argument)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelError(f"folder {argument!r} holds no config.json: give a Hugging Face model's folder")
    return path


def model_from_config(config: Mapping[str, Any], name: str, source: str = "config.json") -> ModelSpec:
    """The ModelSpec of a parsed ``config.json``; keys that Hugging Face leaves out take its defaults.

    Of a model for text and images, the text part.
    """
    if not isinstance(config, Mapping):
        raise ModelError(f"{source}: a model configuration is a JSON object, not {type(config).__name__}")
    name = str(config.get("_name_or_path") or name)
    config = text_part(config)
    faults = list(_faults(config))
    if faults:
        raise ModelError(f"{source}: " + "; ".join(faults))
    model_type = config["model_type"]
    reader = READERS[model_type]
    values = {
        "name": name,
        "model_type": model_type,
        "source": source,
        **FAMILIES[model_type].fixed,
        **_usual(config, reader),
        **rope_fields(config, reader),
        **reader.more(config),
    }
    return ModelSpec.checked({key: value for key, value in values.items() if value is not None}, source)


def text_part(config: Config) -> Config:
    """The configuration of the language model inside one for text and images; another one as it is."""
    inner = config.get("text_config")
    family = WRAPPERS.get(str(config.get("model_type")))
    if family is None or not isinstance(inner, Mapping):
        return config
    return {**inner, "model_type": family}


def _usual(config: Config, reader: Reader) -> Fields:
    """Fields that every family has, from the reader's keys and defaults."""
    heads = config.get(reader.key("heads"), reader.default("heads"))
    values = {
        name: given(config, reader.key(name), reader.default(name))
        for name in USUAL_KEYS
        if name not in reader.own
    }
    activation = values["activation"]
    tanh = config["model_type"] in ("gemma", "gemma2") and activation == "gelu"  # as transformers reads it
    values["activation"] = "gelu_tanh" if tanh else ACTIVATIONS[activation]
    values["tied_embeddings"] = bool(values["tied_embeddings"])
    values["kv_heads"] = heads
    if "kv_heads" not in reader.own:
        absent = reader.default("kv_heads") if reader.key("kv_heads") not in config else None
        values["kv_heads"] = given(config, reader.key("kv_heads"), absent or heads)
    if reader.derived_head or ("head_size" not in reader.own and values["head_size"] is None):
        values["head_size"] = config[reader.key("hidden")] // heads
    return values


def read_config(path: Path) -> Any:
    """A file as JSON.

    Raises: ModelError: it is not JSON, with line and column.
    """
    try:
        return json.loads(read_text(path, ModelError))
    except json.JSONDecodeError as fault:
        raise ModelError(
            f"{path} is not valid JSON (line {fault.lineno}, column {fault.colno}: {fault.msg}): "
            "the file is damaged or cut off, fetch it again"
        ) from None


def _faults(config: Config) -> Iterator[str]:
    """Everything wrong with a configuration's keys, one line each."""
    model_type = config.get("model_type")
    if model_type is None:
        yield f"key 'model_type' is missing (known: {', '.join(READERS)})"
    elif str(model_type) not in READERS:
        yield f"model_type={model_type!r} is not supported{nearest(str(model_type), list(READERS))}"
    reader = READERS.get(str(model_type), Reader())
    required = reader.required()
    missing = [key for key in required if config.get(key) is None]
    yield from (f"key {key!r} is missing" for key in missing)
    least = {**WHOLE, **{reader.key(name): 1 for name in SIZES}, **dict.fromkeys(required, 1)}
    for key, lowest in least.items():
        value = config.get(key)
        if value is not None and not _is_whole(value, lowest):
            yield f"{key}={value!r} must be a whole number of at least {lowest}"
    hidden, heads = (config.get(reader.key(name), reader.default(name)) for name in ("hidden", "heads"))
    stated = "head_size" in reader.own or given(config, "head_dim", reader.default("head_size")) is not None
    divides = (reader.derived_head or not stated) and not reader.floors_head
    if divides and _is_whole(hidden, 1) and _is_whole(heads, 1) and hidden % heads:
        way_out = "another number of heads" if reader.derived_head else "head_dim or another number of heads"
        yield (
            f"{reader.key('heads')}={heads} does not divide {reader.key('hidden')}={hidden}: give {way_out}"
        )
    yield from _list_faults(config, config.get(reader.key("layers")))
    yield from rope_faults(config)
    yield from _activation_faults(config, reader)
    if config.get("add_cross_attention"):
        yield "add_cross_attention=true is not supported: this is a decoder alone"


def _is_whole(value: Any, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _list_faults(config: Config, layers: Any) -> Iterator[str]:
    for key in LAYER_LISTS:
        value = config.get(key)
        if value is None:
            continue
        kind = str if key == "layer_types" else int
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            yield f"{key}={value!r} must be a list of {'strings' if kind is str else 'whole numbers'}"
            continue
        each = key == "layer_types" or (key == "no_rope_layers" and value)  # empty: the default rule
        if each and _is_whole(layers, 1) and len(value) < layers:
            yield f"{key} has {len(value)} entries for {layers} layers: give one for each"


def _activation_faults(config: Config, reader: Reader) -> Iterator[str]:
    key = reader.key("activation")
    activation = given(config, key, reader.default("activation"))
    if str(activation) not in ACTIVATIONS:
        yield f"{key}={activation!r} is not supported: use one of {', '.join(ACTIVATIONS)}"
    elif _is_swiglu(config) and ACTIVATIONS[activation] != "silu":
        yield f"{key}={activation!r} is not supported: this family is SwiGLU, use 'silu'"


def _is_swiglu(config: Config) -> bool:
    family = FAMILIES.get(str(config.get("model_type", "llama")))
    return family is not None and "activation" not in family.free


# Rotary embeddings


def _rope_settings(config: Config) -> Config:
    """Rotary settings, of the older form (rope_theta, rope_scaling) or the newer (rope_parameters).

    Where windowed layers have settings of their own, those of the others.
    """
    newer = config.get("rope_parameters") or {}
    if isinstance(newer.get("full_attention"), Mapping):
        newer = newer["full_attention"]
    return {**(config.get("rope_scaling") or {}), **newer}


def _rope_kind(rope: Config) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def rope_faults(config: Config) -> Iterator[str]:
    """What is wrong with rotary settings, or not supported."""
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            yield f"{key}={value!r} must be a JSON object or null"
            return
    rope = _rope_settings(config)
    kind = _rope_kind(rope)
    known = ("default", *ROPE_NUMBERS, *OTHER_ROPES)
    if kind not in known:
        yield f"rope_type={kind!r} is not supported: use one of {', '.join(known)}"
        return
    missing = [key for key in ROPE_NUMBERS.get(kind, ()) if rope.get(key) is None]
    if missing:
        yield f"rope_type={kind!r} lacks {', '.join(missing)}: see its model card"
    for key in (*ROPE_NUMBERS.get(kind, ()), *YARN_NUMBERS) if kind in ROPE_NUMBERS else ():
        value = rope.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            yield f"{key}={value!r} of rope_type={kind!r} must be a number of at least 0"


def rope_fields(config: Config, reader: Reader) -> Fields:
    """Base, share of a head that is rotated (rotary_pct in GPT-NeoX), and scaling."""
    rope = _rope_settings(config)
    theta = given(config, "rope_theta", given(config, "rotary_emb_base", reader.default("rope_theta")))
    share = given(
        config, "partial_rotary_factor", given(config, "rotary_pct", reader.default("rotary_share"))
    )
    fields = {
        "rope_theta": given(rope, "rope_theta", theta),
        "rotary_share": given(rope, "partial_rotary_factor", share),
    }
    kind = _rope_kind(rope)
    if kind == "llama3":
        fields["rope_scaling"] = {ours: rope[theirs] for ours, theirs in LLAMA3_ROPE.items()}
    if kind == "linear":
        fields["linear_rope"] = rope["factor"]
    if kind == "yarn":
        fields["yarn"] = _yarn(
            rope, given(config, "max_position_embeddings", reader.default("max_positions"))
        )
    return fields | {"other_rope": OTHER_ROPES.get(kind)}


def _yarn(rope: Config, max_positions: Any) -> Fields:
    """Settings of YaRN; both factors follow, unless given, from ``factor`` and two scales (DeepSeek).

    Source: transformers ``_compute_yarn_parameters``; modeling_deepseek_v3.py, ``yarn_apply_mscale``.
    """

    def magnitude(scale: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * scale * math.log(rope["factor"]) + 1.0

    scale, score_scale = (given(rope, key, 0) for key in ("mscale", "mscale_all_dim"))
    inferred = magnitude(scale) / magnitude(score_scale) if scale and score_scale else magnitude(1.0)
    return {
        "factor": rope["factor"],
        "original_positions": given(rope, "original_max_position_embeddings", max_positions),
        "beta_fast": given(rope, "beta_fast", 32.0),
        "beta_slow": given(rope, "beta_slow", 1.0),
        "truncate": given(rope, "truncate", True),
        "attention_factor": given(rope, "attention_factor", inferred),
        "score_factor": magnitude(score_scale) ** 2 if score_scale else 1.0,
    }
