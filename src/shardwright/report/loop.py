"""The summary of the whole loop on one machine."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardwright.report.check import check_report
from shardwright.report.plan import plan_report
from shardwright.report.terminal import bar, predicted_against_measured, sparkline
from shardwright.units import format_bytes, format_count


def loop_report(document: Mapping[str, Any]) -> RenderableType:
    """Plan, training and proof, a panel each."""
    check = document["check"]
    return Group(
        Panel(plan_report(document["plan"]), title="1  plan", title_align="left"),
        Panel(_training(document), title="2  train", title_align="left"),
        Panel(check_report(check), title="3  check", title_align="left"),
        Panel(_memory(document), title="memory of one rank", title_align="left"),
        Text(f"run folder: {document['train']['run_directory']}", style="dim"),
        Text(f"more: shardwright explain {document['plan_file']}", style="dim"),
    )


def _training(document: Mapping[str, Any]) -> RenderableType:
    result = document["train"]
    losses = result["losses"]
    tokens = (
        sum(1 for _ in losses) * result["tokens_per_s"] * result["step_time"] if result["step_time"] else 0
    )
    lines = [
        f"{document['plan']['model']} on {result['world_size']} ranks, {format_count(tokens)} tokens, "
        f"{result['tokens_per_s']:,.0f} tokens/s",
        f"loss {losses[0]:.3f} {sparkline(losses, 64)} {losses[-1]:.3f}",
    ]
    if result["eval_losses"]:
        lines.append("held out: " + " -> ".join(f"{found['loss']:.3f}" for found in result["eval_losses"]))
    lines.append(predicted_against_measured(result))
    return Text("\n".join(lines))


def _memory(document: Mapping[str, Any]) -> RenderableType:
    total = next(t for t in document["check"]["terms"] if t["term"] == "total")
    measured = document["train"]["peak_memory"]
    rows = [("predicted by the ledger", total["predicted"]), ("executed by the dry run", total["executed"])]
    if measured is not None:
        rows.append(("measured in training", measured))
    highest = max(value for _, value in rows)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, value in rows:
        table.add_row(name, f"{value:,} B ({format_bytes(value)})", bar(value / highest))
    return table
