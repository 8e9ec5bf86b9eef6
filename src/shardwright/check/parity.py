"""Two layouts of one job, run for a few steps on real ranks: do they train the same model, and if not, why.

Step 1 decides: every gradient, the loss and the norm, from the same weights and tokens. Loss curves alone
prove nothing, for Adam hides a factor in all gradients. Where they differ, one plain process judges which is
wrong.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from shardwright.check.gathered import Gathered, Run
from shardwright.check.same_job import LAYOUT_DEPENDENT, check_same_job, short_job
from shardwright.check.shrink import shrunk_plans
from shardwright.check.two_runs import Comparison
from shardwright.cluster import cluster_of, host_memory
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.explain import predict
from shardwright.plan.params import parameter_table
from shardwright.plan.runnable import check_trainable
from shardwright.planfile import Plan
from shardwright.run.dataset import Batches, build_dataset
from shardwright.run.launch import run_ranks
from shardwright.run.options import COLLECTIVE_TIMEOUT_S
from shardwright.run.probe import probe
from shardwright.units import format_bytes

MOST_RANKS = 16
"""Processes that are started without being asked to."""

STEPS = 5
"""Steps of a short run: with experts in fp64 two right runs then still agree to 1e-10."""

ParityPrecision = Literal["fp64", "fp32", "bf16", "job"]


class Wishes(NamedTuple):
    """How two plans are run. ``precision`` job is the plans' own."""

    steps: int = STEPS
    precision: ParityPrecision = "fp64"
    data: Path | None = None
    device_type: Literal["cpu", "cuda"] = "cpu"
    most_ranks: int = MOST_RANKS
    timeout: float = COLLECTIVE_TIMEOUT_S
    shrink: bool = False  # a small model of the same kind instead of the plans'
    reference: bool = False  # one plain process judges layouts that agree, too


def compare_runs(a: Plan, b: Plan, wishes: Wishes, say: Callable[[str], None]) -> dict[str, Any]:
    """Run both plans and compare them; the JSON document of ``parity``.

    Everything that can be wrong with the input is found before a rank exists. Gradients lie in a temporary
    folder, which is gone when this returns or raises.

    Raises: PlanFileError, JobError: the plans are not of one model and job. LayoutError: not runnable, too
    many ranks, or more memory than there is. DataError, RunFailedError
    """
    check_same_job(a, b, own_precision=wishes.precision == "job")
    changed = _changes(a, wishes)
    if wishes.shrink:
        a, b = shrunk_plans(a, b, own_data=wishes.data is not None)
    job = short_job(a.job, wishes.steps, wishes.precision)
    for name, plan in (("A", a), ("B", b)):
        check_trainable(plan.model, job, plan.cluster, plan.layout)
        check_size(name, plan, job, wishes)
    model, dataset = a.model, build_dataset(wishes.data, a.model.vocab, job)

    def run(name: str, job: Job, layout: Layout, folder: Path) -> Run:
        return short_run(name, model, job, layout, dataset, folder, wishes)

    with tempfile.TemporaryDirectory(prefix="shardwright-parity-") as folder:
        runs = []
        for name, plan in (("A", a), ("B", b)):
            own = Path(folder, name)
            own.mkdir()
            say(
                f"{name}: [{plan.layout.label}] on {plan.layout.ranks} ranks, "
                f"{job.steps} steps in {job.precision}"
            )
            runs.append(run(name, job, plan.layout, own))
        with Gathered(runs[0]) as left, Gathered(runs[1]) as right:
            comparison = Comparison(model, job, dataset, left, right, Path(folder), run, say)
            document = comparison.document(reference=wishes.reference)
    return document | {"changed": changed, "seq": job.seq, "global_batch": job.global_batch}


def _changes(plan: Plan, wishes: Wishes) -> list[str]:
    """What the runs have otherwise than the plans, for people."""
    job, found = plan.job, []
    if wishes.precision not in ("job", job.precision):
        found.append(f"in {wishes.precision} instead of the plans' {job.precision}")
    if wishes.shrink:
        found.append(f"a small model of the kind of {plan.model.name}, and short sequences")
    if job.optimizer == LAYOUT_DEPENDENT:
        found.append(f"with adamw: {LAYOUT_DEPENDENT} quantises in blocks that depend on the layout")
    return found


def check_size(name: str, plan: Plan, job: Job, wishes: Wishes) -> None:
    """Refuse what this machine cannot run.

    Raises: LayoutError: more ranks than wished, than GPUs, or more memory than the host has; the way out.
    """
    ranks = plan.layout.ranks
    if ranks > wishes.most_ranks:
        raise LayoutError(
            f"plan {name} [{plan.layout.label}] needs {ranks} ranks here, more than {wishes.most_ranks}: "
            f"allow them with --max-ranks {ranks}, or plan the same axes at degree 2"
        )
    if wishes.device_type == "cuda":
        here = torch.cuda.device_count()
        if here < ranks:
            raise LayoutError(f"plan {name} needs {ranks} GPUs, this machine has {here}: use --device cpu")
        return
    needed = predict(plan.model, job, cluster_of("cpu", ranks), plan.layout).memory.allocated * ranks
    if needed > host_memory():
        parameters = parameter_table(plan.model).parameters
        raise LayoutError(
            f"plan {name}: {parameters:,} parameters on {ranks} ranks hold {format_bytes(needed)} in "
            f"{job.precision}, this machine has {format_bytes(host_memory())}: compare the same layouts of a "
            "small model of this kind with --shrink"
        )


def short_run(
    name: str, model: ModelSpec, job: Job, layout: Layout, dataset: Batches, folder: Path, wishes: Wishes
) -> Run:
    """A few steps of a layout on local ranks, which leave their gradients in ``folder``."""
    found = run_ranks(
        probe,
        layout.ranks,
        *(model, job, layout, dataset, folder, wishes.device_type, name),
        device_type=wishes.device_type,
        timeout_s=wishes.timeout,
    )
    return Run(layout, found, folder)
