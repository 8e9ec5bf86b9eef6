"""Pipeline ranks of a table: the layers and ends each holds, and how many microbatches it has in flight."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.layout import SCHEDULE_NAMES
from shardwright.model import ModelSpec
from shardwright.plan.flight_points import FlightPoints, flight_points, passes_apart
from shardwright.plan.schedule import SCHEDULES
from shardwright.plan.splits import stage_layers
from shardwright.plan.table import Floats, Ints, LayoutTable, by_schedule, distinct

TWO_WAY = frozenset(name for name, row in SCHEDULES.items() if row.pipelines == 2)
V_SHAPED = frozenset(name for name, row in SCHEDULES.items() if row.v_shape) - TWO_WAY


def _direction(schedule: str) -> tuple[bool, bool]:
    return schedule in TWO_WAY, schedule in V_SHAPED


_LAID_OUT_LIKE = np.array(
    [
        next(code for code, other in enumerate(SCHEDULE_NAMES) if _direction(other) == _direction(name))
        for name in SCHEDULE_NAMES
    ]
)
"""The first schedule with stages on the same ranks."""

_APART = np.array([float(passes_apart(name, 2, 4)) for name in SCHEDULE_NAMES])
"""Part of four microbatches on two ranks that has passes for weights apart: in one schedule alone some."""

_remembered = lru_cache(maxsize=8192)  # cases of pp, chunks, ends and schedule: a search has hundreds


class Stage(NamedTuple):
    """One pipeline rank of every row that has it; without a pipeline, the only one. Or several such ranks,
    along an axis before those of the table."""

    name: str
    valid: NDArray[np.bool_]
    rank: Ints  # 0 in rows without the stage
    blocks: Floats
    expert_blocks: Floats  # of blocks, those with experts
    embedding: Floats  # 1 where the rank holds it, else 0
    head: Floats
    later: Floats  # of blocks, those of other stages than the first
    later_experts: Floats  # of these, those with experts
    stages: Floats  # stages of the pipeline that it has
    flight: FlightPoints

    @property
    def in_flight(self) -> Floats:
        """Microbatches whose activations it holds at most, of all its blocks."""
        return self.flight.first

    def mapped(self, part: Callable[[NDArray[Any]], Any]) -> "Stage":
        """The same with ``part`` of every column."""
        columns = {name: part(getattr(self, name)) for name in self._fields if name not in ("name", "flight")}
        return self._replace(**columns, flight=FlightPoints(*map(part, self.flight)))


class Work(NamedTuple):
    """What a rank runs for each microbatch: blocks, and 1 or more where it runs the embedding or the head."""

    blocks: Floats
    expert_blocks: Floats  # of blocks, those with experts
    embedding: Floats
    head: Floats
    later: Floats | float = 0.0  # of blocks, those of other stages than the first
    later_experts: Floats | float = 0.0  # of these, those with experts


class _Holding(NamedTuple):
    """What one rank holds of the model; both directions of a two-way pipeline."""

    blocks: int
    expert_blocks: int
    embedding: int
    head: int
    later: int  # of blocks, those of other stages than the first
    later_experts: int
    stages: int

    def covers(self, other: "_Holding") -> bool:
        """Whether it has as many blocks of both kinds as the other and more."""
        dense = self.blocks - self.expert_blocks >= other.blocks - other.expert_blocks
        return dense and self.expert_blocks >= other.expert_blocks


def expert_layers(model: ModelSpec) -> tuple[bool, ...]:
    """Whether each layer has experts."""
    if model.moe is None:
        return (False,) * model.layers
    return tuple(model.moe.covers(layer) for layer in range(model.layers))


def ranks_stages(schedule: str, ranks: int, chunks: int, rank: int) -> list[int]:
    """Stages that a rank holds: every ``ranks``-th in a loop; on the way there and back in a V; those of both
    directions of a two-way pipeline."""
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    if schedule in TWO_WAY:
        return sorted({rank, ranks - 1 - rank})
    return [rank + chunk * ranks for chunk in range(chunks)]


@_remembered
def _holdings(experts: tuple[bool, ...], p: int, v: int, ends: int, code: int) -> tuple[_Holding, ...]:
    """What each rank of one case holds."""
    if p == 1:
        return (_Holding(len(experts), sum(experts), 1, 1, 0, 0, 1),)
    split = stage_layers(len(experts), p * v, ends)
    starts = np.cumsum([0, *split])
    of_stage = np.diff(np.cumsum([0, *experts])[starts]).tolist()
    ranks = []
    for rank in range(p):
        mine = ranks_stages(SCHEDULE_NAMES[code], p, v, rank)
        blocks, with_experts = (sum(column[stage] for stage in mine) for column in (split, of_stage))
        later, later_experts = (sum(column[stage] for stage in mine if stage) for column in (split, of_stage))
        both = int(0 in mine), int(p * v - 1 in mine)
        ranks.append(_Holding(blocks, with_experts, *both, later, later_experts, len(mine)))
    return tuple(ranks)


# What a rank holds


def stages(table: LayoutTable, model: ModelSpec) -> Iterator[Stage]:
    """Ranks that can be the heaviest, one by one."""
    every = all_stages(table, model)
    for place, name in enumerate(every.name.split(", ") if every.name else ()):
        yield every.mapped(itemgetter(place))._replace(name=name)


def all_stages(table: LayoutTable, model: ModelSpec) -> Stage:
    """Ranks that can be the heaviest: the first and the last, which have the ends of the model, the second,
    and any other that no rank with as many microbatches in flight covers in blocks of both kinds."""
    cases, index = _pipelines(table)
    names, present, ranks, held = _heaviest_of(expert_layers(model), cases)
    valid, rank = present.take(index, axis=-1), ranks.take(index, axis=-1)
    return _stage(", ".join(names), table, valid, rank, held.take(index, axis=-1))


def every_stage(table: LayoutTable, model: ModelSpec) -> list[Stage]:
    """All ranks of a pipeline, in their order; all rows have the same pipeline."""
    (case,), _ = _pipelines(table)
    valid = np.ones((1,) * table.pp.ndim, dtype=np.bool_)
    found = []
    for number, holding in enumerate(_holdings(expert_layers(model), *case)):
        held = np.array(holding, dtype=np.float64).reshape(-1, *valid.shape)
        found.append(_stage(f"rank {number}", table, valid, np.full(valid.shape, number), held))
    return found


def _stage(name: str, table: LayoutTable, valid: NDArray[np.bool_], rank: Ints, held: Floats) -> Stage:
    """``held``: by field of ``_Holding``."""
    blocks, experts, embedding, head, later, later_experts, count = held
    points = by_schedule(
        table.schedule, flight_points, table.pp, table.chunks, table.microbatches, rank, count
    )
    flight = FlightPoints(*points)
    ends = embedding, head
    return Stage(name, valid, rank, blocks, experts, *ends, later, later_experts, count, flight)


Cases = tuple[tuple[int, ...], ...]
"""Different pipelines: pp, chunks, ends and schedule."""


def _pipelines(table: LayoutTable) -> tuple[Cases, NDArray[np.intp]]:
    """The different pipelines of a table, and which of them each row has: schedules that lay out stages alike
    count as one."""
    cases, index = distinct(table.pp, table.chunks, table.ends, _LAID_OUT_LIKE[table.schedule])
    return tuple(cases), index


@_remembered
def _heaviest_of(
    experts: tuple[bool, ...], cases: Cases
) -> tuple[tuple[str, ...], NDArray[np.bool_], Ints, Floats]:
    """Ranks that can be the heaviest: names; whether a case has them, as which rank, and what they hold."""
    named = [_heaviest(experts, *case) for case in cases]
    names = tuple(dict.fromkeys(name for ranks in named for name in ranks))
    present = [[name in ranks for ranks in named] for name in names]
    rank = [[ranks.get(name, 0) for ranks in named] for name in names]
    every = [_holdings(experts, *case) for case in cases]
    held = [[of_case[mine] for of_case, mine in zip(every, ranks, strict=True)] for ranks in rank]
    shape = (len(names), len(cases))
    numbers = np.array(held, dtype=np.float64).reshape(*shape, len(_Holding._fields))
    of_field = np.moveaxis(numbers, -1, 0)
    ranks = np.array(rank, dtype=np.int64).reshape(shape)
    return names, np.array(present, dtype=np.bool_).reshape(shape), ranks, of_field


@_remembered
def _heaviest(experts: tuple[bool, ...], p: int, v: int, ends: int, code: int) -> dict[str, int]:
    """Ranks of one case that can be the heaviest, by name."""
    if p == 1:
        return {"only": 0}
    held = _holdings(experts, p, v, ends, code)
    named = {"first": 0, **({"second": 1} if p > 2 else {}), "last": p - 1}
    uncovered: list[int] = []
    # in flight falls with the rank, but does not in a V
    for rank in reversed(range(p)) if SCHEDULE_NAMES[code] in V_SHAPED else range(p):
        if not any(held[other].covers(held[rank]) for other in uncovered):
            uncovered.append(rank)
    others = [rank for rank in uncovered if rank not in named.values()]
    return named | {f"middle {place}": rank for place, rank in enumerate(others, start=1)}


# What a rank runs


def slowest_blocks(table: LayoutTable, model: ModelSpec) -> Floats:
    """Blocks of the rank that has most of them."""
    return _most(table, model, lambda held: held.blocks)


def most_expert_blocks(table: LayoutTable, model: ModelSpec) -> Floats:
    """Blocks with experts of the rank that has most of them."""
    return _most(table, model, lambda held: held.expert_blocks)


def _most(table: LayoutTable, model: ModelSpec, number: Callable[[_Holding], int]) -> Floats:
    cases, index = _pipelines(table)
    experts = expert_layers(model)
    most = [_share(case) * max(map(number, _holdings(experts, *case))) for case in cases]
    return np.array(most, dtype=np.float64)[index]


def stage_unevenness(table: LayoutTable, model: ModelSpec) -> Floats:
    """Blocks of the longest stage over the mean of the rank with most blocks: 1 where all are alike."""
    cases, index = _pipelines(table)
    experts = expert_layers(model)
    return np.array([_unevenness(experts, *case) for case in cases], dtype=np.float64)[index]


@_remembered
def _unevenness(experts: tuple[bool, ...], p: int, v: int, ends: int, code: int) -> float:
    if p == 1:
        return 1.0
    most = max(_holdings(experts, p, v, ends, code), key=lambda held: held.blocks)
    return max(stage_layers(len(experts), p * v, ends)) * most.stages / most.blocks


def _share(case: tuple[int, ...]) -> float:
    """Part of the microbatches that runs through each stage a rank holds."""
    p, *_, code = case
    return 0.5 if p > 1 and SCHEDULE_NAMES[code] in TWO_WAY else 1.0


def busiest_ranks(table: LayoutTable, model: ModelSpec) -> tuple[Work, ...]:
    """Ranks of which one has most to do: that with the embedding, that with the head, and of the others the
    one with most blocks, or several if the model has two kinds. A rank of a two-way pipeline runs half of the
    microbatches in each direction."""
    cases, index = _pipelines(table)
    numbers = _busiest_of(expert_layers(model), cases)
    return tuple(Work(*ranks.take(index, axis=-1)) for ranks in numbers)


def alike(table: LayoutTable, model: ModelSpec) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Of a table whose pipelines lie along one axis: the first of each way of sharing out the model among the
    busiest ranks and of passes for weights apart, and which of these each one has."""
    cases, index = _pipelines(table)
    apart = np.where(_APART == 1, -1, np.sign(_APART))[table.schedule]
    apart = np.where(apart > 0, table.pp, apart).ravel()
    ways = (_ways(expert_layers(model), cases, fields)[index.ravel()] for fields in (4, len(Work._fields)))
    way = np.where(apart == 0, *ways)  # which stages come first matters to passes apart alone
    _, first, row = np.unique(np.stack([way, apart]), axis=1, return_index=True, return_inverse=True)
    return first, row.ravel()


@_remembered
def _ways(experts: tuple[bool, ...], cases: Cases, fields: int) -> NDArray[np.intp]:
    """Cases whose busiest ranks run the same, by so many fields of ``Work``, have the same number."""
    numbers: dict[tuple[float, ...], int] = {}
    works = _busiest_of(experts, cases)[:, :fields].reshape(-1, len(cases)).T.tolist()
    return np.array([numbers.setdefault(tuple(work), len(numbers)) for work in works], dtype=np.intp)


@_remembered
def _busiest_of(experts: tuple[bool, ...], cases: Cases) -> Floats:
    """What ranks of each case, of which one has most to do, run: by rank, and by field of ``Work``."""
    ranks = [_busiest(experts, *case) for case in cases]
    places = max(map(len, ranks), default=3)
    filled = [_filled(mine, places) for mine in ranks]
    share = np.array([_share(case) for case in cases])
    numbers = np.array(filled, dtype=np.float64).reshape(-1, places, len(_Holding._fields))
    return np.asarray(share * np.moveaxis(numbers, 0, -1)[:, : len(Work._fields)])


def _filled(ranks: Sequence[_Holding], places: int) -> list[_Holding]:
    return [*ranks, *[ranks[-1]] * (places - len(ranks))]


@_remembered
def _busiest(experts: tuple[bool, ...], p: int, v: int, ends: int, code: int) -> tuple[_Holding, ...]:
    """Of one case: the rank with the embedding, that with the head, and those that no other covers."""
    held = _holdings(experts, p, v, ends, code)
    others = [rank for rank in held if not (rank.embedding or rank.head)] or list(held)
    uncovered: list[_Holding] = []
    for rank in sorted(others, reverse=True):
        if not any(other.covers(rank) for other in uncovered):
            uncovered.append(rank)
    return max(rank for rank in held if rank.embedding), max(rank for rank in held if rank.head), *uncovered
