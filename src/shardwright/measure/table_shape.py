"""Where a table's times do not grow as they should: holes and drops."""

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.measure.nccl_table import Measured, Row

FAR = 3.0
"""Times a larger message's time at which a smaller one is in a hole."""

DEEP = 0.5
"""Share of the bandwidth on both sides below which a size is in a hole."""

FALLEN = 0.7
"""Share of the best bandwidth that larger messages fall below."""

LARGE = 1 << 20
"""Bytes from which times are those of moving data."""


class Hole(NamedTuple):
    """Rows from ``first`` to ``last`` take much longer than rows around; ``after`` is the next larger."""

    first: Row
    last: Row
    worst: Row
    after: Row | None
    at_start: bool


class Drop(NamedTuple):
    """From ``first`` on bus bandwidth stays below what ``best`` reached."""

    best: Row
    first: Row
    last: Row


def holes(rows: Sequence[Row]) -> list[Hole]:
    """Sizes whose time is far above that of larger messages, or whose bandwidth is far below both sides."""
    ordered = _ordered(rows)
    deep = [_in_hole(ordered, at) for at in range(len(ordered))]
    found: list[Hole] = []
    at = 0
    while at < len(ordered):
        if not deep[at]:
            at += 1
            continue
        end = at
        while end + 1 < len(ordered) and deep[end + 1]:
            end += 1
        part = ordered[at : end + 1]
        after = ordered[end + 1] if end + 1 < len(ordered) else None
        worst = max(part, key=lambda row: _of(row).time.value)
        found.append(Hole(part[0], part[-1], worst, after, at == 0))
        at = end + 1
    return found


def _in_hole(rows: Sequence[Row], at: int) -> bool:
    own = _of(rows[at])
    later = [_of(row).time.value for row in rows[at + 1 :]]
    if later and own.time.value > FAR * min(later):
        return True
    before = [_of(row).busbw.value for row in rows[:at]]
    after = [_of(row).busbw.value for row in rows[at + 1 :]]
    return bool(before and after) and own.busbw.high < DEEP * min(max(before), max(after))


def drop(rows: Sequence[Row]) -> Drop | None:
    """The last sizes, if all of them stay below what smaller ones reached."""
    ordered = [row for row in _ordered(rows) if row.size >= LARGE]
    if len(ordered) < 3:
        return None
    best = max(ordered, key=lambda row: _of(row).busbw.value)
    limit = FALLEN * _of(best).busbw.value
    behind = ordered[ordered.index(best) + 1 :]
    low = [row for row in behind if _of(row).busbw.value < limit]
    if not low or low != behind[-len(low) :]:
        return None
    return Drop(best, low[0], low[-1])


def _ordered(rows: Sequence[Row]) -> list[Row]:
    return sorted((row for row in rows if row.measured is not None and row.size), key=lambda row: row.size)


def _of(row: Row) -> Measured:
    half = row.measured
    assert half is not None, "rows without measurement are left out"
    return half
