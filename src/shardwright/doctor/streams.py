"""Streams over streams: packed content that is bounded, and bytes that were read already."""

import io
from typing import Any, BinaryIO, cast

from shardwright.errors import EvidenceError

BUFFER = 1 << 20

MOST_UNPACKED = 4 << 30
"""Bytes that one packed file may come to."""

MOST_RATIO = 300
"""How many times its size a packed file may come to, beyond the first 64 MiB. Logs pack ten- to fiftyfold."""

ALWAYS_ALLOWED = 64 << 20


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


class BoundedStream(Stream):
    """A packed file's content that ends with an error when it grows beyond all measure."""

    def __init__(self, stream: BinaryIO, packed: int, name: str) -> None:
        self._stream, self._packed, self._name, self._read = stream, packed, name, 0

    def next(self, size: int) -> bytes:
        """Up to ``size`` bytes.

        Raises: EvidenceError: it is a bomb.
        """
        data = self._stream.read(size)
        self._read += len(data)
        allowed = min(max(self._packed * MOST_RATIO, ALWAYS_ALLOWED), MOST_UNPACKED)
        if self._read > allowed:
            raise EvidenceError(
                f"{self._name} unpacks to more than {allowed >> 20} MiB from {self._packed:,} bytes: "
                "it is not read "
                "further; unpack it yourself if you trust it"
            )
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
