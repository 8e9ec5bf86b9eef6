"""What ``doctor`` prints for people, from its JSON document."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

SURE = {"certain": "certain", "likely": "likely", "cannot_tell": "cannot tell"}
STYLES = {"certain": "bold red", "likely": "bold yellow", "cannot_tell": "bold cyan"}
MOST_QUOTED = 4


def doctor_report(document: Mapping[str, Any]) -> RenderableType:
    """Each finding: what happened, how sure, the lines that show it, what to do, what to collect."""
    parts: list[RenderableType] = []
    for finding in document["findings"]:
        parts += finding_lines(finding)
    for refused in document["refused"]:
        parts.append(Text(f"not read: {refused['file']}: {refused['reason']}", style="yellow"))
    read = len(document["inputs"])
    if not document["findings"]:
        parts.append(Text(f"nothing wrong found in {read} file{'s' if read != 1 else ''}", style="green"))
    return Group(*parts)


def finding_lines(finding: Mapping[str, Any]) -> list[RenderableType]:
    """One finding, and an empty line; good news, which asks for nothing, in green."""
    head = f"{finding['kind']}: {finding['cause'].replace('_', ' ')} ({SURE[finding['certainty']]})"
    style = STYLES[finding["certainty"]] if finding["actions"] or finding["collect"] else "bold green"
    parts: list[RenderableType] = [
        Text(head, style=style),
        Text(f"  {finding['summary']}"),
        Text(f"  {finding['explanation']}", style="dim"),
    ]
    parts += [Text(f"  > {_quoted(seen)}", style="dim") for seen in finding["evidence"][:MOST_QUOTED]]
    more = len(finding["evidence"]) - MOST_QUOTED
    if more > 0:
        parts.append(Text(f"  > {more} more lines: --json has them", style="dim"))
    parts += [Text(f"  do: {action}") for action in finding["actions"]]
    parts += [Text(f"  collect: {wanted}") for wanted in finding["collect"]]
    return [*parts, Text("")]


def _quoted(seen: Mapping[str, Any]) -> str:
    place = seen["file"] if seen["line"] is None else f"{seen['file']}:{seen['line']}"
    return f"{place}: {seen['text'][:200]}"
