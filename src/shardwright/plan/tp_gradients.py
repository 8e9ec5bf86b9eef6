"""Gradients that ranks of tp add up once a step: of tensors that each holds, and finds a share of.

run/tp.py:sum_shares sends them, one all-reduce for each stage and group.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.accounting import is_trained
from shardwright.plan.activations import WIDE_BYTES
from shardwright.plan.names import naming
from shardwright.plan.optimizer_traffic import Exchange
from shardwright.plan.params import Tensor
from shardwright.plan.shards import UnitElements, weighted_elements
from shardwright.plan.table import Floats, Ints, LayoutTable

NORM_BYTES = 8
"""The part of the squared gradient norm that lies in key/value heads fewer than ranks, fp64."""


def shared_gradients(
    model: ModelSpec, job: Job, table: LayoutTable, copies: Mapping[str, Floats]
) -> Iterator[Exchange]:
    """``copies``: units of each kind on a rank.

    With sp every tensor that tp leaves whole is found in shares; without it those that work on a rank's own
    heads or columns. Key/value heads fewer than the ranks are added up over the copies of each.
    """

    if (table.tp == 1).all():
        return
    names = naming(model)
    branches = (f".{names.attention}", f".{names.feed_forward}")
    matrices = (*names.attention_matrices, *names.matrices)
    behind = tuple(f".{name}.bias" for role, name in matrices if role in ("out", "down"))
    keys = tuple(f".{name}." for role, name in names.attention_matrices if role in ("key", "value"))

    def whole(tensor: Tensor) -> float:
        split = "tp" in tensor.splits or "ep" in tensor.splits
        return float(not split and is_trained(job, tensor))

    def inside(tensor: Tensor) -> float:
        own = any(branch in tensor.name for branch in branches) and not tensor.name.endswith(behind)
        return whole(tensor) if own else 0.0

    def key_or_value(tensor: Tensor) -> float:
        return float(any(key in tensor.name for key in keys) and is_trained(job, tensor))

    def bytes_of(units: Mapping[str, UnitElements]) -> Floats:
        held = [
            copies[kind] * np.where(table.zero_stage > 0, unit.shard, unit.whole)
            for kind, unit in units.items()
            if unit.whole.any()
        ]
        return WIDE_BYTES[job.precision] * np.asarray(sum(held, np.zeros((1,) * table.pp.ndim)))

    found = weighted_elements(model, table, [whole, inside, key_or_value], job.adapters)
    payload = np.where(table.sp == 1, bytes_of(found[0]), bytes_of(found[1]))
    yield Exchange("tp", "all_reduce", table.tp, payload * 0 + table.chunks, payload)
    if (table.tp > model.kv_heads).any():
        payload = bytes_of(found[2])
        degree: Ints = np.maximum(table.tp // model.kv_heads, 1)
        yield Exchange("tp", "all_reduce", degree, payload * 0 + table.chunks, payload)
        heads = np.where(table.tp > model.kv_heads, model.kv_heads, 1)
        once = np.where(payload > 0, 1.0, 0.0)
        yield Exchange("tp", "all_reduce", heads, once, NORM_BYTES * once)
