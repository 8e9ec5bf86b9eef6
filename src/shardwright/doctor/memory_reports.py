"""Reports of memory beside what a setting should hold: copies that were not sharded, memory beyond torch."""

from collections.abc import Iterator, Sequence

from shardwright.doctor.evidence import Evidence, MemoryReport, OutOfMemory
from shardwright.doctor.finding import Finding
from shardwright.doctor.placement_checks import stage_of
from shardwright.doctor.rank_lists import ranks_text
from shardwright.doctor.setting import Setting
from shardwright.units import GiB, MiB, format_bytes

NON_TORCH = 3 * GiB
UNEQUAL = 1.15
"""Ratio of two stages' peaks from which they are not the same."""

CONTEXT = 1.8 * GiB
"""What a process holds of a device beside its tensors, at most, when nothing is wrong."""


def report_findings(evidence: Evidence, setting: Setting | None) -> Iterator[Finding]:
    """What reports of memory say."""
    reports = evidence.of(MemoryReport)
    yield from _beyond_torch(reports)
    if setting is not None:
        yield from _by_stage(evidence, setting, reports)
    if setting is None or setting.count is None:
        return
    yield from _unsharded(reports, setting, setting.count)
    yield from _after_backward(reports, setting, setting.count)


def _beyond_torch(reports: list[MemoryReport]) -> Iterator[Finding]:
    reserved = [r for r in reports if r.reserved is not None]
    devices = [r for r in reports if r.device is not None]
    if not reserved or not devices:
        return
    inside = max(reserved, key=lambda r: r.reserved or 0)
    outside = max(devices, key=lambda r: r.device or 0)
    beyond = (outside.device or 0) - (inside.reserved or 0)
    if beyond > NON_TORCH:
        yield Finding(
            "non_torch_memory",
            "likely",
            f"the device has {format_bytes(outside.device or 0)} in use, torch has reserved "
            f"{format_bytes(inside.reserved or 0)}: {format_bytes(beyond)} are outside its allocator",
            () if outside.rank is None else (outside.rank,),
            (inside.source, outside.source),
            numbers={"non_torch": beyond, "device": outside.device, "reserved": inside.reserved},
        )


def _by_stage(evidence: Evidence, setting: Setting, reports: list[MemoryReport]) -> Iterator[Finding]:
    """Pipeline ranks that hold more than others: by what they report, or by who runs out of memory."""
    p = setting.pp or 1
    if p == 1:
        return
    peaks: dict[int, MemoryReport] = {}
    for report in reports:
        stage = None if report.rank is None or report.peak is None else stage_of(setting, report.rank)
        if stage is not None and (stage not in peaks or (report.peak or 0) > (peaks[stage].peak or 0)):
            peaks[stage] = report
    m = setting.microbatches or p
    if len(peaks) >= 2:
        heavy = max(peaks, key=lambda stage: peaks[stage].peak or 0)
        light = min(peaks, key=lambda stage: peaks[stage].peak or 0)
        most, least = peaks[heavy].peak or 0, peaks[light].peak or 0
        if most > UNEQUAL * least:
            yield _heavy(
                heavy,
                f"stage {heavy} holds {format_bytes(most)}, stage {light} {format_bytes(least)}",
                (peaks[heavy], peaks[light]),
                in_flight(heavy, p, m),
            )
        return
    out = [refusal for refusal in evidence.of(OutOfMemory) if refusal.rank is not None]
    stages = {stage_of(setting, refusal.rank or 0) for refusal in out}
    if (
        len(stages) == 1
        and None not in stages
        and (stage := stages.pop()) in (0, p - 1)
        and stage is not None
    ):
        ranks = ranks_text({refusal.rank for refusal in out if refusal.rank is not None})
        text = f"only {ranks} of stage {stage} of {p} ran out of memory"
        yield _heavy(stage, text, tuple(out), in_flight(stage, p, m))


def in_flight(stage: int, p: int, m: int) -> int:
    """Microbatches that a stage of 1F1B keeps at most. Source: Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2."""
    return min(m, p - stage)


def _heavy(stage: int, text: str, shown: Sequence[MemoryReport | OutOfMemory], kept: int) -> Finding:
    return Finding(
        "heaviest_stage",
        "likely",
        f"{text}; 1F1B keeps {kept} microbatches in flight there",
        (),
        tuple(each.source for each in shown),
        numbers={"stage": stage, "in_flight": kept},
    )


def _split(setting: Setting) -> bool:
    offloaded = setting.offload_parameters or setting.offload_optimizer
    return bool(offloaded or (setting.sharding or 1) > 1 or (setting.zero_stage or 0) >= 3)


def _unsharded(reports: list[MemoryReport], setting: Setting, count: float) -> Iterator[Finding]:
    """The whole model in 16 bits or fp32 on a rank that should hold a shard."""
    if not _split(setting):
        return
    early = [
        r for r in reports if any(word in r.moment.lower() for word in ("init", "load", "before", "nvidia"))
    ]
    for report in early:
        held = report.allocated or report.device
        if held is None:
            continue
        for wide in (2, 4):
            whole = wide * count
            if -0.02 * whole <= held - whole <= CONTEXT + 0.05 * whole and whole > 256 * MiB:
                yield Finding(
                    "unsharded_copy",
                    "likely",
                    f"{format_bytes(held)} are held at '{report.moment}': {wide} B x all {count:,.0f} "
                    "parameters = "
                    f"{format_bytes(whole)}, where a rank should hold a shard or nothing",
                    () if report.rank is None else (report.rank,),
                    (report.source, setting.source),
                    numbers={"held": held, "whole": round(whole)},
                )
                return


def _after_backward(reports: list[MemoryReport], setting: Setting, count: float) -> Iterator[Finding]:
    """Whole gradients or buffers left when the backward pass is through."""
    sharding = setting.sharding or 1
    if sharding == 1:
        return
    wide = setting.master_bytes or 4
    expected = 2 * wide * count / sharding
    for report in reports:
        if "backward" not in report.moment.lower() or report.allocated is None:
            continue
        left = report.allocated - expected
        if left > 0.25 * wide * count / sharding:
            yield Finding(
                "reduction_buffers",
                "likely",
                f"after the backward pass {format_bytes(report.allocated)} are held, shards of "
                "parameters and gradients "
                f"are {format_bytes(expected)}: {format_bytes(left)} are whole gradients or reduction "
                "buffers",
                () if report.rank is None else (report.rank,),
                (report.source,),
                numbers={"held": report.allocated, "expected": round(expected), "left": round(left)},
            )
            return
