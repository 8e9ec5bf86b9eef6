"""Text into token files: documents are read, encoded in batches, and appended with a separator after each.

Memory is that of a batch and of the largest document. Text that looks like a special token stays text: a
document that quotes the separator's name does not end there.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import DataError, MissingExtraError
from shardwright.run.dataset import SEPARATOR, VOCAB
from shardwright.run.documents import Wanted, documents, input_files
from shardwright.run.token_file import token_file_writer

BYTES = "bytes"
"""Name of the tokenizer that takes each byte for a token."""

END_OF_TEXT = (
    "<|endoftext|>",  # GPT-2, GPT-NeoX, Qwen, OLMo, Phi-3, gpt-oss, GLM-4
    "<|end_of_text|>",  # Llama 3, Granite
    "</s>",  # Llama 2, Mistral, T5
    "<eos>",  # Gemma
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "<EOS_TOKEN>",  # Cohere
    "[EOS]",
)
"""Names of the token that ends a document, most usual first."""

BATCH_BYTES = 4 << 20
"""Text that is encoded at once: some 100 B of memory a byte (seen with tokenizers 0.23)."""

BATCH_DOCUMENTS = 4096
"""Documents that are encoded at once, where they are short."""

LARGEST_DOCUMENT = 32 << 20
"""Bytes of a document for a tokenizer, which takes 3 GB of memory for so much."""

SKIPS_SHOWN = 5
"""Documents left out that are named one by one."""


class Encoder(Protocol):
    """Turns texts into token ids."""

    name: str
    vocab: int  # every id is less
    separator: int
    digest: bytes  # SHA-256 of what defines it
    utf8: bool  # whether text must be UTF-8
    largest: int | None  # bytes of a document

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """Ids of each text, without special tokens."""


class ByteEncoder:
    """A token a byte."""

    name, vocab, separator = BYTES, VOCAB, SEPARATOR
    digest = hashlib.sha256(BYTES.encode()).digest()
    utf8, largest = False, None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """See ``Encoder``."""
        return [np.frombuffer(text, np.uint8) for text in texts]


class TokenizerEncoder:
    """A tokenizer.json of the ``tokenizers`` library; a folder is taken for one that holds it.

    Its own padding, truncation and special tokens around a text are not applied.

    Raises: DataError: it cannot be read, or has no token that ends a text. MissingExtraError
    """

    utf8, largest = True, LARGEST_DOCUMENT

    def __init__(self, path: Path, separator: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise MissingExtraError("train", f"--tokenizer {path}") from None
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = path.read_bytes()
            json.loads(content)
        except OSError as fault:
            raise DataError(
                f"cannot read tokenizer {path}: {fault.strerror}: give a tokenizer.json, or '{BYTES}'"
            ) from None
        except ValueError:
            raise DataError(
                f"tokenizer {path} is not JSON: give a tokenizer.json, or '{BYTES}' for a token a byte"
            ) from None
        try:
            self.tokenizer = Tokenizer.from_buffer(content)
        except Exception as fault:  # noqa: BLE001  (the library raises nothing narrower)
            raise DataError(f"tokenizer {path} is none of the tokenizers library: {fault}") from None
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True  # as the text they are
        self.name, self.digest = str(path), hashlib.sha256(content).digest()
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab = max(ids.values()) + 1  # ids may have gaps
        self.separator = _separator(path, ids, separator)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """See ``Encoder``."""
        found = self.tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in found]


def encoder_of(tokenizer: str, separator: str | None) -> Encoder:
    """The encoder of ``--tokenizer``, ``bytes`` or a path, and ``--separator``.

    Raises: DataError, MissingExtraError
    """
    if tokenizer != BYTES:
        return TokenizerEncoder(Path(tokenizer), separator)
    if separator is not None:
        raise DataError(
            f"separator {separator!r} is not a byte: leave out --separator, or give a tokenizer.json"
        )
    return ByteEncoder()


def tokenize(
    inputs: Sequence[Path],
    output: Path,
    *,
    tokenizer: str = BYTES,
    separator: str | None = None,
    text_field: str = "text",
    skip_bad: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write the documents of ``inputs`` as a token file; what was read and written.

    ``skip_bad`` leaves out records and texts that cannot be used, and counts them. ``advance`` is told how
    many bytes of all are read. If anything raises, KeyboardInterrupt too, ``output`` is as it was before.

    Raises: DataError: input that cannot be used, or output that cannot be written. MissingExtraError
    """
    start = time.perf_counter()
    encoder, files = encoder_of(tokenizer, separator), input_files(inputs, output)
    wanted = Wanted(text_field, encoder.utf8, encoder.largest)
    total, done, text_bytes = sum(file.stat().st_size for file in files), 0, 0
    skipped: list[str] = []

    def bad(fault: str) -> None:
        if not skip_bad:
            raise DataError(f"{fault}; or leave such out with --skip-bad")
        skipped.append(fault)

    with token_file_writer(
        output, vocab=encoder.vocab, separator=encoder.separator, tokenizer=encoder.digest
    ) as writer:
        batch: list[bytes] = []
        waiting = 0
        for file in files:
            for document in documents(file, wanted, bad):
                batch.append(document.text)
                waiting, done = waiting + len(document.text), done + document.read
                if waiting >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                    writer.add(encoder.encode(batch))
                    text_bytes, batch, waiting = text_bytes + waiting, [], 0
                    advance(done, total)
        writer.add(encoder.encode(batch))
        text_bytes += waiting
        advance(total, total)
    header = writer.header()
    return {
        "output": str(output),
        "bytes": os.path.getsize(output),
        "tokenizer": encoder.name,
        "vocab": header.vocab,
        "separator": header.separator,
        "dtype": f"uint{8 * header.token_bytes}",
        "files": len(files),
        "documents": header.documents,
        "tokens": header.tokens,
        "text_bytes": text_bytes,
        "skipped": len(skipped),
        "first_skipped": skipped[:SKIPS_SHOWN],
        "digest": header.content.hex(),
        "time": time.perf_counter() - start,
    }


def _separator(path: Path, ids: dict[str, int], wanted: str | None) -> int:
    """Id of the token that ends a text.

    Raises: DataError: there is none of the usual names, or not the one wanted.
    """
    for name in END_OF_TEXT if wanted is None else (wanted,):
        if name in ids:
            return ids[name]
    looks_special = sorted(name for name in ids if len(name) > 2 and name[0] in "<[" and name[-1] in ">]")
    has = f"it has {', '.join(looks_special[:8])}" if looks_special else "it has none that looks special"
    which = f"token {wanted!r}" if wanted is not None else "end-of-text token of a usual name"
    raise DataError(
        f"tokenizer {path} has no {which} ({has}): name one that ends a document with --separator"
    )
