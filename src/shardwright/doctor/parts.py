"""Means of microbatches or of ranks that were averaged although they hold different numbers of tokens."""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright.doctor.evidence import Evidence, Step
from shardwright.doctor.finding import Finding
from shardwright.doctor.lines import rank_of_name

Place = tuple[str, int | None]
"""A run, by its file or the folder of its ranks' files, and a step."""

SPREAD = 1e-6
"""Relative difference of the two means below which they are one: all parts have the same loss."""


class Means(NamedTuple):
    """What the parts of a step come to: the mean over tokens, which is right, and the mean of means."""

    of_tokens: float
    of_means: float
    weight_ratio: float


def parts_findings(evidence: Evidence) -> Iterator[Finding]:
    """The first step of every run whose parts say how they were averaged, or do not say it."""
    parts: dict[Place, list[Step]] = {}
    wholes: dict[Place, Step] = {}
    for step in evidence.of(Step):
        if "loss" not in step.values:
            continue
        if "tokens" in step.values and ("part" in step.values or step.rank is not None):
            parts.setdefault(_place(step), []).append(step)
        elif "part" not in step.values:
            wholes.setdefault(_place(step), step)
    told: set[str] = set()
    for place, found in parts.items():
        if place[0] not in told and (finding := _finding(found, wholes.get(place))) is not None:
            told.add(place[0])
            yield finding


def _place(step: Step) -> Place:
    file = step.source.file
    folder = file.rpartition("/")[0]
    own = rank_of_name(file) is not None or file.rpartition("/")[2].startswith("metrics.")
    return (folder if own else file), step.step


def means_of(parts: Sequence[Step]) -> Means | None:
    """Both means of parts with losses and tokens; None if they cannot differ."""
    tokens = [step.values["tokens"] for step in parts]
    losses = [step.values["loss"] for step in parts]
    if len(parts) < 2 or min(tokens) <= 0 or max(tokens) == min(tokens):
        return None
    right = sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens)
    mean = statistics.fmean(losses)
    if abs(mean - right) <= SPREAD * abs(right):
        return None
    return Means(right, mean, max(tokens) / min(tokens))


def _finding(parts: Sequence[Step], whole: Step | None) -> Finding | None:
    """What the step's own mean says; of microbatches it is likely without it, of ranks it may be either."""
    means = means_of(parts)
    if means is None:
        return None
    said = None if whole is None else whole.values["loss"]
    if said is not None and abs(said - means.of_tokens) <= abs(said - means.of_means):
        return None
    ranks = not any("part" in step.values for step in parts)
    names = "ranks" if ranks else "microbatches"
    tokens = [step.values["tokens"] for step in parts]
    if ranks and said is None:
        certainty, verb = "cannot_tell", "would have equal weight if each divided by its own"
    else:
        certainty, verb = ("certain" if said is not None else "likely"), "have equal weight"
    return Finding(
        "averaged_by_rank" if ranks else "averaged_by_microbatch",
        certainty,  # type: ignore[arg-type]
        f"{names} of {min(tokens):g} to {max(tokens):g} tokens {verb}: a token of the shortest weighs "
        f"{means.weight_ratio:.4g} times one of the longest; the mean over tokens is {means.of_tokens:.6g}, "
        f"the mean of means {means.of_means:.6g}" + ("" if said is None else f", the run has {said:.6g}"),
        (),
        tuple(step.source for step in parts[:4]) + (() if whole is None else (whole.source,)),
        (),
        ("the loss of the same step as the run averages it over ranks",)
        if certainty == "cannot_tell"
        else (),
        numbers={
            "weight_ratio": means.weight_ratio,
            "mean_of_tokens": means.of_tokens,
            "mean_of_means": means.of_means,
        },
    )
