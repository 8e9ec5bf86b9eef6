"""Fit device constants and programs' differences to published runs, and say how good they are on other runs.

    python scripts/fit_devices.py tests/check/published_runs/runs.csv [--write] [--folds]

Constants are multiples of what data sheets and published kernels say, each with a prior: a device's is what
all devices share times its own. The objective is a Huber loss of ln(predicted / measured) with these priors,
minimised by Gauss-Newton steps on the planner's own step time; repeated measures of a configuration share
one weight. ``--folds`` refits in each of five folds by config_id and without each source, and predicts the
rows left out. ``--write`` puts the constants into data/devices and data/programs, with date and residuals.
Nothing is fitted to the exclusions of data/excluded_runs.toml, nor to vtrain_multi.csv.
"""

import argparse
import hashlib
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tomli_w

from shardwright.check.accuracy import errors_of, predicted_times
from shardwright.check.runs_case import Case
from shardwright.check.runs_file import read_runs
from shardwright.check.runs_program import options_of_row, program_of_row
from shardwright.check.sweeps import sweeps_of
from shardwright.cluster import DEVICES, Device
from shardwright.description import AS_TEXT
from shardwright.plan.uncertainty import RESIDUALS
from shardwright.program import PROGRAMS, KnownProgram, Program

Key = tuple[str, ...]
Theta = Mapping[Key, float]


class Prior(NamedTuple):
    """Spread of the logarithm of a constant over its a-priori value: of what all share, and of each."""

    shared: float
    own: float


DEVICE_CONSTANTS: Mapping[str, Prior] = {
    "matmul_efficiency": Prior(0.10, 0.06),
    "gemm_fill": Prior(0.7, 0.3),
    "fp8_factor": Prior(0.08, 0.06),
    "attention_efficiency": Prior(0.25, 0.12),
    "attention_backward": Prior(0.2, 0.1),
    "memory_efficiency": Prior(0.04, 0.04),
    "launch": Prior(0.5, 0.3),
    "overlap": Prior(0.7, 0.3),
    "intra": Prior(0.2, 0.1),
    "inter": Prior(0.25, 0.15),
}
"""Ten of a device. ``overlap`` is fitted by what it costs, 1 / overlap - 1; streams measure memory well, so
that its prior is narrow."""

PROGRAM_CONSTANTS: Mapping[str, float] = {
    "attention_rate": 0.2, "newer_rate": 0.3, "light_traffic": 0.3, "score_traffic": 0.4, "casts": 0.6,
    "expert_launches": 0.7, "tp_exposed": 0.4, "data_hidden": 0.7, "stage_hidden": 0.7, "data_bandwidth": 1.5,
    "narrow_rate": 0.25, "launches": 0.5, "ep_hidden": 0.7, "host_factor": 0.3, "chunk_wait": 0.5,
}  # fmt: skip
"""Differences of programs. Shares that hide are fitted by what does not, 1 - share."""

OF_KERNELS = ("newer_rate",)
ALIKE = 0.8
"""Constants of a kernel that several programs use, and the part of their variance that these share."""

CARD = 0.1
"""Part of the variance of a device's own constants that cards of one chip do not share."""

HIDDEN = ("data_hidden", "stage_hidden", "ep_hidden")
TIMES = ("chunk_wait",)
SHARES = ("tp_exposed", "data_bandwidth")
NOISE = 0.06
HUBER = 1.0
LARGEST_STEP = 0.4
DIFFERENCE = 0.05
LEAST_HIDDEN = 0.05
FOLDS = 5
FRESH = (0, 3)
MANY_LEFT_OUT = 60


# Constants and the runs they touch


def program_keys(case: Case) -> list[Key]:
    """Fitted differences of the program of a run: a word of its options that sets one has its own."""
    known, _ = program_of_row(case.row)
    options = options_of_row(case.row, case.model)
    set_by = {name: word for word, change in known.variants.items() if word in options for name in change}
    layout, program = case.layout, case.job.program
    matters = {
        "attention_rate": program.attention == "fused",
        "newer_rate": program.attention == "fused"
        and program.newer_rate != 1
        and case.cluster.device.fp8 > 0,
        "score_traffic": program.attention == "scores",
        "light_traffic": True,
        "casts": case.job.precision == "fp8",
        "narrow_rate": case.job.precision == "fp8" and "narrow_rate" in set_by,
        "expert_launches": case.model.moe is not None and program.expert_launches > 0,
        "host_factor": case.model.moe is not None and program.host_factor > 1,
        "chunk_wait": layout.pp > 1 and program.chunk_wait > 0,
        "tp_exposed": layout.tp > 1 and program.tp_exposed < 1,
        "data_hidden": layout.pp == 1 and layout.dp * layout.cp > 1 and program.data_hidden > 0,
        "stage_hidden": layout.pp > 1 and layout.dp * layout.cp > 1 and program.stage_hidden > 0,
        "data_bandwidth": program.data_bandwidth < 1,
        "launches": "launches" in set_by and program.launches > 0,
        "ep_hidden": layout.ep > 1 and program.ep_hidden > 0,
    }
    return [
        ("variant", known.name, set_by[name], name) if name in set_by else ("program", known.name, name)
        for name, there in matters.items()
        if there
    ]


def keys_of(case: Case) -> list[Key]:
    """Constants on which a run's prediction depends."""
    device = case.cluster.device
    names = [name for name in DEVICE_CONSTANTS if name != "fp8_factor" or case.job.precision == "fp8"]
    return [*(("device", device.name, name) for name in names), *program_keys(case)]


def changed_device(device: Device, name: str, factor: float) -> Device:
    """The device with one constant times ``factor``, within its bounds."""
    if name in ("intra", "inter"):
        link = getattr(device, f"{name}_link")
        rates = {"bandwidth": link.bandwidth * factor, "switch_bandwidth": link.switch_bandwidth * factor}
        return device.model_copy(update={f"{name}_link": link.model_copy(update=rates)})
    if name == "overlap":
        return device.model_copy(update={name: 1 / (1 + (1 / device.overlap - 1) * factor)})
    value = getattr(device, name) * factor
    if name in ("matmul_efficiency", "memory_efficiency", "attention_efficiency"):
        value = min(value, 0.98)
    return device.model_copy(update={name: value})


def changed_program(program: Program, name: str, factor: float) -> Program:
    """The program with one difference times ``factor``, within its bounds."""
    value = getattr(program, name)
    if name in HIDDEN:
        value = 1 - min(max(1 - value, LEAST_HIDDEN) * factor, 1.0)
    else:
        value = min(value * factor, 1.0) if name in SHARES else value * factor
        value = max(value, 1.0) if name == "host_factor" else value
    return program.model_copy(update={name: value})


def changed(case: Case, keys: Sequence[Key], theta: Theta) -> Case:
    """A run with constants of ``theta``, logarithms of factors."""
    device, program = case.cluster.device, case.job.program
    for key in keys:
        factor = float(np.exp(theta.get(key, 0.0)))
        if key[0] == "device":
            device = changed_device(device, key[-1], factor)
        else:
            program = changed_program(program, key[-1], factor)
    cluster = case.cluster.model_copy(update={"device": device})
    return case._replace(cluster=cluster, job=case.job.model_copy(update={"program": program}))


class Data(NamedTuple):
    """Runs to fit, logarithms of their step times [s], the constants that each depends on, and weights."""

    cases: list[Case]
    logs: np.ndarray
    keys: list[list[Key]]
    weights: np.ndarray

    @classmethod
    def of(cls, cases: list[Case]) -> "Data":
        """Of runs with a step time; repeats of a configuration share the weight of the root of their
        count."""
        repeats = Counter(case.row["config_id"] for case in cases)
        weights = np.array([repeats[case.row["config_id"]] ** -0.5 for case in cases])
        logs = np.log([float(case.row["step_time_s_best"]) for case in cases])
        return cls(cases, logs, [keys_of(case) for case in cases], weights)

    def some(self, rows: np.ndarray) -> "Data":
        """Some rows."""
        index = rows.tolist()
        return Data(
            [self.cases[n] for n in index], self.logs[rows], [self.keys[n] for n in index], self.weights[rows]
        )


def predict(data: Data, theta: Theta, *, simulated: bool = True) -> np.ndarray:
    """Logarithms of the predicted step times, pipelines simulated or by closed forms."""
    made: dict[object, Case] = {}
    cases = []
    for case, keys in zip(data.cases, data.keys, strict=True):
        sign = (case.cluster, case.job, tuple(keys))
        if sign not in made:
            made[sign] = changed(case, keys, theta)
        cases.append(case._replace(cluster=made[sign].cluster, job=made[sign].job))
    return np.log(predicted_times(cases, simulated=simulated))


# The fit


def chip(key: Key) -> str:
    """Of a device's name: what is before memory, form and machine."""
    return key[1].split("-")[0]


def precision_matrix(names: Sequence[Key]) -> np.ndarray:
    """Inverse of the priors' covariance: constants of devices share a part."""
    covariance = np.zeros((len(names), len(names)))
    for row, one in enumerate(names):
        if one[0] != "device":
            spread = PROGRAM_CONSTANTS[one[-1]]
            for column, other in enumerate(names):
                alike = one[-1] in OF_KERNELS and other[0] == one[0] == "program" and other[-1] == one[-1]
                covariance[row, column] = spread**2 * (1.0 if row == column else ALIKE * alike)
            continue
        prior = DEVICE_CONSTANTS[one[-1]]
        for column, other in enumerate(names):
            if other[0] == "device" and other[-1] == one[-1]:
                own = prior.own**2 * (1 - CARD) if chip(one) == chip(other) else 0.0
                covariance[row, column] = prior.shared**2 + own + (row == column) * prior.own**2 * CARD
    return np.linalg.inv(covariance)


def slopes(data: Data, theta: Theta, names: Sequence[Key]) -> np.ndarray:
    """Derivatives of the predictions, by differences; constants that touch no run in common move together."""
    base = predict(data, theta, simulated=False)
    together = defaultdict(list)
    for column, key in enumerate(names):
        together[key[0] if key[0] == "device" else "program", key[-1]].append(column)
    found = np.zeros((len(data.cases), len(names)))
    touched = [set(keys) for keys in data.keys]
    for columns in together.values():
        moved = {**theta, **{names[c]: theta.get(names[c], 0.0) + DIFFERENCE for c in columns}}
        rows = np.array([n for n, keys in enumerate(touched) if any(names[c] in keys for c in columns)])
        slope = (predict(data.some(rows), moved, simulated=False) - base[rows]) / DIFFERENCE
        for row, value in zip(rows.tolist(), slope, strict=True):
            for column in columns:
                if names[column] in touched[row]:
                    found[row, column] = value
    return found


def step(
    slope: np.ndarray, residual: np.ndarray, weights: np.ndarray, prior: np.ndarray, start: np.ndarray
) -> np.ndarray:
    """Minimum of the Huber loss of the linearised predictions with the priors, from ``start``."""
    theta = start
    for _ in range(50):
        off = np.abs(residual - slope @ (theta - start)) / NOISE
        robust = weights * np.where(off <= HUBER, 1.0, HUBER / np.maximum(off, 1e-9)) / NOISE**2
        normal = (slope.T * robust) @ slope + prior
        new = np.linalg.solve(normal, (slope.T * robust) @ (residual + slope @ start))
        if np.abs(new - theta).max() < 1e-6:
            break
        theta = new
    return start + np.clip(theta - start, -LARGEST_STEP, LARGEST_STEP)


def loss(data: Data, base: np.ndarray, theta: np.ndarray, prior: np.ndarray) -> float:
    """What is minimised."""
    off = np.abs(data.logs - base) / NOISE
    huber = np.where(off <= HUBER, 0.5 * off**2, HUBER * (off - 0.5 * HUBER))
    return float((data.weights * huber).sum() + 0.5 * theta @ prior @ theta)


class Fitted(NamedTuple):
    """Constants, the slopes near them, and predictions of the runs they were fitted to."""

    names: list[Key]
    theta: dict[Key, float]
    slope: np.ndarray
    base: np.ndarray


def fit(
    data: Data,
    start: Theta,
    rounds: int,
    fresh: Sequence[int],
) -> Fitted:
    """Gauss-Newton steps, the best kept; slopes anew in the rounds ``fresh``."""
    names = sorted({key for keys in data.keys for key in keys})
    prior = precision_matrix(names)
    theta = np.array([start.get(key, 0.0) for key in names])
    best: tuple[float, np.ndarray, np.ndarray] | None = None
    slope = np.empty(0)
    for number in range(rounds + 1):
        at = dict(zip(names, theta.tolist(), strict=True))
        base = predict(data, at)
        now = loss(data, base, theta, prior)
        if best is None or now < best[0]:
            best = (now, theta, base)
        if number == rounds:
            break
        if number in fresh:
            slope = slopes(data, at, names)
        say(f"  round {number}: loss {now:.0f}, {line(base - data.logs)}")
        theta = step(slope, data.logs - base, data.weights, prior, theta)
    assert best is not None
    return Fitted(names, dict(zip(names, best[1].tolist(), strict=True)), slope, best[2])


def folds(data: Data, whole: Fitted) -> dict[str, np.ndarray]:
    """Errors of rows left out: of five folds by config_id, and of each source."""
    by_config = np.array(
        [int(hashlib.sha256(c.row["config_id"].encode()).hexdigest(), 16) % FOLDS for c in data.cases]
    )
    sources = np.array([case.row["source_id"] for case in data.cases])
    found = {}
    for name, labels in (("five folds", by_config), ("leave one source out", sources)):
        errors = np.zeros(len(data.cases))
        for label in sorted(set(labels.tolist())):
            out = labels == label
            errors[out] = left_out(data, whole, out)
            say(f"  {name}, without {label}: {line(errors[out])}")
        found[name] = errors
    return found


def left_out(data: Data, whole: Fitted, out: np.ndarray) -> np.ndarray:
    """Errors of the rows ``out``, the constants refitted to the others.

    The refit is the minimum over the other rows with the slopes near the whole fit's; where many rows are
    left out, once more from their predictions there.
    """
    train, test = data.some(np.flatnonzero(~out)), data.some(np.flatnonzero(out))
    prior, slope = precision_matrix(whole.names), whole.slope[~out]
    start = np.array([whole.theta[key] for key in whole.names])
    theta = step(slope, train.logs - whole.base[~out], train.weights, prior, start)
    if out.sum() >= MANY_LEFT_OUT:
        there = predict(train, dict(zip(whole.names, theta.tolist(), strict=True)))
        theta = step(slope, train.logs - there, train.weights, prior, theta)
    return predict(test, dict(zip(whole.names, theta.tolist(), strict=True))) - test.logs


# Results


def say(text: str) -> None:
    """To the terminal, as it comes."""
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


def line(errors: np.ndarray) -> str:
    """Errors in words."""
    found = errors_of(errors)
    return f"{found['rows']} rows, {found['median']:.1%} / {found['p90']:.1%}, mean {found['bias']:+.1%}"


def figures(data: Data, errors: np.ndarray) -> dict[str, object]:
    """Errors of all rows, of dense and MoE models and of each source, and sweeps."""
    moe = np.array([case.model.moe is not None for case in data.cases])
    measured, predicted = np.exp(data.logs), np.exp(data.logs + errors)
    found = sweeps_of(data.cases, measured, predicted)
    return {
        "all": errors_of(errors),
        "dense": errors_of(errors[~moe]),
        "moe": errors_of(errors[moe]),
        "sweeps": {
            "count": len(found),
            "mean_regret": float(np.mean([s.regret for s in found])),
            "worst_regret": max(s.regret for s in found),
            "mean_tau": float(np.mean([s.tau for s in found])),
        },
        "sources": {
            source: errors_of(errors[[case.row["source_id"] == source for case in data.cases]])
            for source in sorted({case.row["source_id"] for case in data.cases})
        },
    }


def write_devices(data: Data, whole: Fitted, errors: np.ndarray) -> None:
    """The group ``fit`` of the device files that runs were measured on."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    names = np.array([case.cluster.device.name for case in data.cases])
    for path in sorted(DEVICES.glob("*.toml")):
        device = Device.from_file(path)
        rows = names == device.name
        if not rows.any():
            continue
        plain = device
        for key, value in whole.theta.items():
            if key[:2] == ("device", device.name):
                device = changed_device(device, key[-1], float(np.exp(value)))
        found = errors_of(errors[rows])
        fitted: dict[str, object] = {
            "date": today, "rows": found["rows"], "median": round(float(found["median"]), 3),
            "p90": round(float(found["p90"]), 3),
        }  # fmt: skip
        for name in DEVICE_CONSTANTS:
            if name in ("intra", "inter"):
                before, after = getattr(plain, f"{name}_link"), getattr(device, f"{name}_link")
                fitted[name] = round(after.bandwidth / before.bandwidth, 3)
            elif name == "launch":
                fitted[name] = f"{device.launch * 1e6:.1f} us"
            else:
                fitted[name] = round(float(getattr(device, name)), 3)
        text = re.sub(r"\n\[fit\]\n(?:[^\[].*\n?)*", "\n", path.read_text(encoding="utf-8")).rstrip("\n")
        path.write_text(f"{text}\n\n[fit]\n{tomli_w.dumps(fitted)}", encoding="utf-8")


def as_written(program: Program, name: str) -> float | str:
    """A program's constant as its file has it."""
    value = float(getattr(program, name))
    return f"{value * 1e3:.2f} ms" if name in TIMES else round(value, 3)


def write_programs(whole: Fitted) -> None:
    """The groups ``fitted`` and ``fitted_variants`` of the files of programs."""
    for path in sorted(PROGRAMS.glob("*.toml")):
        known = KnownProgram.from_file(path)
        plain = known.program(fitted=False)
        fitted, variants = {}, defaultdict(dict)
        for key, value in sorted(whole.theta.items()):
            factor = float(np.exp(value))
            if key[:2] == ("program", known.name):
                fitted[key[-1]] = as_written(changed_program(plain, key[-1], factor), key[-1])
            elif key[:2] == ("variant", known.name):
                before = plain.model_copy(update=known.variants[key[2]])
                after = changed_program(before, key[-1], factor)
                variants[key[2]][key[-1]] = as_written(after, key[-1])
        values = known.model_dump(context=AS_TEXT) | {"fitted": fitted, "fitted_variants": dict(variants)}
        path.write_text(tomli_w.dumps(values, multiline_strings=True), encoding="utf-8")


def write_residuals(data: Data, known: np.ndarray, unknown: np.ndarray) -> None:
    """data/residuals.toml: quantiles of errors by program and device, of rows left out of the fit."""
    programs = np.array([case.job.program.name for case in data.cases])
    devices = np.array([case.cluster.device.name for case in data.cases])
    kinds = [("", "", np.ones(len(programs), bool), unknown)]
    kinds += [(name, "", programs == name, known) for name in sorted(set(programs.tolist()))]
    pairs = sorted(set(zip(programs.tolist(), devices.tolist(), strict=True)))
    kinds += [(one, other, (programs == one) & (devices == other), known) for one, other in pairs]
    rows = [
        {
            "program": program, "device": device, "rows": int(there.sum()),
            "low": round(float(np.quantile(errors[there], 0.1)), 3),
            "high": round(float(np.quantile(errors[there], 0.9)), 3),
        }
        for program, device, there, errors in kinds
    ]  # fmt: skip
    gaps = []
    for sweep in sweeps_of(data.cases, np.exp(data.logs), np.exp(data.logs + known)):
        errors = np.log(sweep.predicted / sweep.measured)
        gaps += np.abs(errors[:, None] - errors[None, :])[np.triu_indices(len(errors), 1)].tolist()
    document = {"within_job": round(float(np.quantile(gaps, 0.8)), 3), "kinds": rows}
    RESIDUALS.write_text(tomli_w.dumps(document), encoding="utf-8")


def main() -> None:
    """Fit, and write or report what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--write", action="store_true", help="constants into the package's data")
    parser.add_argument("--folds", action="store_true", help="refit in five folds and without each source")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    began = time.perf_counter()
    runs = read_runs(options.runs, options.runs.parent / "models.csv", None, fitted=False)
    timed = [c for c in runs.cases if c.row["step_time_s_best"] and c.row["outcome"] == "ok"]
    data = Data.of(timed)
    a_priori = predict(data, {}) - data.logs
    say(f"a priori: {line(a_priori)}")
    whole = fit(data, {}, options.rounds, FRESH)
    errors = whole.base - data.logs
    say(f"fitted, {len(whole.names)} constants: {line(errors)}")
    document = {"a priori": figures(data, a_priori), "fitted": figures(data, errors)}
    left = folds(data, whole) if options.folds else {}
    document |= {name: figures(data, found) for name, found in left.items()}
    if options.write and left:
        write_residuals(data, left["five folds"], left["leave one source out"])
    if options.write:
        write_devices(data, whole, errors)
        write_programs(whole)
    document["constants"] = len(whole.names)
    document["time"] = time.perf_counter() - began
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
