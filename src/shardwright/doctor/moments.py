"""Adam's moments before saving and after loading, as people print them to see whether a resume has them."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from shardwright.doctor.evidence import Evidence, Message
from shardwright.doctor.finding import Finding
from shardwright.doctor.lines import Line, Reader

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_KIND = r"(?:norm|sum|mean|max|abs)"
_MOMENT = re.compile(
    rf"exp_avg(?:_sq)?(?![a-z])[^\d\n=:]{{0,40}}{_KIND}[^\d\n]{{0,40}}?(?:[=:]|\bis\b)\s*(?:tensor\()?{_NUMBER}"
    rf"|{_KIND}[^\d\n=:]{{0,20}}exp_avg(?:_sq)?(?![a-z])[^\d\n]{{0,40}}?(?:[=:]|\bis\b)\s*(?:tensor\()?{_NUMBER}"
)
_LOADED = re.compile(r"\b(?:re|after )?load|resum|restor", re.IGNORECASE)
_SAVED = re.compile(r"\bsav(?:e|ed|ing)\b|before", re.IGNORECASE)

LINES_BEFORE = 3
"""In which it may stand whether a checkpoint was loaded or saved, where the line does not say."""

SAME = 0.02
"""By how much a norm may differ before and after: other sums, or another number of ranks that print it."""


def read_moment(line: Line) -> Iterator[Message]:
    """``exp_avg norm after load: 0.0``, ``{"exp_avg_norm": 1.2e-3}``, ``norm of exp_avg = 0``."""
    found = _MOMENT.search(line.text)
    if found is None:
        return
    value = float(next(group for group in found.groups() if group is not None))
    for text in (line.text, *reversed(line.before(LINES_BEFORE))):
        loaded, saved = _LOADED.search(text) is not None, _SAVED.search(text) is not None
        if loaded != saved or (loaded and saved):
            after = loaded and not (saved and re.search(r"before", text, re.IGNORECASE))
            yield Message(line.source, line.rank, "moment", {"value": value, "loaded": after})
            return


READERS: dict[bytes, Reader[Any]] = {b"exp_avg": read_moment}


def moment_findings(evidence: Evidence) -> Iterator[Finding]:
    """Moments that are zero after a load, or other than they were saved."""
    moments = [message for message in evidence.of(Message) if message.what == "moment"]
    loaded = [message for message in moments if message.numbers["loaded"]]
    saved = [message for message in moments if not message.numbers["loaded"]]
    gone = [message for message in loaded if message.numbers["value"] == 0]
    if gone:
        before = next((message for message in saved if message.numbers["value"]), None)
        yield Finding(
            "optimizer_state_missing",
            "certain",
            "Adam's moments are zero after loading"
            + (f", where they were {before.numbers['value']:g} when saved" if before else "")
            + ": the load dropped them and said nothing",
            _ranks(gone),
            tuple(message.source for message in ([before] if before else []) + gone),
            numbers={"loaded": 0.0, "saved": before.numbers["value"] if before else None},
        )
    elif saved and loaded:
        one, other = saved[-1], loaded[0]
        a, b = one.numbers["value"], other.numbers["value"]
        if one.rank == other.rank and not math.isclose(a, b, rel_tol=SAME):
            yield Finding(
                "optimizer_state_missing",
                "likely",
                f"Adam's moments were {a:g} when saved and are {b:g} after loading: some were not loaded, or "
                "they are other parameters'",
                _ranks([other]),
                (one.source, other.source),
                numbers={"loaded": b, "saved": a},
            )


def _ranks(messages: Sequence[Message]) -> tuple[int, ...]:
    return tuple(sorted({message.rank for message in messages if message.rank is not None}))
