"""Findings: what was seen, what it means, how sure, what to do. Every cause stands in causes.toml."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["hang", "oom", "layout", "numbers", "slow", "checkpoint"]
KINDS: tuple[Kind, ...] = ("hang", "oom", "layout", "numbers", "slow", "checkpoint")

Certainty = Literal["certain", "likely", "cannot_tell"]
CERTAINTIES: tuple[Certainty, ...] = ("certain", "likely", "cannot_tell")

CAUSES_FILE = Path(__file__).with_name("causes.toml")

LONGEST_QUOTE = 400
"""Characters of a line that evidence quotes."""

MOST_EVIDENCE = 12
"""Lines that one finding quotes: enough to check it by."""


class Source(NamedTuple):
    """Where something was seen: file, line counted from 1 (None where a file has no lines), and its text."""

    file: str
    line: int | None
    text: str


class Cause(NamedTuple):
    """One entry of causes.toml."""

    kind: Kind
    explanation: str
    remedy: tuple[str, ...]
    collect: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One diagnosis. ``ranks`` are those at fault, or that disagree; never those that only wait.

    ``actions`` come before the remedies of the cause, ``collect`` before what it always asks for; ``numbers``
    are the quantities behind the sentence, in SI units.
    """

    cause: str
    certainty: Certainty
    summary: str
    ranks: tuple[int, ...] = ()
    evidence: tuple[Source, ...] = ()
    actions: tuple[str, ...] = ()
    collect: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """Kind of its cause."""
        return causes()[self.cause].kind

    def document(self) -> dict[str, Any]:
        """The finding as ``--json`` prints it."""
        cause = causes()[self.cause]
        return {
            "kind": cause.kind,
            "cause": self.cause,
            "certainty": self.certainty,
            "ranks": list(self.ranks),
            "summary": self.summary,
            "explanation": cause.explanation,
            "evidence": [
                {"file": s.file, "line": s.line, "text": s.text.strip()[:LONGEST_QUOTE]}
                for s in _once(self.evidence)[:MOST_EVIDENCE]
            ],
            "actions": list(dict.fromkeys([*self.actions, *cause.remedy])),
            "collect": list(dict.fromkeys([*self.collect, *(cause.collect if self._asks else ())])),
            "numbers": dict(self.numbers),
        }

    @property
    def _asks(self) -> bool:
        return self.certainty != "certain"


def _once(sources: Sequence[Source]) -> list[Source]:
    return list(dict.fromkeys(sources))


@cache
def causes() -> Mapping[str, Cause]:
    """Every cause that the doctor knows, by its key."""
    table = tomllib.loads(CAUSES_FILE.read_text(encoding="utf-8"))
    return {
        key: Cause(
            entry["kind"],
            entry["explanation"],
            tuple(entry.get("remedy", ())),
            tuple(entry.get("collect", ())),
        )
        for key, entry in table.items()
    }


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """The surest first, kinds together."""
    return sorted(findings, key=lambda f: (CERTAINTIES.index(f.certainty), KINDS.index(f.kind)))
