"""Ranks that stopped calling, from the call counters that NCCL_DEBUG=INFO prints."""

from collections.abc import Iterator

from shardwright.doctor.evidence import CommInit, Evidence, OpCount
from shardwright.doctor.finding import Finding
from shardwright.doctor.rank_lists import ranks_text


def opcount_findings(evidence: Evidence) -> Iterator[Finding]:
    """For every communicator: processes whose last counter is lower than others', if all of them are seen."""
    calls = evidence.of(OpCount)
    if not calls:
        return
    made = {(init.process, init.comm): init for init in evidence.of(CommInit)}
    last: dict[tuple[str, int | None], dict[str, OpCount]] = {}
    for call in calls:
        init = made.get((call.process, call.comm))
        key = (init.name if init else "", call.ranks or (init.ranks if init else None))
        processes = last.setdefault(key, {})
        if call.process not in processes or processes[call.process].number <= call.number:
            processes[call.process] = call
    for (_, size), processes in last.items():
        finding = _judge(processes, size, made)
        if finding is not None:
            yield finding


def _judge(
    processes: dict[str, OpCount], size: int | None, made: dict[tuple[str, str], CommInit]
) -> Finding | None:
    latest = max(call.number for call in processes.values())
    ahead = {name: call for name, call in processes.items() if call.number == latest}
    behind = {name: call for name, call in processes.items() if call.number < latest}
    ranks = {
        name: made[name, call.comm].rank if (name, call.comm) in made else call.rank
        for name, call in processes.items()
    }
    sources = tuple(call.source for call in [*behind.values(), *ahead.values()])
    lead = next(iter(ahead.values()))
    call_text = f"{lead.op} opCount {latest:x} of {lead.numel:,} elements"
    if not behind:
        kinds = {(call.op, call.numel) for call in processes.values()}
        if len(kinds) > 1 and len({op for op, _ in kinds}) > 1:
            return Finding(
                "operation_mismatch",
                "likely",
                f"call {latest:x} is not the same everywhere: {', '.join(sorted({op for op, _ in kinds}))}",
                (),
                sources,
            )
        return None
    named = tuple(sorted({rank for name in behind if (rank := ranks[name]) is not None}))
    listed = ", ".join(
        f"{name}" + (f" (rank {ranks[name]})" if ranks[name] is not None else "") + f" at {call.number:x}"
        for name, call in sorted(behind.items())[:8]
    )
    numbers = {"latest": latest, "group_size": size, "seen": len(processes), "behind": sorted(behind)}
    if size is None or len(processes) < size:
        return Finding(
            "not_enough_ranks",
            "cannot_tell",
            f"{len(ahead)} processes have called {call_text}, {len(behind)} of those seen have not: "
            f"{listed}; only "
            f"{len(processes)} of {size or 'an unknown number of'} ranks are seen, so these may only "
            "be a moment behind",
            (),
            sources,
            (),
            (
                f"the NCCL log of all {size or ''} ranks, to its end; the missing rank is one that "
                f"does not print {latest:x}",
            ),
            numbers,
        )
    return Finding(
        "skipped_collective",
        "likely",
        f"all {size} ranks are seen; {call_text} was not called by "
        f"{ranks_text(set(named)) if named else listed}: {listed}",
        named,
        sources,
        numbers=numbers,
    )
