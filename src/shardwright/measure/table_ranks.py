"""What a table of nccl-tests is of, where its text does not say: collective, ranks, factor, old algbw."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.measure.judgement import IMPRECISE, SPLIT, Band, Fault, Remark, bus_factor
from shardwright.measure.nccl_table import WIDTHS, Measured, Row, Table

MOST_RANKS = 65536
"""Ranks that are looked for behind a ratio of bus to algorithm bandwidth."""


class Subject(NamedTuple):
    """What a table is of. ``parts``: size / (count x width); ``scale``: what algbw is of size / time;
    ``factor``: what busbw / algbw must be. None: not known; ``collective`` empty likewise."""

    collective: str
    ranks: int | None
    parts: int | None
    factor: float | None
    scale: float
    old_algbw: bool
    remarks: tuple[Remark, ...]
    faults: tuple[Fault, ...]


def subject_of(table: Table) -> Subject:
    """As the text around a table says, and as its columns tell."""
    parts = _parts(table)
    collective = _collective(table, parts)
    ratio = _typical_ratio(table)
    ranks, remarks, faults = _ranks(table, collective, parts, ratio)
    old = _is_old(table, collective, parts, ranks)
    if old and not collective and not table.rows[0].redop:
        collective = "all_gather"  # a reduce-scatter names its operator, and no other counted so
    factor = 1.0 if old else _factor(collective, ranks, ratio)
    scale = (ranks - 1) / ranks if old and ranks else 1.0
    if old and ranks:
        remarks.append(
            Remark(
                table.line,
                "old_algbw",
                f"algbw is {scale:.4g} of size / time in every row and busbw equals it: an old version "
                f"counted what a rank receives, (n-1)/n of the size with n = {ranks}; bus bandwidths and "
                "times stand",
            )
        )
    return Subject(collective, ranks, parts, factor, scale, old, tuple(remarks), tuple(faults))


def implied_rate(row: Row, half: Measured) -> Band:
    """size / time [B/s]."""
    return Band(row.size / half.time.high, row.size / max(half.time.low, 1e-12))


def _parts(table: Table) -> int | None:
    """size / (count x width) of most rows: the ranks of a collective that splits, 1 of others."""
    found = [part_of(row) for row in table.rows if row.elements]
    counted = Counter(part for part in found if part is not None)
    return counted.most_common(1)[0][0] if counted else None


def part_of(row: Row) -> int | None:
    """size / (count x width) of a row; None: no whole number."""
    bytes_of_count = row.elements * WIDTHS[row.type]
    return row.size // bytes_of_count if bytes_of_count and row.size % bytes_of_count == 0 else None


def _collective(table: Table, parts: int | None) -> str:
    """As the text names it, or as its columns tell: operator, root, and whether a count is a part of it."""
    if table.around.collective:
        return table.around.collective
    row = table.rows[0]
    rooted = row.root is not None and row.root >= 0
    if row.redop not in ("", "none"):
        if parts is not None and parts > 1:
            return "reduce_scatter"
        return "reduce" if rooted else "all_reduce" if row.root is not None else _by_ratio(table, "reduce")
    if parts == 1 and row.redop == "none":
        return "broadcast" if rooted else "send"
    return ""  # all-gather and all-to-all look alike


def _by_ratio(table: Table, other: str) -> str:
    ratio = _typical_ratio(table)
    return "all_reduce" if ratio is None or ratio.high > 1 + IMPRECISE else other


def _sharp(table: Table) -> list[Measured]:
    """Measurements whose bandwidths have two digits or more, largest last."""
    found = [half for row in table.rows for _, half in row.halves if row.size]
    sharp = [half for half in found if half.algbw.half <= 0.06 * half.algbw.value and half.algbw.value]
    return sorted(sharp, key=lambda half: half.algbw.half / half.algbw.value, reverse=True)


def ratio_of(half: Measured) -> Band:
    """busbw / algbw."""
    return Band(half.busbw.low / half.algbw.high, half.busbw.high / max(half.algbw.low, 1e-30))


def _typical_ratio(table: Table) -> Band | None:
    """busbw / algbw of the row in the middle."""
    ratios = sorted((ratio_of(half) for half in _sharp(table)), key=lambda band: band.low + band.high)
    return ratios[(len(ratios) - 1) // 2] if ratios else None


def _ranks(
    table: Table, collective: str, parts: int | None, ratio: Band | None
) -> tuple[int | None, list[Remark], list[Fault]]:
    """Ranks as stated, as counts tell, or as the one whole number that fits the ratios."""
    stated = table.around.ranks
    split = collective in SPLIT or not collective
    told = parts if split and parts is not None and parts > 1 else None
    told = told or _only_ranks(table, collective, ratio)
    if stated is None or told is None or told == stated or _fits(stated, collective, table):
        return stated or told, [], []
    several, whole = len(_sharp(table)) > 1, told % stated == 0
    if not table.around.listed and several and whole:
        said = f"the text speaks of {stated} ranks, the columns are those of {told}: taken for {told}"
        return told, [Remark(table.line, "ranks", said)], []
    if several and told != stated:
        said = (
            f"busbw / algbw is {_center(ratio):.4g}, which is that of {told} ranks; with the "
            f"{stated} that are stated it would be {bus_factor(collective or 'all_gather', stated):.4g}"
        )
        return stated, [], [Fault(table.line, "ranks", said)]
    return stated, [], []


def _fits(ranks: int, collective: str, table: Table) -> bool:
    """Whether most ratios are within 1 % of those of so many ranks."""
    factor = Band(*[bus_factor(collective or "all_gather", ranks)] * 2)
    near = [ratio_of(half).misses(factor) <= IMPRECISE for half in _sharp(table)]
    return not near or 2 * sum(near) > len(near)


def _only_ranks(table: Table, collective: str, ratio: Band | None) -> int | None:
    """The one whole number of ranks whose factor meets the sharpest ratios; None: none, or several."""
    sharp = _sharp(table)
    if not sharp or ratio is None or collective in ("send", "broadcast", "reduce", "gather", "scatter"):
        return None
    if all(half.busbw.value == 0 for half in sharp):
        return 1
    counted = Counter(n for half in sharp[-8:] for n in _candidates(collective, ratio_of(half)))
    most = max(counted.values(), default=0)
    best = [n for n, count in counted.items() if count == most]
    return best[0] if len(best) == 1 and 2 * most > len(sharp[-8:]) else None


def _candidates(collective: str, ratio: Band) -> Sequence[int]:
    """Numbers of ranks whose factor lies in ``ratio``; at most two matter."""
    scale = 2.0 if collective == "all_reduce" else 1.0
    if ratio.low >= scale:
        return []
    least = 1 / (1 - max(ratio.low, 0.0) / scale)
    most = min(1 / (1 - ratio.high / scale), MOST_RANKS) if ratio.high < scale else MOST_RANKS
    first, last = max(int(least + 1 - 1e-9), 2), int(most + 1e-9)
    return range(first, min(last, first + 64) + 1)


def _factor(collective: str, ranks: int | None, ratio: Band | None) -> float | None:
    """What busbw / algbw must be; of unknown ranks what it is in most rows, if that is possible at all."""
    if ranks is not None and collective:
        return bus_factor(collective, ranks)
    if ranks is not None:
        # columns alone: gathers and trades have the same factor, everything else is named by its columns
        return bus_factor("all_gather", ranks)
    if collective in ("send", "broadcast", "reduce"):
        return 1.0
    if ratio is None:
        return None
    center = _center(ratio)
    return center if is_possible(collective, ratio) else None


def is_possible(collective: str, ratio: Band) -> bool:
    """Whether any number of ranks has such a ratio; an unknown collective may have each."""
    if collective == "all_reduce":
        return ratio.high >= 1 - IMPRECISE and ratio.low < 2
    return not collective or (ratio.high >= 0.5 * (1 - IMPRECISE) and ratio.low < 1)


def _center(ratio: Band | None) -> float:
    return 0.0 if ratio is None else (ratio.low + ratio.high) / 2


def _is_old(table: Table, collective: str, parts: int | None, ranks: int | None) -> bool:
    """Whether algbw is (n-1)/n of size / time and busbw the same: all_gather_perf of old versions."""
    gathers = collective in SPLIT or (not collective and (parts or 0) > 1)
    if not gathers or not ranks or ranks == 1:
        return False
    share = (ranks - 1) / ranks
    same = [
        half.algbw.value == half.busbw.value
        and implied_rate(row, half).times(share).misses(Band(half.algbw.low, half.algbw.high)) <= IMPRECISE
        for row in table.rows
        for _, half in row.halves
    ]
    return 2 * sum(same) > len(same)
