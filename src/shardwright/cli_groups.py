"""Options of the command line that belong together, and what they say: a cluster, a job, fixed columns.

A group is a NamedTuple; ``with_groups`` gives a command the options of its groups.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, get_type_hints

from shardwright.cli_options import (
    AccountingOption,
    BaseBits,
    Chunks,
    ClusterFile,
    Cp,
    CpKind,
    DeviceName,
    DispatchOption,
    DpReplicate,
    DpShard,
    Ep,
    Etp,
    EvalEvery,
    ExpertCapacity,
    ExpertImbalance,
    FrameworkName,
    Gpus,
    GpusPerNode,
    LearningRate,
    LoraRank,
    LoraTargets,
    LossChunks,
    MicroBatch,
    OffloadOption,
    OptimizerName,
    OptimizerOption,
    OrderOption,
    PackingName,
    PackingOption,
    Pp,
    PrecisionOption,
    Price,
    RecomputeEvery,
    RecomputeOption,
    ScheduleOption,
    Seed,
    Sp,
    Steps,
    Tp,
    WarmupSteps,
    ZeroStage,
)
from shardwright.cluster import Cluster, cluster_of, device, usable_cores
from shardwright.errors import ClusterError
from shardwright.job import Job
from shardwright.plan.columns import NAMED_COLUMNS, column_code
from shardwright.plan.frameworks import FRAMEWORKS, within_framework
from shardwright.program import known_program


class JobOptions(NamedTuple):
    """Fields of a job besides its sequence and its batch."""

    precision: PrecisionOption = None
    optimizer: OptimizerOption = OptimizerName.adamw
    accounting: AccountingOption = None
    steps: Steps = 1000
    learning_rate: LearningRate = 3e-4
    warmup_steps: WarmupSteps = 0
    eval_every: EvalEvery = 0
    seed: Seed = 0
    packing: PackingOption = PackingName.windows
    lora_rank: LoraRank = 0
    lora_targets: LoraTargets = ""
    base_bits: BaseBits = 16
    expert_capacity: ExpertCapacity = 0.0
    expert_imbalance: ExpertImbalance = 1.2


class FixedOptions(NamedTuple):
    """Columns of the table, by their names; None leaves one free."""

    tp: Tp = None
    pp: Pp = None
    cp: Cp = None
    dp_replicate: DpReplicate = None
    dp_shard: DpShard = None
    ep: Ep = None
    etp: Etp = None
    dispatch: DispatchOption = None
    order: OrderOption = None
    sp: Sp = None
    cp_kind: CpKind = None
    schedule: ScheduleOption = None
    chunks: Chunks = None
    zero_stage: ZeroStage = None
    micro_batch: MicroBatch = None
    recompute: RecomputeOption = None
    recompute_every: RecomputeEvery = None
    loss_chunks: LossChunks = None
    offload: OffloadOption = None


class ClusterOptions(NamedTuple):
    """The hardware, its price among them."""

    gpus: Gpus = None
    device_name: DeviceName = None
    gpus_per_node: GpusPerNode = None
    cluster_file: ClusterFile = None
    price: Price = None


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of each group in the group's place."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if hasattr(hint, "_fields")}
    kind, options = inspect.Parameter.KEYWORD_ONLY, []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            of_group, defaults = (
                get_type_hints(groups[name], include_extras=True),
                groups[name]._field_defaults,
            )
            options += [
                inspect.Parameter(option, kind, annotation=hint, default=defaults[option])
                for option, hint in of_group.items()
            ]
        else:
            options.append(parameter.replace(kind=kind, annotation=hints[name]))

    @wraps(command)
    def grouped(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(*(values.pop(option) for option in group._fields))
        command(**values)

    grouped.__dict__["__signature__"] = inspect.Signature(options)
    grouped.__annotations__ = {option.name: option.annotation for option in options}
    return grouped


def cluster_of_options(options: ClusterOptions) -> Cluster:
    """The cluster of some options.

    Raises: ClusterError: what is given contradicts itself, or is not enough.
    """
    gpus, name, file, price = options.gpus, options.device_name, options.cluster_file, options.price
    if file is not None:
        given = {"--device": name, "--gpus": gpus, "--gpus-per-node": options.gpus_per_node}
        clashing = [option for option, value in given.items() if value is not None]
        if clashing:
            raise ClusterError(f"--cluster {file} says it all: leave out {', '.join(clashing)}")
        cluster = Cluster.from_file(file).model_copy(update={"map": None})
    else:
        name = "cpu" if name is None else name
        if gpus is None:
            if device(name).kind != "cpu":
                raise ClusterError(
                    f"--gpus is missing: say how many of {name} there are, --gpus 8 for example"
                )
            gpus = usable_cores()
        cluster = cluster_of(name, gpus, options.gpus_per_node, fitted=True)
    if price is None:
        return cluster
    if not 0 < price < float("inf"):
        raise ClusterError(f"--price={price} must be finite and above 0: give another, or leave it out")
    return cluster.model_copy(update={"price_per_device_hour": price})


def job_of_options(
    seq: int,
    global_batch: int,
    options: JobOptions,
    framework: FrameworkName | None,
    cluster: Cluster,
) -> Job:
    """The job of some options; arithmetic and accounting follow the device and the framework unless given."""
    values = options._asdict() | {"seq": seq, "global_batch": global_batch}
    values["optimizer"], values["packing"] = options.optimizer.value, options.packing.value
    default = "fp32" if cluster.device.kind == "cpu" else "bf16"
    values["precision"] = default if options.precision is None else options.precision.value
    values["accounting"] = "fsdp2"
    if options.accounting is not None:
        values["accounting"] = options.accounting.value
    elif framework is not None:
        values["accounting"] = FRAMEWORKS[framework.value].accounting
    if framework is not None:
        values["program"] = known_program(FRAMEWORKS[framework.value].program).program()
    values["lora_targets"] = tuple(name.strip() for name in options.lora_targets.split(",") if name.strip())
    return Job.checked(values)


def columns_of_options(fixed: FixedOptions, framework: FrameworkName | None) -> dict[str, Sequence[int]]:
    """Columns of the table for the options, as far as they are given, and for what a framework can run."""
    given = {column: value for column, value in fixed._asdict().items() if value is not None}
    codes = {
        column: column_code(column, value, "--" + column.replace("_", "-"))
        if column in NAMED_COLUMNS
        else int(value)
        for column, value in given.items()
    }
    columns: dict[str, Sequence[int]] = {column: [code] for column, code in codes.items()}
    return columns if framework is None else within_framework(framework.value, columns)
