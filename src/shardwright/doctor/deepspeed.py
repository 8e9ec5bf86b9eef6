"""DeepSpeed's configuration (JSON, or a section of another file) as a Setting. "auto" is not said."""

from collections.abc import Mapping
from typing import Any

from shardwright.doctor.finding import Source
from shardwright.doctor.setting import Setting

KEYS = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "gradient_accumulation_steps",
)


def is_deepspeed(document: Any) -> bool:
    """Whether a document is a DeepSpeed configuration."""
    return isinstance(document, Mapping) and len([key for key in KEYS if key in document]) >= 2


def setting_of_deepspeed(name: str, document: Mapping[str, Any]) -> Setting:
    """Its stage, batch and offload."""
    zero = document.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    tensor = document.get("tensor_parallel")
    leafs = zero.get("leaf_module") or zero.get("z3_leaf_modules")
    return Setting(
        source=Source(name, None, f"DeepSpeed, ZeRO stage {zero.get('stage', 0)}"),
        framework="deepspeed",
        zero_stage=_whole(zero.get("stage", 0)),
        micro_batch=_whole(document.get("train_micro_batch_size_per_gpu")),
        global_batch=_whole(document.get("train_batch_size")),
        microbatches=_whole(document.get("gradient_accumulation_steps")),
        tp=_whole(tensor.get("autotp_size")) if isinstance(tensor, Mapping) else None,
        offload_optimizer=_offloaded(zero, "offload_optimizer"),
        offload_parameters=_offloaded(zero, "offload_param"),
        leaf_modules=bool(leafs) if leafs is not None else None,
        master_bytes=4,
        other={
            "hpz": _whole(zero.get("zero_hpz_partition_size")),
            "bucket": _whole(zero.get("reduce_bucket_size")),
            "precision": _precision(document),
        },
    )


def _precision(document: Mapping[str, Any]) -> str | None:
    for key in ("bf16", "fp16"):
        table = document.get(key)
        if isinstance(table, Mapping) and table.get("enabled") is True:
            return key
    return None


def _offloaded(zero: Mapping[str, Any], key: str) -> bool | None:
    table = zero.get(key)
    if not isinstance(table, Mapping):
        return None
    return str(table.get("device", "none")).lower() in ("cpu", "nvme")


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
