"""Pipeline ranks of a table: the layers and ends each holds, and how many microbatches it has in flight."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.layout import SCHEDULE_NAMES
from shardwright.plan.bubble import in_flight_chunks
from shardwright.plan.schedule import SCHEDULES
from shardwright.plan.table import Floats, Ints, LayoutTable, distinct, stage_layers

TWO_WAY = frozenset(name for name, row in SCHEDULES.items() if row.pipelines == 2)
V_SHAPED = frozenset(name for name, row in SCHEDULES.items() if row.v_shape) - TWO_WAY


class Stage(NamedTuple):
    """One pipeline rank of every row that has it; without a pipeline, the only one."""

    name: str
    valid: NDArray[np.bool_]
    blocks: Floats
    embedding: Floats  # 1 where the rank holds it, else 0
    head: Floats
    in_flight: Floats  # microbatches whose activations it holds at most, of all its blocks


def stages(table: LayoutTable, layers: int) -> Iterator[Stage]:
    """Ranks that can be the heaviest: the first and the last, which have the ends of the model, and the
    second, which has the most in flight of those without."""
    for name, present in (
        ("only", table.pp == 1),
        ("first", table.pp > 1),
        ("second", table.pp > 2),
        ("last", table.pp > 1),
    ):
        if present.any():
            yield _stage(name, present, table, layers)


def _stage(name: str, present: NDArray[np.bool_], table: LayoutTable, layers: int) -> Stage:
    cases, row = distinct(table.pp, table.chunks, table.ends, table.schedule)
    held = np.array([_held(name, layers, *case) for case in cases]).reshape(-1, 4)[row]
    in_flight = np.ones(table.rows)
    piped = table.pp > 1
    for code in np.unique(table.schedule[piped]):
        mine = piped & (table.schedule == code)
        p, rank = table.pp[mine], _rank(name, table.pp[mine])
        chunks = in_flight_chunks(SCHEDULE_NAMES[code], p, table.chunks[mine], table.microbatches[mine], rank)
        in_flight[mine] = chunks / held[mine, 3]
    return Stage(name, present, held[:, 0], held[:, 1], held[:, 2], in_flight)


def _rank(name: str, ranks: Ints) -> Ints:
    """The rank that a name stands for, of so many."""
    return {"second": np.minimum(1, ranks - 1), "last": ranks - 1}.get(name, np.zeros_like(ranks))


@cache
def _held(name: str, layers: int, p: int, v: int, ends: int, code: int) -> tuple[float, float, float, float]:
    """Blocks, embedding, head and number of stages of one rank of one row."""
    if p == 1:
        return float(layers), 1.0, 1.0, 1.0
    split = stage_layers(layers, p * v, ends)
    mine = ranks_stages(SCHEDULE_NAMES[code], p, v, int(_rank(name, np.array(p))))
    blocks = float(sum(split[stage] for stage in mine))
    return blocks, float(0 in mine), float(p * v - 1 in mine), float(len(mine))


def ranks_stages(schedule: str, ranks: int, chunks: int, rank: int) -> list[int]:
    """Stages that a rank holds: every ``ranks``-th in a loop; on the way there and back in a V; those of both
    directions of a two-way pipeline."""
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    if schedule in TWO_WAY:
        return sorted({rank, ranks - 1 - rank})
    return [rank + chunk * ranks for chunk in range(chunks)]


def slowest_blocks(table: LayoutTable, layers: int) -> Floats:
    """Blocks of the rank that has most of them."""
    cases, row = distinct(table.pp, table.chunks, table.ends, table.schedule)
    return np.array([_most_blocks(layers, *case) for case in cases], dtype=np.float64)[row]


@cache
def _most_blocks(layers: int, p: int, v: int, ends: int, code: int) -> float:
    if p == 1:
        return float(layers)
    split, name = stage_layers(layers, p * v, ends), SCHEDULE_NAMES[code]
    each = [sum(split[stage] for stage in ranks_stages(name, p, v, rank)) for rank in range(p)]
    return max(each) / (2 if name in TWO_WAY else 1)


class Work(NamedTuple):
    """What a rank runs for each microbatch: blocks, and 1 or more where it runs the embedding or the head."""

    blocks: Floats
    embedding: Floats
    head: Floats


def busiest_ranks(table: LayoutTable, layers: int) -> tuple[Work, Work, Work]:
    """Ranks of which one has most to do: that with the embedding, that with the head, and the one with most
    blocks of the others. A rank of a two-way pipeline runs half of the microbatches in each direction."""
    cases, row = distinct(table.pp, table.chunks, table.ends, table.schedule)
    numbers = np.array([_busiest(layers, *case) for case in cases], dtype=np.float64).reshape(-1, 3, 3)
    first, last, other = (Work(*numbers[row, place].T) for place in range(3))
    return first, last, other


@cache
def _busiest(layers: int, p: int, v: int, ends: int, code: int) -> list[tuple[float, float, float]]:
    if p == 1:
        return [(float(layers), 1.0, 1.0)] * 3
    split, name = stage_layers(layers, p * v, ends), SCHEDULE_NAMES[code]
    share = 0.5 if name in TWO_WAY else 1.0
    ranks = []
    for rank in range(p):
        mine = ranks_stages(name, p, v, rank)
        blocks = share * sum(split[stage] for stage in mine)
        ranks.append((blocks, share * (0 in mine), share * (p * v - 1 in mine)))
    others = [work for work in ranks if not (work[1] or work[2])] or ranks
    return [max(w for w in ranks if w[1]), max(w for w in ranks if w[2]), max(others)]
