"""What ``explain`` prints of the bandwidth budget, of single changes, and of what makes a layout fit."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.report.tables import table
from shardwright.units import format_bytes, format_time

NOTHING = "-"

MOST_WAYS = 4
"""Changes that make a layout fit, named at most."""


def budget_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Links by level and axis, and for how much of the step each level is busy."""
    if not rows:
        return Text("bandwidth: no link is used")
    columns = ("link", "axis", "sent", "busy", "hidden", "exposed", "of the step")
    found = table("bandwidth budget of a step, an average rank", *columns, text_columns=2)
    for row in rows:
        found.add_row(
            row["link"],
            row["axis"].replace("+", "+\n"),
            format_bytes(row["bytes"]),
            *(format_time(row[name]) for name in ("busy_time", "hidden_time", "exposed_time")),
            f"{row['share']:.1%}",
        )
    shares: dict[str, float] = {}
    for row in rows:
        shares[row["link"]] = shares.get(row["link"], 0.0) + row["share"]
    busy = ", ".join(f"{link} {share:.1%}" for link, share in shares.items())
    return Group(found, Text(f"busy in all, of the step: {busy}", style="dim"))


def sensitivity_table(document: Mapping[str, Any]) -> RenderableType:
    """Single changes with what they would do, fastest first; those that a rule forbids in a line."""
    step = document["step"]["time"]
    rows: list[Mapping[str, Any]] = document["sensitivities"]
    found = table("one change, same ranks and global batch", "change", "step", "", "memory", "fits")
    allowed = [row for row in rows if row["kind"] == "layout" and row["allowed"]]
    for row in sorted(allowed, key=lambda row: float(row["step_time"])):
        memory = _signed(row["memory_change"], format_bytes)
        share = f"{row['step_time_change'] / step:+.1%}"
        fits = "yes" if row["fits"] else "no"
        found.add_row(row["change"], _signed(row["step_time_change"], format_time), share, memory, fits)
    for row in (row for row in rows if row["kind"] == "bandwidth"):
        share = f"{row['step_time_change'] / step:+.1%}"
        found.add_row(row["change"], _signed(row["step_time_change"], format_time), share, NOTHING, "")
    parts: list[RenderableType] = [found]
    forbidden = [row for row in rows if not row["allowed"]]
    if forbidden:
        told = "; ".join(f"{row['change']} ({', '.join(_codes(row))})" for row in forbidden)
        parts.append(Text(f"rules forbid: {told}", style="dim"))
    return Group(*parts)


def _codes(row: Mapping[str, Any]) -> list[str]:
    return [rule["code"] for rule in row["rules"]]


def _signed(value: float, show: Any) -> str:
    if value == 0:
        return "equal"
    return ("-" if value < 0 else "+") + str(show(abs(value)))


def fitting_text(found: Mapping[str, Any]) -> Text:
    """Whether it fits; if not, what to attack first and what makes it fit."""
    left, limit = found["left"], format_bytes(found["limit"])
    if found["on_host"] > found["host_limit"]:
        needs, room = format_bytes(found["on_host"]), format_bytes(found["host_limit"])
        return Text(f"it does not fit: {needs} on the host, of {room} for each device", style="yellow")
    if found["fits"]:
        return Text(f"it fits: {format_bytes(left)} of {limit} are left", style="green")
    first = found["terms"][0]
    lines = [
        f"it does not fit: {format_bytes(-left)} more than {limit}; most of it is {first['term']}, "
        f"{format_bytes(first['bytes'])}: {first['saver']}"
    ]
    for way in found["ways"][:MOST_WAYS]:
        price = _signed(way["step_time_change"], format_time)
        lines.append(f"{way['change']} makes it fit: {format_bytes(way['memory'])}, step {price}")
    if not found["ways"]:
        lines.append("no single change makes it fit: make two, or use more devices")
    return Text("\n".join(lines), style="yellow")
