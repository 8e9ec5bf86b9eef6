"""Where ranks of tp meet: before matrices split by their outputs, and behind those split by their inputs.

Collectives are functional ones, so that ``torch.compile`` can fuse them with the products beside them (async
tensor parallel). plan/traffic.py predicts each.

B batch, S sequence, E hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SEQUENCE = 1
"""Dim of the sequence in activations."""


class Meeting(NamedTuple):
    """The ranks of tp, and whether the stream between the parts of a block is split by sequence over them."""

    group: str  # name of the process group
    ranks: int
    sequence_parallel: bool

    def enter(self, x: Tensor) -> Tensor:
        """The whole stream, as every rank's matrices read it; gradients of all ranks are summed."""
        return (Gather if self.sequence_parallel else Copy).apply(x, self)

    def join(self, x: Tensor) -> Tensor:
        """The sum of what the ranks made, or this rank's part of it."""
        return (Scatter if self.sequence_parallel else Sum).apply(x, self)


def summed(x: Tensor, meeting: Meeting) -> Tensor:
    """Sum over the ranks."""
    out = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", meeting.group)
    return torch.ops._c10d_functional.wait_tensor(out)


def gathered(x_BSE: Tensor, meeting: Meeting) -> Tensor:
    """The parts of all ranks, joined along the sequence."""
    parts = torch.ops._c10d_functional.all_gather_into_tensor(
        x_BSE.contiguous(), meeting.ranks, meeting.group
    )
    parts = torch.ops._c10d_functional.wait_tensor(parts)
    if x_BSE.shape[0] == 1:
        return parts.view(1, -1, *x_BSE.shape[2:])
    return torch.cat(parts.chunk(meeting.ranks), SEQUENCE)


def scattered(x_BSE: Tensor, meeting: Meeting) -> Tensor:
    """This rank's part of the sequence, summed over all ranks."""
    if x_BSE.shape[0] == 1:
        parts = x_BSE.contiguous().view(meeting.ranks, -1, *x_BSE.shape[2:])
    else:
        parts = torch.cat(x_BSE.chunk(meeting.ranks, SEQUENCE))
    own = torch.ops._c10d_functional.reduce_scatter_tensor(parts, "sum", meeting.ranks, meeting.group)
    return torch.ops._c10d_functional.wait_tensor(own)


class Copy(torch.autograd.Function):
    """The stream as it is; its gradient is summed."""

    @staticmethod
    def forward(ctx, x: Tensor, meeting: Meeting) -> Tensor:
        ctx.meeting = meeting
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return summed(grad, ctx.meeting), None


class Sum(torch.autograd.Function):
    """The sum over the ranks; its gradient is the same on all."""

    @staticmethod
    def forward(ctx, x: Tensor, meeting: Meeting) -> Tensor:
        return summed(x, meeting)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad, None


class Gather(torch.autograd.Function):
    """Parts of the sequence to the whole; gradients are summed and scattered."""

    @staticmethod
    def forward(ctx, x: Tensor, meeting: Meeting) -> Tensor:
        ctx.meeting = meeting
        return gathered(x, meeting)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return scattered(grad, ctx.meeting), None


class Scatter(torch.autograd.Function):
    """Sum over the ranks, a part of the sequence each; gradients are gathered."""

    @staticmethod
    def forward(ctx, x: Tensor, meeting: Meeting) -> Tensor:
        ctx.meeting = meeting
        return scattered(x, meeting)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return gathered(grad, ctx.meeting), None
