"""What commands print for people. Every function takes what the ``--json`` of its command holds."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

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


def _table(title: str, *columns: str, text_columns: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text_columns else "right", overflow="fold")
    return table


def params_report(document: Mapping[str, Any]) -> RenderableType:
    """Parameters of a model: total, and by tensor of the first layer that has it."""
    table = _table("tensors (of the first layer)", "name", "role", "shape", "parameters", text_columns=3)
    seen = set()
    for tensor in document["tensors"]:
        kind = (re.sub(r"\.\d+\.", ".N.", tensor["name"], count=1), *tensor["shape"])
        if kind in seen:
            continue
        seen.add(kind)
        numel = 1
        for size in tensor["shape"]:
            numel *= size
        table.add_row(tensor["name"], tensor["role"], " x ".join(map(str, tensor["shape"])), f"{numel:,}")
    head = (
        f"{document['model']}: {document['parameters']:,} parameters ({format_count(document['parameters'])})"
    )
    if (active := document.get("active_parameters", document["parameters"])) != document["parameters"]:
        head += f", {active:,} active for a token ({format_count(active)})"
    if mtp := document.get("mtp_parameters", 0):
        head += f"; besides, multi-token prediction: {mtp:,} ({format_count(mtp)})"
    return Group(Text(head, style="bold"), table)


def plan_report(document: Mapping[str, Any]) -> RenderableType:
    """Best layouts, and why the others are out."""
    table = _table(
        "best layouts", "layout", "device memory", "step", "tokens/s/GPU", "MFU", "exposed", "runs"
    )
    for row in document["best"]:
        table.add_row(
            row["label"],
            format_bytes(row["memory"]["device"]),
            format_time(row["step_time"]),
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['mfu']:.1%}",
            format_time(row["exposed_time"]),
            "yes" if row["runnable"] else "modelled",
        )
    parts: list[RenderableType] = [
        Text(
            f"{document['considered']:,} layouts considered, {document['evaluated']:,} evaluated, "
            f"{document['feasible']:,} fit {format_bytes(document['device_memory'])} a device "
            f"({format_time(document['search_time'])})"
        )
    ]
    if document["assumed"]:
        parts.append(Text("assumed: " + ", ".join(document["assumed"]), style="dim"))
    parts.append(table)
    if document["rejected"]:
        out = _table("rejected", "layouts", "reason", text_columns=2)
        for reason, count in document["rejected"].items():
            out.add_row(f"{count:,}", f"{reason}: {document['rejected_notes'].get(reason, '')}")
        parts.append(out)
    if document.get("why"):
        parts.append(Text(document["why"], style="green"))
    return Group(*parts)


def explain_report(document: Mapping[str, Any]) -> RenderableType:
    """Ledger, timeline, traffic and step time of one layout."""
    return Group(
        *_explain_head(document),
        _ledger_table(document),
        _timeline_table(document),
        _activations_text(document),
        _traffic_table(document),
        _step_table(document),
    )


def _explain_head(document: Mapping[str, Any]) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if document["assumed"]:
        lines.append(Text("assumed: " + ", ".join(document["assumed"]), style="dim"))
    units = ", ".join(_unit_text(unit) for unit in document["units"])
    lines.append(Text(f"gathered at once, share of the parameters: {units}"))
    if not document["stored_prediction_agrees"]:
        lines.append(
            Text(
                "the prediction stored in the plan is not of this layout and version: computed afresh here",
                style="yellow",
            )
        )
    if not document["runnable"]:
        lines.append(Text("not runnable: " + "; ".join(document["not_runnable_reasons"]), style="yellow"))
    return lines


def _unit_text(unit: Mapping[str, Any]) -> str:
    copies = f" x {unit['copies']}" if unit["copies"] > 1 else ""
    return f"{unit['kind']}{copies} {unit['share']:.1%}"


def _ledger_table(document: Mapping[str, Any]) -> RenderableType:
    stage = document["stages"][0]
    memory = document["device"]["memory"]
    table = _table(f"memory at the peak ({document['peak_moment']})", "term", "bytes", "", "of the device")
    table.columns[2].justify = "left"
    names = (
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "gathered",
        "communicators",
        "context",
        "margin",
    )
    for name in names:
        share = stage[name] / memory
        table.add_row(name, format_bytes(stage[name]), bar(share), f"{share:.1%}")
    table.add_row(
        "total", format_bytes(stage["total"]), bar(stage["total"] / memory), f"{stage['total'] / memory:.1%}"
    )
    rest = ", ".join(f"{name} {format_bytes(value)}" for name, value in stage["at_rest"].items())
    return Group(table, Text(f"at rest, end of backward: {rest}"))


def _timeline_table(document: Mapping[str, Any]) -> Table:
    highest = max(moment["allocated"] for moment in document["timeline"])
    microbatch = document["peak_moment"].split(":")[0]
    table = _table(f"allocated through the {microbatch}", "moment", "allocated", "", text_columns=1)
    table.columns[2].justify = "left"
    for moment in document["timeline"]:
        if not moment["moment"].startswith(microbatch):
            continue
        share = moment["allocated"] / highest
        style = "bold" if share == 1.0 else ""
        table.add_row(moment["moment"], format_bytes(moment["allocated"]), bar(share), style=style)
    return table


def _activations_text(document: Mapping[str, Any]) -> Text:
    found = document["activations"]
    saved = sum(found["saved_by_block"].values())
    largest = sorted(found["saved_by_block"].items(), key=lambda item: -item[1])[:6]
    text = (
        f"recompute {found['recompute']}: a block keeps {format_bytes(saved)} of "
        f"{format_bytes(found['saved_by_block_without_recompute'])} a microbatch, "
        f"x {found['blocks']} blocks; most: "
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    )
    if found["kept_operations"]:
        text += f"\nkept operations: {', '.join(found['kept_operations'])}"
    return Text(text)


def _traffic_table(document: Mapping[str, Any]) -> RenderableType:
    if not document["traffic"]:
        return Text("traffic: none, one rank")
    columns = ("axis", "collective", "link", "launches", "sent", "busy", "exposed")
    table = _table("traffic of a step, each rank", *columns, text_columns=3)
    for column in table.columns:
        column.min_width = len(str(column.header))
    for column in table.columns[:2]:
        column.no_wrap = True  # a name broken inside a word is no name
    for flow in document["traffic"]:
        table.add_row(
            f"{flow['axis']} ({flow['degree']})".replace("+", "+\n"),
            flow["collective"],
            flow["link"],
            f"{flow['launches']:,}",
            format_bytes(flow["bytes"]),
            format_time(flow["busy_time"]),
            format_time(flow["exposed_time"]),
        )
    return table


def _step_table(document: Mapping[str, Any]) -> Table:
    step = document["step"]
    table = _table("step time", "part", "time", "", "share")
    table.columns[2].justify = "left"
    for name in ("compute", "bubble", "exposed", "optimizer"):
        share = step[name] / step["time"]
        table.add_row(name, format_time(step[name]), bar(share), f"{share:.1%}")
    table.add_row("step", format_time(step["time"]), f"MFU {step['mfu']:.1%} (full-attention FLOPs)", "")
    return table


def check_report(document: Mapping[str, Any]) -> RenderableType:
    """Ledger beside execution."""
    table = _table(
        "memory of one rank", "term", "moment", "predicted", "executed", "difference", "", text_columns=2
    )
    for term in document["terms"]:
        table.add_row(
            term["term"],
            term["moment"],
            f"{term['predicted']:,}",
            f"{term['executed']:,}",
            f"{term['difference']:+,}" if term["difference"] else "equal",
            _verdict(term["ok"]),
        )
    flows = _table(
        "traffic of a step", "axis", "collective", "predicted", "executed", "launches", "", text_columns=2
    )
    for flow in document["traffic"]:
        flows.add_row(
            flow["axis"],
            flow["collective"],
            f"{flow['predicted_payload_bytes']:,} B",
            f"{flow['executed_payload_bytes']:,} B",
            f"{flow['predicted_launches']:,} / {flow['executed_launches']:,}",
            _verdict(flow["ok"]),
        )
    memory = (
        "" if document["host_memory"] is None else f", {format_bytes(document['host_memory'])} of host memory"
    )
    foot = (
        f"peak at {document['peak_moment']}; dry run took {format_time(document['time'])}{memory}; "
        f"tolerance at the peak {document['tolerance']['memory']:.1%} of it, at rest and in traffic none"
    )
    if document["microbatches_executed"] < document["microbatches"]:
        foot += (
            f"; {document['microbatches_executed']} of {document['microbatches']} microbatches executed, "
            "the others repeat the second"
        )
    verdict = "the ledger is what the program does" if document["ok"] else "the ledger and the program differ"
    style = "bold green" if document["ok"] else "bold red"
    return Group(table, flows, Text(foot, style="dim"), Text(verdict, style=style))


def _verdict(ok: bool) -> Text:
    return Text("ok", style="green") if ok else Text("DIFFERS", style="bold red")


def train_report(document: Mapping[str, Any]) -> RenderableType:
    """One run, predicted against measured."""
    losses = document["losses"]
    parts = [Text("stopped before its last step", style="yellow")] if document["interrupted"] else []
    parts += [
        Text(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {document['steps']} steps  {sparkline(losses)}")
    ]
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
    models = _table("models", "name", "parameters")
    for model in document["models"]:
        models.add_row(model["name"], format_count(model["parameters"]))
    devices = _table("devices", "name", "memory", "bf16", "link in the node", "between nodes", "aliases")
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
