"""Hangs: who waits in which collective, for whom, and what broke first."""

import statistics
from collections.abc import Iterator, Sequence

from shardwright.doctor.call_words import call_text
from shardwright.doctor.evidence import (
    DumpSignal,
    Evidence,
    Failure,
    OutOfMemory,
    Silence,
    Step,
    Timeout,
    WatchdogStuck,
)
from shardwright.doctor.finding import Finding
from shardwright.doctor.first_cause import first_causes
from shardwright.doctor.groups import entry_text, groups_of
from shardwright.doctor.opcounts import opcount_findings
from shardwright.doctor.parted_calls import crossed_finding, parted_finding
from shardwright.doctor.peer_to_peer import peer_to_peer_findings
from shardwright.doctor.rank_lists import ranks_text
from shardwright.doctor.reports import report_findings
from shardwright.doctor.stuck_calls import findings_of_wait
from shardwright.doctor.waiting import chained, first_difference, waits_of

LEAST_SILENCE_S, MANY_STEPS = 60.0, 20
"""Seconds, and steps' worth of time, without a new step after which a run has stopped or hangs."""


def hang_findings(evidence: Evidence) -> list[Finding]:
    """What the evidence says of ranks that wait, the first cause first."""
    groups = groups_of(evidence)
    waits, _, pairs = chained(waits_of(groups))
    waiting = {record.rank for record in evidence.of(Timeout) if record.rank is not None}
    first = first_causes(evidence, waiting, [call_text(evidence, wait) for wait in waits])
    found = [*first, *report_findings(evidence)]
    if not first:
        for pair in pairs:
            found.append(crossed_finding(*pair))
        crossed = {wait.group.name for pair in pairs for wait in pair}
        parted = [d for group in groups if (d := first_difference(group)) is not None]
        if parted:
            found.append(parted_finding(min(parted, key=lambda d: d.seq)))
        for wait in waits if not parted else ():
            if wait.group.name not in crossed:
                found += findings_of_wait(evidence, wait)
        found += peer_to_peer_findings(evidence, groups)
        found += opcount_findings(evidence)
    named = {finding.cause for finding in found}
    if not any(finding.certainty != "cannot_tell" for finding in found):
        found += _stuck_watchdogs(evidence)
        found += _timeouts_elsewhere(evidence, named)
        found += _nameless_dumps(evidence)
        found += _silent_runs(evidence)
        found += _peers_lost(evidence) if not found else ()
    return _merged(found)


def _merged(found: Sequence[Finding]) -> list[Finding]:
    """Findings of one cause and the same ranks as one; "cannot tell" goes where something else can."""
    kept: dict[tuple[str, tuple[int, ...]], Finding] = {}
    sure = any(finding.certainty != "cannot_tell" for finding in found)
    for finding in found:
        key = finding.cause, finding.ranks
        if key not in kept and (finding.certainty != "cannot_tell" or not sure):
            kept[key] = finding
    return list(kept.values())


def _stuck_watchdogs(evidence: Evidence) -> Iterator[Finding]:
    stuck = evidence.of(WatchdogStuck)
    if not stuck or evidence.of(Timeout):
        return  # after a timeout the monitor's impatience is its consequence
    ranks = sorted({record.rank for record in stuck if record.rank is not None})
    waited = next((record.waited for record in stuck if record.waited), None)
    pending = next((record.pending for record in stuck if record.pending is not None), None)
    yield Finding(
        "watchdog_stuck",
        "likely",
        f"the watchdog thread of {ranks_text(set(ranks))} stood still"
        + (f" for {waited:,.0f} s" if waited else "")
        + (f" with {pending} collectives pending" if pending is not None else "")
        + ": this is no timeout of a collective; a call into CUDA or NCCL does not return, or a "
        "thread holds Python's lock in one",
        tuple(ranks),
        tuple(record.source for record in stuck),
        numbers={"waited": waited, "pending": pending},
    )


def _timeouts_elsewhere(evidence: Evidence, named: set[str]) -> Iterator[Finding]:
    """Ranks that were only told of a timeout."""
    told = [signal for signal in evidence.of(DumpSignal) if not signal.own]
    origins = sorted({signal.origin for signal in told if signal.origin is not None})
    if not told or evidence.of(OutOfMemory) or "skipped_collective" in named:
        return
    timed_out = {record.rank for record in evidence.of(Timeout)}
    if origins and set(origins) <= timed_out:
        return
    hearers = sorted({signal.rank for signal in told if signal.rank is not None})
    where = f"{ranks_text(set(origins))} had the timeout" if origins else "another rank had the timeout"
    yield Finding(
        "timeout_elsewhere",
        "cannot_tell",
        f"{where}; {ranks_text(set(hearers))} only {'were' if len(hearers) > 1 else 'was'} told to "
        "dump and may not even be in that process group: the "
        "lines of the rank that timed out are not among the files",
        (),
        tuple(signal.source for signal in told),
        (),
        tuple(f"the log of rank {rank}, from its first timeout line on" for rank in origins),
        {"origin_ranks": origins, "hearing_ranks": hearers},
    )


def _peers_lost(evidence: Evidence) -> Iterator[Finding]:
    """Ranks that say only that another went away."""
    echoes = [
        failure
        for failure in evidence.of(Failure)
        if failure.what in ("echo", "waited", "aborted", "terminated")
    ]
    if not echoes or evidence.of(OutOfMemory):
        return
    hearers = sorted({failure.rank for failure in echoes if failure.rank is not None})
    who = ranks_text(set(hearers)) if hearers else "a rank that is not named"
    yield Finding(
        "peer_lost",
        "cannot_tell",
        f"{who}: {echoes[0].detail[:160]}: another rank went away or did not come; which one and why "
        "the files do not say",
        (),
        tuple(failure.source for failure in echoes),
    )


def _silent_runs(evidence: Evidence) -> Iterator[Finding]:
    """Run folders without an end in which no step has been added for far longer than one takes."""
    for silence in evidence.of(Silence):
        steps = [s for s in evidence.of(Step) if s.source.file.startswith(silence.folder)]
        times = [s.values["step_time"] for s in steps if "step_time" in s.values]
        usual = statistics.median(times) if times else 0.0
        if not steps or silence.seconds < max(LEAST_SILENCE_S, MANY_STEPS * usual):
            continue
        last = max((s.step or 0 for s in steps), default=0)
        yield Finding(
            "run_stopped",
            "cannot_tell",
            f"no step since step {last}, {silence.seconds:,.0f} s ago, where one took {usual:,.2f} s, "
            "and no word of an end: "
            "the run hangs, or its processes are gone",
            (),
            (silence.source, steps[-1].source),
            numbers={"step": last, "silence": silence.seconds, "step_time": usual},
        )


def _nameless_dumps(evidence: Evidence) -> Iterator[Finding]:
    """Dumps that do not say whose they are, with calls that did not end."""
    for dump in evidence.dumps:
        pending = [entry for entry in dump.entries if not entry.done]
        if dump.rank is not None or not pending:
            continue
        yield Finding(
            "one_rank_visible",
            "cannot_tell",
            f"a rank that neither the dump nor its file's name tells waits in {pending[0].operation.text} "
            f"#{pending[0].seq}; whom it waits for one dump does not say",
            (),
            (dump.source._replace(text=entry_text(pending[0])),),
            (),
            ("the dumps of all ranks, each in a file whose name ends in its rank",),
            {"sequence": pending[0].seq, "operation": pending[0].operation.short},
        )
