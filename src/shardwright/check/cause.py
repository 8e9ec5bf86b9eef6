"""Why two runs of one job differ: from the numbers of step 1 to a likely cause.

Each cause is a pattern of which gradients differ, by what factor, and what loss and norm do. Where several
fit, the answer is that it cannot be told.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from shardwright.check.evidence import Apart, Evidence, ParameterEvidence, relative
from shardwright.check.reported import reported_cause
from shardwright.check.scaling import GRADIENT_POWERS, NORM_POWERS, factors
from shardwright.check.verdict import Cause
from shardwright.check.weighting import weighting_cause

EXPERT_AXES = ("ep", "etp", "expert_shard")
MOSTLY = 0.05
"""Share of a gradient that a factor may leave and still tell what happened to most of it."""


def likely_cause(evidence: Evidence) -> Cause:
    """The first pattern that fits, from the most certain on."""
    for pattern in PATTERNS:
        cause = pattern(evidence)
        if cause is not None:
            return cause
    return Cause("unknown", "cannot_tell", "no pattern that is known fits these differences", ())


def _other_input(evidence: Evidence) -> Cause | None:
    run, expected = evidence.found, evidence.expected
    if run.digest and expected.digest and run.digest != expected.digest:
        text = (
            f"the runs were given other sequences in step 1 ({run.tokens} and {expected.tokens} tokens count)"
        )
        return Cause("other_data", "certain", text)
    names = [parameter.name for parameter in evidence.parameters if parameter.other_start]
    if names:
        return Cause("other_weights", "certain", f"initial weights differ: {_listed(names)}")
    return None


def _not_numbers(evidence: Evidence) -> Cause | None:
    """A loss or gradient of step 1 that is infinite or no number; what it spreads to tells nothing."""
    names = [p.name for p in evidence.off if not p.missing and not math.isfinite(p.difference)]
    loss = evidence.found.losses[:1]
    if all(map(math.isfinite, loss)) and not names:
        return None
    first = f"the loss of step 1 is {loss[0]}" if loss and not math.isfinite(loss[0]) else ""
    second = f"gradients of {_listed(names)} have entries that are no numbers" if names else ""
    text = "; ".join(part for part in (first, second) if part)
    return Cause("not_a_number", "certain", f"{text}: look for what divides by zero or overflows")


def _missing(evidence: Evidence) -> Cause | None:
    zero = [p for p in evidence.off if p.ratio is not None and abs(p.ratio) <= evidence.match]
    if zero and len(zero) == len(evidence.off):
        names = _listed([parameter.name for parameter in zero])
        return Cause("gradient_lost", "certain", f"gradients of {names} are zero: backward loses them")
    off = [parameter for parameter in evidence.parameters if parameter.missing]
    if not off:
        return None
    text = (
        f"no gradient reaches {_listed([p.name for p in off])}: backward does not find them (parameters "
        "resharded or replaced between forward and backward, or a part of the graph left out)"
    )
    return Cause("gradient_missing", "certain", text)


def _ranks_apart(evidence: Evidence) -> Cause | None:
    """Ranks that should hold one gradient hold several: a sum over what separates them is left out."""
    apart = evidence.found.apart
    if not apart:
        return None
    names = _listed([entry.name for entry in apart])
    axes = _common_axes(apart)
    if axes == ("pp",):
        text = f"stages hold different gradients of one matrix, {names}: tied copies are not added up"
        return Cause("tied_not_summed", "certain", text)
    where = " and ".join(axes) or "several axes"
    text = f"ranks along {where} hold different gradients of {names}: a sum over {where} is left out"
    return Cause(f"not_summed_over_{'_'.join(axes) or 'ranks'}", "certain", text)


def _common_axes(apart: Sequence[Apart]) -> tuple[str, ...]:
    shared = set.intersection(*(set(entry.axes) for entry in apart))
    return tuple(axis for axis in apart[0].axes if axis in shared)


def _one_factor(evidence: Evidence) -> Cause | None:
    """Every gradient is off by one factor; without gradients, their norm says so."""
    ratio = _one_ratio(evidence.parameters, evidence) if evidence.parameters else _norm_ratio(evidence)
    if ratio is None or relative(ratio, 1.0) <= evidence.match:
        return None
    powers = GRADIENT_POWERS if evidence.parameters else NORM_POWERS
    found = factors(ratio, evidence, powers)
    what = f"{'all gradients' if evidence.parameters else 'the gradient norm'} x {ratio:.6g}"
    run = evidence.found
    if run.divisor not in (0, run.tokens) and relative(ratio, run.tokens / run.divisor) <= evidence.match:
        text = f"{what}: the loss is divided by {run.divisor}, and {run.tokens} tokens of the batch count"
        return Cause("wrong_token_count", "certain", text, tuple(factor.name for factor in found))
    candidates = tuple(factor.name for factor in found)
    if not found:
        return Cause("scaled", "cannot_tell", f"{what}: a factor that is no power of a degree")
    texts = " or ".join(factor.text for factor in found)
    if len(found) > 1:
        text = f"{what}: {texts}"
        return Cause("scaled", "cannot_tell", text, candidates)
    if found[0].power in (0.5, -0.5):
        text = f"{what}: {texts}, as of a norm that is reduced once too often over ranks that hold the same"
        return Cause(f"norm_scaled_by_{candidates[0]}", "likely", text, candidates)
    return Cause(f"scaled_by_{candidates[0]}", "likely", f"{what}: {texts}{_hint(candidates[0])}", candidates)


def _hint(name: str) -> str:
    if name == "microbatches":
        return ": the accumulated loss is a sum where a mean belongs, or a mean of means"
    if name in ("tokens", "positions"):
        return ": the loss must be divided by the tokens that count in the global batch"
    if name == "pp":
        return ": stages scale gradients or the loss, which the loss's own division has done"
    return (
        ": a reduction averages (or sums) over these ranks what the division by the global token count has "
        "done already"
    )


def _one_group(evidence: Evidence) -> Cause | None:
    """One kind of parameters is off by one factor, the others are right."""
    off = evidence.off
    if not off or len(off) == len(evidence.parameters):
        return None
    ratio = _one_ratio(off, evidence)
    group = _group_of(off, evidence)
    if ratio is None or group is None:
        return None
    found = factors(ratio, evidence)
    wanted = [factor for factor in found if group == "experts" and factor.name == "ep"] or found
    candidates = tuple(factor.name for factor in wanted)
    what = f"gradients of {group} alone x {ratio:.6g}"
    if not wanted:
        return Cause(f"{group}_scaled", "cannot_tell", f"{what}: a factor that is no power of a degree")
    texts = " or ".join(factor.text for factor in wanted)
    if group == "experts" and candidates == ("ep",):
        also = [factor.text for factor in found if factor.name != "ep"]
        text = (
            f"{what}: {texts}; experts are reduced over the ranks that hold the same experts only, and must "
            "be scaled as all other gradients are"
            + (f" (it may also be {' or '.join(also)})" if also else "")
        )
        return Cause("experts_scaled_by_ep", "likely", text, tuple(factor.name for factor in found))
    certainty: Literal["likely", "cannot_tell"] = "likely" if len(wanted) == 1 else "cannot_tell"
    key = f"{group}_scaled" if len(wanted) > 1 else f"{group}_scaled_by_{candidates[0]}"
    return Cause(key, certainty, f"{what}: {texts}", candidates)


GROUPS: dict[str, Callable[[ParameterEvidence], bool]] = {
    "experts": lambda p: p.role == "expert",
    "router": lambda p: p.role == "router",
    "shared_experts": lambda p: p.role == "shared_expert",
    "embedding": lambda p: p.role in ("embedding", "position"),
    "head": lambda p: p.role == "head",
    "norms": lambda p: p.role == "norm",
    "biases": lambda p: p.name.endswith(".bias"),
    "whole_over_tp": lambda p: not any(axis.startswith("tp") for axis in p.axes) and p.role != "expert",
    "split_over_tp": lambda p: any(axis.startswith("tp") for axis in p.axes),
}
"""Kinds of parameters that a fault may hit alone."""


def _group_of(off: Sequence[ParameterEvidence], evidence: Evidence) -> str | None:
    """The kind that is off: all of it that the model has, and nothing else."""
    names = {parameter.name for parameter in off}
    for group, member in GROUPS.items():
        if names == {parameter.name for parameter in evidence.parameters if member(parameter)}:
            return group
    return None


def _stage_powers(evidence: Evidence) -> Cause | None:
    """Every stage has its own factor: each border multiplies gradients on their way back."""
    stages = sorted({parameter.stage for parameter in evidence.parameters})
    if len(stages) < 2 or not evidence.off:
        return None
    ratios = []
    for stage in stages:
        ratio = _one_ratio([p for p in evidence.parameters if p.stage == stage], evidence)
        if ratio is None or ratio <= 0:
            return None
        ratios.append(ratio)
    last, base = ratios[-1], ratios[-2] / ratios[-1]
    powers = [last * base ** (len(stages) - 1 - i) for i in range(len(stages))]
    listed = ", ".join(f"stage {stage} x {ratio:.6g}" for stage, ratio in zip(stages, ratios, strict=True))
    if relative(base, 1.0) <= evidence.match and relative(last, 1.0) <= evidence.match:
        return None
    if all(relative(a, b) <= evidence.match for a, b in zip(ratios, powers, strict=True)):
        text = f"{listed}: every border between stages multiplies gradients by {base:.6g} on their way back"
        if len(stages) > 2:
            return Cause("power_of_each_stage", "certain", text)
        return Cause("power_of_each_stage", "likely", text + ", or one stage is scaled by itself")
    return Cause("scaled_by_stage", "likely", f"{listed}: stages scale their gradients each by itself")


def _lost_group(evidence: Evidence) -> Cause | None:
    """One kind of parameters is off, without one factor: a part of its gradient is left out."""
    off = evidence.off
    if not off or len(off) == len(evidence.parameters) or _loss_differs(evidence):
        return None
    group, names = _group_of(off, evidence), _listed([p.name for p in off])
    degrees = evidence.found.degrees
    if group in ("router", "norms", "biases", "whole_over_tp") and degrees.get("tp", 1) > 1:
        text = (
            f"only {names} are off, which every rank of tp holds whole and finds a share of: the sum over tp "
            "is left out"
        )
        return Cause("not_summed_over_tp", "likely", text)
    if group == "experts":
        text = f"only experts are off ({names}), not by one factor: tokens are lost or doubled in the trade"
        return Cause("experts_wrong", "likely", text)
    if group == "embedding":
        pp = degrees.get("pp", 1) > 1
        way = "tied copies of two stages are not added up, or " if pp else ""
        return Cause("embedding_wrong", "likely", f"only {names} is off: {way}a part of its gradient is lost")
    return _backward_from(off, evidence)


def _backward_from(off: Sequence[ParameterEvidence], evidence: Evidence) -> Cause | None:
    """Gradients are right behind a layer and wrong before it: backward breaks there."""
    right = [parameter for parameter in evidence.parameters if parameter not in off]
    if {parameter.layer for parameter in off} == {off[0].layer} and off[0].layer is not None:
        where = f"layer {off[0].layer} are off (stage {off[0].stage})"
        text = f"only parameters of {where}: {_listed([p.name for p in off])}"
        return Cause("one_layer", "likely", text)
    stages = {parameter.stage for parameter in off}
    if stages.isdisjoint({parameter.stage for parameter in right}):
        text = f"all parameters of stages {sorted(stages)} are off and no others"
        if max(stages) < min(parameter.stage for parameter in right):
            text += ": gradients go wrong where they cross into them from the stage behind"
        return Cause("stages_wrong", "likely", text)
    depth = [p.layer if p.layer is not None else -1 for p in off if p.role not in ("head", "norm")]
    if depth and max(depth) < max((p.layer for p in right if p.layer is not None), default=-1):
        text = (
            f"gradients are right behind layer {max(depth)} and wrong in it and before: backward breaks there"
        )
        return Cause("backward_breaks", "likely", text)
    return None


def _forward(evidence: Evidence) -> Cause | None:
    """The loss of step 1 differs with the same weights and data: the forward pass is another."""
    if not _loss_differs(evidence) or not evidence.off:
        return None
    degrees, found, expected = evidence.found.degrees, evidence.found.losses[0], evidence.expected.losses[0]
    numbers = f"the loss of step 1 is {found:.9g}, not {expected:.9g}"
    head = f"with the same weights and tokens {numbers}: the forward pass"
    suspects = [
        (
            degrees.get("cp", 1) > 1,
            "attention over the ranks of cp (masks at block borders, merging of softmax parts)",
        ),
        (degrees.get("pp", 1) > 1, "what passes between stages (a layer left out or run twice)"),
        (degrees.get("tp", 1) > 1, "sums over tp (a bias added on every rank, a vocabulary-parallel loss)"),
        (degrees.get("ep", 1) > 1, "the trade of tokens with experts"),
    ]
    texts = [text for present, text in suspects if present]
    if evidence.experts and evidence.precision != "fp64":
        return Cause(
            "rounding", "cannot_tell", f"{head} differs; routing flips in {evidence.precision}: use fp64"
        )
    if len(texts) == 1:
        return Cause("forward_differs", "likely", f"{head} differs, most likely {texts[0]}")
    return Cause(
        "forward_differs", "cannot_tell", f"{head} differs: {' or '.join(texts) or 'in the model itself'}"
    )


def _later_steps(evidence: Evidence) -> Cause | None:
    """All of step 1 is right, and later losses are not: the update differs."""
    if evidence.off or _loss_differs(evidence):
        return None
    pairs = list(zip(evidence.found.losses, evidence.expected.losses, strict=False))[1:]
    bad = [i + 2 for i, (a, b) in enumerate(pairs) if not relative(a, b) <= evidence.tolerance.later_loss]
    norms = list(zip(evidence.found.norms, evidence.expected.norms, strict=False))[1:]
    bad += [i + 2 for i, (a, b) in enumerate(norms) if not relative(a, b) <= evidence.tolerance.later_norm]
    if not bad:
        return None
    if evidence.experts and evidence.precision != "fp64":
        text = f"step 1 agrees, later ones do not in {evidence.precision}: routing flips; compare in fp64"
        return Cause("rounding", "cannot_tell", text)
    text = (
        f"loss, norm and every gradient of step 1 agree, step {min(bad)} does not: the update differs "
        "(clipping, optimizer state, weight decay, or parameters not written back)"
    )
    return Cause("update_differs", "likely", text)


def _loss_differs(evidence: Evidence) -> bool:
    """Of step 1, where losses are known."""
    found, expected = evidence.found.losses, evidence.expected.losses
    return bool(found and expected) and not relative(found[0], expected[0]) <= evidence.tolerance.loss


def _norm_ratio(evidence: Evidence) -> float | None:
    if not evidence.found.norms or not evidence.expected.norms or not evidence.expected.norms[0]:
        return None
    return evidence.found.norms[0] / evidence.expected.norms[0]


def _one_ratio(parameters: Iterable[ParameterEvidence], evidence: Evidence) -> float | None:
    """The one factor of all these gradients, None if there is none."""
    limit = max(evidence.match, evidence.tolerance.gradient)
    ratios = []
    for parameter in parameters:
        if parameter.ratio is None or parameter.residual is None:
            if parameter.difference:
                return None
            continue  # zero in both
        if parameter.residual > limit:
            return None
        ratios.append(parameter.ratio)
    if not ratios or any(relative(ratio, ratios[0]) > limit for ratio in ratios):
        return None
    return sorted(ratios)[len(ratios) // 2]


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


PATTERNS: tuple[Callable[[Evidence], Cause | None], ...] = (
    _other_input,
    _not_numbers,
    _missing,
    _ranks_apart,
    _one_factor,
    _one_group,
    _stage_powers,
    weighting_cause,
    _forward,
    _lost_group,
    reported_cause,
    _later_steps,
)
