"""What broke before the first rank timed out: a hang is mostly the echo of something else."""

from collections.abc import Sequence

from shardwright.doctor.crash_log import FAILURES, Weight
from shardwright.doctor.evidence import Evidence, Failure, OutOfMemory, Timeout
from shardwright.doctor.finding import Certainty, Finding
from shardwright.doctor.flight import caller
from shardwright.doctor.rank_lists import ranks_text

CAUSES = {
    "hardware": "device_fault",
    "network": "link_fault",
    "death": "rank_died",
    "error": "rank_failed",
    "data": "data_ended_early",
    "scheduler": "ended_by_scheduler",
    "start": "not_all_ranks_started",
}
"""Finding of each weight that may come first."""

ORDER: tuple[Weight, ...] = ("hardware", "death", "data", "error", "network", "scheduler", "start")
"""Which of several early failures is told: what can only come first before what may be an echo."""


def first_timeout(evidence: Evidence) -> Timeout | None:
    """The timeout that fired first, by its clock or by its line."""
    found = evidence.of(Timeout)
    timed = [record for record in found if record.time is not None]
    return min(timed, key=lambda record: record.time or 0.0) if timed else (found[0] if found else None)


def comes_first(failure: Failure | OutOfMemory, first: Timeout | None, waiting: set[int]) -> bool | None:
    """Whether a failure came before the first timeout; None if the evidence does not say."""
    if first is None:
        return True
    if failure.time is not None and first.time is not None:
        return failure.time <= first.time
    if failure.source.file == first.source.file and failure.source.line and first.source.line:
        if failure.source.line < first.source.line:
            return True
        return None if failure.rank is not None and failure.rank not in waiting else False
    return None


def first_causes(evidence: Evidence, waiting: set[int], stuck: Sequence[str] = ()) -> list[Finding]:
    """What came first, as findings; ``waiting`` are ranks that timed out in a collective, which only waited;
    ``stuck``: what they waited in, in words.

    Nothing if all that broke was an echo.
    """
    first = first_timeout(evidence)
    early: dict[Weight, list[tuple[Failure, bool | None]]] = {}
    for failure in evidence.of(Failure):
        weight = FAILURES.get(failure.what, "echo")
        if weight not in CAUSES:
            continue
        before = comes_first(failure, first, waiting)
        if failure.what == "exited" and first is not None and (not before or failure.rank is None):
            continue  # after a timeout processes end with an exit code; one of nobody known says nothing
        if before is False or (
            failure.rank in waiting and weight in ("error", "data", "network", "start") and not before
        ):
            continue
        early.setdefault(weight, []).append((failure, before))
    out_of_memory = [oom for oom in evidence.of(OutOfMemory) if comes_first(oom, first, waiting) is not False]
    for weight in ORDER:
        if weight == "error" and out_of_memory:
            return (
                [_after_memory(out_of_memory, first)] if first is not None or len(out_of_memory) < 1 else []
            )
        if weight in early:
            return [_finding(weight, early[weight], first, stuck)]
    return [_after_memory(out_of_memory, first)] if out_of_memory and first is not None else []


def _finding(
    weight: str, found: Sequence[tuple[Failure, bool | None]], first: Timeout | None, stuck: Sequence[str]
) -> Finding:
    failures = [failure for failure, _ in found]
    lead = next((failure for failure in failures if failure.rank is not None), failures[0])
    sure = any(before for _, before in found)
    same = [failure for failure in failures if failure.rank == lead.rank or weight in ("hardware", "network")]
    ranks = {failure.rank for failure in same if failure.rank is not None} if weight != "network" else set()
    if weight in ("start", "scheduler"):
        ranks = set()  # whoever tells of it is not at fault
    for failure in same:
        ranks |= set(failure.ranks)
    hosts = sorted({failure.host for failure in same if failure.host})
    where = (
        ranks_text(ranks) if ranks else ("host " + ", ".join(hosts) if hosts else "a rank that is not named")
    )
    frame = caller(lead.frames)
    after = f" before the first timeout ({first.operation.text})" if first is not None and sure else ""
    summary = f"{where}: {lead.detail}{after}" + (f", at {frame}" if frame else "")
    if weight in ("start", "scheduler"):
        subject = "the ranks did not all meet" if weight == "start" else "the scheduler ended the job"
        summary = f"{subject}{after}: {lead.detail}"
    if stuck and weight != "network":
        summary += f"; the others then waited in {stuck[0]}"
    if weight == "network":
        summary = f"the network failed{after}: {lead.detail}" + (
            f" (host {', '.join(hosts)})" if hosts else ""
        )
    certainty: Certainty = "certain" if sure and weight != "network" else "likely"
    if weight == "network" and sure:
        certainty = "likely"
    sources = [failure.source for failure in same]
    return Finding(
        "never_communicated" if lead.what == "p2p" else CAUSES[weight],
        certainty,
        summary,
        tuple(sorted(ranks)),
        (*sources, *([first.source] if first is not None else [])),
        numbers={"hosts": hosts} if hosts else {},
    )


def _after_memory(found: Sequence[OutOfMemory], first: Timeout | None) -> Finding:
    ranks = tuple(sorted({oom.rank for oom in found if oom.rank is not None}))
    where = ranks_text(ranks) if ranks else "a rank that is not named"
    rest = f"; the others then waited in {first.operation.text}" if first is not None else ""
    return Finding(
        "rank_failed",
        "likely",
        f"{where} ran out of memory{rest}",
        ranks,
        (*(oom.source for oom in found), *([first.source] if first is not None else [])),
    )
