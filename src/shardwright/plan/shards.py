"""What one rank holds of each FSDP unit: elements after tp has split it, and after the shard axes too."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.model import ModelSpec
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD, Tensor, Unit, parameter_table
from shardwright.plan.table import Floats, Ints, LayoutTable, distinct

UNIT_KINDS = (EMBEDDING, BLOCK, HEAD)


class UnitElements(NamedTuple):
    """Elements of one unit on one rank; counts, in float64, which holds them exactly up to 2^53.

    ``shard`` is rank 0's, rows rounded up as FSDP pads them; ``padded`` what all shards are together.
    """

    whole: Floats
    shard: Floats
    padded: Floats
    last_share: float  # of the unit's last tensor in it


def unit_elements(
    model: ModelSpec, table: LayoutTable, weight: Callable[[Tensor], float] = lambda tensor: 1.0
) -> Mapping[str, UnitElements]:
    """Elements of every kind of unit, for every row, those of a tensor times its ``weight``; a kind the model
    has not is all zeros."""
    parameters = parameter_table(model)
    cases, row = distinct(table.shard, table.tp)
    shard, tp = np.array(cases, dtype=np.int64).reshape(-1, 2).T
    return {kind: _elements(parameters.unit(kind), model, shard, tp, row, weight) for kind in UNIT_KINDS}


def _elements(
    unit: Unit,
    model: ModelSpec,
    shard: Ints,
    tp: Ints,
    row: NDArray[np.intp],
    weight: Callable[[Tensor], float],
) -> UnitElements:
    whole, held = np.zeros(len(shard)), np.zeros(len(shard))
    for tensor in unit.tensors:
        rows, width = local_shape(tensor, model, tp)
        width = width * weight(tensor)
        whole += rows * width
        held += np.ceil(rows / shard) * width
    share = unit.tensors[-1].numel / unit.numel if unit.tensors else 0.0
    return UnitElements(whole[row], held[row], (held * shard)[row], share)


def local_shape(tensor: Tensor, model: ModelSpec, tp: Ints) -> tuple[Floats, Floats]:
    """Rows and elements of a row that a rank of ``tp`` holds of a tensor.

    Key and value matrices keep at least one head a rank: with more ranks than heads they are repeated.
    """
    dim = tensor.splits.get("tp")
    total = tensor.shape[0]
    width = np.full(len(tp), tensor.numel / total)
    if dim is None:
        return np.full(len(tp), float(total)), width
    if dim == 0:
        key_value = tensor.role == "attention" and total == model.kv_heads * model.head_size
        return np.maximum(np.ceil(total / tp), model.head_size if key_value else 0), width
    return np.full(len(tp), float(total)), np.ceil(width / tp)
