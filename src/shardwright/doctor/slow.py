"""Slow: stragglers, exposed communication, input, bubbles, and MFU with the right peak."""

import statistics
from collections.abc import Iterator, Sequence

from shardwright.cluster import Device, device, device_names
from shardwright.doctor.evidence import Evidence, Message, Step
from shardwright.doctor.finding import Finding
from shardwright.doctor.planned import plan_of_setting
from shardwright.doctor.rank_lists import ranks_text
from shardwright.doctor.series import Series, series_of
from shardwright.doctor.throughput import throughput_findings
from shardwright.doctor.trace import Trace
from shardwright.plan.compute import model_flops_per_token
from shardwright.units import format_time

SLOWER = 1.15
"""Ratio of a rank's time to the others' from which it is a straggler."""

EXPOSED = 0.2
LOADING = 0.1
IDLE = 0.25
"""Shares of a trace's window that are worth a word."""

UNBALANCED = 2.0
"""Tokens of the fullest expert over the mean that cost more than routing is worth."""

FEW_STEPS = 10
"""Steps at the start that say nothing: compilation, warm-up."""

SAME_PEAK = 0.02
"""By how much an implied peak may miss a device's."""

FAR_BELOW = 0.5
"""Share of the predicted throughput below which something is broken rather than imprecise."""


def slow_findings(evidence: Evidence) -> list[Finding]:
    """What step times, throughput and traces say."""
    found: list[Finding] = []
    runs = series_of(evidence)
    found += _unequal_stages(evidence.of(Step)) or _stragglers(evidence.of(Step))
    found += _unbalanced_experts(evidence.of(Step))
    for series in runs:
        found += _peaks(evidence, series)
        found += _slowing(series)
        found += _waiting_for_data(series)
        found += _against_prediction(evidence, series)
    found += throughput_findings(evidence, runs)
    found += _retries(evidence)
    found += _traces(evidence.traces, evidence)
    return found


def _stragglers(steps: Sequence[Step]) -> Iterator[Finding]:
    """Ranks whose own time of a step is longer than the others'."""
    times: dict[int, list[float]] = {}
    first: dict[int, Step] = {}
    for step in steps:
        value = step.values.get("compute_time", step.values.get("step_time"))
        if step.rank is not None and value is not None:
            times.setdefault(step.rank, []).append(value)
            first.setdefault(step.rank, step)
    if len(times) < 3:
        return
    medians = {rank: statistics.median(values[1:] or values) for rank, values in times.items()}
    usual = statistics.median(medians.values())
    slow = sorted(rank for rank, value in medians.items() if value > SLOWER * usual)
    if slow and len(slow) < len(medians) / 2:
        worst = max(slow, key=lambda rank: medians[rank])
        yield Finding(
            "straggler",
            "likely",
            f"{ranks_text(set(slow))} take{'s' if len(slow) == 1 else ''} {format_time(medians[worst])} a "
            f"step where the others take {format_time(usual)} "
            f"({medians[worst] / usual:.2f} times)",
            tuple(slow),
            tuple(first[rank].source for rank in slow),
            numbers={"times": {str(rank): value for rank, value in sorted(medians.items())}},
        )


def _unequal_stages(steps: Sequence[Step]) -> list[Finding]:
    """Pipeline stages that take longer than others for a microbatch."""
    times: dict[int, list[float]] = {}
    for step in steps:
        value = step.values.get("compute_time", step.values.get("step_time"))
        if "stage" in step.values and value is not None:
            times.setdefault(int(step.values["stage"]), []).append(value)
    if len(times) < 2:
        return []
    medians = {stage: statistics.median(values) for stage, values in times.items()}
    slowest = max(medians, key=lambda stage: medians[stage])
    mean = statistics.fmean(medians.values())
    if medians[slowest] <= SLOWER * mean:
        return []
    source = next(step.source for step in steps if step.values.get("stage") == slowest)
    return [
        Finding(
            "unequal_stages",
            "certain",
            f"stage {slowest} takes {format_time(medians[slowest])} where stages take "
            f"{format_time(mean)} on average: the pipeline "
            f"goes at its pace, {1 - mean / medians[slowest]:.0%} of the others' time is lost",
            (),
            (source,),
            numbers={
                "stage": slowest,
                "times": {str(stage): value for stage, value in sorted(medians.items())},
            },
        )
    ]


def _unbalanced_experts(steps: Sequence[Step]) -> Iterator[Finding]:
    loads = [step.values["fullest_expert"] for step in steps if "fullest_expert" in step.values][FEW_STEPS:]
    if loads and (load := statistics.median(loads)) > UNBALANCED:
        source = next(step.source for step in reversed(steps) if "fullest_expert" in step.values)
        yield Finding(
            "experts_unbalanced",
            "certain",
            f"the fullest expert gets {load:.1f} times the mean of tokens, so do its rank's time and memory",
            (),
            (source,),
            numbers={"fullest_expert": load},
        )


def implied_peak(series: Series) -> float | None:
    """Peak that a log divides by [FLOP/s]: achieved over MFU."""
    for step in series.steps[1:] or series.steps:
        flops, share = step.values.get("flops_per_s"), step.values.get("mfu")
        if flops and share and 0 < share <= 1.5:
            return flops / share
    peaks = [step.values["peak_flops"] for step in series.steps if "peak_flops" in step.values]
    return peaks[0] if peaks else None


def _known_devices() -> list[Device]:
    found = {kind.name: kind for kind in (device(name) for name in device_names()) if kind.kind != "cpu"}
    return list(found.values())


def _peaks(evidence: Evidence, series: Series) -> Iterator[Finding]:
    """MFU against the dense peak of the device, from the log's own numbers or from tokens per second."""
    setting = series.setting or evidence.setting
    cluster = setting.cluster() if setting else None
    own = (
        cluster.device
        if cluster
        else (device(setting.device) if setting and setting.device in device_names() else None)
    )
    peak = implied_peak(series)
    if peak is not None:
        candidates = [own] if own is not None else _known_devices()
        sparse = [each for each in candidates if abs(peak / (2 * each.bf16) - 1) <= SAME_PEAK]
        dense = [each for each in candidates if abs(peak / each.bf16 - 1) <= SAME_PEAK]
        if sparse and not dense:
            yield _sparse(series, peak, sparse[0], certain=own is not None)
            return
    said = series.median("mfu", 1)
    model = (setting.model if setting else None) or evidence.model
    rate = series.median("tokens_per_s_per_gpu", 1)
    if said is None or own is None or model is None or rate is None or setting is None or not setting.seq:
        return
    said = said / 100 if said > 1.5 else said
    right = model_flops_per_token(model, setting.seq) * rate / own.bf16
    if 0.45 <= said / right <= 0.55:
        yield _sparse(series, 2 * own.bf16, own, certain=False)
    elif abs(said / right - 1) > 0.25:
        yield Finding(
            "mfu_convention",
            "likely",
            f"the log says MFU {said:.1%}; {rate:,.0f} tokens/s at "
            f"{model_flops_per_token(model, setting.seq) / 1e9:,.2f} GFLOP a "
            f"token (6 N + 12 L a d s) on a dense peak of {own.bf16 / 1e12:,.0f} TFLOP/s are {right:.1%}",
            (),
            (series.steps[-1].source,),
            numbers={"said": said, "computed": right},
        )


def _sparse(series: Series, peak: float, kind: Device, *, certain: bool) -> Finding:
    said = series.median("mfu", 1)
    true = f": {said:.1%} is {2 * said:.1%} of the dense peak" if said is not None and said <= 1 else ""
    return Finding(
        "sparse_peak",
        "certain" if certain else "likely",
        f"MFU is computed with a peak of {peak / 1e12:,.0f} TFLOP/s, the sparse one of {kind.name}; "
        "dense it is "
        f"{kind.bf16 / 1e12:,.0f}{true}",
        (),
        (series.steps[-1].source,),
        numbers={
            "peak": peak,
            "dense_peak": kind.bf16,
            "mfu": said,
            "mfu_dense": None if said is None else 2 * said,
        },
    )


def _slowing(series: Series) -> Iterator[Finding]:
    times = [step.values["step_time"] for step in series.steps if "step_time" in step.values][FEW_STEPS:]
    if len(times) < 4 * FEW_STEPS:
        return
    quarter = len(times) // 4
    early, late = statistics.median(times[:quarter]), statistics.median(times[-quarter:])
    if late > 1.3 * early:
        yield Finding(
            "slowing_down",
            "certain",
            f"steps take {format_time(late)} at the end where they took {format_time(early)} at the start",
            (),
            (series.steps[FEW_STEPS].source, series.steps[-1].source),
            numbers={"early": early, "late": late},
        )


def _waiting_for_data(series: Series) -> Iterator[Finding]:
    waits, times = series.median("data_time", 1), series.median("step_time", 1)
    if waits and times and waits > LOADING * times:
        yield Finding(
            "input_bound",
            "certain",
            f"{format_time(waits)} of {format_time(times)} a step are spent waiting for data "
            f"({waits / times:.0%})",
            (),
            (series.steps[-1].source,),
            numbers={"data_time": waits, "step_time": times},
        )


def _against_prediction(evidence: Evidence, series: Series) -> Iterator[Finding]:
    """Throughput far below what the layout should reach."""
    setting = series.setting or evidence.setting
    plan = plan_of_setting(setting) if setting is not None else None
    if plan is None or plan.cluster.device.kind == "cpu":
        return
    rate = series.median("tokens_per_s_per_gpu", 1)
    time = series.median("step_time", 1)
    if rate is None and time:
        rate = plan.job.tokens_per_step / time / plan.layout.ranks
    total = series.median("tokens_per_s", 1)
    if rate is None and total:
        rate = total / plan.layout.ranks
    if rate is None or rate <= 0:
        return
    expected = plan.prediction.tokens_per_s_per_gpu
    share = rate / expected
    if share >= FAR_BELOW:
        return
    nodes = plan.cluster.nodes
    yield Finding(
        "slow_network" if nodes > 1 else "slow_unknown",
        "likely" if nodes > 1 else "cannot_tell",
        f"{rate:,.0f} tokens/s a device, the plan [{plan.layout.label}] predicts {expected:,.0f} on "
        f"{nodes} nodes: "
        f"{share:.0%}" + ("; the first suspect is the transport between nodes" if nodes > 1 else ""),
        (),
        (series.steps[-1].source,),
        numbers={"measured": rate, "predicted": expected, "nodes": nodes},
    )


def _retries(evidence: Evidence) -> Iterator[Finding]:
    for message in evidence.of(Message):
        if message.what == "alloc_retries":
            yield Finding(
                "allocator_retries",
                "certain",
                f"the allocator gave its cache back {message.numbers.get('count', 'several')} times "
                "to find room",
                () if message.rank is None else (message.rank,),
                (message.source,),
            )
            return
    for step in evidence.of(Step):
        if step.values.get("alloc_retries", 0) > 0:
            yield Finding(
                "allocator_retries",
                "certain",
                f"{step.values['alloc_retries']:g} retries of the allocator by step {step.step}",
                () if step.rank is None else (step.rank,),
                (step.source,),
            )
            return


def _traces(traces: Sequence[Trace], evidence: Evidence) -> Iterator[Finding]:
    """What profiler traces show, of each rank and between them."""
    whole = [trace for trace in traces if trace.window > 0]
    if not whole:
        return
    yield from _late_rank(whole)
    lead = max(whole, key=lambda trace: trace.exposed / trace.window)
    if lead.exposed > EXPOSED * lead.window:
        by = sorted(lead.exposed_by.items(), key=lambda item: -item[1])[:3]
        yield Finding(
            "exposed_communication",
            "certain" if lead.on_device else "likely",
            f"{lead.exposed / lead.window:.0%} of the traced time is communication that nothing hides: "
            + ", ".join(f"{flow} {format_time(time)}" for flow, time in by),
            (),
            (lead.source,),
            numbers={"window": lead.window, "exposed": lead.exposed, "by": dict(by), "compute": lead.compute},
        )
    if lead.loading > LOADING * lead.window:
        yield Finding(
            "input_bound",
            "certain",
            f"{format_time(lead.loading)} of {format_time(lead.window)} are spent in the data loader",
            (),
            (lead.source,),
            numbers={"loading": lead.loading, "window": lead.window},
        )
    if lead.on_device and lead.idle > IDLE * lead.window:
        setting = evidence.setting
        bubble = _bubble(setting.pp if setting else None, setting.microbatches if setting else None)
        cause = "bubble_bound" if bubble and lead.idle / lead.window <= 1.3 * bubble else "launch_bound"
        yield Finding(
            cause,
            "likely",
            f"the device is idle {lead.idle / lead.window:.0%} of the traced time"
            + (f"; the pipeline's bubble should be {bubble:.0%}" if bubble else ""),
            (),
            (lead.source,),
            numbers={"idle_share": lead.idle / lead.window, "bubble_fraction": bubble},
        )
    if lead.frees > 2 * max(lead.steps, 1):
        yield Finding(
            "allocator_retries", "likely", f"{lead.frees} calls of cudaFree in the trace", (), (lead.source,)
        )


def _bubble(p: int | None, m: int | None) -> float | None:
    return (p - 1) / (m + p - 1) if p and m and p > 1 else None


def _late_rank(traces: Sequence[Trace]) -> Iterator[Finding]:
    """Of ranks in the same collectives the one that waits least comes last."""
    named = {trace.rank: trace for trace in traces if trace.rank is not None}
    if len(named) < 2:
        return
    waits = {rank: trace.communication for rank, trace in named.items()}
    late = min(waits, key=lambda rank: waits[rank])
    others = statistics.median(value for rank, value in waits.items() if rank != late)
    busy = {rank: trace.compute for rank, trace in named.items()}
    usual = statistics.median(value for rank, value in busy.items() if rank != late)
    window = named[late].window
    if others - waits[late] > 0.05 * window and others > 1.3 * waits[late] and busy[late] > 1.05 * usual:
        yield Finding(
            "straggler",
            "likely",
            f"rank {late} waits least in collectives ({format_time(waits[late])}, the others "
            f"{format_time(others)}) and computes "
            f"longest ({format_time(busy[late])} against {format_time(usual)}): the others wait for it",
            (late,),
            (named[late].source,),
            numbers={
                "communication": {str(r): v for r, v in waits.items()},
                "compute": {str(r): v for r, v in busy.items()},
            },
        )
