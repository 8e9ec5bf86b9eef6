"""What ``map`` prints for people, from its JSON document."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from shardwright.report.device_points import device_points
from shardwright.report.doctor import finding_lines
from shardwright.report.heat_map import HeatMap, figure
from shardwright.report.tables import table
from shardwright.report.terminal import EIGHTHS_UP
from shardwright.units import GiB, KiB, MiB, format_bandwidth, format_time

MOST_CLASSES = 32
"""Devices of which the classes of links are printed as a matrix."""

MOST_CURVES = 24
MOST_UNMEASURED = 12
MOST_GROUPS = 8
"""Lines or groups that are listed; the rest is counted."""

COLUMNS_OF_CURVE = 5
"""Sizes of a curve in the table, from the largest down by powers."""

VERDICT_STYLES = {"healthy": "green", "degraded": "yellow", "below half": "bold red"}

UNKNOWN = "-"
"""Class of a link of which nothing is known."""

LOCAL = ("PIX", "PXB")
"""Classes of a NIC behind the same PCIe switch as a device: GPUDirect RDMA goes past the CPU."""


def map_report(document: Mapping[str, Any]) -> RenderableType:
    """What was measured or read: pairs, classes, links, curves, tp groups, NICs, what is at fault."""
    parts = (
        *(_pairs(document), _classes(document), _links(document), _curves(document), _islands(document)),
        *(_nics(document), _expected(document), device_points(document)),
        *(_unmeasured(document), _findings(document)),
    )
    shown = [section for section in map(list, parts) if section]
    return Group(_head(document), *(line for section in shown for line in (Text(""), *section)))


def _head(document: Mapping[str, Any]) -> RenderableType:
    size = f"{document['nodes']:,} x {document['gpus_per_node']}"
    made = Text(f"{document['ranks']:,} ranks, {size} {document['device']}", style="bold")
    how = ", ".join(part for part in (document["source"], document["date"]) if part)
    made.append(f"\n{how or 'links of the device as given: nothing was measured or read'}", style="not bold")
    hosts = list(dict.fromkeys(document["hosts"]))
    if hosts:
        named = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4:,} more" if len(hosts) > 4 else "")
        made.append(f"\nhosts: {named}", style="not bold")
    if document["assumed"]:
        made.append(f"\nassumed: {', '.join(document['assumed'])}", style="not bold dim")
    return made


def _pairs(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    if not document["measured_pairs"]:
        return
    yield HeatMap(document)
    kinds = table("pairs by kind of link", "kind", "measured", "usual", "median", "slowest", "latency")
    for row in document["pair_kinds"]:
        rates = (f"{figure(row[key] / 1e9)} GB/s" for key in ("usual", "median", "slowest"))
        kinds.add_row(row["kind"], f"{row['measured']:,}", *rates, format_time(row["latency"]))
    yield kinds


def _classes(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The matrix of a topology; of a cluster's levels it would say what the table of links says."""
    rows = document["pairs"]
    read = any(tier["known_by"] == "topology" for tier in document["islands"])
    if not read or not rows or len(rows) > MOST_CLASSES:
        return
    width = max(max(len(name) for row in rows for name in row), len(str(len(rows) - 1))) + 1
    made = Text("classes of links between the devices of a node\n", style="bold", no_wrap=True)
    heads = "".join(f"{number:>{width}}" for number in range(len(rows)))
    made.append(f"{'':>4}{heads}\n", style="not bold dim")
    for number, row in enumerate(rows):
        made.append(f"{number:>4}", style="not bold dim")
        made.append("".join(f"{name:>{width}}" for name in row), style="not bold")
        made.append("\n" if number + 1 < len(rows) else "")
    yield made


def _links(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    made = table("links", "level", "ranks", "bandwidth", "latency", "small", "known by")
    made.columns[-1].justify = "left"
    for link in document["links"]:
        known = f"measured: {', '.join(link['measured'])}" if link["measured"] else "specification"
        made.add_row(
            link["kind"] + (" (shared)" if link["shared"] else ""),
            f"{link['ranks']:,}",
            format_bandwidth(link["bandwidth"]),
            format_time(link["latency"]),
            format_time(link["small_latency"]),
            known,
        )
    yield made


def _curves(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Bus bandwidth by size: a line of blocks and a few sizes of each group kind."""
    curves = document["curves"]
    if not curves:
        return
    yield CurveTable(curves[:MOST_CURVES])
    if len(curves) > MOST_CURVES:
        yield Text(f"{len(curves) - MOST_CURVES} curves more: --json has them", style="dim")
    yield Text(
        "bus bandwidth as nccl-tests counts it: size / time, x 2 (n-1)/n of an all-reduce, x (n-1)/n of an "
        "all-gather, reduce-scatter or all-to-all of n ranks; spread: (90 % - 10 %) / median of the times",
        style="dim",
    )


class CurveTable:
    """Curves with as many sizes as there is room."""

    def __init__(self, curves: Sequence[Mapping[str, Any]]) -> None:
        self.curves = curves

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = COLUMNS_OF_CURVE if options.max_width >= 110 else 2
        sizes = sorted({size for curve in self.curves for size in curve["sizes"]}, reverse=True)
        step = max(1, len(sizes) // count)
        picked = sorted(sizes[::step][:count])
        heads = [_size(size) for size in picked]
        columns = ("collective", "ranks", "level", "from small to large", *heads, "spread")
        made = table("bus bandwidth by size [GB/s]", *columns, text_columns=4)
        made.columns[1].justify = "right"
        for curve in self.curves:
            rates = dict(zip(curve["sizes"], curve["bus_bandwidths"], strict=True))
            spread = f"{max(curve['spread']):.0%}" if curve["spread"] else "-"
            figures = (figure(rates[size] / 1e9) if size in rates else "-" for size in picked)
            line = curve_line(curve["bus_bandwidths"])
            made.add_row(curve["collective"], _group(curve), curve["kind"], line, *figures, spread)
        yield made


def _size(size: float) -> str:
    """A size of the kind that is measured: 4 KiB, 256 MiB, 1 GiB."""
    for unit, scale in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.4g} B"


def curve_line(values: Sequence[float], width: int = 20) -> str:
    """Values against the largest, from nothing: a line of blocks."""
    count = min(width, len(values))
    picked = [values[i * (len(values) - 1) // max(count - 1, 1)] for i in range(count)]
    most = max(picked, default=0.0) or 1.0
    return "".join(EIGHTHS_UP[min(int(value / most * 8), 7)] for value in picked)


def _group(curve: Mapping[str, Any]) -> str:
    members = [n for n in curve["members"] if n > 1]
    if len(members) < 2 or members[0] == curve["ranks"]:
        return f"{curve['ranks']:,}"
    return f"{curve['ranks']:,} ({members[0]} together)"


def _islands(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Groups of a node's devices that tp can use, from the fastest links on."""
    if not document["islands"]:
        return
    made = table("tp groups that a node can carry", "links", "slowest pair", "tp up to", "groups of devices")
    made.columns[-1].justify = "left"
    for tier in document["islands"]:
        groups = [group for group in tier["groups"] if len(group) > 1]
        listed = "  ".join(_span(group) for group in groups[:MOST_GROUPS])
        more = f"  and {len(groups) - MOST_GROUPS} more" if len(groups) > MOST_GROUPS else ""
        rate = "-" if tier["bandwidth"] is None else f"{figure(tier['bandwidth'] / 1e9)} GB/s"
        made.add_row(
            _tier_name(tier, first=tier is document["islands"][0]),
            rate,
            str(max(map(len, groups))),
            listed + more,
        )
    yield made
    if len(document["islands"]) > 1:
        first = document["islands"][0]
        most = max(map(len, first["groups"]))
        yield Text(f"at full speed tp is at most {most}; a larger group goes at the pace of its slowest pair")


def _tier_name(tier: Mapping[str, Any], *, first: bool) -> str:
    if not tier["link"]:
        return "the fastest" if first else "slower ones too"
    return str(tier["link"]) if first else f"{tier['link']} or faster"


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _nics(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The nearest NIC of each device, and the devices that have none behind their own PCIe switch."""
    nics = document["nics"]
    if not nics:
        return
    order = {name: place for place, name in enumerate(("PIX", "PXB", "PHB", "NODE", "SYS"))}
    made = table("nearest NIC of each device", "device", "class", "NIC", "CPUs", "NUMA node", text_columns=5)
    without, known = [], 0
    for device in range(max(len(nic["classes"]) for nic in nics)):
        near = [(nic["classes"][device], nic) for nic in nics if device < len(nic["classes"])]
        best = min((name for name, _ in near), key=lambda name: order.get(name, len(order)))
        if best == UNKNOWN:
            made.add_row(str(device), "not known", "", *_own(document, device))
            continue
        named = [nic["device"] or nic["name"] for name, nic in near if name == best]
        if best not in LOCAL:
            without.append(device)
        shown = ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
        made.add_row(str(device), best, shown, *_own(document, device))
        known += 1
    yield made
    devices = "device" if len(without) == 1 else "devices"
    if without and len(without) < known:
        yield Text(
            f"{devices} {_span(without)} have no NIC behind their own PCIe switch: NCCL sends their traffic "
            "over NVLink to a device that has one (PXN) where it can, else through the CPU",
            style="yellow",
        )
    elif without:
        yield Text(
            "no device has a NIC behind its own PCIe switch: traffic between nodes goes through the CPU, and "
            "GPUDirect RDMA is slow or off",
            style="yellow",
        )


def _own(document: Mapping[str, Any], device: int) -> tuple[str, str]:
    """CPUs and NUMA node of a device."""
    columns = (document["affinity"], document["numa"])
    cpus, numa = (column[device] if device < len(column) else "" for column in columns)
    return cpus or "-", numa or "-"


def _expected(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    measured = document["measured_pairs"] or document["curves"]
    if not document["expected"]:
        if measured and document["device_kind"] == "cpu":
            yield Text("measured against expected: of CPU ranks (gloo) nothing is expected", "dim")
        elif measured:
            yield Text("measured against expected: of these links nothing is known to compare with", "dim")
        return
    made = table(
        "measured against what the devices' links give",
        "what",
        "size",
        "measured",
        "expected",
        "share",
        "verdict",
    )
    made.columns[-1].justify = "left"
    for row in document["expected"]:
        made.add_row(
            row["what"],
            _size(row["size"]) if row["size"] else "large",
            format_bandwidth(row["measured"]),
            format_bandwidth(row["expected"]),
            f"{row['ratio']:.0%}",
            Text(row["verdict"], style=VERDICT_STYLES[row["verdict"]]),
        )
    yield made


def _unmeasured(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    cells = sorted(document["unmeasured"], key=lambda each: not each["failed"])
    if not cells:
        return
    yield Text("not measured", style="bold")
    for each in cells[:MOST_UNMEASURED]:
        style = "red" if each["failed"] else ""
        yield Text(f"  {'FAILED ' if each['failed'] else ''}{each['what']}: {each['reason']}", style=style)
    if len(cells) > MOST_UNMEASURED:
        yield Text(f"  {len(cells) - MOST_UNMEASURED:,} more: --json has them", style="dim")


def _findings(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    for finding in document["findings"]:
        yield from finding_lines(finding)
    for refused in document["refused"]:
        yield Text(f"not read: {refused['file']}: {refused['reason']}", style="yellow")
    if not document["findings"] and document["measured_pairs"]:
        yield Text("no pair is slower than others like it", style="green")
