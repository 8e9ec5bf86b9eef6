"""A changed global batch: what it does to the number of steps and to the learning rate. Rules of practice."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwright.job import Job
from shardwright.units import significant


class ScalingRule(NamedTuple):
    """How a learning rate follows the batch: as ratio ** ``power``."""

    power: float
    source: str


LINEAR = ScalingRule(1.0, "Goyal et al. 2017, arXiv:1706.02677, with a warm-up; shown for SGD")
SQUARE_ROOT = ScalingRule(0.5, "Malladi et al. 2022, arXiv:2205.10287; shown for Adam and RMSprop")

RULE_OF_OPTIMIZER = {
    "sgd": "linear",
    "sgd_momentum": "linear",
    "adamw": "square_root",
    "adamw_8bit": "square_root",
}
"""The rule that is shown for an optimizer; for the others neither is."""


def batch_change(a: Job, b: Job) -> dict[str, Any] | None:
    """What going from job ``a`` to the batch of ``b`` does to its schedule; None if the batch is the same.

    A batch is counted in tokens. Both rules are given, and which of them is shown for a's optimizer: common
    practice, no promise of the same loss; beyond some batch size neither holds.
    """
    if a.tokens_per_step == b.tokens_per_step:
        return None
    ratio = b.tokens_per_step / a.tokens_per_step
    tokens = a.steps * a.tokens_per_step
    return {
        "global_batch": [a.global_batch, b.global_batch],
        "tokens_per_step": [a.tokens_per_step, b.tokens_per_step],
        "ratio": ratio,
        "tokens": tokens,
        "steps": [a.steps, math.ceil(tokens / b.tokens_per_step)],
        "warmup_steps": [a.warmup_steps, math.ceil(a.warmup_steps / ratio)],
        "learning_rate": a.learning_rate,
        "linear": significant(a.learning_rate * ratio**LINEAR.power),
        "square_root": significant(a.learning_rate * ratio**SQUARE_ROOT.power),
        "planned_learning_rate": b.learning_rate,
        "beta1": _decay(a.beta1, ratio),
        "beta2": _decay(a.beta2, ratio),
        "rule": RULE_OF_OPTIMIZER.get(a.optimizer),
        "sources": {"linear": LINEAR.source, "square_root": SQUARE_ROOT.source},
    }


def batch_sentence(change: Mapping[str, Any]) -> str:
    """The same in words, for one layout whose batch is not the job's."""
    (job, own), (steps, own_steps) = change["global_batch"], change["steps"]
    warmup = change["warmup_steps"]
    rule = change["rule"]
    shown = (
        f"shown for this optimizer: {rule.replace('_', ' ')}"
        if rule
        else "for this optimizer neither is shown"
    )
    return (
        f"its global batch would be {own:,}, not {job:,} (x {change['ratio']:.4g}): the same tokens in "
        f"{own_steps:,} steps, not {steps:,}"
        + (f", of them {warmup[1]:,} of warm-up, not {warmup[0]:,}" if warmup[0] else "")
        + f"; the learning rate {change['learning_rate']:g} becomes {change['linear']:.3g} by the linear "
        f"rule, {change['square_root']:.3g} by the square root ({shown}); neither promises the same loss"
    )


def _decay(beta: float, ratio: float) -> float | None:
    """A moment's decay under the square-root rule: 1 - beta follows the batch. None where no decay is left.

    Source: Malladi et al. 2022, arXiv:2205.10287.
    """
    scaled = 1 - ratio * (1 - beta)
    return significant(scaled) if 0 < scaled < 1 else None
