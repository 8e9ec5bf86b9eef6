"""Commands that hold predictions against what is: dry runs, real steps, published runs, and failed ones."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright import cli_options as opt
from shardwright import cli_parity_options as parity_opt
from shardwright import cli_train_options as train_opt
from shardwright.cli_print import need_torch, print_report, say
from shardwright.derive.spec import model_of
from shardwright.errors import AnswerIsNo
from shardwright.planfile import load_plan
from shardwright.report.check import check_report
from shardwright.run.options import COLLECTIVE_TIMEOUT_S

LEDGER_DIFFERS = "the ledger and the program differ: see the rows that are not ok"


def check(
    plan_path: opt.PlanArgument,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference at the peak, as a share of it.  [0.02, with experts 0.04]", min=0, max=1
        ),
    ] = None,
    stage: Annotated[
        list[int] | None,
        typer.Option(help="Pipeline rank to execute, may be repeated.  [one of those that hold the same]"),
    ] = None,
    whole: opt.Whole = False,
    tensors: opt.Tensors = False,
    real: opt.Real = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Execute one rank of each distinct pipeline stage without memory or network.

    Exit status 1 if the ledger says otherwise.
    """
    loaded = load_plan(plan_path)
    need_torch("check")
    from shardwright.check.compare import check_plan

    comparison = check_plan(loaded, tolerance, stage, tensors=tensors, real=real, whole=whole)
    print_report(comparison.document(), as_json, check_report)
    if not comparison.ok:
        raise AnswerIsNo(LEDGER_DIFFERS)


def memory(
    plan_path: opt.PlanArgument,
    stage: opt.StageOption = None,
    rank: opt.RankOption = None,
    output: opt.MemoryOutput = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Show the memory of one step over time: forward, backward, optimizer; by kind, and what the peak is."""
    loaded = load_plan(plan_path)
    need_torch("memory")
    from shardwright.check.memory import memory_document, output_kind, step_histories
    from shardwright.check.snapshot import save_snapshot
    from shardwright.report.memory import memory_report
    from shardwright.report.memory_picture import save_picture

    kind = None if output is None else output_kind(output)
    found = step_histories(loaded, None if stage is None else [stage], rank)
    document = memory_document(loaded, found)
    if output is not None:
        if kind == "picture":
            save_picture(document, output)
        else:
            save_snapshot([each.history for each in found], output)
        say(f"wrote {output}")
    print_report(document, as_json, memory_report)


def parity(
    a: parity_opt.A,
    b: parity_opt.B,
    steps: parity_opt.Steps = 5,
    precision: parity_opt.Precision = parity_opt.PrecisionName.fp64,
    data: opt.DataOption = None,
    shrink: parity_opt.Shrink = False,
    reference: parity_opt.Reference = False,
    device_name: parity_opt.Device = parity_opt.DeviceName.cpu,
    max_ranks: parity_opt.MaxRanks = 16,
    timeout: train_opt.Timeout = COLLECTIVE_TIMEOUT_S,
    picture: parity_opt.Picture = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Train two layouts a few steps, compare every gradient; exit status 1 and the cause if they differ."""
    left, right = load_plan(a), load_plan(b)
    parity_opt.check_picture(picture)
    need_torch("parity")
    from shardwright.check.parity import Wishes, compare_runs
    from shardwright.report.parity import parity_report
    from shardwright.report.parity_picture import write_parity_picture

    wishes = Wishes(
        steps=steps,
        precision=precision.value,
        data=data,
        device_type=device_name.value,
        most_ranks=max_ranks,
        timeout=timeout,
        shrink=shrink,
        reference=reference,
    )
    document = compare_runs(left, right, wishes, say)
    print_report(document, as_json, parity_report)
    if picture is not None:
        write_parity_picture(document, picture)
        say(f"wrote {picture}")
    if not document["ok"]:
        raise AnswerIsNo(f"the layouts do not train the same model: {document['cause']}")


def accuracy(
    runs: Annotated[Path, typer.Argument(help="Published runs, a CSV file of the form of runs.csv.")],
    by: Annotated[
        str,
        typer.Option(help="Groups, comma-separated: gpu, framework, program, source, axis, kind, precision."),
    ] = "gpu,framework,axis",
    models: Annotated[Path | None, typer.Option(help="Sizes of models.  [models.csv beside RUNS]")] = None,
    gpus: Annotated[Path | None, typer.Option(help="Data sheets of GPUs.  [gpus.csv beside RUNS]")] = None,
    a_priori: Annotated[
        bool, typer.Option(help="With nothing fitted, as unknown hardware is planned.")
    ] = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Predict published runs and say how far off, by kinds of runs and within sweeps of one job."""
    from shardwright.check.accuracy import accuracy as accuracy_of
    from shardwright.report.accuracy import accuracy_report

    document = accuracy_of(runs, models, gpus, by.split(","), fitted=not a_priori)
    print_report(document, as_json, accuracy_report)


def doctor(
    files: opt.EvidenceFiles,
    model: opt.DoctorModel = None,
    given: opt.Given = "",
    watch: opt.Watch = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Say from logs, dumps and plans what went wrong, how sure that is, and what to do."""
    from shardwright.doctor.diagnose import diagnose
    from shardwright.doctor.watch import watched
    from shardwright.report.doctor import doctor_report

    spec = None if model is None else model_of(model)
    document = watched(
        lambda: diagnose(files, sys.stdin.buffer, model=spec, given=given),
        files if watch else (),
        watch or 0.0,
    )
    print_report(document, as_json, doctor_report)
    if document["fault"]:
        raise typer.Exit(AnswerIsNo.exit_status)
