"""Dry run: the real program for one rank, under fake tensors and a fake process group.

No memory is allocated and nothing is sent; check/tape.py sees every storage and every collective. A step of
many layers and microbatches is not executed whole: check/extrapolate.py makes it of two shorter ones.
"""

import contextlib
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_dtensor_caches
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.check.extrapolate import Step, executed_step, extrapolated_step
from shardwright.check.in_flight import held_in_flight
from shardwright.check.marks import BATCH, SETTLED, marked
from shardwright.check.shorter import Program, program_of, shorter
from shardwright.check.tape import Segment, Tape
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.run.expert_load import set_routing
from shardwright.run.mesh import RankMesh, build_mesh
from shardwright.run.meter import KINDS, STATE, Collective, Sent
from shardwright.run.model import Microbatch
from shardwright.run.recorder import Recorder
from shardwright.run.routing import BalancedRouting
from shardwright.run.step import Stepper, parallel_model


@dataclass(frozen=True)
class Execution:
    """What one rank holds and sends in its second step (the first has no optimizer state yet).

    ``microbatches`` and ``layers`` were executed at most in one go, of those that the rank has; what those
    left out would add is in the numbers.
    """

    at_rest: dict[str, int]
    at_peak: dict[str, int]
    peak: int
    traffic: dict[Collective, Sent]
    microbatches: int
    layers: int
    rank_layers: int
    time: float

    def is_whole(self, layout: Layout) -> bool:
        """Whether nothing was left out."""
        return self.microbatches == layout.microbatches and self.layers == self.rank_layers


def dry_run(
    model: ModelSpec,
    job: Job,
    layout: Layout,
    rank: int = 0,
    *,
    whole: bool = False,
    as_gloo: bool = False,
    recorder: Recorder | None = None,
) -> Execution:
    """Execute two steps of ``rank`` in the fake mode and report the second.

    Without ``whole``, layers and microbatches that only repeat others are left out and reckoned in. The last
    two want the whole: ``as_gloo`` holds what is in flight as gloo does (check/in_flight.py), where NCCL lets
    go of what has left; a ``recorder`` is told of every storage of the second step.

    Raises: RuntimeError: a process group exists already in this process.
    """
    start = time.perf_counter()
    program = program_of(model, layout, rank)
    pair = None if whole or as_gloo or recorder is not None else shorter(model, program)
    step, longest = None, program
    if pair is not None:
        first, second = _tapes(model, job, (pair.first, pair.second))
        step, longest = extrapolated_step(program, pair, first, second), pair.second
    if step is None:
        (tape,) = _tapes(model, job, (program,), as_gloo=as_gloo, recorder=recorder)
        step, longest = executed_step(tape), program
    return _execution(step, program, longest, time.perf_counter() - start)


def _execution(step: Step, program: Program, longest: Program, seconds: float) -> Execution:
    assert step.whole.rise is not None
    return Execution(
        at_rest={kind: held for kind, held in zip(KINDS, step.at_rest, strict=True) if kind in STATE},
        at_peak=dict(zip(KINDS, step.whole.rise.held, strict=True)),
        peak=step.whole.rise.total,
        traffic=dict(sorted(step.whole.sent.items())),
        microbatches=longest.layout.microbatches,
        layers=longest.layers,
        rank_layers=program.layers,
        time=seconds,
    )


def _tapes(
    model: ModelSpec,
    job: Job,
    programs: Sequence[Program],
    *,
    as_gloo: bool = False,
    recorder: Recorder | None = None,
) -> list[list[Segment]]:
    """Tapes of programs on one mesh."""
    layout, rank = programs[0].layout, programs[0].rank
    hook = sys.excepthook  # torch puts "[rank N]" before what it prints, once more with every group
    dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    try:
        mesh = build_mesh(layout, "cpu")
        with held_in_flight() if as_gloo else contextlib.nullcontext():
            return [_tape(model, job, program, mesh, recorder) for program in programs]
    finally:
        dist.destroy_process_group()
        # they would hand the fake mesh to a real one of the same shape
        clear_dtensor_caches()  # type: ignore[no-untyped-call]
        sys.excepthook = hook


def _tape(
    model: ModelSpec, job: Job, program: Program, mesh: RankMesh, recorder: Recorder | None
) -> list[Segment]:
    """Execute two steps and record the second."""
    layout = program.layout
    network = parallel_model(model, job, layout, mesh, parts=program.parts)
    set_routing(network, BalancedRouting(job.expert_imbalance if layout.ep > 1 else 1.0))
    with FakeTensorMode(allow_non_fake_inputs=True), _no_collection():
        network.to_empty(device="cpu")
        stepper = Stepper(network, job, layout, mesh, read=lambda scalar: 1.0)
        if stepper.pipeline is not None:
            stepper.pipeline.trust_shapes()
        stepper.step(0, made_up_microbatches(job, layout, _first_microbatches(layout)))
        tape = Tape(network, stepper.optimizer, mesh, recorder)
        with marked(tape, stepper), tape:
            tape.begin(BATCH)
            given = made_up_microbatches(job, layout, layout.microbatches)  # kept: its end is not the step's
            stepper.optimizer.register_step_pre_hook(lambda *_: _settle(tape))
            stepper.step(1, given)
    return tape.segments


def _first_microbatches(layout: Layout) -> int:
    """Of the step that makes the optimizer's state, and DTensor's rules for what follows, each of which fakes
    whole tensors once. A second microbatch has a rule of its own where gradients add up as DTensors; a
    schedule of stages wants all."""
    if layout.pp > 1:
        return layout.microbatches
    adds_up = layout.zero_stage < 2 and layout.tp * layout.ep > 1
    return min(layout.microbatches, 2 if adds_up else 1)


def _settle(tape: Tape) -> None:
    tape.settle()
    tape.begin(SETTLED)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Cycles of objects are freed before and after, at no time in between: else when would be chance."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def made_up_microbatches(job: Job, layout: Layout, count: int) -> list[Microbatch]:
    """``count`` microbatches of one made-up token, as training is given them."""
    arrays = 2 if job.packing == "windows" else 3
    return [
        Microbatch(*(torch.zeros(layout.micro_batch, job.seq, dtype=torch.int64) for _ in range(arrays)))
        for _ in range(count)
    ]
