"""What ``compare`` prints for people, from its JSON document."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.report.tables import table
from shardwright.units import format_bytes, format_count, format_time

NOTHING = "-"


def comparison_report(document: Mapping[str, Any]) -> RenderableType:
    """Both plans, what differs, and the verdict."""
    parts: list[RenderableType] = [_head(document, name) for name in ("a", "b")]
    differing = [row for part in ("layout", "job", "cluster") for row in document[part]]
    parts.append(_fields(differing) if differing else Text("layout, job and cluster are the same"))
    memory = [row for row in document["memory"] if row["a"] or row["b"]]
    parts.append(_numbers("memory of the heaviest rank", "term", memory, format_bytes))
    if document["traffic"]:
        parts.append(_traffic(document["traffic"]))
    step = "step time" if document["same_batch"] else "step time (of different batches)"
    parts += [_numbers(step, "part", document["step"], format_time), _throughput(document["throughput"])]
    if document["batch"] is not None:
        parts.append(Text(batch_text(document["batch"]), style="yellow"))
    parts += [Text(sentence, style="green") for sentence in document["verdict"]]
    return Group(*parts)


def batch_text(batch: Mapping[str, Any]) -> str:
    """What the other batch does to steps and learning rate, in words."""
    (left, right), (tokens_left, tokens_right) = batch["global_batch"], batch["tokens_per_step"]
    rule = batch["rule"]
    betas = [
        f"{name} {batch[name]:g}" if batch[name] is not None else f"{name} out of its reach"
        for name in ("beta1", "beta2")
    ]
    shown = (
        f"shown for this optimizer: {rule.replace('_', ' ')}"
        if rule
        else "for this optimizer neither is shown"
    )
    lines = [
        f"the global batch differs: A {left:,} sequences ({format_count(tokens_left)} tokens), B {right:,} "
        f"({format_count(tokens_right)} tokens), x {batch['ratio']:.4g}",
        f"A's {format_count(batch['tokens'])} tokens are {_both(batch['steps'])}"
        + (f"; its warm-up {_both(batch['warmup_steps'])}" if batch["warmup_steps"][0] else ""),
        f"A's learning rate {batch['learning_rate']:g} becomes {batch['linear']:.3g} by the linear rule "
        f"({batch['sources']['linear']}), {batch['square_root']:.3g} by the square root "
        f"({batch['sources']['square_root']}; with {', '.join(betas)}); {shown}; "
        f"plan B has {batch['planned_learning_rate']:g}",
        "rules of practice: neither promises the same loss, and beyond some batch neither holds",
    ]
    return "\n".join(lines)


def _both(steps: Sequence[int]) -> str:
    return f"{steps[0]:,} steps of A, {steps[1]:,} of B"


def _head(document: Mapping[str, Any], name: str) -> Text:
    side = document[name]
    notes = [] if side["fits"] else ["does not fit"]
    notes += [] if side["runnable"] else ["modelled, does not run"]
    text = f"{name.upper()}: {document['model']} on {side['ranks']:,} x {side['device']}, {side['label']}"
    return Text(text + (f" ({', '.join(notes)})" if notes else ""))


def _fields(rows: Sequence[Mapping[str, Any]]) -> Table:
    found = table("what differs", "field", "A", "B", text_columns=3)
    for row in rows:
        found.add_row(row["field"], str(row["a"]), str(row["b"]))
    return found


def _change(row: Mapping[str, Any], show: Callable[[float], str]) -> tuple[str, str]:
    """Difference and ratio of a row, as far as they mean something."""
    difference, ratio = row["difference"], row["ratio"]
    if difference is None:
        return NOTHING, NOTHING
    if difference == 0:
        return "equal", ""
    sign = "-" if difference < 0 else "+"
    times = NOTHING if ratio is None else f"x {ratio:,.3f}" if ratio < 10 else f"x {ratio:,.1f}"
    return sign + show(abs(difference)), times


def _numbers(title: str, name: str, rows: Sequence[Mapping[str, Any]], show: Callable[[float], str]) -> Table:
    found = table(title, name, "A", "B", "B - A", "B / A")
    for row in rows:
        found.add_row(row[name], show(row["a"]), show(row["b"]), *_change(row, show))
    return found


def _traffic(rows: Sequence[Mapping[str, Any]]) -> Table:
    found = table("traffic of a step, each rank", "axis", "", "A", "B", "B - A", "B / A", text_columns=2)
    shown = {"bytes": ("sent", format_bytes), "exposed_time": ("exposed", format_time)}
    for row in rows:
        words, show = shown[row["quantity"]]
        found.add_row(row["axis"], words, show(row["a"]), show(row["b"]), *_change(row, show))
    return found


def _throughput(rows: Sequence[Mapping[str, Any]]) -> Table:
    found = table("throughput", "", "A", "B", "B - A", "B / A")
    names = {"tokens_per_s": "tokens/s", "tokens_per_s_per_gpu": "tokens/s/GPU", "mfu": "MFU"}
    for row in rows:
        share = row["quantity"] == "mfu"
        show = _percent if share else _whole
        change = _change(row, _points if share else _whole)
        found.add_row(names[row["quantity"]], show(row["a"]), show(row["b"]), *change)
    return found


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _points(value: float) -> str:
    return f"{100 * value:.1f} points"


def _whole(value: float) -> str:
    return f"{value:,.0f}"
