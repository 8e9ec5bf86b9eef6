"""Which degree a factor is a power of: gradients divided by dp, experts times ep, a norm times sqrt(n)."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shardwright.check.evidence import Evidence, RunEvidence, relative

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")

PRODUCTS = (
    ("dp_replicate", "dp_shard"),
    ("dp_shard", "cp"),
    ("dp_replicate", "dp_shard", "cp"),
    ("dp_replicate", "dp_shard", "microbatches"),
)
"""Groups that a program may mistake for another: data ranks, FSDP's shards, token ranks, all microbatches."""

POWERS = {1.0: "times {}", -1.0: "divided by {}"}
GRADIENT_POWERS = {**POWERS, 2.0: "times {} squared", -2.0: "divided by {} squared"}
NORM_POWERS = {**POWERS, 0.5: "times the root of {}", -0.5: "divided by the root of {}"}


class Factor(NamedTuple):
    """A factor that is a power of how much a degree differs between two runs."""

    name: str  # of the degree, of joined ones "dp_replicate+dp_shard"; tokens, or positions
    value: float  # degree of the found run over that of the expected one
    power: float
    text: str


def degrees_of(run: RunEvidence) -> Iterator[tuple[str, int]]:
    """Degrees of a run that a factor may come from."""
    for name in (*AXES, "microbatches"):
        yield name, run.degrees.get(name, 1)
    for names in PRODUCTS:
        product = 1
        for name in names:
            product *= run.degrees.get(name, 1)
        yield "+".join(names), product


def factors(ratio: float, evidence: Evidence, powers: Mapping[float, str] = GRADIENT_POWERS) -> list[Factor]:
    """Degrees of which ``ratio`` is a power, simplest first; of a product only if no part of it will do.

    Only degrees that differ between the runs can make a factor between them.
    """
    expected = dict(degrees_of(evidence.expected))
    found: list[Factor] = []
    for name, degree in degrees_of(evidence.found):
        value = degree / expected[name]
        parts = name.split("+")
        wide = [part for part in parts if evidence.found.degrees.get(part, 1) != expected[part]]
        if value == 1 or (len(parts) > 1 and len(wide) < len(parts)):
            continue  # a product of which one part is the same is the other part
        found += _powers_of(name, value, ratio, powers, evidence.match)
    simplest = min((abs(abs(factor.power) - 1) for factor in found), default=0.0)
    found = [factor for factor in found if abs(abs(factor.power) - 1) == simplest]
    return found or list(_token_factors(ratio, evidence))


def _powers_of(
    name: str, value: float, ratio: float, powers: Mapping[float, str], match: float
) -> Iterator[Factor]:
    for power, words in powers.items():
        if ratio > 0 and relative(value**power, ratio) <= match:
            inverse = value < 1
            base = 1 / value if inverse else value
            swapped = words if not inverse else powers[-power]
            yield Factor(name, value, power, swapped.format(f"{_words(name)} ({base:g})"))


def _token_factors(ratio: float, evidence: Evidence) -> Iterator[Factor]:
    """The loss is a sum that is not divided by its tokens, wholly or but for a mean over ranks."""
    run = evidence.found
    ranks = {"": 1, " over dp": _data_ranks(run), " over microbatches": run.degrees.get("microbatches", 1)}
    for words, count in ranks.items():
        if run.tokens > 1 and relative(ratio, run.tokens / count) <= evidence.match:
            yield Factor("tokens", run.tokens / count, 1.0, f"times the step's {run.tokens} tokens{words}")
            return
    share = run.tokens / run.positions if run.positions else 1.0
    if share not in (0.0, 1.0) and relative(ratio, share) <= evidence.match:
        text = f"divided by all {run.positions} positions, not by the {run.tokens} tokens that count"
        yield Factor("positions", share, 1.0, text)


def _data_ranks(run: RunEvidence) -> int:
    return run.degrees.get("dp_replicate", 1) * run.degrees.get("dp_shard", 1)


def _words(name: str) -> str:
    return name.replace("+", " x ")
