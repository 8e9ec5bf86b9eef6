"""What two runs of step 1 show, as plain numbers: the input of check/cause.py."""

from collections.abc import Mapping
from typing import NamedTuple


class Tolerance(NamedTuple):
    """Largest relative differences that count as equal: of gradients, loss and gradient norm in step 1, and
    of loss and norm in later steps, where rounding has grown."""

    gradient: float
    loss: float
    norm: float
    later_loss: float
    later_norm: float


TOLERANCES: Mapping[tuple[str, bool], Tolerance] = {
    ("fp64", False): Tolerance(1e-9, 1e-9, 1e-8, 1e-9, 1e-7),
    ("fp64", True): Tolerance(1e-9, 1e-9, 1e-8, 1e-6, 1e-3),
    ("fp32", False): Tolerance(1e-4, 1e-5, 1e-4, 1e-4, 1e-2),
    ("fp32", True): Tolerance(1e-3, 1e-5, 1e-3, 1e-2, 3e-1),
    ("bf16", False): Tolerance(1e-1, 1e-3, 1e-2, 1e-2, 2e-1),
    ("bf16", True): Tolerance(4e-1, 1e-3, 1e-2, 2e-2, 5e-1),
}
"""By precision, and whether the model routes tokens to experts: a choice that rounding flips is a jump.
Right layouts of small models were seen at 1e-13 (fp64), 2e-6 (fp32, experts 2e-5) and 1.5e-2 (bf16, with
experts 2e-1) in gradients of step 1; in norms of step 1 at 6e-4 (bf16); and after 20 steps at a learning rate
of 1e-2 at 5e-15 and 5e-13 in loss and norm (fp64, with experts 5e-8 and 1e-4)."""

MATCHES: Mapping[str, float] = {"fp64": 1e-6, "fp32": 1e-3, "bf16": 3e-2}
"""How near a factor must be to a degree to be taken for it; it is an average over many entries."""


def match_of(precision: str) -> float:
    """How near two numbers are that count as one where a cause is looked for."""
    return MATCHES["bf16" if precision == "fp8" else precision]


def tolerance_of(precision: str, *, experts: bool) -> Tolerance:
    """What counts as equal in a precision; fp8 as bf16, in which it reduces."""
    return TOLERANCES[("bf16" if precision == "fp8" else precision, experts)]


class ParameterEvidence(NamedTuple):
    """One parameter's gradient in the found run beside the expected one.

    ``difference``: largest, relative to the largest entry. ``ratio``: factor on the expected gradient that
    comes nearest, and ``residual``: what it leaves, relative to the found one; None where one is zero.
    ``axes``: that split the parameter in the found run; ``stage``: there.
    """

    name: str
    role: str
    layer: int | None
    stage: int
    axes: tuple[str, ...]
    difference: float
    ratio: float | None = None
    residual: float | None = None
    missing: bool = False  # it has no gradient on some rank of the found run
    other_start: bool = False  # its initial weights differ


class Apart(NamedTuple):
    """A parameter of which ranks that should hold the same gradient do not."""

    name: str
    difference: float
    axes: tuple[str, ...]  # that separate these ranks


class RunEvidence(NamedTuple):
    """One run by itself. ``degrees`` of axes, with dp, microbatches, and stages.

    ``tokens``: of the batch that count; ``divisor``: what step 1 took for them; ``digest``: of all tokens.
    ``true_norm``: of the whole gradients of step 1; ``stage_norms``: of each stage's; ``rank_norm``: of what
    rank 0 holds; ``tied_norm``: of a tied matrix that two stages have. 0 where it is not known.
    ``ranks_differ``: largest relative difference of loss, and of norm, between ranks.
    """

    degrees: Mapping[str, int]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    tokens: int = 0
    divisor: int = 0
    digest: int = 0
    positions: int = 0  # tokens of the batch, masked ones included
    true_norm: float = 0.0
    stage_norms: tuple[float, ...] = ()
    rank_norm: float = 0.0
    tied_norm: float = 0.0
    apart: tuple[Apart, ...] = ()
    ranks_differ: tuple[float, float] = (0.0, 0.0)


class SequenceWeights(NamedTuple):
    """By how much each sequence of the batch counts in the found gradients; 1 where it is right.

    ``tokens``: of each that count; ``rank`` and ``microbatch``: that have it.
    """

    weights: tuple[float, ...]
    tokens: tuple[int, ...]
    rank: tuple[int, ...]
    microbatch: tuple[int, ...]


class Evidence(NamedTuple):
    """A run that is suspected beside one that is trusted. ``match``: relative difference within which a
    number is taken for another."""

    found: RunEvidence
    expected: RunEvidence
    parameters: tuple[ParameterEvidence, ...]
    tolerance: Tolerance
    match: float = 1e-6
    sequences: SequenceWeights | None = None
    precision: str = "fp64"
    experts: bool = False

    @property
    def off(self) -> tuple[ParameterEvidence, ...]:
        """Parameters whose gradients differ."""
        return tuple(p for p in self.parameters if p.missing or not p.difference <= self.tolerance.gradient)


def relative(found: float, expected: float) -> float:
    """Difference over the larger one; infinite where one is no number."""
    scale = max(abs(found), abs(expected))
    if scale == 0:
        return 0.0
    difference = abs(found - expected) / scale
    return difference if difference == difference else float("inf")
