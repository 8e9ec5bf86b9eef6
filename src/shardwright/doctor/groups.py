"""Who enqueued, started and completed what in each process group, from dumps and log lines together."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwright.doctor.evidence import (
    UNKNOWN,
    Dump,
    Entry,
    Evidence,
    Operation,
    Progress,
    Stack,
    State,
    Timeout,
)
from shardwright.doctor.finding import Source
from shardwright.doctor.nccl_log import DEFAULT_GROUP

MOST_OF_ALL = 1 << 16


@dataclass
class Standing:
    """How far one rank is in one group. ``pending``: what it called and has not seen end, by number."""

    rank: int
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None
    pending: dict[int, Operation] = field(default_factory=dict)
    calls: dict[int, Operation] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    frames: dict[int, tuple[str, ...]] = field(default_factory=dict)
    timed_out: bool = False
    dumped: bool = False  # its flight recorder is there: what it did not call, it did not call
    waited: float | None = None
    since: float | None = None  # time its stuck call began, s of the year
    p2p: list[Entry] = field(default_factory=list)

    @property
    def stuck(self) -> int | None:
        """Number of the first call that has not ended."""
        return min(self.pending, default=None)


@dataclass
class Group:
    """One process group: its members, as far as known, and how far each rank that says so is."""

    name: str
    description: str = ""
    members: frozenset[int] = frozenset()
    standings: dict[int, Standing] = field(default_factory=dict)

    def of(self, rank: int) -> Standing:
        """How far a rank is."""
        return self.standings.setdefault(rank, Standing(rank))

    @property
    def label(self) -> str:
        """For people."""
        if self.name == UNKNOWN:
            return "the process group"
        return f"process group {self.name}" + (f" ({self.description})" if self.description else "")

    @property
    def unheard(self) -> frozenset[int]:
        """Members of whom nothing is known."""
        return self.members - set(self.standings)


def groups_of(evidence: Evidence) -> list[Group]:
    """All process groups that something is known of; members of the default one from the size of the
    world."""
    groups: dict[str, Group] = {}
    states = {state.rank: state for state in evidence.of(State)}
    for state in states.values():
        for name, (description, ranks) in state.groups.items():
            group = groups.setdefault(name, Group(name))
            group.description, group.members = description, group.members | frozenset(ranks)
    for dump in evidence.dumps:
        if is_gloo(dump):
            _add_gloo(groups, dump, states.get(-1 if dump.rank is None else dump.rank))
        else:
            _add_dump(groups, dump)
    progress = evidence.of(Progress)
    named = _names(progress)
    for record in evidence.of(Timeout):
        key = record.group or named.get((record.rank, record.seq), UNKNOWN)
        _add_timeout(groups.setdefault(key, Group(key)), record)
    for line in progress:
        _add_progress(groups.setdefault(line.group, Group(line.group)), line)
    for stack in evidence.of(Stack):
        for group in groups.values():
            if stack.rank in group.standings and (stuck := group.standings[stack.rank].stuck) is not None:
                group.standings[stack.rank].frames[stuck] = stack.frames
    _join_unnamed(groups)
    worlds = evidence.worlds
    world = next(iter(worlds)) if len(worlds) == 1 else None
    for group in groups.values():
        if not group.members and world is not None and _is_world(group, groups):
            group.members = frozenset(range(world)) if world <= MOST_OF_ALL else frozenset()
    return list(groups.values())


def _is_world(group: Group, groups: dict[str, Group]) -> bool:
    return group.name == DEFAULT_GROUP or (group.name == UNKNOWN and len(groups) == 1)


def _names(progress: Iterable[Progress]) -> dict[tuple[int | None, int | None], str]:
    """Group by rank and number of the call that failed in it, where that is one group's alone."""
    found: dict[tuple[int | None, int | None], set[str]] = {}
    for line in progress:
        if line.failed is not None and line.group != UNKNOWN:
            found.setdefault((line.rank, line.failed), set()).add(line.group)
            found.setdefault((None, line.failed), set()).add(line.group)
    alone = {key: next(iter(names)) for key, names in found.items() if len(names) == 1}
    return _Lookup(alone)


class _Lookup(dict[tuple[int | None, int | None], str]):
    """A rank that does not say takes the group that all others name for a call of that number."""

    def __missing__(self, key: tuple[int | None, int | None]) -> str:
        return dict.get(self, (None, key[1]), UNKNOWN)

    def get(self, key: tuple[int | None, int | None], default: str = UNKNOWN) -> str:  # type: ignore[override]
        return self[key] or default


def _join_unnamed(groups: dict[str, Group]) -> None:
    """Lines that name no group belong to the only one there is."""
    named = [name for name in groups if name != UNKNOWN]
    if UNKNOWN not in groups or len(named) != 1:
        return
    rest, group = groups.pop(UNKNOWN), groups[named[0]]
    for rank, standing in rest.standings.items():
        own = group.of(rank)
        own.pending = {**standing.pending, **own.pending}
        own.calls = {**standing.calls, **own.calls}
        own.frames = {**standing.frames, **own.frames}
        own.sources += standing.sources
        own.timed_out |= standing.timed_out
        own.waited = own.waited or standing.waited
        own.since = own.since or standing.since
        own.enqueued = _latest(own.enqueued, standing.enqueued)
        own.completed = _latest(own.completed, standing.completed)


def _latest(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)


def _add_timeout(group: Group, record: Timeout) -> None:
    if record.rank is None:
        return
    standing = group.of(record.rank)
    standing.sources.append(record.source)
    standing.timed_out = True
    standing.waited = standing.waited or record.waited
    if standing.since is None and record.time is not None:
        standing.since = record.time - (record.waited or record.timeout or 0.0)
    if record.seq is not None:
        standing.pending.setdefault(record.seq, record.operation)
        standing.calls.setdefault(record.seq, record.operation)
        standing.enqueued = _latest(standing.enqueued, record.seq)
    else:
        standing.pending.setdefault(0, record.operation)
        standing.calls.setdefault(0, record.operation)


def _add_progress(group: Group, line: Progress) -> None:
    if line.name:
        group.description = line.name
    if line.rank is None:
        return
    standing = group.of(line.rank)
    standing.sources.append(line.source)
    standing.enqueued, standing.completed = line.enqueued, line.completed
    standing.started = line.started
    done = line.completed if line.completed is not None else -1
    standing.pending = {seq: op for seq, op in standing.pending.items() if seq > done or seq == 0}
    if line.enqueued is not None and line.enqueued > done and line.enqueued > 0:
        first = line.failed if line.failed is not None and line.failed > done else max(done, 0) + 1
        standing.pending.setdefault(first, Operation("?"))


def _add_dump(groups: dict[str, Group], dump: Dump) -> None:
    for name, (description, ranks) in dump.groups.items():
        group = groups.setdefault(name, Group(name))
        group.description = group.description or description
        group.members |= frozenset(ranks)
    if dump.rank is None:
        return
    for name, (enqueued, started, completed) in dump.status.items():
        standing = groups.setdefault(name, Group(name)).of(dump.rank)
        standing.enqueued, standing.started, standing.completed = enqueued, started, completed
        standing.dumped = True
        standing.sources.append(dump.source._replace(text=_status_text(name, enqueued, completed)))
    for entry in dump.entries:
        standing = groups.setdefault(entry.group, Group(entry.group)).of(dump.rank)
        standing.dumped = True
        if entry.is_p2p:
            standing.p2p.append(entry)
            continue
        if entry.seq is None:
            continue
        standing.calls[entry.seq] = entry.operation
        standing.states[entry.seq] = entry.state
        standing.enqueued = _latest(standing.enqueued, entry.seq)
        if entry.done:
            standing.completed = _latest(standing.completed, entry.seq)
            standing.pending.pop(entry.seq, None)
            continue
        standing.pending[entry.seq] = entry.operation
        standing.frames[entry.seq] = entry.frames
        standing.sources.append(dump.source._replace(text=entry_text(entry)))
    for standing in (group.standings[dump.rank] for group in groups.values() if dump.rank in group.standings):
        _settle(standing)


def is_gloo(dump: Dump) -> bool:
    """Whether it is of gloo, whose recorder says what was called, not what has ended."""
    return bool(dump.entries) and all(entry.operation.name.startswith("gloo:") for entry in dump.entries)


def _add_gloo(groups: dict[str, Group], dump: Dump, state: State | None) -> None:
    """Calls of a rank over gloo: all have ended but the last, if the rank's state says it is in one."""
    if dump.rank is None:
        return
    inside = state is None or state.in_collective
    last = max((entry.number or 0 for entry in dump.entries), default=0)
    for entry in dump.entries:
        standing = groups.setdefault(entry.group, Group(entry.group)).of(dump.rank)
        standing.dumped = True
        if entry.is_p2p:
            standing.p2p.append(entry)
        elif entry.seq is not None:
            standing.calls[entry.seq] = entry.operation
            standing.frames[entry.seq] = entry.frames
            standing.enqueued = _latest(standing.enqueued, entry.seq)
            if inside and entry.number == last:
                standing.pending[entry.seq] = entry.operation
                standing.sources.append(dump.source._replace(text=entry_text(entry)))
            else:
                standing.completed = _latest(standing.completed, entry.seq)
    for name in state.groups if state is not None else ():
        standing = groups[name].of(dump.rank)
        standing.dumped = True
        standing.enqueued = standing.enqueued or 0
        if state is not None:
            standing.sources.append(state.source)


def _settle(standing: Standing) -> None:
    """A recorder's status outlives its entries: what it says has ended has, what it says was called was."""
    done = standing.completed if standing.completed is not None else -1
    standing.pending = {seq: op for seq, op in standing.pending.items() if seq > done}
    if not standing.pending and standing.enqueued is not None and standing.enqueued > max(done, 0):
        standing.pending[max(done, 0) + 1] = Operation("?")


def _status_text(name: str, enqueued: int | None, completed: int | None) -> str:
    return f"group {name}: last enqueued {enqueued}, last completed {completed}"


def entry_text(entry: Entry) -> str:
    """An entry in one line."""
    number = f"p2p {entry.p2p_seq}" if entry.is_p2p else f"#{entry.seq}"
    caller = f", called by {entry.frames[0]}" if entry.frames else ""
    return (
        f"group {entry.group} {number} {entry.operation.name} {entry.operation.text}: {entry.state}{caller}"
    )
