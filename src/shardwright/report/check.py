"""What ``check`` found: ledger beside execution, and a real step beside both."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.report.memory import tensors_table
from shardwright.report.tables import table
from shardwright.units import format_bytes, format_time


def check_report(document: Mapping[str, Any]) -> RenderableType:
    """Terms and traffic, rank by rank in a pipeline, what the terms are made of, and the verdict."""
    made_of = [
        tensors_table(groups, f"what pipeline rank {stage} holds at the executed peak")
        for stage in sorted({group["stage"] for group in document["tensors"]})
        if (groups := [group for group in document["tensors"] if group["stage"] == stage])
    ]
    verdict = "the ledger is what the program does" if document["ok"] else "the ledger and the program differ"
    style = "bold green" if document["ok"] else "bold red"
    foot = Text(_foot(document), style="dim")
    return Group(_terms(document), _flows(document), *made_of, foot, Text(verdict, style=style))


def _terms(document: Mapping[str, Any]) -> Table:
    several = len(document["stages"]) > 1
    real = ["real"] if any(term["real"] is not None for term in document["terms"]) else []
    columns = ("term", "moment", "predicted", "executed", *real, "difference", "")
    title = "memory of the pipeline ranks" if several else "memory of one rank"
    found = table(title, *_rank(several), *columns, text_columns=2 + several)
    for term in document["terms"]:
        found.add_row(
            *((str(term["stage"]),) if several else ()),
            term["term"],
            term["moment"],
            f"{term['predicted']:,}",
            f"{term['executed']:,}",
            *(f"{term['real']:,}" for _ in real),
            f"{term['difference']:+,}" if term["difference"] else "equal",
            _verdict(term["ok"]),
        )
    return found


def _flows(document: Mapping[str, Any]) -> Table:
    several = len(document["stages"]) > 1
    real = ["real"] if any(flow["real_launches"] is not None for flow in document["traffic"]) else []
    columns = ("axis", "collective", "predicted", "executed", *real, "launches", "")
    found = table("traffic of a step", *_rank(several), *columns, text_columns=2 + several)
    for flow in document["traffic"]:
        launches = [flow["predicted_launches"], flow["executed_launches"]]
        launches += [flow["real_launches"]] if real else []
        found.add_row(
            *((str(flow["stage"]),) if several else ()),
            flow["axis"],
            flow["collective"],
            f"{flow['predicted_payload_bytes']:,} B",
            f"{flow['executed_payload_bytes']:,} B",
            *(f"{flow['real_payload_bytes']:,} B" for _ in real),
            " / ".join(f"{count:,}" for count in launches),
            _verdict(flow["ok"]),
        )
    return found


def _rank(several: bool) -> tuple[str, ...]:
    return ("pipeline rank",) if several else ()


def _foot(document: Mapping[str, Any]) -> str:
    """What was executed, where it peaked, and what was allowed."""
    memory = (
        "" if document["host_memory"] is None else f", {format_bytes(document['host_memory'])} of host memory"
    )
    foot = (
        f"peak at {document['peak_moment']}; dry run took {format_time(document['time'])}{memory}; "
        f"tolerance at the peak {document['tolerance']['memory']:.1%} of it, at rest and in traffic none"
    )
    for stage in document["stages"]:
        others = [str(rank) for rank in stage["stands_for"] if rank != stage["stage"]]
        if others:
            foot += f"; pipeline rank {stage['stage']} stands for {', '.join(others)}"
    foot += "".join(f"; {left_out}" for run in document["stages"] if (left_out := _left_out(document, run)))
    return foot


def _left_out(document: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """What of a rank was not executed because it repeats what was; empty if all was."""
    parts = [
        f"{executed} of {count} {what}"
        for executed, count, what in (
            (run["layers_executed"], run["layers"], "layers"),
            (run["microbatches_executed"], document["microbatches"], "microbatches"),
        )
        if executed < count
    ]
    place = f"pipeline rank {run['stage']}: " if len(document["stages"]) > 1 else ""
    return f"{place}executed {' and '.join(parts)}, the others repeat these" if parts else ""


def _verdict(ok: bool) -> Text:
    return Text("ok", style="green") if ok else Text("DIFFERS", style="bold red")
