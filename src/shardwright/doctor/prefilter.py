"""Which lines of a huge log may say something: one pass of numpy over 4-byte words, before any regex.

A needle of at least 7 bytes holds an aligned 4-byte word wherever it starts, and only four words can be the
first such one. So a table of their hashes, looked up at every fourth byte, finds all needles at once, at the
speed of memory; what it finds by chance is thrown out by looking at the place itself.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

LEAST_NEEDLE = 7
HASH_BITS = 18
MULTIPLIER = np.uint32(2654435761)  # Knuth's multiplicative hash

PLENTY = 5_000
"""Places of one needle in a file after which only some of each chunk are looked at: a log of a million steps
says no more than one of thousands."""

OF_A_CHUNK = 8
"""How many of each chunk then, half of them its first, half its last."""


class Prefilter:
    """Finds places of needles in chunks of bytes. Keeps count, so one is needed for each file."""

    def __init__(self, needles: Sequence[bytes]) -> None:
        """Raises: ValueError: a needle is too short to be found."""
        short = [needle for needle in needles if len(needle) < LEAST_NEEDLE]
        if short:
            raise ValueError(f"needles must have {LEAST_NEEDLE} bytes or more: {short}")
        self._table = np.zeros(1 << HASH_BITS, dtype=np.uint16)
        self._at: dict[int, list[bytes]] = {}
        for needle in needles:
            for start in range(4):
                slot = int(_hashes(np.frombuffer(needle[start : start + 4], dtype="<u4"))[0])
                group = int(self._table[slot]) or len(self._at) + 1
                self._table[slot] = group
                self._at.setdefault(group, []).append(needle)
        self._seen = np.zeros(len(self._at) + 1, dtype=np.int64)

    def places(self, chunk: bytes, end: int) -> list[tuple[int, bytes]]:
        """Starts of needles in ``chunk[:end]``, with the needle, in order, each once; thinned if plenty."""
        words = np.frombuffer(chunk, dtype="<u4", count=len(chunk) // 4)
        groups = self._table[_hashes(words)]
        hits = np.flatnonzero(groups)
        if not len(hits):
            return []
        hits = self._thinned(hits, groups[hits])
        found: dict[tuple[int, bytes], None] = {}
        for hit in hits.tolist():
            at = hit * 4
            for needle in self._at[int(groups[hit])]:
                start = chunk.find(needle, max(at - 3, 0), at + len(needle))
                if 0 <= start < end:
                    found[start, needle] = None
        return sorted(found)

    def _thinned(self, hits: NDArray[np.int64], groups: NDArray[np.uint16]) -> NDArray[np.int64]:
        counts = np.bincount(groups, minlength=len(self._seen))
        before, self._seen = self._seen, self._seen + counts
        crowded = np.flatnonzero((self._seen > PLENTY) & (counts > OF_A_CHUNK))
        if not len(crowded):
            return hits
        keep = np.ones(len(hits), dtype=np.bool_)
        for group in crowded.tolist():
            own = np.flatnonzero(groups == group)
            first = max(PLENTY - int(before[group]), OF_A_CHUNK // 2)
            keep[own[first : -(OF_A_CHUNK // 2)]] = False
        return hits[keep]


def _hashes(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.asarray((words * MULTIPLIER) >> np.uint32(32 - HASH_BITS), dtype=np.uint32)


def needles_of(readers: Sequence[Mapping[bytes, object]]) -> Iterator[bytes]:
    """The keys of several tables, each once."""
    yield from dict.fromkeys(needle for table in readers for needle in table)
