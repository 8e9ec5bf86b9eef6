"""Where a sharded tensor's parts lie: which groups split which dim, and sums over them.

Everything is read off a DTensor's own mesh and placements, so that it holds in any layout.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

Group = dist.ProcessGroup


class Split(NamedTuple):
    """A dim split over a group into equal parts of ``chunk``; the last ones may be shorter or empty.

    ``size``: of the dim before this split, on this rank; ``part``: after it.
    """

    dim: int
    size: int
    part: int
    ranks: int
    group: Group

    @property
    def chunk(self) -> int:
        """Size of all parts but the last ones."""
        return -(-self.size // self.ranks)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def splits(tensor: Tensor) -> tuple[Split, ...]:
    """How a tensor was split to give this rank's part, first split first; none for a plain tensor.

    Placements split from left to right, but a strided one (FSDP over a dim that tp or ep has split) comes
    after those to its right.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    plain = [axis for axis, placement in enumerate(placements) if type(placement) is Shard]
    strided = [axis for axis, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    sizes, found = list(tensor.shape), []
    for axis in (*plain, *reversed(strided)):
        ranks, dim = mesh.size(axis), placements[axis].dim
        if ranks > 1:
            chunk = -(-sizes[dim] // ranks)
            part = min(max(sizes[dim] - chunk * mesh.get_local_rank(axis), 0), chunk)
            found.append(Split(dim, sizes[dim], part, ranks, mesh.get_group(axis)))
            sizes[dim] = part
    assert tuple(sizes) == tuple(local(tensor).shape), f"{sizes} is not {tuple(local(tensor).shape)}"
    return tuple(found)


def split_groups(tensor: Tensor, dims: Iterable[int] | None = None) -> tuple[Group, ...]:
    """Groups over which ``dims`` of a tensor are split; over which any is, without ``dims``."""
    wanted = range(tensor.ndim) if dims is None else [dim % tensor.ndim for dim in dims]
    return tuple(split.group for split in splits(tensor) if split.dim in wanted)


def without_dim(placements: Sequence[Placement], dim: int) -> tuple[Placement, ...]:
    """Placements of what is left of a tensor when ``dim`` is summed over everywhere."""

    def moved(placement: Placement) -> Placement:
        if not isinstance(placement, Shard | _StridedShard) or placement.dim == dim:
            return Replicate()
        to = placement.dim - (placement.dim > dim)
        if isinstance(placement, _StridedShard):
            return _StridedShard(to, split_factor=placement.split_factor)
        return Shard(to)

    return tuple(moved(placement) for placement in placements)


def zeros_without_dim(tensor: Tensor, dim: int) -> Tensor:
    """Zeros of the shape of ``tensor`` less ``dim``, split as its other dims are."""
    dim %= tensor.ndim
    part = local(tensor)
    zeros = part.new_zeros((*part.shape[:dim], *part.shape[dim + 1 :]))
    if not isinstance(tensor, DTensor):
        return zeros
    shape = torch.Size((*tensor.shape[:dim], *tensor.shape[dim + 1 :]))
    strides = torch.empty(shape, device="meta").stride()
    placements = without_dim(tensor.placements, dim)
    return DTensor.from_local(zeros, tensor.device_mesh, placements, shape=shape, stride=strides)


def members(group: Group) -> tuple[int, ...]:
    """Global ranks of a group: groups of the same ranks are one, whichever mesh they come from."""
    return tuple(dist.get_process_group_ranks(group))


def inner_first(groups: Iterable[Group]) -> list[Group]:
    """Different groups, those of neighbouring ranks first: the same order on all ranks of them."""
    found = {members(group): group for group in reversed(list(groups))}
    return [found[ranks] for ranks in sorted(found, key=lambda ranks: (ranks[1] - ranks[0], len(ranks)))]


def sum_over_groups(tensors: Sequence[Tensor], groups: Sequence[Sequence[Group]]) -> None:
    """Sum each local tensor over all of its ``groups``, in place.

    One all-reduce for each different group, of all that it sums: every rank of a group must hold the same
    tensors in the same order, as the ranks of a stage do.
    """
    ranks = [{members(group) for group in own} for own in groups]
    for group in inner_first(group for own in groups for group in own):
        summed = [t for t, own in zip(tensors, ranks, strict=True) if members(group) in own]
        flat = torch.cat([tensor.reshape(-1) for tensor in summed])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in summed])
        for tensor, part in zip(summed, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
