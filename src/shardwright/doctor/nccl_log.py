"""What torch's watchdog and NCCL write when a collective hangs, in the forms of torch 1.12 to 2.13.

Ranks: torch 2.1 and later begin a line with the global rank, ``[rank7]:``; the ``Rank 7`` inside brackets
is the rank in its process group, the global one only in the default group.
"""

import re
from collections.abc import Iterator
from typing import Any

from shardwright.doctor.clock import time_of
from shardwright.doctor.evidence import (
    UNKNOWN,
    CommInit,
    Desync,
    DumpSignal,
    OpCount,
    Operation,
    Progress,
    Stack,
    Timeout,
    WatchdogStuck,
    World,
)
from shardwright.doctor.lines import Line, Reader, rank_of_text
from shardwright.doctor.rank_lists import parse_ranks

DEFAULT_GROUP = "0"

NARROWEST_WRAP = 40
"""Characters of a line below which it was not broken off another: terminals are wider."""

_WORK = re.compile(
    r"Work(?:N|H|X|R|M)CCL\((?P<fields>[^()]*?)Timeout\(ms\)\s*=\s*(?P<timeout>\d+)\s*\)"
    r"(?:\s*ran for\s*(?P<waited>\d+)\s*milliseconds)?"
)
_FIELD = re.compile(r"(\w+)\s*=\s*(\[[^\]]*\]|[^,\s]+)")
_GROUP = re.compile(
    r"\[PG (?:ID (?P<local>\d+) )?(?:PG )?(?:GUID )?(?P<name>[\w.:+-]+?)\s*(?:\((?P<desc>[^()]*)\))?\s+"
    r"Rank (?P<rank>\d+)\]"
)
_GLOBAL_RANK = re.compile(r"\[rank:?\s*(\d+)\](?::|\s|$)")
_OWN_RANK = re.compile(r"\[Rank (\d+)\]")
_PROGRESS = re.compile(
    r"(?:(?:at|detected by watchdog at|work sequence id:?|NCCL work:|Timeout at)\s*(?:NCCL )?(?:work)?"
    r"(?: sequence id)?:?\s*(?P<failed>\d+)[\s,.;:]*(?:PG status:\s*)?)?"
    r"[Ll]ast enqueued (?:\w+ )?work:\s*(?P<enqueued>-?\d+)"
    r"(?:,\s*last started (?:\w+ )?work:\s*(?P<started>-?\d+))?"
    r",\s*last completed (?:\w+ )?work:\s*(?P<completed>-?\d+)"
)
_EVERY = re.compile(r"all (\d+) ranks")
_SIGNAL = re.compile(
    r"(?:timeout|signal)[^.]{0,80}? from\s+(?:this local rank|another rank|rank\s*(?P<rank>\d+))"
)
_STUCK = re.compile(r"watchdog got stuck for (?P<seconds>\d+) seconds")
_PENDING = re.compile(r"workMetaList_\.size\(\)\s*=\s*(\d+)")
_FRAME = re.compile(
    r"^\s*(?:#\d+\s+)?(?P<name>[\w.<>]+) (?:at|from) (?P<file>[^\s:]+(?:\s[^\s:]+)*):(?P<line>\d+)"
)
_LIST = r"[\[{](?P<ranks>[\d,\s.\-]*)[\]}]"
_NOT_FINISHED = re.compile(_LIST + r" joined but didn't finish collective #(?P<seq>\d+)")
_NOT_JOINED = re.compile(_LIST + r" finished collective #\d+, but didn't join collective #(?P<seq>\d+)")
_NEVER = re.compile(r"ranks " + _LIST + r" are the lagging ranks[^.]*\. They never joined any")
_OPCOUNT = re.compile(
    r"(?P<process>[\w.\-]+:\d+):\d+ \[(?P<device>\d+)\] NCCL INFO (?P<op>\w+): opCount "
    r"(?P<count>[0-9a-f]+) .*?"
    r"count (?P<numel>\d+) datatype (?P<type>\d+).*?comm (?P<comm>0x[0-9a-f]+)(?: \[nranks=(?P<ranks>\d+)\])?"
)
_INIT = re.compile(
    r"(?P<process>[\w.\-]+:\d+):\d+ \[(?P<device>\d+)\] NCCL INFO .*?comm (?P<comm>0x[0-9a-f]+) rank "
    r"(?P<rank>\d+) "
    r"n[Rr]anks (?P<ranks>\d+)"
)
_ANALYSER = {
    "seq": re.compile(r"sequence number:?\s*(\d+)"),
    "missing": re.compile(r"missing ranks:\s*\{?([\d,\s]*)\}?"),
    "expected": re.compile(r"expected ranks:\s*\{?([\d,\s]*)\}?"),
    "operation": re.compile(r"^[^\w]*(?:\[rank\d+\]:)?\s*collective:\s*([\w:]+)"),
    "culprits": re.compile(r"error msg:\s*(.*)"),
    "size": re.compile(r"input sizes:\s*\[\[([\d,\s]*)\]"),
}


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _seconds(milliseconds: str | None) -> float | None:
    return None if milliseconds is None else int(milliseconds) / 1000


def _group(text: str) -> tuple[str, str, int | None]:
    """Name of the process group, its description, and the rank in it."""
    found = _GROUP.search(text)
    if found is None:
        return UNKNOWN, "", None
    name = found["name"]
    return name, found["desc"] or "", int(found["rank"])


def _rank(line: Line, head: str, group: str, inner: int | None) -> int | None:
    """The global rank of a message: nearest before it in the line; a group's own rank only where it is
    one."""
    tags = _GLOBAL_RANK.findall(head)
    if tags:
        return int(tags[-1])
    own = _OWN_RANK.findall(head)
    if group in (UNKNOWN, DEFAULT_GROUP) and (own or inner is not None):
        return int(own[-1]) if own else inner
    return line.rank


def read_timeout(line: Line) -> Iterator[Timeout | Stack]:
    """Every timeout of a line: lines of several ranks may have run together, or one have been wrapped."""
    text, end = _unwrapped(line), 0
    for found in _WORK.finditer(text):
        head, tail = text[end : found.start()], text[found.end() : found.end() + 120]
        end = found.end()
        told = re.search(r"timed? ?out", tail) or "operation timeout" in head[-80:]  # a log may end here
        if found["waited"] is None and not told:
            continue
        fields = dict(_FIELD.findall(found["fields"]))
        group, _, inner = _group(head[-200:])
        shape = parse_shape(fields["TensorShape"]) if "TensorShape" in fields else None
        operation = Operation(
            fields.get("OpType", "?"), _count(fields, "NumelIn"), _count(fields, "NumelOut"), shape
        )
        yield Timeout(
            line.source,
            _rank(line, head, group, inner),
            group,
            _count(fields, "SeqNum"),
            operation,
            _seconds(found["timeout"]),
            _seconds(found["waited"]),
            time_of(head) or time_of(text),
        )
    yield from _stack(line)


def _unwrapped(line: Line) -> str:
    """A line with what a terminal or a pager has broken off it, in front or behind."""
    text = line.text
    if "CCL(" not in text or not (_GLOBAL_RANK.search(text) or _OWN_RANK.search(text)):
        above = line.before(2)
        while above and len(above[-1]) < NARROWEST_WRAP:
            above = above[:-1] if len(above) == 1 else []
        text = "".join(above) + text
    if text.rfind("Timeout(ms)") < text.rfind("CCL(") or not re.search(r"milliseconds|blocking wait", text):
        following = [part.rstrip() for part in line.following(6)]
        joined = text.rstrip() + "".join(following)
        text = joined if _WORK.search(joined) else text.rstrip() + " " + " ".join(following)
    return text


def _count(fields: dict[str, str], name: str) -> int | None:
    text = fields.get(name, "")
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def parse_shape(text: str) -> tuple[int, ...]:
    """``[20, 10]``."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:16])


def _stack(line: Line) -> Iterator[Stack]:
    """Python frames that a line's followers list, as ``#0 barrier from .../distributed_c10d.py:5030``."""
    frames = []
    for text in line.following(12):
        found = _FRAME.match(text)
        if found is not None and text.lstrip().startswith("#"):
            frames.append(f"{found['name']} at {found['file']}:{found['line']}")
    if frames:
        yield Stack(line.source, line.rank, tuple(frames))


def read_progress(line: Line) -> Iterator[Progress | DumpSignal | World]:
    """How far ranks are; and whose timeout it was, where the line says that."""
    text = line.text if _PROGRESS.search(line.text) else line.joined(3, "")
    every = _EVERY.search(text)
    for found in _PROGRESS.finditer(text):
        head = text[: found.start() + 1]
        group, name, inner = _group(text[: found.end()])
        rank = None if every else _rank(line, head, group, inner)
        if rank is None and not every and line.text[:1] in " \t":
            rank = _rank_above(line)
        for each in [rank, *range(min(int(every[1]), 1 << 16) if every else 0)]:
            yield Progress(
                line.source,
                each,
                group,
                failed=_number(found["failed"]),
                enqueued=_number(found["enqueued"]),
                started=_number(found["started"]),
                completed=_number(found["completed"]),
                time=time_of(text),
                name=name,
            )
    if every:
        yield World(line.source, int(every[1]))
    if "dump" in text:
        yield from read_signal(line)


def _rank_above(line: Line) -> int | None:
    """Whose an indented line is: the nearest line above that says so and is not indented."""
    for text in reversed(line.before(8)):
        if text[:1] not in (" ", "\t"):
            return rank_of_text(text)
    return None


def read_signal(line: Line) -> Iterator[DumpSignal]:
    """A rank hears of a timeout, its own or another's."""
    found = _SIGNAL.search(line.text)
    group, _, inner = _group(line.text)
    rank = _rank(line, line.text[:200], group, inner)
    if found is not None and found["rank"] is not None:
        yield DumpSignal(line.source, rank, group, int(found["rank"]), False, time_of(line.text))
    elif found is not None or "First PG on this rank" in line.text:
        own = "another rank" not in (found[0] if found else "")
        yield DumpSignal(line.source, rank, group, None, own, time_of(line.text))


def read_stuck(line: Line) -> Iterator[WatchdogStuck]:
    """The watchdog itself stands still."""
    above = "" if rank_of_text(line.text) is not None else "".join(line.before(1))
    group, _, inner = _group(above + line.text)
    found, pending = _STUCK.search(line.text), _PENDING.search(line.text)
    rank = _rank(line, (above + line.text)[:80], group, inner)
    yield WatchdogStuck(
        line.source,
        rank,
        float(found["seconds"]) if found else None,
        int(pending[1]) if pending else None,
        time_of(line.text),
    )


def read_desync(line: Line) -> Iterator[Desync]:
    """Lines of a desync report."""
    for pattern, state in (
        (_NOT_FINISHED, "not_finished"),
        (_NOT_JOINED, "not_joined"),
        (_NEVER, "never_joined"),
    ):
        for found in pattern.finditer(line.text):
            seq = int(found["seq"]) if "seq" in found.groupdict() else None
            operation = re.search(r"stuck op: (\w+)", line.text)
            yield Desync(
                line.source, parse_ranks(found["ranks"]), state, seq, operation[1] if operation else ""
            )


def read_analyser(line: Line) -> Iterator[Desync]:
    """The report of torch's flight recorder analyser about one collective."""
    lines = [line.text, *line.following(60)]
    values: dict[str, str] = {}
    frames = []
    for number, text in enumerate(lines):
        if number and re.search(r"Not all ranks joining|has errors|Collective sequence number", text):
            break
        for key, pattern in _ANALYSER.items():
            if key not in values and (found := pattern.search(text)) is not None:
                values[key] = found[1]
        frame = _FRAME.match(text)
        if frame is not None:
            frames.append(f"{frame['name']} at {frame['file']}:{frame['line']}")
    culprits = re.findall(r"Culprit rank (\d+); ([^;]*)", values.get("culprits", ""))
    missing = parse_ranks(values.get("missing", ""))
    size = 1
    for part in re.findall(r"\d+", values.get("size", "")):
        size *= int(part)
    common: dict[str, Any] = {
        "seq": _number(values.get("seq")),
        "operation": values.get("operation", ""),
        "expected": parse_ranks(values.get("expected", "")),
        "frames": tuple(frames),
        "size": size if "size" in values else None,
    }
    if missing:
        yield Desync(line.source, missing, "missing", **common)
    for rank, text in culprits:
        kind = "other_operation" if "TYPE_MISMATCH" in text else "other_size"
        kind = "other_dtype" if "DTYPE" in text else kind
        yield Desync(line.source, (int(rank),), kind, **common)


def read_opcount(line: Line) -> Iterator[OpCount]:
    """An NCCL call; its counter is hexadecimal."""
    for found in _OPCOUNT.finditer(line.text):
        yield OpCount(
            line.source,
            f"{found['process']} [{found['device']}]",
            found["comm"],
            line.rank,
            _number(found["ranks"]),
            found["op"],
            int(found["count"], 16),
            int(found["numel"]),
            int(found["type"]),
            time_of(line.text),
        )


def read_init(line: Line) -> Iterator[CommInit]:
    """A communicator is made."""
    for found in _INIT.finditer(line.text):
        process = f"{found['process']} [{found['device']}]"
        yield CommInit(
            line.source,
            process,
            found["comm"],
            int(found["rank"]),
            int(found["ranks"]),
            "Init COMPLETE" in line.text,
            name[1] if (name := re.search(r"commId (0x[0-9a-f]+)", line.text)) else "",
        )


def read_world(line: Line) -> Iterator[World]:
    """``world size: 8``, in whatever spelling; or a note that somebody put into the log, ``# 8 ranks``."""
    found = re.search(r"world[ _]size['\"]?\s*[:=]?\s*(?:is |of )?(\d{1,7})\b", line.text, re.IGNORECASE)
    note = re.search(r"(\d+) ranks\b", line.text) if line.text.startswith("#") else None
    if note is not None:
        yield World(line.source, int(note[1]))
    elif found and not re.search(r"world size of|different|mismatch|checkpoint", line.text, re.IGNORECASE):
        yield World(line.source, int(found[1]))


READERS: dict[bytes, Reader[Any]] = {
    b"SeqNum=": read_timeout,
    b"OpType=": read_timeout,
    b"WorkNCCL(": read_timeout,
    b"WorkHCCL(": read_timeout,
    b"WorkXCCL(": read_timeout,
    b"ast enqueued ": read_progress,
    b"dump signal": read_signal,
    b"timeout signal": read_signal,
    b"to signal dumping": read_signal,
    b"watchdog got stuck": read_stuck,
    b"eartbeat monitor": read_stuck,
    b"didn't finish collective": read_desync,
    b"didn't join collective": read_desync,
    b"the lagging ranks": read_desync,
    b"Not all ranks joining": read_analyser,
    b"Collective sequence number": read_analyser,
    b": opCount ": read_opcount,
    b"Init COMPLETE": read_init,
    b" ranks, ": read_world,
    b" ranks o": read_world,
    b"world size": read_world,
    b"world_size": read_world,
    b"WORLD_SIZE": read_world,
}
