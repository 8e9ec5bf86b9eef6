"""The space of a job: every layout of so many ranks, as grids whose axes stand for all combinations."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Job
from shardwright.layout import (
    CONTEXT_KINDS,
    DISPATCH_KINDS,
    OFFLOAD_KINDS,
    RECOMPUTE_KINDS,
    SCHEDULE_NAMES,
    empty_stage_fault,
    ulysses_degrees,
)
from shardwright.model import ModelSpec
from shardwright.plan.schedule import SCHEDULES, order_fault
from shardwright.plan.splits import stage_layers
from shardwright.plan.table import ColumnMap, Ints, LayoutTable, by_schedule

INNER, EXPERTS, ORDER, DATA, PIPE, BATCH, MEMORY = range(7)
"""Axes of a grid: tp with cp, ep, the order of the mesh, the data axes, the schedule with its stages, the
microbatch, and what is kept where."""

GRID_AXES = 7

MOST_TOKENS = 131_072
"""Tokens of a microbatch that are tried at most, besides one sequence: more only fill memory."""

RECOMPUTED = (("none", 1), ("selective", 1), ("full", 1), ("full", 2))
"""Kinds of recomputation, and of how many layers one is recomputed."""

LOSS_CHUNKS = (1, 8)
"""Parts of a microbatch for the loss. Source: Megatron-LM's and torchtitan's chunked losses use 8."""


class Grid(NamedTuple):
    """Layouts as a table whose columns lie along seven axes, of one pp and a few dp.

    Three masks say which combinations are layouts, each of them once: ``valid`` for meshes, ``shared`` for
    microbatches that make up the batch, ``ordered`` for schedules that have an order of so many. The first
    varies along the axes before PIPE, the others along INNER and those from PIPE on.
    """

    table: LayoutTable
    valid: NDArray[np.bool_]
    shared: NDArray[np.bool_]
    ordered: NDArray[np.bool_]

    @property
    def rows(self) -> int:
        """Layouts in it, with or without an order."""
        return self._count(self.shared)

    @property
    def ordered_rows(self) -> int:
        """Layouts in it whose schedule has an order."""
        return self._count(self.shared & self.ordered)

    def _count(self, mask: NDArray[np.bool_]) -> int:
        shape = self.table.shape
        places = [_counted(self.valid, shape, range(1, PIPE)), _counted(mask, shape, range(PIPE, GRID_AXES))]
        meshes, others = (np.broadcast_to(each, shape[INNER]) for each in places)
        return int(meshes @ others)

    @property
    def layouts(self) -> NDArray[np.bool_]:
        """Which combinations are layouts whose schedule has an order, at the grid's shape."""
        return np.broadcast_to(self.valid & (self.shared & self.ordered), self.table.shape)

    def along(self, axis: int, index: NDArray[np.intp] | slice) -> "Grid":
        """The part that some places of one axis make up."""
        where = (slice(None),) * axis + (index,)
        return Grid(
            self.table.along(axis, index),
            *(mask[where] if mask.shape[axis] > 1 else mask for mask in self[1:]),
        )

    def mapped(self, part: ColumnMap) -> "Grid":
        """The same with ``part`` of every column and mask."""
        return Grid(self.table.mapped(part), part(self.valid), part(self.shared), part(self.ordered))

    def restricted(self, column: str, allowed: Sequence[int]) -> "Grid | None":
        """The part whose ``column`` has one of some values; None: there is none."""
        values = getattr(self.table, column)
        there = np.isin(values, list(allowed))
        axes = [axis for axis, n in enumerate(there.shape) if n > 1]
        if there.all():
            return self
        if not there.any():
            return None
        if len(axes) == 1:
            return self.along(axes[0], np.flatnonzero(there))
        if BATCH in axes:
            return self._replace(shared=self.shared & there)
        return self._replace(valid=self.valid & there)


def _counted(mask: NDArray[np.bool_], shape: tuple[int, ...], axes: range) -> Ints:
    """At each place of the first axis, how many of ``shape`` there are along ``axes``."""
    spread = prod(shape[axis] for axis in axes if mask.shape[axis] == 1)
    return np.asarray(spread * np.count_nonzero(mask, axis=tuple(range(1, GRID_AXES))))


class Space(NamedTuple):
    """All grids, and the data ranks of meshes that cannot share the global batch, which count as one each."""

    grids: tuple[Grid, ...]
    unshared: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Layouts, and one for each mesh that cannot share the batch."""
        return sum(grid.rows for grid in self.grids) + len(self.unshared)

    def flat(self) -> LayoutTable:
        """Every layout whose schedule has an order, as columns of equal length."""
        parts = [grid.table.take(grid.layouts.reshape(-1)) for grid in self.grids]
        return LayoutTable(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


SEARCHED_ORDERS = (0, 2)
"""Of axes.MESH_ORDERS: pp outermost, and the data axes outermost. The one between differs little."""

CHUNKS = {
    "LoopedBFS": (2, 4),
    "Interleaved1F1B": (2, 3, 4, 6, 8),
    "InterleavedZeroBubble": (1, 2, 3, 4, 6, 8),
}
"""Stages of a rank that are tried, of schedules that leave it open: more only divide a bubble that is small
by then; a breadth-first loop holds all microbatches, so that more of it only takes memory."""

FEWEST_CHUNKS = {"LoopedBFS": 2, "Interleaved1F1B": 2}
"""Stages of a rank below which a schedule is another one."""

LEFT_OUT = ("DualPipe",)
"""Holds every parameter twice; DualPipeV does the same on half the ranks. Tried if it is asked for."""

SEARCHED_ENDS = (0, 1)
"""Of splits.ENDS: layers split evenly, and one less on the first and the last stage."""

TOGETHER = 7
"""Degrees of dp in one grid: more make fewer grids, with more combinations that are no layouts."""


Asked = Mapping[str, Sequence[int]]
"""Values of columns that a user asks for: tried although they are none of those that are tried by default."""


def search_space(model: ModelSpec, job: Job, ranks: int, asked: Asked | None = None) -> Space:
    """Every layout of ``ranks`` ranks that the model's shape and the sequence allow."""
    asked = asked or {}
    grids: list[Grid] = []
    unshared: list[int] = []
    for pp in divisors(ranks):
        if pp > model.layers:
            continue
        meshes: dict[int, list[_Inner]] = {}
        for dp in divisors(ranks // pp):
            inner = list(_inner(model, job, dp, ranks // pp // dp))
            if job.global_batch % dp:
                unshared += [dp] * (len({mesh[:3] for mesh in inner}) * len(divisors(dp)))
            elif inner:
                meshes[dp] = inner
        dps = list(meshes)
        for first in range(0, len(dps), TOGETHER):
            some = dps[first : first + TOGETHER]
            grids.append(_grid(model, job, pp, [mesh for dp in some for mesh in meshes[dp]], asked))
    return Space(tuple(grids), tuple(unshared))


class _Inner(NamedTuple):
    """Data ranks, and a mesh inside them."""

    dp: int
    tp: int
    cp: int
    sp: int
    cp_kind: int
    etp: int


def _grid(model: ModelSpec, job: Job, pp: int, inner: list[_Inner], asked: Asked) -> Grid:
    """All layouts of one pp and some meshes."""
    replicas = sorted({n for dp in {mesh.dp for mesh in inner} for n in divisors(dp)})
    data = [(n, zero) for n in replicas for zero in ([1] if pp > 1 else [1, 2, 3])]
    orders = sorted({*SEARCHED_ORDERS, *asked.get("order", ())}) if pp > 1 else SEARCHED_ORDERS[:1]
    shares = {job.global_batch // mesh.dp for mesh in inner}
    tried = asked.get("micro_batch", ())
    every = {b for n in shares for b in divisors(n)}
    batches = sorted(b for b in every if b * job.seq <= MOST_TOKENS or b == 1 or b in tried)
    columns: dict[str, Ints] = {"pp": _along(0, [pp])}
    columns |= _columns(INNER, _Inner._fields, inner)
    dp = columns.pop("dp")
    most = max(mesh.dp * mesh.tp * mesh.cp for mesh in inner)
    columns |= _columns(EXPERTS, ("ep", "dispatch"), list(_expert_choices(model, most)))
    columns |= _columns(ORDER, ("order",), [(n,) for n in orders])
    columns |= _columns(DATA, ("dp_replicate", "zero_stage"), data)
    columns |= _columns(PIPE, ("schedule", "chunks", "ends"), list(_pipelines(model, pp, asked)))
    columns |= _columns(BATCH, ("micro_batch",), [(b,) for b in batches])
    columns |= _columns(
        MEMORY, ("recompute", "recompute_every", "loss_chunks", "offload"), _memory_choices(model, asked)
    )
    replicate, share = columns["dp_replicate"], job.global_batch // dp
    columns["dp_shard"] = np.maximum(dp // replicate, 1)
    columns["zero_stage"] = np.where(columns["dp_shard"] * columns["cp"] > 1, columns["zero_stage"], 0)
    columns["microbatches"] = np.maximum(share // columns["micro_batch"], 1)
    table = LayoutTable(**columns)
    first = columns["zero_stage"] == _along(DATA, [zero for _, zero in data])
    whole = (columns["zero_stage"] == 0) & (_along(DATA, [zero for _, zero in data]) == 1)
    valid = _valid(model, table) & (dp % replicate == 0) & (first | whole)
    shared = share % columns["micro_batch"] == 0
    ordered = np.ones((1,) * GRID_AXES, dtype=bool)
    if pp > 1:
        ordered = by_schedule(table.schedule, _has_order, table.pp, table.chunks, table.microbatches)
    return _trimmed(Grid(table, valid, shared, ordered))


def _has_order(schedule: str, ranks: Ints, chunks: Ints, microbatches: Ints) -> NDArray[np.bool_]:
    return np.asarray(order_fault(schedule, ranks, chunks, microbatches) == 0)


def _along(axis: int, values: Sequence[int]) -> Ints:
    shape = [1] * GRID_AXES
    shape[axis] = len(values)
    return np.array(values, dtype=np.int64).reshape(shape)


def _columns(axis: int, names: tuple[str, ...], choices: Sequence[tuple[int, ...]]) -> dict[str, Ints]:
    return {
        name: _along(axis, values) for name, values in zip(names, zip(*choices, strict=True), strict=True)
    }


def _inner(model: ModelSpec, job: Job, dp: int, ranks: int) -> Iterator[_Inner]:
    """All meshes of so many ranks, inside ``dp`` data ranks, that keep the rules of layout.py."""
    for tp in divisors(ranks):
        cp = ranks // tp
        if not _tp_fits(model, tp) or (cp > 1 and job.seq % (2 * cp)):
            continue
        for sp in [0, 1] if tp > 1 and job.seq % (cp * tp) == 0 else [0]:
            for kind in _context_kinds(model, cp, tp):
                for etp in _expert_degrees(model, tp):
                    yield _Inner(dp, tp, cp, sp, kind, etp)


def _tp_fits(model: ModelSpec, tp: int) -> bool:
    """Whether tp divides heads and ffn, and divides the key/value heads or is a multiple of them."""
    whole = model.heads % tp == 0 and model.ffn % tp == 0
    if model.moe is not None:
        whole = whole and model.moe.shared_ffn % tp == 0
    return whole and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)


def _context_kinds(model: ModelSpec, cp: int, tp: int) -> list[int]:
    if cp == 1:
        return [CONTEXT_KINDS.index("none")]
    kinds = ["ring", "all_gather"]
    if cp in ulysses_degrees(model, tp):
        kinds.append("ulysses")
    return [CONTEXT_KINDS.index(kind) for kind in kinds]


def _expert_degrees(model: ModelSpec, tp: int) -> list[int]:
    """Degrees of etp: experts whole, or cut as every other matrix is."""
    if model.moe is None or tp == 1:
        return [1]
    return [1, tp] if model.moe.ffn % tp == 0 else [1]


def _expert_choices(model: ModelSpec, ranks: int) -> Iterator[tuple[int, ...]]:
    """ep and how tokens travel; for a model without experts, nothing."""
    if model.moe is None:
        yield 1, 0
        return
    for ep in divisors(model.moe.experts):
        if ranks % ep == 0:
            for dispatch in range(len(DISPATCH_KINDS) if ep > 1 else 1):
                yield ep, dispatch


def _valid(model: ModelSpec, t: LayoutTable) -> NDArray[np.bool_]:
    """Which combinations are layouts, and of those that are the same one, the first.

    ep and etp fit the ranks they are cut out of; an order that only moves axes of one rank is not another.
    """
    valid: NDArray[np.bool_] = np.ones((1,) * GRID_AXES, dtype=bool)
    if model.moe is not None:
        whole = (t.etp == t.tp) | (t.ep % t.tp == 0)
        cut = t.shard * t.tp % (t.ep * t.etp) == 0
        valid = valid & whole & cut & ((t.ep == 1) | (t.tp == 1) | (t.sp == 1))
    if t.order.size > 1:
        valid = valid & ((t.order == SEARCHED_ORDERS[0]) | (t.dp > 1))
    return np.asarray(valid)


def _trimmed(grid: Grid) -> Grid:
    """Without the places of an axis at which no layout lies."""
    for axis in (INNER, EXPERTS, ORDER, DATA):
        if grid.valid.shape[axis] > 1:
            others = tuple(other for other in range(GRID_AXES) if other != axis)
            there = np.flatnonzero(grid.valid.any(axis=others))
            if len(there) < grid.valid.shape[axis]:
                grid = grid.along(axis, there)
    return grid


def _pipelines(model: ModelSpec, pp: int, asked: Asked) -> Iterator[tuple[int, int, int]]:
    """Schedule, chunks and the code of how layers are split: evenly, or lighter at the ends."""
    if pp == 1:
        yield 0, 1, 0
        return
    for name, row in SCHEDULES.items():
        code = SCHEDULE_NAMES.index(name)
        if name in LEFT_OUT and code not in asked.get("schedule", ()):
            continue
        more = asked.get("chunks", ()) if name in CHUNKS else ()
        for chunks in sorted({*CHUNKS.get(name, (row.chunks,)), *more}):
            stages = pp * chunks
            if stages > model.layers + 2 or chunks < FEWEST_CHUNKS.get(name, 1):
                continue
            splits = dict.fromkeys((*SEARCHED_ENDS, *asked.get("ends", ())))
            known: set[tuple[int, ...]] = set()
            for ends in splits:
                split = stage_layers(model.layers, stages, ends)
                if _is_tried(split, name, chunks) and split not in known:
                    known.add(split)
                    yield code, chunks, ends


def _is_tried(split: tuple[int, ...], schedule: str, chunks: int) -> bool:
    """Whether every stage has layers, or both ends have none and all others the same: embedding and head
    count as a stage's layers then."""
    even = min(split) > 0 or (split[0] == split[-1] == 0 and len(set(split[1:-1])) == 1)
    return even and empty_stage_fault(split, schedule, chunks) is None


def _memory_choices(model: ModelSpec, asked: Asked) -> list[tuple[int, ...]]:
    """Recomputation, parts of the loss and what rests on the host, plain ones first."""
    every = {*(k for _, k in RECOMPUTED), *asked.get("recompute_every", ())}
    kinds = dict.fromkeys([*RECOMPUTED, *(("full", k) for k in sorted(every))])
    recomputed = [(RECOMPUTE_KINDS.index(kind), k) for kind, k in kinds if k < max(model.layers, 2)]
    full = RECOMPUTE_KINDS.index("full")
    return [
        (*kind, chunks, offload)
        for chunks in sorted({*LOSS_CHUNKS, *asked.get("loss_chunks", ())})
        for offload in range(len(OFFLOAD_KINDS))
        for kind in recomputed
        if not (offload & 2 and kind[0] == full and kind[1] > 1)  # what is offloaded need not be recomputed
    ]
