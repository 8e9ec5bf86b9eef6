"""The space of a job: every layout of so many ranks, as a table."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardwright.job import Job
from shardwright.layout import CONTEXT_KINDS, RECOMPUTE_KINDS, SCHEDULE_NAMES, ulysses_degrees
from shardwright.model import ModelSpec
from shardwright.plan.schedule import SCHEDULES
from shardwright.plan.table import LayoutTable, stage_layers

MOST_CHUNKS = 8
"""Stages of a rank that are tried at most; more only divide a bubble that is small by then."""

MOST_MICRO_BATCH = 32
"""Sequences of a microbatch that are tried at most, besides all of a rank's at once."""


class _Mesh(NamedTuple):
    """Degrees of one mesh."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def search_space(model: ModelSpec, job: Job, ranks: int) -> LayoutTable:
    """Every layout of ``ranks`` ranks that the model's shape and the sequence allow.

    Where the data ranks cannot share the global batch, a mesh stands with one row, to be counted. Columns are
    narrow integers; ``LayoutTable.wide`` before formulas.
    """
    parts = [_rows(model, job, mesh) for mesh in _meshes(model, job, ranks)]
    return LayoutTable(*np.concatenate(parts, axis=1))


def _meshes(model: ModelSpec, job: Job, ranks: int) -> Iterator[_Mesh]:
    """Degrees whose product is ``ranks`` and that keep the rules of layout.py against model and job."""
    factors = divisors(ranks)
    tps = [n for n in factors if _tp_fits(model, n)]
    cps = [n for n in factors if n == 1 or job.seq % (2 * n) == 0]
    pps = [n for n in factors if n <= model.layers and (n == 1 or not model.tied_embeddings)]
    for tp in tps:
        for cp in cps:
            for pp in pps:
                inner = tp * cp * pp
                if ranks % inner == 0:
                    dp = ranks // inner
                    for shard in divisors(dp):
                        yield _Mesh(pp, dp // shard, shard, cp, tp)


def _tp_fits(model: ModelSpec, tp: int) -> bool:
    """Whether tp divides heads and ffn, and divides the key/value heads or is a multiple of them."""
    whole = model.heads % tp == 0 and model.ffn % tp == 0
    return whole and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)


def _rows(model: ModelSpec, job: Job, mesh: _Mesh) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """All layouts on one mesh, a column each."""
    dp = mesh.dp_replicate * mesh.dp_shard
    share = job.global_batch // dp if job.global_batch % dp == 0 else 0
    shard = mesh.dp_shard * mesh.cp
    zeros = [0] if shard == 1 else ([1] if mesh.pp > 1 else [1, 2, 3])
    sps = [0, 1] if mesh.tp > 1 and job.seq % (mesh.cp * mesh.tp) == 0 else [0]
    batches = (
        [(b, share // b) for b in divisors(share) if b <= MOST_MICRO_BATCH or b == share]
        if share
        else [(1, 1)]
    )
    options = [
        (sp, kind, schedule, chunks, ends, zero)
        for sp in sps
        for kind in _context_kinds(model, mesh)
        for schedule, chunks, ends in _pipelines(model, mesh)
        for zero in zeros
    ]
    if not share:
        options = options[:1]
    inner = np.array(
        [
            (*batch, recompute, 1, 1, 0)
            for batch in batches
            for recompute in range(len(RECOMPUTE_KINDS) if share else 1)
        ],
        dtype=np.int32,
    ).T
    outer = np.array([(*mesh, 1, 1, 0, *option) for option in options], dtype=np.int32).T
    repeated = np.repeat(outer, inner.shape[1], axis=1)
    return np.concatenate([repeated, np.tile(inner, (1, outer.shape[1]))])


def _context_kinds(model: ModelSpec, mesh: _Mesh) -> list[int]:
    if mesh.cp == 1:
        return [CONTEXT_KINDS.index("none")]
    kinds = ["ring", "all_gather"]
    if mesh.cp in ulysses_degrees(model, mesh.tp):
        kinds.append("ulysses")
    return [CONTEXT_KINDS.index(kind) for kind in kinds]


def _pipelines(model: ModelSpec, mesh: _Mesh) -> Iterator[tuple[int, int, int]]:
    """Schedule, chunks and how much lighter the ends are."""
    if mesh.pp == 1:
        yield 0, 1, 0
        return
    for name, row in SCHEDULES.items():
        if name == "DualPipe":  # holds every parameter twice: DualPipeV does the same on half the ranks
            continue
        choices = (
            [row.chunks]
            if row.chunks
            else range(1 if name == "InterleavedZeroBubble" else 2, MOST_CHUNKS + 1)
        )
        for chunks in choices:
            stages = mesh.pp * chunks
            if stages > model.layers:
                break
            for ends in (0, 1):
                if ends == 0 or _lighter_ends_differ(model.layers, stages):
                    yield SCHEDULE_NAMES.index(name), chunks, ends


def _lighter_ends_differ(layers: int, stages: int) -> bool:
    """Whether a layer less for the first and the last stage leaves them one, and is another split."""
    return layers // stages >= 2 and stage_layers(layers, stages, 1) != stage_layers(layers, stages)
