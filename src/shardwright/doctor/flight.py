"""A rank's flight recorder, of versions 2.0 to 2.10: NCCL's pickles and JSON, gloo's JSON."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.doctor.evidence import Dump, Entry, Operation
from shardwright.doctor.finding import Source
from shardwright.doctor.rank_lists import parse_ranks

MOST_ENTRIES = 200_000
MOST_FRAMES = 24

_RANK_AT_END = re.compile(r"(\d+)(?:\.(?:json|pickle|pkl|dump|bin|trace|txt))*$")
_RANK_NAMED = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)


def is_dump(document: Any) -> bool:
    """Whether a document is a flight recorder's."""
    return (
        isinstance(document, Mapping)
        and "entries" in document
        and ("pg_config" in document or "version" in document or "pg_status" in document)
    )


def rank_of_dump(file: str, document: Mapping[str, Any]) -> int | None:
    """The rank of a dump, by itself or by its file's name: torch's is ``<prefix><rank>``."""
    own = document.get("rank")
    if isinstance(own, int) and not isinstance(own, bool):
        return own
    name = file.replace("\\", "/").rpartition("/")[2]
    found = _RANK_NAMED.search(name)
    if found is None and not re.search(r"v?\d+[_.]\d+", name):  # a version is no rank
        found = _RANK_AT_END.search(name)
    return int(found[1]) if found else None


def read_dump(file: str, document: Mapping[str, Any]) -> Dump:
    """A dump as records. What has another type than it should is left out.

    Raises: ValueError: it has no list of entries.
    """
    entries = document.get("entries")
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ValueError("'entries' is no list: this is no flight recorder dump")
    read = [_entry(each) for each in entries[-MOST_ENTRIES:] if isinstance(each, Mapping)]
    return Dump(
        Source(file, None, f"flight recorder {document.get('version', '?')}, {len(entries)} entries"),
        rank_of_dump(file, document),
        str(document.get("version", "?")),
        _groups(document.get("pg_config")),
        _status(document.get("pg_status")),
        read,
    )


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _int(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value)


def _groups(config: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for key, value in _mapping(config).items():
        group = _mapping(value)
        ranks = group.get("ranks", "")
        listed = (
            parse_ranks(ranks)
            if isinstance(ranks, str)
            else tuple(
                rank for rank in map(_int, ranks if isinstance(ranks, Sequence) else ()) if rank is not None
            )
        )
        found[str(group.get("name", key))] = (str(group.get("desc", "")), listed)
    return found


def _status(status: Any) -> dict[str, tuple[int | None, int | None, int | None]]:
    return {
        str(key): (
            _int(_mapping(value).get("last_enqueued_collective")),
            _int(_mapping(value).get("last_started_collective")),
            _int(_mapping(value).get("last_completed_collective")),
        )
        for key, value in _mapping(status).items()
    }


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    rows = [row if isinstance(row, Sequence) and not isinstance(row, str) else [row] for row in value[:4096]]
    return tuple(tuple(size for size in map(_int, row) if size is not None) for row in rows)


def _numel(sizes: tuple[tuple[int, ...], ...]) -> int | None:
    return sum(math.prod(row) for row in sizes) if sizes else None


def _entry(entry: Mapping[str, Any]) -> Entry:
    process_group = entry.get("process_group")
    if isinstance(process_group, Sequence) and not isinstance(process_group, str) and process_group:
        group = str(process_group[0])
    else:
        group = str(
            entry.get("pg_name", process_group if process_group is not None else entry.get("pg_id", "0"))
        )
    sizes_in, sizes_out = _sizes(entry.get("input_sizes")), _sizes(entry.get("output_sizes"))
    dtypes = entry.get("input_dtypes")
    created = entry.get("time_created_ns")
    microseconds = _int(entry.get("time_created_us"))
    created = microseconds * 1000 if created is None and microseconds else _int(created)
    frames = entry.get("frames")
    state = str(entry.get("state", "scheduled")).lower()
    timeout = _int(entry.get("timeout_ms"))
    return Entry(
        group=group,
        seq=_int(entry.get("collective_seq_id", entry.get("seq_id"))),
        p2p_seq=_int(entry.get("p2p_seq_id")),
        is_p2p=bool(entry.get("is_p2p", False)),
        operation=Operation(
            str(entry.get("profiling_name", "?")),
            _numel(sizes_in),
            _numel(sizes_out),
            dtype=str(dtypes[0]) if isinstance(dtypes, Sequence) and dtypes else "",
        ),
        state="completed" if entry.get("time_discovered_completed_ns") else state,
        created=None if created is None else created / 1e9,
        frames=_frames(frames),
        sizes_in=sizes_in,
        sizes_out=sizes_out,
        number=_int(entry.get("record_id")),
        timeout=None if timeout is None else timeout / 1000,
    )


def _frames(frames: Any) -> tuple[str, ...]:
    if not isinstance(frames, Sequence) or isinstance(frames, str):
        return ()
    return tuple(
        f"{frame.get('name', '?')} at {frame.get('filename', '?')}:{frame.get('line', '?')}"
        for frame in frames[:MOST_FRAMES]
        if isinstance(frame, Mapping)
    )


LIBRARY = re.compile(
    r"/torch/|^torch/|site-packages/torch|/c10d_logger\.py|distributed_c10d\.py|<string>|/threading\.py"
)
"""Frames of torch itself, which say what was called, not who called."""


def caller(frames: Sequence[str]) -> str | None:
    """The innermost frame that is not torch's own."""
    own = [frame for frame in frames if not LIBRARY.search(frame.partition(" at ")[2])]
    return own[0] if own else (frames[0] if frames else None)
