"""The command line: parses, calls, prints. What needs torch is imported by the commands that use it."""

import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from shardwright import __version__
from shardwright import cli_groups as groups
from shardwright import cli_options as opt
from shardwright import cli_train_options as train_opt
from shardwright.cli_map import map_app
from shardwright.cli_print import need_torch, print_report, say
from shardwright.cli_proof import LEDGER_DIFFERS, accuracy, check, doctor, memory, parity
from shardwright.cluster import Cluster, device, device_names
from shardwright.derive.spec import counted, model_of
from shardwright.errors import (
    AnswerIsNo,
    ClusterError,
    JobError,
    LayoutError,
    NothingFitsError,
    ShardwrightError,
)
from shardwright.job import Job
from shardwright.model import ModelSpec, preset, preset_names
from shardwright.plan.runnable import not_runnable_reasons
from shardwright.planfile import Plan, load_plan, save_plan
from shardwright.report import terminal
from shardwright.report.explain import explain_report
from shardwright.report.plan import nothing_report, pareto_plan_report, plan_report, why_report
from shardwright.units import BANDWIDTH, HOUR, TIME, parse_count, parse_quantity

if TYPE_CHECKING:
    from shardwright.plan.finding import Ranking, Wishes

    Search = tuple[ModelSpec, Job, Cluster, Wishes, str | None, int, Ranking]

app = typer.Typer(
    name="shardwright",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plan how to split transformer training over GPUs, train with the plan, and prove it to the byte.",
)


T = TypeVar("T")


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
    count = counted(model)
    document = {
        "model": count.name,
        "parameters": count.table.parameters,
        "active_parameters": count.active,
        "mtp_parameters": count.mtp,
        "tensors": [{"name": t.name, "shape": list(t.shape), "role": t.role} for t in count.table.tensors()],
    }
    print_report(document, as_json, terminal.params_report)


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
    print_report(document, as_json, terminal.presets_report)


@app.command()
@groups.with_groups
def plan(
    model: opt.ModelArgument,
    seq: opt.Seq,
    global_batch: opt.GlobalBatch,
    cluster: groups.ClusterOptions,
    options: groups.JobOptions,
    fixed: groups.FixedOptions,
    framework: opt.FrameworkOption = None,
    objective: opt.ObjectiveOption = opt.ObjectiveName.time,
    max_memory: opt.MaxMemory = None,
    runnable: opt.Runnable = False,
    modelled: opt.Modelled = False,
    pareto: opt.Pareto = False,
    why: opt.Why = None,
    top: opt.Top = 5,
    output: opt.Output = None,
    measure: opt.Measure = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Find the best layout of a job that fits, and say why the others are out."""
    spec, devices = model_of(model), groups.cluster_of_options(cluster)
    job = groups.job_of_options(seq, global_batch, options, framework, devices)
    if measure:
        devices = _measured(spec, job, devices)
    columns, ranking = groups.columns_of_options(fixed, framework), _ranking(runnable, modelled)
    search = spec, job, devices, columns, max_memory, top, ranking
    try:
        if why is None:
            found = _find(objective, output, search)
            document = found | {"framework": None if framework is None else framework.value}
            print_report(document, as_json, pareto_plan_report if pareto else plan_report)
        elif objective is not opt.ObjectiveName.time:
            raise LayoutError(f"--why compares with the fastest: leave out --objective {objective.value}")
        else:
            _answer_why(why, output, as_json, search)
    except NothingFitsError as nothing:
        if nothing.document and why is None:
            print_report(nothing.document, as_json, nothing_report)
        raise


def _find(objective: opt.ObjectiveName, output: Path | None, search: "Search") -> dict[str, Any]:
    from shardwright.plan.objectives import find_best

    found = find_best(objective.value, *search)
    _write(found.best, output)
    return found.document


def _answer_why(text: str, output: Path | None, as_json: bool, search: "Search") -> None:
    from shardwright.plan.why import answer_why

    answer = answer_why(text, *search)
    _write(answer.best, output)
    print_report(answer.document, as_json, why_report)
    if answer.nothing is not None:
        raise answer.nothing


def _ranking(runnable: bool, modelled: bool) -> "Ranking":
    if runnable and modelled:
        raise LayoutError("--runnable and --modelled contradict each other: leave one out")
    return "runnable_only" if runnable else "time" if modelled else "runnable_first"


def _write(best: Plan | None, output: Path | None) -> None:
    """The best plan as a file, where one is asked for; with a note if nothing executes it."""
    if best is None or output is None:
        return
    path = save_plan(best, output)
    say(f"wrote {path}")
    reasons = not_runnable_reasons(best.model, best.job, best.layout)
    if reasons:
        say(f"{path} is only modelled, train will refuse it: {'; '.join(reasons)}")


def _measured(model: ModelSpec, job: Job, cluster: Cluster) -> Cluster:
    if cluster.device.kind != "cpu":
        raise ClusterError(
            f"--measure is for CPU ranks of this machine, not {cluster.device.name}: leave it out"
        )
    need_torch("measuring this machine")
    from shardwright.measure.device import measured_cluster

    return measured_cluster(model, job, cluster)


@app.command()
def table(
    models: opt.Models = None,
    gpus: opt.GpuCounts = "8,64,512",
    device_name: opt.TableDevice = "h100-sxm",
    gpus_per_node: opt.GpusPerNode = None,
    seq: opt.TableSeq = 8192,
    tokens_per_step: opt.TokensPerStep = "4194304",
    framework: opt.FrameworkOption = None,
    precision: opt.PrecisionOption = None,
    price: opt.Price = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Recommended layouts by model and number of devices, each found by a search."""
    from shardwright.plan.recommend import MODELS, recommended, sequences_of
    from shardwright.report.table import table_report

    names = MODELS if models is None else [name.strip() for name in models.split(",")]
    counts = [_read("--gpus", parse_count, count) for count in gpus.split(",")]
    hardware = groups.ClusterOptions(None, device_name, gpus_per_node, None, price)
    clusters = [groups.cluster_of_options(hardware._replace(gpus=count)) for count in counts]
    batch = sequences_of(_read("--tokens-per-step", parse_count, tokens_per_step), seq)
    job = groups.job_of_options(seq, batch, groups.JobOptions(precision=precision), framework, clusters[0])
    specs, columns = (
        [model_of(name) for name in names],
        groups.columns_of_options(groups.FixedOptions(), framework),
    )
    assumed = *(spec.assumed for spec in specs), *(cluster.assumed for cluster in clusters)
    document = {
        "device": clusters[0].device.name,
        "device_memory": clusters[0].device.memory,
        "seq": seq,
        "global_batch": batch,
        "tokens_per_step": job.tokens_per_step,
        "precision": job.precision,
        "framework": None if framework is None else framework.value,
        "assumed": sorted({line for lines in assumed for line in lines}),
        "rows": recommended(specs, clusters, job, columns, say),
    }
    print_report(document, as_json, table_report)


@app.command()
def explain(plan_path: opt.PlanArgument, as_json: opt.JsonOption = False) -> None:
    """Show a plan's memory by term, its traffic by axis and link, and its step time."""
    from shardwright.plan.explain import explanation

    print_report(explanation(load_plan(plan_path)), as_json, explain_report)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A plan, as for explain.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="Another of the same model.", metavar="B")],
    as_json: opt.JsonOption = False,
) -> None:
    """Two plans of a model side by side: memory, traffic, time, and what another batch means."""
    from shardwright.plan.comparison import compare_plans
    from shardwright.report.comparison import comparison_report

    print_report(compare_plans(load_plan(a), load_plan(b)), as_json, comparison_report)


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
    print_report(run_goodput(load_plan(plan_path), given), as_json, goodput_report)


def _read(option: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as fault:
        raise JobError(f"{option}: {fault}") from None


def _quantity(option: str, text: str | None, units: Mapping[str, float]) -> float | None:
    return None if text is None else _read(option, lambda given: parse_quantity(given, units), text)


for _command in (check, memory, parity, accuracy, doctor):
    app.command()(_command)
app.add_typer(map_app, name="map")


@app.command()
def tokenize(
    inputs: opt.Inputs,
    output: opt.TokensOutput,
    tokenizer: opt.TokenizerOption = "bytes",
    text_field: opt.TextField = "text",
    separator: opt.Separator = None,
    skip_bad: opt.SkipBad = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Turn text into a token file, which train takes as --data."""
    from shardwright.report.tokens import reading_bar, tokens_report
    from shardwright.run.tokenize import tokenize as write_tokens

    with reading_bar() as advance:
        document = write_tokens(
            inputs,
            output,
            tokenizer=tokenizer,
            separator=separator,
            text_field=text_field,
            skip_bad=skip_bad,
            advance=advance,
        )
    print_report(document, as_json, tokens_report)


@app.command()
@groups.with_groups
def train(
    plan_path: opt.PlanArgument,
    data: opt.DataOption = None,
    nproc: opt.Nproc = None,
    steps: opt.FewerSteps = None,
    run_dir: opt.RunFolder = None,
    *,
    options: train_opt.TrainOptions,
    as_json: opt.JsonOption = False,
) -> None:
    """Train with a plan, under torchrun or with local ranks of its own."""
    loaded = load_plan(plan_path)
    need_torch("train")
    from shardwright.launcher import train_plan

    result = train_plan(
        loaded,
        data=data,
        nproc=nproc,
        steps=steps,
        run_directory=run_dir,
        compile_blocks=options.compile_blocks,
        profile=options.profile,
        options=options.run_options(),
    )
    if result is not None:  # rank 0
        print_report(result, as_json, terminal.train_report)


@app.command()
def loop(
    run_dir: opt.RunFolder = None,
    nproc: Annotated[int, typer.Option(help="Ranks.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Steps to train.", min=2)] = 60,
    as_json: opt.JsonOption = False,
) -> None:
    """Plan a small model for this machine, train it on 2 ranks, check the prediction, and show it all."""
    need_torch("loop")
    from shardwright.launcher import loop_here
    from shardwright.report.loop import loop_report

    document = loop_here(run_dir, nproc, steps, say=say)
    print_report(document, as_json, loop_report)
    if not document["check"]["ok"]:
        raise AnswerIsNo(LEDGER_DIFFERS)
