"""What tests of attention over ranks share: cases, a dense softmax to compare with, a recorder of kernels."""

from collections import Counter
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from gloo import relative
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.run.cp import build_attend, positions, slice_sequence

SEQ = 32
KINDS = ("ring", "all_gather", "ulysses")


class Case(NamedTuple):
    """Shapes of one attention. ``lengths``: of the documents, tiled over all sequences of the batch."""

    heads: int = 8
    kv_heads: int = 8
    size: int = 16
    value_size: int = 16
    lengths: tuple[int, ...] | None = None
    window: int | None = None
    scale: float | None = None
    batch: int = 2
    dtype: torch.dtype = torch.float64


CASES = {
    "mha": Case(),
    "gqa": Case(kv_heads=2, batch=1),
    "one_kv_head": Case(kv_heads=1, scale=0.3),
    "narrow_values": Case(size=24, value_size=16),
    "wide_values": Case(kv_heads=4, size=8, value_size=24),
    "documents": Case(kv_heads=2, lengths=(3, 9, 1, 13, 6)),
    "one_token_documents": Case(lengths=(1,) * SEQ),
    "window": Case(kv_heads=4, window=5),
    "window_over_parts": Case(window=19, batch=1),
    "window_of_one": Case(window=1),
    "window_beyond": Case(window=SEQ),
    "window_in_documents": Case(kv_heads=2, value_size=8, lengths=(11, 7, 14), window=6),
}


def tensors(case):
    """q, k, v, the output's gradient and the documents of whole sequences."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(case.heads, case.size), (case.kv_heads, case.size)]
    shapes += [(case.kv_heads, case.value_size), (case.heads, case.value_size)]
    made = [
        # as a model's projections lie in memory
        torch.randn(case.batch, SEQ, heads, size, dtype=torch.float64, generator=generator).transpose(1, 2)
        for heads, size in shapes
    ]
    document = None
    if case.lengths is not None:
        ids = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
        # sequences with other boundaries, and ids that come again
        document = torch.stack([ids.roll(3 * i) if i == 0 else ids.flip(0) for i in range(case.batch)])
    return [tensor.to(case.dtype) for tensor in made], document


def dense(case):
    """Output and gradients of q, k, v by a softmax over all scores, in fp64."""
    (q, k, v, grad), document = tensors(case)
    q, k, v = (tensor.double().requires_grad_() for tensor in (q, k, v))
    groups = case.heads // case.kv_heads
    at = torch.arange(SEQ)
    seen = (at <= at[:, None])[None]
    if case.window is not None:
        seen = seen & (at > at[:, None] - case.window)
    if document is not None:
        seen = seen & (document[:, :, None] == document[:, None])
    scale = case.size**-0.5 if case.scale is None else case.scale
    scores = q @ k.repeat_interleave(groups, 1).mT * scale
    out = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v.repeat_interleave(groups, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


FLASH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 4),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 2, 7),
}
"""Attention kernels, and which of their arguments are queries, keys and the causal flag."""

SENT = {
    "send": ("send", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
}
"""Collectives by torch's name: plan/traffic.py's, and which argument is its payload."""


class Recorder(TorchDispatchMode):
    """Pairs of query and key of every attention kernel, and launches and payload [B] of what is sent."""

    def __init__(self):
        super().__init__()
        self.pairs, self.launches, self.payload = [], Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in FLASH:
            query, key, causal = (args[place] if place < len(args) else False for place in FLASH[func])
            self.pairs.append(query.shape[2] * key.shape[2] / (2 if causal else 1))
        name = func.__name__.split(".")[0]
        if name in SENT:
            name, place = SENT[name]
            payload = args[place][0] if isinstance(args[place], list) else args[place]
            self.launches[name] += 1
            self.payload[name] += payload.nbytes
        return func(*args, **(kwargs or {}))


def save_kernels(context, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operation in FLASH else CheckpointPolicy.PREFER_RECOMPUTE


RECOMPUTE = {
    "none": lambda function, *args: function(*args),
    "full": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_kernels),
    ),
}


def attention_of_rank(attend, kind, case, recompute="none", group=None):
    """Positions of this rank, and its part of output and gradients."""
    (q, k, v, grad), document = tensors(case)
    at = positions(SEQ, dist.get_world_size(group), dist.get_rank(group), kind)
    q, k, v = (tensor[:, :, at].requires_grad_() for tensor in (q, k, v))
    document = None if document is None else slice_sequence(document, at)

    def attention(q, k, v):
        return attend(q, k, v, document, scale=case.scale, window=case.window)

    out = RECOMPUTE[recompute](attention, q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), grad[:, :, at])
    return at.numpy(), [tensor.detach().double().numpy() for tensor in (out, *grads)]


def cases_of_rank(kind, cases, recompute="none"):
    attend = build_attend(kind, dist.group.WORLD)
    return [attention_of_rank(attend, kind, case, recompute) for case in cases]


def worst_difference(parts, case):
    """Largest difference of output, dq, dk and dv on all ranks from the dense ones, as ``relative`` says."""
    found = []
    for i, expected in enumerate(dense(case)):
        whole = np.full(expected.shape, np.nan)
        for at, values in parts:
            whole[:, :, at] = values[i]
        assert not np.isnan(whole).any()
        found.append(relative(whole, expected.numpy()))
    return max(found)
