"""What ``table`` prints for people: recommended layouts, a row a model, a column a number of devices."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.units import format_bytes, format_time

NARROWEST = len("InterleavedZeroBubble")
"""Of a column: narrower, words of a label would be broken."""


def table_report(document: Mapping[str, Any]) -> RenderableType:
    """The fastest layout that fits of each, or by how much the nearest misses."""
    rows = document["rows"]
    counts = list(dict.fromkeys(row["gpus"] for row in rows))
    title = (
        f"{document['device']}, {format_bytes(document['device_memory'])} each; {document['global_batch']:,} "
        f"sequences of {document['seq']:,} = {document['tokens_per_step']:,} tokens a step, "
        f"{document['precision']}" + (f", {document['framework']}" if document["framework"] else "")
    )
    found = Table(title=title, title_justify="left", title_style="bold", box=None, show_lines=True)
    found.add_column("model", overflow="fold")
    for count in counts:
        found.add_column(f"{count:,} devices", overflow="fold", min_width=NARROWEST)
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = {row["gpus"]: row for row in rows if row["model"] == model}
        found.add_row(model, *(_cell(of_model[count]) for count in counts))
        found.add_section()
    parts: list[RenderableType] = [found]
    if document["assumed"]:
        parts.append(Text("assumed: " + ", ".join(document["assumed"]), style="dim"))
    return Group(*parts)


def _cell(row: Mapping[str, Any]) -> Text:
    if row["fits"]:
        cost = f", {row['cost_per_1e9_tokens']:,.4g} for 1e9 tokens" if "cost_per_1e9_tokens" in row else ""
        return Text(
            f"{row['label']}\n{format_time(row['step_time'])}, {row['tokens_per_s_per_gpu']:,.0f} "
            f"tokens/s/GPU, MFU {row['mfu']:.1%}{cost}\n"
        )
    miss = row["nearest_miss"]
    if miss is None:
        return Text(f"no layout: {row['why_not']}\n", style="dim")
    return Text(f"does not fit, needs {format_bytes(miss['needs'])}: {miss['label']}\n", style="dim")
