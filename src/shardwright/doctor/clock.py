"""Times of day in log lines, as seconds since the start of a year: enough to say what came first."""

import re

_GLOG = re.compile(r"\[[EWIF](\d{1,2})(\d{2}) (\d\d):(\d\d):(\d\d)(\.\d+)?")
_ISO = re.compile(r"(?<!\d)\d{4}[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)([.,]\d+)?")
_SYSLOG = re.compile(
    r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)(\.\d+)?"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_BEFORE = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)
"""Days of a leap year before each month: order is what matters."""


def time_of(text: str) -> float | None:
    """Seconds since New Year of the first time in a line, by glog, ISO or syslog; None without one."""
    head = text[:160]
    if (glog := _GLOG.search(head)) is not None:
        month, rest = int(glog[1]), glog.groups()[1:]
    elif (iso := _ISO.search(head)) is not None:
        month, rest = int(iso[1]), iso.groups()[1:]
    elif (syslog := _SYSLOG.search(head)) is not None:
        month, rest = _MONTHS.index(syslog[1]) + 1, syslog.groups()[1:]
    else:
        return None
    if not 1 <= month <= 12:
        return None
    day, hour, minute, second, part = rest
    days = _BEFORE[month - 1] + int(day or 0) - 1
    fraction = float("0." + part[1:]) if part and len(part) > 1 else 0.0
    return days * 86400.0 + int(hour or 0) * 3600 + int(minute or 0) * 60 + int(second or 0) + fraction


def clock_text(time: float) -> str:
    """Hours, minutes and seconds of such a time."""
    second = int(time) % 86400
    return f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
