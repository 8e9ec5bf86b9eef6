"""Lines of `nvidia-smi topo` as names and cells, each with its place; a cell that cannot stand is a fault."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

LINKS = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC")
"""Classes of `topo -m`; SOC is what old drivers print for SYS."""

STATUS = frozenset(("X", "OK", "CNS", "GNS", "TNS", "NS", "DR", "U"))
"""What `topo -p2p` prints."""

TAIL = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")

_COLOUR = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\[\d{1,2}(?:;\d+)*m")
_LABEL = re.compile(
    r"(?: {0,4}(\d{1,5}): |([A-Za-z][\w.-]*): |\[([^\]\s]+)\](?:<\w+>:?)? ?"
    r"|(?:> ?)+|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S* )(?=.)"
)
_WORD = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID|\S+")
_NAME = re.compile(r"GPU\d+|[A-Za-z][\w.:-]*\d[\w.:-]*")
_SET = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*,?(\.\.\.)?|N/A")
_LEGEND_LINE = re.compile(r"NIC\d+: \S+\s*$")


class Text(NamedTuple):
    """A line without colours and label; ``offset`` characters of the file's line stand before ``text``."""

    number: int
    text: str
    label: str
    offset: int


class Cell(NamedTuple):
    """A word of the matrix and where it stands, line and column from 1."""

    text: str
    line: int
    column: int


class Header(NamedTuple):
    """Names of the columns of links, and the columns behind them, each with where it starts in its line."""

    line: int
    text: str
    names: tuple[str, ...]
    tail: tuple[tuple[str, int], ...]


class Row(NamedTuple):
    """One device's cells in the order of the header, and what stands behind them."""

    name: str
    line: int
    column: int
    text: str
    cells: tuple[Cell, ...]
    tail: Mapping[str, str]

    def by_name(self, header: Header) -> dict[str, Cell]:
        """Cells by the name of their column."""
        return dict(zip(header.names, self.cells, strict=True))


class CellFault(Exception):  # noqa: N818  (becomes an EvidenceError, with the file's name)
    """A cell that cannot stand where it does."""

    def __init__(self, line: int, column: int, words: str) -> None:
        super().__init__(words)
        self.line = line
        self.column = column


def lines_of(text: str) -> list[Text]:
    """Lines of a file without colours, and without what stands before each: the label of a launcher (`srun
    --label`, pdsh, mpirun), the time, the mark of a quotation."""
    found = []
    for number, raw in enumerate(text.lstrip("\ufeff").split("\n"), start=1):
        plain = _COLOUR.sub("", raw.rstrip("\r"))
        match = None if _LEGEND_LINE.match(plain) else _LABEL.match(plain)
        cut = match.end() if match else 0
        label = next((group for group in match.groups() if group), "") if match else ""
        found.append(Text(number, plain[cut:], label, cut))
    return found


def is_row(text: str, header: Header | None = None) -> bool:
    """Whether a line begins as a row: a name and a cell; with ``header``, the name of any of its columns."""
    words = text.split(maxsplit=2)
    if len(words) < 2:
        return False
    known = () if header is None else header.names
    cell = LINKS.fullmatch(words[1]) is not None or (header is not None and words[1] in STATUS)
    return cell and (re.fullmatch(r"GPU\d+|NIC\d+", words[0]) is not None or words[0] in known)


def header_of(pieces: Sequence[Text]) -> Header | None:
    """The header that lines make, the first way of joining them that gives one; None: it is none."""
    for text in _joined([piece.text for piece in pieces]):
        words = [(re.sub(r"\s+", " ", m[0]), m.start()) for m in _WORD.finditer(text)]
        names = [word for word, _ in words if word not in TAIL]
        tail = words[len(names) :]
        if (
            [word for word, _ in tail] == [word for word in TAIL if word in dict(tail)]
            and any(re.fullmatch(r"GPU\d+", name) for name in names)
            and all(_NAME.fullmatch(name) and not LINKS.fullmatch(name) for name in names)
        ):
            twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
            if twice is not None and (tail or len(pieces) == 1):
                place = words[len(names) - 1 - names[::-1].index(twice)][1]
                raise CellFault(
                    pieces[0].number, pieces[0].offset + place + 1, f"column {twice} stands twice"
                )
            if twice is None:
                return Header(pieces[0].number, pieces[0].text, tuple(names), tuple(tail))
    return None


def row_of(pieces: Sequence[Text], header: Header) -> Row:
    """The row that lines make.

    Raises: CellFault: it has too many or too few cells, one that is no class of links, or it can be read in
    two ways.
    """
    texts = [piece.text for piece in pieces]
    found: list[Row] = []
    fault: CellFault | None = None
    for text in _joined(texts):
        try:
            row = _read(text, pieces, header)
        except CellFault as one:
            fault = fault or one
            continue
        if all(_values(row) != _values(other) for other in found):
            found.append(row)
    if len(found) == 1:
        return found[0]
    if found or fault is None:
        first = pieces[0]
        raise CellFault(first.number, 1, "a broken line can be read in two ways: print it unbroken")
    raise fault


def _values(row: Row) -> tuple[list[str], Mapping[str, str]]:
    return [cell.text for cell in row.cells], row.tail


def _joined(texts: Sequence[str]) -> Iterator[str]:
    """A line that a terminal broke, made whole: at each break a cell ended, or went on."""
    for glue in product(("", " "), repeat=len(texts) - 1):
        yield texts[0] + "".join(between + text for between, text in zip(glue, texts[1:], strict=True))


def _read(text: str, pieces: Sequence[Text], header: Header) -> Row:
    """One whole line; places are those in its first piece, or past it in the piece where they fall."""
    words, tabbed = _split(text)
    name, start = words[0]

    def place(at: int) -> tuple[int, int]:
        for piece in pieces[:-1]:
            if at < len(piece.text):
                return piece.number, piece.offset + at + 1
            at -= len(piece.text)
        return pieces[-1].number, pieces[-1].offset + max(at, 0) + 1

    count = len(header.names)
    cells = []
    for column, (word, at) in zip(header.names, words[1:], strict=False):
        if LINKS.fullmatch(word) is None and word not in STATUS:
            blank = "is blank" if not word else f"is {word!r}"
            raise CellFault(
                *place(at),
                f"row {name} in column {column} {blank}, no class of links (X, NV#, PIX, PXB, PHB, NODE, "
                "SYS): cells are missing or moved",
            )
        cells.append(Cell("SYS" if word == "SOC" else word, *place(at)))
    if len(cells) < count:
        raise CellFault(
            *place(len(text.rstrip())),
            f"row {name} has {len(cells)} cells of links, the header (line {header.line}) names {count} "
            "columns",
        )
    rest = words[1 + count :]
    for word, at in rest:
        if LINKS.fullmatch(word) or (word and not _SET.fullmatch(word)):
            raise CellFault(
                *place(at),
                f"row {name} has {word!r} behind its {count} cells of links: the header (line {header.line}) "
                f"names {count} columns",
            )
    tail = _tabbed_tail(rest, header) if tabbed else _aligned_tail(rest, header)
    if tail is None:
        behind = ", ".join(column for column, _ in header.tail) or "none"
        values = [word for word, _ in rest if word]
        raise CellFault(
            *place(rest[0][1]),
            f"row {name} has {values} behind its links, the header has the columns {behind}: which is which "
            "cannot be told",
        )
    return Row(name, *place(start), text, tuple(cells), tail)


def _split(text: str) -> tuple[list[tuple[str, int]], bool]:
    """Words of a row with their places: by tabs where there are any, or by spaces."""
    start = len(text) - len(text.lstrip())
    if "\t" not in text.strip():
        return [(match[0], match.start()) for match in re.finditer(r"\S+", text)], "\t" in text
    words, at = [], start
    for part in text[start:].split("\t"):
        words.append((part.strip(), at + len(part) - len(part.lstrip())))
        at += len(part) + 1
    return words, True


def _tabbed_tail(rest: Sequence[tuple[str, int]], header: Header) -> dict[str, str] | None:
    """Values behind the links by position; the driver prints one tab too many before GPU NUMA ID."""
    values = [word for word, _ in rest]
    names = [name for name, _ in header.tail]
    if names == list(TAIL) and len(values) >= 4 and not values[2]:
        del values[2]
    while len(values) > len(names) and not values[-1]:
        del values[-1]
    if len(values) > len(names):
        return None
    return dict(zip(names, values, strict=False))


def _aligned_tail(rest: Sequence[tuple[str, int]], header: Header) -> dict[str, str] | None:
    """Values behind the links: all of them, none, or the last ones, standing under their columns' names."""
    names = [name for name, _ in header.tail]
    if not rest:
        return dict.fromkeys(names, "")
    if len(rest) > len(names):
        return None
    last = header.tail[len(names) - len(rest) :]
    if len(rest) < len(names) and any(at != start for (_, at), (_, start) in zip(rest, last, strict=True)):
        return None
    return dict.fromkeys(names, "") | {name: word for (name, _), (word, _) in zip(last, rest, strict=True)}
