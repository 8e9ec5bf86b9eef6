"""Token files: a tokenized corpus in one file, mapped into memory, and known to be whole once it is open.

Layout, little endian, in this order::

    header   256 B: what ``Header`` names, and the SHA-256 of the bytes before that
    tokens   uint16, or uint32 where the vocabulary is larger, padded to 8 B
    ends     int64 a document: how many tokens there are up to and with its last, the separator
    checks   SHA-256 of each block of 8 MiB of tokens and ends
    mark     the first 8 bytes again, so that damage to either does not turn the file into text

Opening reads everything once: the size must be what the header says, and every block must have its checksum.
A file that is cut off or has a flipped bit is thus one error at the start, and not a fault, or worse a wrong
loss, after a week. It costs what reading costs: SHA-256 runs at 1.6 GB/s on one core with SHA instructions
(seen, 2.8 GB/s on two), blocks are checked on all cores, and the processes of a node share them out; what
was read stays in the page cache for training. CRC-32 is twice as fast and does not identify a corpus. A stamp
that remembers a file as whole would be faster, and wrong once the file is copied over or its disk decays.
What happens to the file after it was opened is not noticed.
"""

import contextlib
import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import usable_cores
from shardwright.errors import DataError

MARK = b"\x93SHWTOK\n"
"""First and last bytes of a token file."""

VERSION = 1
"""Of the layout above; another one is refused."""

BLOCK = 8 << 20
"""Bytes under one checksum: small beside a file and large beside a checksum."""

FIELDS = struct.Struct("<8sIIQQQQQ32s32s104x")
HEADER_BYTES = FIELDS.size + 32
CHECK_BYTES = 32
ANEW = "make it anew with 'shardwright tokenize'"


class Header(NamedTuple):
    """What a token file says of itself."""

    mark: bytes
    version: int
    token_bytes: int  # of one token: 2 or 4
    tokens: int
    documents: int
    vocab: int  # every token id is less
    separator: int  # id of the token that ends a document
    block: int  # bytes under one checksum
    tokenizer: bytes  # SHA-256 of the tokenizer's file
    content: bytes  # SHA-256 of the checks, hence of tokens and ends

    @property
    def ends_at(self) -> int:
        """Offset of the ends of documents [B]."""
        return HEADER_BYTES + _padded(self.tokens * self.token_bytes)

    @property
    def checks_at(self) -> int:
        """Offset of the checksums [B]."""
        return self.ends_at + 8 * self.documents

    @property
    def blocks(self) -> int:
        """Number of checksums."""
        return -(-(self.checks_at - HEADER_BYTES) // self.block)

    @property
    def size(self) -> int:
        """Of the whole file [B]."""
        return self.checks_at + CHECK_BYTES * self.blocks + len(MARK)


class TokenFile:
    """An open token file. Pickled as its path, so that ranks map it themselves and share its pages."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path.absolute(), header
        self.tokens = _mapped(path, f"<u{header.token_bytes}", HEADER_BYTES, header.tokens)
        self.ends = _mapped(path, "<i8", header.ends_at, header.documents)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self.path, self.header)

    def digest(self) -> str:
        """Tells the tokens from others, without reading them: the header's checksum of all checksums."""
        return self.header.content.hex()


def is_token_file(path: Path) -> bool:
    """Whether ``path`` is a file that begins or ends as a token file does."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            if file.read(len(MARK)) == MARK:
                return True
            file.seek(max(file.seek(0, os.SEEK_END) - len(MARK), 0))
            return file.read() == MARK
    except OSError:
        return False  # whoever reads it says so


def open_token_file(path: Path, share: tuple[int, int] = (0, 1)) -> TokenFile:
    """Map a token file once it is known to be whole.

    ``share`` (i, n): check every n-th block from the i-th on, where n processes of a node open the same file.

    Raises: DataError: unreadable, of another version, of another size than its header says, or damaged.
    """
    try:
        header = _read_header(path)
        _check_blocks(path, header, share)
        return TokenFile(path, header)
    except OSError as fault:
        raise DataError(
            f"cannot read token file {path}: {fault.strerror}: give another with --data"
        ) from None


@contextlib.contextmanager
def token_file_writer(
    path: Path, *, vocab: int, separator: int, tokenizer: bytes
) -> Iterator["TokenFileWriter"]:
    """Write a token file: whole at the end of the ``with`` block, and not at all if that raises.

    ``tokenizer``: SHA-256 of what made the tokens.

    Raises: DataError: it cannot be written, or there was no token.
    """
    if path.is_dir():
        raise DataError(f"output {path} is a folder: give a file, {path / 'corpus.tokens'} for example")
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file, tempfile.TemporaryFile(dir=path.parent) as ends:
                writer = TokenFileWriter(file, ends, vocab, separator, tokenizer)
                yield writer
                writer.finish()
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as fault:
        raise DataError(f"cannot write {path}: {fault.strerror}: give another path with -o") from None


class TokenFileWriter:
    """Appends documents. Memory is that of one call: the ends of documents wait in a file of their own."""

    def __init__(
        self, file: IO[bytes], ends: IO[bytes], vocab: int, separator: int, tokenizer: bytes
    ) -> None:
        self.file, self.ends = file, ends
        self.vocab, self.separator, self.tokenizer = vocab, separator, tokenizer
        self.dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
        self.tokens = self.documents = 0
        self._checks: list[bytes] = []
        self._block, self._in_block = hashlib.sha256(), 0
        self.file.write(bytes(HEADER_BYTES))

    def add(self, documents: Sequence[NDArray[np.unsignedinteger[Any]]]) -> None:
        """Append documents of token ids, a separator after each; those without a token are left out.

        Raises: DataError: an id that the vocabulary has not.
        """
        documents = [ids for ids in documents if len(ids)]
        if not documents:
            return
        largest = max(self.separator, *(int(ids.max()) for ids in documents))
        if largest >= self.vocab:
            raise DataError(
                f"token id {largest} is not in the vocabulary of {self.vocab}: give the tokenizer it is from"
            )
        ends = np.cumsum([len(ids) + 1 for ids in documents])
        joined = np.empty(int(ends[-1]), self.dtype)
        for ids, end in zip(documents, ends, strict=True):
            joined[end - 1 - len(ids) : end - 1] = ids
        joined[ends - 1] = self.separator
        self._add(joined)
        self.ends.write((self.tokens + ends).astype("<i8"))
        self.tokens, self.documents = self.tokens + len(joined), self.documents + len(documents)

    def finish(self) -> None:
        """Append what follows the tokens and fill in the header.

        Raises: DataError: there is no token.
        """
        if not self.tokens:
            raise DataError("input holds no text: give files with a character in them")
        self._add(bytes(_padded(self.file.tell()) - self.file.tell()))
        self.ends.seek(0)
        while part := self.ends.read(BLOCK):
            self._add(part)
        if self._in_block:
            self._checks.append(self._block.digest())
        self.file.write(b"".join(self._checks) + MARK)
        fields = FIELDS.pack(*self.header())
        self.file.seek(0)
        self.file.write(fields + hashlib.sha256(fields).digest())
        self.file.flush()
        os.fsync(self.file.fileno())

    def header(self) -> Header:
        """Of what is written; whole after ``finish``."""
        return Header(
            mark=MARK,
            version=VERSION,
            token_bytes=self.dtype.itemsize,
            tokens=self.tokens,
            documents=self.documents,
            vocab=self.vocab,
            separator=self.separator,
            block=BLOCK,
            tokenizer=self.tokenizer,
            content=hashlib.sha256(b"".join(self._checks)).digest(),
        )

    def _add(self, data: bytes | NDArray[Any]) -> None:
        """Append to what has checksums."""
        self.file.write(data)
        view = memoryview(data).cast("B")
        while view:
            part = view[: BLOCK - self._in_block]
            self._block.update(part)
            self._in_block += len(part)
            if self._in_block == BLOCK:
                self._checks.append(self._block.digest())
                self._block, self._in_block = hashlib.sha256(), 0
            view = view[len(part) :]


def _read_header(path: Path) -> Header:
    """The header, agreeing with its checksum and with the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(HEADER_BYTES)
    if len(start) < HEADER_BYTES:
        raise DataError(f"token file {path} has {size} B, less than its header: copy it again, or {ANEW}")
    header = Header(*FIELDS.unpack_from(start))
    if header.mark != MARK:
        raise DataError(f"token file {path} is damaged in its first {len(MARK)} B: copy it again, or {ANEW}")
    if header.version != VERSION:
        raise DataError(
            f"token file {path} has version {header.version}, this shardwright reads version {VERSION}: "
            f"{ANEW}, or use the shardwright that wrote it"
        )
    if hashlib.sha256(start[: FIELDS.size]).digest() != start[FIELDS.size :]:
        raise DataError(f"token file {path} is damaged in its header: copy it again, or {ANEW}")
    if size != header.size:
        how = "cut off" if size < header.size else "longer than it was written"
        raise DataError(
            f"token file {path} has {size} B, its header says {header.size}: it is {how}, copy it again, "
            f"or {ANEW}"
        )
    return header


def _check_blocks(path: Path, header: Header, share: tuple[int, int]) -> None:
    """Raises: DataError: a block of the share, or the checksums themselves, are not as they were written."""
    with path.open("rb") as file:
        file.seek(header.checks_at)
        checks, mark = file.read(CHECK_BYTES * header.blocks), file.read()
    if mark != MARK or hashlib.sha256(checks).digest() != header.content:
        raise DataError(f"token file {path} is damaged in its checksums: copy it again, or {ANEW}")

    def is_whole(block: int) -> bool:
        start = HEADER_BYTES + block * header.block
        with path.open("rb") as file:
            file.seek(start)
            found = hashlib.sha256(file.read(min(header.block, header.checks_at - start))).digest()
        return found == checks[CHECK_BYTES * block : CHECK_BYTES * (block + 1)]

    own = range(share[0], header.blocks, share[1])
    with ThreadPoolExecutor(max(1, usable_cores() // share[1])) as pool:
        broken = [block for block, whole in zip(own, pool.map(is_whole, own), strict=True) if not whole]
    if broken:
        start = HEADER_BYTES + broken[0] * header.block
        end = min(start + header.block, header.checks_at)
        raise DataError(
            f"token file {path} is damaged in {len(broken)} of its {header.blocks} blocks, the first from "
            f"byte {start} to {end}: copy it again, or {ANEW}"
        )


def _mapped(path: Path, dtype: str, offset: int, count: int) -> NDArray[Any]:
    """An array that lies in the file, read-only."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


def _padded(size: int) -> int:
    return -(-size // 8) * 8
