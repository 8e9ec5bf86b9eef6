"""Sends and receives that wait for each other, from flight recorders: pipelines."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from shardwright.doctor.evidence import Entry, Evidence
from shardwright.doctor.finding import Finding, Source
from shardwright.doctor.groups import Group, entry_text
from shardwright.doctor.rank_lists import ranks_text

_SEND = re.compile(r"send (\d+)->(\d+)")
_RECV = re.compile(r"recv (\d+)<-(\d+)")


def peer_to_peer_findings(evidence: Evidence, groups: Sequence[Group]) -> Iterator[Finding]:
    """Receives whose send was never made, and rings of ranks that wait for each other."""
    for group in groups:
        members = sorted(group.members)
        sends: Counter[tuple[int, int]] = Counter()
        receives: Counter[tuple[int, int]] = Counter()
        pending: dict[int, list[tuple[int, Entry]]] = {}
        for rank, standing in group.standings.items():
            for entry in standing.p2p:
                pair = _pair(entry, members)
                if pair is None:
                    continue
                (sends if entry.operation.short == "SEND" else receives)[pair] += 1
                if not entry.done:
                    other = pair[1] if pair[0] == rank else pair[0]
                    pending.setdefault(rank, []).append((other, entry))
        if pending:
            yield from _judge(evidence, group, pending, sends, receives)


def _pair(entry: Entry, members: Sequence[int]) -> tuple[int, int] | None:
    """Global ranks (source, destination); the names hold ranks in the group."""
    name = entry.operation.name
    if (found := _SEND.search(name)) is not None:
        pair = int(found[1]), int(found[2])
    elif (found := _RECV.search(name)) is not None:
        pair = int(found[2]), int(found[1])
    else:
        return None
    if members and max(pair) < len(members):
        return members[pair[0]], members[pair[1]]
    return pair


def _waited_for(
    rank: int,
    entries: Sequence[tuple[int, Entry]],
    sends: Counter[tuple[int, int]],
    receives: Counter[tuple[int, int]],
) -> set[int]:
    """Ranks whose send or receive a rank waits for that they have called fewer times than it."""
    found = set()
    for other, entry in entries:
        receiving = entry.operation.short == "RECV"
        pair = (other, rank) if receiving else (rank, other)
        theirs, own = (sends, receives) if receiving else (receives, sends)
        if theirs[pair] < own[pair]:
            found.add(other)
    return found


def _shown(group: Group, pending: dict[int, list[tuple[int, Entry]]]) -> tuple[Source, ...]:
    """Two pending calls of every rank, with the file they stand in."""
    found = []
    for rank, entries in pending.items():
        files = [source.file for source in group.standings[rank].sources]
        found += [
            Source(files[0] if files else group.name, None, entry_text(entry)) for _, entry in entries[:2]
        ]
    return tuple(found)


def _judge(
    evidence: Evidence,
    group: Group,
    pending: dict[int, list[tuple[int, Entry]]],
    sends: Counter[tuple[int, int]],
    receives: Counter[tuple[int, int]],
) -> Iterator[Finding]:
    waits = {rank: _waited_for(rank, entries, sends, receives) for rank, entries in pending.items()}
    stuck_elsewhere = {rank for rank, s in group.standings.items() if s.stuck is not None}
    heard = {rank for rank, s in group.standings.items() if s.dumped}
    waited_for = {other for others in waits.values() for other in others}
    roots = {other for other in waited_for if not waits.get(other) and other not in stuck_elsewhere}
    sources = _shown(group, pending)
    if roots & heard:
        yield Finding(
            "missing_peer",
            "certain",
            f"{ranks_text(roots & heard)} never made the send or receive that "
            f"{ranks_text(set(pending))} wait for in "
            f"{group.label}",
            tuple(sorted(roots & heard)),
            sources,
        )
    elif roots:
        yield Finding(
            "not_enough_ranks",
            "cannot_tell",
            f"{ranks_text(set(pending))} wait for sends or receives of {ranks_text(roots)}, of whom "
            "nothing is known",
            (),
            sources,
            (),
            (f"flight recorder dumps of {ranks_text(roots)}",),
        )
    elif waited_for:
        yield Finding(
            "crossed_peers",
            "likely",
            f"{ranks_text(waited_for)} wait for each other's sends and receives in {group.label}: "
            "they are called in an "
            "order that cannot end",
            tuple(sorted(waited_for)),
            sources,
        )
    elif set(pending) and not stuck_elsewhere:
        yield Finding(
            "network_stall",
            "likely",
            "sends and receives between "
            f"{ranks_text(set(pending) | {o for es in pending.values() for o, _ in es})} are "
            "called on both sides and do not end: the transport between them",
            (),
            sources,
        )
