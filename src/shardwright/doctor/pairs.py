"""From pairwise measurements to who is at fault: suspects, who is cleared, and what to measure next.

A pair is slow if one of its ends is, or the way between them. An end that is in a healthy pair is cleared; a
slow pair of a cleared end and another puts the fault on the other, one of two cleared ends on the way
between, and one of two that nothing else is known of on either, until a measurement tells them apart.
"""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple

SLOW = 0.75
"""Share of the healthy value below which a pair is slow."""

Names = tuple[str, str]


class Located(NamedTuple):
    """What pairwise values say. ``undecided``: slow pairs of which either end is at fault; ``links``:
    slow pairs of two healthy ends; ``next``: for every undecided pair the measurements of which one decides;
    ``healthy``: what a pair without fault has."""

    suspects: tuple[str, ...]
    cleared: tuple[str, ...]
    undecided: tuple[Names, ...]
    links: tuple[Names, ...]
    next: tuple[Names, ...]
    healthy: float


def locate(values: Mapping[Names, float], *, slow: float = SLOW) -> Located:
    """``values``: of pairs of one kind, larger is better; few may be healthy, so that the best are taken
    for what is possible.

    Raises: ValueError: there are none.
    """
    if not values:
        raise ValueError("values are empty: give at least one pair")
    best = max(values.values())
    healthy = median(value for value in values.values() if value >= slow * best)
    bad = [pair for pair, value in values.items() if value < slow * healthy]
    cleared = {name for pair in values.keys() - set(bad) for name in pair}
    suspects = {
        name for pair in bad for name in pair if name not in cleared and _other(pair, name) in cleared
    }
    undecided = tuple(pair for pair in bad if not {*pair} & (cleared | suspects))
    return Located(
        suspects=tuple(sorted(suspects)),
        cleared=tuple(sorted(cleared)),
        undecided=undecided,
        links=tuple(pair for pair in bad if {*pair} <= cleared),
        next=tuple(_deciding(undecided, cleared, values)),
        healthy=healthy,
    )


def _other(pair: Names, name: str) -> str:
    return pair[1] if pair[0] == name else pair[0]


def _deciding(
    undecided: tuple[Names, ...], cleared: set[str], values: Mapping[Names, float]
) -> Iterator[Names]:
    """Each end of an undecided pair with someone cleared with whom it has not been measured."""
    for pair in undecided:
        for name in pair:
            partners = (one for one in sorted(cleared) if not {(name, one), (one, name)} & values.keys())
            partner = next(partners, None)
            if partner is not None:
                yield name, partner
