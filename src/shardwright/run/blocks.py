"""Attention between some queries and some keys: the kernel of each device, with its log-sum-exp, and back.

B batch, H query heads, G key/value heads, Q queries, K keys, D head size, V value head size.
"""

import torch
from torch import Tensor

from shardwright.run.kernels import wide

SCORE_BYTES = 2**28
"""Scores that exist at once where no kernel takes the block [B]."""

FLASH_TYPES = (torch.bfloat16, torch.float16)
"""What flash attention on CUDA computes in."""

FLASH_MULTIPLE = 8
"""Head sizes that flash attention on CUDA takes are multiples of this."""


def block_forward(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKV: Tensor, scale: float, causal: bool, allowed_BQK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output (B x H x Q x V) and log-sum-exp of the scores (B x H x Q, fp32 or fp64) of one block.

    ``causal``: as many queries as keys, query i sees keys 0 to i. ``allowed_BQK``: the pairs that see each
    other, not with ``causal``. A query that sees no key has output 0 and log-sum-exp minus infinity.
    """
    if not _fused(q_BHQD, allowed_BQK):
        return _plain_forward(q_BHQD, k_BGKD, v_BGKV, scale, causal, allowed_BQK)
    values = v_BGKV.shape[-1]
    q, k, v = _padded(q_BHQD, k_BGKD, v_BGKV)
    if q.device.type == "cpu":
        mask = None if allowed_BQK is None else _added_mask(allowed_BQK, q.dtype)
        out, lse_BHQ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        if allowed_BQK is not None:  # the kernel says 0 where it found no key, which would count as a key
            lse_BHQ = torch.where(allowed_BQK.any(-1)[:, None], lse_BHQ, -torch.inf)
    else:
        out, lse_BHQ, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    return (out if out.shape[-1] == values else narrowed(out, values)), lse_BHQ


def block_backward(
    grad_BHQV: Tensor,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKV: Tensor,
    out_BHQV: Tensor,
    lse_BHQ: Tensor,
    scale: float,
    causal: bool,
    allowed_BQK: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from one block; ``out_BHQV`` and ``lse_BHQ`` are those of all blocks merged."""
    if not _fused(q_BHQD, allowed_BQK):
        return _plain_backward(
            grad_BHQV, q_BHQD, k_BGKD, v_BGKV, out_BHQV, lse_BHQ, scale, causal, allowed_BQK
        )
    sizes = q_BHQD.shape[-1], k_BGKD.shape[-1], v_BGKV.shape[-1]
    q, k, v, out, grad = _padded(q_BHQD, k_BGKD, v_BGKV, out_BHQV, grad_BHQV)
    if q.device.type == "cpu":
        mask = None if allowed_BQK is None else _added_mask(allowed_BQK, q.dtype)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse_BHQ, 0.0, causal, attn_mask=mask, scale=scale
        )
    else:
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # state of the dropout there is not
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse_BHQ.contiguous(), None, None, q.shape[2], k.shape[2]),
            *(0.0, causal, unused, unused),
            scale=scale,
        )
    dq, dk, dv = (grad[..., :size] for grad, size in zip(grads, sizes, strict=True))
    return dq, dk, dv


def narrowed(x_BHQD: Tensor, size: int) -> Tensor:
    """The first ``size`` numbers of every head, in storage of their own, laid out as B x Q x H x D."""
    return x_BHQD[..., :size].transpose(1, 2).contiguous().transpose(1, 2)


def _fused(q_BHQD: Tensor, allowed_BQK: Tensor | None) -> bool:
    """Whether a flash kernel takes the block. That of CUDA takes no mask and 16-bit types only."""
    return q_BHQD.device.type == "cpu" or (allowed_BQK is None and q_BHQD.dtype in FLASH_TYPES)


def _padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Zeros behind the heads that are narrower than the widest: flash kernels know one head size."""
    size = max(tensor.shape[-1] for tensor in tensors)
    if tensors[0].device.type != "cpu":
        size += -size % FLASH_MULTIPLE
    return tuple(
        tensor if tensor.shape[-1] == size else torch.nn.functional.pad(tensor, (0, size - tensor.shape[-1]))
        for tensor in tensors
    )


def _added_mask(allowed_BQK: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: minus infinity where a pair is not allowed."""
    zeros_BQK = torch.zeros(allowed_BQK.shape, dtype=dtype, device=allowed_BQK.device)
    return zeros_BQK.masked_fill_(~allowed_BQK, -torch.inf)[:, None]


# Where no kernel takes the block: the scores of some query rows at a time, in a wide type


def _row_slices(q_BHQD: Tensor, keys: int) -> list[slice]:
    batch, heads, rows, _ = q_BHQD.shape
    step = max(1, SCORE_BYTES // max(batch * heads * keys * wide(q_BHQD.dtype).itemsize, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _scores(q_BHQD: Tensor, k_BGKD: Tensor, scale: float, allowed_BQK: Tensor | None) -> Tensor:
    """Scores in groups of heads, B x G x H/G x Q x K, in a wide type."""
    kind = wide(q_BHQD.dtype)
    grouped = q_BHQD.to(kind).unflatten(1, (k_BGKD.shape[1], -1))
    scores = grouped @ k_BGKD.to(kind)[:, :, None].mT * scale
    return scores if allowed_BQK is None else scores.masked_fill_(~allowed_BQK[:, None, None], -torch.inf)


def _allowed_rows(allowed_BQK: Tensor | None, causal: bool, rows: slice, keys: Tensor) -> Tensor | None:
    if causal:
        query = torch.arange(rows.start, rows.stop, device=keys.device)
        return (torch.arange(keys.shape[2], device=keys.device) <= query[:, None])[None]
    return None if allowed_BQK is None else allowed_BQK[:, rows]


def _plain_forward(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKV: Tensor, scale: float, causal: bool, allowed_BQK: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = q_BHQD.shape
    kind = wide(q_BHQD.dtype)
    out_BQHV = q_BHQD.new_empty(batch, queries, heads, v_BGKV.shape[-1])
    lse_BHQ = q_BHQD.new_empty(batch, heads, queries, dtype=kind)
    v = v_BGKV.to(kind)[:, :, None]
    for rows in _row_slices(q_BHQD, k_BGKD.shape[2]):
        allowed = _allowed_rows(allowed_BQK, causal, rows, k_BGKD)
        scores = _scores(q_BHQD[:, :, rows], k_BGKD, scale, allowed)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        weights = torch.exp(scores - lse.clamp(min=torch.finfo(kind).min))
        out_BQHV[:, rows] = (weights @ v).flatten(1, 2).transpose(1, 2).to(out_BQHV.dtype)
        lse_BHQ[:, :, rows] = lse.flatten(1, 2)[..., 0]
    return out_BQHV.transpose(1, 2), lse_BHQ


def _plain_backward(
    grad_BHQV: Tensor,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKV: Tensor,
    out_BHQV: Tensor,
    lse_BHQ: Tensor,
    scale: float,
    causal: bool,
    allowed_BQK: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    groups, kind = k_BGKD.shape[1], wide(q_BHQD.dtype)
    dq_BHQD = torch.empty_like(q_BHQD)
    k, v = k_BGKD.to(kind), v_BGKV.to(kind)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows in _row_slices(q_BHQD, k_BGKD.shape[2]):
        q, grad, out, lse = (
            tensor[:, :, rows].to(kind).unflatten(1, (groups, -1))
            for tensor in (q_BHQD, grad_BHQV, out_BHQV, lse_BHQ[..., None])
        )
        allowed = _allowed_rows(allowed_BQK, causal, rows, k_BGKD)
        weights = torch.exp(_scores(q_BHQD[:, :, rows], k_BGKD, scale, allowed) - lse)
        dv += (weights.mT @ grad).sum(2)
        dscores = weights * (grad @ v[:, :, None].mT - (grad * out).sum(-1, keepdim=True)) * scale
        dq_BHQD[:, :, rows] = (dscores @ k[:, :, None]).flatten(1, 2).to(dq_BHQD.dtype)
        dk += (dscores.mT @ q).sum(2)
    return dq_BHQD, dk.to(k_BGKD.dtype), dv.to(v_BGKV.dtype)
