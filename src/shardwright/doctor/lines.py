"""Text of any size as the few lines that matter, with what stands around them; and what is wrong with a file.

A file is read in chunks, so that memory does not grow with it. Colours are taken out, UTF-16 is recoded,
bytes that are no text are replaced. Numbers of lines are those of the file.
"""

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple, TypeVar

from shardwright.doctor.finding import Source
from shardwright.doctor.prefilter import Prefilter

T = TypeVar("T")

CHUNK = 1 << 20
CONTEXT = 16 << 10
"""Bytes kept before and behind a line, for stack traces and reports of many lines."""

LONGEST_LINE = 8 << 10
"""Of a longer line the part around what was found is read: a progress bar's line grows for hours."""

MOST_LINES_AROUND = 80

_ANSI = re.compile(rb"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")

_RANK = re.compile(
    r"\[rank:?\s*(\d+)\]|\[Rank (\d+)\]|(?:^|\s)rank ?[=:]? ?(\d+)[:\]]|\[1,(\d+)\]<std|^\s{0,5}(\d{1,5}): ",
    re.IGNORECASE,
)
"""How launchers and torch say whose line it is: torch, mpirun, srun --label. torchrun's own ``[default3]:``
is a rank of its node only."""

_RANK_IN_NAME = re.compile(
    r"(?:^|[^a-z])(?:rank|proc(?:ess)?|stderr|stdout)[-_.]?(\d+)(?=\D|$)"
    r"|(?:^|/)(\d+)/std(?:err|out)\.log$",
    re.IGNORECASE,
)


class Line(NamedTuple):
    """One line: its place, its text without colours, its rank if it says so, and what stands around it."""

    file: str
    number: int
    text: str
    rank: int | None
    around: Callable[[int, int], list[str]]

    @property
    def source(self) -> Source:
        """Where it is."""
        return Source(self.file, self.number, self.text)

    def following(self, count: int) -> list[str]:
        """Up to ``count`` lines behind it."""
        return self.around(1, count)

    def before(self, count: int) -> list[str]:
        """Up to ``count`` lines before it, in order."""
        return self.around(-count, -1)

    def joined(self, count: int = 6, width: str = "") -> str:
        """It with the next lines, as if a terminal had not wrapped it."""
        return width.join([self.text.rstrip(), *(text.strip() for text in self.following(count))])


Reader = Callable[[Line], Iterator[T]]


def read_lines(
    stream: BinaryIO, file: str, readers: Mapping[bytes, Reader[T]], rank: int | None = None
) -> Iterator[T]:
    """What ``readers`` make of the lines of ``stream`` that hold their needles, in order.

    ``rank``: whose file it is, for lines that do not say. A reader sees a line once, however often its
    needles stand in it.
    """
    prefilter = Prefilter(list(readers))
    for chunk in _chunks(stream):
        seen: set[tuple[int, object]] = set()
        counted, number = 0, chunk.first_line
        for place, needle in prefilter.places(chunk.data, chunk.end):
            if place < chunk.start:
                continue
            begin = chunk.data.rfind(b"\n", max(place - LONGEST_LINE, 0), place) + 1
            begin = begin or max(place - LONGEST_LINE, 0)
            reader = readers[needle]
            if (begin, reader) in seen:
                continue
            seen.add((begin, reader))
            number += chunk.data.count(b"\n", counted, begin) if begin > counted else 0
            counted = max(begin, counted)
            yield from reader(_line(chunk, begin, place, number, file, rank))


def rank_of_name(file: str) -> int | None:
    """The rank that a file's name says, if it does: ``rank3.log``, ``attempt_0/3/stderr.log``."""
    found = _RANK_IN_NAME.search(file)
    return None if found is None else int(next(group for group in found.groups() if group is not None))


def rank_of_text(text: str) -> int | None:
    """The rank that the start of a line says, if it does."""
    found = _RANK.search(text[:200])
    return None if found is None else int(next(group for group in found.groups() if group is not None))


class _Chunk(NamedTuple):
    data: bytes
    start: int  # where lines that were not yet looked at begin
    end: int  # and end
    first_line: int  # number of the line at 0


def _chunks(stream: BinaryIO) -> Iterator[_Chunk]:
    kept, start, first_line = b"", 0, 1
    for block in _blocks(stream):
        final = not block
        data = kept + block
        edge = max(len(data) - CONTEXT, start)
        end = len(data) if final else data.rfind(b"\n", start, edge) + 1 or edge  # a line may have no end
        yield _Chunk(data, start, end, first_line)
        cut = max(data.rfind(b"\n", 0, max(end - CONTEXT, 0)) + 1, end - 2 * CONTEXT, 0)
        first_line += data.count(b"\n", 0, cut)
        kept, start = data[cut:], end - cut


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Clean bytes; an empty block is the end."""
    block = stream.read(CHUNK)
    decoder = _decoder(block[:4096])
    while block:
        if decoder is not None:
            block = decoder.decode(block).encode()
        if b"\r" in block:
            # a line that a progress bar writes over and over has as many parts; its number stays
            block = block.replace(b"\r\n", b"\n").replace(b"\r", b" ")
        if b"\x1b" in block:
            block = _ANSI.sub(b"", block)
        if block:
            yield block
        block = stream.read(CHUNK)
    yield b""


def _decoder(head: bytes) -> codecs.IncrementalDecoder | None:
    """For UTF-16 and UTF-32, by their marks or by the zeros that ASCII has in them."""
    marks = {
        codecs.BOM_UTF32_LE: "utf-32",
        codecs.BOM_UTF32_BE: "utf-32",
        codecs.BOM_UTF16_LE: "utf-16",
        codecs.BOM_UTF16_BE: "utf-16",
    }
    for mark, name in marks.items():
        if head.startswith(mark):
            return codecs.getincrementaldecoder(name)(errors="replace")
    odd, even = head[1::2], head[0::2]
    if len(head) > 64 and odd.count(0) > 0.9 * len(odd) and even.count(0) < 0.1 * len(even):
        return codecs.getincrementaldecoder("utf-16-le")(errors="replace")
    if len(head) > 64 and even.count(0) > 0.9 * len(even) and odd.count(0) < 0.1 * len(odd):
        return codecs.getincrementaldecoder("utf-16-be")(errors="replace")
    return None


def _line(chunk: _Chunk, begin: int, place: int, number: int, file: str, rank: int | None) -> Line:
    end = chunk.data.find(b"\n", place, place + LONGEST_LINE)
    end = min(place + LONGEST_LINE, len(chunk.data)) if end < 0 else end
    text = _text(chunk.data[begin:end])

    def around(first: int, last: int) -> list[str]:
        if last < 0:
            lines = chunk.data[max(begin - CONTEXT, 0) : max(begin - 1, 0)].split(b"\n")
            return [_text(line) for line in lines[max(first, -MOST_LINES_AROUND) :]]
        lines = chunk.data[end + 1 : end + 1 + CONTEXT].split(b"\n")
        return [_text(line) for line in lines[first - 1 : min(last, MOST_LINES_AROUND)]]

    own = rank_of_text(text)
    return Line(file, number, text, rank if own is None else own, around)


def _text(raw: bytes) -> str:
    return raw[: 2 * LONGEST_LINE].decode("utf-8", errors="replace").replace("\x00", "")


def merged(tables: Sequence[Mapping[bytes, Reader[T]]]) -> dict[bytes, Reader[T]]:
    """Tables of readers as one; needles of several tables are read by all of theirs."""
    found: dict[bytes, list[Reader[T]]] = {}
    for table in tables:
        for needle, reader in table.items():
            found.setdefault(needle, []).append(reader)
    return {needle: readers[0] if len(readers) == 1 else _all(readers) for needle, readers in found.items()}


def _all(readers: Sequence[Reader[T]]) -> Reader[T]:
    def read(line: Line) -> Iterator[T]:
        for reader in readers:
            yield from reader(line)

    return read
