"""The command line: parses, calls, prints. What needs torch is imported by the commands that use it."""

import io
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import RenderableType

from shardwright import __version__
from shardwright import cli_options as opt
from shardwright.cluster import Cluster, cluster_of, device, device_names, usable_cores
from shardwright.errors import (
    AnswerIsNo,
    ClusterError,
    JobError,
    LayoutError,
    MissingExtraError,
    ShardwrightError,
)
from shardwright.hf_config import model_from
from shardwright.job import Job
from shardwright.layout import check_runnable, not_runnable_reasons
from shardwright.model import ModelSpec, preset, preset_names
from shardwright.planfile import Plan, load_plan, save_plan
from shardwright.report import terminal
from shardwright.report.explain import explain_report
from shardwright.report.plan import plan_report, why_report
from shardwright.units import BANDWIDTH, HOUR, TIME, parse_count, parse_quantity

if TYPE_CHECKING:
    from shardwright.plan.finding import Ranking

app = typer.Typer(
    name="shardwright",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plan how to split transformer training over GPUs, train with the plan, and prove it to the byte.",
)


T = TypeVar("T")

LEDGER_DIFFERS = "the ledger and the program differ: see the rows that are not ok"


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
def params(model: opt.ModelArgument, as_json: opt.JsonOption = False) -> None:
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
def presets(as_json: opt.JsonOption = False) -> None:
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
    model: opt.ModelArgument,
    seq: opt.Seq,
    global_batch: opt.GlobalBatch,
    gpus: opt.Gpus = None,
    device_name: opt.DeviceName = None,
    gpus_per_node: opt.GpusPerNode = None,
    cluster_file: opt.ClusterFile = None,
    precision: opt.PrecisionOption = None,
    optimizer: opt.OptimizerOption = opt.OptimizerName.adamw,
    accounting: opt.AccountingOption = opt.AccountingName.fsdp2,
    steps: opt.Steps = 1000,
    learning_rate: opt.LearningRate = 3e-4,
    warmup_steps: opt.WarmupSteps = 0,
    eval_every: opt.EvalEvery = 0,
    seed: opt.Seed = 0,
    tp: opt.Tp = None,
    pp: opt.Pp = None,
    cp: opt.Cp = None,
    dp_replicate: opt.DpReplicate = None,
    dp_shard: opt.DpShard = None,
    sp: opt.Sp = None,
    cp_kind: opt.CpKind = None,
    schedule: opt.ScheduleOption = None,
    chunks: opt.Chunks = None,
    zero: opt.ZeroStage = None,
    micro_batch: opt.MicroBatch = None,
    recompute: opt.RecomputeOption = None,
    max_memory: opt.MaxMemory = None,
    runnable: opt.Runnable = False,
    modelled: opt.Modelled = False,
    why: opt.Why = None,
    top: opt.Top = 5,
    output: opt.Output = None,
    measure: opt.Measure = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Find the fastest layout of a job that fits, and say why the others are out."""
    spec = model_from(model)
    cluster = _cluster(cluster_file, device_name, gpus, gpus_per_node)
    numbers: dict[str, float] = {"seq": seq, "global_batch": global_batch, "steps": steps, "seed": seed}
    numbers |= {"learning_rate": learning_rate, "warmup_steps": warmup_steps, "eval_every": eval_every}
    names = {"accounting": accounting.value, "optimizer": optimizer.value}
    default = "fp32" if cluster.device.kind == "cpu" else "bf16"
    job = Job.checked({**numbers, **names, "precision": default if precision is None else precision.value})
    degrees = {"tp": tp, "pp": pp, "cp": cp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "sp": sp}
    fixed = {**degrees, "chunks": chunks, "zero_stage": zero, "micro_batch": micro_batch}
    fixed |= _codes({"cp_kind": cp_kind, "schedule": schedule, "recompute": recompute})
    ranking = _ranking(runnable, modelled)
    if measure:
        cluster = _measured(spec, job, cluster)
    _search(why, output, as_json, spec, job, cluster, fixed, max_memory, top, ranking)


def _search(why: str | None, output: Path | None, as_json: bool, *search: Any) -> None:
    """Print what ``find`` or, with a layout to judge, ``answer_why`` says to the arguments ``search``."""
    from shardwright.plan.finding import find
    from shardwright.plan.why import answer_why

    if why is None:
        found = find(*search)
        _write(found.best, output)
        _print(found.document, as_json, plan_report)
        return
    answer = answer_why(why, *search)
    _write(answer.best, output)
    _print(answer.document, as_json, why_report)
    if answer.nothing is not None:
        raise answer.nothing


def _ranking(runnable: bool, modelled: bool) -> "Ranking":
    if runnable and modelled:
        raise LayoutError("--runnable and --modelled contradict each other: leave one out")
    return "runnable_only" if runnable else "time" if modelled else "runnable_first"


def _codes(names: Mapping[str, str | None]) -> dict[str, int | None]:
    """Columns of the table for the names of options."""
    from shardwright.plan.finding import column_code

    return {
        column: None if name is None else column_code(column, name, "--" + column.replace("_", "-"))
        for column, name in names.items()
    }


def _write(best: Plan | None, output: Path | None) -> None:
    """The best plan as a file, where one is asked for; with a note if nothing executes it."""
    if best is None or output is None:
        return
    path = save_plan(best, output)
    _say(f"wrote {path}")
    reasons = not_runnable_reasons(best.model, best.job, best.layout)
    if reasons:
        _say(f"{path} is only modelled, train and check will refuse it: {'; '.join(reasons)}")


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
def explain(plan_path: opt.PlanArgument, as_json: opt.JsonOption = False) -> None:
    """Show a plan's memory by term, its traffic by axis and link, and its step time."""
    from shardwright.plan.explain import explanation

    _print(explanation(load_plan(plan_path)), as_json, explain_report)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A plan, as for explain.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="Another of the same model.", metavar="B")],
    as_json: opt.JsonOption = False,
) -> None:
    """Two plans of a model side by side: memory, traffic, time, and what another batch means."""
    from shardwright.plan.comparison import compare_plans
    from shardwright.report.comparison import comparison_report

    _print(compare_plans(load_plan(a), load_plan(b)), as_json, comparison_report)


@app.command()
def goodput(
    plan_path: opt.PlanArgument,
    tokens: opt.Tokens,
    step_time: opt.StepTime = None,
    mtbf_hours: opt.MtbfHours = None,
    interruptions: opt.Failures = None,
    days: opt.Days = None,
    devices: opt.Devices = None,
    save_time: opt.SaveTime = None,
    storage_bandwidth: opt.StorageBandwidth = None,
    restart_time: opt.RestartTime = None,
    price: opt.Price = None,
    as_json: opt.JsonOption = False,
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
    plan_path: opt.PlanArgument,
    tolerance: Annotated[
        float, typer.Option(help="Largest difference at the peak, as a share of it.", min=0, max=1)
    ] = 0.02,
    as_json: opt.JsonOption = False,
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
    plan_path: opt.PlanArgument,
    data: opt.DataOption = None,
    nproc: opt.Nproc = None,
    steps: opt.FewerSteps = None,
    run_dir: opt.RunFolder = None,
    tensorboard: opt.Tensorboard = False,
    as_json: opt.JsonOption = False,
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
    run_dir: opt.RunFolder = None,
    nproc: Annotated[int, typer.Option(help="Ranks.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Steps to train.", min=2)] = 60,
    as_json: opt.JsonOption = False,
) -> None:
    """Plan a small model for this machine, train it on 2 ranks, check the prediction, and show it all."""
    _need_torch("loop")
    from shardwright.launcher import loop_here
    from shardwright.report.loop import loop_report

    document = loop_here(run_dir, nproc, steps, say=_say)
    _print(document, as_json, loop_report)
    if not document["check"]["ok"]:
        raise AnswerIsNo(LEDGER_DIFFERS)
