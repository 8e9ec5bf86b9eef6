"""The command line: parses, calls, prints. What needs torch is imported by the commands that use it."""

import io
import json
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import RenderableType

from shardwright import __version__
from shardwright.cluster import Cluster, cluster_of, device, device_names, usable_cores
from shardwright.errors import AnswerIsNo, ClusterError, JobError, MissingExtraError, ShardwrightError
from shardwright.hf_config import model_from
from shardwright.job import Job
from shardwright.layout import RECOMPUTE_KINDS, check_runnable
from shardwright.model import ModelSpec, preset, preset_names
from shardwright.planfile import load_plan, save_plan
from shardwright.report import terminal
from shardwright.units import BANDWIDTH, HOUR, TIME, parse_count, parse_quantity

app = typer.Typer(
    name="shardwright",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plan how to split transformer training over GPUs, train with the plan, and prove it to the byte.",
)


T = TypeVar("T")

LEDGER_DIFFERS = "the ledger and the program differ: see the rows that are not ok"


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


class RecomputeKind(StrEnum):
    """Choices of --recompute."""

    none = "none"
    selective = "selective"
    full = "full"


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
Degree = Annotated[int | None, typer.Option(help="Fix this degree.", min=1)]
ZeroStage = Annotated[int | None, typer.Option(help="Fix the ZeRO stage.", min=0, max=3)]
MicroBatch = Annotated[int | None, typer.Option(help="Fix the sequences of a microbatch.", min=1)]
RecomputeOption = Annotated[RecomputeKind | None, typer.Option(help="Fix what is recomputed.")]
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


def main() -> None:
    """Run a command; errors made on purpose become one message and an exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a report has characters that not every encoding has
    try:
        app()
    except ShardwrightError as error:
        print(f"shardwright: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def _print(
    document: Mapping[str, Any], as_json: bool, report: Callable[[Mapping[str, Any]], RenderableType]
) -> None:
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        terminal.show(report(document))


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _need_torch(purpose: str) -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtraError("train", purpose) from None


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shardwright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def params(model: ModelArgument, as_json: JsonOption = False) -> None:
    """Count a model's parameters and list its tensors."""
    from shardwright.hf_meta import counted

    count = counted(model)
    document = {
        "model": count.name,
        "parameters": count.table.parameters,
        "active_parameters": count.active,
        "mtp_parameters": count.mtp,
        "tensors": [{"name": t.name, "shape": list(t.shape), "role": t.role} for t in count.table.tensors()],
    }
    _print(document, as_json, terminal.params_report)


@app.command()
def presets(as_json: JsonOption = False) -> None:
    """List the models and devices shipped with shardwright."""
    from shardwright.plan.params import parameter_table

    kinds = {kind.name: kind for kind in (device(name) for name in device_names())}
    document = {
        "models": [
            {"name": name, "parameters": parameter_table(preset(name)).parameters} for name in preset_names()
        ],
        "devices": [
            {
                "name": kind.name,
                "aliases": list(kind.aliases),
                "memory": kind.memory,
                "bf16": kind.bf16,
                "intra_bandwidth": kind.intra_link.bandwidth,
                "inter_bandwidth": kind.inter_link.bandwidth,
            }
            for kind in kinds.values()
        ],
    }
    _print(document, as_json, terminal.presets_report)


@app.command()
def plan(
    model: ModelArgument,
    seq: Seq,
    global_batch: GlobalBatch,
    gpus: Gpus = None,
    device_name: DeviceName = None,
    gpus_per_node: GpusPerNode = None,
    cluster_file: ClusterFile = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = OptimizerName.adamw,
    accounting: AccountingOption = AccountingName.fsdp2,
    steps: Steps = 1000,
    learning_rate: LearningRate = 3e-4,
    warmup_steps: WarmupSteps = 0,
    eval_every: EvalEvery = 0,
    seed: Seed = 0,
    dp_replicate: Degree = None,
    dp_shard: Degree = None,
    zero: ZeroStage = None,
    micro_batch: MicroBatch = None,
    recompute: RecomputeOption = None,
    max_memory: MaxMemory = None,
    top: Top = 5,
    output: Output = None,
    measure: Measure = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest layout of a job that fits, and say why the others are out."""
    from shardwright.plan import finding

    spec = model_from(model)
    cluster = _cluster(cluster_file, device_name, gpus, gpus_per_node)
    default = "fp32" if cluster.device.kind == "cpu" else "bf16"
    job = Job.checked(
        {
            "seq": seq,
            "global_batch": global_batch,
            "steps": steps,
            "precision": default if precision is None else precision.value,
            "accounting": accounting.value,
            "optimizer": optimizer.value,
            "learning_rate": learning_rate,
            "warmup_steps": warmup_steps,
            "eval_every": eval_every,
            "seed": seed,
        }
    )
    if measure:
        cluster = _measured(spec, job, cluster)
    fixed = {
        "dp_replicate": dp_replicate,
        "dp_shard": dp_shard,
        "zero_stage": zero,
        "micro_batch": micro_batch,
        "recompute": None if recompute is None else RECOMPUTE_KINDS.index(recompute.value),
    }
    found = finding.find(spec, job, cluster, fixed, max_memory, top)
    if output is not None:
        _say(f"wrote {save_plan(found.best, output)}")
    _print(found.document, as_json, terminal.plan_report)


def _cluster(
    file: Path | None, device_name: str | None, gpus: int | None, gpus_per_node: int | None
) -> Cluster:
    if file is not None:
        given = {"--device": device_name, "--gpus": gpus, "--gpus-per-node": gpus_per_node}
        clashing = [option for option, value in given.items() if value is not None]
        if clashing:
            raise ClusterError(f"--cluster {file} says it all: leave out {', '.join(clashing)}")
        return Cluster.from_file(file)
    name = "cpu" if device_name is None else device_name
    if gpus is None:
        if device(name).kind != "cpu":
            raise ClusterError(f"--gpus is missing: say how many of {name} there are, --gpus 8 for example")
        gpus = usable_cores()
    return cluster_of(name, gpus, gpus_per_node)


def _measured(model: ModelSpec, job: Job, cluster: Cluster) -> Cluster:
    if cluster.device.kind != "cpu":
        raise ClusterError(
            f"--measure is for CPU ranks of this machine, not {cluster.device.name}: leave it out"
        )
    _need_torch("measuring this machine")
    from shardwright.measure.device import measured_cluster

    return measured_cluster(model, job, cluster)


@app.command()
def explain(plan_path: PlanArgument, as_json: JsonOption = False) -> None:
    """Show a plan's memory by term, its traffic by axis and link, and its step time."""
    from shardwright.plan.explain import explanation

    _print(explanation(load_plan(plan_path)), as_json, terminal.explain_report)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A plan, as for explain.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="Another of the same model.", metavar="B")],
    as_json: JsonOption = False,
) -> None:
    """Two plans of a model side by side: memory, traffic, time, and what another batch means."""
    from shardwright.plan.comparison import compare_plans
    from shardwright.report.comparison import comparison_report

    _print(compare_plans(load_plan(a), load_plan(b)), as_json, comparison_report)


@app.command()
def goodput(
    plan_path: PlanArgument,
    tokens: Tokens,
    step_time: StepTime = None,
    mtbf_hours: MtbfHours = None,
    interruptions: Failures = None,
    days: Days = None,
    devices: Devices = None,
    save_time: SaveTime = None,
    storage_bandwidth: StorageBandwidth = None,
    restart_time: RestartTime = None,
    price: Price = None,
    as_json: JsonOption = False,
) -> None:
    """Days and cost of a run of so many tokens, failures and checkpoints included."""
    from shardwright.plan.operation import Given, run_goodput
    from shardwright.report.goodput import goodput_report

    given = Given(
        tokens=_read("--tokens", parse_count, tokens),
        step_time=_quantity("--step-time", step_time, TIME),
        device_mtbf=None if mtbf_hours is None else mtbf_hours * HOUR,
        failures=interruptions,
        days=days,
        devices=devices,
        save_time=_quantity("--save-time", save_time, TIME),
        storage_bandwidth=_quantity("--storage-bandwidth", storage_bandwidth, BANDWIDTH),
        restart_time=_quantity("--restart-time", restart_time, TIME),
        price_per_device_hour=price,
    )
    _print(run_goodput(load_plan(plan_path), given), as_json, goodput_report)


def _read(option: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as fault:
        raise JobError(f"{option}: {fault}") from None


def _quantity(option: str, text: str | None, units: Mapping[str, float]) -> float | None:
    return None if text is None else _read(option, lambda given: parse_quantity(given, units), text)


@app.command()
def check(
    plan_path: PlanArgument,
    tolerance: Annotated[
        float, typer.Option(help="Largest difference at the peak, as a share of it.", min=0, max=1)
    ] = 0.02,
    as_json: JsonOption = False,
) -> None:
    """Execute one rank without memory or network; exit status 1 if the ledger says otherwise."""
    loaded = load_plan(plan_path)
    _need_torch("check")
    check_runnable(loaded.model, loaded.job, loaded.layout)
    from shardwright.check.compare import check_plan

    comparison = check_plan(loaded, tolerance)
    _print(comparison.document(), as_json, terminal.check_report)
    if not comparison.ok:
        raise AnswerIsNo(LEDGER_DIFFERS)


@app.command()
def train(
    plan_path: PlanArgument,
    data: DataOption = None,
    nproc: Nproc = None,
    steps: FewerSteps = None,
    run_dir: RunFolder = None,
    tensorboard: Tensorboard = False,
    as_json: JsonOption = False,
) -> None:
    """Train with a plan, under torchrun or with local ranks of its own."""
    loaded = load_plan(plan_path)
    _need_torch("train")
    from shardwright.launcher import train_plan

    result = train_plan(
        loaded, data=data, nproc=nproc, steps=steps, run_directory=run_dir, tensorboard=tensorboard
    )
    if result is not None:  # rank 0
        _print(result, as_json, terminal.train_report)


@app.command()
def loop(
    run_dir: RunFolder = None,
    nproc: Annotated[int, typer.Option(help="Ranks.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Steps to train.", min=2)] = 60,
    as_json: JsonOption = False,
) -> None:
    """Plan a small model for this machine, train it on 2 ranks, check the prediction, and show it all."""
    _need_torch("loop")
    from shardwright.launcher import loop_here
    from shardwright.report.loop import loop_report

    document = loop_here(run_dir, nproc, steps, say=_say)
    _print(document, as_json, loop_report)
    if not document["check"]["ok"]:
        raise AnswerIsNo(LEDGER_DIFFERS)
