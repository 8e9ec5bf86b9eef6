"""Which blocks of a causal attention need computing, and putting them together.

Tokens are known by where they stand in the sequence: a run is a range of positions, ``Runs`` those of a
tensor's rows in order. Only positions decide which blocks are computed, so that every rank, and a dry run,
knows without looking at data; documents decide inside a block, by a mask.

B batch, H query heads, G key/value heads, Q queries, K keys, D head size, V value head size.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.run.blocks import block_backward, block_forward
from shardwright.run.kernels import wide

Runs = tuple[range, ...]

MASK_ROWS = 1024
"""Queries of one masked block: bounds the mask, and leaves out keys that none of them sees."""


class Piece(NamedTuple):
    """Rows of the queries and of the keys that make one block: ``causal``, ``masked`` or neither."""

    query: slice
    key: slice
    causal: bool
    masked: bool


class Rules(NamedTuple):
    """Who sees whom, besides that nobody sees what comes later.

    ``window``: keys that a query sees, its own the last; ``documents``: whether ids of documents are given,
    which must be equal.
    """

    scale: float
    window: int | None
    documents: bool


class Rows(NamedTuple):
    """Where the rows of a tensor stand, and the documents they belong to."""

    runs: Runs
    document: Tensor | None  # B x S

    def positions(self, device: torch.device) -> Tensor:
        """int64 position of every row."""
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs])

    def half(self, which: int) -> "Rows":
        """The rows of one of two runs of equal length."""
        length = len(self.runs[which])
        document = self.document
        rows = slice(which * length, (which + 1) * length)
        return Rows((self.runs[which],), None if document is None else document[:, rows])


def pieces(query: Runs, key: Runs, rules: Rules) -> list[Piece]:
    """Blocks to compute, each query in one at most; a single one where no mask is needed."""
    seen = [_seen(queries, keys, rules.window) for queries in query for keys in key]
    whole = slice(0, _length(query)), slice(0, _length(key))
    if not any(seen):
        return []
    if not rules.documents:
        if query == key and (rules.window is None or query[-1][-1] - query[0][0] < rules.window):
            return [Piece(*whole, causal=True, masked=False)]
        if all(_fully_seen(queries, keys, rules.window) for queries in query for keys in key):
            return [Piece(*whole, causal=False, masked=False)]
    return list(_masked(query, key, rules.window))


def _masked(query: Runs, key: Runs, window: int | None) -> Iterator[Piece]:
    start = 0
    for queries in query:
        for first in range(0, len(queries), MASK_ROWS):
            some = queries[first : first + MASK_ROWS]
            keys = _bounds(some, key, window)
            if keys is not None:
                rows = slice(start + first, start + first + len(some))
                yield Piece(rows, keys, causal=False, masked=True)
        start += len(queries)


def _bounds(queries: range, key: Runs, window: int | None) -> slice | None:
    """Rows of the keys from the first to the last that one of ``queries`` sees."""
    lowest = 0 if window is None else queries[0] - window + 1
    start, ends = 0, []
    for keys in key:
        first, stop = max(keys.start, lowest), min(keys.stop, queries[-1] + 1)
        if first < stop:
            ends += [start + first - keys.start, start + stop - keys.start]
        start += len(keys)
    return slice(ends[0], ends[-1]) if ends else None


def _length(runs: Runs) -> int:
    return sum(len(run) for run in runs)


def _seen(queries: range, keys: range, window: int | None) -> bool:
    """Whether any query sees any key."""
    return keys[0] <= queries[-1] and (window is None or keys[-1] > queries[0] - window)


def _fully_seen(queries: range, keys: range, window: int | None) -> bool:
    return keys[-1] <= queries[0] and (window is None or keys[0] > queries[-1] - window)


def _allowed(piece: Piece, query: Rows, key: Rows, window: int | None, device: torch.device) -> Tensor | None:
    """Pairs that see each other (B x Q x K, or 1 x Q x K); None: the piece needs no mask."""
    if not piece.masked:
        return None
    at_Q1, at_K = query.positions(device)[piece.query, None], key.positions(device)[piece.key]
    allowed_BQK = (at_K <= at_Q1)[None]
    if window is not None:
        allowed_BQK = allowed_BQK & (at_K > at_Q1 - window)
    if query.document is not None:
        ours, theirs = query.document[:, piece.query, None], key.document[:, None, piece.key]
        allowed_BQK = allowed_BQK & (ours == theirs)
    return allowed_BQK


class Merged:
    """Output and log-sum-exp of queries whose keys come in parts, in a wide type.

    The part with each query's own key comes first, so that every query has seen a key when others come.
    """

    def __init__(self) -> None:
        self.out_BHQV: Tensor | None = None
        self.lse_BHQ: Tensor | None = None

    def add(
        self,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKV: Tensor,
        query: Rows,
        key: Rows,
        rules: Rules,
        first: int = 0,
    ) -> None:
        """Take in what queries from row ``first`` on, all of ``q_BHQD``, see in some keys."""
        for piece in pieces(query.runs, key.runs, rules):
            allowed = _allowed(piece, query, key, rules.window, q_BHQD.device)
            out, lse = block_forward(
                q_BHQD[:, :, piece.query],
                k_BGKD[:, :, piece.key],
                v_BGKV[:, :, piece.key],
                rules.scale,
                piece.causal,
                allowed,
            )
            self._take(slice(first + piece.query.start, first + piece.query.stop), out, lse, q_BHQD)

    def _take(self, rows: slice, out: Tensor, lse: Tensor, q_BHQD: Tensor) -> None:
        kind = wide(out.dtype)
        if self.out_BHQV is None and rows == slice(0, q_BHQD.shape[2]):
            # copies: what selective recomputation has kept of a kernel must not change
            self.out_BHQV, self.lse_BHQ = out.to(kind, copy=True), lse.to(kind, copy=True)
            return
        if self.out_BHQV is None:
            batch, heads, queries, _ = q_BHQD.shape
            self.out_BHQV = out.new_zeros(batch, queries, heads, out.shape[-1], dtype=kind).transpose(1, 2)
            self.lse_BHQ = lse.new_full((batch, heads, queries), -torch.inf, dtype=kind)
        before = self.lse_BHQ[:, :, rows]
        after = torch.logaddexp(before, lse)
        self.out_BHQV[:, :, rows].mul_(torch.exp(before - after)[..., None]).add_(
            out * torch.exp(lse - after)[..., None]
        )
        before.copy_(after)

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Output in ``dtype``, and log-sum-exp in the wide type."""
        return self.out_BHQV.to(dtype), self.lse_BHQ


def whole_forward(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKV: Tensor, rows: Rows, rules: Rules
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries that have all their keys at hand, in the same rows."""
    found = pieces(rows.runs, rows.runs, rules)
    if found == [Piece(slice(0, q_BHQD.shape[2]), slice(0, k_BGKD.shape[2]), causal=True, masked=False)]:
        return block_forward(q_BHQD, k_BGKD, v_BGKV, rules.scale, True, None)
    merged = Merged()
    merged.add(q_BHQD, k_BGKD, v_BGKV, rows, rows, rules)
    return merged.result(q_BHQD.dtype)


class Saved(NamedTuple):
    """What the backward pass of some queries needs beside keys and values."""

    grad: Tensor  # B x H x Q x V, of the output
    q: Tensor  # B x H x Q x D
    out: Tensor  # B x H x Q x V
    lse: Tensor  # B x H x Q

    def rows(self, rows: slice) -> "Saved":
        """The same of some queries."""
        return Saved(*(tensor[:, :, rows] for tensor in self))


def pieces_backward(
    saved: Saved, k_BGKD: Tensor, v_BGKV: Tensor, query: Rows, key: Rows, rules: Rules
) -> Iterator[tuple[Piece, Tensor, Tensor, Tensor]]:
    """Gradients of q, k and v from each block, with the block."""
    for piece in pieces(query.runs, key.runs, rules):
        part = saved.rows(piece.query)
        allowed = _allowed(piece, query, key, rules.window, k_BGKD.device)
        grads = block_backward(
            part.grad,
            part.q,
            k_BGKD[:, :, piece.key],
            v_BGKV[:, :, piece.key],
            part.out,
            part.lse,
            rules.scale,
            piece.causal,
            allowed,
        )
        yield piece, *grads


def add_gradients(
    dq_BHQD: Tensor, saved: Saved, k_BGKD: Tensor, v_BGKV: Tensor, query: Rows, key: Rows, rules: Rules
) -> tuple[Tensor | None, Tensor | None]:
    """Add the queries' gradients to ``dq_BHQD``; those of the keys and values, in a wide type if summed.

    None: no query sees any key.
    """
    dk, dv = None, None
    for piece, *grads in pieces_backward(saved, k_BGKD, v_BGKV, query, key, rules):
        dq_BHQD[:, :, piece.query] += grads[0]
        if not piece.masked:
            return grads[1], grads[2]
        if dk is None:
            dk, dv = (torch.zeros_like(tensor, dtype=dq_BHQD.dtype) for tensor in (k_BGKD, v_BGKV))
        dk[:, :, piece.key] += grads[1]
        dv[:, :, piece.key] += grads[2]
    return dk, dv


def whole_backward(
    saved: Saved, k_BGKD: Tensor, v_BGKV: Tensor, rows: Rows, rules: Rules
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v after ``whole_forward``."""
    dq_BHQD = torch.zeros_like(saved.q, dtype=wide(saved.q.dtype))
    dk, dv = add_gradients(dq_BHQD, saved, k_BGKD, v_BGKV, rows, rows, rules)
    return dq_BHQD.to(saved.q.dtype), dk.to(k_BGKD.dtype), dv.to(v_BGKV.dtype)
