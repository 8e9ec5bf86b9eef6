"""Arguments and options of the command line: their names, help and choices."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardwright.axes import MESH_ORDERS
from shardwright.job import LORA_TARGETS
from shardwright.layout import (
    CONTEXT_KINDS,
    DISPATCH_KINDS,
    OFFLOAD_KINDS,
    RECOMPUTE_KINDS,
    SCHEDULE_NAMES,
)


class Precision(StrEnum):
    """Choices of --precision."""

    bf16 = "bf16"
    fp8 = "fp8"
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
    zero_bf16 = "zero_bf16"
    megatron = "megatron"
    pure_bf16 = "pure_bf16"


class PackingName(StrEnum):
    """Choices of --packing."""

    windows = "windows"
    documents = "documents"


class FrameworkName(StrEnum):
    """Choices of --framework; plan/frameworks.py says what each can do."""

    torchtitan = "torchtitan"
    megatron = "megatron"
    deepspeed = "deepspeed"
    fsdp2 = "fsdp2"


class ObjectiveName(StrEnum):
    """Choices of --objective; plan/objectives.py says what each looks for."""

    time = "time"
    cost = "cost"
    gpus = "gpus"
    micro_batch = "micro-batch"
    sequence = "sequence"


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
Price = Annotated[float | None, typer.Option(help="Of a device-hour. Default: the cluster's, if it has one.")]
PrecisionOption = Annotated[Precision | None, typer.Option(help="Arithmetic. Default: bf16, on CPU fp32.")]
OptimizerOption = Annotated[OptimizerName, typer.Option(help="Optimizer.")]
AccountingOption = Annotated[
    AccountingName | None,
    typer.Option(help="Whose bytes per parameter to count. Default: the framework's, else fsdp2."),
]
LoraRank = Annotated[int, typer.Option(help="Rank of LoRA adapters; 0 trains all parameters.", min=0)]
LoraTargets = Annotated[
    str, typer.Option(help=f"Matrices that have adapters: {','.join(LORA_TARGETS)}.", metavar="A,B,...")
]
BaseBits = Annotated[int, typer.Option(help="Bits of a frozen parameter under LoRA: 4, 8 or 16.")]
ExpertCapacity = Annotated[
    float, typer.Option(help="Factor that caps an expert's tokens; 0 drops none.", min=0)
]
ExpertImbalance = Annotated[
    float, typer.Option(help="Tokens of the fullest rank of experts over the mean.", min=1)
]
Steps = Annotated[int, typer.Option(help="Optimizer steps of the job.", min=1)]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.", min=0)]
WarmupSteps = Annotated[int, typer.Option(help="Steps of linear warm-up.", min=0)]
EvalEvery = Annotated[int, typer.Option(help="Steps between evaluations; 0 never evaluates.", min=0)]
Seed = Annotated[int, typer.Option(help="Seed of weights and data order.", min=0)]
PackingOption = Annotated[
    PackingName,
    typer.Option(help="Attention over whole windows of joined documents, or inside each document."),
]
Tp = Annotated[int | None, typer.Option(help="Fix the ranks that share every matrix.", min=1)]
Pp = Annotated[int | None, typer.Option(help="Fix the ranks of a pipeline.", min=1)]
Cp = Annotated[int | None, typer.Option(help="Fix the ranks that share a sequence.", min=1)]
Ep = Annotated[int | None, typer.Option(help="Fix the ranks that share out the experts.", min=1)]
Etp = Annotated[int | None, typer.Option(help="Fix the ranks that share an expert's matrices.", min=1)]
DispatchOption = Annotated[
    str | None, typer.Option(help=f"Fix how tokens reach experts: {', '.join(DISPATCH_KINDS)}.")
]
OrderOption = Annotated[
    str | None,
    typer.Option(help=f"Fix the order of the mesh: {', '.join('/'.join(order) for order in MESH_ORDERS)}."),
]
DpReplicate = Annotated[int | None, typer.Option(help="Fix the replicas of the sharded ranks.", min=1)]
DpShard = Annotated[int | None, typer.Option(help="Fix the data ranks that share parameters.", min=1)]
ZeroStage = Annotated[int | None, typer.Option("--zero", help="Fix the ZeRO stage.", min=0, max=3)]
MicroBatch = Annotated[int | None, typer.Option(help="Fix the sequences of a microbatch.", min=1)]
RecomputeOption = Annotated[
    str | None, typer.Option(help=f"Fix what is recomputed: {', '.join(RECOMPUTE_KINDS)}.")
]
RecomputeEvery = Annotated[
    int | None, typer.Option(help="Fix of how many layers one is recomputed in full.", min=1)
]
LossChunks = Annotated[int | None, typer.Option(help="Fix the parts of a microbatch for the loss.", min=1)]
OffloadOption = Annotated[
    str | None, typer.Option(help=f"Fix what rests in host memory: {', '.join(OFFLOAD_KINDS)}.")
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
FrameworkOption = Annotated[
    FrameworkName | None,
    typer.Option("--framework", help="Only layouts that it can run, with its bytes per parameter."),
]
ObjectiveOption = Annotated[
    ObjectiveName,
    typer.Option(
        "--objective",
        help="What is best: time or cost of a step, fewest devices, largest microbatch, longest sequence.",
    ),
]
Pareto = Annotated[bool, typer.Option("--pareto", help="Show what more memory left costs in time.")]
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

# Options of `table`
Models = Annotated[str | None, typer.Option(help="Presets or config.json files, with commas between them.")]
GpuCounts = Annotated[str, typer.Option("--gpus", help="Numbers of devices, with commas between them.")]
TableDevice = Annotated[str, typer.Option("--device", help="Kind of device; see 'presets'.")]
TableSeq = Annotated[int, typer.Option("--seq", help="Tokens of a sequence.", min=1)]
TokensPerStep = Annotated[
    str,
    typer.Option(help='Tokens of a step, "4M" for example: whole sequences of a power of two, if need be.'),
]

# Options of `tokenize`
Inputs = Annotated[
    list[Path],
    typer.Argument(
        help="Text files, a document each; .jsonl and .parquet, a document a record; or folders of them.",
        metavar="INPUT...",
        show_default=False,
    ),
]
Whole = Annotated[
    bool,
    typer.Option("--whole", help="Execute every layer and microbatch, those that only repeat others too."),
]
Tensors = Annotated[
    bool, typer.Option("--tensors", help="List what every term is made of at the peak, by line of source.")
]
Real = Annotated[
    bool, typer.Option("--real", help="Run a step for real too, on CPU ranks: a third column.  [small plans]")
]
StageOption = Annotated[
    int | None,
    typer.Option("--stage", help="Pipeline rank to execute.  [one of each that differ]", min=0),
]
RankOption = Annotated[int | None, typer.Option("--rank", help="Rank to execute, of all ranks.", min=0)]
MemoryOutput = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="Picture (.html, .svg), or a snapshot for pytorch.org/memory_viz (.pickle).",
        dir_okay=False,
    ),
]
TokensOutput = Annotated[
    Path, typer.Option("-o", "--output", help="The token file to write, corpus.tokens for example.")
]
TokenizerOption = Annotated[
    str, typer.Option(help="A tokenizer.json or a folder that holds one; bytes makes a token of each byte.")
]
TextField = Annotated[str, typer.Option(help="Field of JSON, or column of Parquet, that holds the text.")]
Separator = Annotated[
    str | None,
    typer.Option(
        help="Token that ends a document. Default: the tokenizer's end of text, by its usual names."
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out records that are not text, and count them.")
]

# Options of `train` and `loop`
DataOption = Annotated[
    Path | None,
    typer.Option(
        help="A token file, a text file, or a folder of text files. Default: Python's standard library."
    ),
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

# Options of `doctor`
EvidenceFiles = Annotated[
    list[str],
    typer.Argument(
        help="Logs, dumps, plans, configurations, traces, metrics, a run folder; - for a pipe.",
        metavar="FILES...",
    ),
]
DoctorModel = Annotated[
    str | None, typer.Option("--model", help="The model: a preset name, a config.json, or a folder with one.")
]
Watch = Annotated[
    float | None,
    typer.Option(
        "--watch",
        help="Look at a run folder every so many seconds until something is found or it ends.",
        min=0.1,
    ),
]
Given = Annotated[
    str,
    typer.Option(
        help='What the files do not say of the run: "gpus=64 tp=8 seq=4096 micro_batch=1 device=h100-sxm".',
        metavar="NAME=VALUE...",
    ),
]
