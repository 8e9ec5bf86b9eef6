"""Numbers: losses and gradient norms of two runs whose ratio names what one of them scales wrongly."""

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

from shardwright.doctor.evidence import Evidence, Step
from shardwright.doctor.factors import Factor, factors_of
from shardwright.doctor.finding import Certainty, Finding, Source
from shardwright.doctor.lines import rank_of_name
from shardwright.doctor.parts import parts_findings
from shardwright.doctor.series import Ratio, Series, is_resumed, ratio_of, series_of

EQUAL = 1e-3
"""Relative difference of losses or norms that rounding in 16 bits makes."""

NEAR = 0.03
"""By how much a measured ratio may miss a factor."""

SAME_COURSE = 0.5
"""Relative difference of first losses beyond which two runs do not look at the same thing."""

LEAST_STAGES = 3
"""Stages whose ratios show a progression."""

SPIKE_DEVIATIONS = 8.0
SPIKE_WINDOW = 32
"""Steps before a jump that it is measured against."""


def numbers_findings(evidence: Evidence) -> list[Finding]:
    """What losses and norms say: of one run, and of two against each other."""
    runs = [series for series in series_of(evidence) if series.values("loss") or series.values("grad_norm")]
    found = [finding for series in runs for finding in _alone(series)]
    found += parts_findings(evidence)
    found += list(_norms_of_ranks(evidence))[:1]
    if len(runs) == 2 and not is_resumed(*runs):
        found += compared(runs[0], runs[1])
    return found


def _norms_of_ranks(evidence: Evidence) -> Iterator[Finding]:
    """Ranks that print different norms of one step's gradient, which has but one."""
    steps: dict[tuple[str, int | None], dict[int, Step]] = {}
    for step in evidence.of(Step):
        if step.rank is not None and "stage" not in step.values and step.values.get("grad_norm"):
            file = step.source.file
            own = rank_of_name(file) is not None
            steps.setdefault((file.rpartition("/")[0] if own else file, step.step), {})[step.rank] = step
    for (_, number), ranks in steps.items():
        norms = [step.values["grad_norm"] for step in ranks.values()]
        losses = {step.values["loss"] for step in ranks.values() if "loss" in step.values}
        if len(norms) < 2 or max(norms) - min(norms) <= NEAR * max(norms) or len(losses) > 1:
            continue
        whole = math.sqrt(math.fsum(norm**2 for norm in norms))
        yield Finding(
            "partial_norm",
            "likely",
            f"{len(norms)} ranks print gradient norms of {min(norms):.4g} to {max(norms):.4g} at step "
            f"{number}, where there is one: each is of a rank's own part; together they are {whole:.6g}",
            (),
            tuple(step.source for step in ranks.values()),
            ("reduce squares over ranks, or print DTensor norms with full_tensor()",),
            numbers={"step": number, "whole": whole, "smallest": min(norms), "largest": max(norms)},
        )


def _alone(series: Series) -> Iterator[Finding]:
    """A loss that is no number, or jumps."""
    losses = series.values("loss")
    norms = series.values("grad_norm")
    for step in sorted({*losses, *norms}):
        bad = [
            name
            for name, values in (("loss", losses), ("gradient norm", norms))
            if not math.isfinite(values.get(step, 0.0))
        ]
        if bad:
            yield Finding(
                "not_a_number",
                "certain",
                f"the {' and the '.join(bad)} of step {step} {'are' if len(bad) > 1 else 'is'} no number",
                (),
                (series.source(step),),
                numbers={"step": step},
            )
            return
    steps = sorted(losses)
    for index in range(SPIKE_WINDOW, len(steps)):
        window = [losses[s] for s in steps[index - SPIKE_WINDOW : index]]
        mean, spread = statistics.fmean(window), statistics.pstdev(window)
        value = losses[steps[index]]
        if value > mean + SPIKE_DEVIATIONS * max(spread, 0.01 * abs(mean)) and value > 1.3 * mean:
            yield Finding(
                "loss_spike",
                "certain",
                f"the loss jumps to {value:.4g} at step {steps[index]}, the {SPIKE_WINDOW} steps "
                f"before have {mean:.4g} on average",
                (),
                (series.source(steps[index]),),
                numbers={"step": steps[index], "loss": value, "mean": mean},
            )
            return


def compared(one: Series, other: Series) -> Iterator[Finding]:
    """Two runs of what should be the same."""
    loss, norm = ratio_of(one, other, "loss"), ratio_of(one, other, "grad_norm")
    if loss is None and norm is None:
        return
    sources = (one.steps[0].source, other.steps[0].source)
    differing = list(_different_batches(one, other))
    loss_equal = loss is not None and abs(loss.first - 1) <= EQUAL
    if differing and not loss_equal:
        yield Finding(
            "not_comparable",
            "certain",
            f"the runs have {', '.join(differing)}: they see other samples, so equal or unequal "
            "numbers prove nothing",
            (),
            sources,
            numbers={"differs": differing},
        )
        return
    factors = factors_of(one, other)
    staged = list(_by_stage(one, other, sources))
    if staged:
        yield from staged
        return
    experts = ratio_of(one, other, "expert_grad_norm")
    if experts is not None and abs(experts.median - 1) > NEAR and (norm is None or not _off(norm)):
        yield _named(one, other, "experts' gradient norm", experts, factors, loss_equal=loss_equal)
        return
    if norm is not None and (loss is None or loss_equal or not _off(loss)):
        yield from _norms(one, other, norm, loss, factors)
    elif loss is not None and not loss_equal:
        yield from _losses(one, other, loss, norm, factors)
    elif loss is not None:
        yield _equal_or_parting(one, other, loss)


def _by_stage(one: Series, other: Series, sources: tuple[Source, ...]) -> Iterator[Finding]:
    """Gradient norms of pipeline stages whose ratios are powers of one number: every stage scales once
    more."""
    sides = []
    for series in (one, other):
        sides.append(
            {
                int(step.values["stage"]): step.values["grad_norm"]
                for step in reversed(series.steps)
                if "stage" in step.values and step.values.get("grad_norm")
            }
        )
    stages = sorted(set(sides[0]) & set(sides[1]))
    if len(stages) < LEAST_STAGES:
        return
    ratios = [sides[1][stage] / sides[0][stage] for stage in stages]
    steps = [after / before for before, after in pairwise(ratios)]
    power = statistics.median(steps)
    if abs(power - 1) > NEAR and all(abs(step / power - 1) <= NEAR for step in steps):
        size = max(power, 1 / power)
        yield Finding(
            "scaled_by_stages",
            "certain",
            f"gradient norms of stages {stages[0]} to {stages[-1]} differ by "
            f"{', '.join(f'{r:.4g}' for r in ratios)}: powers of "
            f"{size:.4g}, one more for each stage",
            (),
            sources,
            numbers={"ratios": ratios, "power": size},
        )


def _off(ratio: Ratio) -> bool:
    return abs(ratio.median - 1) > EQUAL


def _different_batches(one: Series, other: Series) -> Iterator[str]:
    for name, a, b in (
        ("global batches", one.global_batch, other.global_batch),
        ("sequence lengths", one.seq, other.seq),
    ):
        if a is not None and b is not None and a != b:
            yield f"{name} {a:g} and {b:g}"


def _norms(
    one: Series, other: Series, norm: Ratio, loss: Ratio | None, factors: Sequence[Factor]
) -> Iterator[Finding]:
    if not _off(norm):
        yield _equal_or_parting(one, other, norm if loss is None else loss)
        return
    if not norm.constant and norm.count > 1 and abs(norm.first - 1) <= 10 * EQUAL:
        yield _equal_or_parting(one, other, norm)
        return
    yield _named(one, other, "gradient norm", norm, factors, loss_equal=loss is not None)


def _losses(
    one: Series, other: Series, loss: Ratio, norm: Ratio | None, factors: Sequence[Factor]
) -> Iterator[Finding]:
    named = _matching(loss.median, [factor for factor in factors if not factor.norms_only])
    if named or (loss.constant and abs(loss.median - 1) > SAME_COURSE):
        yield _named(one, other, "loss", loss, factors, loss_equal=False)
    elif (
        any(factor.cause == "scaled_by_microbatches" for factor in factors)
        and abs(loss.first - 1) < SAME_COURSE
    ):
        more = "" if norm is None else f" and gradient norms by {norm.first - 1:+.1%}"
        yield Finding(
            "averaged_by_microbatch",
            "likely",
            "the same batch in another number of microbatches has a loss that differs by "
            f"{loss.first - 1:+.2%}{more}: means of "
            "microbatches are averaged, not tokens",
            (),
            (one.steps[0].source, other.steps[0].source),
            numbers={"loss_ratio": loss.first, "norm_ratio": None if norm is None else norm.first},
        )
    else:
        yield Finding(
            "not_comparable",
            "cannot_tell",
            f"losses differ from the first step on (by {loss.first - 1:+.2%}) and by no constant "
            "factor: most likely the runs "
            "see other samples or start from other weights",
            (),
            (one.steps[0].source, other.steps[0].source),
            (),
            ("global batch, sequence, data order and seed of both runs",),
            numbers={"loss_ratio": loss.first},
        )


def _matching(value: float, factors: Sequence[Factor]) -> list[Factor]:
    """Factors that a ratio or its inverse is, best first."""
    ratio = max(value, 1 / value) if value > 0 else abs(value)
    near = [factor for factor in factors if factor.value > 1.01 and abs(ratio / factor.value - 1) <= NEAR]
    return sorted(near, key=lambda factor: (factor.rank, abs(ratio / factor.value - 1)))


def _named(
    one: Series, other: Series, what: str, ratio: Ratio, factors: Sequence[Factor], *, loss_equal: bool
) -> Finding:
    usable = factors if what != "loss" else [factor for factor in factors if not factor.norms_only]
    found = _matching(ratio.median, usable)
    sources = (one.steps[0].source, other.steps[0].source)
    larger = "second" if ratio.median > 1 else "first"
    size = max(ratio.median, 1 / ratio.median) if ratio.median > 0 else ratio.median
    text = (
        f"the {what} of the {larger} run is {size:.4g} times the other's at {ratio.count} "
        f"step{'s' if ratio.count > 1 else ''}"
    )
    text += " while the loss is equal" if loss_equal else ""
    numbers: dict[str, object] = {"ratio": ratio.median, "quantity": what, "steps": ratio.count}
    if not found:
        return Finding("scaled_constant", "cannot_tell", text, (), sources, numbers=numbers)
    best = found[0]
    if best.norms_only and best.owner is not None:  # whose norm it is says whether parts or copies were added
        more = (ratio.median > 1) == (best.owner == 1)
        best = best._replace(cause="norm_reduced_again" if more else "partial_norm")
        found = [best, *(each for each in found[1:] if not each.norms_only)]
    others = [f"{factor.text} = {factor.value:g}" for factor in found[1:3] if factor.cause != best.cause]
    certainty: Certainty = "certain" if len({f.cause for f in found}) == 1 and best.differs else "likely"
    text += f": that is {best.text} = {best.value:.4g}" + (f" (or {'; or '.join(others)})" if others else "")
    return Finding(best.cause, certainty, text, (), sources, numbers=numbers | {"factor": best.text})


def _equal_or_parting(one: Series, other: Series, ratio: Ratio) -> Finding:
    keys = [key for key in ("loss", "grad_norm") if one.values(key) and other.values(key)]
    parted = None
    largest = 0.0
    for key in keys:
        a, b = one.values(key), other.values(key)
        for step in sorted(set(a) & set(b)):
            difference = abs(b[step] - a[step]) / max(abs(a[step]), 1e-12)
            largest = max(largest, difference)
            if difference > 10 * EQUAL and parted is None:
                parted = step, key
    sources = (one.steps[0].source, other.steps[0].source)
    if parted is None:
        return Finding(
            "runs_equal",
            "certain" if ratio.count > 1 else "likely",
            f"{' and '.join(key.replace('grad_norm', 'gradient norm') for key in keys)} agree within "
            f"{largest:.1e} at the "
            f"{ratio.count} steps compared",
            (),
            sources,
            numbers={"largest_difference": largest},
        )
    step, key = parted
    return Finding(
        "runs_diverge",
        "cannot_tell",
        f"the runs begin alike and part at step {step} ({key.replace('grad_norm', 'gradient norm')})",
        (),
        (one.source(step), other.source(step)),
        numbers={"step": step, "largest_difference": largest},
    )
