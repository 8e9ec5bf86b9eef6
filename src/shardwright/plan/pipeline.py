"""One pipeline simulated action by action: what its stages really wait for, with each stage's own time."""

import numpy as np

from shardwright.cluster import Cluster
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.simulate import StageTimes, Timeline, schedule_graph, simulate
from shardwright.plan.step import hop_time, part_times
from shardwright.plan.table import table_of


def pipeline_timeline(model: ModelSpec, job: Job, cluster: Cluster, layout: Layout) -> Timeline:
    """The step's microbatches through all stages of a layout with pp of 2 and more [s].

    Computation with the exposed communication of tp and cp, half of it forward and half backward; embedding
    and head where they lie. The step's table (plan/step.py) gives every rank the slowest one's time instead,
    which is an upper bound; this is exact for the times it is given.

    Raises: LayoutError: the schedule has no such order.
    """
    table = table_of([layout], model.layers)
    block, embedding, head = part_times(model, job, cluster, table)
    layers = np.array(layout.stage_layers, dtype=np.float64)
    first, last = np.zeros(len(layers)), np.zeros(len(layers))
    first[0], last[-1] = 1.0, 1.0
    beside = float(block.tp[0] + block.cp[0]) / 2
    forward = layers * (float(block.forward[0]) + beside)
    forward += first * float(embedding.forward[0] + embedding.tp[0] / 2)
    forward += last * float(head.forward[0] + head.tp[0] / 2)
    weight = layers * float(block.weight_gradients[0])
    backward = layers * (float(block.backward[0]) + beside)
    backward += first * float(embedding.backward[0] + embedding.tp[0] / 2)
    backward += last * float(head.backward[0] + head.tp[0] / 2)
    graph = schedule_graph(layout.schedule, layout.pp, layout.chunks, layout.microbatches)
    hop = float(hop_time(model, job, cluster, table)[0])
    return simulate(graph, StageTimes(forward, backward - weight, weight), hop)


def simulated_bubble(model: ModelSpec, job: Job, cluster: Cluster, layout: Layout) -> float:
    """Idle time of the busiest rank of a pipeline in a step [s]; without a pipeline, 0."""
    if layout.pp == 1:
        return 0.0
    timeline = pipeline_timeline(model, job, cluster, layout)
    return float(timeline.makespan - timeline.busy.max(axis=-1))
