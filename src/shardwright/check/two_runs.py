"""Two short runs beside each other: whether they are equal, and where not, which is wrong and why.

One process in plain PyTorch is the judge of step 1, sequence by sequence; further runs of one step tell
degrees apart that explain the same factor.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.check.cause import likely_cause
from shardwright.check.control import control_layouts, narrowed
from shardwright.check.evidence import (
    Evidence,
    ParameterEvidence,
    RunEvidence,
    SequenceWeights,
    match_of,
    relative,
    tolerance_of,
)
from shardwright.check.gathered import Gathered, Run
from shardwright.check.gradients import compare, run_evidence, sketches
from shardwright.check.verdict import Cause
from shardwright.check.weighting import sequence_weights
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.params import parameter_table
from shardwright.run.dataset import Batches, sample_indices
from shardwright.run.launch import run_ranks
from shardwright.run.probe import ONE_RANK, SequenceGradients, plain_gradients

MOST_CONTROLS = 2
"""Runs of one step that are made to tell degrees apart."""


class Judged(NamedTuple):
    """Both runs beside one plain process: gradients of step 1, and the batch sequence by sequence."""

    plain: RunEvidence
    a: tuple[ParameterEvidence, ...]
    b: tuple[ParameterEvidence, ...]
    sequences: SequenceGradients


class Comparison:
    """Two runs beside each other, and the judge where they differ."""

    def __init__(
        self,
        model: ModelSpec,
        job: Job,
        dataset: Batches,
        a: Gathered,
        b: Gathered,
        folder: Path,
        run: Callable[[str, Job, Layout, Path], Run],
        say: Callable[[str], None],
    ) -> None:
        """``run`` makes a short run, given its name, job, layout and a folder for it."""
        self.run = run
        self.model, self.job, self.dataset, self.a, self.b = model, job, dataset, a, b
        self.folder, self.say = folder, say
        self.experts = model.moe is not None
        self.tolerance = tolerance_of(job.precision, experts=self.experts)
        self.parameters = compare(b, a, model, job.precision, self.tolerance)
        self.runs = run_evidence(a, job, self.tolerance), run_evidence(b, job, self.tolerance)

    def document(self, *, reference: bool = False) -> dict[str, Any]:
        """All that was found, and the cause if something differs.

        ``reference``: two that agree are judged too, for both may be wrong.
        """
        ok = self.ok()
        judged = self.judge() if reference or not ok else None
        wrong = [] if judged is None else self.wrong(judged)
        ok = ok and not wrong
        found = None if judged is None or ok else self.cause(judged, wrong)
        left, right = self.runs
        worst = max(self.parameters, key=lambda p: (_size(p), p.name))
        differences = [
            _size(worst),
            *_differences(left.losses, right.losses),
            *_differences(left.norms, right.norms),
        ]
        return {
            "ok": ok,
            "model": self.model.name,
            "parameters": parameter_table(self.model).parameters,
            "precision": self.job.precision,
            "steps": self.job.steps,
            "tolerance": self.tolerance._asdict(),
            "a": {"label": self.a.run.layout.label, "ranks": self.a.run.layout.ranks},
            "b": {"label": self.b.run.layout.label, "ranks": self.b.run.layout.ranks},
            "losses_a": _numbers(left.losses),
            "losses_b": _numbers(right.losses),
            "norms_a": _numbers(left.norms),
            "norms_b": _numbers(right.norms),
            "worst_gradient": self.row(worst),
            "max_relative_difference": _number(max(differences)),
            "differing_gradients": len(self.evidence(right, left, self.parameters).off),
            "gradients": [self.row(parameter) for parameter in self.parameters],
            "ranks_apart": {
                "a": [entry._asdict() | {"axes": list(entry.axes)} for entry in left.apart],
                "b": [entry._asdict() | {"axes": list(entry.axes)} for entry in right.apart],
            },
            "reference": judged is not None,
            "wrong": wrong,
            "cause": None if found is None else found.key,
            "certainty": None if found is None else found.certainty,
            "explanation": None if found is None else found.text,
            "candidates": [] if found is None else list(found.candidates),
        }

    def ok(self) -> bool:
        """Whether the two are equal within the tolerance, and the ranks of each agree."""
        left, right = self.runs
        limits = self.tolerance
        losses, norms = _differences(left.losses, right.losses), _differences(left.norms, right.norms)
        return (
            not self.evidence(right, left, self.parameters).off
            and losses[0] <= limits.loss
            and norms[0] <= limits.norm
            and all(difference <= limits.later_loss for difference in losses)
            and all(difference <= limits.later_norm for difference in norms)
            and not any(self.at_odds(run) for run in self.runs)
        )

    def at_odds(self, run: RunEvidence) -> bool:
        """Whether ranks of a run that should hold the same do not."""
        loss, norm = run.ranks_differ
        apart = any(not entry.difference <= self.tolerance.gradient for entry in run.apart)
        return apart or not loss <= self.tolerance.loss or not norm <= self.tolerance.norm

    def evidence(
        self,
        found: RunEvidence,
        expected: RunEvidence,
        parameters: tuple[ParameterEvidence, ...],
        sequences: SequenceWeights | None = None,
    ) -> Evidence:
        """For check/cause.py."""
        apart = tuple(entry for entry in found.apart if not entry.difference <= self.tolerance.gradient)
        return Evidence(
            found=found._replace(apart=apart),
            expected=expected,
            parameters=parameters,
            tolerance=self.tolerance,
            match=match_of(self.job.precision),
            sequences=sequences,
            precision=self.job.precision,
            experts=self.experts,
        )

    def judge(self) -> Judged:
        """Run step 1 in one plain process."""
        self.say("one plain process tells what is right ...")
        folder = self.folder / "plain"
        folder.mkdir()
        exact = {"bf16": "fp32", "fp8": "fp32"}.get(self.job.precision, self.job.precision)
        job = self.job.model_copy(update={"precision": exact})
        width = 8 + 4 * self.job.global_batch // len(self.parameters)
        ((probed, sequences),) = run_ranks(plain_gradients, 1, self.model, job, self.dataset, folder, width)
        layout = ONE_RANK.model_copy(update={"micro_batch": self.job.global_batch})
        self.plain = Run(layout, [probed], folder)
        with Gathered(self.plain) as plain:
            a, b = (
                compare(run, plain, self.model, self.job.precision, self.tolerance)
                for run in (self.a, self.b)
            )
            return Judged(run_evidence(plain, self.job, self.tolerance), a, b, sequences)

    def wrong(self, judged: Judged) -> list[str]:
        """Which of the two differs from the plain process in step 1, or is at odds with itself."""
        found = []
        for name, run, parameters in zip("ab", self.runs, (judged.a, judged.b), strict=True):
            off = self.evidence(run, judged.plain, parameters).off
            loss = relative(run.losses[0], judged.plain.losses[0])
            norm = relative(run.norms[0], run.true_norm)
            bad = not loss <= self.tolerance.loss or not norm <= self.tolerance.norm
            if off or bad or self.at_odds(run):
                found.append(name)
        return found

    def cause(self, judged: Judged, wrong: Sequence[str]) -> Cause:
        """Of the one that is wrong beside the plain process; of the pair, where step 1 has no fault."""
        if not wrong:
            left, right = self.runs
            return likely_cause(self.evidence(right, left, self.parameters))
        causes = {}
        for name in wrong:
            run, parameters, gathered = {
                "a": (self.runs[0], judged.a, self.a),
                "b": (self.runs[1], judged.b, self.b),
            }[name]
            weights = self._weights(gathered, judged.sequences)
            cause = likely_cause(self.evidence(run, judged.plain, parameters, weights))
            causes[name] = self.told_apart(cause, gathered.run.layout)
        if len(causes) == 1:
            ((name, cause),) = causes.items()
            return cause._replace(text=f"{name.upper()} is wrong: {cause.text}")
        left_cause, right_cause = causes["a"], causes["b"]
        text = f"both are wrong. A: {left_cause.text}. B: {right_cause.text}"
        return right_cause._replace(text=text)

    def told_apart(self, cause: Cause, layout: Layout) -> Cause:
        """Of several degrees that explain a factor, those that still do when one of them is changed."""
        for number, control in enumerate(control_layouts(layout, cause.candidates, self.model, self.job)):
            if len(cause.candidates) < 2 or number == MOST_CONTROLS:
                break
            self.say(f"to tell {' from '.join(cause.candidates)}: [{control.label}]")
            folder = self.folder / f"control-{control.label.replace(' ', '-')}"
            folder.mkdir(exist_ok=True)
            job = self.job.model_copy(update={"steps": 1, "warmup_steps": 0})
            run = self.run("control", job, control, folder)
            with Gathered(run) as gathered, Gathered(self.plain) as plain:
                parameters = compare(gathered, plain, self.model, job.precision, self.tolerance)
                evidence = self.evidence(
                    run_evidence(gathered, job, self.tolerance),
                    run_evidence(plain, job, self.tolerance),
                    parameters,
                )
                cause = narrowed(cause, likely_cause(evidence), control)
        return cause

    def _weights(self, gathered: Gathered, sequences: SequenceGradients) -> SequenceWeights | None:
        """By how much each sequence counts in a run's gradients."""
        match = match_of(self.job.precision)
        found = sketches(gathered, next(iter(sequences.sketches.values())).shape[1])
        if found.keys() != sequences.sketches.keys():
            return None
        weights = sequence_weights(found, sequences.sketches, match)
        if weights is None:
            return None
        layout = gathered.run.layout
        places = {
            index: (rank, microbatch)
            for rank in range(layout.dp)
            for microbatch, part in enumerate(sample_indices(layout, rank))
            for index in part
        }
        ranks, microbatches = zip(*(places[index] for index in range(len(weights))), strict=True)
        return SequenceWeights(weights, tuple(sequences.tokens), ranks, microbatches)

    def row(self, parameter: ParameterEvidence) -> dict[str, Any]:
        """One parameter of the document, with what splits it in either layout."""
        stage, axes = self.a.place(parameter.name)
        return {
            "name": parameter.name,
            "difference": _number(_size(parameter)),
            "ratio": _number(parameter.ratio),
            "role": parameter.role,
            "layer": parameter.layer,
            "stage_a": stage,
            "stage_b": parameter.stage,
            "axes_a": list(axes),
            "axes_b": list(parameter.axes),
            "missing": parameter.missing,
        }


def _size(parameter: ParameterEvidence) -> float:
    return float("inf") if math.isnan(parameter.difference) else parameter.difference


def _differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [relative(a, b) for a, b in zip(left, right, strict=True)]


def _number(value: float | None) -> float | None:
    """A number, or None where it is none: JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [_number(value) for value in values]
