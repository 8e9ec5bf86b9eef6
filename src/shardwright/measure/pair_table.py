"""Lists of pairs as people post them: two names and a value a line, ``n644,n699  49.36``."""

import re
from typing import NamedTuple

from shardwright.errors import EvidenceError

_ENTRY = re.compile(
    r"^\s*([A-Za-z][\w.-]*)\s*(?:,|<?->|-|to|:)\s*([A-Za-z][\w.-]*)\s*[:,=]?\s+([\d.]+)\s*(#.*)?$"
)
"""A line: names begin with a letter, so that no table of numbers is taken for one."""

FEWEST = 2
"""Lines of a list."""


class PairLine(NamedTuple):
    """One value of a pair, in the unit of the list, with the line it stands in."""

    pair: tuple[str, str]
    value: float
    line: int
    text: str


class PairList(NamedTuple):
    """All of a file."""

    name: str
    entries: tuple[PairLine, ...]

    @property
    def values(self) -> dict[tuple[str, str], float]:
        """By pair; of one that is listed again the best."""
        found: dict[tuple[str, str], float] = {}
        for entry in self.entries:
            found[entry.pair] = max(entry.value, found.get(entry.pair, 0.0))
        return found


def is_pair_list(text: str) -> bool:
    """Whether most lines that are no comment are pairs with a value."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    pairs = sum(_ENTRY.match(line) is not None for line in lines)
    return pairs >= FEWEST and 2 * pairs > len(lines)


def read_pair_list(text: str, name: str) -> PairList:
    """The pairs of a list.

    Raises: EvidenceError: a line is none, or a value no number; with its line and column.
    """
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _ENTRY.match(line)
        if found is None:
            column = len(line) - len(line.lstrip()) + 1
            raise EvidenceError(
                f"{name} line {number}, column {column}: {line.strip()[:60]!r} is no pair with a value; "
                "give two names and a number a line"
            )
        try:
            value = float(found[3])
        except ValueError:
            raise EvidenceError(
                f"{name} line {number}, column {found.start(3) + 1}: {found[3]!r} is no number"
            ) from None
        entries.append(PairLine((found[1], found[2]), value, number, line.strip()))
    return PairList(name, tuple(entries))
