"""accelerate's configuration (YAML) as a Setting."""

from collections.abc import Mapping
from typing import Any

from shardwright.doctor.finding import Source
from shardwright.doctor.setting import Setting

WRAPPED = {"TRANSFORMER_BASED_WRAP": "blocks", "SIZE_BASED_WRAP": "size", "NO_WRAP": "root"}
STAGES = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0}


def is_accelerate(document: Any) -> bool:
    """Whether a document is an accelerate configuration."""
    return (
        isinstance(document, Mapping)
        and "distributed_type" in document
        and ("num_processes" in document or "compute_environment" in document)
    )


def setting_of_accelerate(name: str, document: Mapping[str, Any]) -> Setting:
    """Its processes, and what of FSDP, DeepSpeed, Megatron or parallelism_config it holds."""
    kind = str(document.get("distributed_type", "")).upper()
    world = _whole(document.get("num_processes"))
    machines = _whole(document.get("num_machines")) or 1
    base = Setting(
        source=Source(name, None, f"accelerate {kind}, {world} processes"),
        framework="accelerate",
        world=world,
        gpus_per_node=world // machines if world and world % machines == 0 else None,
        master_bytes=None,
        other={"distributed_type": kind, "mixed_precision": document.get("mixed_precision")},
    )
    for key, read in (
        ("fsdp_config", _fsdp),
        ("deepspeed_config", _deepspeed),
        ("megatron_lm_config", _megatron),
    ):
        table = document.get(key)
        if isinstance(table, Mapping) and table:
            base = read(base, table)
    mesh = document.get("parallelism_config")
    if isinstance(mesh, Mapping):
        base = _mesh(base, mesh)
    if base.zero_stage is None and kind in ("MULTI_GPU", "MULTI_CPU"):
        base = base.filled(Setting(base.source, "accelerate", zero_stage=0))
    return base


def _fsdp(base: Setting, table: Mapping[str, Any]) -> Setting:
    strategy = str(table.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    strategy = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}.get(
        strategy, strategy
    )
    version = _whole(table.get("fsdp_version"))
    reshard = table.get("fsdp_reshard_after_forward")
    stage = STAGES.get(strategy, 3)
    if version == 2 and reshard in (False, "false", "False"):
        stage = 2
    wrap = str(table.get("fsdp_auto_wrap_policy", "NO_WRAP")).upper()
    return base.filled(
        Setting(
            base.source,
            "accelerate",
            zero_stage=stage,
            units=WRAPPED.get(wrap, "root"),
            offload_parameters=table.get("fsdp_offload_params") in (True, "true", "True"),
            recompute="full" if table.get("fsdp_activation_checkpointing") in (True, "true") else None,
            other={
                "fsdp_version": version,
                "strategy": strategy,
                "wrap": wrap,
                "min_num_params": table.get("fsdp_min_num_params"),
                "ram_efficient": table.get("fsdp_cpu_ram_efficient_loading"),
            },
        )
    )


def _deepspeed(base: Setting, table: Mapping[str, Any]) -> Setting:
    return base.filled(
        Setting(
            base.source,
            "accelerate",
            zero_stage=_whole(table.get("zero_stage")),
            microbatches=_whole(table.get("gradient_accumulation_steps")),
            offload_optimizer=str(table.get("offload_optimizer_device", "none")) in ("cpu", "nvme"),
            offload_parameters=str(table.get("offload_param_device", "none")) in ("cpu", "nvme"),
            leaf_modules=bool(table.get("deepspeed_moe_layer_cls_names")) or None,
        )
    )


def _megatron(base: Setting, table: Mapping[str, Any]) -> Setting:
    return base.filled(
        Setting(
            base.source,
            "accelerate",
            tp=_whole(table.get("megatron_lm_tp_degree")),
            pp=_whole(table.get("megatron_lm_pp_degree")),
            microbatches=_whole(table.get("megatron_lm_num_micro_batches")),
            sp=table.get("megatron_lm_sequence_parallelism") in (True, "true"),
        )
    )


def _mesh(base: Setting, table: Mapping[str, Any]) -> Setting:
    def degree(axis: str) -> int | None:
        return _whole(table.get(f"parallelism_config_{axis}_size", table.get(f"{axis}_size")))

    return base.filled(
        Setting(
            base.source,
            "accelerate",
            tp=degree("tp"),
            cp=degree("cp"),
            dp_replicate=degree("dp_replicate"),
            dp_shard=degree("dp_shard"),
        )
    )


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        return int(value)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
