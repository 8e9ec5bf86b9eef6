"""What one rank holds of each unit: elements after tp or the expert axes split it, and after sharding.

A block with experts is two units, as torchtitan wraps it: the experts, which ep and etp split and the ranks
left over (expert_shard) shard, and the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Adapters, Job
from shardwright.model import ModelSpec
from shardwright.plan.accounting import gathered_bytes
from shardwright.plan.activations import ELEMENT_BYTES
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD, NO_ADAPTERS, Tensor, parameter_table
from shardwright.plan.table import ColumnMap, Floats, Ints, LayoutTable

EXPERT_BLOCK, EXPERTS = "expert_block", "experts"

TIED = "tied"
"""The first stage's copy of a matrix that is embedding and head; without a pipeline HEAD has the only one."""

UNIT_KINDS = (EMBEDDING, TIED, BLOCK, EXPERT_BLOCK, EXPERTS, HEAD)


class UnitElements(NamedTuple):
    """Elements of one unit on one rank; counts, in float64, which holds them exactly up to 2^53.

    ``shard`` is rank 0's, rows rounded up as FSDP pads them; ``padded`` what all shards are together.
    """

    whole: Floats
    shard: Floats
    padded: Floats
    last_share: float  # of the unit's last tensor in it

    def mapped(self, part: ColumnMap) -> "UnitElements":
        """The same with ``part`` of every column."""
        return UnitElements(part(self.whole), part(self.shard), part(self.padded), self.last_share)


Weight = Callable[[Tensor], float]
"""What an element of a tensor counts: 1, or its bytes."""


def unit_elements(
    model: ModelSpec,
    table: LayoutTable,
    weight: Weight = lambda tensor: 1.0,
    adapters: Adapters = NO_ADAPTERS,
) -> Mapping[str, UnitElements]:
    """Elements of every kind of unit, for every row, those of a tensor times its ``weight``; a kind the model
    has not is all zeros."""
    return weighted_elements(model, table, [weight], adapters)[0]


def weighted_elements(
    model: ModelSpec, table: LayoutTable, weights: Sequence[Weight], adapters: Adapters = NO_ADAPTERS
) -> list[Mapping[str, UnitElements]]:
    """The same for several weights at once."""
    alike = alike_tensors(model, adapters)
    found = {
        kind: _elements(
            alike[kind], model, table, table.expert_shard if kind == EXPERTS else table.shard, weights
        )
        for kind in UNIT_KINDS
    }
    return [{kind: units[n] for kind, units in found.items()} for n in range(len(weights))]


def factored_elements(
    model: ModelSpec, table: LayoutTable, weight: Weight, adapters: Adapters = NO_ADAPTERS
) -> Mapping[str, UnitElements]:
    """Elements of Adafactor's state of every kind of unit: of a matrix rows, split as they are, and columns,
    which every rank that shares the rows has; of a vector its own elements. Each times its tensor's weight.

    ``padded`` is not all shards together: columns are repeated.
    """
    found = {}
    for kind, unit in alike_tensors(model, adapters).items():
        degree = table.expert_shard if kind == EXPERTS else table.shard
        whole, held = np.zeros((1,) * degree.ndim), np.zeros((1,) * degree.ndim)
        for tensor, count in unit.groups:
            each = count * weight(tensor)
            whole = whole + each * _factors(tensor, model, table, np.ones_like(degree))
            held = held + each * _factors(tensor, model, table, degree)
        found[kind] = UnitElements(whole, held, held, 0.0)
    return found


def hidden_dim(tensor: Tensor) -> int:
    """Of stacked experts, the dim that tp does not split."""
    return 1 if tensor.splits.get("tp") == 2 else 2


def each_is_split(tensor: Tensor, experts: Floats | Ints | float, shard: Ints) -> NDArray[np.bool_]:
    """Whether a rank of ``shard`` has a part of each of its ``experts``, along the hidden size: where they
    are fewer than the ranks, which must divide it. Else it has whole ones."""
    if len(tensor.shape) < 3:
        return np.zeros((1,) * shard.ndim, dtype=np.bool_)
    return np.asarray((experts < shard) & (tensor.shape[hidden_dim(tensor)] % shard == 0))


def _factors(tensor: Tensor, model: ModelSpec, table: LayoutTable, shard: Ints) -> Floats:
    rows, width = local_shape(tensor, model, table.tp, table.ep, table.etp)
    if len(tensor.shape) == 1:
        return np.asarray(np.ceil(rows / shard))
    if len(tensor.shape) == 2:
        return np.asarray(np.ceil(rows / shard) + width)
    split = [np.where(tensor.splits.get("tp") == dim, table.etp, 1) for dim in (1, 2)]
    high, wide = (np.ceil(size / degree) for size, degree in zip(tensor.shape[1:], split, strict=True))
    few = each_is_split(tensor, rows, shard)
    dim = hidden_dim(tensor)
    one = high / np.where(dim == 1, shard, 1) + wide / np.where(dim == 2, shard, 1)
    return np.asarray(np.where(few, rows * one, np.ceil(rows / shard) * (high + wide)))


def gathered_units(
    model: ModelSpec, job: Job, table: LayoutTable, trained: Mapping[str, UnitElements]
) -> Mapping[str, UnitElements]:
    """The same with elements weighing the bytes that an all-gather moves; ``trained`` as they count."""
    if job.lora_rank:
        return unit_elements(model, table, lambda tensor: gathered_bytes(job, tensor), job.adapters)
    element = ELEMENT_BYTES[job.precision]
    return {
        kind: u._replace(shard=element * u.shard, padded=element * u.padded) for kind, u in trained.items()
    }


@cache
def unit_tensors(model: ModelSpec, adapters: Adapters = NO_ADAPTERS) -> Mapping[str, tuple[Tensor, ...]]:
    """The tensors of one unit of each kind; none of a kind that the model has not."""
    table = parameter_table(model, adapters)
    found: dict[str, tuple[Tensor, ...]] = dict.fromkeys(UNIT_KINDS, ())
    for unit in table.units:
        if unit.kind != BLOCK:
            found[unit.kind] = unit.tensors
            if model.tied_embeddings and unit.kind == HEAD:
                found[TIED] = unit.tensors[:1]
        elif model.moe is None or not model.moe.covers(unit.layers[0]):
            found[BLOCK] = unit.tensors
        else:
            found[EXPERTS] = tuple(tensor for tensor in unit.tensors if "ep" in tensor.splits)
            found[EXPERT_BLOCK] = tuple(tensor for tensor in unit.tensors if "ep" not in tensor.splits)
    return found


class Alike(NamedTuple):
    """Tensors of a unit of different shapes, splits and roles, how many there are of each, and the share of
    the unit's last one in it."""

    groups: tuple[tuple[Tensor, int], ...]
    last_share: float


@cache
def alike_tensors(model: ModelSpec, adapters: Adapters = NO_ADAPTERS) -> Mapping[str, Alike]:
    """``unit_tensors``, those of a kind together."""
    return {kind: _alike(tensors) for kind, tensors in unit_tensors(model, adapters).items()}


def _alike(tensors: tuple[Tensor, ...]) -> Alike:
    groups: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.shape, tensor.role, *sorted(tensor.splits.items()))
        groups.setdefault(key, []).append(tensor)
    share = tensors[-1].numel / sum(tensor.numel for tensor in tensors) if tensors else 0.0
    return Alike(tuple((group[0], len(group)) for group in groups.values()), share)


def _elements(
    unit: Alike,
    model: ModelSpec,
    table: LayoutTable,
    shard: Ints,
    weights: Sequence[Weight],
) -> list[UnitElements]:
    axes = (1,) * shard.ndim
    whole, held = np.zeros((2, len(weights), *axes))
    for tensor, count in unit.groups:
        rows, width = local_shape(tensor, model, table.tp, table.ep, table.etp)
        numel, kept = rows * width, np.ceil(rows / shard) * width
        if "ep" in tensor.splits:
            kept = np.where(each_is_split(tensor, rows, shard), numel / shard, kept)
        each = np.array([count * weight(tensor) for weight in weights]).reshape(-1, *axes)
        whole, held = whole + each * numel, held + each * kept
    return [UnitElements(w, h, h * shard, unit.last_share) for w, h in zip(whole, held, strict=True)]


def local_shape(
    tensor: Tensor, model: ModelSpec, tp: Ints, ep: Ints | int = 1, etp: Ints | int = 1
) -> tuple[Floats | float, Floats | float]:
    """Rows and elements of a row that a rank of ``tp``, or of ``ep`` x ``etp``, holds of a tensor.

    Key and value matrices keep at least one head a rank: with more ranks than heads they are repeated.
    """
    dim, total = tensor.splits.get("tp"), float(tensor.shape[0])
    width = tensor.numel / total
    if "ep" in tensor.splits:
        return np.ceil(total / ep), np.ceil(width / etp) if dim is not None else width
    if dim is None:
        return total, width
    if dim == 0:
        key_value = tensor.role == "attention" and total == model.kv_heads * model.head_size
        return np.maximum(np.ceil(total / tp), model.head_size if key_value else 0), width
    return total, np.ceil(width / tp)
