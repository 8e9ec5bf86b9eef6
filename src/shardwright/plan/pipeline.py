"""Pipelines simulated action by action: what their stages really wait for, with each stage's own time.

The step's table (plan/step.py) gives every rank the slowest one's time, which is an upper bound; this is
exact for the times it is given.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwright.cluster import Cluster
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.parts import Part, Parts, hop_time, part_times
from shardwright.plan.placement import routes_of
from shardwright.plan.schedule import SCHEDULES, stage_ranks
from shardwright.plan.simulate import StageTimes, Timeline, schedule_graph, simulate
from shardwright.plan.stages import expert_layers
from shardwright.plan.steady import makespans
from shardwright.plan.step import StepTime, step_time
from shardwright.plan.table import Floats, table_of


def simulated_times(model: ModelSpec, job: Job, cluster: Cluster, layouts: Sequence[Layout]) -> Floats:
    """The step of each layout [s], its bubble simulated."""
    if not layouts:
        return np.empty(0)
    return simulated_step(model, job, cluster, layouts).time


def simulated_step(model: ModelSpec, job: Job, cluster: Cluster, layouts: Sequence[Layout]) -> StepTime:
    """The step of each layout, its bubble simulated: what a prediction of single layouts says.

    Raises: LayoutError: a schedule has no such order.
    """
    table = table_of(layouts, model.layers)
    routes = routes_of(cluster, table)
    parts = part_times(model, job, cluster, table, routes)
    step = step_time(model, job, cluster, table, routes, parts)
    if (table.pp == 1).all():
        return step
    hop = hop_time(model, job, table, routes)
    return replace(step, bubble=_bubbles(model, layouts, parts, hop, job.program.waits))


def simulated_bubbles(model: ModelSpec, job: Job, cluster: Cluster, layouts: Sequence[Layout]) -> Floats:
    """Idle time of the busiest rank of each layout's pipeline in a step [s]; without a pipeline, 0.

    Raises: LayoutError: a schedule has no such order.
    """
    table = table_of(layouts, model.layers)
    routes = routes_of(cluster, table)
    parts = part_times(model, job, cluster, table, routes)
    return _bubbles(model, layouts, parts, hop_time(model, job, table, routes), job.program.waits)


def _bubbles(model: ModelSpec, layouts: Sequence[Layout], parts: Parts, hop: Floats, waits: bool) -> Floats:
    idle = np.zeros(len(layouts))
    hops = np.broadcast_to(hop, len(layouts))
    alike = defaultdict(list)
    for row, layout in enumerate(layouts):
        if layout.pp > 1:
            alike[layout.schedule, layout.pp, layout.chunks, layout.microbatches].append(row)
    for (schedule, pp, chunks, microbatches), rows in alike.items():
        times = _stage_times(model, [layouts[row] for row in rows], _rows(parts, rows, len(layouts)))
        whole = makespans(schedule, pp, chunks, microbatches, times, hops[rows], waits=waits)
        each = microbatches // SCHEDULES[schedule].pipelines
        forward, input_grad, weight_grad = (np.asarray(part) for part in times[:3])
        of_stage = each * (forward + input_grad + weight_grad)
        rank = stage_ranks(schedule, pp, chunks)
        runs = rank == np.arange(pp)[:, None]  # (ranks, stages of all pipelines)
        held = runs.reshape(pp, -1, of_stage.shape[1]).sum(axis=1)
        idle[rows] = whole - (of_stage @ held.T).max(axis=1)
    return idle


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
    hop = float(np.broadcast_to(hop_time(model, job, table, routes), 1)[0])
    return simulate(graph, StageTimes(*(np.asarray(part)[0] for part in times[:3])), hop)


def _rows(parts: Parts, rows: Sequence[int], count: int) -> Parts:
    """The parts of some of so many layouts."""

    def some(part: Part) -> Part:
        return Part(*(np.broadcast_to(np.asarray(time), count)[rows] for time in part))

    experts = None if parts.experts is None else some(parts.experts)
    return Parts(some(parts.block), experts, some(parts.embedding), some(parts.head))


def _stage_times(model: ModelSpec, layouts: Sequence[Layout], parts: Parts) -> StageTimes:
    """Seconds of one microbatch on each stage, (layouts, stages), of as many stages each.

    Computation with the exposed communication inside it, half of it forward and half backward; embedding and
    head where they lie.
    """
    layers = np.array([layout.stage_layers for layout in layouts], dtype=np.float64)
    forward, backward, weight = (np.zeros_like(layers) for _ in range(3))
    of_kind = [(layers, parts.block)]
    if parts.experts is not None:
        with_experts = np.array([_expert_layers(model, layout) for layout in layouts], dtype=np.float64)
        of_kind = [(layers - with_experts, parts.block), (with_experts, parts.experts)]
    for count, block in of_kind:
        forward += count * _column(block.forward + block.beside / 2)
        backward += count * _column(block.backward + block.beside / 2)
        weight += count * _column(block.weight_gradients)
    for stage, end in ((0, parts.embedding), (-1, parts.head)):
        forward[:, stage] += end.forward + end.beside / 2
        backward[:, stage] += end.backward + end.beside / 2
    return StageTimes(forward, backward - weight, weight)


def _column(values: Floats | float) -> Floats:
    return np.asarray(values).reshape(-1, 1)


def _expert_layers(model: ModelSpec, layout: Layout) -> list[int]:
    """Layers with experts of each stage."""
    starts = np.cumsum([0, *layout.stage_layers])
    return [int(n) for n in np.diff(np.cumsum([0, *expert_layers(model)])[starts])]
