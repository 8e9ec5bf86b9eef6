"""A plan put to work: data, ranks and run folder around run/train.py; and the whole loop on this machine."""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardwright.check.compare import check_plan
from shardwright.cluster import cluster_of
from shardwright.errors import LayoutError, MissingExtraError, PlanFileError
from shardwright.job import Job
from shardwright.measure.device import measured_cluster
from shardwright.model import preset
from shardwright.plan.compute import model_flops_per_token
from shardwright.plan.explain import accounts, explanation, plan_of
from shardwright.plan.finding import find
from shardwright.plan.runnable import check_trainable
from shardwright.planfile import PLAN_FILE, Plan, load_plan, save_plan
from shardwright.run.checkpoint import About, check_same_run, newest, read_about
from shardwright.run.compile import BACKEND, check_compile
from shardwright.run.dataset import TokenDataset, build_dataset
from shardwright.run.launch import check_world, local_share, run_ranks, torchrun_rank, under_torchrun
from shardwright.run.meter import MemoryMeter
from shardwright.run.options import RunOptions
from shardwright.run.profile import parse_steps
from shardwright.run.ranks import Predicted
from shardwright.run.record import check_unused, prepare_run_folder
from shardwright.run.train import train
from shardwright.units import format_bytes, format_time

LOOP_MODEL = "bytes-5m"
"""Preset that the loop trains: small enough for two cores, large enough for its loss to fall."""

LOOP_JOB = {"seq": 256, "learning_rate": 2e-3, "warmup_steps": 5, "eval_every": 20, "precision": "fp32"}

LOOP_SEQUENCES = 8
"""Global batch of the loop, made up to a multiple of its ranks."""


def train_plan(
    plan: Plan,
    *,
    data: Path | None = None,
    nproc: int | None = None,
    steps: int | None = None,
    run_directory: Path | None = None,
    compile_blocks: bool = False,
    profile: str | None = None,
    options: RunOptions = RunOptions(),  # noqa: B008  (a tuple of plain values)
) -> dict[str, Any] | None:
    """Train with ``plan``; what result.json holds, or None on a rank of torchrun that is not the first.

    Everything that can be wrong with the input is found before a process group or a run folder exists. The
    prediction is made afresh: the file's may be of an older version, or of a layout edited since.
    ``profile``: steps to trace, ``A..B``.

    Raises: LayoutError, DataError, JobError, PlanFileError, MissingExtraError, RunFailedError
    """
    folder = run_directory or default_run_folder(plan.model.name)
    kept = _kept_run(folder, run_directory is not None) if options.resume else None
    job = _job_of(plan, steps, kept)
    plan = plan_of(plan.model, job, plan.cluster, plan.layout)
    check_trainable(plan.model, plan.job, plan.cluster, plan.layout)
    if compile_blocks:
        check_compile(plan.layout)
    torchrun = under_torchrun()
    if not torchrun:
        check_world(plan.layout.ranks, plan.layout.ranks if nproc is None else nproc, option="--nproc")
    device_type = _device_type(plan, plan.layout.ranks)
    dataset = build_dataset(data, plan.model.vocab, plan.job, local_share())
    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError("train", "--tensorboard")
    if profile is not None:
        first_step = 1 if kept is None else kept.step + 1
        options = options._replace(profile=parse_steps(profile, first_step, plan.job.steps))
    if kept is None:
        _check_free(folder, plan)
    else:
        check_same_run(kept, plan.model, plan.job, plan.layout, dataset.digest())
    run = torchrun_rank if torchrun else run_ranks
    if not torchrun and kept is None:
        prepare_run_folder(folder)
    dumps = None if torchrun and run_directory is None else folder  # else its name has the rank's own time
    found = run(
        _train_rank,
        plan.layout.ranks,
        *(plan, dataset, folder, device_type, BACKEND if compile_blocks else None, options),
        device_type=device_type,
        timeout_s=options.timeout,
        dump_folder=dumps,
    )
    result: dict[str, Any] | None = found if torchrun else found[0]
    return result


def _kept_run(folder: Path, named: bool) -> About:
    """The run in ``folder``, as its newest checkpoint tells.

    Raises: PlanFileError: no folder was named, or it has no checkpoint.
    """
    if not named:
        raise PlanFileError("--resume does not say which run: give its folder with --run-dir")
    return read_about(newest(folder))


def _job_of(plan: Plan, steps: int | None, kept: About | None) -> Job:
    """The plan's job over ``steps``; where a run goes on, with the warm-up that it began with."""
    if kept is not None and _shortened(plan.job, kept.job.steps) == kept.job:
        return Job.checked(kept.job.model_dump() | {"steps": steps or plan.job.steps})
    return plan.job if steps is None else _shortened(plan.job, steps)


def _shortened(job: Job, steps: int) -> Job:
    """``job`` over so many steps, its warm-up within them."""
    return Job.checked(
        job.model_dump() | {"steps": steps, "warmup_steps": min(job.warmup_steps, max(steps - 1, 0))}
    )


def _check_free(folder: Path, plan: Plan) -> None:
    """Raises: PlanFileError: ``folder`` holds a run, or another plan than ``plan``, which the run would
    overwrite."""
    check_unused(folder)
    if not (folder / PLAN_FILE).exists():
        return
    other = load_plan(folder)
    if other.model_copy(update={"prediction": plan.prediction, "written_by": plan.written_by}) != plan:
        raise PlanFileError(f"run folder {folder} holds a plan.toml of another job: give another --run-dir")


def default_run_folder(name: str) -> Path:
    """``runs/<name>-<time>``."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def loop_here(
    run_directory: Path | None, nproc: int, steps: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Plan a small model for this machine, train it, check the plan, and return all three."""
    model = preset(LOOP_MODEL)
    folder = run_directory or default_run_folder("loop")
    batch = -(-LOOP_SEQUENCES // nproc) * nproc
    job = _shortened(Job.checked({**LOOP_JOB, "global_batch": batch}), steps)
    prepare_run_folder(folder)
    say(f"measuring this machine with {nproc} ranks ...")
    cluster = measured_cluster(model, job, cluster_of("cpu", nproc))
    found = find(model, job, cluster, {}, ranking="runnable_only")
    path = save_plan(found.best, folder / PLAN_FILE)
    plan = load_plan(path)
    prediction = plan.prediction
    say(
        f"planned [{plan.layout.label}]: {format_time(prediction.step_time)} a step, "
        f"{format_bytes(prediction.memory.total)} a rank; {path}"
    )
    say(f"training {steps} steps on {nproc} ranks ...")
    result = train_plan(plan, run_directory=folder)
    say("checking the ledger against an execution of one rank ...")
    comparison = check_plan(plan)
    return {
        "plan": found.document,
        "explain": explanation(plan),
        "train": result,
        "check": comparison.document(),
        "plan_file": str(path),
    }


def _device_type(plan: Plan, local_ranks: int) -> str:
    """``cuda`` or ``cpu``, as the plan's device is.

    Raises: LayoutError: the plan is for GPUs and this machine has too few.
    """
    if plan.cluster.device.kind == "cpu":
        return "cpu"
    here = torch.cuda.device_count()
    if here == 0 or (not under_torchrun() and here < local_ranks):
        raise LayoutError(
            f"plan is for {plan.layout.ranks} x {plan.cluster.device.name}, this machine has {here} GPUs: "
            "start it there with torchrun, or plan for this machine with --device cpu"
        )
    return "cuda"


def _train_rank(
    plan: Plan,
    dataset: TokenDataset,
    folder: Path,
    device_type: str,
    compile_backend: str | None,
    options: RunOptions,
) -> dict[str, Any] | None:
    """One rank of a run."""
    prediction = plan.prediction
    result: dict[str, Any] | None = train(
        plan.model,
        plan.job,
        plan.layout,
        dataset,
        folder,
        predicted_step_time=prediction.step_time,
        predicted_memory=prediction.memory.allocated,
        predicted_state=[
            Predicted(stage["at_rest"]["parameters"], stage["at_rest"]["optimizer"], stage["allocated"])
            for stage in accounts(plan)["stages"]
        ],
        device_type=device_type,
        step_flops=model_flops_per_token(plan.model, plan.job.seq) * plan.job.tokens_per_step,
        peak_flops_per_s=plan.cluster.device.peak(plan.job.precision),
        meter_factory=None if device_type == "cuda" else MemoryMeter,
        plan_text=plan.to_toml(),
        compile_backend=compile_backend,
        options=options,
    )
    return result
