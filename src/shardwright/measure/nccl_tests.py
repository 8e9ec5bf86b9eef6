"""Tables of nccl-tests and rccl-tests, column by column; what cannot be placed is refused, never shifted.

Every header of theirs: with and without redop and root, #wrong or error, in-place or not, and quoted rows
without any. Lines may have colours, CRLF, and a launcher's prefix (srun --label, mpirun --tag-output, pdsh).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.errors import EvidenceError
from shardwright.measure.nccl_table import WIDTHS, Measured, Printed, Row, Table
from shardwright.measure.table_context import Around, Gatherer, program_of
from shardwright.units import GB

_COLUMNS: Mapping[str, str] = {
    **{name: name for name in ("size", "count", "type", "redop", "root", "time", "algbw", "busbw")},
    "bytes": "size",
    "n": "count",
    "datatype": "type",
    "op": "redop",
    **dict.fromkeys(("#wrong", "wrong", "error", "errors", "res"), "wrong"),
}
_MEASURED = ("time", "algbw", "busbw", "wrong")
_UNITS: Mapping[str, Mapping[str, float]] = {
    "size": {"B": 1, "bytes": 1},
    "count": {"elements": 1},
    "time": {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0},
    "algbw": {"GB/s": GB, "MB/s": 1e6},
    "busbw": {"GB/s": GB, "MB/s": 1e6},
}
_USUAL = {"time": 1e-6, "algbw": GB, "busbw": GB}
_WITHOUT_HEADER = {8: 2, 4: 1}
"""Measured columns of a row without header, and the groups of four that they are."""

_ANSI = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
_PREFIX = re.compile(
    r"(?:\[\d+,\d+\]<std(?:out|err)>:?|\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)?\s|\s*[\w.-]+:(?=\s))+"
)
_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")
_COUNT = re.compile(r"\d+")
_ABSENT = ("N/A", "n/a", "NA", "-")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*([\d.]+)")
_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d+)")
_CONCLUDED = "Collective test concluded"
_FOOTERS = ("Errors with asterisks", "Out of bounds", "Avg bus", "Avg bandwidth", _CONCLUDED)


class _Header(NamedTuple):
    columns: tuple[str, ...]  # before the measured ones
    group: tuple[str, ...]  # measured, once
    groups: int
    scales: Mapping[str, float]

    @property
    def width(self) -> int:
        return len(self.columns) + self.groups * len(self.group)


@dataclass
class _Open:
    """A table that is being read."""

    rows: list[Row] = field(default_factory=list)
    around: Around = field(default_factory=Around)
    header: _Header | None = None
    width: int = 0
    average: float | None = None
    out_of_bounds: int = 0
    concluded: str = ""
    ended: bool = False


class _Token(NamedTuple):
    text: str
    column: int  # from 1


class _Place(NamedTuple):
    name: str
    line: int

    def refuse(self, column: int, why: str) -> EvidenceError:
        return EvidenceError(
            f"{self.name} line {self.line}, column {column}: {why}; give the table as the tool printed it"
        )


def is_nccl_table(head: str) -> bool:
    """Whether a text has a header or a row of such a table."""
    return any(_header_names(line) or _is_row(tokens_of(line)) for line in head.splitlines())


def read_tables(text: str, name: str) -> list[Table]:
    """All tables of a text, in order.

    Raises: EvidenceError: a row that fits no header, a number that is none; with line and column.
    """
    reader = _Reader(name)
    for number, line in enumerate(text.splitlines(), start=1):
        reader.feed(_Place(name, number), line)
    reader.close()
    return reader.tables


class _Reader:
    """Lines in, tables out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tables: list[Table] = []
        self.header: _Header | None = None
        self.now = _Open()
        self.pending = Gatherer()

    def feed(self, place: _Place, line: str) -> None:
        tokens = tokens_of(line)
        if not tokens:
            return
        text = _ANSI.sub("", line).strip()
        if (names := _header_names(line)) is not None:
            self.close()
            self.header = _header(place, names)
        elif self.header is not None and (units := _units(tokens)):
            self.header = _scaled(place, self.header, units)
        elif _is_row(tokens):
            self._row(place, text, tokens)
        elif any(footer in text for footer in _FOOTERS):
            self._footer(text)
        elif self.header is not None and self._in_table and _COUNT.fullmatch(tokens[0].text):
            raise place.refuse(tokens[0].column, f"{text[:60]!r} begins as a row and is none")
        else:
            self._between(text)

    @property
    def _in_table(self) -> bool:
        return bool(self.now.rows) and not self.now.ended

    def _row(self, place: _Place, text: str, tokens: Sequence[_Token]) -> None:
        if self.now.ended:
            self.close()
        if not self.now.rows:
            before = self.tables[-1].around if self.tables else Around()
            self.now.around = self.pending.result(before)
            self.pending = Gatherer()
        row = _read_row(place, text, tokens, self.header or _assumed_header(place, tokens))
        if self.now.rows and len(tokens) != self.now.width:
            raise place.refuse(
                tokens[min(len(tokens), self.now.width) - 1].column,
                f"the row has {len(tokens)} columns, those before it {self.now.width}",
            )
        self.now.width = len(tokens)
        self.now.rows.append(row)

    def _footer(self, text: str) -> None:
        if (average := _AVERAGE.search(text)) is not None:
            self.now.average, self.now.ended = float(average[1]) * GB, True
        if (bounds := _BOUNDS.search(text)) is not None:
            self.now.out_of_bounds = int(bounds[1])
        if _CONCLUDED in text:
            self.now.concluded, self.now.ended = program_of(text), True

    def _between(self, text: str) -> None:
        """A comment, a command, a rank, or something else. Of quoted rows without header each comment
        begins a new table."""
        bare = text.lstrip("# ").strip()
        speaks = bool(bare) and (program_of(text) or (self.header is None and "#" in text[:8]))
        if self.now.rows and (speaks or re.match(r"Rank\s+\d+|nThread|Using devices", bare)):
            self.close()
        self.pending.feed(text)

    def close(self) -> None:
        """End the table that is open."""
        now, self.now = self.now, _Open()
        if not now.rows:
            return
        around = now.around
        collective = now.concluded or around.collective or program_of(self.name)
        known = Around(
            collective,
            around.ranks,
            around.listed,
            around.nodes,
            around.hosts,
            around.device,
            dict(around.settings),
            around.nics,
        )
        self.tables.append(Table(self.name, tuple(now.rows), known, now.average, now.out_of_bounds))
        self.header = None


def tokens_of(line: str) -> list[_Token]:
    """Words of a line without colours and a launcher's prefix, with their columns."""
    text = _ANSI.sub("", line)
    prefix = _PREFIX.match(text)
    start = prefix.end() if prefix else 0
    return [_Token(found[0], found.start() + 1) for found in re.compile(r"\S+").finditer(text, start)]


def _is_row(tokens: Sequence[_Token]) -> bool:
    return (
        len(tokens) >= 4
        and _COUNT.fullmatch(tokens[0].text) is not None
        and _COUNT.fullmatch(tokens[1].text) is not None
        and tokens[2].text in WIDTHS
    )


def _header_names(line: str) -> list[_Token] | None:
    tokens = [t for t in tokens_of(line) if t.text != "#"]
    if tokens and tokens[0].text in ("#size", "#bytes"):
        tokens[0] = _Token(tokens[0].text[1:], tokens[0].column + 1)
    names = [token.text.lower() for token in tokens]
    return tokens if {"time", "algbw", "busbw"} <= set(names) and {"size", "bytes"} & set(names) else None


def _header(place: _Place, tokens: Sequence[_Token]) -> _Header:
    for token in tokens:
        if token.text.lower() not in _COLUMNS:
            raise place.refuse(token.column, f"column {token.text!r} is unknown")
    names = [_COLUMNS[token.text.lower()] for token in tokens]
    first = min(names.index(name) for name in _MEASURED if name in names)
    columns, measured = tuple(names[:first]), names[first:]
    groups = measured.count("time")
    group = tuple(measured[: len(measured) // groups])
    whole = groups in (1, 2) and list(group) * groups == measured and len(set(group)) == len(group)
    if not (whole and len(set(columns)) == len(columns) and {"size", "count", "type"} <= set(columns)):
        raise place.refuse(tokens[first].column, f"columns {names} are those of no version of nccl-tests")
    return _Header(columns, group, groups, dict(_USUAL))


def _units(tokens: Sequence[_Token]) -> list[_Token]:
    bare = [token for token in tokens if token.text != "#"]
    return bare if all(re.fullmatch(r"\(.+\)", token.text) for token in bare) else []


def _scaled(place: _Place, header: _Header, units: Sequence[_Token]) -> _Header:
    """``header`` with the units of the line below it."""
    names = [name for name in (*header.columns, *header.group * header.groups) if name in _UNITS]
    if len(names) != len(units):
        raise place.refuse(units[0].column, f"{len(units)} units for {len(names)} columns that have one")
    scales = dict(header.scales)
    for name, token in zip(names, units, strict=True):
        scale = _UNITS[name].get(token.text.strip("()"))
        if scale is None:
            raise place.refuse(token.column, f"unit {token.text} of {name} is unknown")
        scales[name] = scale
    return header._replace(scales=scales)


def _assumed_header(place: _Place, tokens: Sequence[_Token]) -> _Header:
    """Of a quoted row: what its number of columns can only be."""
    columns = ["size", "count", "type"]
    rest = list(tokens[3:])
    if not _NUMBER.fullmatch(rest[0].text.lstrip("-")) and rest[0].text not in _ABSENT:
        columns.append("redop")
        rest = rest[1:]
    if len(rest) - 1 in _WITHOUT_HEADER and re.fullmatch(r"-?\d+", rest[0].text):
        columns.append("root")
        rest = rest[1:]
    if len(rest) not in _WITHOUT_HEADER:
        raise place.refuse(
            tokens[-1].column,
            f"a row of {len(tokens)} columns without a header is of no known version of nccl-tests",
        )
    return _Header(tuple(columns), _MEASURED, _WITHOUT_HEADER[len(rest)], dict(_USUAL))


def _read_row(place: _Place, text: str, tokens: Sequence[_Token], header: _Header) -> Row:
    lacking = header.width - len(tokens)
    if lacking and not (header.groups == 2 and lacking == len(header.group)):
        at = tokens[min(len(tokens), header.width) - 1]
        raise place.refuse(at.column, f"the row has {len(tokens)} columns, its header {header.width}")
    named = dict(zip(header.columns, tokens, strict=False))
    redop = named["redop"].text if "redop" in named else ""
    if redop and re.match(r"[-\d.]", redop):
        raise place.refuse(named["redop"].column, f"redop is {redop!r}, which is a number")
    root = named.get("root")
    if root is not None and not re.fullmatch(r"-?\d+", root.text):
        raise place.refuse(root.column, f"root is {root.text!r}, which is no rank")
    first, width = len(header.columns), len(header.group)
    halves = [_half(place, tokens[at : at + width], header) for at in range(first, len(tokens), width)]
    if named["type"].text not in WIDTHS:
        raise place.refuse(named["type"].column, f"type {named['type'].text!r} is unknown")
    return Row(
        place.line,
        text,
        _whole(place, named["size"]),
        _whole(place, named["count"]),
        named["type"].text,
        redop,
        None if root is None else int(root.text),
        halves[0],
        halves[1] if len(halves) > 1 else None,
    )


def _whole(place: _Place, token: _Token) -> int:
    if not _COUNT.fullmatch(token.text):
        raise place.refuse(token.column, f"{token.text!r} is no count")
    return int(token.text)


def _half(place: _Place, tokens: Sequence[_Token], header: _Header) -> Measured | None:
    """Out-of-place or in-place columns; None if they are not measured."""
    named = dict(zip(header.group, tokens, strict=True))
    absent = [named[name].text in _ABSENT for name in ("time", "algbw", "busbw")]
    if all(absent):
        return None
    values = {name: _printed(place, named[name], header.scales[name]) for name in _USUAL}
    if values["time"].high <= 0:
        raise place.refuse(named["time"].column, "a time of 0 is none")
    wrong = _wrong(place, named["wrong"]) if "wrong" in named else None
    return Measured(values["time"], values["algbw"], values["busbw"], wrong)


def _printed(place: _Place, token: _Token, scale: float) -> Printed:
    if not _NUMBER.fullmatch(token.text):
        raise place.refuse(token.column, f"{token.text!r} is no number")
    digits, _, exponent = token.text.lower().partition("e")
    last = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return Printed(float(token.text) * scale, last / 2 * scale)


def _wrong(place: _Place, token: _Token) -> int | None:
    """Wrong elements: a count, or of old versions the largest error, with * where it is too large."""
    if token.text in _ABSENT:
        return None
    if _COUNT.fullmatch(token.text.rstrip("*")):
        return int(token.text.rstrip("*"))
    if not _NUMBER.fullmatch(token.text.rstrip("*")):
        raise place.refuse(token.column, f"{token.text!r} is no count of wrong elements, error or N/A")
    return int(token.text.endswith("*"))
