"""A stuck call in words and numbers: what, since when, shown by which lines, and what else to collect."""

from collections.abc import Sequence

from shardwright.doctor.clock import clock_text
from shardwright.doctor.evidence import Blamed, Evidence
from shardwright.doctor.finding import Source
from shardwright.doctor.flight import caller
from shardwright.doctor.rank_lists import ranks_text
from shardwright.doctor.sizes import degree_of, meaning_of
from shardwright.doctor.waiting import Wait


def call_text(evidence: Evidence, wait: Wait) -> str:
    """``ALLREDUCE of 80 elements #78 in process group 0, which is the embedding of ...``."""
    operation = wait.operation
    number = f" #{wait.seq}" if wait.seq > 0 else ""
    text = f"{operation.text if operation else 'a collective'}{number} in {wait.group.label}"
    meaning = meaning_of(evidence, operation) if operation else None
    degree = degree_of(operation) if operation else None
    if meaning is not None:
        text += f" ({meaning.text})"
    if degree is not None:
        text += f" over {degree} ranks"
    frame = caller_of(wait)
    return text + (f", called at {frame}" if frame else "")


def caller_of(wait: Wait) -> str | None:
    for standing in wait.inside.values():
        if frames := standing.frames.get(wait.seq):
            return caller(frames)
    return None


def since_text(wait: Wait) -> str:
    """When the wait began: what fired at t had waited since t minus its timeout."""
    begun = [s.since for s in wait.inside.values() if s.since is not None]
    longest = max((s.waited for s in wait.inside.values() if s.waited), default=None)
    if not begun:
        return f", waited {longest:,.0f} s" if longest else ""
    return f"; they have waited since {clock_text(min(begun))}" + (f", {longest:,.0f} s" if longest else "")


def sources_of(wait: Wait, *more: Source) -> tuple[Source, ...]:
    """Of those who say most: culprits, then those who wait."""
    standings = [*wait.absent.values(), *wait.inside.values(), *wait.beyond.values()]
    return (*more, *(source for standing in standings for source in standing.sources[:2]))


def numbers_of(evidence: Evidence, wait: Wait) -> dict[str, object]:
    operation = wait.operation
    meaning = meaning_of(evidence, operation) if operation else None
    begun = [s.since for s in wait.inside.values() if s.since is not None]
    numbers: dict[str, object] = {
        "process_group": wait.group.name,
        "sequence": wait.seq,
        "operation": operation.short if operation else None,
        "waiting_ranks": sorted(wait.inside),
        "absent_ranks": sorted(wait.absent),
        "unheard_ranks": sorted(wait.unheard)[:64],
        "waiting_since": clock_text(min(begun)) if begun else None,
    }
    if operation is not None:
        numbers |= {
            "numel_in": operation.numel_in,
            "numel_out": operation.numel_out,
            "group_size": degree_of(operation) or len(wait.group.members) or None,
            "module": meaning.module if meaning else None,
            "module_text": meaning.text if meaning else None,
            "model": meaning.model if meaning else None,
        }
    return numbers


def size_of_group(wait: Wait) -> int | None:
    degrees = {degree for call in wait.operations.values() if (degree := degree_of(call)) is not None}
    return next(iter(degrees)) if len(degrees) == 1 else len(wait.group.members) or None


def collect_from(ranks: Sequence[int] | frozenset[int] | set[int]) -> tuple[str, ...]:
    if not ranks:
        return ()
    return (f"logs and flight recorder dumps of {ranks_text(set(ranks))}",)


def blamed_actions(evidence: Evidence, culprits: set[int]) -> tuple[str, ...]:
    """A word on the rank that the launcher blames, if it only waited."""
    innocent = sorted({record.rank for record in evidence.of(Blamed)} - culprits)
    if not innocent:
        return ()
    return (
        f"leave {ranks_text(set(innocent))} alone: the launcher names the first process that ended, "
        "which here had "
        "only waited",
    )
