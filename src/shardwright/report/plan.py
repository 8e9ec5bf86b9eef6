"""What ``plan`` and ``plan --why`` print for people, from their JSON documents."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.report.tables import table
from shardwright.report.terminal import bar
from shardwright.units import format_bytes, format_time

NOTHING = "-"

LONGEST_WORD = len("InterleavedZeroBubble")
"""Of a layout's label; narrower, words would be broken."""

RARE = ("ep", "etp", "dispatch", "order", "recompute_every", "loss_chunks", "offload")
"""Columns that few ask for: left as they are, they are not listed."""


def plan_report(document: Mapping[str, Any]) -> RenderableType:
    """Best layouts, those that are faster but only modelled, and why the others are out."""
    best = document["best"]
    parts: list[RenderableType] = [
        Text(
            f"{document['considered']:,} layouts considered, {document['evaluated']:,} evaluated, "
            f"{document['feasible']:,} fit {format_bytes(document['device_memory'])} a device "
            f"({format_time(document['search_time'])})"
        )
    ]
    if document.get("framework"):
        parts.append(Text(f"only layouts that {document['framework']} runs", style="dim"))
    if document["assumed"]:
        parts.append(Text("assumed: " + ", ".join(document["assumed"]), style="dim"))
    bubbles = any(row["bubble_time"] > 0 for row in best)
    if best[0]["runnable"] and document["ranking"] != "time":
        faster = [row for row in best if not row["runnable"]]
        parts.append(_layouts("best layouts", [row for row in best if row["runnable"]], bubbles))
        if faster:
            parts.append(_layouts("faster, but only modelled", faster, bubbles))
    else:
        runs = any(row["runnable"] for row in best)
        title = "best layouts" if runs else "best layouts, only modelled"
        parts.append(_layouts(title, best, bubbles, runs=runs))
    parts += [Text(sentence) for sentence in _uncertain(document)]
    if document["rejected"]:
        parts.append(_rejected(document))
    parts += [Text(sentence, style="green") for sentence in (document["why"], *_objective(document))]
    if not best[0]["runnable"]:
        parts.append(Text(_only_modelled(document), style="yellow"))
    return Group(*parts)


def _uncertain(document: Mapping[str, Any]) -> Iterator[str]:
    """How far times may be off, and which layouts cannot be told apart."""
    said, first = document["uncertainty"], document["best"][0]
    low, high = format_time(first["step_time_low"]), format_time(first["step_time_high"])
    yield (
        f"the first takes {low} to {high}: so lie four of five published runs of the nearest kind "
        f"({said['kind']}, {said['rows']})"
    )
    if said["tied"] > 1:
        yield (
            f"the first {said['tied']} are tied: closer than {said['within_job']:.1%}, by which errors of "
            f"one job differ; to tell, measure {said['settled_by']}"
        )


def pareto_plan_report(document: Mapping[str, Any]) -> RenderableType:
    """The same, and the layouts of which no other is both as fast and as small."""
    found = table("step time against memory", "layout", "step", "over the fastest", "memory", "left")
    found.columns[0].min_width = LONGEST_WORD
    fastest = document["pareto"][0]["step_time"]
    for row in document["pareto"]:
        found.add_row(
            row["label"],
            format_time(row["step_time"]),
            f"{row['step_time'] / fastest - 1:.1%}",
            format_bytes(row["device_memory"]),
            format_bytes(row["headroom"]),
        )
    return Group(plan_report(document), found)


def _objective(document: Mapping[str, Any]) -> Iterator[str]:
    """What was best by another objective than time."""
    said = document.get("objective", {"name": "time"})
    if "cost_per_step" in document["best"][0]:
        row = document["best"][0]
        yield f"cost: {row['cost_per_step']:,.4g} a step, {row['cost_per_1e9_tokens']:,.4g} for 1e9 tokens"
    if said["name"] == "gpus":
        yield f"{said['gpus']:,} devices are the fewest, of those tried, on which something fits"
        yield from (f"on {row['gpus']:,}: {_miss(row)}" for row in said["misses"])
    if said["name"] == "micro-batch":
        yield (
            f"micro_batch={said['micro_batch']} at cp={said['cp']} is the largest that fits: "
            f"{said['tokens']:,.0f} tokens on a rank"
        )
        larger = said["next"]
        if larger is None:
            yield "no larger microbatch is tried"
        else:
            yield f"micro_batch={larger['micro_batch']} at cp={larger['cp']}: {_miss(larger)}"
    if said["name"] == "sequence":
        yield (
            f"seq={said['seq']:,} is the longest that fits, with global_batch={said['global_batch']:,}: a "
            "batch has as many tokens as asked for"
        )
        yield from (f"seq={row['seq']:,}: {_miss(row)}" for row in said["misses"])


def _miss(row: Mapping[str, Any]) -> str:
    miss = row["nearest_miss"]
    if miss is None:
        return "no layout, " + ", ".join(f"{reason} ({count:,})" for reason, count in row["reasons"].items())
    return (
        f"[{miss['label']}] needs {format_bytes(miss['needs'])}, {format_bytes(miss['too_much'])} too much, "
        f"{format_bytes(miss['largest_term_bytes'])} of it {miss['largest_term']}"
    )


def nothing_report(document: Mapping[str, Any]) -> RenderableType:
    """How far each kind of layout is from fitting, why others are out, and on how many devices one fits."""
    parts: list[RenderableType] = [
        Text(f"nothing fits, of {document['considered']:,} layouts considered", style="bold")
    ]
    if document["kinds"]:
        title = f"nearest to {format_bytes(document['device_memory'])} a device, each with least kept"
        found = table(title, "split by", "layout", "needs", "too much", "largest term", text_columns=2)
        for row in document["kinds"]:
            found.add_row(
                row["kind"],
                row["label"],
                format_bytes(row["needs"]),
                format_bytes(row["too_much"]),
                f"{row['largest_term']} {format_bytes(row['largest_term_bytes'])}",
            )
        for column in found.columns[2:4]:
            column.no_wrap = True
        parts.append(found)
    if document["rejected"]:
        parts.append(_rejected(document))
    if document["fits_on"] is not None:
        on = document["fits_on"]
        parts.append(
            Text(
                f"on {on['gpus']:,} devices [{on['label']}] fits: {format_bytes(on['device'])}", style="green"
            )
        )
    return Group(*parts)


def _layouts(
    title: str, rows: Sequence[Mapping[str, Any]], bubbles: bool, *, runs: bool = False
) -> RenderableType:
    columns = ["layout", "memory", "step", "tokens/s/GPU", "MFU", "exposed"]
    columns += ["bubble"] if bubbles else []
    columns += ["runs"] if runs else []
    found = table(title, *columns)
    found.columns[0].min_width = LONGEST_WORD
    for column in found.columns[1:]:
        column.no_wrap = True  # a number in two lines is two numbers
    for row in rows:
        cells = [
            row["label"],
            format_bytes(row["memory"]["device"]),
            format_time(row["step_time"]),
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['mfu']:.1%}",
            f"{row['exposed_time'] / row['step_time']:.1%}",
        ]
        cells += [f"{row['bubble_time'] / row['step_time']:.1%}"] if bubbles else []
        found.add_row(*cells, *(["yes" if row["runnable"] else "no"] if runs else []))
    sent = ", ".join(format_bytes(row["sent_bytes"]) for row in rows)
    return Group(found, Text(f"a rank sends in a step, in this order: {sent}", style="dim"))


def _rejected(document: Mapping[str, Any]) -> Table:
    found = table("rejected", "layouts", "reason", text_columns=2)
    for reason, count in document["rejected"].items():
        found.add_row(f"{count:,}", f"{reason}: {document['rejected_notes'].get(reason, '')}")
    return found


def _only_modelled(document: Mapping[str, Any]) -> str:
    """That train will refuse the best, and what would run."""
    text = f"train will refuse the best: {'; '.join(document['not_runnable_reasons'])}"
    if document["feasible_runnable"]:
        return (
            f"{text}; {document['feasible_runnable']:,} layouts that fit do run: rank these with --runnable"
        )
    return f"{text}; no layout that train can execute is left"


# plan --why


def why_report(document: Mapping[str, Any]) -> RenderableType:
    """One layout: rules it breaks, or memory by term, step by part, and what to say of them."""
    why = document["why_layout"]
    parts: list[RenderableType] = [Text(f"[{why['label']}]", style="bold")]
    if why["completed"]:
        filled = ", ".join(
            f"{name}={_value(value)}"
            for name, value in why["completed"].items()
            if name not in RARE or f"{name}=" in why["label"]
        )
        parts.append(Text(f"not asked for, taken as: {filled}", style="dim"))
    if why["faults"]:
        found = table("it cannot be", "broken rule", "", text_columns=2)
        for fault in why["faults"]:
            found.add_row(fault["code"], fault["message"])
        other_batch = [Text(why["verdict"][-1], style="yellow")] if why["batch"] else []
        return Group(*parts, found, *other_batch)
    parts += [_memory_table(why["memory"], why["layout"]["pp"] > 1), _step_table(why["step"])]
    parts += [Text(sentence, style="green") for sentence in why["verdict"]]
    return Group(*parts)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _memory_table(memory: Mapping[str, Any], piped: bool) -> Table:
    limit = memory["limit"]
    rank = f" of pipeline rank {memory['stage']}, the heaviest" if piped else " at the peak"
    found = table(f"memory{rank}", "term", "bytes", "", "of the device")
    found.columns[2].justify = "left"
    for term, size in memory.items():
        if term not in ("stage", "limit", "left"):
            found.add_row(term, format_bytes(size), bar(size / limit), f"{size / limit:.1%}")
    return found


def _step_table(step: Mapping[str, Any]) -> Table:
    found = table("step time", "part", "this", "best", "difference")
    whole = {"part": "step", "time": step["time"], "best": step["best_time"]}
    whole["difference"] = None if step["best_time"] is None else step["time"] - step["best_time"]
    for row in (*step["parts"], whole):
        if not row["time"] and not row["best"]:
            continue
        difference = row["difference"]
        change = "equal" if difference == 0 else NOTHING
        if difference:
            change = ("-" if difference < 0 else "+") + format_time(abs(difference))
        best = NOTHING if row["best"] is None else format_time(row["best"])
        found.add_row(row["part"], format_time(row["time"]), best, change)
    return found
