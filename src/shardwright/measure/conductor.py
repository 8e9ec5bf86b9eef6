"""The conductor: puts measurements to the ranks one by one, and finds out who is lost.

It runs in a process that is no rank, so that no rank's end is its own. It waits for nobody for ever.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from shardwright.bandwidth_map import Unmeasured
from shardwright.measure import exchange
from shardwright.measure.cells import Cell

LOOK_S = 0.2
"""How often the conductor looks for ranks that died while it waits for answers."""

SLACK_S = 0.3
"""What a rank may take beyond a measurement's limit to say that it failed."""

SIGNS_MISSED = 4
"""Signs of life in a row whose absence means that a process does not run."""


class Answers(NamedTuple):
    """What came of a cell: by group of ranks, the answers of all its ranks, or why there are none."""

    measured: dict[tuple[int, ...], list[dict[str, Any]]]
    failed: dict[tuple[int, ...], str]


@dataclass
class Conductor:
    """``ended`` says how processes of ranks ended that it knows of, by rank; ``end`` (time.monotonic) is
    when all must be over."""

    store: dist.Store
    world: int
    ended: Callable[[], Mapping[int, str]]
    end: float
    beat_s: float
    number: int = 0
    lost: dict[int, str] = field(default_factory=dict)
    broken: set[tuple[int, ...]] = field(default_factory=set)
    about: dict[int, dict[str, Any]] = field(default_factory=dict)
    signs: dict[int, tuple[int, float]] = field(default_factory=dict)  # count, and when it was new
    faults: list[Unmeasured] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Time left to measure [s]."""
        return self.end - time.monotonic()

    def gather_ranks(self, patience_s: float) -> None:
        """Wait until all ranks run; who does not within ``patience_s`` is lost."""
        limit = time.monotonic() + patience_s
        missing = set(range(self.world))
        while missing and time.monotonic() < limit:
            exchange.arrived(self.store, [f"hello/{rank}" for rank in missing], LOOK_S)
            for rank in sorted(missing):
                if (said := exchange.read(self.store, f"hello/{rank}")) is not None:
                    self.about[rank] = said
                    missing.discard(rank)
            missing -= self._note_dead("it started")
        for rank in missing:
            self._lose(rank, f"did not start within {patience_s:.0f} s")

    def measure(
        self, cell: Cell, seconds: float, limit: float, *, keep: bool = True, blame: bool = True
    ) -> Answers:
        """Have ``cell`` measured for about ``seconds`` by those of its groups that are whole.

        ``limit``: when whoever has no result gives up [s]; ``keep`` the process groups for later;
        ``blame``: to end without result is a fault, and not for want of time.
        """
        groups = [group for group in cell.groups if self.whole(group)]
        ranks = sorted(rank for group in groups for rank in group)
        if not ranks:
            return Answers({}, {})
        asked = {
            "call": cell.call,
            "what": cell.what,
            "size": cell.size,
            "seconds": seconds,
            "limit": limit,
            "keep": keep,
            "ranks": ranks,
            "groups": [{"name": self._name(group, keep), "ranks": list(group)} for group in groups],
        }
        number, self.number = self.number, self.number + 1
        exchange.ask(self.store, number, asked)
        self._wait(number, ranks, cell, limit)
        said = exchange.read_all(self.store, [f"done/{number}/{rank}" for rank in ranks])
        found = dict(zip(ranks, said, strict=True))
        return self._sorted_out(groups, found, cell, blame)

    def whole(self, group: Sequence[int]) -> bool:
        """Whether all ranks of ``group`` and all its pairs answer."""
        members = set(group)
        return not members & set(self.lost) and not any(set(pair) <= members for pair in self.broken)

    def note_silent(self, doing: str) -> None:
        """Lose the ranks that give no sign of life; takes as long as that takes to see."""
        end = time.monotonic() + (SIGNS_MISSED + 2) * self.beat_s
        while time.monotonic() < end:
            self._note_dead(doing)
            for rank in set(range(self.world)) - set(self.lost):
                if self._silent_for(rank) > SIGNS_MISSED * self.beat_s:
                    self._lose(rank, self._last_sign(rank, doing))
            time.sleep(LOOK_S)

    def give_up(self, rank: int, why: str) -> None:
        """Measure nothing more with ``rank``, which is at fault."""
        self._lose(rank, why)

    def dismiss(self) -> None:
        """Tell all ranks that there is nothing more to measure."""
        exchange.ask(self.store, self.number, None)

    def _name(self, group: tuple[int, ...], keep: bool) -> str:
        """Of a process group: the same for the same ranks, as long as it is kept."""
        name = "group/" + "-".join(map(str, group))
        return name if keep else f"{name}/{self.number}"

    def _wait(self, number: int, ranks: Sequence[int], cell: Cell, limit: float) -> None:
        """Until all have answered, or are dead or silent."""
        start = time.monotonic()
        while True:
            waiting = [rank for rank in ranks if rank not in self.lost]
            if exchange.arrived(self.store, [f"done/{number}/{rank}" for rank in waiting], LOOK_S):
                break
            self._note_dead(cell.what)
            pending = [
                rank
                for rank in ranks
                if rank not in self.lost and not self.store.check([f"done/{number}/{rank}"])
            ]
            over = time.monotonic() - start - limit
            silent = [rank for rank in pending if self._silent_for(rank) > SIGNS_MISSED * self.beat_s]
            if over > SLACK_S and (
                len(silent) == len(pending) or over > SLACK_S + SIGNS_MISSED * self.beat_s
            ):
                for rank in pending:
                    self._lose(rank, self._last_sign(rank, cell.what))
        self._note_dead(cell.what)

    def _note_dead(self, doing: str) -> set[int]:
        """Ranks whose processes have ended since the last look."""
        new = {rank: how for rank, how in self.ended().items() if rank not in self.lost}
        for rank, how in new.items():
            self._lose(rank, f"{how} while measuring {doing}")
        return set(new)

    def _silent_for(self, rank: int) -> float:
        """How long ago the last sign of life of ``rank`` was new [s]."""
        said = exchange.read(self.store, f"sign/{rank}") or [0, ""]
        count, since = self.signs.get(rank, (-1, 0.0))
        if said[0] != count:
            self.signs[rank] = said[0], time.monotonic()
            return 0.0
        return time.monotonic() - since

    def _last_sign(self, rank: int, what: str) -> str:
        said = exchange.read(self.store, f"sign/{rank}")
        doing = said[1] if said else what
        silent = self._silent_for(rank)
        if silent > SIGNS_MISSED * self.beat_s:
            return f"stopped answering: its process has given no sign for {silent:.1f} s, it was at {doing}"
        return f"hangs in {doing}: its process runs, the call does not return"

    def _lose(self, rank: int, why: str) -> None:
        self.lost[rank] = why
        self.faults.append(Unmeasured(what=f"rank {rank}", ranks=(rank,), reason=why, failed=True))

    def _sorted_out(
        self, groups: Sequence[tuple[int, ...]], found: Mapping[int, Any], cell: Cell, blame: bool
    ) -> Answers:
        """Answers by group; faults of groups whose ranks all live are noted as the group's own."""
        answers = Answers({}, {})
        for group in groups:
            said = [found[rank] for rank in group]
            errors = {rank: each for rank, each in zip(group, said, strict=True) if each and "error" in each}
            if not errors and all(said):
                answers.measured[group] = said
                self._note_wrong(group, said, cell)
                continue
            gone = [rank for rank in group if rank in self.lost]
            why = f"rank {gone[0]} {self.lost[gone[0]]}" if gone else _first_error(errors)
            answers.failed[group] = why
        if blame:
            self.note_failed(cell, {group: why for group, why in answers.failed.items() if self.whole(group)})
        return answers

    def note_failed(self, cell: Cell, groups: Mapping[tuple[int, ...], str]) -> None:
        """Put ``groups`` whose ranks all live on record as failed, and measure no more with them."""
        for group, why in groups.items():
            self.broken.add(group)
            self.faults.append(
                Unmeasured(what=f"{cell.noun} {_named(group)}", ranks=group, reason=why, failed=True)
            )

    def _note_wrong(self, group: tuple[int, ...], said: Sequence[Mapping[str, Any]], cell: Cell) -> None:
        for rank, each in zip(group, said, strict=True):
            wrong = each["wrong"] if isinstance(each["wrong"], str) else "; ".join(each["wrong"])
            if wrong:
                reason = f"on rank {rank} {wrong}"
                what = f"payload of {cell.what}"
                self.faults.append(Unmeasured(what=what, ranks=group, reason=reason, failed=True))


def _first_error(errors: Mapping[int, Mapping[str, Any]]) -> str:
    rank, said = min(errors.items())
    return f"rank {rank} at {said['doing']}: {said['error']}"


def _named(group: Sequence[int]) -> str:
    return "-".join(map(str, group)) if len(group) == 2 else str(list(group))
