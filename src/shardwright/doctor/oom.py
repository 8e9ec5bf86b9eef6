"""Out of memory: which tensor asked, what fills the device, and what to change first with what effect."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.doctor.device_memory import (
    Sources,
    beyond_torch,
    fragmented_memory,
    not_fragmented,
    numbers_of_refusal,
    shared_device,
    state_text,
)
from shardwright.doctor.evidence import Evidence, OutOfMemory, Step
from shardwright.doctor.finding import Finding
from shardwright.doctor.memory_reports import report_findings
from shardwright.doctor.remedies import changes_of, ledger_findings
from shardwright.doctor.requests import cause_by_place, reading_by_size
from shardwright.doctor.setting import Setting
from shardwright.units import format_bytes

STATE_BYTES = 16
"""Of a parameter with Adam in mixed precision: ZeRO's 2 + 2 + 12, FSDP2's 4 + 4 + 8."""

LITTLE_STATE = 0.05

FULL = 0.92
"""Share of a device in use at which the next longer batch may not fit."""


def oom_findings(evidence: Evidence) -> list[Finding]:
    """What the evidence says of memory."""
    setting = evidence.setting
    found: list[Finding] = []
    for alike in _alike(evidence.of(OutOfMemory)):
        found += _of_refusal(evidence, alike, setting)
    found += report_findings(evidence, setting)
    found += _growing(evidence)
    if not evidence.of(OutOfMemory):
        found += ledger_findings(evidence)
    return found


def _alike(refusals: Sequence[OutOfMemory]) -> list[list[OutOfMemory]]:
    """Refusals that are the same on several ranks together: one message may be printed more than once."""
    groups: dict[tuple[object, ...], list[OutOfMemory]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.where, refusal.requested, refusal.capacity), []).append(refusal)
    return list(groups.values())


def _of_refusal(
    evidence: Evidence, alike: Sequence[OutOfMemory], setting: Setting | None
) -> Iterator[Finding]:
    refusal = max(alike, key=lambda each: len(each.frames))
    ranks = tuple(sorted({each.rank for each in alike if each.rank is not None}))
    sources = tuple(each.source for each in alike)
    if refusal.where == "host":
        size = "" if refusal.requested is None else f" for {format_bytes(refusal.requested)}"
        yield Finding("host_memory", "certain", f"the host has no memory left{size}", ranks, sources)
        return
    if refusal.where == "nccl":
        size = "" if refusal.requested is None else f" of {format_bytes(refusal.requested)}"
        device = "the device" if refusal.device is None else f"device {refusal.device} of its host"
        text = f"NCCL found no room for a buffer{size} on {device}: what torch's allocator holds left it none"
        yield Finding("non_torch_memory", "likely", text, ranks, sources)
        return
    yield from shared_device(refusal, ranks, sources)
    yield from beyond_torch(refusal, ranks, sources)
    fragmented = list(fragmented_memory(refusal, ranks, sources))
    yield from fragmented
    asked = _what_asked(evidence, refusal, ranks, sources, setting)
    filling = list(_what_fills(refusal, ranks, sources, setting))
    if asked.certainty == "cannot_tell" and filling:
        yield from filling
    elif asked.certainty == "cannot_tell" and fragmented:
        return
    elif filling and filling[0].cause == "activations":
        text = f"{asked.summary}; {filling[0].summary}"
        yield replace(asked, summary=text, numbers={**filling[0].numbers, **asked.numbers})
        yield from filling[1:]
    else:
        yield asked
        yield from filling


def _what_asked(
    evidence: Evidence,
    refusal: OutOfMemory,
    ranks: tuple[int, ...],
    sources: Sources,
    setting: Setting | None,
) -> Finding:
    """The tensor behind the request."""
    model = evidence.model
    text = state_text(refusal) + not_fragmented(refusal)
    changes = changes_of(setting, refusal.capacity)
    numbers = numbers_of_refusal(refusal)
    words = " ".join([*refusal.frames, refusal.source.text])
    if refusal.capacity and refusal.requested and refusal.requested > refusal.capacity and model is None:
        return Finding("larger_than_device", "certain", text, ranks, sources, changes, numbers=numbers)
    if model is not None and refusal.requested is not None:
        found = reading_by_size(model, refusal, setting, words)
        if found is not None:
            cause, sure, reading, more = found
            return Finding(cause, sure, f"{text}: {reading}", ranks, sources, changes, numbers=numbers | more)
    place = cause_by_place(refusal, words)
    frame = f", at {refusal.frames[0]}" if refusal.frames else ""
    if place is not None:
        return Finding(place, "likely", f"{text}{frame}", ranks, sources, changes, numbers=numbers)
    return Finding(
        "memory_unknown", "cannot_tell", f"{text}{frame}", ranks, sources, changes, numbers=numbers
    )


def _what_fills(
    refusal: OutOfMemory,
    ranks: tuple[int, ...],
    sources: Sources,
    setting: Setting | None,
) -> Iterator[Finding]:
    """State or activations, where the model and its sharding are known."""
    count = setting.count if setting is not None else None
    if setting is None or count is None:
        return
    sharding = setting.sharding or 1
    state = count * STATE_BYTES / (sharding * (setting.tp or 1) * (setting.pp or 1))
    held, capacity = refusal.allocated, refusal.capacity
    numbers: dict[str, object] = {"state": round(state), "sharding": sharding}
    if capacity is not None and state > 0.9 * capacity:
        yield Finding(
            "model_state",
            "certain" if state > capacity else "likely",
            f"parameters, gradients and Adam's state are {format_bytes(state)} a rank ({count:,.0f} x "
            f"{STATE_BYTES} B / "
            f"{round(count * STATE_BYTES / state)}), the device has {format_bytes(capacity)}",
            ranks,
            sources,
            changes_of(setting, refusal.capacity),
            numbers=numbers,
        )
    elif held is not None and held - state > 0.5 * held:
        share = state / held
        yield Finding(
            "activations",
            "likely",
            f"of {format_bytes(held)} allocated about {format_bytes(state)} are state ({STATE_BYTES} "
            "B a parameter in "
            f"{sharding} shards), {format_bytes(held - state)} are activations and buffers",
            ranks,
            sources,
            changes_of(setting, refusal.capacity),
            numbers=numbers | {"activations": round(held - state), "state_share": share},
        )
        if share < LITTLE_STATE:
            yield Finding(
                "sharding_no_help",
                "likely",
                f"state is {share:.1%} of what is held: sharding it cannot help",
                ranks,
                sources,
                numbers=numbers,
            )


def _growing(evidence: Evidence) -> Iterator[Finding]:
    """Memory that grows after the first step towards the capacity."""
    steps = [step for step in evidence.of(Step) if "memory" in step.values and step.step is not None]
    if len(steps) < 2 or evidence.of(OutOfMemory):
        return
    last = max(steps, key=lambda step: step.values["memory"])
    first = last
    for step in reversed(steps[: steps.index(last)]):  # back to where a log begins anew
        if step.source.file == last.source.file and (step.step or 0) > (first.step or 0):
            break
        if step.source.file == last.source.file and step.rank == last.rank:
            first = step
    share = last.values.get("memory_share")
    if share is None or share < FULL:
        return
    grown = last.values["memory"] - first.values["memory"]
    words = (
        f" ({format_bytes(grown)} more than at step {first.step})"
        if grown > 0.02 * last.values["memory"]
        else ""
    )
    yield Finding(
        "tight_memory",
        "likely",
        f"{format_bytes(last.values['memory'])} in use at step {last.step}, {share:.1%} of the device{words}",
        (),
        (first.source, last.source),
        numbers={"first": first.values["memory"], "highest": last.values["memory"], "share": share},
    )
