"""Dry run: the real program for one rank, under fake tensors and a fake process group.

No memory is allocated and nothing is sent; run/meter.py sees every storage and every collective.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.run.mesh import build_mesh
from shardwright.run.meter import Collective, MemoryMeter, Sent
from shardwright.run.step import Microbatch, Stepper, parallel_model


@dataclass(frozen=True)
class Execution:
    """What one rank held and sent in its second step (the first has no optimizer state yet)."""

    at_rest: dict[str, int]
    at_peak: dict[str, int]
    peak: int
    traffic: dict[Collective, Sent]
    time: float


def dry_run(model: ModelSpec, job: Job, layout: Layout, rank: int = 0) -> Execution:
    """Execute two steps of ``rank`` in the fake mode and report the second.

    Raises: RuntimeError: a process group exists already in this process.
    """
    start = time.perf_counter()
    dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    try:
        mesh = build_mesh(layout, "cpu")
        network = parallel_model(model, job, layout, mesh)
        with FakeTensorMode(allow_non_fake_inputs=True):
            network.to_empty(device="cpu")
            stepper = Stepper(network, job, layout, mesh, read=lambda scalar: 1.0)
            stepper.step(0, _microbatches(job, layout))
            meter = MemoryMeter(network, stepper.optimizer, mesh)
            stepper.optimizer.register_step_pre_hook(lambda *_: meter.settle())
            with meter:
                stepper.step(1, _microbatches(job, layout))
        return Execution(meter.at_rest, meter.at_peak, meter.peak, meter.traffic, time.perf_counter() - start)
    finally:
        dist.destroy_process_group()


def _microbatches(job: Job, layout: Layout) -> list[Microbatch]:
    """Token ids and targets of a step, as training is given them."""
    shape = (layout.micro_batch, job.seq)
    return [
        (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))
        for _ in range(layout.microbatches)
    ]
