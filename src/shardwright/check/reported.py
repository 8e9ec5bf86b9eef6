"""Gradients are right and the loss or the norm that is reported is not."""

from collections.abc import Iterator

from shardwright.check.evidence import Evidence, RunEvidence, relative
from shardwright.check.scaling import NORM_POWERS, POWERS, factors
from shardwright.check.verdict import Cause


def reported_cause(evidence: Evidence) -> Cause | None:
    """What was added up wrongly on the way to the number. Clipping goes by the norm: later steps differ."""
    if evidence.off:
        return None
    return _norm_cause(evidence) or _loss_cause(evidence)


def _norm_cause(evidence: Evidence) -> Cause | None:
    run = evidence.found
    if not run.norms or not (run.true_norm or evidence.expected.norms):
        return None
    expected = run.true_norm or evidence.expected.norms[0]
    apart = run.ranks_differ[1] > evidence.tolerance.norm
    if not apart and relative(run.norms[0], expected) <= evidence.tolerance.norm:
        return None
    head = f"gradients agree, and their norm is {expected:.9g}, not the {run.norms[0]:.9g} that is reported"
    for key, value, text in _partial_norms(run):
        if relative(run.norms[0], value) <= max(evidence.match, evidence.tolerance.norm):
            return Cause(key, "certain", f"{head}: {text}")
    found = factors(run.norms[0] / expected, evidence, NORM_POWERS) if expected else []
    if not found:
        where = "; ranks report different ones: a reduction is left out" if apart else ""
        return Cause("norm_wrong", "cannot_tell", f"{head}{where}")
    texts = " or ".join(factor.text for factor in found)
    names = tuple(factor.name for factor in found)
    text = f"{head}: {texts}, as if it were reduced once too often, or too seldom, over these ranks"
    if len(found) > 1:
        return Cause("norm_scaled", "cannot_tell", text, names)
    return Cause(f"norm_scaled_by_{names[0]}", "likely", text, names)


def _partial_norms(run: RunEvidence) -> Iterator[tuple[str, float, str]]:
    """Norms of a part of the gradients, or of some of them twice."""
    if run.tied_norm:
        twice = (run.true_norm**2 + run.tied_norm**2) ** 0.5
        yield "norm_counts_tied_twice", twice, "it counts both copies of the tied matrix"
    if len(run.stage_norms) > 1:
        for stage, norm in enumerate(run.stage_norms):
            yield "norm_of_one_stage", norm, f"it is the norm of stage {stage} alone, not summed over pp"
    if run.rank_norm:
        yield "norm_of_one_rank", run.rank_norm, "it is the norm of what rank 0 holds, not summed over ranks"


def _loss_cause(evidence: Evidence) -> Cause | None:
    if not evidence.found.losses or not evidence.expected.losses:
        return None
    found, expected = evidence.found.losses[0], evidence.expected.losses[0]
    if relative(found, expected) <= evidence.tolerance.loss:
        if evidence.found.ranks_differ[0] > evidence.tolerance.loss:
            return Cause("loss_per_rank", "likely", "ranks report different losses: a reduction is left out")
        return None
    head = f"gradients agree, and the loss is {expected:.9g}, not the {found:.9g} that is reported"
    matches = factors(found / expected, evidence, POWERS) if expected else []
    if not matches:
        return Cause("loss_wrong", "cannot_tell", head)
    texts = " or ".join(factor.text for factor in matches)
    names = tuple(factor.name for factor in matches)
    text = f"{head}: {texts}; only the report is wrong"
    if len(matches) > 1:
        return Cause("loss_scaled", "cannot_tell", text, names)
    return Cause(f"loss_scaled_by_{names[0]}", "likely", text, names)
