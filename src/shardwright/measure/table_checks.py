"""Tables of nccl-tests held against their own definitions, row by row, with the arithmetic in words."""

from collections.abc import Iterator, Sequence

from shardwright.measure.judgement import IMPRECISE, SPLIT, Band, Fault, Judgement, Remark
from shardwright.measure.nccl_table import WIDTHS, Measured, Row, Table
from shardwright.measure.table_ranks import Subject, implied_rate, is_possible, part_of, ratio_of, subject_of
from shardwright.units import GB, format_bytes

WORTH_SAYING = 0.001
"""Share from which that is said."""

SCALES = (
    (1e3, "a thousand times"),
    (1e6, "a million times"),
    (8.0, "eight times"),
    (2.0**30 / 1e9, "2^30 / 10^9 times"),
    (2.0**20 / 1e6, "2^20 / 10^6 times"),
)
"""By which numbers differ that are given in another unit."""


def judge(table: Table) -> Judgement:
    """Every row of ``table`` against its own definition."""
    subject = subject_of(table)
    ranks, faults = subject.ranks, [*subject.faults]
    known = bool(table.around.collective or table.around.ranks) or len(table.rows) > 1
    good: list[Row] = []
    rounded: list[Remark] = []
    for row in table.rows:
        found = [*_count_faults(row, subject), *_wrong_faults(row)]
        for name, half in row.halves:
            found += _half_faults(row, name, half, subject, known, rounded)
        faults += found
        if not any(fault.what != "wrong_results" for fault in found):
            good.append(row)
    if table.out_of_bounds and not any(fault.what == "wrong_results" for fault in faults):
        faults.append(
            Fault(
                table.line, "wrong_results", f"{table.out_of_bounds} values are out of bounds, says its end"
            )
        )
    remarks = (*subject.remarks, *rounded, *_of_whole(table, ranks))
    return Judgement(
        table,
        subject.collective,
        ranks,
        subject.factor,
        tuple(good),
        tuple(faults),
        remarks,
        subject.old_algbw,
    )


def _half_faults(
    row: Row,
    name: str,
    half: Measured,
    subject: Subject,
    known: bool,
    rounded: list[Remark],
) -> Iterator[Fault]:
    """Faults of one half; what misses by less than 1 % is put into ``rounded``."""
    collective, ranks, factor, scale = subject.collective, subject.ranks, subject.factor, subject.scale
    implied = implied_rate(row, half).times(scale)
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
    ratio = ratio_of(half)
    if factor is None:
        if half.algbw.value and not is_possible(collective, ratio):
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


def _count_faults(row: Row, subject: Subject) -> Iterator[Fault]:
    """size against count x width."""
    collective, parts, ranks = subject.collective, subject.parts, subject.ranks
    if not row.elements or parts is None:
        return
    width, part = WIDTHS[row.type], part_of(row)
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
