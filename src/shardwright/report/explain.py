"""What ``explain`` prints for people, from its JSON document."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.report.sensitivity import budget_table, fitting_text, sensitivity_table
from shardwright.report.tables import table
from shardwright.report.terminal import bar
from shardwright.units import format_bytes, format_time

TERMS = (
    *("parameters", "gradients", "optimizer", "activations", "logits", "gathered"),
    *("communicators", "context", "margin"),
)
"""Of a ledger, in the order of the document."""

PARTS = {"expert_parameters": "  of experts", "frozen_parameters": "  frozen"}
"""Of the parameters, by their keys."""


def explain_report(document: Mapping[str, Any]) -> RenderableType:
    """Ledger, timeline, traffic, step time of one layout, and what one change would do."""
    return Group(
        *_explain_head(document),
        _ledger_table(document),
        fitting_text(document["fitting"]),
        _timeline_table(document),
        _activations_text(document),
        _traffic_table(document),
        *_link_sources(document),
        budget_table(document["budget"]),
        _step_table(document),
        Text(document["timeline_text"]),
        sensitivity_table(document),
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
    """One rank with bars; of a pipeline the ranks that can be the heaviest, side by side."""
    stages = document["stages"]
    heaviest = max(stages, key=lambda stage: float(stage["total"]))
    title = f"memory at the peak ({document['peak_moment']})"
    memory = document["device"]["memory"]
    if len(stages) == 1:
        found = table(title, "term", "bytes", "", "of the device")
        found.columns[2].justify = "left"
        for name, key in _ledger_lines(stages):
            share = heaviest[key] / memory
            found.add_row(name, format_bytes(heaviest[key]), bar(share), f"{share:.1%}")
    else:
        heads = [f"rank {stage['stage']}" + ("*" if stage is heaviest else "") for stage in stages]
        found = table(title, "term", *heads, f"of the device, rank {heaviest['stage']}")
        found.add_row("layers", *(f"{stage['layers']}" for stage in stages))
        in_flight = (f"{stage['microbatches_in_flight']:.4g}" for stage in stages)
        found.add_row("microbatches in flight", *in_flight)
        for name, key in _ledger_lines(stages):
            share = heaviest[key] / memory
            sizes = (format_bytes(stage[key]) for stage in stages)
            found.add_row(name, *sizes, f"{share:.1%}", style="bold" if name == "total" else "")
    rest = ", ".join(f"{name} {format_bytes(value)}" for name, value in heaviest["at_rest"].items())
    foot = f"at rest, end of backward: {rest}"
    if len(stages) > 1:
        foot = f"* the heaviest rank, {foot}"
        if document["layout"]["pp"] > len(stages):
            foot += "; ranks between the second and the last hold what the second does, or less"
    return Group(found, Text(foot), *_beside_the_ledger(document, heaviest))


def _ledger_lines(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names and keys of the lines: terms, under parameters those parts that some stage has, and the total."""
    lines = [(name, name) for name in (*TERMS, "total")]
    parts = [(name, key) for key, name in PARTS.items() if any(stage[key] for stage in stages)]
    return [*lines[:1], *parts, *lines[1:]]


def _beside_the_ledger(document: Mapping[str, Any], heaviest: Mapping[str, Any]) -> list[RenderableType]:
    """What rests on the host, and where the terms that are measured come from."""
    moved = {"optimizer state": heaviest["host_optimizer"], "activations": heaviest["host_activations"]}
    there = ", ".join(f"{name} {format_bytes(size)}" for name, size in moved.items() if size)
    lines: list[RenderableType] = [Text(f"on the host, for each rank: {there}")] if there else []
    told = "; ".join(f"{term}: {source}" for term, source in document["sources"].items() if heaviest[term])
    return [*lines, Text(told, style="dim")] if told else lines


def _timeline_table(document: Mapping[str, Any]) -> Table:
    highest = max(moment["allocated"] for moment in document["timeline"])
    microbatch = document["peak_moment"].split(":")[0]
    found = table(f"allocated through the {microbatch}", "moment", "allocated", "", text_columns=1)
    found.columns[2].justify = "left"
    for moment in document["timeline"]:
        if not moment["moment"].startswith(microbatch):
            continue
        share = moment["allocated"] / highest
        style = "bold" if share == 1.0 else ""
        found.add_row(moment["moment"], format_bytes(moment["allocated"]), bar(share), style=style)
    return found


def _activations_text(document: Mapping[str, Any]) -> Text:
    kept = document["activations"]
    saved = sum(kept["saved_by_block"].values())
    largest = sorted(kept["saved_by_block"].items(), key=lambda item: -item[1])[:6]
    in_flight = kept["microbatches_in_flight"]
    every = f"/{kept['recompute_every']}" if kept["recompute_every"] > 1 else ""
    of_kind = " with experts" if kept["kind"] == "experts" else ""
    text = (
        f"recompute {kept['recompute']}{every}: a block{of_kind} keeps {format_bytes(saved)} of "
        f"{format_bytes(kept['saved_by_block_without_recompute'])} a microbatch, "
        f"x {kept['blocks']} blocks"
        + (f" x {in_flight:.4g} microbatches in flight; most: " if in_flight != 1 else "; most: ")
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    )
    if kept["kept_operations"]:
        text += f"\nkept operations: {', '.join(kept['kept_operations'])}"
    return Text(text)


def _traffic_table(document: Mapping[str, Any]) -> RenderableType:
    if not document["traffic"]:
        return Text("traffic: none, one rank")
    columns = ("axis", "collective", "link", "launches", "sent", "busy", "exposed")
    found = table("traffic of a step, each rank", *columns, text_columns=3)
    for column in found.columns:
        column.min_width = len(str(column.header))
    for column in found.columns[:2]:
        column.no_wrap = True  # a name broken inside a word is no name
    for flow in document["traffic"]:
        found.add_row(
            f"{flow['axis']} ({flow['degree']})".replace("+", "+\n"),
            flow["collective"],
            flow["link"],
            f"{flow['launches']:,}",
            format_bytes(flow["bytes"]),
            format_time(flow["busy_time"]),
            format_time(flow["exposed_time"]),
        )
    return found


def _link_sources(document: Mapping[str, Any]) -> list[RenderableType]:
    """What times of each axis rest on, where something was measured: one line for flows that rest on the
    same."""
    flows: dict[str, list[str]] = {}
    for flow in document["traffic"]:
        flows.setdefault(flow["link_source"], []).append(f"{flow['axis']} {flow['collective']}")
    if not any(source.startswith("measured") for source in flows):
        return []
    return [Text("\n".join(f"{', '.join(names)}: {source}" for source, names in flows.items()), style="dim")]


def _step_table(document: Mapping[str, Any]) -> RenderableType:
    step = document["step"]
    found = table("step time", "part", "time", "", "share")
    found.columns[2].justify = "left"
    rows = [("compute", step["compute"]), ("bubble", step["bubble"]), ("exposed", step["exposed"])]
    if len(step["exposed_by_axis"]) > 1:
        rows += [(f"  {axis}", time) for axis, time in step["exposed_by_axis"].items()]
    for name, time in (*rows, ("optimizer", step["optimizer"])):
        share = time / step["time"]
        found.add_row(name, format_time(time), bar(share), f"{share:.1%}")
    found.add_row("step", format_time(step["time"]), f"MFU {step['mfu']:.1%} (full-attention FLOPs)", "")
    layout = document["layout"]
    if layout["pp"] == 1:
        return found
    stages = f"{layout['pp']} ranks" + (f" x {layout['chunks']} chunks" if layout["chunks"] > 1 else "")
    bubble = (
        f"bubble: {layout['schedule']} on {stages}, {layout['microbatches']} microbatches: the busiest rank "
        f"is idle for {format_time(step['bubble'])}, {step['bubble_fraction']:.1%} of the step, simulated "
        "with each stage's own time; if all took the slowest one's: "
        f"{format_time(step['bubble_closed_form'])}"
    )
    return Group(found, Text(bubble))
