"""torchtitan's configuration (TOML), of its first versions and its present ones, as a Setting."""

from collections.abc import Mapping
from typing import Any

from shardwright.doctor.finding import Source
from shardwright.doctor.setting import Setting
from shardwright.errors import ShardwrightError
from shardwright.model import ModelSpec, preset

SECTIONS = ("training", "parallelism", "activation_checkpoint", "experimental", "job", "optimizer", "model")

FLAVORS: Mapping[tuple[str, str], str] = {
    ("llama2", "7b"): "llama-2-7b",
    ("llama2", "13b"): "llama-2-13b",
    ("llama2", "70b"): "llama-2-70b",
    ("llama3", "8b"): "llama-3.1-8b",
    ("llama3", "70b"): "llama-3.1-70b",
    ("llama3", "405b"): "llama-3.1-405b",
    ("llama4", "17bx16e"): "llama-4-scout",
    ("llama4", "17bx128e"): "llama-4-maverick",
    ("deepseek_v3", "16b"): "deepseek-v2-lite",
    ("deepseek_v3", "671b"): "deepseek-v3",
    ("qwen3", "0.6b"): "qwen3-0.6b",
    ("qwen3", "1.7b"): "qwen3-1.7b",
    ("qwen3", "4b"): "qwen3-4b",
    ("qwen3", "8b"): "qwen3-8b",
    ("qwen3", "14b"): "qwen3-14b",
    ("qwen3", "32b"): "qwen3-32b",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
"""Models by torchtitan's name and flavor. Its 16B of deepseek_v3 has the shape of DeepSeek-V2-Lite."""

MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Order of its mesh, outermost first. Source: pytorch/torchtitan, torchtitan/distributed/parallel_dims.py."""


def is_torchtitan(document: Any) -> bool:
    """Whether a TOML document is a torchtitan configuration."""
    if not isinstance(document, Mapping) or "schema_version" in document:
        return False
    return "training" in document and len([name for name in SECTIONS if name in document]) >= 2


def setting_of_torchtitan(name: str, document: Mapping[str, Any]) -> Setting:
    """Its degrees, batch and memory choices; -1 stays -1."""

    def value(key: str, *sections: str) -> Any:
        for section in sections:
            table = document.get(section)
            if isinstance(table, Mapping) and key in table:
                return table[key]
        return None

    def degree(*keys: str) -> int | None:
        for key in keys:
            found = value(key, "parallelism", "experimental", "training")
            if isinstance(found, int) and not isinstance(found, bool):
                return found
        return None

    flavor = str(value("name", "model") or ""), str(value("flavor", "model") or "")
    mode = value("mode", "activation_checkpoint")
    chunked = value("num_chunks", "loss") or value("chunked", "loss")
    micro = value("local_batch_size", "training") or value("batch_size", "training")
    stage = degree("data_parallel_shard_degree", "data_parallel_degree")
    quantity = value("pipeline_parallel_microbatch_size", "parallelism", "experimental")
    pp = degree("pipeline_parallel_degree")
    schedule = value("pipeline_parallel_schedule", "parallelism", "experimental")
    microbatches = value("pipeline_parallel_microbatches", "parallelism", "experimental")
    batch = value("global_batch_size", "training")
    if pp and pp > 1 and isinstance(micro, int):
        size = quantity if isinstance(quantity, int) and quantity > 0 else 1
        microbatches = microbatches or micro // size
        micro = size
    return Setting(
        source=Source(name, None, f"torchtitan {' '.join(flavor).strip()}"),
        framework="torchtitan",
        model=model_of_flavor(*flavor),
        model_name=" ".join(flavor).strip(),
        tp=degree("tensor_parallel_degree"),
        pp=pp,
        cp=degree("context_parallel_degree"),
        ep=degree("expert_parallel_degree"),
        dp_replicate=degree("data_parallel_replicate_degree"),
        dp_shard=-1 if stage is None else stage,
        zero_stage=3,
        micro_batch=_whole(micro),
        global_batch=_whole(batch) if _whole(batch) and (_whole(batch) or 0) > 0 else None,
        microbatches=_whole(microbatches),
        seq=_whole(value("seq_len", "training")),
        schedule=schedule if isinstance(schedule, str) else None,
        recompute={"none": "none", "full": "full", "selective": "selective"}.get(str(mode)),
        sp=True,
        flash=True,
        loss_fused=bool(chunked) if chunked is not None else None,
        units="blocks",
        order=MESH,
    )


def model_of_flavor(name: str, flavor: str) -> ModelSpec | None:
    """The preset of a torchtitan flavor, if it is one."""
    known = FLAVORS.get((name.lower(), flavor.lower()))
    if known is None:
        return None
    try:
        return preset(known)
    except ShardwrightError:
        return None


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
