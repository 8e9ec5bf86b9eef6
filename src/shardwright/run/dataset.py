"""Training data as a pure function of (seed, step, sample): the same in any order of calls and any layout.

Nothing is remembered between two samples, so that a run goes on where it stopped by asking for the next step.
Tokens come from a token file, or from text as bytes: ids 0 to 255, and SEPARATOR between documents.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import DataError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.run.documents import files_under
from shardwright.run.shuffle import shuffled
from shardwright.run.token_file import is_token_file, open_token_file

SEPARATOR = 256
"""Token id that ends a document."""

VOCAB = 257
"""Token ids that byte text uses: 256 bytes and the separator."""

MASKED = -100
"""Target of a token that does not count; run/loss.py leaves it out."""

LIBRARY_BYTES = 24 * 10**6
"""Size at which the default corpus is cut off [B]; the library of Python 3.11 has 12 MB besides its tests."""

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders of the standard library that are not in the default corpus."""


class Sample(NamedTuple):
    """One sequence, arrays of ``seq``; or a microbatch of them, arrays of ``micro_batch`` x ``seq``.

    ``documents`` numbers the documents of a sequence from 0 on: attention stays among equal numbers. None if
    it crosses documents.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]  # MASKED ones do not count
    documents: NDArray[np.int64] | None = None


class Corpus(Protocol):
    """Tokens of documents, one after the other."""

    tokens: NDArray[np.unsignedinteger[Any]]
    ends: NDArray[np.int64]  # tokens up to and with the last of each document, ascending

    def digest(self) -> str:
        """Tells the tokens from others, for the record of a run."""


@dataclass(frozen=True)
class TokensInMemory:
    """A corpus of bytes, 2 B a token."""

    tokens: NDArray[np.uint16]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """After each separator."""
        return np.flatnonzero(self.tokens == SEPARATOR) + 1

    def digest(self) -> str:
        """SHA-256 of the tokens."""
        return hashlib.sha256(np.ascontiguousarray(self.tokens, dtype="<u2")).hexdigest()


class Batches(Protocol):
    """What training asks of its data. Every answer depends on the arguments alone."""

    def microbatches(self, step: int, layout: Layout, data_rank: int) -> list[Sample]:
        """The part of global batch ``step`` that ``data_rank`` trains on, a microbatch an entry."""

    def held_out_microbatches(self, batch: int, layout: Layout, data_rank: int) -> list[Sample]:
        """The part of held-out global batch ``batch`` that ``data_rank`` evaluates."""

    def digest(self) -> str:
        """Tells the tokens from others, for the record of a run."""


class TokenDataset:
    """Windows of ``seq`` + 1 tokens, one every ``seq`` tokens, over all documents joined.

    The last share of the windows (``Job.held_out``, at least one window if it is above 0) is held out; the
    others are visited once an epoch in an order drawn from (seed, epoch). The first token of a document is no
    target, because nothing before it tells of it. With ``Job.packing`` documents, samples number theirs.

    Raises: DataError: too few tokens for one window of training and one held out.
    """

    def __init__(self, corpus: Corpus | NDArray[np.uint16], job: Job) -> None:
        """``corpus``: an array is of byte text, which ``join_documents`` makes."""
        self.corpus = TokensInMemory(corpus) if isinstance(corpus, np.ndarray) else corpus
        self.job = job
        length = len(self.corpus.tokens)
        windows = max(length - 1, 0) // job.seq
        self.held_out_windows = max(1, round(windows * job.held_out)) if job.held_out else 0
        self.train_windows = windows - self.held_out_windows
        if self.train_windows < 1:
            parts = "one window to train on" + (" and one held out" if job.held_out else "")
            needed = (2 if job.held_out else 1) * job.seq + 1
            raise DataError(
                f"data has {length} tokens, fewer than {parts} (seq={job.seq}: {needed} tokens): "
                "give more text or a shorter seq"
            )

    def sample(self, step: int, index: int) -> Sample:
        """Sequence ``index`` of the global batch of ``step``."""
        epoch, offset = divmod(step * self.job.global_batch + index, self.train_windows)
        return self._window(shuffled(offset, self.train_windows, self.job.seed, epoch))

    def held_out(self, batch: int, index: int) -> Sample:
        """Sequence ``index`` of held-out batch ``batch``, in order; after the last, the first again."""
        window = (batch * self.job.global_batch + index) % self.held_out_windows
        return self._window(self.train_windows + window)

    def microbatches(self, step: int, layout: Layout, data_rank: int) -> list[Sample]:
        """See ``Batches``."""
        parts = sample_indices(layout, data_rank)
        return [stack_samples(self.sample(step, index) for index in part) for part in parts]

    def held_out_microbatches(self, batch: int, layout: Layout, data_rank: int) -> list[Sample]:
        """See ``Batches``."""
        parts = sample_indices(layout, data_rank)
        return [stack_samples(self.held_out(batch, index) for index in part) for part in parts]

    def digest(self) -> str:
        """See ``Batches``."""
        return self.corpus.digest()

    def _window(self, window: int) -> Sample:
        seq, start = self.job.seq, window * self.job.seq
        span = self.corpus.tokens[start : start + seq + 1].astype(np.int64)
        tokens, targets = span[:-1], span[1:].copy()
        first, last = np.searchsorted(self.corpus.ends, [start, start + seq], side="right")
        firsts = (
            self.corpus.ends[first:last] - start
        )  # of documents that begin behind the window's first token
        targets[firsts - 1] = MASKED
        if self.job.packing == "windows":
            return Sample(tokens, targets)
        begins = np.zeros(seq + 1, np.int64)
        begins[firsts] = 1
        return Sample(tokens, targets, np.cumsum(begins)[:-1])


def sample_indices(layout: Layout, data_rank: int) -> list[range]:
    """Indices in the global batch of each microbatch of a rank; over all ranks, each index once."""
    b = layout.micro_batch
    starts = ((j * layout.dp + data_rank) * b for j in range(layout.microbatches))
    return [range(start, start + b) for start in starts]


def stack_samples(samples: Iterable[Sample]) -> Sample:
    """One microbatch of several sequences."""
    tokens, targets, documents = zip(*samples, strict=True)
    numbered = documents[0] is not None
    return Sample(np.stack(tokens), np.stack(targets), np.stack(documents) if numbered else None)


def build_dataset(data: Path | None, vocab: int, job: Job, share: tuple[int, int] = (0, 1)) -> TokenDataset:
    """The dataset of ``--data``, or of the standard library's source where ``data`` is None.

    ``vocab``: of the model. ``share`` (i, n): this process is number i of n on the node that build the same.

    Raises: DataError: absent, unreadable, damaged or too little data, or a vocabulary that lacks some of its
    tokens.
    """
    if data is not None and is_token_file(data):
        file = open_token_file(data, share)
        if vocab < file.header.vocab:
            raise DataError(
                f"model has vocab={vocab} but token file {data} was made with a vocabulary of "
                f"{file.header.vocab}: use vocab={file.header.vocab} or more, or the model's own tokenizer"
            )
        return TokenDataset(file, job)
    tokens = path_tokens(data) if data is not None else library_tokens()
    used = int(tokens.max()) + 1
    if vocab < used:
        raise DataError(
            f"model has vocab={vocab} but the data uses token ids up to {used - 1}: use vocab={VOCAB} or more"
        )
    return TokenDataset(tokens, job)


def library_tokens(limit_bytes: int = LIBRARY_BYTES) -> NDArray[np.uint16]:
    """Source of the standard library of the running Python, files in order of path, up to ``limit_bytes``."""
    root = Path(sysconfig.get_path("stdlib"))
    documents, size = [], 0
    for path in files_under(root, LEFT_OUT):
        if path.suffix != ".py":
            continue
        document = _read_document(path)[: limit_bytes - size]
        documents.append(document)
        size += len(document)
        if size >= limit_bytes:
            break
    if not size:
        raise DataError(f"Python's standard library has no source under {root}: give text with --data")
    return join_documents(documents)


def path_tokens(path: Path) -> NDArray[np.uint16]:
    """A text file, or every file of a folder in order of path, as bytes; each file is a document.

    Raises: DataError: absent, unreadable or without a byte.
    """
    if path.is_dir():
        documents = [_read_document(file) for file in files_under(path)]
    elif path.exists():
        documents = [_read_document(path)]
    else:
        raise DataError(f"data path {path} does not exist: give a text file or a folder of them with --data")
    if not any(documents):
        kind = (
            f"folder {path} holds no tokens in {len(documents)} files"
            if path.is_dir()
            else f"{path} is empty"
        )
        raise DataError(f"data {kind}: give a text file or a folder of them with --data")
    return join_documents(documents)


def join_documents(documents: Iterable[bytes]) -> NDArray[np.uint16]:
    """Tokens of all documents that are not empty, each followed by SEPARATOR."""
    parts = []
    for document in documents:
        if document:
            parts += [
                np.frombuffer(document, dtype=np.uint8).astype(np.uint16),
                np.array([SEPARATOR], np.uint16),
            ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)


def _read_document(path: Path) -> bytes:
    if is_token_file(path):
        raise DataError(f"data {path} is a token file among text: give it alone with --data, or leave it out")
    try:
        return path.read_bytes()
    except OSError as fault:
        raise DataError(
            f"cannot read {path}: {fault.strerror}: leave it out, or give other data with --data"
        ) from None
