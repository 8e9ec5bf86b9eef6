"""Frameworks: which values of the table's columns each can run, and whose bytes per parameter it keeps.

Columns alone say what a framework can do; what goes together is in the rules of layout.py. A column that is
not named is free. Read at torchtitan b5bcd76c, Megatron-LM d98e8a64, DeepSpeed edaa7221, accelerate 1.15.0.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwright.description import nearest
from shardwright.errors import LayoutError
from shardwright.job import Accounting
from shardwright.plan.columns import NAMED_COLUMNS, choices


class Framework(NamedTuple):
    """What one framework can run: names or numbers that columns may have, and where in it that stands."""

    accounting: Accounting
    program: str  # of data/programs, by whose differences its steps are timed
    allowed: Mapping[str, tuple[str | int, ...]]
    source: str


USUAL_ORDER = "pp/dp_replicate/dp_shard/cp/tp"

FRAMEWORKS: Mapping[str, Framework] = {
    "torchtitan": Framework(
        accounting="fsdp2",
        program="torchtitan",
        allowed={
            "schedule": (
                *("none", "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"),
                *("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
            ),
            "cp_kind": ("none", "ring", "all_gather"),
            "order": (USUAL_ORDER,),
            "offload": ("none",),
        },
        source="torchtitan: distributed/fsdp.py, distributed/pipeline_parallel.py (schedules of "
        "torch.distributed.pipelining), distributed/context_parallel/api.py (all-gather; a ring before it), "
        "models/common/token_dispatcher.py, distributed/activation_checkpoint.py, components/loss.py",
    ),
    "megatron": Framework(
        accounting="megatron",
        program="megatron-core",
        allowed={
            "zero_stage": (0, 1),
            "schedule": ("none", "1F1B", "Interleaved1F1B"),
            "order": (USUAL_ORDER, "dp_replicate/dp_shard/pp/cp/tp"),
            "loss_chunks": (1,),
        },
        source="Megatron-LM: core/distributed (distributed optimizer), core/pipeline_parallel/schedules.py, "
        "core/transformer/transformer_config.py cp_comm_type (p2p, all_gather, a2a), training/arguments.py "
        "--use-tp-pp-dp-mapping, core/fusions/fused_cross_entropy.py (the loss is not in parts)",
    ),
    "deepspeed": Framework(
        accounting="zero",
        program="deepspeed",
        allowed={
            "schedule": ("none", "1F1B"),
            "cp_kind": ("none", "ulysses"),
            "sp": (0,),
            "dispatch": ("all_to_all",),
            "order": (USUAL_ORDER,),
            "recompute": ("none", "full"),
            "recompute_every": (1,),
        },
        source="DeepSpeed: runtime/zero (stages 0 to 3), runtime/pipe/schedule.py TrainSchedule, "
        "runtime/sequence_parallel/ulysses_sp.py, module_inject/auto_tp.py, moe/sharded_moe.py, "
        "runtime/activation_checkpointing",
    ),
    "fsdp2": Framework(
        accounting="fsdp2",
        program="torchtitan",
        allowed={
            "pp": (1,),
            "ep": (1,),
            "sp": (0,),
            "cp_kind": ("none", "ring", "all_gather"),
            "recompute": ("none", "full"),
            "recompute_every": (1,),
            "loss_chunks": (1,),
            "offload": ("none",),
        },
        source="accelerate: ParallelismConfig (fully_shard with replicas, transformers' tp_plan, torch's "
        "context parallelism; no pipeline), its flag of activation checkpointing",
    ),
}


def framework_columns(name: str) -> dict[str, list[int]]:
    """Values of columns that a framework can run, as they stand in the table."""
    return {
        column: [value if isinstance(value, int) else NAMED_COLUMNS[column].index(value) for value in values]
        for column, values in FRAMEWORKS[name].allowed.items()
    }


def within_framework(name: str, fixed: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """What the user has fixed, and everything else that the framework fixes.

    Raises: LayoutError: the user has fixed what the framework cannot run, with all of it.
    """
    if name not in FRAMEWORKS:
        raise LayoutError(f"--framework={name!r} is unknown{nearest(name, list(FRAMEWORKS))}")
    can = framework_columns(name)
    both = {column: [v for v in values if v in can.get(column, values)] for column, values in fixed.items()}
    faults = [
        f"{column}={choices(column, fixed[column])} is not of {name}, only {choices(column, can[column])}"
        for column, values in both.items()
        if not values
    ]
    if faults:
        raise LayoutError(f"{'; '.join(faults)}: leave it out, or --framework")
    return {**can, **both}
