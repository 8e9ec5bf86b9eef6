"""What a run folder of ours holds of a run that failed: states of ranks, and how they ended."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.doctor.crash_log import DATA_ENDED, ECHOES, WAITED
from shardwright.doctor.evidence import Failure, Run, Silence, State, World
from shardwright.doctor.finding import Source
from shardwright.doctor.rank_lists import ranks_text

SIGNALS = {
    "SIGKILL": "killed",
    "SIGSEGV": "segfault",
    "SIGBUS": "bus_error",
    "SIGABRT": "aborted",
    "SIGTERM": "terminated",
}


def is_state(document: Any) -> bool:
    """Whether a document is a rank's state."""
    return isinstance(document, Mapping) and {"rank", "groups", "stack", "in_collective"} <= set(document)


def is_failures(document: Any) -> bool:
    """Whether a document says how ranks ended."""
    return isinstance(document, Mapping) and "failures" in document and "returned" in document


def read_state(name: str, document: Mapping[str, Any]) -> Iterator[State | World]:
    """A rank's state."""
    rank = int(document["rank"])
    error = document.get("error") or {}
    words = f"{error.get('kind', '')}: {error.get('message', '')}" if error else ""
    stack = tuple(str(frame) for frame in document["stack"])
    where = stack[0] if stack else "nowhere"
    groups = {
        str(key): (str(group.get("description", "")), tuple(int(r) for r in group.get("ranks", ())))
        for key, group in document["groups"].items()
        if isinstance(group, Mapping)
    }
    text = f"rank {rank}: {words or 'no error'}; at {where}"
    yield State(Source(name, None, text), rank, groups, bool(document["in_collective"]), words, stack)
    if isinstance(document.get("world_size"), int):
        yield World(Source(name, None, text), document["world_size"])


def read_failures(name: str, document: Mapping[str, Any]) -> Iterator[Failure]:
    """How each rank ended, in the order in which they did."""
    for entry in document["failures"]:
        if not isinstance(entry, Mapping):
            continue
        rank, kind = int(entry.get("rank", -1)), str(entry.get("kind", ""))
        message, detail = str(entry.get("message", "")), str(entry.get("detail", ""))
        words = f"{kind}: {message}"
        what = SIGNALS.get(kind) or ("exited" if kind.startswith("exit status") else "exception")
        if "preamble.length" in detail or "preamble.length" in message:
            what = "gloo_size"
        elif what == "exception" and (entry.get("echo") or ECHOES.search(message)):
            what = "echo"
        elif what == "exception" and WAITED.search(message):
            what = "waited"
        elif what == "exception" and DATA_ENDED.search(words):
            what = "data_ended"
        source = Source(name, None, f"rank {rank} ended: {words}")
        frames = tuple(
            line.strip() for line in reversed(detail.splitlines()) if line.lstrip().startswith("File ")
        )
        yield Failure(source, rank, what, words[:300], None, frames=frames)
    returned = sorted(int(rank) for rank in document["returned"])
    if returned and document["failures"]:
        text = f"{ranks_text(returned)} had returned from the training loop before the others failed"
        for rank in returned:
            yield Failure(
                Source(name, None, text),
                rank,
                "returned",
                "left the loop while others were still in it",
                None,
            )


def silence_of(folder: Path) -> Silence | None:
    """How long a run folder has been silent that has metrics, and neither a result nor failures."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file() or (folder / "result.json").exists() or (folder / "failures.json").exists():
        return None
    seconds = max(time.time() - metrics.stat().st_mtime, 0.0)
    return Silence(Source(str(metrics), None, f"unchanged for {seconds:,.0f} s"), str(folder), seconds)


def read_ranks(name: str, document: Mapping[str, Any]) -> Run:
    """ranks.json or result.json."""
    folder = name.rpartition("/")[0]
    if "ranks" in document:
        return Run(folder, len(document["ranks"]), None, None, False, None)
    finished = not document.get("fault") and not document.get("interrupted")
    return Run(
        folder, document.get("world_size"), document.get("steps"), None, finished, document.get("fault")
    )
