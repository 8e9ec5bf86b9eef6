"""A plan put to work: data, ranks and run folder around run/train.py; and the whole loop on this machine."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardwright.check.compare import check_plan
from shardwright.cluster import cluster_of
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import check_runnable
from shardwright.measure.device import measured_cluster
from shardwright.model import preset
from shardwright.plan.compute import model_flops_per_token
from shardwright.plan.explain import explanation, plan_of, predict
from shardwright.plan.finding import find
from shardwright.planfile import Plan, load_plan, save_plan
from shardwright.run.dataset import TokenDataset, build_dataset
from shardwright.run.launch import check_world, run_ranks, torchrun_rank, under_torchrun
from shardwright.run.meter import MemoryMeter
from shardwright.run.train import prepare_run_folder, train
from shardwright.units import format_bytes, format_time

LOOP_MODEL = "bytes-5m"
"""Preset that the loop trains: small enough for two cores, large enough for its loss to fall."""

LOOP_JOB = {"seq": 256, "global_batch": 8, "learning_rate": 2e-3, "warmup_steps": 5, "eval_every": 20}


def train_plan(
    plan: Plan,
    *,
    data: Path | None = None,
    nproc: int | None = None,
    steps: int | None = None,
    run_directory: Path | None = None,
    tensorboard: bool = False,
) -> dict[str, Any] | None:
    """Train with ``plan``; what result.json holds, or None on a rank of torchrun that is not the first.

    Everything that can be wrong with the input is found before a process group or a run folder exists.

    Raises: LayoutError, DataError, PlanFileError, RunFailedError
    """
    if steps is not None:
        job = Job.checked(plan.job.model_dump() | {"steps": steps, "warmup_steps": min(plan.job.warmup_steps, steps - 1)})
        plan = plan_of(plan.model, job, plan.cluster, plan.layout)
    check_runnable(plan.model, plan.job)
    torchrun = under_torchrun()
    if not torchrun:
        check_world(plan.layout.ranks, nproc or plan.layout.ranks, option="--nproc")
    device_type = _device_type(plan, plan.layout.ranks)
    dataset = build_dataset(data, plan.model.vocab, plan.job)
    folder = run_directory or default_run_folder(plan.model.name)
    arguments = (plan, dataset, folder, device_type, tensorboard)
    if torchrun:
        result: dict[str, Any] | None = torchrun_rank(
            _train_rank, plan.layout.ranks, *arguments, device_type=device_type
        )
        return result
    prepare_run_folder(folder)
    save_plan(plan, folder / "plan.toml")
    results = run_ranks(_train_rank, plan.layout.ranks, *arguments, device_type=device_type)
    first: dict[str, Any] = results[0]
    return first


def default_run_folder(name: str) -> Path:
    """``runs/<name>-<time>``."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def loop_here(
    run_directory: Path | None, nproc: int, steps: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Plan a small model for this machine, train it, check the plan, and return all three."""
    model = preset(LOOP_MODEL)
    folder = run_directory or default_run_folder("loop")
    prepare_run_folder(folder)
    job = Job.checked({**LOOP_JOB, "steps": steps, "warmup_steps": min(5, steps - 1), "precision": "fp32"})
    say(f"measuring this machine with {nproc} ranks ...")
    cluster = measured_cluster(model, job, cluster_of("cpu", nproc))
    found = find(model, job, cluster, {})
    path = folder / "plan.toml"
    save_plan(found.best, path)
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
            f"plan is for {plan.layout.ranks} x {plan.cluster.device.name}, this machine has {here} GPUs: start it "
            f"there with torchrun, or plan for this machine with --device cpu"
        )
    return "cuda"


def _train_rank(
    plan: Plan, dataset: TokenDataset, folder: Path, device_type: str, tensorboard: bool
) -> dict[str, Any] | None:
    """One rank of a run."""
    prediction = predict(plan.model, plan.job, plan.cluster, plan.layout)
    return train(
        plan.model,
        plan.job,
        plan.layout,
        dataset,
        folder,
        predicted_step_time=prediction.step_time,
        predicted_memory=prediction.memory.allocated,
        device_type=device_type,
        step_flops=model_flops_per_token(plan.model, plan.job.seq) * plan.job.tokens_per_step,
        peak_flops_per_s=plan.cluster.device.peak(plan.job.precision),
        meter_factory=None if device_type == "cuda" else MemoryMeter,
        tensorboard=tensorboard,
    )
