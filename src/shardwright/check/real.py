"""A real step on CPU ranks over gloo, under the meter that a dry run is under.

It holds what the program holds, in real tensors: the third column beside the ledger and the dry run.
"""

import time
from typing import NamedTuple

import torch

from shardwright.check.dryrun import Execution, made_up_microbatches
from shardwright.cluster import host_memory
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.run.expert_load import set_routing
from shardwright.run.init import initialise
from shardwright.run.launch import run_ranks
from shardwright.run.mesh import build_mesh
from shardwright.run.meter import MemoryMeter
from shardwright.run.recorder import Recorder, Recording
from shardwright.run.routing import BalancedRouting
from shardwright.run.step import Stepper, parallel_model
from shardwright.units import format_bytes

MOST_RANKS = 16
"""Ranks that one machine is asked to run side by side."""


class RealStep(NamedTuple):
    """What a rank held and sent in its second step; and of which storages, where that was asked for."""

    execution: Execution
    recording: Recording | None


def check_small(layout: Layout, rank_bytes: float, memory: float | None = None) -> None:
    """Refuse to run what this machine cannot: ``rank_bytes`` of each rank in its ``memory`` [B].

    Raises: LayoutError
    """
    if layout.ranks > MOST_RANKS:
        raise LayoutError(
            f"layout has {layout.ranks} ranks, a real step runs on at most {MOST_RANKS}: leave out --real"
        )
    needed, memory = rank_bytes * layout.ranks, memory or host_memory()
    if needed > memory:
        raise LayoutError(
            f"{layout.ranks} ranks hold {format_bytes(needed)}, this machine has {format_bytes(memory)}: "
            "leave out --real"
        )


def real_run(model: ModelSpec, job: Job, layout: Layout, *, record: bool = False) -> list[RealStep]:
    """Two steps of every rank, experts under balanced routing; the second, by rank.

    Raises: RunFailedError: a rank failed.
    """
    found: list[RealStep] = run_ranks(_real_rank, layout.ranks, model, job, layout, record)
    return found


def _real_rank(model: ModelSpec, job: Job, layout: Layout, record: bool) -> RealStep:
    """Body of a rank."""
    start = time.perf_counter()
    mesh = build_mesh(layout, "cpu")
    network = parallel_model(model, job, layout, mesh)
    set_routing(network, BalancedRouting())
    initialise(network, job.seed, torch.device("cpu"))
    stepper = Stepper(network, job, layout, mesh)
    stepper.step(0, made_up_microbatches(job, layout, layout.microbatches))
    recorder = Recorder() if record else None
    meter = MemoryMeter(network, stepper.optimizer, mesh, recorder)
    stepper.optimizer.register_step_pre_hook(lambda *_: meter.settle())
    with meter:
        stepper.step(1, made_up_microbatches(job, layout, layout.microbatches))
    layers = sum(len([*stage.part.layers]) for stage in network.stages)
    execution = Execution(
        at_rest=meter.at_rest,
        at_peak=meter.at_peak,
        peak=meter.peak,
        traffic=meter.traffic,
        microbatches=layout.microbatches,
        layers=layers,
        rank_layers=layers,
        time=time.perf_counter() - start,
    )
    return RealStep(execution, None if recorder is None else recorder.recording)
