"""Documents of a corpus, one after the other: text files, lines of JSON, columns of Parquet.

A file is one document, but for these: each line of ``.jsonl`` (or ``.ndjson``) is a record with a text, each
row of ``.parquet`` likewise. Text and JSON may be compressed, with ``.gz`` at the end of the name. Memory is
that of one document, and of one row group of Parquet.
"""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from shardwright.errors import DataError, MissingExtraError
from shardwright.run.token_file import is_token_file

LINES = (".jsonl", ".ndjson")
"""Ends of names of files that hold a JSON record a line."""

COMPRESSED = (".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z")
"""Ends of names of files that would otherwise be read as text, and are none."""

ROWS = 1024
"""Rows of Parquet that are read at once."""


class Document(NamedTuple):
    """A text, where it came from, and the bytes of the input read for it since the last one."""

    text: bytes
    source: str
    read: int


class Wanted(NamedTuple):
    """Of records, the field that holds the text; whether texts must be UTF-8, and how long they may be."""

    field: str = "text"
    utf8: bool = False
    largest: int | None = None  # B


OnBad = Callable[[str], None]
"""Told what is wrong with a document that is left out; raises if none may be."""


def input_files(inputs: Sequence[Path], output: Path) -> list[Path]:
    """Files to read, those of a folder in order of path, without hidden ones and without ``output``.

    Raises: DataError: an input is absent or of a kind that is not text, or nothing is left.
    """
    files: list[Path] = []
    for path in inputs:
        if not path.exists():
            raise DataError(f"input {path} does not exist: give files or folders of text")
        files += files_under(path) if path.is_dir() else [path]
    files = [file for file in files if file.resolve() != output.resolve()]
    for file in files:
        if not file.is_file():
            raise DataError(f"input {file} is no regular file: write its text to one")
        packed = [suffix for suffix in file.suffixes[-2:] if suffix.lower() in COMPRESSED]
        if packed:
            raise DataError(
                f"cannot read {file}: {packed[0]} is not text: unpack it first, or leave it out (.gz is read)"
            )
        if is_token_file(file):
            raise DataError(f"input {file} is a token file already: train with it, or leave it out")
    if not files:
        raise DataError(f"input {', '.join(map(str, inputs))} holds no files: give files or folders of text")
    return files


def files_under(root: Path, left_out: frozenset[str] = frozenset()) -> list[Path]:
    """Regular files under ``root`` by relative path, without hidden ones and folders of ``left_out``."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda p: p.relative_to(root).as_posix())


def documents(path: Path, wanted: Wanted, bad: OnBad) -> Iterator[Document]:
    """The documents of one file; ``bad`` is told of each that cannot be used.

    Raises: DataError: the file cannot be read, or ``bad`` raises it. MissingExtraError: pyarrow is absent.
    """
    kinds = [suffix.lower() for suffix in path.suffixes[-2:]]
    zipped = kinds[-1:] == [".gz"]
    kind = (kinds[:-1] if zipped else kinds)[-1:]
    if kind == [".parquet"]:
        found = _rows(path, wanted, bad)
    else:
        found = _of_stream(path, zipped, _lines if kind and kind[0] in LINES else _whole, wanted, bad)
    for document in found:
        fault = _text_fault(document, wanted)
        if fault:
            bad(fault)
        else:
            yield document


def _text_fault(document: Document, wanted: Wanted) -> str | None:
    """What is wrong with a text, if anything."""
    if wanted.largest is not None and len(document.text) > wanted.largest:
        return (
            f"{document.source} has more than the {wanted.largest >> 20} MiB that a document may have with a "
            "tokenizer: split it, or give its parts a line each as .jsonl"
        )
    if wanted.utf8:
        try:
            document.text.decode()
        except UnicodeDecodeError as fault:
            return f"{document.source} is not UTF-8 at byte {fault.start}"
    return None


Reader = Callable[[Path, IO[bytes], IO[bytes], Wanted, OnBad], Iterator[Document]]


def _of_stream(path: Path, zipped: bool, read: Reader, wanted: Wanted, bad: OnBad) -> Iterator[Document]:
    """What ``read`` finds in a file that may be compressed; it is given the file's own stream too."""
    try:
        with path.open("rb") as raw:
            if zipped:
                with gzip.GzipFile(fileobj=raw) as unzipped:
                    yield from read(path, unzipped, raw, wanted, bad)
            else:
                yield from read(path, raw, raw, wanted, bad)
    except (OSError, EOFError, zlib.error) as fault:
        why = getattr(fault, "strerror", None) or fault
        raise DataError(f"cannot read {path}: {why}: mend it, or leave it out") from None


def _whole(path: Path, stream: IO[bytes], raw: IO[bytes], wanted: Wanted, bad: OnBad) -> Iterator[Document]:
    text = stream.read(-1 if wanted.largest is None else wanted.largest + 1)
    yield Document(text, str(path), raw.tell())


def _lines(path: Path, stream: IO[bytes], raw: IO[bytes], wanted: Wanted, bad: OnBad) -> Iterator[Document]:
    """A document a line; lines of white space are left out."""
    before = 0
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            record = json.loads(line)
            fault = _record_fault(record, wanted.field)
            text = b"" if fault else record[wanted.field].encode()
        except json.JSONDecodeError as error:
            fault = f"is not JSON: {error.msg} at column {error.colno}"
        except UnicodeError as error:  # bytes that are not UTF-8, or half of a surrogate pair
            fault = f"is not UTF-8: {error.reason if hasattr(error, 'reason') else error}"
        except RecursionError:
            fault = "is nested too deep"
        if fault:
            bad(f"{source} {fault}")
            continue
        after = raw.tell()
        yield Document(text, source, after - before)
        before = after


def _record_fault(record: Any, field: str) -> str | None:
    if not isinstance(record, dict):
        return (
            f"is a JSON {type(record).__name__} and no record: give lines like {{{json.dumps(field)}: ...}}"
        )
    if field not in record:
        names = ", ".join(list(record)[:8]) or "none"
        return f"has no field {field!r} (it has {names}): name the one that holds the text with --text-field"
    if not isinstance(record[field], str):
        kind = type(record[field]).__name__
        return f"has a {kind} in field {field!r}: name one that holds text with --text-field"
    return None


def _rows(path: Path, wanted: Wanted, bad: OnBad) -> Iterator[Document]:
    """A document a row of the column."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("data", f"reading {path}") from None
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow, wanted.field)
            row, share = 0, path.stat().st_size / max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=ROWS, columns=[wanted.field], use_threads=False):
                for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    row += 1
                    source = f"{path}, row {row}"
                    if text is None:
                        bad(f"{source} has no text in column {wanted.field!r}")
                    else:
                        yield Document(text, source, int(share * row) - int(share * (row - 1)))
    except (OSError, pyarrow.ArrowException) as fault:
        why = str(fault).partition("\n")[0]
        raise DataError(f"cannot read {path}: {why}: mend it, or leave it out") from None


def _check_column(path: Path, schema: Any, field: str) -> None:
    """Raises: DataError: a column is absent, or does not hold text."""
    from pyarrow import types

    way = "name the column that holds the text with --text-field"
    if field not in schema.names:
        raise DataError(f"{path} has no column {field!r} (it has {', '.join(schema.names)}): {way}")
    kind = schema.field(field).type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(f"{path} has {kind} in column {field!r}, which is no text: {way}")
