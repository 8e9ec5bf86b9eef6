"""Global norm of the gradients and clipping: one number in every layout."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from shardwright.run.shards import Group, inner_first, local, members, split_groups


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[Tensor],
    extra_groups: Sequence[Group] = (),
    counted: Callable[[Tensor], bool] = lambda parameter: True,
) -> Tensor:
    """Global 2-norm of the parameters' gradients, summed in fp64. Scalar, on every rank.

    A parameter counts once whatever it is split over or repeated on: its squares are summed over the groups
    that split it, read off the parameter, so that a rank without its gradient joins all the same. One
    all-reduce of a few numbers for each different group, inner groups first, then one for each of
    ``extra_groups`` (pipeline ranks, which hold other parameters). ``counted`` says no to a parameter that
    another rank of ``extra_groups`` counts (a tied embedding). plan/traffic.py:scalar_flows predicts it.
    """
    parameters = list(parameters)
    reduce_partial_gradients(parameters)
    sums: dict[frozenset[tuple[int, ...]], Tensor] = {}
    groups: dict[tuple[int, ...], Group] = {}
    for alike in _split_alike(parameters):
        own = {members(group): group for group in split_groups(alike[0])}
        groups = own | groups
        _add(sums, frozenset(own), _square_sum([p for p in alike if counted(p)], alike[0]))
    for group in inner_first(groups.values()):
        _sum_over(sums, group)
    total = sums.pop(frozenset(), None)
    if total is None:
        raise ValueError("no parameters to take the norm of, one at least is needed: pass the model's")
    for group in extra_groups:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def _sum_over(sums: dict[frozenset[tuple[int, ...]], Tensor], group: Group) -> None:
    """Sum over ``group`` what it splits; what then is split over the same groups is one number."""
    ranks = members(group)
    split = [key for key in sums if ranks in key]
    summed = torch.stack([sums.pop(key) for key in split])
    dist.all_reduce(summed, group=group)
    for key, square in zip(split, summed.unbind(), strict=True):
        _add(sums, key - {ranks}, square)


def _add(sums: dict[frozenset[tuple[int, ...]], Tensor], key: frozenset[tuple[int, ...]], x: Tensor) -> None:
    sums[key] = sums[key] + x if key in sums else x


def reduce_partial_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum gradients that every rank of a group holds a part of (tp without FSDP leaves those of norms so)."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements):
            parameter.grad = grad.redistribute(placements=parameter.placements)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], norm: float, clip_norm: float) -> None:
    """Scale all gradients so that their global norm is at most ``clip_norm``; 0 leaves them."""
    if clip_norm <= 0 or norm <= clip_norm:
        return
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(gradients, clip_norm / norm)


def _split_alike(parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Parameters by mesh and placements, on which the groups that split them depend."""
    found: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        split = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        found.setdefault(split, []).append(parameter)
    return found.values()


def _square_sum(parameters: Sequence[Tensor], like: Tensor) -> Tensor:
    """Of the gradients on this rank, on the device of ``like``."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=local(like).device)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()
