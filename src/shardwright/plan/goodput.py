"""Goodput: how long a run really takes, with failures and the saves that guard against them.

Failures come at a constant rate, each stops the whole job, and also a restart may fail (Daly 2006). The four
parts of ``RunTime`` add up to the expected wall-clock time exactly; nothing is a first-order estimate.
Symbols: W work without failures, T interval of work between saves, C save, R restart, M mean time between
failures of the job, all in seconds.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.accounting import accounting_row, optimizer_elements
from shardwright.plan.params import parameter_table
from shardwright.plan.table import Floats

FLOPS_PER_PARAMETER = 6
"""Of a token, forward and backward. Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1."""

FLOPS_PER_PARAMETER_RECOMPUTED = 8
"""The same with the forward pass done twice. Source: Narayanan et al. 2021, arXiv:2104.04473, section 5.1."""


class RunTime(NamedTuple):
    """Expected wall-clock time of a run by what it is spent on [s]."""

    work: Floats  # steps that count
    checkpoints: Floats  # saves that count
    rework: Floats  # steps and saves lost to a failure
    restarts: Floats  # failed restarts included

    @property
    def total(self) -> Floats:
        """The whole run; infinite on overflow."""
        with np.errstate(over="ignore"):
            return np.asarray(self.work + self.checkpoints + self.rework + self.restarts)

    @property
    def goodput(self) -> Floats:
        """Share of the time that is work that counts."""
        return np.asarray(self.work / self.total)


# Ideal time


def training_flops(parameters: ArrayLike, tokens: ArrayLike) -> Floats:
    """FLOPs of a dense model's training, 6 N D, attention left out.

    Source: Kaplan et al. 2020, arXiv:2001.08361; Llama-3 405B, arXiv:2407.21783, section 3.2.1: 3.8e25.
    """
    return np.asarray(FLOPS_PER_PARAMETER * np.multiply(parameters, tokens, dtype=np.float64))


def recomputed_training_time(
    parameters: ArrayLike, tokens: ArrayLike, devices: ArrayLike, flops_per_s: ArrayLike
) -> Floats:
    """Training time with full recomputation, 8 T P / (n X) [s].

    Args: ``flops_per_s``: achieved by one device, recomputation counted.
    Source: Narayanan et al. 2021, arXiv:2104.04473, section 5.1.
    """
    flops = FLOPS_PER_PARAMETER_RECOMPUTED * np.multiply(parameters, tokens, dtype=np.float64)
    return np.asarray(flops / np.multiply(devices, flops_per_s, dtype=np.float64))


def device_time_per_token(device_time: ArrayLike, tokens: ArrayLike) -> Floats:
    """Devices' time that a token takes [s]; 1 s a token is 2.8e8 device-hours per 1e12 tokens."""
    return np.asarray(np.divide(device_time, tokens, dtype=np.float64))


# Failures


def measured_device_mtbf(interruptions: ArrayLike, time: ArrayLike, devices: ArrayLike) -> Floats:
    """Mean time between failures of one device [s]: ``interruptions`` of a job of ``devices`` in ``time``."""
    return np.asarray(np.multiply(time, devices, dtype=np.float64) / interruptions)


def job_mtbf(device_mtbf: ArrayLike, devices: ArrayLike) -> Floats:
    """Mean time between failures of a job that any of its devices stops [s]. Assumes they fail alone."""
    return np.asarray(np.divide(device_mtbf, devices, dtype=np.float64))


def young_interval(save: ArrayLike, mtbf: ArrayLike) -> Floats:
    """First-order interval of work between saves, sqrt(2 C M) [s].

    Source: Young 1974, doi:10.1145/361147.361115.
    """
    return np.asarray(np.sqrt(2 * np.multiply(save, mtbf, dtype=np.float64)))


def daly_interval(save: ArrayLike, mtbf: ArrayLike) -> Floats:
    """Higher-order interval of work between saves [s]; M where a save takes 2 M and more.

    sqrt(2 C M) (1 + x/3 + x^2/9) - C with x = sqrt(C / (2 M)).

    Source: Daly 2006, doi:10.1016/j.future.2004.11.016.
    """
    c, m = np.asarray(save, dtype=np.float64), np.asarray(mtbf, dtype=np.float64)
    x = np.sqrt(c / (2 * m))
    return np.where(c < 2 * m, young_interval(c, m) * (1 + x / 3 + x**2 / 9) - c, m)


def best_interval(save: ArrayLike, mtbf: ArrayLike) -> Floats:
    """Interval at which ``run_time`` is least [s]: what Young and Daly estimate, whatever the restart takes.

    Root of 1 - T/M = exp(-(T + C)/M), by Newton's method from above, where it never overshoots.
    """
    c = np.divide(save, mtbf, dtype=np.float64)
    x = np.ones_like(c)
    for _ in range(100):
        slope = np.expm1(-(x + c))  # below 0
        x = np.where(slope < 0, x - (-slope - x) / np.where(slope < 0, slope, 1.0), 0.0)
    return np.asarray(np.maximum(x, 0.0) * mtbf)


def run_time(
    work: ArrayLike, interval: ArrayLike, save: ArrayLike, restart: ArrayLike, mtbf: ArrayLike
) -> RunTime:
    """Expected time of a run that saves after every ``interval`` of work; infinite on overflow. Broadcasts.

    Their sum is M exp(R/M) (exp((T + C)/M) - 1) W/T. Assumes W/T saves, the last one at the end; the job
    stands still while it saves (give the standstill of an asynchronous save, not its length).

    Source: Daly 2006, doi:10.1016/j.future.2004.11.016; its parts from the exponential law.
    """
    given = (np.asarray(a, dtype=np.float64) for a in (work, interval, save, restart, mtbf))
    w, t, c, r, m = np.broadcast_arrays(*given)
    saves = w / t
    with np.errstate(over="ignore", invalid="ignore"):
        failures = np.expm1((t + c) / m)  # of one interval, before it succeeds
        restarts = np.where(np.isinf(failures), np.inf, failures * m * np.expm1(r / m))
        return RunTime(
            work=w,
            checkpoints=saves * c,
            rework=np.where(w > 0, saves * m * _expm1_minus((t + c) / m), 0.0),
            restarts=np.where((r > 0) & (w > 0), saves * restarts, 0.0),
        )


def _expm1_minus(x: Floats) -> Floats:
    """exp(x) - 1 - x without cancellation."""
    series = x**2 / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5)))
    return np.where(x < 1e-3, series, np.expm1(x) - x)


def best_interval_steps(steps: int, step_time: float, save: float, restart: float, mtbf: float) -> int:
    """Whole steps between saves at which ``run_time`` is least, at most ``steps``."""
    wished = float(best_interval(save, mtbf)) / step_time
    low = int(min(max(np.floor(wished), 1), steps))
    around = np.array([low, min(low + 1, steps)])
    total = run_time(steps * step_time, around * step_time, save, restart, mtbf).total
    return int(around[np.argmin(total)])


def checkpoint_bytes(model: ModelSpec, job: Job) -> int:
    """Size of a checkpoint [B]: parameters with their master copies and the optimizer's state, once each."""
    row = accounting_row(job.accounting, job.precision)
    total = 0.0
    for unit in parameter_table(model).units:
        for tensor in unit.tensors:
            moments = row.moment * optimizer_elements(job.optimizer, tensor, row.moment)
            total += unit.copies * (tensor.numel * (row.weight + row.master) + moments)
    return round(total)
