"""What ``memory`` prints for people: a step's memory over time, drawn in characters."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from shardwright.report.tables import table
from shardwright.units import format_bytes

KINDS = {
    "parameters": ("#", "blue"),
    "optimizer": ("=", "cyan"),
    "gradients": ("g", "green"),
    "gathered": ("+", "yellow"),
    "activations": (":", "magenta"),
    "logits": ("l", "red"),
}
"""Kinds from the bottom up: character and colour."""

PHASES = {"start": " ", "between": ".", "forward": "F", "backward": "B", "optimizer": "O"}
"""Parts of a step: letter."""

WIDTH, HEIGHT, MARGIN = 96, 16, 13
"""Of the chart, in characters: at most so wide, and what is left of it."""

GROUPS = 16
"""Largest groups of tensors that are listed."""


def memory_report(document: Mapping[str, Any]) -> RenderableType:
    """One step of each stage: chart, what the peak is made of."""
    head = Text(f"{document['model']}, {document['layout']}: memory of one step", style="bold")
    return Group(head, *(part for stage in document["stages"] for part in _stage(document, stage)))


def _stage(document: Mapping[str, Any], stage: Mapping[str, Any]) -> list[RenderableType]:
    peak = f"peak {format_bytes(stage['peak'])} ({stage['peak']:,} B) in {stage['peak_moment']}"
    parts: list[RenderableType] = [
        Text(f"\nstage {stage['stage']}, rank {stage['rank']}: {peak}", style="bold"),
        Chart(stage),
        _legend(stage),
        tensors_table(stage["tensors"], "tensors at the peak"),
    ]
    left_out = document["microbatches"] - stage["microbatches_executed"]
    if left_out:
        parts.append(Text(f"{left_out} microbatches more repeat the second", style="dim"))
    return parts


class Chart:
    """The timeline of a stage, as wide as there is room."""

    def __init__(self, stage: Mapping[str, Any]) -> None:
        self.stage = stage

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(WIDTH, options.max_width - MARGIN)
        yield chart(columns(self.stage["timeline"], width), self.stage["peak"])


def columns(timeline: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """The timeline in at most ``most`` moments: of neighbours the highest, named after the optimizer if it
    is among them."""
    count = min(most, len(timeline))
    found = []
    for column in range(count):
        part = timeline[column * len(timeline) // count : (column + 1) * len(timeline) // count]
        highest = max(part, key=total)
        updates = any(sample["phase"] == "optimizer" for sample in part)
        found.append({**highest, "phase": "optimizer"} if updates else highest)
    return found


def total(sample: Mapping[str, Any]) -> int:
    """Bytes of all kinds."""
    return sum(sample["held"].values())


def chart(samples: Sequence[Mapping[str, Any]], peak: int) -> Text:
    """Kinds on top of each other over the moments, the parts of the step below, and where the peak is."""
    made = Text(no_wrap=True)
    labels = {HEIGHT: format_bytes(peak), HEIGHT // 2: format_bytes(peak / 2), 1: format_bytes(0)}
    for row in range(HEIGHT, 0, -1):
        made.append(f"{labels.get(row, ''):>11} |")
        for sample in samples:
            made.append(*_cell(sample["held"], (row - 0.5) / HEIGHT * peak))
        made.append("\n")
    strip = "".join(PHASES[sample["phase"]] for sample in samples)
    highest = max(range(len(samples)), key=lambda column: total(samples[column]))
    made.append(f"{'':>11} +{'-' * len(samples)}\n{'':>13}{strip}\n{'':>13}{' ' * highest}^")
    return made


def _cell(held: Mapping[str, int], height: float) -> tuple[str, str]:
    """The kind that is at this height [B] of a column."""
    for kind, (character, colour) in KINDS.items():
        height -= held[kind]
        if height < 0:
            return character, colour
    return " ", ""


def _legend(stage: Mapping[str, Any]) -> Text:
    made = Text("F forward, B backward, O optimizer, . between them; at the peak ^: ")
    for kind, (character, colour) in KINDS.items():
        if stage["peak_held"][kind]:
            made.append(f"{character} ", colour)
            made.append(f"{kind} {format_bytes(stage['peak_held'][kind])}  ")
    return made


def tensors_table(groups: Sequence[Mapping[str, Any]], title: str, most: int = GROUPS) -> RenderableType:
    """Groups of tensors, the largest first."""
    made = table(title, "kind", "module", "made by", "count", "bytes", text_columns=3)
    for group in groups[:most]:
        module = group["module"] or "-"
        made.add_row(group["kind"], module, group["source"], f"{group['count']:,}", f"{group['bytes']:,}")
    if len(groups) > most:
        rest = groups[most:]
        counts = sum(group["count"] for group in rest), sum(group["bytes"] for group in rest)
        made.add_row("others", "", f"{len(rest)} lines", *(f"{count:,}" for count in counts))
    return made
