"""What one stuck call of a process group says: who is missing, who differs, or that nobody can be named."""

from collections.abc import Iterator

from shardwright.doctor.call_words import (
    blamed_actions,
    call_text,
    caller_of,
    collect_from,
    numbers_of,
    since_text,
    size_of_group,
    sources_of,
)
from shardwright.doctor.evidence import Blamed, Evidence, Failure, Message, Operation, State, Timeout
from shardwright.doctor.finding import Certainty, Finding
from shardwright.doctor.flight import caller
from shardwright.doctor.rank_lists import ranks_text
from shardwright.doctor.sizes import meaning_of
from shardwright.doctor.waiting import Wait, differing

PREPARE = (
    "prepare the data before the job, or on one rank before the process group is made: a rank was "
    "still at it when "
    "the others had waited for the whole timeout"
)

FEW = 0.25
"""Share of a group's members that may be silent for the silence itself to say something."""

SEVERAL = 2
"""How many times as sure it must be where nobody says how many ranks there are and several are silent: an
excerpt may have been cut."""

LEAST_HEARD = 3

CLOSE = 64
"""Calls by which a rank may be behind in what is one process group though no line names it: numbers further
apart are of different groups."""

LEAST_ALL = 4
"""Ranks from 0 on without a gap, a power of two, that are taken for all there are where nobody says; it is
said."""

GUARDED = (
    "full_tensor",
    "state_dict",
    "save",
    "summon_full_params",
    "gather",
    "consolidate",
    "generate",
    "eval",
)
"""Words in names of functions that are often called on one rank only although all must call them."""


def findings_of_wait(evidence: Evidence, wait: Wait) -> Iterator[Finding]:
    """What one stuck collective says."""
    calls = wait.operations
    if wait.peer_to_peer:
        yield _not_enough(evidence, wait, "they wait in sends and receives, each for its neighbour")
        return
    different = differing(calls) if len(calls) > 1 else None
    if different is not None:
        yield _mismatch(evidence, wait, *different)
        return
    behind = {rank: s for rank, s in wait.absent.items() if s.stuck is not None and s.stuck < wait.seq}
    if wait.absent and len(behind) < len(wait.absent):
        yield _skipped(evidence, wait)
    elif behind:
        yield _lagging(evidence, wait)
    else:
        yield _all_alike(evidence, wait)


def _skipped(evidence: Evidence, wait: Wait) -> Finding:
    """Some never made a call in which others wait."""
    culprits = tuple(sorted(wait.absent))
    guard = len(wait.inside) == 1 and not wait.unheard and len(wait.absent) > 1
    cause = "rank_guard" if guard else "skipped_collective"
    whereabouts = [
        f"rank {state.rank} is at {place}"
        for state in evidence.of(State)
        if state.rank in wait.absent and (place := caller(state.stack)) is not None
    ]
    last = "; ".join(
        f"rank {rank} stopped at #{s.enqueued}"
        for rank, s in sorted(wait.absent.items())
        if s.enqueued is not None
    )
    who = f"only {ranks_text(set(wait.inside))} called" if guard else f"{ranks_text(culprits)} never called"
    others = f"; {ranks_text(set(wait.inside))} wait in it" if not guard else "; the others did not"
    unheard = f"; of {ranks_text(wait.unheard)} nothing is known" if wait.unheard else ""
    certainty: Certainty = "certain" if all(s.dumped or s.sources for s in wait.absent.values()) else "likely"
    return Finding(
        cause,
        certainty,
        f"{who} {call_text(evidence, wait)}{others}{since_text(wait)}"
        + (f" ({last})" if last and len(last) < 200 else "")
        + ("; " + ", ".join(whereabouts[:4]) if whereabouts else "")
        + unheard,
        tuple(sorted(wait.inside)) if guard else culprits,
        sources_of(wait),
        blamed_actions(evidence, set(culprits)),
        collect_from(wait.unheard),
        numbers_of(evidence, wait),
    )


def _lagging(evidence: Evidence, wait: Wait) -> Finding:
    """Some are still in an earlier call, which the others have finished."""
    culprits = tuple(sorted(wait.absent))
    earlier = {rank: s.stuck for rank, s in wait.absent.items() if s.stuck is not None}
    text = "; ".join(f"rank {rank} is still in #{seq}" for rank, seq in sorted(earlier.items())[:8])
    numbers = {*earlier.values(), wait.seq}
    several = any(len(s.pending) > 1 and s.timed_out for s in [*wait.inside.values(), *wait.absent.values()])
    apart = (
        len(numbers) > 2 or max(numbers) - min(numbers) > CLOSE or several or len(wait.inside) < LEAST_HEARD
    )
    if (wait.group.name == "" and apart) or len(culprits) > len(wait.inside):
        return _not_enough(
            evidence, wait, "the lines name no process group, so their numbers cannot be compared"
        )
    return Finding(
        "lagging_rank",
        "likely",
        f"{text}, {ranks_text(set(wait.inside))} wait in {call_text(evidence, wait)}{since_text(wait)}",
        culprits,
        sources_of(wait),
        blamed_actions(evidence, set(culprits)),
        collect_from(wait.unheard),
        numbers_of(evidence, wait),
    )


def _mismatch(evidence: Evidence, wait: Wait, what: str, odd: dict[int, Operation]) -> Finding:
    calls = wait.operations
    sides: dict[str, list[int]] = {}
    for rank, call in calls.items():
        sides.setdefault(f"{call.text}{' ' + call.dtype if what == 'dtype' else ''}", []).append(rank)
    text = "; ".join(
        f"{ranks_text(ranks)}: {side}" for side, ranks in sorted(sides.items(), key=lambda s: len(s[1]))
    )
    lonely = len(odd) == 1 and len(calls) > 2
    guarded = what == "operation" and lonely and next(iter(odd)) == 0
    cause = "rank_guard" if guarded else f"{what}_mismatch"
    meanings = [
        f"{call.text} is {meaning.text}"
        for call in dict.fromkeys(calls.values())
        if (meaning := meaning_of(evidence, call)) is not None
    ]
    number = f"call #{wait.seq}" if wait.seq > 0 else "the first stuck call"
    unsure = wait.seq <= 0 or any(call.short == "COALESCED" for call in calls.values())
    unnamed = (wait.group.name == "" and what == "operation") or unsure
    return Finding(
        cause,
        "likely" if unnamed else "certain",
        f"in {wait.group.label} {number} is not the same on all ranks: {text}"
        + (f" ({'; '.join(meanings[:2])})" if meanings else "")
        + since_text(wait),
        tuple(sorted(odd)),
        sources_of(wait),
        (),
        collect_from(wait.unheard),
        numbers_of(evidence, wait)
        | {"group_size": size_of_group(wait), "calls": {str(r): c.text for r, c in calls.items()}},
    )


def _all_alike(evidence: Evidence, wait: Wait) -> Finding:
    """All who are heard of made the same call and nobody is known to be absent."""
    heard = len(wait.inside) + len(wait.beyond)
    size = size_of_group(wait) or 0
    unheard = max(len(wait.unheard), size - heard)
    completed = [s.completed for s in wait.inside.values() if s.completed is not None]
    first_ever = wait.seq <= 1 and completed != [] and max(completed) <= 0
    silent = _silent_but_seen(evidence, wait)
    if silent:
        return _named_silent(evidence, wait, silent)
    late = _not_started(wait)
    if late:
        return _late(evidence, wait, late)
    whole = not any(_is_cut(timeout) for timeout in evidence.of(Timeout))
    few = whole and wait.unheard and heard >= LEAST_HEARD and len(wait.unheard) <= FEW * size
    if first_ever and not few:
        return _never_communicated(evidence, wait, unheard)
    if unheard == 0 and heard > 1 and size:
        return _stall(evidence, wait, heard)
    if few:
        return _named_silent(evidence, wait, wait.unheard)
    gaps = frozenset(range(max(wait.inside, default=0) + 1)) - set(wait.inside) - set(wait.beyond)
    least = 1 if len(gaps) < 2 else SEVERAL
    if (
        whole
        and not size
        and gaps
        and heard >= LEAST_HEARD * least
        and len(gaps) <= FEW / least * (heard + len(gaps))
    ):
        return _named_silent(evidence, wait, gaps)
    if whole and not size and heard >= LEAST_ALL and heard & (heard - 1) == 0 and not gaps:
        return _stall(evidence, wait, heard, assumed=True)
    if heard == 1:
        return _one_rank(evidence, wait, size)
    return _not_enough(evidence, wait, "all of them are in the same call")


def _is_cut(timeout: Timeout) -> bool:
    """Whether a log ends in the middle of this line: who is silent may stand in what was cut off."""
    return timeout.waited is None and timeout.source.text.rstrip()[-1:] not in (".", ")")


def _not_started(wait: Wait) -> frozenset[int]:
    """Ranks whose device has not begun the call that it has begun on most others."""
    states = {rank: s.states.get(wait.seq) for rank, s in wait.inside.items()}
    begun = {rank for rank, state in states.items() if state == "started"}
    waiting = frozenset(rank for rank, state in states.items() if state == "scheduled")
    return waiting if len(begun) >= LEAST_HEARD - 1 and len(waiting) < len(begun) else frozenset()


def _late(evidence: Evidence, wait: Wait, late: frozenset[int]) -> Finding:
    return Finding(
        "lagging_rank",
        "likely",
        f"{ranks_text(late)} called {call_text(evidence, wait)} and did not begin it on the device, "
        "the others have: "
        "earlier work on that device does not end",
        tuple(sorted(late)),
        sources_of(wait),
        (),
        collect_from(wait.unheard),
        numbers_of(evidence, wait),
    )


def _silent_but_seen(evidence: Evidence, wait: Wait) -> frozenset[int]:
    """Members that did not time out though their output is there: they were elsewhere when others waited."""
    if not any(standing.timed_out for standing in wait.inside.values()) or len(wait.inside) < 2:
        return frozenset()
    seen = {record.rank for record in evidence.of(Failure) if record.rank is not None}
    absent = frozenset(seen) - set(wait.inside) - set(wait.beyond)
    blamed = {record.rank for record in evidence.of(Blamed)}
    absent -= blamed - seen
    if wait.group.members:
        absent &= wait.group.members
        return absent if absent == wait.unheard else frozenset()
    return absent if len(absent) <= len(wait.inside) else frozenset()


def _named_silent(evidence: Evidence, wait: Wait, silent: frozenset[int]) -> Finding:
    """Those who did not report are those who are not in the call."""
    own = [r.source for r in evidence.of(Failure) if r.rank in silent]
    busy = [m for m in evidence.of(Message) if m.what == "preparing_data" and m.rank in (None, *silent)]
    own += [message.source for message in busy[-1:]]
    return Finding(
        "skipped_collective",
        "likely",
        f"{ranks_text(silent)} did not time out, {ranks_text(set(wait.inside))} did, all in "
        f"{call_text(evidence, wait)}: the former never called it, or had ended{since_text(wait)}",
        tuple(sorted(silent)),
        sources_of(wait, *own),
        (*(PREPARE,) * bool(busy), *blamed_actions(evidence, set(silent))),
        collect_from(silent),
        numbers_of(evidence, wait) | {"absent_ranks": sorted(silent)},
    )


def _never_communicated(evidence: Evidence, wait: Wait, unheard: int) -> Finding:
    who = ranks_text(set(wait.inside))
    rest = f"; {unheard} other ranks are not heard of" if unheard else ""
    return Finding(
        "never_communicated",
        "likely",
        f"{who} waited in {call_text(evidence, wait)}, the first of its process group: nothing has ever "
        f"been sent over it{rest}{since_text(wait)}",
        (),
        sources_of(wait),
        (),
        collect_from(wait.unheard),
        numbers_of(evidence, wait),
    )


def _stall(evidence: Evidence, wait: Wait, heard: int, assumed: bool = False) -> Finding:
    pending = [
        s.enqueued - s.completed
        for s in wait.inside.values()
        if s.enqueued is not None and s.completed is not None
    ]
    more = (
        f" with {pending[0]} calls enqueued behind the last that ended"
        if pending and len(set(pending)) == 1
        else ""
    )
    return Finding(
        "network_stall",
        "likely",
        f"all {heard} ranks of {wait.group.label}{' (if these are all)' if assumed else ''} are in "
        f"the same call{more}, "
        f"{call_text(evidence, wait)}, and none of "
        f"them finishes it: no rank is missing, the transport is{since_text(wait)}",
        (),
        sources_of(wait),
        (),
        (),
        numbers_of(evidence, wait),
    )


def _one_rank(evidence: Evidence, wait: Wait, size: int) -> Finding:
    rank = next(iter({**wait.inside, **wait.beyond}))
    frame = caller_of(wait) or ""
    of = f" of {size}" if size else ""
    if any(word in frame.partition(" at ")[0] for word in GUARDED):
        return Finding(
            "rank_guard",
            "likely",
            f"rank {rank} alone{of} is seen to wait, in {call_text(evidence, wait)}: a function that "
            "all ranks must call",
            (rank,),
            sources_of(wait),
            (),
            collect_from(wait.unheard),
            numbers_of(evidence, wait),
        )
    return Finding(
        "one_rank_visible",
        "cannot_tell",
        f"only rank {rank}{of} is heard of: it waits in {call_text(evidence, wait)}{since_text(wait)}; "
        "whom it waits for "
        "the files do not say",
        (),
        sources_of(wait),
        (),
        collect_from(wait.unheard),
        numbers_of(evidence, wait),
    )


def _not_enough(evidence: Evidence, wait: Wait, why: str) -> Finding:
    heard = {**wait.inside, **wait.beyond, **wait.absent}
    size = size_of_group(wait)
    of = f" of {size}" if size else ""
    return Finding(
        "not_enough_ranks",
        "cannot_tell",
        f"{len(heard)}{of} ranks are heard of ({ranks_text(set(heard))}): {why}, {call_text(evidence, wait)}"
        f"{since_text(wait)}; whom they wait for the files do not say",
        (),
        sources_of(wait),
        (),
        collect_from(wait.unheard),
        numbers_of(evidence, wait),
    )
