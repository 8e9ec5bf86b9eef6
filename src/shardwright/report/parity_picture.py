"""The picture of ``parity``: curves of loss and norm, and every gradient's difference, as one HTML file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = {"a": "A", "b": "B"}
COLOURS = {"a": "#1f77b4", "b": "#d62728"}
SMALLEST = 1e-17
"""What a difference of nothing is drawn at, on an axis that has no zero."""


def parity_figure(document: Mapping[str, Any]) -> dict[str, Any]:
    """The figure in plotly's JSON: ``data`` and ``layout``."""
    steps = list(range(1, document["steps"] + 1))
    data: list[dict[str, Any]] = []
    for axis, curve in (("", "losses"), ("2", "norms")):
        for name in NAMES:
            data.append(_curve(document, steps, curve, name, axis))
    rows: Sequence[Mapping[str, Any]] = document["gradients"]
    limit = document["tolerance"]["gradient"]
    known = [row for row in rows if row["difference"] is not None]
    data.append(
        {
            "type": "bar",
            "x": [row["name"] for row in known],
            "y": [max(row["difference"], SMALLEST) for row in known],
            "marker": {"color": ["#d62728" if row["difference"] > limit else "#2ca02c" for row in known]},
            "customdata": [_hover(row) for row in known],
            "hovertemplate": "%{x}<br>%{y:.2e}<br>%{customdata}<extra></extra>",
            "showlegend": False,
            "xaxis": "x3",
            "yaxis": "y3",
        }
    )
    return {"data": data, "layout": _layout(document, limit)}


def write_parity_picture(document: Mapping[str, Any], path: Path) -> None:
    """Write the figure as an HTML file that needs nothing else, no network either."""
    from plotly.io import write_html

    write_html(parity_figure(document), path, include_plotlyjs=True, full_html=True)


def _curve(document: Mapping[str, Any], steps: list[int], curve: str, name: str, axis: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{NAMES[name]}: {document[name]['label']}",
        "legendgroup": name,
        "showlegend": axis == "",
        "x": steps,
        "y": document[f"{curve}_{name}"],
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
        "line": {"color": COLOURS[name], "dash": "solid" if name == "a" else "dash"},
    }


def _hover(row: Mapping[str, Any]) -> str:
    split = " ".join(row["axes_b"]) or "whole"
    return f"stage {row['stage_a']} in A, {row['stage_b']} in B; {split} in B; B / A {row['ratio']}"


def _layout(document: Mapping[str, Any], limit: float) -> dict[str, Any]:
    verdict = "equal" if document["ok"] else f"different: {document['explanation']}"
    return {
        "title": {"text": f"{document['model']} in {document['precision']}: {verdict}"},
        "grid": {"rows": 2, "columns": 2, "subplots": [["xy", "x2y2"], ["x3y3", ""]]},
        "xaxis": {"domain": [0, 0.46], "title": {"text": "step"}},
        "xaxis2": {"domain": [0.54, 1], "title": {"text": "step"}, "anchor": "y2"},
        "xaxis3": {"domain": [0, 1], "anchor": "y3", "tickangle": 60},
        "yaxis": {"domain": [0.6, 1], "title": {"text": "loss"}},
        "yaxis2": {"domain": [0.6, 1], "title": {"text": "gradient norm"}, "anchor": "x2"},
        "yaxis3": {
            "domain": [0, 0.42],
            "type": "log",
            "title": {"text": "gradients of step 1, relative difference"},
            "anchor": "x3",
        },
        "shapes": [
            {
                "type": "line",
                "xref": "x3 domain",
                "yref": "y3",
                "x0": 0,
                "x1": 1,
                "y0": limit,
                "y1": limit,
                "line": {"color": "#7f7f7f", "dash": "dot"},
            }
        ],
        "height": 900,
    }
