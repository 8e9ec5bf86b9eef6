"""Dry run: the real program for one rank, under fake tensors and a fake process group.

No memory is allocated and nothing is sent; run/meter.py sees every storage and every collective.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_dtensor_caches
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.check.in_flight import held_in_flight
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.holdings import token_bytes
from shardwright.run.expert_load import set_routing
from shardwright.run.mesh import build_mesh
from shardwright.run.meter import ACTIVATIONS, Collective, MemoryMeter, Sent
from shardwright.run.model import Microbatch
from shardwright.run.recorder import Recorder
from shardwright.run.routing import BalancedRouting
from shardwright.run.step import Stepper, parallel_model

STEADY_MICROBATCHES = 3
"""Microbatches that are executed at most: the first, one in the steady state, the last. The others of a step
repeat the second."""


@dataclass(frozen=True)
class Execution:
    """What one rank held and sent in its second step (the first has no optimizer state yet).

    ``microbatches`` were executed; what those left out would add is in the numbers.
    """

    at_rest: dict[str, int]
    at_peak: dict[str, int]
    peak: int
    traffic: dict[Collective, Sent]
    microbatches: int
    time: float


def dry_run(
    model: ModelSpec,
    job: Job,
    layout: Layout,
    rank: int = 0,
    *,
    most_microbatches: int = STEADY_MICROBATCHES,
    recorder: Recorder | None = None,
) -> Execution:
    """Execute two steps of ``rank`` in the fake mode and report the second.

    ``most_microbatches``: 3 or more. A ``recorder`` is told of every storage of the second step.

    Of a pipeline every microbatch is executed.

    Raises: RuntimeError: a process group exists already in this process.
    """
    start = time.perf_counter()
    count = layout.microbatches if layout.pp > 1 else min(layout.microbatches, most_microbatches)
    dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    try:
        mesh = build_mesh(layout, "cpu")
        network = parallel_model(model, job, layout, mesh)
        set_routing(network, BalancedRouting(job.expert_imbalance if layout.ep > 1 else 1.0))
        with FakeTensorMode(allow_non_fake_inputs=True), held_in_flight():
            network.to_empty(device="cpu")
            stepper = Stepper(network, job, layout, mesh, read=lambda scalar: 1.0)
            if stepper.pipeline is not None:
                stepper.pipeline.trust_shapes()
            # makes the optimizer's state, and DTensor's rules for what follows, which fake whole tensors once
            stepper.step(0, made_up_microbatches(job, layout, count if layout.pp > 1 else min(count, 2)))
            meter = MemoryMeter(network, stepper.optimizer, mesh, recorder)
            sent_after: list[dict[Collective, Sent]] = []
            stepper.after_microbatch = lambda index: sent_after.append(meter.traffic)
            stepper.optimizer.register_step_pre_hook(lambda *_: meter.settle())
            with meter:
                stepper.step(1, made_up_microbatches(job, layout, count))
        left_out = layout.microbatches - count
        ids = left_out * token_bytes(job) * layout.micro_batch * job.seq
        return Execution(
            at_rest=meter.at_rest,
            at_peak=meter.at_peak | {ACTIVATIONS: meter.at_peak[ACTIVATIONS] + ids},
            peak=meter.peak + ids,
            traffic=_with_repeats(meter.traffic, sent_after, left_out),
            microbatches=count,
            time=time.perf_counter() - start,
        )
    finally:
        dist.destroy_process_group()
        # they would hand the fake mesh to a real one of the same shape
        clear_dtensor_caches()  # type: ignore[no-untyped-call]


def _with_repeats(
    traffic: dict[Collective, Sent], after: list[dict[Collective, Sent]], repeats: int
) -> dict[Collective, Sent]:
    """Traffic of the step, and ``repeats`` times more that of its second microbatch."""
    if not repeats:
        return traffic
    none = Sent(0, 0)
    result = {}
    for key, sent in traffic.items():
        before, behind = after[0].get(key, none), after[1].get(key, none)
        result[key] = Sent(
            sent.launches + repeats * (behind.launches - before.launches),
            sent.payload_bytes + repeats * (behind.payload_bytes - before.payload_bytes),
        )
    return result


def made_up_microbatches(job: Job, layout: Layout, count: int) -> list[Microbatch]:
    """``count`` microbatches of one made-up token, as training is given them."""
    arrays = 2 if job.packing == "windows" else 3
    return [
        Microbatch(*(torch.zeros(layout.micro_batch, job.seq, dtype=torch.int64) for _ in range(arrays)))
        for _ in range(count)
    ]
