"""All-gather attention: every rank keeps its queries and gathers all keys and values.

Tokens lie zig-zag (sequence.py). Beside its own keys a rank sees, with all its queries, the first half of
what each lower rank has, and with its second half all that the higher ranks have: the same work for all.

B batch, H query heads, G key/value heads, S this rank's tokens, D head size, V value head size, n ranks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.run.attend import rules_of
from shardwright.run.kernels import wide
from shardwright.run.pieces import Merged, Rows, Rules, Saved, add_gradients
from shardwright.run.sequence import WholeDocuments, runs


class AllGatherAttention:
    """Attention of one rank of ``group``; see ``Attend``. The sequence is divisible by twice its ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.documents = WholeDocuments(group)

    def __call__(
        self,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSV: Tensor,
        document_BS: Tensor | None,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """See ``Attend``."""
        whole_nBS = None if document_BS is None else self.documents.of(document_BS)
        rules = rules_of(q_BHSD, document_BS, scale, window)
        return AllGatherFunction.apply(q_BHSD, k_BGSD, v_BGSV, whole_nBS, rules, self.group)


class _Part(NamedTuple):
    """Queries of this rank and keys of its ``own`` or of other ranks: rows of the first, and of what is
    gathered.

    ``key`` selects along ranks, and of their two halves. A key is in one part at most.
    """

    own: bool
    query: slice
    key: tuple[slice, slice]
    query_rows: Rows
    key_rows: Rows


class _Ranks(NamedTuple):
    """The group from one rank's point of view."""

    rank: int
    degree: int
    tokens: int
    documents: Tensor | None  # n x B x S

    def rows(self, rank: int) -> Rows:
        """Where a rank's tokens stand."""
        document_BS = None if self.documents is None else self.documents[rank]
        return Rows(runs(self.tokens * self.degree, self.degree, rank, "ring"), document_BS)

    def parts(self) -> Iterator[_Part]:
        """What is computed: with the rank's own keys, those of lower ranks, and those of higher ones."""
        half, whole, own = self.tokens // 2, slice(0, self.tokens), self.rows(self.rank)
        yield _Part(True, whole, (slice(self.rank, self.rank + 1), slice(0, 2)), own, own)
        if self.rank > 0:
            lower = [self.rows(rank).half(0) for rank in range(self.rank)]
            key = slice(0, self.rank), slice(0, 1)
            yield _Part(False, whole, key, own, _joined(lower))
        if self.rank < self.degree - 1:
            higher = [self.rows(rank) for rank in range(self.rank + 1, self.degree)]
            key = slice(self.rank + 1, self.degree), slice(0, 2)
            yield _Part(False, slice(half, self.tokens), key, own.half(1), _joined(higher))


def _joined(rows: list[Rows]) -> Rows:
    documents = [each.document for each in rows if each.document is not None]
    together = tuple(run for each in rows for run in each.runs)
    return Rows(together, torch.cat(documents, 1) if documents else None)


class _Gathering:
    """Keys and values of all ranks on their way, in one buffer: n x 2 x S/2 x B x G x (D + V)."""

    def __init__(self, k_BGSD: Tensor, v_BGSV: Tensor, group: dist.ProcessGroup) -> None:
        self.own = k_BGSD, v_BGSV
        self.sizes = k_BGSD.shape[-1], v_BGSV.shape[-1]
        self.mine = torch.cat([k_BGSD.permute(2, 0, 1, 3), v_BGSV.permute(2, 0, 1, 3)], -1)
        whole = self.mine.new_empty((dist.get_world_size(group) * len(self.mine), *self.mine.shape[1:]))
        self.work = dist.all_gather_single(whole, self.mine, group=group, async_op=True)
        self.whole = whole.unflatten(0, (-1, 2, len(self.mine) // 2))

    def of(self, part: _Part) -> tuple[Tensor, Tensor]:
        """Keys and values of a part; this waits for other ranks' and copies those of every other half."""
        if part.own:
            return self.own
        self.work.wait()
        return self.whole[part.key].flatten(0, 2).permute(1, 2, 0, 3).split(self.sizes, -1)


class AllGatherFunction(torch.autograd.Function):
    """Keeps q, k, v, the output and a log-sum-exp a row.

    Keys and values are gathered forward and again backward, while a rank works on its own; their gradients
    are summed by one reduce-scatter, in the type of the keys.
    """

    @staticmethod
    def forward(
        ctx,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSV: Tensor,
        documents_nBS: Tensor | None,
        rules: Rules,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ranks = _Ranks(dist.get_rank(group), dist.get_world_size(group), q_BHSD.shape[2], documents_nBS)
        gathering = _Gathering(k_BGSD, v_BGSV, group)
        merged = Merged()
        for part in ranks.parts():
            k, v = gathering.of(part)
            q, first = q_BHSD[:, :, part.query], part.query.start
            merged.add(q, k, v, part.query_rows, part.key_rows, rules, first)
        out_BHSV, lse_BHS = merged.result(q_BHSD.dtype)
        ctx.save_for_backward(q_BHSD, k_BGSD, v_BGSV, documents_nBS, out_BHSV, lse_BHS)
        ctx.rules, ctx.group = rules, group
        return out_BHSV

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSV: Tensor):
        q_BHSD, k_BGSD, v_BGSV, documents_nBS, out_BHSV, lse_BHS = ctx.saved_tensors
        group = ctx.group
        ranks = _Ranks(dist.get_rank(group), dist.get_world_size(group), q_BHSD.shape[2], documents_nBS)
        gathering = _Gathering(k_BGSD, v_BGSV, group)
        saved = Saved(grad_BHSV, q_BHSD, out_BHSV, lse_BHS)
        dq_BHSD = torch.zeros_like(q_BHSD, dtype=wide(q_BHSD.dtype))
        whole = torch.zeros_like(gathering.whole)
        for part in ranks.parts():
            k, v = gathering.of(part)
            dq, queries = dq_BHSD[:, :, part.query], saved.rows(part.query)
            grads = add_gradients(dq, queries, k, v, part.query_rows, part.key_rows, ctx.rules)
            for total, grad in zip(whole[part.key].split(gathering.sizes, -1), grads, strict=True):
                if grad is not None:
                    total += grad.permute(2, 0, 1, 3).view(total.shape)
        summed = torch.empty_like(gathering.mine)
        dist.reduce_scatter_single(summed, whole.flatten(0, 2), group=group)
        dk_BGSD, dv_BGSV = summed.permute(1, 2, 0, 3).split(gathering.sizes, -1)
        return dq_BHSD.to(q_BHSD.dtype), dk_BGSD, dv_BGSV, None, None, None
