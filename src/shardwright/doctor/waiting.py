"""Who waits for whom: from the standings of ranks in all process groups to the ranks that nobody else
explains.

A rank that is stuck in call s of a group waits for the members that have not made call s. If such a member is
itself stuck in another group, the reason lies there. What is left at the end of these chains are culprits, or
members of whom nothing is known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.doctor.evidence import Operation
from shardwright.doctor.groups import Group, Standing


@dataclass
class Wait:
    """One stuck call of a group: who is in it, who has not made it, who is not heard of."""

    group: Group
    seq: int
    inside: dict[int, Standing] = field(default_factory=dict)
    absent: dict[int, Standing] = field(default_factory=dict)
    beyond: dict[int, Standing] = field(default_factory=dict)  # for whom the call has ended
    unheard: frozenset[int] = frozenset()

    @property
    def operations(self) -> dict[int, Operation]:
        """What each rank called, of those that say so; those beyond it too."""
        both = {**self.inside, **self.beyond}
        calls = {rank: s.calls[self.seq] for rank, s in both.items() if self.seq in s.calls}
        return {rank: call for rank, call in calls.items() if call.name != "?"}

    @property
    def peer_to_peer(self) -> bool:
        """Whether ranks wait in sends and receives, which are not the same on both ends."""
        return any(call.short in ("SEND", "RECV") for call in self.operations.values())

    @property
    def operation(self) -> Operation | None:
        """What most called."""
        found = list(self.operations.values())
        return max(found, key=found.count) if found else None


def waits_of(groups: Sequence[Group]) -> list[Wait]:
    """The first stuck call of every group in which somebody is stuck."""
    found = []
    for group in groups:
        stuck = [s.stuck for s in group.standings.values() if s.stuck is not None]
        if not stuck:
            continue
        seq = _call_in_question(group, stuck)
        wait = Wait(group, seq, unheard=group.unheard)
        for rank, standing in group.standings.items():
            if standing.stuck is not None and (standing.enqueued is None or standing.enqueued >= seq):
                ended = standing.completed is not None and standing.completed >= seq
                (wait.beyond if ended else wait.inside)[rank] = standing
            elif standing.enqueued is None or standing.enqueued < seq:
                wait.absent[rank] = standing
            else:
                wait.beyond[rank] = standing
        found.append(wait)
    return found


def _call_in_question(group: Group, stuck: Sequence[int]) -> int:
    """The earliest call that some rank is stuck in and another has not made; else the one most are in."""
    behind = [s.enqueued for s in group.standings.values() if s.enqueued is not None]
    missed = sorted(seq for seq in set(stuck) if any(enqueued < seq for enqueued in behind))
    if missed:
        return missed[0]
    return max(sorted(set(stuck)), key=list(stuck).count)


def chained(waits: Sequence[Wait]) -> tuple[list[Wait], dict[str, str], list[tuple[Wait, Wait]]]:
    """Waits that no other explains; which group's wait explains those left out; and pairs that wait for each
    other."""
    explained: dict[str, str] = {}
    pairs: list[tuple[Wait, Wait]] = []
    for wait in waits:
        for other in waits:
            if other is wait or not wait.absent:
                continue
            held = set(wait.absent) & set(other.inside)
            if held != set(wait.absent):
                continue
            if other.absent and set(other.absent) <= set(wait.inside):
                if (other, wait) not in pairs:
                    pairs.append((wait, other))
            else:
                explained[wait.group.name] = other.group.name
    roots = [wait for wait in waits if wait.group.name not in explained]
    if not roots:
        roots = list(waits)
    return roots, explained, pairs


class Difference(NamedTuple):
    """The first call that is not the same on all ranks of a group: ``what`` differs (operation, size,
    dtype), and
    what ranks of the minority called; ``skipped``: a rank of it is one call ahead of the others from there
    on."""

    group: Group
    seq: int
    what: str
    odd: dict[int, Operation]
    calls: dict[int, Operation]
    skipped: frozenset[int] = frozenset()


def first_difference(group: Group) -> Difference | None:
    """Of ranks whose recorders are there: where their calls part, before or in what they are stuck in."""
    ranks = {rank: s for rank, s in group.standings.items() if s.dumped and s.calls}
    if len(ranks) < 2:
        return None
    for seq in sorted({seq for s in ranks.values() for seq in s.calls}):
        calls = {
            rank: s.calls[seq] for rank, s in ranks.items() if seq in s.calls and s.calls[seq].name != "?"
        }
        found = differing(calls) if len(calls) > 1 else None
        if found is None or (found[0] != "operation" and not _open(ranks, seq)):
            continue
        what, odd = found
        usual = next((s for rank, s in ranks.items() if rank not in odd), None)
        ahead = frozenset(rank for rank in odd if usual is not None and _is_ahead(ranks[rank], usual, seq))
        return Difference(group, seq, what, odd, calls, ahead)
    return None


def _open(ranks: Mapping[int, Standing], seq: int) -> bool:
    """Whether a call has not ended somewhere, or its recorder does not say (gloo's)."""
    return any(seq in s.pending or seq not in s.states for s in ranks.values())


def _is_ahead(standing: Standing, usual: Standing, seq: int) -> bool:
    """Whether from ``seq`` on a rank's calls are the others' next ones: it left one out. Where the others
    made no next one, what they made next after the same two calls before stands for it."""
    later = [number for number in standing.calls if number >= seq and number + 1 in usual.calls]
    same = [_signature(standing.calls[n]) == _signature(usual.calls[n + 1]) for n in sorted(later)[:8]]
    if same:
        return all(same)
    if seq not in standing.calls:
        return False
    for number in usual.calls:
        steps = ((number - 1, seq - 1), (number, seq), (number + 1, None))
        if number < seq and all(
            a in usual.calls and (usual if b else standing).calls.get(b or seq) is not None for a, b in steps
        ):
            alike = (
                _signature(usual.calls[a]) == _signature(usual.calls[b] if b else standing.calls[seq])
                for a, b in steps
            )
            if all(alike):
                return True
    return False


def _signature(call: Operation) -> tuple[str, int | None, str]:
    return call.short, call.numel_in, call.dtype


def differing(calls: Mapping[int, Operation]) -> tuple[str, dict[int, Operation]] | None:
    """``operation``, ``size`` or ``dtype`` if ranks called different things, and the ranks of the minority
    (all if there is none)."""
    for name, key in (
        ("operation", lambda call: call.short),
        ("size", lambda call: _size_key(call)),
        ("dtype", lambda call: call.dtype),
    ):
        values = {rank: key(call) for rank, call in calls.items() if key(call) not in ("", None)}
        if len(set(values.values())) < 2:
            continue
        counts = {value: list(values.values()).count(value) for value in set(values.values())}
        most = max(counts.values())
        usual = [value for value, count in counts.items() if count == most]
        if len(usual) == 1 and most > len(values) / 2:
            odd = {rank: calls[rank] for rank, value in values.items() if value != usual[0]}
        else:
            odd = {rank: calls[rank] for rank in values}
        return name, odd
    return None


UNEQUAL_SIZES = ("ALLTOALL", "GATHER", "SCATTER", "SEND", "RECV", "BROADCAST", "BARRIER")
"""Operations whose sizes may differ between ranks in a right program, or are not printed alike."""


def _size_key(call: Operation) -> tuple[int | None, int | None] | None:
    if call.short in UNEQUAL_SIZES and call.short != "BROADCAST":
        return None
    if call.numel_in is None and call.shape is None:
        return None
    if call.numel_in is None:
        return (hash(call.shape), None)
    return (call.numel_in, call.numel_out)
