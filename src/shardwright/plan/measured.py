"""Measured times of collectives, as corrections of the modelled ones: measured over modelled time, by size.

A curve is of groups of one kind. Groups of just that kind take what was measured. Others that pass the same
outermost level of links take what the model says of them, times what it is wrong by for the nearest kind that
was measured: how times grow with a group is the model's part, how good the links are the measurement's.
Between sizes the correction goes straight over the logarithm of the size; beyond the ends it stays.

Symbols: members of a group that share a domain of each level, innermost first, see bandwidth_map.py:Curve.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.bandwidth_map import Curve
from shardwright.cluster import Cluster
from shardwright.plan.table import Floats, Ints
from shardwright.units import BYTES, exact_quantity, format_bytes

INSIDE_FIRST = 64.0
"""How much more a power of two between members inside the outermost level counts than one between domains
there: those inside share its links. No group is larger than two to that power."""


@dataclass(frozen=True)
class Ratios:
    """What the model is wrong by for one collective: measured over modelled time, a row a curve, a column a
    size; below them a row of ones, for groups that nothing was measured of."""

    curves: tuple[Curve, ...]
    log_sizes: Floats
    values: Floats

    def of_groups(self, members: Ints) -> "Correction":
        """The correction of groups whose ``members`` of each level are along the last dim."""
        return Correction(self, self._nearest(members))

    def _nearest(self, members: Ints) -> NDArray[np.intp]:
        """The row of each group: of curves on its outermost level that with the nearest members inside, then
        the nearest number of domains."""
        known = np.array([curve.members for curve in self.curves])
        parts, level = _parts(members)[..., None, :], outermost(members)[..., None]
        apart, of_curve = np.abs(parts - _parts(known)), outermost(known)
        at_level = np.arange(known.shape[-1]) == of_curve[:, None]
        distance = np.where(at_level, apart, INSIDE_FIRST * apart).sum(axis=-1)
        distance = np.where((level == of_curve) & (level >= 0), distance, np.inf)
        none = np.isinf(distance).all(axis=-1)
        return np.where(none, len(self.curves), distance.argmin(axis=-1))


@dataclass(frozen=True)
class Correction:
    """``ratios`` for placements: ``row`` says whose each placement takes."""

    ratios: Ratios
    row: NDArray[np.intp]

    def at(self, payload_bytes: Floats, index: NDArray[np.intp] | None) -> Floats:
        """Measured over modelled time of a launch of so many bytes, for layouts that have the placements of
        ``index``; None: as they stand. They broadcast."""
        sizes, values = self.ratios.log_sizes, self.ratios.values
        row = self.row if index is None else self.row[index]
        place = np.interp(np.log(np.maximum(payload_bytes, 1.0)), sizes, np.arange(len(sizes)))
        before = np.minimum(place.astype(np.intp), len(sizes) - 2)
        low = values[row, before]
        return np.asarray(low + (place - before) * (values[row, before + 1] - low))

    def curve(self, row: int) -> Curve | None:
        """The curve that a placement takes, if one fits."""
        found = int(self.row.ravel()[row])
        return self.ratios.curves[found] if found < len(self.ratios.curves) else None


def measured_ratios(
    curves: Sequence[Curve], modelled: Callable[[str, Curve], Floats]
) -> Iterator[tuple[str, Ratios]]:
    """Every collective with the ratios of its curves; ``modelled``: times of a curve's sizes. The largest
    groups come first, which are taken where two are as near."""
    for name in sorted({curve.collective for curve in curves}):
        own = tuple(sorted((c for c in curves if c.collective == name), key=lambda c: -c.ranks))
        logs = [np.log(curve.sizes) for curve in own]
        every = np.unique(np.concatenate(logs))
        every = np.append(every, every[-1] + 1)  # two at least
        rows = [
            np.interp(every, log, np.array(curve.times) / modelled(name, curve))
            for log, curve in zip(logs, own, strict=True)
        ]
        yield name, Ratios(own, every, np.stack([*rows, np.ones(len(every))]))


def usable_curves(cluster: Cluster) -> list[Curve]:
    """Curves of groups of two ranks and more, without points of no bytes, which cost nothing in the model."""
    found = []
    for curve in cluster.curves:
        points = [n for n, size in enumerate(curve.sizes) if size > 0]
        if curve.ranks > 1 and points:
            sizes, times = (tuple(part[n] for n in points) for part in (curve.sizes, curve.times))
            found.append(curve.model_copy(update={"sizes": sizes, "times": times, "spread": ()}))
    return found


def outermost(members: Ints) -> Ints:
    """The outermost level that groups pass, counted from 0; -1: none."""
    levels = np.where(_parts(members) > 0, np.arange(members.shape[-1]), -1)
    return np.asarray(levels.max(axis=-1))


def _parts(members: Ints) -> Floats:
    """How many times as many members each level joins as the one below, in powers of two."""
    first = np.zeros((*members.shape[:-1], 1))
    return np.asarray(np.diff(np.log2(members), axis=-1, prepend=first))


# For people


def curve_words(curve: Curve, members: Sequence[int], payload_bytes: float) -> str:
    """What a time of groups with ``members`` rests on: which measurement, and how far it is carried."""
    first, last = (exact_quantity(curve.sizes[end], BYTES, whole=True) for end in (0, -1))
    sizes = first if len(curve.sizes) == 1 else f"{first} to {last}"
    words = f"measured {curve.collective} over {list(curve.members)}, {sizes}"
    if tuple(members) != curve.members:
        words += f", carried to {list(members)} by the model"
    if not curve.sizes[0] <= payload_bytes <= curve.sizes[-1]:
        words += f"; its end is taken for {format_bytes(round(payload_bytes))}"
    return words


def links_words(cluster: Cluster) -> list[str]:
    """A line on what was measured of the links, for each level; nothing without curves."""
    curves = usable_curves(cluster)
    if not curves:
        return []
    levels = outermost(np.array([curve.members for curve in curves]))
    by_level = []
    for number, level in enumerate(cluster.domains):
        names = sorted({c.collective for c, own in zip(curves, levels, strict=True) if own == number})
        by_level.append(f"{level.name}: {', '.join(names) or 'none'}")
    return [f"links: times by size as measured ({'; '.join(by_level)}); the rest by latency and bandwidth"]
