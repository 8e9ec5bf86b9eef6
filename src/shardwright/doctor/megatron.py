"""Megatron-LM's arguments as a Setting: from a script, or from the list that it prints as it starts."""

import re
from collections.abc import Mapping
from typing import Any

from shardwright.doctor.finding import Source
from shardwright.doctor.setting import Setting
from shardwright.errors import ShardwrightError
from shardwright.model import ModelSpec

_FLAG = re.compile(r"--([a-z][a-z0-9-]+)(?:[= ]+((?!--)[^\s\\]+))?")
_PRINTED = re.compile(r"^\s*(?:\[[^\]]*\]:?)?\s*([a-z][a-z0-9_]+) \.{2,} (\S.*?)\s*$", re.MULTILINE)
_ASSIGNED = re.compile(r"^\s*(?:export )?([A-Z][A-Z0-9_]*)=[\"']?([^\s\"'#]+)", re.MULTILINE)

NAMES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "data_parallel_size": "dp",
    "world_size": "world",
    "micro_batch_size": "micro_batch",
    "global_batch_size": "global_batch",
    "seq_length": "seq",
    "num_layers": "layers",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn",
    "num_attention_heads": "heads",
    "num_query_groups": "kv_heads",
    "padded_vocab_size": "vocab",
    "vocab_size": "vocab",
    "num_experts": "experts",
}


UNEVEN = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    "pipeline_model_parallel_layout",
)
"""Flags that say how layers are shared out."""


def flags_of(text: str) -> dict[str, str]:
    """Flags of a script, or of a printed list of arguments, by their names with underscores."""
    values: dict[str, str] = {}
    variables = dict(_ASSIGNED.findall(text))

    def resolved(value: str) -> str:
        found = re.fullmatch(r"[\"']?\$\{?(\w+)\}?[\"']?", value)
        return variables.get(found[1], value) if found else value.strip("\"'")

    for name, value in _FLAG.findall(text):
        values.setdefault(name.replace("-", "_"), resolved(value) if value else "true")
    for name, value in _PRINTED.findall(text):
        values[name] = value
    return values


def is_megatron(flags: Mapping[str, str]) -> bool:
    """Whether these are Megatron's."""
    return any(name in flags for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")) or (
        "num_layers" in flags and "micro_batch_size" in flags
    )


def setting_of_megatron(name: str, flags: Mapping[str, str]) -> Setting:
    """Degrees, batch and shape."""
    values: dict[str, Any] = {}
    for flag, key in NAMES.items():
        number = flags.get(flag, "")
        if re.fullmatch(r"\d{1,15}", number):
            values.setdefault(key, int(number))
    if not _on(flags, "group_query_attention") and "group_query_attention" in flags:
        values.pop("kv_heads", None)
    chunks = _chunks(flags, values)
    recompute = None
    if flags.get("recompute_granularity") in ("full", "selective"):
        recompute = flags["recompute_granularity"]
    elif _on(flags, "recompute_activations"):
        recompute = "selective"
    shards = _on(flags, "use_distributed_optimizer")
    fused = flags.get("cross_entropy_loss_fusion")
    layout = flags.get("pipeline_model_parallel_layout", "")
    return Setting(
        source=Source(name, None, "Megatron arguments"),
        framework="megatron",
        model=_model(values, flags),
        zero_stage=1 if shards else 0,
        schedule="Interleaved1F1B" if chunks and chunks > 1 else "1F1B" if values.get("pp", 1) > 1 else None,
        chunks=chunks,
        recompute=recompute,
        sp=_on(flags, "sequence_parallel") if "tensor_model_parallel_size" in flags else None,
        flash=_on(flags, "use_flash_attn")
        or flags.get("attention_backend") in ("flash", "fused", "auto")
        or None,
        loss_fused=None if fused is None else fused.lower() == "true",
        units="blocks",
        order=("dp", "pp", "cp", "tp") if _on(flags, "use_tp_pp_dp_mapping") else ("pp", "dp", "cp", "tp"),
        layout_text=layout if layout not in ("None", "true") else "",
        other={"distributed_optimizer": shards, "uneven": any(flag in flags for flag in UNEVEN)},
        **values,
    )


def _chunks(flags: Mapping[str, str], values: Mapping[str, int]) -> int | None:
    """Virtual stages of a rank, however they are said."""
    for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        if re.fullmatch(r"\d{1,6}", flags.get(name, "")):
            return int(flags[name])
    layers = flags.get("num_layers_per_virtual_pipeline_stage", "")
    total, pp = values.get("layers"), values.get("pp", 1)
    if re.fullmatch(r"\d{1,6}", layers) and int(layers) > 0 and total:
        return total // pp // int(layers) or None
    return None


def _on(flags: Mapping[str, str], name: str) -> bool:
    return flags.get(name, "false").lower() in ("true", "1", "yes")


def _model(values: Mapping[str, int], flags: Mapping[str, str]) -> ModelSpec | None:
    """A Llama of that shape, where all of it is said and it is one."""
    needed = ("layers", "hidden", "ffn", "heads", "vocab")
    if any(key not in values for key in needed) or not _on(flags, "swiglu") or values.get("experts"):
        return None
    size = flags.get("kv_channels", "")
    head = int(size) if re.fullmatch(r"\d{1,6}", size) else values["hidden"] // values["heads"]
    try:
        return ModelSpec.checked(
            {
                "name": "the model of these arguments",
                "model_type": "llama",
                "layers": values["layers"],
                "hidden": values["hidden"],
                "ffn": values["ffn"],
                "heads": values["heads"],
                "kv_heads": values.get("kv_heads", values["heads"]),
                "head_size": head,
                "vocab": values["vocab"],
                "tied_embeddings": not _on(flags, "untie_embeddings_and_output_weights"),
            }
        )
    except ShardwrightError:
        return None
