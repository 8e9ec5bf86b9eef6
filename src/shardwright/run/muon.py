"""Muon on sharded parameters: matrices are made orthogonal whole, so that no layout changes the update.

B matrices at once, R rows, C columns. torch's own iterates on the shards, in bf16, and drifts from one rank.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim.adamw import adamw

from shardwright.run.shards import Split, local, members, splits

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration. Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon."""

ITERATIONS = 5

RMS_OF_ADAMW = 0.2
"""Root mean square of an AdamW update, which Muon's is scaled to: one learning rate and decay serve both.
Source: Liu et al. 2025 (Moonlight), arXiv:2502.16982, section 2.2."""

EPSILON = 1e-7  # added to a matrix's norm, so that a zero gradient stays zero


def orthogonalised(x_BRC: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, about: singular values end between 0.7 and 1.2.

    Source: Jordan et al. 2024.
    """
    a, b, c = COEFFICIENTS
    wide = x_BRC.shape[-2] > x_BRC.shape[-1]
    x = x_BRC.mT if wide else x_BRC
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if wide else x


class Muon(torch.optim.Optimizer):
    """Muon on groups with ``orthogonal``, AdamW on the others.

    Matrices are those of the last two dims: stacked experts are made orthogonal one by one. What splits a
    matrix itself is undone by an all-to-all over each group, of as many matrices as ranks: every rank gets
    one of them whole, iterates, and sends the parts back. Experts that are only shared out need none.
    plan/optimizer_traffic.py predicts the exchanges.

    Args: ``compute``: type of exchange and iteration; that of the parameters if None.

    Source: Jordan et al. 2024; update scale and decay of arXiv:2502.16982.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        compute: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "orthogonal": False,
        }  # fmt: skip
        super().__init__(groups, defaults)
        self.compute = compute

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if held and not group["orthogonal"]:
                self._adamw_step(held, group)
                continue
            for kind, parameters in _by_kind(held):
                self._orthogonal_step(kind, parameters, group)

    def _orthogonal_step(self, kind: "_Kind", parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        rate = group["lr"]
        scale = rate * RMS_OF_ADAMW * max(kind.shape) ** 0.5
        for parts, updates in kind.updates(self._parts(parameters, kind, group)):
            for part, update in zip(parts, updates, strict=True):
                part.mul_(1 - rate * group["weight_decay"]).sub_(update.to(part.dtype), alpha=scale)

    def _parts(
        self, parameters: Sequence[Tensor], kind: "_Kind", group: dict[str, Any]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's parts and their directions: one by one if they travel, else as they are stacked."""
        for parameter in parameters:
            part, direction = local(parameter), self._direction(parameter, group["momentum"])
            if kind.splits:
                yield from zip(_matrices(part), _matrices(direction), strict=True)
            else:
                yield part, direction

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        """Gradient and its mean, looked ahead as Nesterov does."""
        state, grad = self.state[parameter], local(parameter.grad)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = local(state["momentum_buffer"]).lerp_(grad, 1 - momentum)
        return grad.lerp(mean, momentum).to(self.compute or grad.dtype)

    def _adamw_step(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                device = local(parameter).device  # the fused kernel counts steps where it runs
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
        adamw(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip


class _Kind(NamedTuple):
    """Matrices of one shape that are split alike. ``splits``: of their rows (dim 0), columns (dim 1)."""

    shape: tuple[int, int]
    splits: tuple[Split, ...]

    @property
    def ranks(self) -> int:
        """Ranks that split a matrix."""
        return math.prod(split.ranks for split in self.splits)

    def updates(
        self, parts: Iterator[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Parts of parameters with what is to be made of them, as many at a time as ranks split them."""
        while batch := list(itertools.islice(parts, self.ranks)):
            parameters, directions = zip(*batch, strict=True)
            yield (
                parameters,
                self._whole_update(directions)
                if self.splits
                else [orthogonalised(direction) for direction in directions],
            )

    def _whole_update(self, directions: Sequence[Tensor]) -> Sequence[Tensor]:
        """Parts of the orthogonal matrices of which ``directions`` are this rank's parts."""
        empty = self.ranks - len(directions)
        x_BRC = functional.pad(torch.stack(list(directions)), (0, 0, 0, 0, 0, empty))
        for split in reversed(self.splits):
            x_BRC = _joined(x_BRC, split)
        x_BRC = orthogonalised(x_BRC)
        for split in self.splits:
            x_BRC = _parted(x_BRC, split)
        return x_BRC[: len(directions)].unbind()


def _by_kind(parameters: Sequence[Tensor]) -> Iterator[tuple[_Kind, list[Tensor]]]:
    """Parameters by shape and split of their matrices, in the order of the first: the same on all ranks."""
    found: dict[tuple[object, ...], tuple[_Kind, list[Tensor]]] = {}
    for parameter in parameters:
        before = parameter.ndim - 2
        own = tuple(
            split._replace(dim=split.dim - before) for split in splits(parameter) if split.dim >= before
        )
        shape = (parameter.shape[-2], parameter.shape[-1])
        key = (shape, tuple((split.dim, members(split.group)) for split in own))
        found.setdefault(key, (_Kind(shape, own), []))[1].append(parameter)
    yield from found.values()


def _matrices(stack: Tensor) -> Sequence[Tensor]:
    """Views of the matrices of the last two dims; ``view`` would refuse, never copy."""
    return stack.view(math.prod(stack.shape[:-2]), *stack.shape[-2:]).unbind()


def _joined(x_BRC: Tensor, split: Split) -> Tensor:
    """Parts of B matrices traded for larger parts of B / ranks of them."""
    dim = split.dim + 1
    sent = _fill(x_BRC, dim, split.chunk).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=split.group)
    by_source = got.unflatten(0, (split.ranks, -1)).movedim(0, dim)
    return by_source.flatten(dim, dim + 1).narrow(dim, 0, split.size)


def _parted(x_BRC: Tensor, split: Split) -> Tensor:
    """The reverse of ``_joined``."""
    dim = split.dim + 1
    by_target = _fill(x_BRC, dim, split.ranks * split.chunk).unflatten(dim, (split.ranks, split.chunk))
    sent = by_target.movedim(dim, 0).flatten(0, 1).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=split.group)
    return got.narrow(dim, 0, split.part)


def _fill(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with zeros behind it up to ``size`` along ``dim``, which is one of the last two."""
    missing = size - x.shape[dim]
    return functional.pad(x, (0, missing) if dim == x.ndim - 1 else (0, 0, 0, missing))
