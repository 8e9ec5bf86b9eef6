"""A configuration of any framework as a plan of ours, where it says enough: then the ledger can be asked."""

from shardwright.axes import MESH_ORDER
from shardwright.doctor.setting import Setting
from shardwright.errors import ShardwrightError
from shardwright.job import Accounting, Job
from shardwright.layout import KEPT_BY_SELECTIVE, RECOMPUTE_KINDS, SCHEDULE_NAMES, Layout
from shardwright.plan.explain import plan_of
from shardwright.planfile import Plan

ACCOUNTINGS: dict[str, Accounting] = {"megatron": "megatron", "deepspeed": "zero"}
"""Whose bytes per parameter a framework's are; FSDP2's of all others."""


def plan_of_setting(setting: Setting) -> Plan | None:
    """The plan that a setting describes, what it leaves open taken in the plainest way; None if it says too
    little or describes no layout that is modelled."""
    if setting.plan is not None:
        return setting.plan
    cluster = setting.cluster()
    if setting.model is None or cluster is None or setting.seq is None:
        return None
    pp, tp, cp = setting.pp or 1, setting.tp or 1, setting.cp or 1
    data = setting.data_ranks or 1
    shard = setting.sharding or 1
    dp_shard = max(shard // cp, 1)
    if data % dp_shard:
        return None
    micro = setting.micro_batch or 1
    microbatches = setting.microbatches or (
        max(setting.global_batch // (data * micro), 1) if setting.global_batch else 1
    )
    stage = setting.zero_stage if setting.zero_stage is not None else 3
    stage = 0 if shard == 1 else max(1, min(stage, 1 if pp > 1 else 3))
    schedule = setting.schedule if setting.schedule in SCHEDULE_NAMES else "1F1B"
    chunks = setting.chunks or 1
    stages = pp * chunks
    base, rest = divmod(setting.model.layers, stages)
    recompute = setting.recompute if setting.recompute in RECOMPUTE_KINDS else "none"
    try:
        layout = Layout.checked(
            {
                "pp": pp,
                "tp": tp,
                "cp": cp,
                "ep": setting.ep or 1,
                "dp_shard": dp_shard,
                "dp_replicate": data // dp_shard,
                "cp_kind": "none" if cp == 1 else "ring",
                "sp": bool(setting.sp) and tp > 1,
                "schedule": schedule if pp > 1 else "none",
                "chunks": chunks,
                "stage_layers": setting.stage_layers
                or (tuple(base + (i < rest) for i in range(stages)) if stages > 1 else ()),
                "zero_stage": stage,
                "micro_batch": micro,
                "microbatches": microbatches,
                "recompute": recompute,
                "kept": KEPT_BY_SELECTIVE if recompute == "selective" else (),
                "loss_chunks": 8 if setting.loss_fused else 1,
                "order": setting.order if setting.order in (MESH_ORDER,) else MESH_ORDER,
            }
        )
        job = Job.checked(
            {
                "seq": setting.seq,
                "global_batch": data * micro * microbatches,
                "accounting": ACCOUNTINGS.get(setting.framework, "fsdp2"),
                "precision": "fp32" if cluster.device.kind == "cpu" else "bf16",
            }
        )
        return plan_of(setting.model, job, cluster, layout)
    except ShardwrightError:
        return None
