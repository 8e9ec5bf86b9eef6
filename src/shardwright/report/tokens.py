"""Tokenizing: how far it is, on stderr; and what was read and written."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from shardwright.units import format_bytes, format_count


@contextlib.contextmanager
def reading_bar() -> Iterator[Callable[[int, int], None]]:
    """A function of bytes read and of all bytes that shows a bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def tokens_report(document: Mapping[str, Any]) -> RenderableType:
    """A token file in a few lines."""
    tokens, text = document["tokens"], document["text_bytes"]
    lines = [
        f"{document['output']}: {tokens:,} tokens of {document['documents']:,} documents, "
        f"{format_bytes(document['bytes'])} ({document['dtype']})",
        f"tokenizer {document['tokenizer']}: vocabulary {document['vocab']:,}, separator "
        f"{document['separator']}, {text / max(tokens - document['documents'], 1):.2f} B of text a token",
        f"read {format_bytes(text)} of text from {document['files']:,} files in {document['time']:.1f} s, "
        f"{format_count(tokens / document['time'])} tokens/s",
    ]
    if document["skipped"]:
        lines.append(f"left out {document['skipped']:,} records, the first of them:")
        lines += [f"  {fault}" for fault in document["first_skipped"]]
    lines.append(f"train on it: shardwright train PLAN --data {document['output']}")
    return Text("\n".join(lines))
