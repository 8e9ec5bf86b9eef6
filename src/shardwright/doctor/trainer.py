"""Arguments of transformers' Trainer and programs on it (YAML, JSON, or flags) as a Setting."""

from collections.abc import Mapping
from typing import Any

from shardwright.doctor.finding import Source
from shardwright.doctor.setting import Setting

FSDP_STAGES = {"shard_grad_op": 2, "no_shard": 0}
"""By words of transformers' ``fsdp``; all others shard parameters too."""

KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "model_name_or_path", "cutoff_len")
LENGTHS = (
    "cutoff_len",
    "max_seq_length",
    "max_length",
    "model_max_length",
    "block_size",
    "sequence_len",
    "sequence_length",
)


def is_trainer(document: Any) -> bool:
    """Whether these are arguments of a Trainer."""
    return isinstance(document, Mapping) and (
        "per_device_train_batch_size" in document or len([key for key in KEYS if key in document]) >= 2
    )


def setting_of_trainer(name: str, document: Mapping[str, Any]) -> Setting:
    """Batch, sequence, attention kernel, recomputation, loss."""
    attention = str(document.get("attn_implementation", document.get("flash_attn", "")))
    checkpointing = document.get("gradient_checkpointing")
    liger = document.get("use_liger_kernel", document.get("enable_liger_kernel"))
    length = next((n for key in LENGTHS if (n := _whole(document.get(key))) is not None), None)
    return Setting(
        source=Source(name, None, "arguments of a Trainer"),
        framework="trainer",
        model_name=str(document.get("model_name_or_path", "")),
        micro_batch=_whole(document.get("per_device_train_batch_size")),
        microbatches=_whole(document.get("gradient_accumulation_steps")),
        seq=length,
        flash={"eager": False, "disabled": False}.get(
            attention,
            True if attention in ("flash_attention_2", "fa2", "sdpa", "flash_attention_3") else None,
        ),
        recompute="full" if _true(checkpointing) else "none" if checkpointing is not None else None,
        loss_fused=_true(liger) if liger is not None else None,
        tp=_whole(document.get("tensor_parallel_size")),
        **_fsdp(document),
    )


def _fsdp(document: Mapping[str, Any]) -> dict[str, Any]:
    """What ``fsdp`` and ``fsdp_config`` say: how much is sharded, and what is wrapped. With ``auto_wrap`` and
    no class the model's own classes of blocks are."""
    asked = str(document.get("fsdp") or "").lower()
    if not asked or asked in ("false", "none", "[]"):
        return {}
    config = document.get("fsdp_config")
    table = (
        {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
        if isinstance(config, Mapping)
        else {}
    )
    named = isinstance(config, str) or document.get("fsdp_transformer_layer_cls_to_wrap")
    wrapped = "auto_wrap" in asked or bool(table.get("transformer_layer_cls_to_wrap")) or bool(named)
    least = _whole(table.get("min_num_params")) or 0
    policy = str(table.get("auto_wrap_policy", "")).upper()
    kind = "size" if least > 0 else "blocks" if wrapped or policy.startswith("TRANSFORMER") else "root"
    stage = next((stage for word, stage in FSDP_STAGES.items() if word in asked), 3)
    return {"zero_stage": stage, "units": kind, "other": {"strategy": asked, "min_num_params": least or None}}


def _true(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "yes", "1")


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
