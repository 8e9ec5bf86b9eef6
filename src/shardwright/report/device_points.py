"""Operations measured on a device, beside what the step-time model says of them, for people."""

from collections.abc import Iterator, Mapping
from math import log
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from shardwright.report.tables import table
from shardwright.units import format_bandwidth, format_time


def device_points(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """A table of measured against predicted, and what the fit leaves; nothing without measurements."""
    if not document["device_points"]:
        return
    found = table(
        "this device", "operation", "shape", "time", "spread", "rate", "model", "ln", text_columns=2
    )
    for point in document["device_points"]:
        found.add_row(
            point["name"],
            " x ".join(str(n) for n in point["shape"]),
            format_time(point["time"]),
            f"{point['spread']:.0%}",
            _rate(point),
            format_time(point["predicted"]),
            f"{log(point['predicted'] / point['time']):+.2f}" if point["predicted"] else "",
        )
    yield found
    left = document["device_residual"]
    if left is not None:
        yield Text(
            "|ln(model / measured)| of products, copy and optimizer, constants fitted to them: median "
            f"{left['median']:.3f}, largest {left['largest']:.3f}"
        )


def _rate(point: Mapping[str, Any]) -> str:
    if point["what"] == "launch":
        return ""
    if point["what"] in ("copy", "optimizer"):
        return format_bandwidth(point["rate"])
    return f"{point['rate'] / 1e12:,.3g} TFLOP/s"
