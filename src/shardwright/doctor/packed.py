"""Packed files: gzip, xz, bzip2 and zstd streams, zip and tar archives, unpacked as they are read and never
without bound."""

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import BinaryIO, NamedTuple, Protocol, cast

from shardwright.doctor.streams import BUFFER, Allowance, BoundedStream, Stream
from shardwright.errors import EvidenceError

MOST_FILES = 4096
"""Files of one folder or archive that are read."""

MOST_WINDOW = 256 << 20
"""Bytes that unpacking may hold: xz -9 takes 65 MiB, and a file may ask for 4 GiB."""

FAULTS = (zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, EOFError, NotImplementedError)
"""What damaged archives raise beside OSError."""


class Member(NamedTuple):
    """One file of an archive: its name and content, or why it is not read."""

    name: str
    stream: BinaryIO | None
    reason: str = ""


class Unpacker(Protocol):
    """bz2 and lzma have it."""

    @property
    def eof(self) -> bool:
        """Whether its stream has ended."""

    @property
    def needs_input(self) -> bool:
        """Whether it has nothing left to give."""

    @property
    def unused_data(self) -> bytes:
        """What came behind the end."""

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        """At most ``max_length`` bytes of what ``data`` makes."""


class _Unpacked(Stream):
    """Streams behind each other, as ``cat a.xz b.xz`` makes them, unpacked. What is cut off ends there: a log
    of a job that failed may."""

    def __init__(self, stream: BinaryIO, unpacker: Callable[[], Unpacker]) -> None:
        self._stream, self._make = stream, unpacker
        self._own = unpacker()

    def next(self, size: int) -> bytes:
        """Up to ``size`` bytes."""
        while True:
            if self._own.eof:
                rest = self._own.unused_data.lstrip(b"\0") or self._stream.read(BUFFER)
                if not rest.strip(b"\0"):
                    return b""
                self._own = self._make()
            else:
                rest = self._stream.read(BUFFER) if self._own.needs_input else b""
                if not rest and self._own.needs_input:
                    return b""
            if data := self._own.decompress(rest, size):
                return data


def _xz() -> Unpacker:
    return lzma.LZMADecompressor(memlimit=MOST_WINDOW)


def _open_gzip(stream: BinaryIO, name: str) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=stream))


def _open_xz(stream: BinaryIO, name: str) -> BinaryIO:
    return cast(BinaryIO, _Unpacked(stream, _xz))


def _open_bzip2(stream: BinaryIO, name: str) -> BinaryIO:
    return cast(BinaryIO, _Unpacked(stream, bz2.BZ2Decompressor))


def _open_zstd(stream: BinaryIO, name: str) -> BinaryIO:
    """pyarrow unpacks it; its window is bounded at 128 MiB."""
    try:
        import pyarrow
    except ImportError:
        raise EvidenceError(
            f"is packed with zstd, which needs the extra [data]: pip install 'shardwright[data]', or "
            f"zstd -dc {name} | shardwright doctor -"
        ) from None
    return cast(BinaryIO, pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd"))


class Packing(NamedTuple):
    """How a form of packing begins, what its files are called, and what unpacks it."""

    starts: bytes
    suffix: str
    opened: Callable[[BinaryIO, str], BinaryIO]


PACKINGS: Mapping[str, Packing] = {
    "gzip": Packing(b"\x1f\x8b", ".gz", _open_gzip),
    "xz": Packing(b"\xfd7zXZ\x00", ".xz", _open_xz),
    "bzip2": Packing(b"BZh", ".bz2", _open_bzip2),
    "zstd": Packing(b"\x28\xb5\x2f\xfd", ".zst", _open_zstd),
}


def unpacked(kind: str, name: str, stream: BinaryIO, allowance: Allowance) -> tuple[str, BinaryIO]:
    """Name and content of a packed file.

    Raises: EvidenceError: what unpacks it is not installed. Reading raises it too: the file is a bomb.
    """
    packing = PACKINGS[kind]
    inner = BoundedStream(packing.opened(stream, name), allowance, name)
    return name.removesuffix(packing.suffix), cast(BinaryIO, inner)


def zip_members(name: str, stream: BinaryIO, allowance: Allowance) -> Iterator[Member]:
    """Files of a zip archive.

    Raises: EvidenceError: it is one of torch.save, which holds weights.
    """
    with zipfile.ZipFile(stream) as archive:
        members = [info for info in archive.infolist() if not info.is_dir()][:MOST_FILES]
        if any(info.filename.endswith("data.pkl") for info in members):
            raise EvidenceError("is a torch.save archive: weights are no evidence here, it is not loaded")
        for info in members:
            own = f"{name}/{info.filename}"
            if info.flag_bits & 1:
                yield Member(own, None, "is encrypted: unpack it first")
                continue
            with archive.open(info) as member:
                yield Member(own, cast(BinaryIO, BoundedStream(cast(BinaryIO, member), allowance, own)))


def tar_members(name: str, stream: BinaryIO, _: Allowance) -> Iterator[Member]:
    """Files of a tar archive, in one pass; links and sparse files, whose size means nothing, are not read."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        files = (info for info in archive if info.isreg())
        for info in islice(files, MOST_FILES):
            own = f"{name}/{info.name}"
            member = None if info.sparse is not None else archive.extractfile(info)
            if member is None:
                yield Member(own, None, "is a sparse file: unpack it first")
            else:
                yield Member(own, cast(BinaryIO, member))


def is_tar(head: bytes) -> bool:
    """Whether a file begins as a tar archive."""
    return head[257:262] == b"ustar"
