"""Arithmetic of a step's parts: what a stretch of the program changes, how high it rises, what it sends.

Stretches are joined one behind the other and repeated; the peak of the whole is exact, for that of each part
is kept relative to its start.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardwright.check.tape import Event
from shardwright.run.meter import KINDS, Collective, Sent

_PLACE = {kind: place for place, kind in enumerate(KINDS)}

NOTHING_SENT = Sent(0, 0)


class Rise(NamedTuple):
    """The highest that a stretch rises above its start, when it grows at all: bytes of each of KINDS."""

    held: tuple[int, ...]

    @property
    def total(self) -> int:
        """All kinds together [B]."""
        return sum(self.held)


class Stretch(NamedTuple):
    """``net``: change from start to end, of each of KINDS [B]. ``rise``: None if nothing grows."""

    net: tuple[int, ...]
    rise: Rise | None
    sent: Mapping[Collective, Sent]


NOTHING = Stretch((0,) * len(KINDS), None, {})


def stretch_of(events: Iterable[Event], sent: Mapping[Collective, Sent] | None = None) -> Stretch:
    """What some events come to, one behind the other."""
    held, total = [0] * len(KINDS), 0
    highest: int | None = None
    at: tuple[int, ...] = ()
    for kind, nbytes in events:
        held[_PLACE[kind]] += nbytes
        total += nbytes
        if nbytes > 0 and (highest is None or total > highest):
            highest, at = total, tuple(held)
    return Stretch(tuple(held), None if highest is None else Rise(at), sent or {})


def then(first: Stretch, second: Stretch) -> Stretch:
    """One stretch behind another. Of equal peaks the earlier counts."""
    later = None if second.rise is None else Rise(plus(first.net, second.rise.held))
    return Stretch(
        plus(first.net, second.net), _higher(first.rise, later), sent_plus(first.sent, second.sent)
    )


def times(stretch: Stretch, count: int) -> Stretch:
    """A stretch ``count`` times, one behind the other."""
    if count == 0:
        return NOTHING
    rise = stretch.rise
    if rise is not None and sum(stretch.net) > 0:
        rise = Rise(plus(scaled(stretch.net, count - 1), rise.held))
    return Stretch(scaled(stretch.net, count), rise, sent_times(stretch.sent, count))


def _higher(first: Rise | None, second: Rise | None) -> Rise | None:
    if first is None or second is None:
        return first or second
    return second if second.total > first.total else first


def plus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Sum, kind by kind."""
    return tuple(x + y for x, y in zip(a, b, strict=True))


def scaled(a: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Product with a number, kind by kind."""
    return tuple(count * x for x in a)


def sent_plus(a: Mapping[Collective, Sent], b: Mapping[Collective, Sent]) -> dict[Collective, Sent]:
    """Sum, call by call."""
    return {key: Sent(*plus(a.get(key, NOTHING_SENT), b.get(key, NOTHING_SENT))) for key in sorted({*a, *b})}


def sent_times(a: Mapping[Collective, Sent], count: int) -> dict[Collective, Sent]:
    """Product with a number, call by call."""
    return {key: Sent(*scaled(sent, count)) for key, sent in a.items()}
