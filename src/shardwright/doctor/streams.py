"""Streams over streams: packed content that is bounded, and bytes that were read already."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from shardwright.errors import EvidenceError

BUFFER = 1 << 20

MOST_UNPACKED = 4 << 30
"""Bytes that one packed file may come to."""

MOST_RATIO = 300
"""How many times its size a packed file may come to, beyond the first 64 MiB. Logs pack ten- to fiftyfold."""

ALWAYS_ALLOWED = 64 << 20

MOST_LAYERS = 16
"""Packed files inside one another that are unpacked."""


class Stream(io.RawIOBase):
    """What BufferedReader needs of one: subclasses give the next bytes."""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        """Fill ``target`` from the start; how many bytes."""
        data = self.next(len(target))
        target[: len(data)] = data
        return len(data)

    def next(self, size: int) -> bytes:
        """Up to ``size`` bytes; none at the end."""
        raise NotImplementedError


class Allowance:
    """How many bytes one file may unpack to, all that is packed inside it together."""

    def __init__(self, packed: int) -> None:
        """``packed``: bytes of the file."""
        self.packed, self.read, self.layers = packed, 0, 0
        self.most = min(max(packed * MOST_RATIO, ALWAYS_ALLOWED), MOST_UNPACKED)

    def take(self, size: int, name: str) -> None:
        """Count ``size`` bytes of ``name``.

        Raises: EvidenceError: the file is a bomb.
        """
        self.read += size
        if self.read > self.most:
            raise EvidenceError(
                f"{name} unpacks to more than {self.most >> 20} MiB from {self.packed:,} bytes: "
                "it is not read further; unpack it yourself if you trust it"
            )

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """While what ``name`` holds is read.

        Raises: EvidenceError: too many files are packed in one another.
        """
        if self.layers == MOST_LAYERS:
            raise EvidenceError(
                f"{name} lies in {MOST_LAYERS} packed files, one inside the other: it is not read further; "
                "unpack it yourself if you trust it"
            )
        self.layers += 1
        try:
            yield
        finally:
            self.layers -= 1


class BoundedStream(Stream):
    """A packed file's content that ends with an error when it grows beyond all measure."""

    def __init__(self, stream: BinaryIO, allowance: Allowance, name: str) -> None:
        self._stream, self._allowance, self._name = stream, allowance, name

    def next(self, size: int) -> bytes:
        """Up to ``size`` bytes.

        Raises: EvidenceError: it is a bomb.
        """
        data = self._stream.read(size)
        self._allowance.take(len(data), self._name)
        return data


class AgainStream(Stream):
    """Bytes that were read already, then the rest."""

    def __init__(self, data: bytes, rest: BinaryIO) -> None:
        self._data, self._rest = io.BytesIO(data), rest

    def next(self, size: int) -> bytes:
        """Up to ``size`` bytes."""
        return self._data.read(size) or self._rest.read(size) or b""


def buffered(stream: BinaryIO | io.RawIOBase) -> io.BufferedReader:
    """The stream with a buffer that can be peeked into; closing it leaves the stream open."""
    if isinstance(stream, io.BufferedReader):
        return stream
    raw = stream if isinstance(stream, Stream) else AgainStream(b"", cast(BinaryIO, stream))
    return io.BufferedReader(raw, BUFFER)
