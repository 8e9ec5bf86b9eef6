"""Factors by which numbers of two runs may differ, from what their settings say: each names one error."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from shardwright.doctor.batch_checks import microbatches_of
from shardwright.doctor.series import Series
from shardwright.doctor.setting import Setting


class Factor(NamedTuple):
    """A value, what it is, and the cause it stands for. ``differs``: it is one in one run and not in the
    other, or the ratio of two values that differ. ``rank``: the lower, the more readily believed."""

    value: float
    text: str
    cause: str
    differs: bool
    rank: int
    norms_only: bool = False
    owner: int | None = None  # 0 or 1 if one run alone has it


BOTH = 40
"""By how much less a factor is believed that both runs have, in different sizes: one fault would scale both,
by the ratio of the sizes."""

CAUSES = {
    "dp_replicate": "scaled_by_replicas",
    "ep": "scaled_by_experts",
    "cp": "scaled_by_context",
    "tp": "scaled_by_tensor",
    "pp": "scaled_by_stages",
    "data_ranks": "scaled_by_ranks",  # last: with a fixed world they follow from the others
}


def factors_of(one: Series, other: Series) -> list[Factor]:
    """All factors of two runs, those in which the runs differ first."""
    found = list(_degrees(one.setting, other.setting))
    found += _microbatches(one.setting, other.setting)
    found += _tokens(one, other)
    return sorted((f for f in found if f.value > 1), key=lambda f: (not f.differs, f.rank))


def _pair(one: Setting | None, other: Setting | None, name: str) -> tuple[int | None, int | None]:
    return (getattr(one, name) if one else None), (getattr(other, name) if other else None)


def _degrees(one: Setting | None, other: Setting | None) -> Iterator[Factor]:
    for rank, (name, cause) in enumerate(CAUSES.items()):
        a, b = _pair(one, other, name)
        words = name.replace("data_ranks", "data-parallel ranks")
        less = BOTH if a and b and min(a, b) > 1 else 0
        for value in {v for v in (a, b) if v and v > 1}:
            differs = a != b
            owner = None if not differs else int(value == b)
            yield Factor(float(value), words, cause, differs, less + rank if differs else 20 + rank)
            yield Factor(
                math.sqrt(value),
                f"sqrt({words} {value})",
                "norm_reduced_again",
                differs,
                less + 10 + rank if differs else 30 + rank,
                True,
                owner,
            )
        if a and b and a != b:
            yield Factor(max(a, b) / min(a, b), f"the ratio of {words}, {a} to {b}", cause, True, rank)
    for name in ("sharding", "world"):
        a, b = _pair(one, other, name)
        less = BOTH if a and b and min(a, b) > 1 and a != b else 0
        for value in {v for v in (a, b) if v and v > 1}:
            yield Factor(
                math.sqrt(value),
                f"sqrt({name} {value})",
                "partial_norm" if name == "sharding" else "norm_reduced_again",
                a != b,
                less + 15,
                True,
                None if a == b else int(value == b),
            )
            yield Factor(float(value), f"{name} {value}", "scaled_by_ranks", a != b, less + 12)


def _microbatches(one: Setting | None, other: Setting | None) -> Iterator[Factor]:
    a = microbatches_of(one) if one else None
    b = microbatches_of(other) if other else None
    if a and b and a != b:
        yield Factor(
            max(a, b) / min(a, b), f"the ratio of microbatches, {a} to {b}", "scaled_by_microbatches", True, 0
        )
    stages = max(((s.pp or 1) for s in (one, other) if s), default=1)
    for value in {v for v in (a, b) if v and v > 1}:
        yield Factor(
            float(value), f"microbatches {value}", "scaled_by_microbatches", a != b, 3 if a != b else 25
        )
        for power in range(2, min(stages, 6) + 1):
            yield Factor(
                float(value) ** power,
                f"microbatches {value} to the power {power}",
                "scaled_by_stages",
                True,
                18,
            )


def _tokens(one: Series, other: Series) -> Iterator[Factor]:
    for series in (one, other):
        tokens, setting = series.tokens, series.setting
        if tokens is None:
            continue
        yield Factor(tokens, f"{tokens:,.0f} tokens of a step", "scaled_by_tokens", True, 5)
        dp = setting.data_ranks if setting else None
        if dp and dp > 1:
            yield Factor(tokens / dp, f"tokens of a step over {dp} ranks", "scaled_by_tokens", True, 6)
        if setting is not None and setting.tokens:
            yield Factor(
                float(setting.tokens),
                f"{setting.tokens:,} tokens of a microbatch",
                "scaled_by_tokens",
                True,
                7,
            )
