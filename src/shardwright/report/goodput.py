"""What ``goodput`` prints for people, from its JSON document."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.report.tables import table
from shardwright.report.terminal import bar
from shardwright.units import DAY, HOUR, format_bytes, format_count, format_span, format_time

NAMES = {
    "step_time": "step",
    "device_mtbf": "between failures of a device",
    "save_time": "save, the job standing still",
    "restart_time": "restart after a failure",
}


def goodput_report(document: Mapping[str, Any]) -> RenderableType:
    """Ideal and expected time and cost, what the difference is spent on, and other intervals."""
    return Group(
        Text(
            f"{document['model']} on {document['devices']:,} x {document['device']}, {document['layout']}: "
            f"{format_count(document['tokens'])} tokens in {document['steps']:,} steps of "
            f"{format_count(document['tokens_per_step'])}, {document['flops']:.2e} FLOP"
        ),
        _conditions(document),
        _bills(document),
        _spent(document),
        Text(_checkpoint(document["checkpoint"])),
        _intervals(document),
        Text(_levers(document)),
    )


def _conditions(document: Mapping[str, Any]) -> Table:
    found = table("what the run meets", "", "", "source", text_columns=3)
    for name, words in NAMES.items():
        assumed = "assumed: " if name in document["assumed"] else ""
        show = format_time if name == "step_time" else format_span
        found.add_row(words, show(document[name]), assumed + document["sources"][name])
    found.add_row("between failures of the job", format_span(document["mtbf"]), "any device stops it")
    return found


def _bills(document: Mapping[str, Any]) -> RenderableType:
    found = table("time and cost", "", "days", "device-hours", "per T tokens", "cost")
    for name in ("ideal", "expected"):
        bill = document[name]
        found.add_row(
            name,
            f"{bill['time'] / DAY:,.2f}",
            f"{bill['device_time'] / HOUR:,.0f}",
            f"{bill['device_time_per_token'] * 1e12 / HOUR:,.0f}",
            "not stated" if bill["cost"] is None else f"{bill['cost']:,.0f}",
        )
    price = document["price_per_device_hour"]
    words = "no price given: --price" if price is None else f"at {price:g} a device-hour"
    return Group(found, Text(f"cost: {words}", style="dim"))


def _spent(document: Mapping[str, Any]) -> Table:
    expected = document["expected"]
    found = table(f"goodput {expected['goodput']:.1%}", "spent on", "days", "", "share")
    found.columns[2].justify = "left"
    for name in ("work", "checkpoints", "rework", "restarts"):
        share = expected[name] / expected["time"]
        found.add_row(name, f"{expected[name] / DAY:,.2f}", bar(share), f"{share:.2%}")
    return found


def _checkpoint(found: Mapping[str, Any]) -> str:
    return (
        f"save every {found['interval_steps']:,} steps ({format_span(found['interval'])}), "
        f"{format_bytes(found['bytes'])}, {found['saves']:,.0f} times; "
        f"best {format_span(found['best'])}, Daly {format_span(found['daly'])}, "
        f"Young {format_span(found['young'])}"
    )


def _intervals(document: Mapping[str, Any]) -> Table:
    best = document["checkpoint"]["interval_steps"]
    found = table("other intervals", "steps", "interval", "days", "goodput", "checkpoints", "rework")
    found.columns[0].justify = "right"
    for row in document["intervals"]:
        found.add_row(
            f"{row['interval_steps']:,}",
            format_span(row["interval"]),
            f"{row['time'] / DAY:,.2f}",
            f"{row['goodput']:.2%}",
            f"{row['checkpoints'] / row['time']:.2%}",
            f"{row['rework'] / row['time']:.2%}",
            style="bold" if row["interval_steps"] == best else "",
        )
    return found


def _levers(document: Mapping[str, Any]) -> str:
    expected = document["expected"]
    parts = [
        f"{lever['change']} {lever['goodput']:.1%} ({(lever['time'] - expected['time']) / DAY:+,.2f} days)"
        for lever in document["levers"]
    ]
    failures = expected["failures"]
    count = f"{failures:,.0f}" if failures >= 10 else f"{failures:.2g}"
    return f"{count} failures expected. Goodput with " + ", ".join(parts)
