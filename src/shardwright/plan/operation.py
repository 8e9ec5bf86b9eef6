"""A run of a plan over many tokens: what is given and what assumed of it, how long it takes, its cost."""

from typing import Any, NamedTuple

import numpy as np

from shardwright.errors import AnswerIsNo, JobError
from shardwright.plan.compute import model_flops_per_token
from shardwright.plan.explain import predict
from shardwright.plan.goodput import (
    RunTime,
    best_interval,
    best_interval_steps,
    checkpoint_bytes,
    daly_interval,
    device_time_per_token,
    job_mtbf,
    measured_device_mtbf,
    run_time,
    young_interval,
)
from shardwright.planfile import Plan
from shardwright.units import DAY, HOUR, format_bandwidth, format_bytes, format_span

LLAMA3_DEVICES, LLAMA3_DAYS, LLAMA3_UNEXPECTED = 16_384, 54, 419
LLAMA3_SOURCE = ", Llama-3 405B, arXiv:2407.21783, section 3.3.4"
"""Interruptions of Llama-3 405B on H100; those planned, for maintenance, are no failures."""

LLAMA3_STORAGE_BANDWIDTH = 2e12
"""Sustained by the storage of the same 16,384 devices [B/s]. Source: arXiv:2407.21783, section 3.3.1."""

ASSUMED_RESTART_TIME = 600.0
"""Failure found, diagnosed, job back at its checkpoint [s].

Source: MegaScale, arXiv:2402.15627, section 6.3: found and diagnosed in less than ten minutes on average.
"""

INTERVAL_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
"""Intervals shown beside the best, as multiples of it."""


class Given(NamedTuple):
    """What a user says of a run beside its plan; None is left out, and what is then assumed is said.

    ``failures`` are those of a job of ``devices`` in ``days``.
    """

    tokens: int
    step_time: float | None = None
    device_mtbf: float | None = None
    failures: int | None = None
    days: float | None = None
    devices: int | None = None
    save_time: float | None = None
    storage_bandwidth: float | None = None
    restart_time: float | None = None
    price_per_device_hour: float | None = None


class Quantity(NamedTuple):
    """A number, where it comes from, and whether nobody gave it."""

    value: float
    source: str
    assumed: bool = False


class Operation(NamedTuple):
    """Everything resolved: a run of ``steps`` and what it meets."""

    steps: int
    step_time: Quantity
    device_mtbf: Quantity
    save_time: Quantity
    restart_time: Quantity
    price_per_device_hour: float | None


def check_given(given: Given) -> None:
    """Raises: JobError: naming every option that contradicts another or has no meaning."""
    faults = []
    if given.tokens < 1:
        faults.append(f"--tokens={given.tokens} must be at least 1")
    for option, value, zero_too in (
        ("--step-time", given.step_time, False),
        ("--mtbf-hours", given.device_mtbf, False),
        ("--interruptions", given.failures, False),
        ("--days", given.days, False),
        ("--devices", given.devices, False),
        ("--save-time", given.save_time, True),
        ("--storage-bandwidth", given.storage_bandwidth, False),
        ("--restart-time", given.restart_time, True),
        ("--price", given.price_per_device_hour, False),
    ):
        if value is not None and not (np.isfinite(value) and (value > 0 or (zero_too and value == 0))):
            rule = "at least 0" if zero_too else "above 0"
            faults.append(f"{option} must be finite and {rule}: give another, or leave it out")
    measured = {
        "--interruptions": given.failures,
        "--days": given.days,
        "--devices": given.devices,
    }
    missing = [option for option, value in measured.items() if value is None]
    if 0 < len(missing) < len(measured):
        faults.append(f"{', '.join(missing)} missing: --interruptions, --days and --devices go together")
    if given.device_mtbf is not None and len(missing) < len(measured):
        faults.append("--mtbf-hours and --interruptions say the same: leave one out")
    if given.save_time is not None and given.storage_bandwidth is not None:
        faults.append("--save-time and --storage-bandwidth say the same: leave one out")
    if faults:
        raise JobError("goodput: " + "; ".join(faults))


def operation(plan: Plan, given: Given) -> Operation:
    """A run of ``given.tokens`` with a plan; the last step may go beyond them.

    Raises: JobError: see ``check_given``.
    """
    check_given(given)
    predicted = predict(plan.model, plan.job, plan.cluster, plan.layout).step_time
    return Operation(
        steps=-(-given.tokens // plan.job.tokens_per_step),
        step_time=Quantity(predicted, "predicted by the plan")
        if given.step_time is None
        else Quantity(given.step_time, "given"),
        device_mtbf=_device_mtbf(given),
        save_time=_save_time(plan, given),
        restart_time=Quantity(ASSUMED_RESTART_TIME, "MegaScale, arXiv:2402.15627, section 6.3", True)
        if given.restart_time is None
        else Quantity(given.restart_time, "given"),
        price_per_device_hour=given.price_per_device_hour or plan.cluster.price_per_device_hour or None,
    )


def _device_mtbf(given: Given) -> Quantity:
    if given.device_mtbf is not None:
        return Quantity(given.device_mtbf, "given")
    failures, days, devices, printed = LLAMA3_UNEXPECTED, float(LLAMA3_DAYS), LLAMA3_DEVICES, LLAMA3_SOURCE
    if given.failures is not None and given.days is not None and given.devices is not None:
        failures, days, devices, printed = given.failures, given.days, given.devices, ""
    source = f"{failures:,} interruptions in {days:g} days of {devices:,} devices{printed}"
    mtbf = measured_device_mtbf(failures, days * DAY, devices)
    return Quantity(float(mtbf), source, bool(printed))


def _save_time(plan: Plan, given: Given) -> Quantity:
    if given.save_time is not None:
        return Quantity(given.save_time, "given")
    bandwidth, where = given.storage_bandwidth, ""
    if bandwidth is None:
        bandwidth = LLAMA3_STORAGE_BANDWIDTH * plan.cluster.ranks / LLAMA3_DEVICES
        where = ", each device's share of Llama-3 405B's storage, arXiv:2407.21783, section 3.3.1"
    size = checkpoint_bytes(plan.model, plan.job)
    source = f"{format_bytes(size)} of parameters and optimizer state at {format_bandwidth(bandwidth)}{where}"
    return Quantity(size / bandwidth, source, given.storage_bandwidth is None)


def run_goodput(plan: Plan, given: Given) -> dict[str, Any]:
    """All there is to say about a run of ``given.tokens`` with a plan, as one JSON document.

    Raises: JobError: see ``check_given``. AnswerIsNo: failures come so fast that the run never ends.
    """
    run, devices = operation(plan, given), plan.cluster.ranks
    step, save, restart = run.step_time.value, run.save_time.value, run.restart_time.value
    mtbf = float(job_mtbf(run.device_mtbf.value, devices))
    work = run.steps * step
    every = best_interval_steps(run.steps, step, save, restart, mtbf)
    expected = run_time(work, every * step, save, restart, mtbf)
    if not np.isfinite(expected.total):
        raise AnswerIsNo(
            f"the run never ends: the job fails every {format_span(mtbf)}, a step takes {format_span(step)}, "
            f"a save {format_span(save)}, a restart {format_span(restart)}: use fewer devices or save faster"
        )
    named = {"step_time": run.step_time, "device_mtbf": run.device_mtbf}
    named |= {"save_time": run.save_time, "restart_time": run.restart_time}
    return {
        "model": plan.model.name,
        "layout": plan.layout.label,
        "devices": devices,
        "device": plan.cluster.device.name,
        "tokens": given.tokens,
        "tokens_per_step": plan.job.tokens_per_step,
        "steps": run.steps,
        "flops": model_flops_per_token(plan.model, plan.job.seq) * given.tokens,
        **{name: quantity.value for name, quantity in named.items()},
        "sources": {name: quantity.source for name, quantity in named.items()},
        "assumed": [name for name, quantity in named.items() if quantity.assumed],
        "price_per_device_hour": run.price_per_device_hour,
        "mtbf": mtbf,
        "ideal": _bill(work, devices, run.price_per_device_hour, given.tokens),
        "expected": {
            **_bill(float(expected.total), devices, run.price_per_device_hour, given.tokens),
            **_shares(expected),
            "failures": float(expected.total) / mtbf,
        },
        "checkpoint": {
            "bytes": checkpoint_bytes(plan.model, plan.job),
            "interval_steps": every,
            "interval": every * step,
            "saves": run.steps / every,
            "best": float(best_interval(save, mtbf)),
            "young": float(young_interval(save, mtbf)),
            "daly": float(daly_interval(save, mtbf)),
        },
        "intervals": _intervals(run, every, mtbf),
        "levers": _levers(run, mtbf),
    }


def _bill(time: float, devices: int, price: float | None, tokens: int) -> dict[str, Any]:
    """What a time costs: nothing is said of money if no price is known."""
    device_time = time * devices
    return {
        "time": time,
        "device_time": device_time,
        "device_time_per_token": float(device_time_per_token(device_time, tokens)),
        "cost": None if price is None else device_time / HOUR * price,
    }


def _shares(found: RunTime) -> dict[str, float]:
    parts = {name: float(values) for name, values in found._asdict().items()}
    return parts | {"goodput": float(found.goodput)}


def _intervals(run: Operation, best: int, mtbf: float) -> list[dict[str, Any]]:
    """What other intervals would cost; those of no end are left out."""
    steps = np.unique(np.clip(np.rint(np.array(INTERVAL_FACTORS) * best), 1, run.steps)).astype(np.int64)
    step = run.step_time.value
    found = run_time(run.steps * step, steps * step, run.save_time.value, run.restart_time.value, mtbf)
    return [
        {
            "interval_steps": int(steps[row]),
            "interval": float(steps[row] * step),
            "time": float(found.total[row]),
            **_shares(RunTime(*(values[row] for values in found))),
        }
        for row in np.flatnonzero(np.isfinite(found.total))
    ]


def _levers(run: Operation, mtbf: float) -> list[dict[str, Any]]:
    """Goodput if one thing were twice as good, each with its own best interval."""
    step, save, restart = run.step_time.value, run.save_time.value, run.restart_time.value
    rows = []
    for change, c, r, m in (
        ("save time halved", save / 2, restart, mtbf),
        ("restart time halved", save, restart / 2, mtbf),
        ("failures halved", save, restart, mtbf * 2),
    ):
        every = best_interval_steps(run.steps, step, c, r, m)
        found = run_time(run.steps * step, every * step, c, r, m)
        rows.append({"change": change, "interval_steps": every, "time": float(found.total)} | _shares(found))
    return rows
