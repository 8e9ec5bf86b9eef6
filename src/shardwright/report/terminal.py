"""What commands print for people. Every function takes what the ``--json`` of its command holds."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from shardwright.report.tables import table
from shardwright.units import format_bandwidth, format_bytes, format_count, format_time

EIGHTHS_UP = "".join(chr(0x2581 + i) for i in range(8))
"""Blocks of one to eight eighths of a line's height."""

EIGHTHS_RIGHT = "".join(chr(0x258F - i) for i in range(8))
"""Blocks of one to eight eighths of a character's width."""

BAR_WIDTH = 28


def show(*parts: RenderableType) -> None:
    """Print on stdout, at the terminal's width; wide enough for a table where there is none."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=120)
    for part in parts:
        console.print(part)


def sparkline(values: Sequence[float | None], width: int = 60) -> str:
    """A curve as one line of blocks, first and last value included; what is no number is a gap."""
    count = min(width, len(values))
    picked = [values[i * (len(values) - 1) // max(count - 1, 1)] for i in range(count)]
    finite = [value for value in picked if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(EIGHTHS_UP) - 1) / (high - low) if high > low else 0.0
    return "".join(
        EIGHTHS_UP[round((value - low) * scale)] if value is not None and math.isfinite(value) else " "
        for value in picked
    )


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar of ``share`` of the width."""
    eighths = round(max(min(share, 1.0), 0.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return EIGHTHS_RIGHT[7] * full + (EIGHTHS_RIGHT[rest - 1] if rest else "")


def params_report(document: Mapping[str, Any]) -> RenderableType:
    """Parameters of a model: total, and by tensor of the first layer that has it."""
    tensors = table("tensors (of the first layer)", "name", "role", "shape", "parameters", text_columns=3)
    seen = set()
    for tensor in document["tensors"]:
        kind = (re.sub(r"\.\d+\.", ".N.", tensor["name"], count=1), *tensor["shape"])
        if kind in seen:
            continue
        seen.add(kind)
        numel = 1
        for size in tensor["shape"]:
            numel *= size
        tensors.add_row(tensor["name"], tensor["role"], " x ".join(map(str, tensor["shape"])), f"{numel:,}")
    head = (
        f"{document['model']}: {document['parameters']:,} parameters ({format_count(document['parameters'])})"
    )
    if (active := document.get("active_parameters", document["parameters"])) != document["parameters"]:
        head += f", {active:,} active for a token ({format_count(active)})"
    if mtp := document.get("mtp_parameters", 0):
        head += f"; besides, multi-token prediction: {mtp:,} ({format_count(mtp)})"
    return Group(Text(head, style="bold"), tensors)


def train_report(document: Mapping[str, Any]) -> RenderableType:
    """One run, predicted against measured."""
    losses = document["losses"]
    known = [loss for loss in losses if loss is not None]
    parts = [Text("stopped before its last step", style="yellow")] if document["interrupted"] else []
    if known:
        course = f"loss {known[0]:.4f} -> {known[-1]:.4f}"
        parts.append(Text(f"{course} in {document['steps']} steps  {sparkline(losses)}"))
    if skipped := document["skipped_steps"]:
        parts.append(
            Text(f"updates left out: {len(skipped)}, the last in step {skipped[-1]}", style="yellow")
        )
    if document.get("eval_losses"):
        held_out = ", ".join(f"{e['loss']:.4f} (step {e['step']})" for e in document["eval_losses"])
        parts.append(Text(f"held out: {held_out}"))
    parts.append(Text(predicted_against_measured(document)))
    parts.append(Text(f"run folder: {document['run_directory']}", style="dim"))
    return Group(*parts)


def predicted_against_measured(document: Mapping[str, Any]) -> str:
    """Step time and memory in one line."""
    predicted = document["predicted"]
    line = f"step time predicted {format_time(predicted['step_time'])}"
    if document["step_time"] is not None:
        ratio = document["step_time"] / predicted["step_time"]
        line += f", measured {format_time(document['step_time'])} (x {ratio:.2f})"
    line += f"; memory predicted {format_bytes(predicted['memory'])}"
    if document["peak_memory"] is not None:
        line += f", measured {format_bytes(document['peak_memory'])}"
        line += f" ({document['peak_memory'] / predicted['memory'] - 1:+.2%})"
    return line


def presets_report(document: Mapping[str, Any]) -> RenderableType:
    """Models and devices shipped with the package."""
    models = table("models", "name", "parameters")
    for model in document["models"]:
        models.add_row(model["name"], format_count(model["parameters"]))
    devices = table("devices", "name", "memory", "bf16", "link in the node", "between nodes", "aliases")
    devices.columns[-1].justify = "left"
    for device in document["devices"]:
        devices.add_row(
            device["name"],
            format_bytes(device["memory"]),
            f"{device['bf16'] / 1e12:,.1f} TFLOP/s",
            format_bandwidth(device["intra_bandwidth"]),
            format_bandwidth(device["inter_bandwidth"]),
            ", ".join(device["aliases"]),
        )
    return Group(models, devices)
