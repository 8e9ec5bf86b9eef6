"""What ``parity`` prints for people, from its JSON document."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.report.curves import overlay
from shardwright.report.tables import table

SHOWN = 5
"""Parameters that are listed: those that differ most."""

CERTAINTY = {"certain": "certain", "likely": "likely", "cannot_tell": "cannot tell from this"}


def parity_report(document: Mapping[str, Any]) -> RenderableType:
    """Both layouts, the worst gradients, the curves one over the other, and the verdict."""
    parts: list[RenderableType] = [
        Text(
            f"{name.upper()}: {document['model']}, {document[name]['label']}, {document[name]['ranks']} ranks"
        )
        for name in ("a", "b")
    ]
    parts += [Text(line, style="dim") for line in document.get("changed", [])]
    parts.append(_gradients(document))
    for title, name in (("loss", "losses"), ("gradient norm", "norms")):
        left, right = document[f"{name}_a"], document[f"{name}_b"]
        head = f"{title} of {document['steps']} steps, A and B (= both), largest difference "
        head += _worst(left, right)
        parts.append(Text("\n".join([head, *overlay(left, right)])))
    return Group(*parts, *_verdict(document))


def _worst(left: Sequence[float | None], right: Sequence[float | None]) -> str:
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if len(pairs) < len(left):
        return "where one is no number"
    worst = max(abs(a - b) / (max(abs(a), abs(b)) or 1.0) for a, b in pairs)
    return f"{worst:.1e}"


def _gradients(document: Mapping[str, Any]) -> Table:
    rows = sorted(document["gradients"], key=lambda row: -_difference(row))[:SHOWN]
    title = f"gradients of step 1, the worst of {len(document['gradients'])}"
    found = table(title, "parameter", "layer", "split in A", "split in B", "stage", "B / A", "difference")
    found.columns[2].justify = found.columns[3].justify = "left"
    for row in rows:
        stages = {row["stage_a"], row["stage_b"]}
        found.add_row(
            row["name"],
            "-" if row["layer"] is None else str(row["layer"]),
            _axes(row["axes_a"]),
            _axes(row["axes_b"]),
            str(row["stage_a"]) if len(stages) == 1 else f"{row['stage_a']} / {row['stage_b']}",
            "-" if row["ratio"] is None else f"{row['ratio']:.6g}",
            "no gradient" if row["missing"] else f"{_difference(row):.1e}",
        )
    return found


def _difference(row: Mapping[str, Any]) -> float:
    return float("inf") if row["difference"] is None else float(row["difference"])


def _axes(names: Sequence[str]) -> str:
    return " ".join(names) or "nothing"


def _verdict(document: Mapping[str, Any]) -> list[RenderableType]:
    limits, worst = document["tolerance"], document["worst_gradient"]
    allowed = (
        f"tolerance in {document['precision']}: gradients {limits['gradient']:g}, loss "
        f"{limits['loss']:g}, norm {limits['norm']:g}, in later steps {limits['later_loss']:g} and "
        f"{limits['later_norm']:g}, relative"
    )
    parts: list[RenderableType] = [Text(allowed, style="dim")]
    if document["ok"]:
        text = f"A and B train the same model: gradients within {_difference(worst):.1e} ({worst['name']})"
        if document["reference"]:
            text += "; so does one process in plain PyTorch"
        return [*parts, Text(text, style="bold green")]
    count, all_of = document["differing_gradients"], len(document["gradients"])
    where = f"worst {worst['name']}" + ("" if worst["layer"] is None else f", layer {worst['layer']}")
    where += (
        f", stage {worst['stage_a']} in A and {worst['stage_b']} in B, split by {_axes(worst['axes_a'])} in A"
    )
    where += f" and {_axes(worst['axes_b'])} in B"
    text = f"A and B differ: {count} of {all_of} gradients" + (f", {where}" if count else "")
    if set(document["wrong"]) == {"a", "b"} and not count:
        text = "A and B agree in their gradients, and both are wrong"
    parts.append(Text(text, style="bold red"))
    for name in ("a", "b"):
        for entry in document["ranks_apart"][name][:SHOWN]:
            axes = " and ".join(entry["axes"])
            parts.append(
                Text(f"{name.upper()}: ranks along {axes} hold different gradients of {entry['name']}")
            )
    certainty = CERTAINTY[document["certainty"]]
    parts.append(Text(f"cause ({certainty}): {document['explanation']}", style="yellow"))
    return parts
