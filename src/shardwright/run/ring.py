"""Ring attention: every rank keeps its queries, keys and values go round.

Tokens lie zig-zag (sequence.py), so that after its own keys a rank sees, of keys from a lower rank, the first
half with all its queries, and of those from a higher rank all with its second half: the same work for every
rank at every step.

B batch, H query heads, G key/value heads, S this rank's tokens, D head size, V value head size.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.run.attend import rules_of
from shardwright.run.kernels import wide
from shardwright.run.pieces import Merged, Rows, Rules, Saved, add_gradients
from shardwright.run.sequence import WholeDocuments, runs


class Exchange(NamedTuple):
    """A buffer on its way from the rank before, and the one on its way to the rank after."""

    arriving: Tensor
    works: list[dist.Work]
    leaving: Tensor  # must not change before the works are done

    def wait(self) -> Tensor:
        """What has arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


def pass_on(tensor: Tensor, group: dist.ProcessGroup) -> Exchange:
    """Start to send ``tensor`` to the next rank of the ring and to receive the like from the one before."""
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    arriving = torch.empty_like(tensor)
    after = dist.get_global_rank(group, (rank + 1) % degree)
    before = dist.get_global_rank(group, (rank - 1) % degree)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, after, group), dist.P2POp(dist.irecv, arriving, before, group)]
    )
    return Exchange(arriving, works, tensor)


class Block(NamedTuple):
    """What a rank computes of the keys of a ``source`` rank: rows of its queries and of those keys."""

    query: slice
    key: slice
    query_rows: Rows
    key_rows: Rows


def block_of(rank: int, source: int, degree: int, tokens: int, documents_nBS: Tensor | None) -> Block:
    """The block that the causal order leaves of ``rank``'s queries and ``source``'s keys."""
    query, key = (
        Rows(
            runs(tokens * degree, degree, place, "ring"),
            None if documents_nBS is None else documents_nBS[place],
        )
        for place in (rank, source)
    )
    whole = slice(0, tokens)
    if source < rank:
        return Block(whole, slice(0, tokens // 2), query, key.half(0))
    if source > rank:
        return Block(slice(tokens // 2, tokens), whole, query.half(1), key)
    return Block(whole, whole, query, key)


class RingAttention:
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
        return RingFunction.apply(q_BHSD, k_BGSD, v_BGSV, whole_nBS, rules, self.group)


class RingFunction(torch.autograd.Function):
    """Keeps q, k, v, the output and a log-sum-exp a row.

    Forward passes keys and values on, as one buffer, degree - 1 times. Backward does so again, and their
    gradients in a wide type follow one step behind, degree times, until they are home.
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
        rank, degree, tokens = dist.get_rank(group), dist.get_world_size(group), q_BHSD.shape[2]
        kv, sizes = torch.cat([k_BGSD, v_BGSV], -1), (k_BGSD.shape[-1], v_BGSV.shape[-1])
        merged = Merged()
        for step in range(degree):
            exchange = pass_on(kv, group) if step < degree - 1 else None
            block = block_of(rank, (rank - step) % degree, degree, tokens, documents_nBS)
            k, v = kv[:, :, block.key].split(sizes, -1)
            q, first = q_BHSD[:, :, block.query], block.query.start
            merged.add(q, k, v, block.query_rows, block.key_rows, rules, first)
            if exchange is not None:
                kv = exchange.wait()
        out_BHSV, lse_BHS = merged.result(q_BHSD.dtype)
        ctx.save_for_backward(q_BHSD, k_BGSD, v_BGSV, documents_nBS, out_BHSV, lse_BHS)
        ctx.rules, ctx.group = rules, group
        return out_BHSV

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSV: Tensor):
        q_BHSD, k_BGSD, v_BGSV, documents_nBS, out_BHSV, lse_BHS = ctx.saved_tensors
        rank, degree, tokens = dist.get_rank(ctx.group), dist.get_world_size(ctx.group), q_BHSD.shape[2]
        kv, sizes = torch.cat([k_BGSD, v_BGSV], -1), (k_BGSD.shape[-1], v_BGSV.shape[-1])
        saved = Saved(grad_BHSV, q_BHSD, out_BHSV, lse_BHS)
        kind = wide(q_BHSD.dtype)
        dq_BHSD = torch.zeros_like(q_BHSD, dtype=kind)
        dkv, returning = torch.zeros_like(kv, dtype=kind), None
        for step in range(degree):
            exchange = pass_on(kv, ctx.group) if step < degree - 1 else None
            block = block_of(rank, (rank - step) % degree, degree, tokens, documents_nBS)
            k, v = kv[:, :, block.key].split(sizes, -1)
            part, dq = saved.rows(block.query), dq_BHSD[:, :, block.query]
            grads = add_gradients(dq, part, k, v, block.query_rows, block.key_rows, ctx.rules)
            if returning is not None:
                dkv = returning.wait()
            for total, grad in zip(dkv[:, :, block.key].split(sizes, -1), grads, strict=True):
                if grad is not None:
                    total += grad
            returning = pass_on(dkv, ctx.group)
            if exchange is not None:
                kv = exchange.wait()
        dk_BGSD, dv_BGSV = returning.wait().to(k_BGSD.dtype).split(sizes, -1)
        return dq_BHSD.to(q_BHSD.dtype), dk_BGSD, dv_BGSV, None, None, None
