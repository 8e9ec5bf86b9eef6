"""Accuracy: published runs predicted, and how far the planner is off, by kinds of runs and within sweeps.

An error is ln(predicted / measured): 0.05 is five percent either way.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwright.check.runs_case import Case
from shardwright.check.runs_file import Runs, read_runs
from shardwright.check.runs_layout import with_all_chunks
from shardwright.check.runs_memory import Memory, measured_memory, memory_of, recomputed_modules
from shardwright.check.runs_program import options_of_row, program_of_row
from shardwright.check.sweeps import sweeps_of
from shardwright.description import nearest
from shardwright.errors import JobError
from shardwright.plan.pipeline import simulated_steps
from shardwright.plan.step import StepTime, step_time
from shardwright.plan.table import Floats, table_of

WORST_ROWS = 20

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")

GROUPS: Mapping[str, Callable[[Case], str]] = {
    "gpu": lambda case: case.row["gpu"],
    "framework": lambda case: case.row["framework"],
    "program": lambda case: case.job.program.name,
    "source": lambda case: case.row["source_id"],
    "precision": lambda case: case.job.precision,
    "kind": lambda case: "MoE" if case.model.moe else "dense",
    "completeness": lambda case: case.row["completeness"],
    "axis": lambda case: "+".join(axis for axis in AXES if getattr(case.layout, axis) > 1) or "one device",
}
"""What runs can be grouped by."""


class Predicted(NamedTuple):
    """A run's predicted step [s] by its parts, and memory [B] by how it is measured."""

    time: float
    terms: Mapping[str, float]
    memory: Memory | None  # None where nothing is compared with it


def errors_of(errors: Sequence[float] | Floats) -> dict[str, float | int]:
    """Number of rows, median and 90th percentile of absolute errors, and the mean error."""
    if not len(errors):
        return {"rows": 0, "median": 0.0, "p90": 0.0, "bias": 0.0}
    off = np.abs(errors)
    return {
        "rows": len(off),
        "median": float(np.median(off)),
        "p90": float(np.quantile(off, 0.9)),
        "bias": float(np.mean(errors)),
    }


def predicted_times(cases: Sequence[Case], *, simulated: bool = True) -> Floats:
    """The step of every run [s], pipelines simulated, or by their closed forms."""
    times = np.empty(len(cases))
    for numbers, step in _steps(cases, simulated=simulated):
        times[numbers] = np.broadcast_to(step.time, len(numbers))
    return times


def predictions(cases: Sequence[Case]) -> list[Predicted]:
    """Step and memory of every run."""
    found: list[Predicted | None] = [None] * len(cases)
    for numbers, step in _steps(cases):
        count = len(numbers)
        times = np.broadcast_to(step.time, count)
        parts = {
            "compute": step.compute, "bubble": step.bubble, "optimizer": step.optimizer, **step.exposed,
        }  # fmt: skip
        columns = {name: np.broadcast_to(np.asarray(part), count) for name, part in parts.items()}
        for place, number in enumerate(numbers):
            terms = {name: float(column[place]) for name, column in columns.items()}
            found[number] = Predicted(float(times[place]), terms, _memory(cases[number]))
    return [each for each in found if each is not None]


def _steps(cases: Sequence[Case], *, simulated: bool = True) -> list[tuple[list[int], StepTime]]:
    """Runs of one model, job and cluster, which are one table, and their steps."""
    groups = defaultdict(list)
    for number, case in enumerate(cases):
        groups[case.model, case.job, case.cluster].append(number)
    jobs = [(*key, [cases[number].layout for number in numbers]) for key, numbers in groups.items()]
    if simulated:
        steps = simulated_steps(jobs)
    else:
        steps = [
            step_time(model, job, cluster, table_of(layouts, model.layers))
            for model, job, cluster, layouts in jobs
        ]
    return list(zip(groups.values(), steps, strict=True))


def _memory(case: Case) -> Memory | None:
    if case.row["completeness"] != "A" and measured_memory(case.row) is None:
        return None
    known, _ = program_of_row(case.row)
    options = options_of_row(case.row, case.model)
    model, layout = with_all_chunks(case.row, case.model, case.layout)
    return memory_of(model, case.job, layout, known, options, recomputed_modules(case.row))


# The document


def accuracy(
    path: Path, models: Path | None, gpus: Path | None, by: Sequence[str], *, fitted: bool = True
) -> dict[str, Any]:
    """The document of ``shardwright accuracy``; models.csv and gpus.csv beside the runs unless given.

    Raises: JobError: a table cannot be read, or nothing is grouped so.
    """
    for name in by:
        if name not in GROUPS:
            raise JobError(f"--by={name!r} is unknown{nearest(name, list(GROUPS))}")
    models = models or path.parent / "models.csv"
    beside = path.parent / "gpus.csv"
    gpus = gpus or (beside if beside.exists() else None)
    runs = read_runs(path, models, gpus, fitted=fitted)
    predicted = predictions(runs.cases)
    rows = [*_step_rows(runs.cases, predicted), *_memory_rows(runs.cases, predicted)]
    timed = [n for n, case in enumerate(runs.cases) if _step_time(case) is not None]
    measured = [_step_time(runs.cases[n]) or 0.0 for n in timed]
    guesses = [predicted[n].time for n in timed]
    cases = [runs.cases[n] for n in timed]
    errors = np.log(np.array(guesses) / np.array(measured)) if timed else np.empty(0)
    return {
        "step_time": errors_of(errors),
        "memory": _by_kind(runs.cases, predicted),
        "fits": _fits(runs.cases, predicted),
        "predicted_complete": {"rows": runs.complete_predicted, "of": runs.complete},
        "unpredicted": dict(runs.unpredicted),
        "excluded": runs.excluded,
        "assumed": dict(Counter(text for case in runs.cases for text in case.assumed).most_common()),
        "units": _units(runs),
        "sweeps": _sweeps(cases, measured, guesses),
        "groups": [
            {"by": name, "name": group, **errors_of(errors[numbers])}
            for name in by
            for group, numbers in _grouped(cases, GROUPS[name])
        ],
        "worst": _worst(cases, errors, [predicted[n] for n in timed]),
        "rows": rows,
    }


def _step_time(case: Case) -> float | None:
    text = case.row["step_time_s_best"]
    return float(text) if text and case.row["outcome"] == "ok" else None


def _step_rows(cases: Sequence[Case], predicted: Sequence[Predicted]) -> list[dict[str, Any]]:
    return [
        _row(case, "step_time", _step_time(case), each.time)
        for case, each in zip(cases, predicted, strict=True)
        if _step_time(case) is not None
    ]


def _memory_rows(cases: Sequence[Case], predicted: Sequence[Predicted]) -> list[dict[str, Any]]:
    found = []
    for case, each in zip(cases, predicted, strict=True):
        measured = measured_memory(case.row)
        if measured is not None and each.memory is not None:
            found.append(_row(case, "memory", measured[1], each.memory.of_kind(measured[0])))
    return found


def _row(case: Case, quantity: str, measured: float | None, predicted: float) -> dict[str, Any]:
    return {"run_id": case.run_id, "quantity": quantity, "measured": measured, "predicted": predicted}


def _by_kind(cases: Sequence[Case], predicted: Sequence[Predicted]) -> dict[str, Any]:
    errors = defaultdict(list)
    for case, each in zip(cases, predicted, strict=True):
        measured = measured_memory(case.row)
        if measured is not None and each.memory is not None:
            kind, bytes_held = measured
            errors[kind].append(float(np.log(each.memory.of_kind(kind) / bytes_held)))
    return {kind: errors_of(found) for kind, found in sorted(errors.items())}


def _fits(cases: Sequence[Case], predicted: Sequence[Predicted]) -> dict[str, Any]:
    """Rows with the whole layout: of those that ran how many are called too large, and of those that ran out
    of memory how many are called fitting."""
    ran, out, too_large, fitting = 0, 0, [], []
    for case, each in zip(cases, predicted, strict=True):
        if case.row["completeness"] != "A" or each.memory is None:
            continue
        fits = each.memory.device <= case.cluster.device.memory
        if case.row["outcome"] == "OOM":
            out += 1
            fitting += [case.run_id] * fits
        else:
            ran += 1
            too_large += [case.run_id] * (not fits)
    return {
        "ran": ran, "called_too_large": too_large, "out_of_memory": out, "called_fitting": fitting,
    }  # fmt: skip


def _units(runs: Runs) -> list[dict[str, Any]]:
    """Unit and kind of memory that each source states."""
    count: Counter[tuple[str, str, str]] = Counter()
    for case in runs.cases:
        measured = measured_memory(case.row)
        if measured is not None:
            count[case.row["source_id"], case.row["peak_mem_unit"], measured[0]] += 1
    return [
        {"source": source, "unit": unit, "kind": kind, "rows": rows}
        for (source, unit, kind), rows in sorted(count.items())
    ]


def _sweeps(cases: Sequence[Case], measured: Sequence[float], guesses: Sequence[float]) -> dict[str, Any]:
    found = sweeps_of(cases, measured, guesses)
    regrets, taus = [sweep.regret for sweep in found], [sweep.tau for sweep in found]
    return {
        "count": len(found),
        "mean_regret": float(np.mean(regrets)) if found else 0.0,
        "worst_regret": max(regrets, default=0.0),
        "mean_tau": float(np.mean(taus)) if found else 0.0,
        "groups": [
            {"name": sweep.name, "layouts": len(sweep.measured), "regret": sweep.regret, "tau": sweep.tau}
            for sweep in found
        ],
    }


def _grouped(cases: Sequence[Case], key: Callable[[Case], str]) -> list[tuple[str, list[int]]]:
    groups = defaultdict(list)
    for number, case in enumerate(cases):
        groups[key(case)].append(number)
    return sorted(groups.items())


def _worst(cases: Sequence[Case], errors: Floats, predicted: Sequence[Predicted]) -> list[dict[str, Any]]:
    """Rows farthest off, each with the largest term of its prediction."""
    found = []
    for number in np.argsort(-np.abs(errors))[:WORST_ROWS].tolist():
        terms = predicted[number].terms
        name = max(terms, key=lambda term: terms[term])
        found.append(
            {
                "run_id": cases[number].run_id,
                "layout": cases[number].layout.label,
                "error": float(errors[number]),
                "term": name,
                "share": terms[name] / predicted[number].time,
            }
        )
    return found
