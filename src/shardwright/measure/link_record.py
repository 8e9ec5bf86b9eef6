"""What was measured of the links so far, as a cluster: at any moment, so that nothing is lost."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from shardwright.bandwidth_map import Curve, MapRecord, Pair, Unmeasured
from shardwright.cluster import Cluster, Level, Link, cluster_of, device, share_of_host
from shardwright.measure.cells import Cell
from shardwright.measure.link_fit import FittedLink, fit_link
from shardwright.measure.nodes import Domains
from shardwright.measure.timing import median_and_spread, slowest
from shardwright.units import significant

SHARED = 0.7
"""A rank that gets less than this share of what a pair alone has shares the link with its neighbours."""


@dataclass
class LinkRecord:
    """Pairs and curves as they come. ``base``: whose device is kept; else it is one of the shipped.
    ``source``: backend and versions; ``hosts``: of each rank."""

    world: int
    date: str
    base: Cluster | None = None
    device_name: str = "cpu"
    source: str = ""
    hosts: tuple[str, ...] = ()
    domains: Domains | None = None
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)
    points: dict[tuple[str, tuple[int, ...]], dict[int, tuple[float, float]]] = field(default_factory=dict)
    faults: list[Unmeasured] = field(default_factory=list)
    skipped: list[Unmeasured] = field(default_factory=list)

    def add_pair(self, first: int, second: int, said: dict[str, list[float]]) -> None:
        """Both directions of a pair, as its first rank measured them; of several times the best counts."""
        latency = significant(median(said["latencies"]))
        for source, target, rates in ((first, second, said["there"]), (second, first, said["back"])):
            new = Pair(source, target, significant(median(rates)), latency)
            old = self.pairs.get((source, target), new)
            best = max(new.bandwidth, old.bandwidth), min(new.latency, old.latency)
            self.pairs[source, target] = Pair(source, target, *best)

    def slow_pairs(self, share: float) -> list[tuple[int, int]]:
        """Pairs, the smaller rank first, that in one direction have less than ``share`` of the median of all
        that the same level joins."""
        levels: dict[int, list[Pair]] = {}
        for (a, b), pair in self.pairs.items():
            sizes = self.domains.sizes if self.domains else (self.world,)
            level = next(size for size in sizes if a // size == b // size)
            levels.setdefault(level, []).append(pair)
        found = set()
        for pairs in levels.values():
            usual = median(pair.bandwidth for pair in pairs)
            slow = [pair for pair in pairs if pair.bandwidth < share * usual]
            found |= {(min(pair.source, pair.target), max(pair.source, pair.target)) for pair in slow}
        return sorted(found)

    def add_point(self, cell: Cell, size: int, means: Sequence[Sequence[Sequence[float]]]) -> float:
        """A collective's time at one payload [B]: that of the slowest of its groups. ``means``: by group and
        rank, of blocks [s]."""
        time, spread = max(median_and_spread(slowest(group)) for group in means)
        point = significant(time), significant(spread, 3)
        self.points.setdefault((cell.call, cell.members), {})[size] = point
        return time

    def bandwidths(self) -> dict[tuple[int, int], float]:
        """Of pairs, smaller rank first, the faster direction [B/s]: noise and faults make slower."""
        found: dict[tuple[int, int], float] = {}
        for (a, b), pair in self.pairs.items():
            key = min(a, b), max(a, b)
            found[key] = max(pair.bandwidth, found.get(key, pair.bandwidth))
        return found

    def cluster(self) -> Cluster:
        """What is known, as a plan uses it; links of which nothing is known as the device's file has them."""
        domains = self.domains or Domains((self.world,), self.world, ())
        plain = self._plain(domains)
        curves = self._curves()
        levels, notes = self._levels(domains, plain, curves)
        links = {level.ranks: level.link for level in levels}
        inter = next((level.link for level in levels if level.ranks > domains.node), plain.inter_link)
        kind = plain.device.model_copy(
            update={"intra_link": links.get(domains.node, plain.intra_link), "inter_link": inter}
        )
        return Cluster.checked(
            plain.model_dump(exclude={"device", "levels", "curves", "map", "assumed"})
            | {
                "device": kind,
                "levels": tuple(levels) if len(levels) > 2 or any(each.shared for each in levels) else (),
                "curves": curves,
                "assumed": (*domains.notes, *notes),
                "map": self._map(),
            }
        )

    def _plain(self, domains: Domains) -> Cluster:
        """The cluster before its links were measured."""
        if self.base is not None:
            return self.base.model_copy(
                update={"ranks": self.world, "gpus_per_node": domains.node, "levels": (), "curves": ()}
            )
        plain = cluster_of(self.device_name, self.world, domains.node, fitted=True)
        if plain.device.kind != "cpu":
            return plain
        here = max(self.hosts.count(host) for host in self.hosts) if self.hosts else self.world
        return plain.model_copy(update={"device": share_of_host(device(self.device_name), here)})

    def _curves(self) -> tuple[Curve, ...]:
        return tuple(
            Curve.checked(
                {
                    "collective": collective,
                    "members": members,
                    "sizes": tuple(sorted(points)),
                    "times": tuple(points[size][0] for size in sorted(points)),
                    "spread": tuple(points[size][1] for size in sorted(points)),
                    "source": f"measured: {self.source}, {self.date}",
                }
            )
            for (collective, members), points in sorted(self.points.items())
        )

    def _levels(
        self, domains: Domains, plain: Cluster, curves: Sequence[Curve]
    ) -> tuple[list[Level], list[str]]:
        """Levels with their links, and how well these were fitted."""
        levels, notes = [], []
        gloo = plain.device.kind == "cpu"
        for level, size in enumerate(domains.sizes):
            inside = domains.sizes[level - 1] if level else 1
            name = _name(size, domains)
            base = plain.intra_link if size <= domains.node else plain.inter_link
            own = [curve for curve in curves if _passes_only(curve.members, level)]
            alone = self._pair_link(inside, size, base)
            fitted = fit_link(own, base, gloo, one_per_node=size > domains.node) or (
                None if alone is None else FittedLink(alone, 0.0)
            )
            if fitted is None:
                if size > inside:
                    notes.append(f"link of {name} as the device's file has it: nothing of it was measured")
                levels.append(Level(name=name, ranks=size, link=base))
                continue
            link = fitted.link
            shared = inside > 1 and alone is not None and link.bandwidth < SHARED * alone.bandwidth
            if shared:
                link = link.model_copy(update={"bandwidth": significant(link.bandwidth * inside)})
            levels.append(Level(name=name, ranks=size, link=link, shared=shared))
            if fitted.error:
                notes.append(f"link of {name} fitted to measured times, median error {fitted.error:.0%}")
        return levels, notes

    def _pair_link(self, inside: int, size: int, base: Link) -> Link | None:
        """A level's link as pairs have it that use it alone."""
        found = [
            pair
            for (a, b), pair in self.pairs.items()
            if a // size == b // size and a // inside != b // inside
        ]
        if not found:
            return None
        latency = significant(median(pair.latency for pair in found))
        bandwidth = significant(median(pair.bandwidth for pair in found))
        measured = {"bandwidth": bandwidth, "latency": latency, "small_latency": latency}
        return base.model_copy(update={**measured, "ll128_latency": 0.0})

    def _map(self) -> MapRecord:
        return MapRecord(
            date=self.date,
            source=self.source,
            hosts=self.hosts,
            pairs=tuple(self.pairs[key] for key in sorted(self.pairs)),
            unmeasured=(*self.faults, *self.skipped),
        )


def _passes_only(members: Sequence[int], level: int) -> bool:
    """Whether groups of ``members`` use this level's link and no other."""
    return all(n == 1 for n in members[:level]) and all(n == members[-1] for n in members[level:])


def _name(size: int, domains: Domains) -> str:
    if size == domains.node:
        return "node"
    return "network" if size == domains.sizes[-1] else f"domain of {size}"


def write_whole(cluster: Cluster, path: Path) -> None:
    """Replace ``path`` at once: whoever reads it, or what is left of a killed run, is whole."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(cluster.to_toml(), encoding="utf-8")
    os.replace(new, path)
