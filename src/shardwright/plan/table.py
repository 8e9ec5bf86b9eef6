"""A table of layouts as a struct of arrays: one layout is a row, and every formula takes columns."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.axes import EXPERT_AXES, MESH_ORDER, MESH_ORDERS
from shardwright.errors import LayoutError
from shardwright.layout import (
    CONTEXT_KINDS,
    KEPT_BY_SELECTIVE,
    OFFLOAD_KINDS,
    RECOMPUTE_KINDS,
    SCHEDULE_NAMES,
    Layout,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


PLAIN_COLUMNS = (
    "chunks", "zero_stage", "micro_batch", "microbatches", "recompute_every", "loss_chunks",
)  # fmt: skip
"""Columns that stand in a Layout as they are, besides the degrees."""


class LayoutTable(NamedTuple):
    """Columns of equal length.

    ``cp_kind``, ``schedule``, ``recompute`` and ``offload`` index the tuples of layout.py, ``order`` those of
    axes.py; ``ends`` is how many layers the first and the last stage have less than the even split gives.
    """

    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    etp: Ints
    order: Ints
    sp: Ints
    cp_kind: Ints
    schedule: Ints
    chunks: Ints
    ends: Ints
    zero_stage: Ints
    micro_batch: Ints
    microbatches: Ints
    recompute: Ints
    recompute_every: Ints
    loss_chunks: Ints
    offload: Ints

    @property
    def rows(self) -> int:
        """Number of layouts."""
        return len(self.dp_shard)

    @property
    def dp(self) -> Ints:
        """Ranks that hold different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard(self) -> Ints:
        """Ranks over which parameters, gradients and optimizer state are split."""
        return self.dp_shard * self.cp

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "LayoutTable":
        """The rows of an index or a mask."""
        return LayoutTable(*(column[index] for column in self))

    def wide(self) -> "LayoutTable":
        """The same with 64-bit columns, as formulas take them."""
        return LayoutTable(*(column.astype(np.int64) for column in self))

    def layout(self, row: int, layers: int) -> Layout:
        """One row as a Layout of a model of ``layers``."""
        value = {name: int(column[row]) for name, column in zip(self._fields, self, strict=True)}
        kind = RECOMPUTE_KINDS[value["recompute"]]
        stages = value["pp"] * value["chunks"]
        degrees = {name: value[name] for name in (*MESH_ORDER, *EXPERT_AXES, *PLAIN_COLUMNS)}
        return Layout(
            **degrees,
            order=MESH_ORDERS[value["order"]],
            offload=OFFLOAD_KINDS[value["offload"]],
            sp=bool(value["sp"]),
            cp_kind=CONTEXT_KINDS[value["cp_kind"]],
            schedule=SCHEDULE_NAMES[value["schedule"]],
            stage_layers=stage_layers(layers, stages, value["ends"]) if stages > 1 else (),
            recompute=kind,
            kept=KEPT_BY_SELECTIVE if kind == "selective" else (),
        )


def distinct(*columns: Ints) -> tuple[list[tuple[int, ...]], NDArray[np.intp]]:
    """The different rows of ``columns``, and which of them each row is.

    Rows of a search stand in runs of equal ones, so that only the first of each run is sorted. Values are not
    negative.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    starts = (
        np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.empty(0, np.intp)
    )
    _, first, run = np.unique(key[starts], return_index=True, return_inverse=True)
    cases = list(zip(*(column[starts[first]].tolist() for column in columns), strict=True))
    return cases, np.repeat(run, np.diff(starts, append=len(key)))


def stage_layers(layers: int, stages: int, ends: int = 0) -> tuple[int, ...]:
    """Layers of each stage: as even as can be, the first and the last stage ``ends`` less.

    What does not divide goes to the stages before the last, from the front, none is dropped.
    """
    short = [ends if stage in (0, stages - 1) else 0 for stage in range(stages)]
    base, rest = divmod(layers + sum(short), stages)
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 2 else list(range(stages))
    more = set(order[:rest])
    return tuple(base + (stage in more) - short[stage] for stage in range(stages))


def ends_of(layout: Layout, layers: int) -> int:
    """The ``ends`` column of a layout.

    Raises: LayoutError: its layers are split in another way than ``stage_layers`` splits them.
    """
    stages = len(layout.stage_layers)
    for ends in range(4):
        if stages == 0 or layout.stage_layers == stage_layers(layers, stages, ends):
            return ends
    raise LayoutError(
        f"stage_layers={list(layout.stage_layers)} is no split that the planner prices: use "
        f"{list(stage_layers(layers, stages))}, or with lighter ends {list(stage_layers(layers, stages, 1))}"
    )


def table_of(layouts: Sequence[Layout], layers: int) -> LayoutTable:
    """The table whose rows are ``layouts`` of a model of ``layers``.

    Raises: LayoutError: a pipeline's layers are split in another way than ``stage_layers`` splits them.
    """
    rows = [
        (
            *(x.pp, x.dp_replicate, x.dp_shard, x.cp, x.tp, x.ep, x.etp),
            *(MESH_ORDERS.index(x.order), int(x.sp)),
            *(CONTEXT_KINDS.index(x.cp_kind), SCHEDULE_NAMES.index(x.schedule), x.chunks, ends_of(x, layers)),
            *(x.zero_stage, x.micro_batch, x.microbatches, RECOMPUTE_KINDS.index(x.recompute)),
            *(x.recompute_every, x.loss_chunks, OFFLOAD_KINDS.index(x.offload)),
        )
        for x in layouts
    ]
    return LayoutTable(*np.array(rows, dtype=np.int64).reshape(-1, len(LayoutTable._fields)).T)
