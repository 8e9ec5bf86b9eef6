"""Whether two plans train the same model on the same tokens, so that their runs may be compared."""

from typing import Any

from shardwright.errors import JobError
from shardwright.job import Job
from shardwright.plan.comparison import check_same_model
from shardwright.planfile import Plan

NO_MATTER = ("steps", "eval_every", "eval_batches", "accounting", "expert_imbalance")
"""Fields of a job that change nothing in a short run, or that the comparison sets itself."""

SAMPLES = ("global_batch", "seq", "seed", "packing", "held_out")
"""Fields that decide which tokens a step trains on; the seed decides the initial weights too."""

LAYOUT_DEPENDENT = "adamw_8bit"
"""Quantises its states in blocks of each rank's own part, which another layout cuts elsewhere."""


def check_same_job(a: Plan, b: Plan, *, own_precision: bool) -> None:
    """Raises: PlanFileError: other models; JobError: other samples or another job, naming each field."""
    check_same_model(a, b)
    ignored = NO_MATTER if own_precision else (*NO_MATTER, "precision")
    left, right = a.job.model_dump(), b.job.model_dump()
    differing = [field for field in left if field not in ignored and left[field] != right[field]]
    if not differing:
        return
    named = ", ".join(f"{field}={left[field]!r} in A and {right[field]!r} in B" for field in differing)
    samples = [field for field in differing if field in SAMPLES]
    why = (
        "step 1 is then of other tokens or other weights, and a difference would prove nothing"
        if samples
        else "their updates are not meant to be the same"
    )
    options = ", ".join(f"--{field.replace('_', '-')}" for field in differing)
    raise JobError(f"plans are not of one job, {named}: {why}; plan both with the same {options}")


def short_job(job: Job, steps: int, precision: str) -> Job:
    """``job`` over a few steps in ``precision`` (``job``: its own), without evaluations."""
    changes: dict[str, Any] = {"steps": steps, "eval_every": 0}
    changes["warmup_steps"] = min(job.warmup_steps, max(steps - 1, 0))
    if precision != "job":
        changes |= {"precision": precision, "accounting": "fsdp2"}
    if job.optimizer == LAYOUT_DEPENDENT:
        changes["optimizer"] = "adamw"
    return Job.checked(job.model_dump() | changes)
