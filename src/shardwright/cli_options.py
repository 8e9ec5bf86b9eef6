"""Arguments and options of the command line: their names, help and choices."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardwright.layout import CONTEXT_KINDS, RECOMPUTE_KINDS, SCHEDULE_NAMES


class Precision(StrEnum):
    """Choices of --precision."""

    bf16 = "bf16"
    fp32 = "fp32"
    fp64 = "fp64"


class OptimizerName(StrEnum):
    """Choices of --optimizer."""

    adamw = "adamw"
    sgd = "sgd"
    sgd_momentum = "sgd_momentum"
    adamw_8bit = "adamw_8bit"
    adafactor = "adafactor"
    muon = "muon"


class AccountingName(StrEnum):
    """Choices of --accounting."""

    fsdp2 = "fsdp2"
    zero = "zero"
    megatron = "megatron"
    pure_bf16 = "pure_bf16"


ModelArgument = Annotated[str, typer.Argument(help="A preset name, a config.json, or a folder holding one.")]
PlanArgument = Annotated[
    Path, typer.Argument(help="A plan.toml, or a folder that holds one.", metavar="PLAN")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]

# Options of `plan`
Seq = Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)]
GlobalBatch = Annotated[int, typer.Option(help="Sequences of one optimizer step, over all ranks.", min=1)]
Gpus = Annotated[int | None, typer.Option(help="Devices. Default: this machine's cores as CPU ranks.", min=1)]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="Kind of device; see 'presets'. Default: cpu.")
]
GpusPerNode = Annotated[int | None, typer.Option(help="Devices of one fast-link domain.", min=1)]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", help="A cluster.toml instead of --gpus and --device.")
]
PrecisionOption = Annotated[Precision | None, typer.Option(help="Arithmetic. Default: bf16, on CPU fp32.")]
OptimizerOption = Annotated[OptimizerName, typer.Option(help="Optimizer.")]
AccountingOption = Annotated[
    AccountingName, typer.Option(help="Whose bytes per parameter to count; fsdp2 is what train does.")
]
Steps = Annotated[int, typer.Option(help="Optimizer steps of the job.", min=1)]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.", min=0)]
WarmupSteps = Annotated[int, typer.Option(help="Steps of linear warm-up.", min=0)]
EvalEvery = Annotated[int, typer.Option(help="Steps between evaluations; 0 never evaluates.", min=0)]
Seed = Annotated[int, typer.Option(help="Seed of weights and data order.", min=0)]
Tp = Annotated[int | None, typer.Option(help="Fix the ranks that share every matrix.", min=1)]
Pp = Annotated[int | None, typer.Option(help="Fix the ranks of a pipeline.", min=1)]
Cp = Annotated[int | None, typer.Option(help="Fix the ranks that share a sequence.", min=1)]
DpReplicate = Annotated[int | None, typer.Option(help="Fix the replicas of the sharded ranks.", min=1)]
DpShard = Annotated[int | None, typer.Option(help="Fix the data ranks that share parameters.", min=1)]
ZeroStage = Annotated[int | None, typer.Option(help="Fix the ZeRO stage.", min=0, max=3)]
MicroBatch = Annotated[int | None, typer.Option(help="Fix the sequences of a microbatch.", min=1)]
RecomputeOption = Annotated[
    str | None, typer.Option(help=f"Fix what is recomputed: {', '.join(RECOMPUTE_KINDS)}.")
]
Sp = Annotated[
    bool | None,
    typer.Option("--sp/--no-sp", help="Split norms and residuals by sequence over tp, or do not."),
]
CpKind = Annotated[str | None, typer.Option(help=f"Fix the kind of cp: {', '.join(CONTEXT_KINDS[1:])}.")]
ScheduleOption = Annotated[
    str | None, typer.Option(help=f"Fix the pipeline's schedule: {', '.join(SCHEDULE_NAMES[1:])}.")
]
Chunks = Annotated[int | None, typer.Option(help="Fix the stages of each pipeline rank.", min=1)]
Runnable = Annotated[bool, typer.Option("--runnable", help="Only layouts that train can execute.")]
Modelled = Annotated[
    bool,
    typer.Option("--modelled", help="Rank all layouts by time alone, whether train can execute them or not."),
]
Why = Annotated[
    str | None,
    typer.Option("--why", help='What is wrong with this layout, "tp=16 pp=4" for example.', metavar="LAYOUT"),
]
MaxMemory = Annotated[str | None, typer.Option(help='Use at most so much of a device, "70 GiB" for example.')]
Top = Annotated[int, typer.Option(help="Layouts to show.", min=1)]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Write the best as a plan file; into a folder, as plan.toml."),
]
Measure = Annotated[bool, typer.Option(help="Measure this machine's CPU ranks first (2 s).")]

# Options of `goodput`
Tokens = Annotated[str, typer.Option(help='Tokens of the run, "15T" or "300B" for example.')]
StepTime = Annotated[str | None, typer.Option(help="A measured step. Default: the plan's prediction.")]
MtbfHours = Annotated[float | None, typer.Option(help="Hours between failures of one device.")]
Failures = Annotated[
    int | None, typer.Option("--interruptions", help="Failures of a job, over --days on --devices.", min=1)
]
Days = Annotated[float | None, typer.Option(help="Days over which --interruptions came.")]
Devices = Annotated[int | None, typer.Option(help="Devices of the job they stopped.", min=1)]
SaveTime = Annotated[str | None, typer.Option(help='Standstill of a checkpoint, "60 s" for example.')]
StorageBandwidth = Annotated[
    str | None, typer.Option(help='Of all devices together, to estimate it, "20 GB/s" for example.')
]
RestartTime = Annotated[str | None, typer.Option(help='From failure to checkpoint loaded, "10 min".')]
Price = Annotated[float | None, typer.Option(help="Of a device-hour. Default: the cluster's, if it has one.")]

# Options of `train` and `loop`
DataOption = Annotated[
    Path | None, typer.Option(help="A text file or a folder of them. Default: Python's standard library.")
]
Nproc = Annotated[
    int | None,
    typer.Option(help="Local ranks to start, outside torchrun. Default: all of the plan's.", min=1),
]
FewerSteps = Annotated[
    int | None, typer.Option("--steps", help="Train so many steps instead of the plan's.", min=1)
]
RunFolder = Annotated[
    Path | None, typer.Option("--run-dir", help="Folder of the run. Default: runs/<name>-<time>.")
]
Tensorboard = Annotated[bool, typer.Option(help="Write TensorBoard events into the run folder.")]
