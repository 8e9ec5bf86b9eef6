"""Tables of nccl-tests held against their own definitions, row by row, with the arithmetic in words.

algbw = size / time; busbw = algbw x factor(n), n ranks: 2(n-1)/n of an all-reduce, (n-1)/n of all-gather,
reduce-scatter and all-to-all, 1 of the others. Sizes are whole tensors: count x width, x n of those that
gather or scatter.

Source: NVIDIA/nccl-tests doc/PERFORMANCE.md.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.measure.nccl_tests import WIDTHS, Measured, Row, Table
from shardwright.units import GB, format_bytes

IMPRECISE = 0.01
"""Share by which numbers may miss one another and be taken for rounded."""

WORTH_SAYING = 0.001
"""Share from which that is said."""

MOST_RANKS = 65536
"""Ranks that are looked for behind a ratio of bus to algorithm bandwidth."""

SPLIT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Collectives in which a rank's count is one part of n."""

WHOLE = ("all_reduce", "broadcast", "reduce", "send", "hypercube")

SCALES = (
    (1e3, "a thousand times"),
    (1e6, "a million times"),
    (8.0, "eight times"),
    (2.0**30 / 1e9, "2^30 / 10^9 times"),
    (2.0**20 / 1e6, "2^20 / 10^6 times"),
)
"""By which numbers differ that are given in another unit."""

What = Literal["size_time", "factor", "impossible_factor", "wrong_unit", "count", "wrong_results", "ranks"]


class Fault(NamedTuple):
    """A row that contradicts its definition, or says itself that results were wrong."""

    line: int
    what: What
    text: str


class Remark(NamedTuple):
    """Something accepted that wants to be said; ``line`` None: of the whole table."""

    line: int | None
    what: Literal["rounded", "old_algbw", "single_rank", "thinned", "ranks", "not_checked"]
    text: str


@dataclass(frozen=True)
class Judgement:
    """A table with what is known of it: ``collective`` empty, ``ranks`` and ``factor`` None where not known.

    ``rows`` are those that contradict nothing; ``old_algbw``: algbw counts what a rank receives only.
    """

    table: Table
    collective: str
    ranks: int | None
    factor: float | None
    rows: tuple[Row, ...]
    faults: tuple[Fault, ...]
    remarks: tuple[Remark, ...]
    old_algbw: bool = False

    @property
    def nodes(self) -> int | None:
        """Nodes that its ranks are on, where the text says so."""
        return self.table.around.nodes


class Band(NamedTuple):
    """Numbers between two."""

    low: float
    high: float

    def times(self, factor: float) -> "Band":
        """All of them multiplied."""
        return Band(self.low * factor, self.high * factor)

    def misses(self, other: "Band") -> float:
        """Relative gap to another band; 0 if they meet."""
        gap = max(self.low - other.high, other.low - self.high, 0.0)
        return gap / max(min(self.high, other.high), 1e-30) if gap else 0.0


def bus_factor(collective: str, ranks: int) -> float:
    """busbw / algbw of a collective of so many ranks; 0 of a single one, which moves nothing."""
    if ranks == 1:
        return 0.0
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in SPLIT else 1.0


def judge(table: Table) -> Judgement:
    """Every row of ``table`` against its own definition."""
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
    known = bool(table.around.collective or table.around.ranks) or len(table.rows) > 1
    good: list[Row] = []
    rounded: list[Remark] = []
    for row in table.rows:
        found = [*_count_faults(row, collective, parts, ranks), *_wrong_faults(row)]
        for name, half in row.halves:
            found += _half_faults(row, name, half, collective, known, ranks, factor, scale, rounded)
        faults += found
        if not any(fault.what != "wrong_results" for fault in found):
            good.append(row)
    if table.out_of_bounds and not any(fault.what == "wrong_results" for fault in faults):
        faults.append(
            Fault(
                table.line, "wrong_results", f"{table.out_of_bounds} values are out of bounds, says its end"
            )
        )
    remarks += [*rounded, *_of_whole(table, ranks)]
    return Judgement(table, collective, ranks, factor, tuple(good), tuple(faults), tuple(remarks), old)


# What the table is of


def _parts(table: Table) -> int | None:
    """size / (count x width) of most rows: the ranks of a collective that splits, 1 of others."""
    found = [_part(row) for row in table.rows if row.elements]
    counted = Counter(part for part in found if part is not None)
    return counted.most_common(1)[0][0] if counted else None


def _part(row: Row) -> int | None:
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


def _ratio(half: Measured) -> Band:
    return Band(half.busbw.low / half.algbw.high, half.busbw.high / max(half.algbw.low, 1e-30))


def _typical_ratio(table: Table) -> Band | None:
    """busbw / algbw of the row in the middle."""
    ratios = sorted((_ratio(half) for half in _sharp(table)), key=lambda band: band.low + band.high)
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
    near = [_ratio(half).misses(factor) <= IMPRECISE for half in _sharp(table)]
    return not near or 2 * sum(near) > len(near)


def _only_ranks(table: Table, collective: str, ratio: Band | None) -> int | None:
    """The one whole number of ranks whose factor meets the sharpest ratios; None: none, or several."""
    sharp = _sharp(table)
    if not sharp or ratio is None or collective in ("send", "broadcast", "reduce", "gather", "scatter"):
        return None
    if all(half.busbw.value == 0 for half in sharp):
        return 1
    counted = Counter(n for half in sharp[-8:] for n in _candidates(collective, _ratio(half)))
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
    return center if _possible(collective, ratio) else None


def _possible(collective: str, ratio: Band) -> bool:
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
        and _implied(row, half).times(share).misses(Band(half.algbw.low, half.algbw.high)) <= IMPRECISE
        for row in table.rows
        for _, half in row.halves
    ]
    return 2 * sum(same) > len(same)


# Rows


def _implied(row: Row, half: Measured) -> Band:
    """size / time [B/s]."""
    return Band(row.size / half.time.high, row.size / max(half.time.low, 1e-12))


def _half_faults(
    row: Row,
    name: str,
    half: Measured,
    collective: str,
    known: bool,
    ranks: int | None,
    factor: float | None,
    scale: float,
    rounded: list[Remark],
) -> Iterator[Fault]:
    """Faults of one half; what misses by less than 1 % is put into ``rounded``."""
    implied = _implied(row, half).times(scale)
    printed = Band(half.algbw.low, half.algbw.high)
    miss = implied.misses(printed)
    if miss > IMPRECISE:
        yield _of_time(row, name, half, scale)
    elif miss > WORTH_SAYING:
        rounded.append(
            Remark(row.line, "rounded", f"{name}: {_division(row, half)}, {miss:.2%} off the printed algbw")
        )
    if ranks == 1:
        if half.busbw.low > 0:
            yield Fault(
                row.line, "factor", f"{name}: a single rank has busbw 0, printed is {half.busbw.value / GB:g}"
            )
        return
    ratio = _ratio(half)
    if factor is None:
        if half.algbw.value and not _possible(collective, ratio):
            yield Fault(row.line, "impossible_factor", _impossible(name, half, collective))
        return
    if miss > IMPRECISE and not known:
        return  # what the collective is was read off the same row
    sure = implied if not miss else printed
    expected, bus = sure.times(factor), Band(half.busbw.low, half.busbw.high)
    miss = expected.misses(bus)
    times = half.busbw.value / max(half.algbw.value, 1e-30)
    words = f"{name}: {_numbers(half)} is x{times:.4g}; {_rule(collective, ranks, factor)}"
    if miss > IMPRECISE:
        impossible = collective == "all_reduce" and ratio.low >= 2
        more = "; 2(n-1)/n is below 2 for any n" if impossible else ""
        yield Fault(row.line, "impossible_factor" if impossible else "factor", words + more)
    elif miss > WORTH_SAYING:
        rounded.append(Remark(row.line, "rounded", f"{words}, {miss:.2%} off"))


def _rule(collective: str, ranks: int | None, factor: float) -> str:
    formula = {"all_reduce": "2(n-1)/n"}.get(
        collective, "(n-1)/n" if collective in SPLIT or not collective else "1"
    )
    if ranks is None:
        return f"in most rows it is x{factor:.4g}"
    return f"{formula} with n = {ranks} is x{factor:.4g}"


def _numbers(half: Measured) -> str:
    return f"busbw {half.busbw.value / GB:g} over algbw {half.algbw.value / GB:g}"


def _impossible(name: str, half: Measured, collective: str) -> str:
    kind = collective.replace("_", "-")
    span = "at least 1 and below 2 (2(n-1)/n)" if collective == "all_reduce" else "0.5 to 1 ((n-1)/n)"
    times = half.busbw.value / half.algbw.value
    return f"{name}: {_numbers(half)} is x{times:.4g}; of an {kind} it is {span}, whatever n"


def _division(row: Row, half: Measured) -> str:
    rate = row.size / half.time.value
    return f"{row.size:,} B in {half.time.value * 1e6:,.7g} us are {rate / GB:,.4g} GB/s"


def _of_time(row: Row, name: str, half: Measured, scale: float) -> Fault:
    """algbw against size / time: another unit, or a contradiction."""
    rate = scale * row.size / half.time.value
    printed = half.algbw.value / GB
    words = f"{name}: {_division(row, half)}, printed is algbw {printed:g}"
    quotient = rate / half.algbw.value if half.algbw.value else 0.0
    for by, text in SCALES:
        more, less = abs(quotient / by - 1) <= IMPRECISE, abs(quotient * by - 1) <= IMPRECISE
        if (more or less) and half.algbw.half < 0.05 * half.algbw.value:
            return Fault(
                row.line, "wrong_unit", f"{words}, {text} {'less' if more else 'more'}: {_unit(by, more)}"
            )
    times = f", {quotient:.3g} of it" if 0.01 < quotient < 100 else ""
    return Fault(row.line, "size_time", words + times)


def _unit(by: float, more: bool) -> str:
    if by == 1e3:
        return "the time is in ms, not us" if more else "the time is in ns, or the rate in MB/s"
    if by == 1e6:
        return "the time is in s, not us" if more else "the rate is in kB/s"
    if by == 8.0:
        return "the rate is not in GB/s" if more else "the rate is in Gb/s, not GB/s"
    return (
        "the rate is in GiB/s or size in powers of ten" if more else "size or rate mix powers of two and ten"
    )


def _count_faults(row: Row, collective: str, parts: int | None, ranks: int | None) -> Iterator[Fault]:
    """size against count x width."""
    if not row.elements or parts is None:
        return
    width, part = WIDTHS[row.type], _part(row)
    expected = parts if not collective or collective in SPLIT else 1
    if part == expected or (part is None and row.size < 64 * width * (ranks or 1)):
        return
    have = f"{row.elements:,} {row.type} of {width} B" + (f" x {expected}" if expected > 1 else "")
    yield Fault(
        row.line, "count", f"{have} are {row.elements * width * expected:,} B, printed is size {row.size:,}"
    )


def _wrong_faults(row: Row) -> Iterator[Fault]:
    bad = [f"{half.wrong:,} wrong elements {name}" for name, half in row.halves if half.wrong]
    if bad:
        yield Fault(row.line, "wrong_results", f"{' and '.join(bad)} at {format_bytes(row.size)}")


def _of_whole(table: Table, ranks: int | None) -> Iterator[Remark]:
    if ranks == 1:
        yield Remark(
            table.line,
            "single_rank",
            "one rank sends nothing: its bus bandwidth is 0 by definition, its time a launch",
        )
    values = [half.busbw.value for row in table.rows for _, half in row.halves]
    if table.average is not None and values and ranks != 1:
        mean = sum(values) / len(values)
        if abs(mean / max(table.average, 1.0) - 1) > 0.02:
            yield Remark(
                None,
                "thinned",
                f"the average it prints is {table.average / GB:.4g} GB/s, the mean of the rows here "
                f"{mean / GB:.4g}: rows were left out, or rounded",
            )
    if any(half.wrong is None for row in table.rows for _, half in row.halves):
        yield Remark(None, "not_checked", "results were not checked (#wrong is N/A)")


def plateau(rows: Sequence[Row]) -> float:
    """Bus bandwidth of large messages: the best of those within 8 times the largest [B/s]; 0 without rows."""
    measured = [row for row in rows if row.measured is not None]
    largest = max((row.size for row in measured), default=0)
    return max(
        (row.measured.busbw.value for row in measured if row.measured and 8 * row.size >= largest),
        default=0.0,
    )
