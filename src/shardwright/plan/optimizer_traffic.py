"""What optimizers send that look at whole matrices, rows or columns: Muon and Adafactor.

run/muon.py and run/adafactor.py issue these flows, once a step; payload as rank 0 of each group has it.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from shardwright.axes import joined_axis
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.accounting import accounting_row, is_factored, is_orthogonalised
from shardwright.plan.activations import ELEMENT_BYTES
from shardwright.plan.params import Tensor
from shardwright.plan.shards import each_is_split, hidden_dim, unit_tensors
from shardwright.plan.table import Floats, Ints, LayoutTable

NUMBER_BYTES = 8
"""Sums of a whole matrix are fp64."""


class Exchange(NamedTuple):
    """Collectives of one kind on one axis, a row a layout."""

    axis: str
    collective: str
    degree: Ints
    launches: Floats
    payload_bytes: Floats


class Split(NamedTuple):
    """A dim split over an axis; a degree of 1 splits nothing."""

    axis: str
    degree: Ints
    dim: int


def optimizer_exchanges(
    model: ModelSpec, job: Job, table: LayoutTable, copies: Mapping[str, Floats]
) -> Iterator[Exchange]:
    """Exchanges of the optimizer's step; ``copies``: units of each kind on a rank. None for others."""
    if job.optimizer == "muon":
        yield from _muon_exchanges(model, job, table, copies)
    elif job.optimizer == "adafactor":
        yield from _adafactor_exchanges(model, job, table, copies)


def tensor_splits(tensor: Tensor, table: LayoutTable) -> list[Split]:
    """What splits a tensor, in the order in which it is undone; FSDP splits rows after tp and ep have, and
    each expert where a rank has fewer of them than there are shards."""
    tp = tensor.splits.get("tp")
    if "ep" in tensor.splits:
        few = each_is_split(tensor, np.ceil(tensor.shape[0] / table.ep), table.expert_shard)
        found = [
            Split("expert_shard", np.where(few, 1, table.expert_shard), 0),
            Split("expert_shard", np.where(few, table.expert_shard, 1), hidden_dim(tensor)),
            Split("ep", table.ep, 0),
        ]
        return found if tp is None else [*found, Split("tp", table.etp, tp)]
    shard = Split(joined_axis(("dp_shard", "cp")) if (table.cp > 1).any() else "dp_shard", table.shard, 0)
    if tp is None:
        return [shard]
    split = Split("tp", table.tp, tp)
    return [shard, split] if tp == 0 else [split, shard]  # different dims: as the placements stand


def local_sizes(tensor: Tensor, parts: list[Split]) -> list[Floats]:
    """The largest part of each dim that a rank holds."""
    sizes: list[Floats] = [np.asarray(float(size)) for size in tensor.shape]
    for split in reversed(parts):
        sizes[split.dim] = np.ceil(sizes[split.dim] / split.degree)
    return sizes


def _held(model: ModelSpec, job: Job, copies: Mapping[str, Floats]) -> Iterator[tuple[Tensor, Floats]]:
    """Tensors of every kind of unit, and how many of each a rank has."""
    for kind, tensors in unit_tensors(model, job.adapters).items():
        for tensor in tensors:
            yield tensor, copies[kind]


# Muon


def _muon_exchanges(
    model: ModelSpec, job: Job, table: LayoutTable, copies: Mapping[str, Floats]
) -> Iterator[Exchange]:
    """There and back over each axis that splits a matrix, for as many matrices at once as ranks split them.

    Matrices of one shape that are split alike go together: without tp, also those that it would split
    differently.
    """
    for by_dim, present in ((True, table.tp > 1), (False, table.tp == 1)):
        kinds: dict[tuple[object, ...], tuple[Tensor, Floats]] = {}
        for tensor, count in _held(model, job, copies):
            if not is_orthogonalised(tensor):
                continue
            stacked = len(tensor.shape) == 3
            key = (tensor.shape[-2:], stacked, tensor.splits.get("tp") if by_dim else None)
            parts = tensor_splits(tensor, table)
            each = count * local_sizes(tensor, parts)[0] if stacked else count
            before = kinds[key][1] if key in kinds else 0.0
            kinds[key] = tensor, before + each
        for tensor, count in kinds.values():
            for found in _trades(tensor, count, ELEMENT_BYTES[job.precision], table):
                yield found._replace(
                    launches=np.where(present, found.launches, 0),
                    payload_bytes=np.where(present, found.payload_bytes, 0),
                )


def _trades(tensor: Tensor, count: Floats, element: int, table: LayoutTable) -> Iterator[Exchange]:
    """Exchanges of ``count`` matrices like ``tensor``, or like each that is stacked in it."""
    before = len(tensor.shape) - 2
    all_parts = tensor_splits(tensor, table)
    parts = [split for split in all_parts if split.dim >= before]
    sizes = local_sizes(tensor, all_parts)[before:]
    slots: Floats = np.ones((1,) * table.tp.ndim)
    for split in parts:
        slots = slots * split.degree
    rounds = np.ceil(count / slots)
    for n, split in enumerate(parts):
        dim = split.dim - before
        outer = [other for other in parts[n + 1 :] if other.dim == split.dim]
        payload = slots * sizes[0] * sizes[1] * element
        launches = np.where(split.degree > 1, 2 * rounds, 0)
        yield Exchange(split.axis, "all_to_all", split.degree, launches, launches * payload)
        whole: Floats = np.asarray(float(tensor.shape[split.dim]))
        for other in reversed(outer):
            whole = np.ceil(whole / other.degree)
        sizes[dim] = whole
        slots = slots / split.degree


# Adafactor


def _adafactor_exchanges(
    model: ModelSpec, job: Job, table: LayoutTable, copies: Mapping[str, Floats]
) -> Iterator[Exchange]:
    """Two all-reduces over each axis: sums of squares along the rows or columns that it splits; then the
    squares of each matrix or vector, and of a matrix its row means."""
    moment = accounting_row(job.accounting, job.precision).moment
    sums: dict[str, tuple[Ints, Floats, Floats]] = {}
    for tensor, count in _held(model, job, copies):
        parts = tensor_splits(tensor, table)
        sizes = local_sizes(tensor, parts)
        factored = is_factored(tensor)
        stacked = sizes[0] if len(tensor.shape) == 3 else 1.0
        for split in parts:
            last = split.dim - len(tensor.shape)
            if factored and last < -2:
                continue
            means = count * stacked * sizes[-1 if last == -2 else -2] * moment if factored else 0.0 * count
            numbers = count * stacked * (2 if factored and last == -2 else 1) * NUMBER_BYTES
            wide = split.degree > 1
            degree, a, b = sums.get(split.axis, (split.degree, 0.0, 0.0))
            sums[split.axis] = (
                np.maximum(degree, split.degree),
                a + np.where(wide, means, 0),
                b + np.where(wide, numbers, 0),
            )
    for axis, (degree, means, numbers) in sums.items():
        launches = (np.asarray(means) > 0).astype(float) + (np.asarray(numbers) > 0)
        yield Exchange(axis, "all_reduce", degree, launches, means + numbers)
