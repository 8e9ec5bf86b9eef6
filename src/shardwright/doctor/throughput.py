"""Throughput of several runs side by side: by tokens, by devices, by bubble."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright.doctor.evidence import Evidence, Step
from shardwright.doctor.finding import Finding, Source
from shardwright.doctor.series import Series
from shardwright.units import format_time

FLAT = 0.05
"""Change of throughput that counts as none."""

SMALLER = 0.08
"""By how much a bubble must shrink to say something."""

GOOD_SCALING = 0.7


class Row(NamedTuple):
    """One run: its devices, pipeline, and tokens per second in all."""

    source: Source
    name: str
    gpus: float | None
    pp: float | None
    microbatches: float | None
    tokens_per_s: float | None
    step_time: float | None
    global_batch: float | None


def throughput_findings(evidence: Evidence, runs: Sequence[Series]) -> Iterator[Finding]:
    """What several runs say beside each other."""
    rows = (
        [*_rows_of_runs(runs), *_rows_of_table(evidence)] if len(runs) > 1 else list(_rows_of_table(evidence))
    )
    yield from _bubbles(rows)
    yield from _by_tokens(runs)
    yield from _scaling(rows)


def _rows_of_runs(runs: Sequence[Series]) -> Iterator[Row]:
    for series in runs:
        setting = series.setting
        time = series.median("step_time", 1)
        gpus = float(setting.world) if setting and setting.world else series.first("gpus")
        total = series.median("tokens_per_s", 1)
        each = series.median("tokens_per_s_per_gpu", 1)
        if total is None and each is not None and gpus:
            total = each * gpus
        if total is None and time and series.tokens:
            total = series.tokens / time
        yield Row(
            series.steps[0].source,
            series.name.rpartition("/")[2],
            gpus,
            float(setting.pp) if setting and setting.pp else series.first("pp"),
            float(setting.microbatches) if setting and setting.microbatches else series.first("microbatches"),
            total if total is not None else each,
            time,
            series.global_batch,
        )


def _rows_of_table(evidence: Evidence) -> Iterator[Row]:
    """Lines that name their own layout: one run a line."""
    for step in evidence.of(Step):
        values = step.values
        if step.step is not None or not ({"pp", "gpus"} & set(values)):
            continue
        yield Row(
            step.source,
            step.source.text.strip()[:60],
            values.get("gpus"),
            values.get("pp"),
            values.get("microbatches"),
            values.get("tokens_per_s", values.get("tokens_per_s_per_gpu", values.get("samples_per_s"))),
            values.get("step_time"),
            values.get("global_batch"),
        )


def bubble_of(row: Row) -> float | None:
    """Share of a step idle under 1F1B."""
    if not row.pp or not row.microbatches or row.pp <= 1:
        return None
    return (row.pp - 1) / (row.microbatches + row.pp - 1)


def _bubbles(rows: Sequence[Row]) -> Iterator[Finding]:
    """Whether throughput follows the bubble."""
    known = [(row, bubble) for row in rows if (bubble := bubble_of(row)) is not None and row.tokens_per_s]
    for large, more in known:
        for small, less in known:
            if large.pp != small.pp or more - less < SMALLER:
                continue
            gain = (small.tokens_per_s or 0) / (large.tokens_per_s or 1) - 1
            expected = (1 - less) / (1 - more) - 1
            text = (
                f"the bubble falls from {more:.1%} to {less:.1%} and throughput changes by "
                f"{gain:+.1%} where {expected:+.0%} "
                "would follow"
            )
            numbers = {"bubbles": [more, less], "gain": gain, "expected_gain": expected}
            sources = (large.source, small.source)
            if gain < max(FLAT, 0.25 * expected):
                yield Finding("not_bubble_bound", "likely", text, (), sources, numbers=numbers)
                return
            if gain > 0.7 * expected:
                yield Finding("bubble_bound", "likely", text, (), sources, numbers=numbers)
                return


def _by_tokens(runs: Sequence[Series]) -> Iterator[Finding]:
    """Step times of two runs with different batches, compared as they should be."""
    if len(runs) != 2:
        return
    times = [series.median("step_time", 1) for series in runs]
    batches = [series.tokens or series.global_batch for series in runs]
    if None in times or None in batches or batches[0] == batches[1]:
        return
    rates = [(batch or 0.0) / (time or 1.0) for batch, time in zip(batches, times, strict=True)]
    unit = "tokens" if all(series.tokens for series in runs) else "sequences"
    names = [series.name.rpartition("/")[2] for series in runs]
    fast = 0 if rates[0] > rates[1] else 1
    yield Finding(
        "compare_by_tokens",
        "certain",
        f"{names[0]}: {format_time(times[0] or 0)} a step of {batches[0]:,.0f} {unit}, "
        f"{rates[0]:,.0f} {unit}/s; {names[1]}: "
        f"{format_time(times[1] or 0)} of {batches[1]:,.0f}, {rates[1]:,.0f}: {names[fast]} is "
        f"{rates[fast] / rates[1 - fast]:.2f} times "
        "as fast",
        (),
        tuple(series.steps[0].source for series in runs),
        numbers={"rates": rates, "step_times": times, "ratio": rates[fast] / rates[1 - fast]},
    )


def _scaling(rows: Sequence[Row]) -> Iterator[Finding]:
    """Speed-up from fewer to more devices."""
    known = sorted(
        (row for row in rows if row.gpus and (row.tokens_per_s or row.step_time)),
        key=lambda row: row.gpus or 0,
    )
    if len(known) < 2 or known[0].gpus == known[-1].gpus or any(row.pp and row.pp > 1 for row in known):
        return
    few, many = known[0], known[-1]
    devices = (many.gpus or 1) / (few.gpus or 1)
    if few.step_time and many.step_time and not (few.tokens_per_s and many.tokens_per_s):
        speedup = devices * few.step_time / many.step_time  # the same batch on every device
    else:
        speedup = (many.tokens_per_s or 0) / (few.tokens_per_s or 1)
    if speedup < GOOD_SCALING * devices:
        yield Finding(
            "poor_scaling",
            "likely",
            f"{many.gpus:g} devices are {speedup:.2f} times as fast as {few.gpus:g}: "
            f"{speedup / devices:.0%} of their share",
            (),
            (few.source, many.source),
            numbers={"speedup": speedup, "devices": devices, "efficiency": speedup / devices},
        )
