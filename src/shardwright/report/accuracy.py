"""What ``accuracy`` prints for people, from its JSON document."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.report.tables import table

SHOWN = 12
"""Lines of the longest lists."""


def accuracy_report(document: Mapping[str, Any]) -> RenderableType:
    """Errors by quantity and by kinds of runs, sweeps, rows farthest off, and what was not predicted."""
    step, complete = document["step_time"], document["predicted_complete"]
    parts: list[RenderableType] = [
        Text(
            f"{step['rows']:,} step times predicted; of {complete['of']:,} rows with the whole layout "
            f"{complete['rows']:,}. Errors are |ln(predicted / measured)|."
        ),
        _quantities(document),
        *_groups(document),
        _sweeps(document["sweeps"]),
        _worst(document),
        _units(document),
        _fits(document["fits"]),
        _counts("not predicted", document["unpredicted"]),
        _counts("assumed where a row does not say", document["assumed"]),
    ]
    if document["excluded"]:
        parts.append(_counts("excluded", {f"{k}: {v}": 1 for k, v in document["excluded"].items()}))
    return Group(*parts)


def _line(found: Table, *names: str, errors: Mapping[str, Any]) -> None:
    found.add_row(
        *names,
        f"{errors['rows']:,}",
        f"{errors['median']:.1%}",
        f"{errors['p90']:.1%}",
        f"{errors['bias']:+.1%}",
    )


def _quantities(document: Mapping[str, Any]) -> Table:
    found = table("errors", "", "rows", "median", "90 %", "mean")
    _line(found, "step time", errors=document["step_time"])
    for kind, errors in document["memory"].items():
        _line(found, f"memory, {kind}", errors=errors)
    return found


def _groups(document: Mapping[str, Any]) -> list[Table]:
    found: dict[str, Table] = {}
    for group in document["groups"]:
        by = group["by"]
        if by not in found:
            found[by] = table(f"step time by {by}", "", "rows", "median", "90 %", "mean")
        _line(found[by], group["name"], errors=group)
    return list(found.values())


def _sweeps(sweeps: Mapping[str, Any]) -> RenderableType:
    if not sweeps["count"]:
        return Text("no sweep: no four rows of one job")
    found = table(
        f"{sweeps['count']} sweeps of one job: choosing by prediction costs {sweeps['mean_regret']:.1%} on "
        f"average and {sweeps['worst_regret']:.1%} at worst; order (Kendall's tau) {sweeps['mean_tau']:.2f}",
        *("job", "layouts", "regret", "tau"),
    )
    for group in sorted(sweeps["groups"], key=lambda group: -group["regret"])[:SHOWN]:
        found.add_row(group["name"], str(group["layouts"]), f"{group['regret']:.1%}", f"{group['tau']:.2f}")
    return found


def _worst(document: Mapping[str, Any]) -> Table:
    found = table("farthest off", "run", "layout", "error", "largest term", text_columns=2)
    for row in document["worst"][:SHOWN]:
        found.add_row(
            row["run_id"], row["layout"], f"{row['error']:+.0%}", f"{row['term']} {row['share']:.0%}"
        )
    return found


def _units(document: Mapping[str, Any]) -> Table:
    found = table("memory as sources state it", "source", "unit", "measured", "rows", text_columns=3)
    for row in document["units"]:
        found.add_row(row["source"], row["unit"], row["kind"], str(row["rows"]))
    return found


def _fits(fits: Mapping[str, Any]) -> Text:
    return Text(
        f"of {fits['ran']} runs with the whole layout that ran, {len(fits['called_too_large'])} are called "
        f"too large; of {fits['out_of_memory']} that ran out of memory, {len(fits['called_fitting'])} fitting"
    )


def _counts(title: str, counts: Mapping[str, int]) -> RenderableType:
    if not counts:
        return Text(f"{title}: nothing")
    found = table(title, "", "rows")
    for text, count in counts.items():
        found.add_row(text, str(count))
    return found
