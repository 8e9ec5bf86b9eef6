"""Units: SI base inside (bytes, seconds, FLOP, B/s, FLOP/s), text with a unit outside.

``parse_*`` reads what people write ("80 GiB", "400 Gb/s", "5 us"); ``format_*`` prints for people;
``exact_*`` writes text from which ``parse_*`` returns the very same number.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

HOUR, DAY = 3600, 86400

BYTES: Mapping[str, float] = {
    "B": 1, "kB": KB, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB,
}  # fmt: skip
BANDWIDTH: Mapping[str, float] = {
    "B/s": 1, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "GiB/s": float(GiB), "Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8,
}  # fmt: skip
TIME: Mapping[str, float] = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60, "h": HOUR}
RATE: Mapping[str, float] = {"FLOP/s": 1, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}

COUNT: Mapping[str, int] = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

LARGEST_COUNT = 2**63 - 1
"""Of an int64 column."""

_COUNT_AND_SUFFIX = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,3})?)\s*([kKMBT]?)\s*")
_NUMBER_AND_UNIT = re.compile(r"\s*([-+0-9.eE_]+)\s*([A-Za-z/]+)\s*")


def parse_quantity(text: str | int | float, units: Mapping[str, float]) -> float:
    """Read a number with a unit of ``units``; a bare number is in SI base units already.

    Raises: ValueError: no finite number, no unit or an unknown one; the message lists the units.
    """
    fault = ValueError(f"{text!r} is not a finite number with a unit of {', '.join(units)}")
    if isinstance(text, int | float):
        if not _is_finite(text):
            raise fault
        return text
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2] not in units:
        raise fault
    number = match[1]
    try:
        result = (int(number) if re.fullmatch(r"\d+", number) else float(number)) * units[match[2]]
    except (ValueError, OverflowError):
        raise fault from None
    if not _is_finite(result):
        raise fault
    return result


def parse_count(text: str) -> int:
    """Read a count as people write it: "15T", "300 B", "1.5M", "2e12", "1,000".

    Raises: ValueError: no whole number, negative, or above ``LARGEST_COUNT``; the message lists the suffixes.
    """
    match = _COUNT_AND_SUFFIX.fullmatch(text)
    if match is not None:
        number = Decimal(re.sub("[_,]", "", match[1])) * COUNT[match[2]]
        if number <= LARGEST_COUNT and number == number.to_integral_value():
            return int(number)
    raise ValueError(f"{text!r} is not a whole number up to {LARGEST_COUNT:.1e}, alone or with k, M, B or T")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def exact_quantity(value: float, units: Mapping[str, float], *, whole: bool = False) -> str:
    """Shortest "number unit" that ``parse_quantity`` reads back as exactly ``value``, rounded if ``whole``.

    Bits are left to people: a rate is written in bytes.
    """
    best = ""
    for unit, scale in units.items():
        if unit.endswith("b/s"):
            continue
        number = value / scale
        for text in (f"{number:.0f}", f"{number:.6g}", repr(float(number))):
            candidate = f"{text} {unit}"
            if _reads_as(candidate, units, value, whole) and (not best or len(candidate) < len(best)):
                best = candidate
    return best or f"{value!r} {next(iter(units))}"


def _reads_as(text: str, units: Mapping[str, float], value: float, whole: bool) -> bool:
    try:
        number = parse_quantity(text, units)
    except ValueError:  # beyond the largest float in that unit
        return False
    return (round(number) if whole else number) == value


def format_bytes(value: float) -> str:
    """A capacity for people: GiB with two decimals, smaller units for small amounts."""
    for unit, scale in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(value) >= 0.1 * scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value:,.0f} B"


def format_bandwidth(value: float) -> str:
    """A bandwidth for people [GB/s]."""
    return f"{value / GB:,.1f} GB/s"


def format_time(value: float) -> str:
    """A duration for people: ms, or s from ten seconds on."""
    if value >= 10:
        return f"{value:,.1f} s"
    return f"{value * 1e3:,.1f} ms" if value >= 1e-4 else f"{value * 1e6:,.1f} us"


def format_span(value: float) -> str:
    """A long time for people: ms, s, min, h or days, whichever is read most easily."""
    if value >= 1e6 * DAY:
        return f"{value / DAY:.1e} days"
    for unit, scale, smallest in (
        ("days", DAY, 2 * DAY),
        ("h", HOUR, 2 * HOUR),
        ("min", 60, 120),
        ("s", 1, 1),
    ):
        if value >= smallest:
            return f"{value / scale:,.1f} {unit}"
    return format_time(value)


def format_duration(seconds: float) -> str:
    """Time left for people, as h:mm:ss or m:ss."""
    minutes, second = divmod(round(max(seconds, 0)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def format_count(value: float) -> str:
    """A count for people: 8.03 B, 405.9 B, 6.2 M."""
    for suffix, scale in ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:,.2f}{suffix}"
    return f"{value:,.0f}"


def significant(value: float, digits: int = 6) -> float:
    """``value`` with so many significant digits: estimates carry no more."""
    return float(f"{value:.{digits}g}")
