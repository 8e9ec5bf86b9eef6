"""Copies of tokens on their way to the experts and back.

N tokens of this rank, H hidden, K experts of a token, C copies (N*K) sorted by expert, P copies that this
rank's experts get, sorted by expert, E experts, R ranks of ep, L experts of one of them (E/R).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.run.kernels import row_slices
from shardwright.run.router import Routed
from shardwright.run.routing import Routing, Splits


@torch.library.custom_op("shardwright::sum_copies", mutates_args=())
def _sum_copies(copy_CH: Tensor, order_C: Tensor, top_k: int) -> Tensor:
    """Sum of each token's copies, rounded once, in the same order on every device."""
    place_C = torch.empty_like(order_C)
    place_C[order_C] = torch.arange(len(order_C), device=order_C.device)
    out_NH = copy_CH.new_empty((len(order_C) // top_k, copy_CH.shape[1]))
    for rows in row_slices(len(out_NH), top_k * copy_CH.shape[1] * copy_CH.element_size()):
        places = place_C[rows.start * top_k : rows.stop * top_k]
        out_NH[rows] = copy_CH[places].unflatten(0, (-1, top_k)).sum(1)
    return out_NH


@_sum_copies.register_fake
def _(copy_CH, order_C, top_k):
    return copy_CH.new_empty((len(order_C) // top_k, copy_CH.shape[1]))


class SpreadCopies(torch.autograd.Function):
    """Each token's vector once for each of its experts, sorted by expert; keeps the order alone."""

    @staticmethod
    def forward(ctx, x_NH: Tensor, order_C: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_C)
        ctx.top_k = top_k
        return x_NH[order_C // top_k]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_CH: Tensor):
        return _sum_copies(grad_CH, ctx.saved_tensors[0], ctx.top_k), None, None


class SumCopies(torch.autograd.Function):
    """What a token's experts made of it, added up; keeps the order alone."""

    @staticmethod
    def forward(ctx, copy_CH: Tensor, order_C: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_C)
        ctx.top_k = top_k
        return _sum_copies(copy_CH, order_C, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NH: Tensor):
        return grad_NH[ctx.saved_tensors[0] // ctx.top_k], None, None


class Exchange(torch.autograd.Function):
    """One all-to-all of rows, ``send`` of them to each rank and ``receive`` from it; backward the reverse."""

    @staticmethod
    def forward(ctx, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out


class Regroup(torch.autograd.Function):
    """Rows that lie in ``lines`` of pieces, one piece a column, laid column by column; keeps nothing."""

    @staticmethod
    def forward(ctx, rows: Tensor, lines: list[list[int]]) -> Tensor:
        ctx.columns = [list(column) for column in zip(*lines, strict=True)]
        return _regroup(rows, lines)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _regroup(grad, ctx.columns), None


def _regroup(rows: Tensor, lines: Sequence[Sequence[int]]) -> Tensor:
    width = len(lines[0])
    pieces = rows.split([size for line in lines for size in line])
    return torch.cat([piece for column in range(width) for piece in pieces[column::width]])


class Paths(NamedTuple):
    """How the copies of one microbatch travel; everything the way back needs."""

    order: Tensor  # C: copy n*K + k of token n
    top_k: int
    splits: Splits
    group: dist.ProcessGroup | None

    @property
    def counts(self) -> list[int]:
        """Copies that each expert of this rank gets."""
        return [sum(column) for column in zip(*self.splits.received, strict=True)]

    @property
    def send(self) -> list[int]:
        """Copies to each rank."""
        local = len(self.splits.received[0])
        sent = self.splits.sent
        return [sum(sent[start : start + local]) for start in range(0, len(sent), local)]

    @property
    def receive(self) -> list[int]:
        """Copies from each rank."""
        return [sum(line) for line in self.splits.received]


def plan_paths(routed: Routed, top_k: int, routing: Routing, group: dist.ProcessGroup | None) -> Paths:
    """Tell the ranks of ``group`` how many copies their experts get; None: this rank has all experts.

    One all-to-all of E int64, and the only point where the device is waited for.
    """
    sent_E, rank = routed.counts, 0
    received_RL = sent_E[None]
    if group is not None:
        rank = group.rank()
        received_RL = torch.empty_like(sent_E).view(group.size(), -1)
        dist.all_to_all_single(received_RL.view(-1), sent_E, group=group)
    splits = routing.splits(len(routed.order), sent_E, received_RL, rank)
    return Paths(routed.order, top_k, splits, group)


def to_experts(rows_C: Tensor, paths: Paths) -> Tensor:
    """Something of every copy, sorted by expert here, brought to its expert's rank and sorted by expert."""
    if paths.group is None:
        return rows_C
    there = Exchange.apply(rows_C, paths.send, paths.receive, paths.group)
    return Regroup.apply(there, paths.splits.received)


def dispatch(x_NH: Tensor, paths: Paths) -> Tensor:
    """Copies of the tokens of all ranks that this rank's experts work on, P x H, sorted by expert."""
    return to_experts(SpreadCopies.apply(x_NH, paths.order, paths.top_k), paths)


def combine(out_PH: Tensor, paths: Paths) -> Tensor:
    """What the experts made of this rank's tokens, N x H; the weights are in it already."""
    if paths.group is not None:
        columns = [list(column) for column in zip(*paths.splits.received, strict=True)]
        out_PH = Exchange.apply(Regroup.apply(out_PH, columns), paths.receive, paths.send, paths.group)
    return SumCopies.apply(out_PH, paths.order, paths.top_k)
