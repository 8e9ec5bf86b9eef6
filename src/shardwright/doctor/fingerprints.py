"""Fingerprints of collectives that TORCH_DISTRIBUTED_DEBUG=DETAIL compares: of two ranks in one message, or,
up to torch 1.12, of each rank in its own."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardwright.doctor.evidence import Evidence, Mismatch, Operation
from shardwright.doctor.finding import Finding, Source
from shardwright.doctor.lines import Line, Reader
from shardwright.doctor.nccl_log import parse_shape
from shardwright.doctor.rank_lists import ranks_text
from shardwright.doctor.waiting import differing

_FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running (?:collective|inconsistent collective): "
    r"CollectiveFingerPrint\((?P<body>.*?)(?:\)\)?(?=, but Rank|\.\s|\.?\s*$|\.Collectives|$))"
)


class Fingerprint(NamedTuple):
    """What one rank says it called when it found the others to call something else."""

    source: Source
    rank: int
    call: Operation


def read_fingerprints(line: Line) -> Iterator[Mismatch | Fingerprint]:
    """Two ranks in different collectives, or one that differs from others."""
    text = line.text if len(_FINGERPRINT.findall(line.text)) > 1 else line.joined(4, "")
    found = list(_FINGERPRINT.finditer(text))
    alone = _FINGERPRINT.search(line.text if len(found) < 2 else text)
    if "inconsistent collective" in text and alone is not None:
        name, shape, _, dtype = _fingerprint(alone["body"])
        yield Fingerprint(line.source, int(alone["rank"]), Operation(name, shape=shape, dtype=dtype))
        return
    if len(found) < 2:
        return
    sides = [_fingerprint(each["body"]) for each in found[:2]]
    yield Mismatch(
        line.source,
        (int(found[0]["rank"]), int(found[1]["rank"])),
        (sides[0][0], sides[1][0]),
        (sides[0][1], sides[1][1]),
        (sides[0][2], sides[1][2]),
        (sides[0][3], sides[1][3]),
    )


def _fingerprint(body: str) -> tuple[str, tuple[int, ...] | None, int | None, str]:
    """Operation, shape, sequence number and type; a comma before OpType is missing in some versions."""
    operation = re.search(r"OpType=(\w+)", body)
    shape = re.search(r"TensorShape=\[([\d,\s]*)\]", body)
    number = re.search(r"SequenceNumber=(\d+)", body)
    dtype = re.search(r"TensorDtypes=(\w+)", body)
    return (
        operation[1] if operation else "?",
        parse_shape(shape[1]) if shape else None,
        int(number[1]) if number else None,
        dtype[1] if dtype else "",
    )


def fingerprint_findings(evidence: Evidence) -> Iterator[Finding]:
    """Ranks that each say what they called: the minority differs; one alone says only that somebody does."""
    said = {each.rank: each for each in evidence.of(Fingerprint)}
    if not said:
        return
    calls = {rank: each.call for rank, each in said.items()}
    sources = tuple(each.source for each in said.values())
    different = differing(calls) if len(calls) > 1 else None
    if different is None:
        rank, call = next(iter(calls.items()))
        yield Finding(
            "operation_mismatch",
            "cannot_tell",
            f"{ranks_text(set(calls))} called {call.text} and found others in something else; in what the "
            "files do not say",
            (),
            sources,
            (),
            ("the same message of all other ranks",),
            numbers={"calls": {str(rank): call.text}},
        )
        return
    what, odd = different
    sides = "; ".join(f"rank {rank}: {call.text}" for rank, call in sorted(calls.items())[:8])
    yield Finding(
        f"{what}_mismatch",
        "certain",
        f"ranks call different things at the same place: {sides}",
        tuple(sorted(odd)),
        sources,
        numbers={"calls": {str(rank): call.text for rank, call in calls.items()}},
    )


READERS: dict[bytes, Reader[Any]] = {b"CollectiveFingerPrint(": read_fingerprints}
