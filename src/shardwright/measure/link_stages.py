"""The stages of a measurement of links: pairs, domains from them, collectives; each within its time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from shardwright.bandwidth_map import Unmeasured
from shardwright.measure.cells import Cell, collective_cells, pairs_in_order
from shardwright.measure.conductor import Conductor
from shardwright.measure.link_calls import payload_bytes
from shardwright.measure.link_record import LinkRecord
from shardwright.measure.nodes import find_domains
from shardwright.measure.progress import TimeBar
from shardwright.units import format_bytes

PAIR_SHARE, PAIRS_END = 0.2, 0.5
"""Of the time: what pairs should take together, and what they may at most before collectives begin."""

SHORTEST_S, LONGEST_S = 0.04, 0.6
"""Time of one measurement: below, a median is of too few calls; above, it gains nothing."""

PATIENCE_S = {"cpu": 1.0, "cuda": 10.0}
"""What a measurement may take beyond all estimates, on a busy machine, before it is tried again, with twice
the patience, and after that counts as hanging. NCCL takes seconds to connect ranks."""

PATIENT_RANKS = 256
"""Ranks beyond which patience grows with their number."""

CALLS = 6
"""Calls of a measurement at least: the checked one, the warm-up, three blocks, and one for what is around."""

LARGEST_PART = 0.25
"""Of the time left, what one large payload may take."""

REDUCED = 2.0
"""Another collective takes at most so many times an all-reduce of the same payload."""

KEEP_EVERY_S = 4.0

MOST_SECOND_CHANCES = 3
"""Failed pairs after which more of them are believed at once: a network that is down takes many with it."""

SLOW, MORE_OPINIONS = 0.7, 2
"""A pair with less than this share of what is usual among its like is measured so many times more: what else
runs on a machine slows a pair for a moment, a bad link for ever."""

FAILURES = 2
"""Pairs of a rank that fail, none being measured, after which the rank is at fault and not its links."""


@dataclass
class Stages:
    """Measurements of ``conductor`` into ``record``; ``write`` is called from time to time. ``largest``: of
    all payloads [B]."""

    conductor: Conductor
    record: LinkRecord
    bar: TimeBar
    write: Callable[[], None]
    device_type: str
    largest: int
    written: float = 0.0
    late: list[tuple[int, int]] = field(default_factory=list)  # pairs for which there was no time

    @property
    def patience_s(self) -> float:
        """What a measurement may take beyond all estimates [s]."""
        return PATIENCE_S[self.device_type] * max(1.0, self.record.world / PATIENT_RANKS)

    def keep(self, *, now: bool = False) -> None:
        """Write what is known, not too often."""
        if now or monotonic() - self.written > KEEP_EVERY_S:
            self.write()
            self.written = monotonic()

    def measure_pairs(self, hint: int) -> None:
        """Pairs both ways, until all are measured or half of the time is gone; then domains from them."""
        order = pairs_in_order(self.record.world, hint)
        time = self.conductor.left
        seconds = min(max(PAIR_SHARE * time / len(order), SHORTEST_S), LONGEST_S)
        stop = self.conductor.end - (1 - PAIRS_END) * time
        self.bar.stage(f"{len(order)} pairs of ranks, {seconds:.2g} s each")
        for place, pair in enumerate(order):
            if monotonic() + seconds > stop:
                self.late = order[place:]
                break
            begun = monotonic()
            self._pair(pair, seconds)
            if pair not in self.record.pairs and len(self.conductor.broken) <= MOST_SECOND_CHANCES:
                stop += monotonic() - begun  # the others shall not pay for it
        self._find_domains(hint)
        for _ in range(MORE_OPINIONS):
            for pair in self.record.slow_pairs(SLOW):
                if monotonic() + seconds < stop:
                    self._pair(pair, seconds)
        self._find_domains(hint)
        self.keep(now=True)

    def _find_domains(self, hint: int) -> None:
        self.record.domains = find_domains(self.record.world, self.record.bandwidths(), hint)

    def measure_late_pairs(self) -> None:
        """Those pairs for which there was no time, if there is now."""
        while self.late and self.conductor.left > 2 * SHORTEST_S:
            self._pair(self.late.pop(0), SHORTEST_S)
        if self.late:
            count = self.record.world * (self.record.world - 1) // 2
            self.record.skipped.append(
                Unmeasured(
                    what=f"{len(self.late)} of {count} pairs",
                    reason="the time was up: give more --minutes",
                )
            )

    def _pair(self, pair: tuple[int, int], seconds: float) -> None:
        conductor = self.conductor
        if not conductor.whole(pair):
            return
        cell = Cell("pair", (), (pair,), self.largest)
        self.bar.now(cell.what)
        if said := self._tried(cell, seconds, self.patience_s + 2 * seconds, keep=False).get(pair):
            self.record.add_pair(*pair, said[0])
        elif pair in conductor.broken:
            self._doubt(pair)
        self.keep()

    def _doubt(self, pair: tuple[int, int]) -> None:
        """Give up a rank none of whose pairs answers."""
        for rank in pair:
            failed = [each for each in self.conductor.broken if rank in each]
            if len(failed) >= FAILURES and not any(rank in each for each in self.record.pairs):
                others = sorted({other for each in failed for other in each} - {rank})
                self.conductor.give_up(rank, f"none of its links answers: tried with ranks {others}")

    def measure_collectives(self) -> None:
        """Collectives over the groups of the domains found, until all are measured or the time is up."""
        if self.record.domains is None:
            return
        self.bar.stage(f"collectives in domains of {list(self.record.domains.sizes)} ranks")
        cells = collective_cells(self.record.domains.sizes, self.largest)
        missing: dict[Cell, str] = {}
        for place, cell in enumerate(cells):
            left = self.conductor.left
            if left < 2 * SHORTEST_S:
                missing |= dict.fromkeys(cells[place:], "the time was up")
                break
            budget = min(max(left / (len(cells) - place), SHORTEST_S), LONGEST_S)
            smaller = self._affordable(cell, min(max(2 * budget, LARGEST_PART * left), left / 2))
            if smaller != cell:
                missing[cell] = "it would take too long for the time given"
            if smaller is not None and not self._known(smaller):
                self._collective(smaller, budget)
                self.keep()
        self._note_missing(missing)
        self._note_incomplete(cells)

    def _collective(self, cell: Cell, seconds: float) -> None:
        self.bar.now(cell.what)
        usual = self.patience_s + 2 * seconds + 2 * CALLS * self._estimate(cell)
        if measured := self._tried(cell, seconds, usual, keep=True):
            ranks = len(cell.groups[0])
            size = cell.size if cell.call == "send" else payload_bytes(cell.size, ranks)
            means = [[each["means"] for each in said] for said in measured.values()]
            self.record.add_point(cell, size, means)

    def _tried(
        self, cell: Cell, seconds: float, limit: float, *, keep: bool
    ) -> dict[tuple[int, ...], list[dict[str, Any]]]:
        """Answers by group of ranks. Groups that fail without a rank being lost get a second chance: a busy
        machine must accuse nobody."""
        conductor = self.conductor
        left = conductor.left
        first = conductor.measure(cell, seconds, min(limit, left), keep=keep, blame=False)
        again = tuple(group for group in first.failed if conductor.whole(group))
        if not again:
            return first.measured
        if left < limit:
            ranks = tuple(sorted({rank for group in again for rank in group}))
            self.record.skipped.append(Unmeasured(what=cell.noun, ranks=ranks, reason="the time was up"))
            return first.measured
        if len(conductor.broken) >= MOST_SECOND_CHANCES:
            conductor.note_failed(cell, {group: first.failed[group] for group in again})
            return first.measured
        if conductor.left < limit:
            self.record.skipped += [
                Unmeasured(what=cell.noun, ranks=group, reason=f"{first.failed[group]}; no time to try again")
                for group in again
            ]
            return first.measured
        second = conductor.measure(
            cell._replace(groups=again), seconds, min(2 * limit, conductor.left), keep=keep, blame=True
        )
        return first.measured | second.measured

    def _known(self, cell: Cell) -> bool:
        size = cell.size if cell.call == "send" else payload_bytes(cell.size, len(cell.groups[0]))
        return size in self.record.points.get((cell.call, cell.members), {})

    def _affordable(self, cell: Cell, seconds: float) -> Cell | None:
        """The cell, or the same with a smaller payload that takes no more than ``seconds``; None: there is
        none above what was measured already."""
        while CALLS * self._estimate(cell) > seconds:
            cell = cell._replace(size=cell.size // 4)
            if cell.size < 1 or self._known(cell):
                return None
        return cell

    def _estimate(self, cell: Cell) -> float:
        """Time of a call at most [s]: from smaller payloads, from an all-reduce of the same groups, or from
        the slowest pair of a group if all ranks of a node share it."""
        points = self.record.points.get((cell.call, cell.members), {})
        sums = self.record.points.get(("all_reduce", cell.members), {})
        moved = self._moved(cell)
        found = [moved if not points else float("inf")]
        found += [min(time * max(cell.size / size, 1.0), time + moved) for size, (time, _) in points.items()]
        found += [REDUCED * time for size, (time, _) in sums.items() if size >= cell.size * 0.9]
        return min(found)

    def _moved(self, cell: Cell) -> float:
        """Time of twice the payload over the slowest pair of a group, every rank of a node at once [s]."""
        rates = self.record.bandwidths()
        home = {rank: place for place, group in enumerate(cell.groups) for rank in group}
        inside = [rate for (a, b), rate in rates.items() if a in home and home[a] == home.get(b)]
        users = self.record.domains.node if self.record.domains else self.record.world
        slowest = min(inside or rates.values(), default=0.0)
        return 2 * cell.size * users / slowest if slowest else 0.0

    def _note_incomplete(self, cells: Sequence[Cell]) -> None:
        """Groups that were left out because a rank or a pair of them does not answer."""
        for members, groups in {cell.members: cell.groups for cell in cells}.items():
            without = [group for group in groups if not self.conductor.whole(group)]
            if without:
                what = f"{len(without)} of {len(groups)} groups of {members[-1]}"
                ranks = tuple(sorted({rank for group in without for rank in group}))
                reason = "a rank or a pair of theirs does not answer"
                self.record.skipped.append(Unmeasured(what=what, ranks=ranks, reason=reason))

    def _note_missing(self, missing: dict[Cell, str]) -> None:
        """One entry for each kind of group and reason."""
        sizes: dict[tuple[tuple[int, ...], str], dict[str, list[int]]] = {}
        for cell, why in missing.items():
            if not self._known(cell):
                calls = sizes.setdefault((cell.members, why), {})
                calls.setdefault(cell.call, []).append(cell.size)
        for (members, why), calls in sizes.items():
            which = "; ".join(f"{call} of {_sizes(each)}" for call, each in calls.items())
            what = f"groups of {members[-1]} ({', '.join(map(str, members))} in a domain): {which}"
            self.record.skipped.append(Unmeasured(what=what, reason=why))


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(format_bytes(size) for size in sorted(sizes))
