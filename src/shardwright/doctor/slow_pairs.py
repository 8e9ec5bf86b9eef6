"""Measured pairs of ranks as evidence: which node, rank, rail, pair or direction is slow, and which are not.

Every pair is compared with its own kind (measure/pair_speeds.py), so that a pair across nodes is not slow for
being no NVLink. What explains most is looked for first: a direction, a node, a rail, a rank, one pair.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardwright.cluster import Cluster
from shardwright.doctor.finding import Certainty, Finding
from shardwright.doctor.pair_lines import (
    FEWEST,
    SLOW,
    Flags,
    Floats,
    Ints,
    Lines,
    limit_of,
    lines_of,
    noise_of,
)
from shardwright.doctor.pairs import Located, locate
from shardwright.doctor.rank_lists import ranks_text
from shardwright.measure.pair_speeds import PairSpeeds
from shardwright.units import format_bandwidth

ONE_WAY = 2 / 3
"""Share of the other direction below which one is slow: of two measurements both have noise."""

NOISY = 0.1
"""Noise from which pairs between both bounds are worth a word."""

MOSTLY = 0.6
"""Share of someone's pairs that are slow from which the fault is theirs rather than each pair's."""

SAMPLE = 1000
"""Pairs, besides those of ranks in slow ones, that are looked at for somebody known to be good."""

NAMED = 8
"""Names that a sentence lists."""


def pair_findings(cluster: Cluster, speeds: PairSpeeds) -> Iterator[Finding]:
    """What is slow among the measured pairs."""
    if not len(speeds.source):
        return
    lines = lines_of(speeds)
    noise = noise_of(lines)
    limit = limit_of(noise, len(lines.a))
    judge = _Judge(cluster, limit)
    one_way = min(ONE_WAY, limit_of(noise * float(np.sqrt(2)), len(lines.a)))
    found = list(judge.directions(lines, one_way))
    if np.any(lines.best < limit):
        found += [*judge.inside(lines), *judge.between(lines)]
    yield from found
    if not found and noise > NOISY and np.any(lines.best < SLOW):
        yield judge.noisy(lines, noise)


class _Judge:
    """Findings about pairs slower than ``limit`` of what is usual."""

    def __init__(self, cluster: Cluster, limit: float) -> None:
        self.per_node = cluster.gpus_per_node
        self.ranks = cluster.ranks
        self.hosts = () if cluster.map is None else cluster.map.hosts
        self.limit = limit
        self.shares_host = cluster.device.kind == "cpu"  # one program more on it makes a pair slow

    def noisy(self, lines: Lines, noise: float) -> Finding:
        slow = int(np.count_nonzero(lines.best < SLOW))
        return Finding(
            "links_noisy",
            "cannot_tell",
            f"one measurement differs from the next by {noise:.0%}: {_count(slow, 'pair')} below "
            f"{SLOW:.0%} of what is usual may be so by chance, none is below {self.limit:.0%}",
            numbers={"noise": noise, "pairs": slow},
        )

    def directions(self, lines: Lines, limit: float) -> Iterator[Finding]:
        """Pairs that are slow one way, by less than ``limit`` of the other, which is not."""
        worse = np.fmin(lines.there, lines.back)
        one_way = (worse < limit * lines.best) & (lines.best >= self.limit)
        if not one_way.any():
            return
        inner = lines.a // self.per_node == lines.b // self.per_node
        for chosen in (inner, ~inner):
            yield from self._one_way(lines.where(chosen & one_way), lines.where(chosen))

    def _one_way(self, odd: Lines, all_lines: Lines) -> Iterator[Finding]:
        """The same of pairs inside nodes, or between them: a sender, a receiver, or one pair."""
        there = odd.there < odd.back
        sender, receiver = np.where(there, odd.a, odd.b), np.where(there, odd.b, odd.a)
        measured = np.bincount(np.concatenate([all_lines.a, all_lines.b]), minlength=self.ranks)
        left = np.ones(len(sender), np.bool_)
        for ends, verb in ((sender, "sends"), (receiver, "receives")):
            for rank in np.unique(ends[left]).tolist():
                mine = left & (ends == rank)
                if np.count_nonzero(mine) >= max(2, SLOW * measured[rank]):
                    left &= ~mine
                    yield self._direction(odd.where(mine), f"{self._rank(rank)} {verb}", (rank,))
        for at in np.flatnonzero(left)[:NAMED].tolist():
            one, two = int(sender[at]), int(receiver[at])
            way = f"{self._rank(one)} sends to {self._rank(two)}"
            yield self._direction(odd.where(np.arange(len(sender)) == at), way, (one, two))

    def _direction(self, lines: Lines, way: str, ranks: tuple[int, ...]) -> Finding:
        slow = float(np.median(np.fmin(lines.there, lines.back) * lines.usual))
        fast = float(np.median(lines.best * lines.usual))
        pairs = len(lines.a)
        return Finding(
            "slow_direction",
            self._sure(pairs),
            f"{way} at {format_bandwidth(slow)}, the other way reaches {format_bandwidth(fast)} "
            f"({slow / fast:.0%}; {_count(pairs, 'pair')})",
            ranks,
            numbers={"measured": slow, "other_way": fast, "pairs": pairs},
        )

    def inside(self, lines: Lines) -> Iterator[Finding]:
        """Links of single nodes."""
        a, b = lines.a // self.per_node, lines.b // self.per_node
        inner = lines.where(a == b)
        node = inner.a // self.per_node
        names = np.unique(node).tolist()
        typical = {name: float(np.median(inner.best[node == name])) for name in names}
        whole = {name for name in names if typical[name] < self.limit and len(names) > 1}
        for name in sorted(whole):
            mine = inner.where(node == name)
            yield self._slow(
                "slow_node",
                self._sure(len(mine.a)),
                f"links inside {self._node(name)}",
                mine,
                self._ranks_of(name),
                numbers={"node": name},
            )
        for name in names:
            mine = inner.where(node == name)
            if name not in whole and np.any(mine.best < self.limit):
                yield from self._located(mine, f"inside {self._node(name)}")

    def between(self, lines: Lines) -> Iterator[Finding]:
        """Links between nodes: of a whole node, of a rail, of a rank, of a pair."""
        outer = lines.where(lines.a // self.per_node != lines.b // self.per_node)
        slow = outer.best < self.limit
        if not slow.any():
            return
        if self.per_node > 1:
            a, b = outer.a // self.per_node, outer.b // self.per_node
            values = _medians(a, b, outer.best)
            explained = np.zeros(len(outer.a), np.bool_)
            if len({name for pair in values for name in pair}) >= FEWEST and self._any_slow(values):
                found = self._blamed(values)
                yield from self._nodes(found, outer, a, b)
                blamed = _numbers(found.suspects) | _numbers(found.undecided)
                explained = np.isin(a, list(blamed)) | np.isin(b, list(blamed))
                for one, two in found.links:
                    explained |= _joins(a, b, int(one), int(two))
            outer = outer.where(~explained)
            yield from self._rails(outer)
            outer = outer.where(~np.isin(outer.a % self.per_node, self._slow_rails(outer)))
        if np.any(outer.best < self.limit):
            yield from self._located(outer, "between nodes")

    def _nodes(self, found: Located, outer: Lines, a: Ints, b: Ints) -> Iterator[Finding]:
        """Nodes that pairs between nodes single out."""
        cleared = _few([self._node(name) for name in sorted(_numbers(found.cleared))])
        for name in map(int, found.suspects):
            mine = outer.where((a == name) | (b == name))
            slow = mine.where(mine.best < self.limit)
            yield self._slow(
                "slow_node",
                self._sure(len(_medians(slow.a // self.per_node, slow.b // self.per_node, slow.best))),
                f"{self._node(name)} to other nodes",
                slow,
                self._ranks_of(name),
                note=f"; cleared: {cleared}" if cleared else "",
                numbers={"node": name, "cleared": [int(each) for each in found.cleared]},
            )
        if found.undecided:
            names = sorted(_numbers(found.undecided))
            mine = outer.where((np.isin(a, names) | np.isin(b, names)) & (outer.best < self.limit))
            yield self._open(found, mine, names, nodes=True)
        for one, two in found.links:
            mine = outer.where(_joins(a, b, int(one), int(two)))
            where = f"{self._node(int(one))} to {self._node(int(two))}"
            yield self._slow(
                "slow_pair",
                self._sure(1),
                where,
                mine,
                (),
                note="; each is fast to other nodes",
                numbers={"nodes": [int(one), int(two)]},
            )

    def _blamed(self, values: Mapping[tuple[str, str], float]) -> Located:
        """Who is at fault; besides, who is in most slow pairs, though chance has lifted a few of its own."""
        found = locate(values, slow=self.limit)
        measured = Counter(name for pair in values for name in pair)
        slow = Counter(name for pair in found.links for name in pair)
        most = {name for name, count in slow.items() if count >= max(FEWEST, MOSTLY * measured[name])}
        return found._replace(
            suspects=tuple(sorted({*found.suspects, *most})),
            cleared=tuple(name for name in found.cleared if name not in most),
            links=tuple(pair for pair in found.links if not {*pair} & most),
        )

    def _slow_rails(self, outer: Lines) -> list[int]:
        """Places in the node whose pairs with the same place elsewhere are slow, where others' are not."""
        rail = outer.a % self.per_node
        same = rail == outer.b % self.per_node
        places = np.unique(rail[same]).tolist()
        typical = {place: float(np.median(outer.best[same & (rail == place)])) for place in places}
        enough = {place: np.count_nonzero(same & (rail == place)) >= FEWEST for place in places}
        slow = [place for place in places if typical[place] < self.limit and enough[place]]
        return slow if len(slow) < len(places) else []

    def _rails(self, outer: Lines) -> Iterator[Finding]:
        for place in self._slow_rails(outer):
            mine = outer.where((outer.a % self.per_node == place) & (outer.b % self.per_node == place))
            yield self._slow(
                "slow_rail",
                self._sure(len(mine.a)),
                f"rail {place}, the link of device {place} of every node",
                mine,
                tuple(np.unique([mine.a, mine.b]).tolist()),
                numbers={"rail": place},
            )

    def _located(self, lines: Lines, where: str) -> Iterator[Finding]:
        """Ranks and pairs of ranks that the slow ones among ``lines`` single out."""
        slow = lines.best < self.limit
        touched = np.unique([lines.a[slow], lines.b[slow]])
        near = lines.where(np.isin(lines.a, touched) | np.isin(lines.b, touched) | _some(len(lines.a)))
        values = _medians(near.a, near.b, near.best)
        if len({name for pair in values for name in pair}) < FEWEST:
            return
        found = self._blamed(values)
        for rank in map(int, found.suspects):
            mine = near.where(((near.a == rank) | (near.b == rank)) & (near.best < self.limit))
            others = ranks_text({int(name) for name in found.cleared[:NAMED]})
            yield self._slow(
                "slow_rank",
                self._sure(len(mine.a)),
                f"{self._rank(rank)} {where}",
                mine,
                (rank,),
                note=f"; cleared: {others}{' and more' if len(found.cleared) > NAMED else ''}",
                numbers={"cleared": [int(each) for each in found.cleared]},
            )
        if found.undecided:
            names = _numbers(found.undecided)
            mine = near.where(
                (np.isin(near.a, list(names)) | np.isin(near.b, list(names))) & (near.best < self.limit)
            )
            yield self._open(found, mine, sorted(names), nodes=False)
        for one, two in found.links:
            mine = near.where(_joins(near.a, near.b, int(one), int(two)))
            yield self._slow(
                "slow_pair",
                self._sure(1),
                f"{self._rank(int(one))} to {self._rank(int(two))} {where}",
                mine,
                (int(one), int(two)),
                note="; each is fast to others",
            )

    def _slow(
        self,
        cause: str,
        certainty: Certainty,
        subject: str,
        lines: Lines,
        ranks: tuple[int, ...],
        *,
        note: str = "",
        numbers: Mapping[str, object] | None = None,
    ) -> Finding:
        usual = float(np.median(lines.usual))
        measured = float(np.median(lines.best * lines.usual))
        share = float(np.median(lines.best))
        return Finding(
            cause,
            certainty,
            f"{subject}: {format_bandwidth(measured)} where {format_bandwidth(usual)} are usual "
            f"({share:.0%}; {_count(len(lines.a), 'pair')}){note}",
            ranks,
            numbers={"measured": measured, "usual": usual, "share": share, "pairs": len(lines.a)}
            | dict(numbers or {}),
        )

    def _open(self, found: Located, lines: Lines, names: Sequence[int], *, nodes: bool) -> Finding:
        """Slow pairs of which nothing clears either end: which measurement would."""
        called = self._node if nodes else self._rank
        wanted = [f"measure {called(int(one))} with {called(int(two))}" for one, two in found.next[:NAMED]]
        subject = " or ".join(called(name) for name in names[:NAMED])
        ranks = tuple(np.unique([lines.a, lines.b]).tolist())
        told = self._slow("slow_ends_unknown", "cannot_tell", f"a pair of {subject}", lines, ranks)
        following = [[int(one), int(two)] for one, two in found.next]
        return replace(told, collect=tuple(wanted), numbers={**told.numbers, "next": following})

    def _sure(self, pairs: int) -> Certainty:
        """By how many pairs say so; on ranks that share a host one pair may be slow for other reasons."""
        if self.shares_host:
            return "likely" if pairs > 1 else "cannot_tell"
        return "certain" if pairs >= FEWEST else "likely"

    def _any_slow(self, values: Mapping[tuple[str, str], float]) -> bool:
        return any(value < self.limit for value in values.values())

    def _node(self, node: int) -> str:
        first = node * self.per_node
        return f"node {node}" + (f" ({self.hosts[first]})" if first < len(self.hosts) else "")

    def _rank(self, rank: int) -> str:
        return f"rank {rank}" + (f" ({self.hosts[rank]})" if rank < len(self.hosts) else "")

    def _ranks_of(self, node: int) -> tuple[int, ...]:
        return tuple(range(node * self.per_node, min((node + 1) * self.per_node, self.ranks)))


def _medians(a: Ints, b: Ints, values: Floats) -> dict[tuple[str, str], float]:
    """Median value of each pair of names."""
    width = int(max(a.max(initial=0), b.max(initial=0))) + 1
    keys, start = np.unique(np.sort(a * width + b), return_index=True)
    parts = np.split(values[np.argsort(a * width + b, kind="stable")], start[1:])
    return {
        (str(key // width), str(key % width)): float(np.median(part))
        for key, part in zip(keys.tolist(), parts, strict=True)
    }


def _some(count: int) -> Flags:
    """At most ``SAMPLE`` of so many, evenly."""
    return np.asarray(np.arange(count) % max(count // SAMPLE, 1) == 0)


def _joins(a: Ints, b: Ints, one: int, two: int) -> Flags:
    return np.asarray(((a == one) & (b == two)) | ((a == two) & (b == one)))


def _numbers(names: object) -> set[int]:
    """Names as numbers, those that are joined as alternatives too."""
    if isinstance(names, str):
        return {int(names)}
    return {number for name in names for number in _numbers(name)}  # type: ignore[attr-defined]


def _few(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
