"""Pipelines simulated action by action: what their stages really wait for, with each stage's own time.

The step's table (plan/step.py) gives every rank the slowest one's time, which is an upper bound; this is
exact for the times it is given.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardwright.cluster import Cluster
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.collectives import Route
from shardwright.plan.flight_points import passes_apart
from shardwright.plan.hops import Hops
from shardwright.plan.parts import Parts, part_times
from shardwright.plan.placement import routes_of, shared_routes
from shardwright.plan.schedule import SCHEDULES, stage_ranks
from shardwright.plan.simulate import StageTimes, Timeline, schedule_graph, simulate
from shardwright.plan.stages import expert_layers
from shardwright.plan.steady import makespans
from shardwright.plan.step import StepTime, step_time
from shardwright.plan.table import Floats, LayoutTable, table_of
from shardwright.program import Program

FILLED = ("ZB-H2",)
"""Schedules in flight of which are enough microbatches that their weight gradients can fill all idle time: an
automatic schedule of as many (ZB-2p) leaves 0 to 2 % idle. Source: arXiv:2401.10241, sections 3 and 4."""


def simulated_times(model: ModelSpec, job: Job, cluster: Cluster, layouts: Sequence[Layout]) -> Floats:
    """The step of each layout [s], its bubble simulated."""
    if not layouts:
        return np.empty(0)
    return simulated_step(model, job, cluster, layouts).time


def simulated_step(model: ModelSpec, job: Job, cluster: Cluster, layouts: Sequence[Layout]) -> StepTime:
    """The step of each layout, its bubble simulated: what a prediction of single layouts says.

    Raises: LayoutError: a schedule has no such order.
    """
    return simulated_steps([(model, job, cluster, layouts)])[0]


def simulated_steps(jobs: Iterable[tuple[ModelSpec, Job, Cluster, Sequence[Layout]]]) -> list[StepTime]:
    """``simulated_step`` of several jobs; pipelines of one order run together, which is faster.

    Raises: LayoutError: a schedule has no such order.
    """
    steps, pipelines, jobs = [], [], list(jobs)
    tables = [table_of(layouts, model.layers) for model, _, _, layouts in jobs]
    for (model, job, cluster, layouts), table, routes in zip(
        jobs, tables, _routes(jobs, tables), strict=True
    ):
        parts = part_times(model, job, cluster, table, routes)
        steps.append(step_time(model, job, cluster, table, routes, parts))
        pipelines.append(
            _pipelines(model, layouts, parts, Hops(model, job, cluster, table, routes), job.program)
        )
    return [
        replace(step, bubble=bubbles) if job.orders else step
        for step, job, bubbles in zip(steps, pipelines, _bubbles(pipelines), strict=True)
    ]


def _routes(
    jobs: Sequence[tuple[ModelSpec, Job, Cluster, Sequence[Layout]]], tables: Sequence[LayoutTable]
) -> list[dict[str, Route]]:
    """The ways of all axes of every job's table, of one cluster worked out together."""
    alike = defaultdict(list)
    for number, (_, _, cluster, _) in enumerate(jobs):
        alike[cluster].append(number)
    found: list[dict[str, Route]] = [{} for _ in jobs]
    for cluster, numbers in alike.items():
        for number, routes in zip(
            numbers, shared_routes(cluster, [tables[number] for number in numbers]), strict=True
        ):
            found[number] = routes
    return found


def simulated_bubbles(model: ModelSpec, job: Job, cluster: Cluster, layouts: Sequence[Layout]) -> Floats:
    """Idle time of the busiest rank of each layout's pipeline in a step [s]; without a pipeline, 0.

    Raises: LayoutError: a schedule has no such order.
    """
    table = table_of(layouts, model.layers)
    routes = routes_of(cluster, table)
    parts = part_times(model, job, cluster, table, routes)
    hops = Hops(model, job, cluster, table, routes)
    return _bubbles([_pipelines(model, layouts, parts, hops, job.program)])[0]


class _Order(NamedTuple):
    """What pipelines have in common that run together; the last three are their program's."""

    schedule: str
    pp: int
    chunks: int
    microbatches: int
    waits: bool
    chunk_wait: float
    fills: bool


class _Pipeline(NamedTuple):
    """Layouts of a job whose pipelines have one order: their places, times of stages, and hops [s]."""

    order: _Order
    rows: list[int]
    times: StageTimes
    hops: Floats  # (layouts, boundaries of stages)


class _Pipelines(NamedTuple):
    layouts: int
    orders: list[_Pipeline]


def _pipelines(
    model: ModelSpec, layouts: Sequence[Layout], parts: Parts, hops: Hops, program: Program
) -> _Pipelines:
    """The pipelines of a job's layouts, by order."""
    alike = defaultdict(list)
    for row, layout in enumerate(layouts):
        if layout.pp > 1:
            alike[layout.schedule, layout.pp, layout.chunks, layout.microbatches].append(row)
    found = []
    for order, rows in alike.items():
        times = _stage_times(model, [layouts[row] for row in rows], _rows(parts, rows, len(layouts)))
        fills = program.fills and order[0] in FILLED
        between = hops.between_stages(rows, layouts[rows[0]])
        found.append(
            _Pipeline(_Order(*order, program.waits, program.chunk_wait, fills), rows, times, between)
        )
    return _Pipelines(len(layouts), found)


def _bubbles(jobs: Sequence[_Pipelines]) -> list[Floats]:
    """Idle time of the busiest rank of each layout of each job [s]; pipelines of one order run together."""
    idle = [np.zeros(job.layouts) for job in jobs]
    alike = defaultdict(list)
    for number, job in enumerate(jobs):
        for pipeline in job.orders:
            alike[pipeline.order].append((number, pipeline))
    for order, some in alike.items():
        times = StageTimes(*(np.concatenate([p.times[part] for _, p in some]) for part in range(4)))
        found = _idle(order, times, np.concatenate([p.hops for _, p in some]))
        ends = np.cumsum([len(p.rows) for _, p in some])[:-1]
        for (number, pipeline), part in zip(some, np.split(found, ends), strict=True):
            idle[number][pipeline.rows] = part
    return idle


def _idle(order: _Order, times: StageTimes, hops: Floats) -> Floats:
    """Of the busiest rank [s]. Where weight gradients fill all but waits for exchanges, what forwards and
    backwards alone take longer."""
    schedule, pp, chunks, microbatches = order[:4]
    run = _waiting(times, order.chunk_wait)
    if order.fills:
        run = run._replace(weight_grad=np.zeros(np.shape(run.weight_grad)))
    whole = makespans(schedule, pp, chunks, microbatches, run, hops, waits=order.waits)
    each = microbatches // SCHEDULES[schedule].pipelines
    forward, input_grad, weight_grad, backward = (np.asarray(part) for part in times[:4])
    apart = passes_apart(schedule, pp, microbatches)
    of_stage = each * (forward + backward + apart * (input_grad + weight_grad - backward))
    rank = stage_ranks(schedule, pp, chunks)
    runs = rank == np.arange(pp)[:, None]  # (ranks, stages of all pipelines)
    held = runs.reshape(pp, -1, of_stage.shape[1]).sum(axis=1)
    idle = whole - (of_stage @ held.T).max(axis=1)
    waits = order.chunk_wait * each * held.sum(axis=1).max()
    return np.asarray(np.maximum(idle, waits) if order.fills else idle)


def _waiting(times: StageTimes, wait: float) -> StageTimes:
    """Stages whose rank waits so long [s] for what a microbatch exchanges there, half of it each way."""
    if not wait:
        return times
    forward, inputs, weight, backward = (np.asarray(part) for part in times[:4])
    return StageTimes(forward + wait / 2, inputs + wait / 2, weight, backward + wait / 2)


def simulated_bubble(model: ModelSpec, job: Job, cluster: Cluster, layout: Layout) -> float:
    """``simulated_bubbles`` of one layout."""
    return float(simulated_bubbles(model, job, cluster, [layout])[0])


def pipeline_timeline(model: ModelSpec, job: Job, cluster: Cluster, layout: Layout) -> Timeline:
    """The step's microbatches through all stages of a layout with pp of 2 and more [s].

    Raises: LayoutError: the schedule has no such order.
    """
    graph = schedule_graph(layout.schedule, layout.pp, layout.chunks, layout.microbatches)
    table = table_of([layout], model.layers)
    routes = routes_of(cluster, table)
    times = _stage_times(model, [layout], part_times(model, job, cluster, table, routes))
    hops = Hops(model, job, cluster, table, routes).between_stages([0], layout)
    return simulate(graph, StageTimes(*(np.asarray(part)[0] for part in times[:4])), hops[0])


def _rows(parts: Parts, rows: Sequence[int], count: int) -> Parts:
    """The parts of some of so many layouts."""
    return parts.mapped(lambda time: np.broadcast_to(time, count)[rows])


def _stage_times(model: ModelSpec, layouts: Sequence[Layout], parts: Parts) -> StageTimes:
    """Seconds of one microbatch on each stage, (layouts, stages), of as many stages each.

    Computation with the exposed communication inside it, half of it forward and half backward; embedding and
    head where they lie. Stages behind the first recompute in a pass for weights too.
    """
    layers = np.array([layout.stage_layers for layout in layouts], dtype=np.float64)
    forward, backward, weight = (np.zeros_like(layers) for _ in range(3))
    again = np.zeros_like(layers)
    of_kind = [(layers, parts.block, parts.again)]
    if parts.experts is not None:
        with_experts = np.array([_expert_layers(model, layout) for layout in layouts], dtype=np.float64)
        dense = (layers - with_experts, parts.block, parts.again)
        of_kind = [dense, (with_experts, parts.experts, parts.experts_again)]
    for count, block, repeated in of_kind:
        forward += count * _column(block.forward + block.beside / 2)
        backward += count * _column(block.backward + block.beside / 2)
        weight += count * _column(block.weight_gradients)
        if repeated is not None:
            again += count * _column(repeated.inside)
    for stage, end in ((0, parts.embedding), (-1, parts.head)):
        forward[:, stage] += end.forward + end.beside / 2
        backward[:, stage] += end.backward + end.beside / 2
    again[:, 0] = 0.0
    again[[passes_apart(each.schedule, each.pp, each.microbatches) == 0 for each in layouts]] = 0.0
    return StageTimes(forward, backward - weight, weight + again, backward)


def _column(values: Floats | float) -> Floats:
    return np.asarray(values).reshape(-1, 1)


def _expert_layers(model: ModelSpec, layout: Layout) -> list[int]:
    """Layers with experts of each stage."""
    starts = np.cumsum([0, *layout.stage_layers])
    return [int(n) for n in np.diff(np.cumsum([0, *expert_layers(model)])[starts])]
