"""Training: steps and evaluation on every rank inside a process group; rank 0 keeps the record."""

import contextlib
import importlib.util
import math
import platform
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

import shardwright
from shardwright.errors import MissingExtraError, PlanFileError, RunFailedError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.run.dataset import Batches, Sample
from shardwright.run.dp import reshard
from shardwright.run.fp8 import check_fp8
from shardwright.run.init import initialise
from shardwright.run.mesh import RankMesh, build_mesh
from shardwright.run.model import Stages
from shardwright.run.optim import learning_rate
from shardwright.run.record import METERED_STEP, METRICS, Record, StepRecord, prepare_run_folder
from shardwright.run.step import Microbatch, Stepper, parallel_model


class Meter(AbstractContextManager[Any], Protocol):
    """Measures memory inside its ``with`` block."""

    peak: int  # most bytes held at once


MeterFactory = Callable[[Stages, torch.optim.Optimizer, RankMesh], Meter]


def train(
    spec: ModelSpec,
    job: Job,
    layout: Layout,
    dataset: Batches,
    run_directory: Path,
    *,
    predicted_step_time: float,
    predicted_memory: float,
    device_type: str = "cpu",
    step_flops: float | None = None,
    peak_flops_per_s: float | None = None,
    meter_factory: MeterFactory | None = None,
    plan_text: str = "",
    tensorboard: bool = False,
    compile_backend: str | None = None,
    after_step: Callable[[StepRecord], None] | None = None,
) -> dict[str, Any] | None:
    """Train on this rank with all others; rank 0 returns what result.json holds, the others None.

    ``step_flops`` [FLOP] of the whole model and global batch, and ``peak_flops_per_s`` of one device: with
    both, MFU is known. ``meter_factory`` measures memory around one step where the device does not itself
    (CPU). ``plan_text`` is kept in the folder as plan.toml. ``compile_backend``, a name that
    ``torch.compile`` knows, compiles blocks. ``after_step`` is called on every rank. On SIGINT or SIGTERM
    every rank ends after the same step.

    Raises: PlanFileError: the folder already holds a run. RunFailedError: loss or gradients are not finite.
    LayoutError: fp8 on a device without.
    """
    record = (
        Record(run_directory, job, layout, plan_text, tensorboard)
        if _agree_on_folder(run_directory, tensorboard)
        else None
    )
    stepper, device = _build_stepper(spec, job, layout, device_type, compile_backend)
    memory = MemoryGauge(stepper, device, meter_factory)
    peak_time = step_flops / (peak_flops_per_s * layout.ranks) if step_flops and peak_flops_per_s else None
    result = None
    with record or contextlib.nullcontext(), _stop_requests() as stop:
        interrupted, fault = False, None
        for index in range(job.steps):
            line = _one_step(stepper, dataset, index, memory, peak_time)
            if record is not None:
                record.add(line)
            if after_step is not None:
                after_step(line)
            fault = _not_finite(line)
            interrupted = _any_rank(stop(), device) and line.step < job.steps
            if fault or interrupted:
                break
        peak_memory = memory.peak_of_all_ranks()
        if record is not None:
            ending = {"interrupted": interrupted, "fault": fault, "peak_memory": peak_memory}
            predicted = {"step_time": predicted_step_time, "memory": predicted_memory}
            result = record.finish(
                {**ending, "predicted": predicted, **_circumstances(device, dataset.digest())}
            )
    if fault:
        raise RunFailedError(fault)
    return result


def _build_stepper(
    spec: ModelSpec, job: Job, layout: Layout, device_type: str, compile_backend: str | None
) -> tuple[Stepper, torch.device]:
    """The model of this rank with its initial weights, ready to step, and the device it is on."""
    device = (
        torch.device(device_type, torch.cuda.current_device())
        if device_type == "cuda"
        else torch.device("cpu")
    )
    if job.precision == "fp8":
        check_fp8(device)
    mesh = build_mesh(layout, device_type)
    model = parallel_model(spec, job, layout, mesh, compile_backend=compile_backend)
    initialise(model, job.seed, device)
    return Stepper(model, job, layout, mesh), device


def evaluate(stepper: Stepper, dataset: Batches) -> float:
    """Loss over ``job.eval_batches`` held-out global batches, mean over unmasked tokens, on every rank.

    Forward only; leaves the model resharded, as a step leaves it.
    """
    total = torch.zeros(2, dtype=torch.float64, device=stepper.mesh.device_type)
    with torch.no_grad():
        for batch in range(stepper.job.eval_batches):
            samples = dataset.held_out_microbatches(batch, stepper.layout, stepper.mesh.data.get_local_rank())
            total += stepper.evaluate(to_device(samples, stepper.mesh.device_type))
    reshard(stepper.model)
    loss, tokens = stepper.sum_over_tokens(total)
    return float(stepper.sum_over_stages(loss)) / max(float(tokens), 1.0)


class MemoryGauge:
    """Peak memory of this rank [B]: CUDA's own from the second step on, else a meter around that step."""

    def __init__(self, stepper: Stepper, device: torch.device, meter_factory: MeterFactory | None) -> None:
        self.device, self.peak = device, 0
        self._metered = min(METERED_STEP, stepper.job.steps - 1)
        self._make = (
            None
            if meter_factory is None
            else lambda: meter_factory(stepper.model, stepper.optimizer, stepper.mesh)
        )

    @contextlib.contextmanager
    def around(self, index: int) -> Iterator[None]:
        """Measure step ``index`` if it is the one."""
        if self.device.type == "cuda":
            if index == self._metered:
                torch.cuda.reset_peak_memory_stats()
            yield
            self.peak = torch.cuda.max_memory_allocated()
        elif self._make is not None and index == self._metered:
            meter = self._make()
            with meter:
                yield
            self.peak = meter.peak
        else:
            yield

    def peak_of_all_ranks(self) -> int | None:
        """Peak of the rank that holds most; None if none was measured."""
        value = torch.tensor(self.peak, dtype=torch.int64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value) or None


def _one_step(
    stepper: Stepper, dataset: Batches, index: int, memory: MemoryGauge, peak_time: float | None
) -> StepRecord:
    """Step ``index`` from the data on, and its evaluation if one is due; the evaluation is not timed.

    ``peak_time``: s that a step would take at the peak of the devices.
    """
    job = stepper.job
    start = time.perf_counter()
    with memory.around(index):
        samples = dataset.microbatches(index, stepper.layout, stepper.mesh.data.get_local_rank())
        found = stepper.step(index, to_device(samples, stepper.mesh.device_type))
    step_time = time.perf_counter() - start
    due = job.eval_every and ((index + 1) % job.eval_every == 0 or index + 1 == job.steps)
    return StepRecord(
        step=index + 1,
        loss=found.loss,
        gradient_norm=found.gradient_norm,
        learning_rate=learning_rate(job, index),
        tokens=found.tokens,
        step_time=step_time,
        tokens_per_s=job.tokens_per_step / step_time,
        mfu=None if peak_time is None else peak_time / step_time,
        memory=memory.peak or None,
        eval_loss=evaluate(stepper, dataset) if due else None,
    )


def to_device(samples: Iterable[Sample], device_type: str) -> list[Microbatch]:
    """Copies on the device, on a CPU too: what a step holds is the same everywhere."""
    return [
        Microbatch(
            *(
                None if array is None else torch.from_numpy(array).to(device_type, copy=True)
                for array in sample
            )
        )
        for sample in samples
    ]


def _agree_on_folder(folder: Path, tensorboard: bool) -> bool:
    """Rank 0 makes the run folder; all ranks raise what it found. Whether this is rank 0."""
    if tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError("train", "--tensorboard")
    fault: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            prepare_run_folder(folder)
        except PlanFileError as error:
            fault = [str(error)]
    dist.broadcast_object_list(fault, src=0)
    if fault[0] is not None:
        raise PlanFileError(fault[0])
    return dist.get_rank() == 0


@contextlib.contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn SIGINT and SIGTERM into an answer to "was this rank asked to stop?"."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in numbers}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _any_rank(asked: bool, device: torch.device) -> bool:
    """Whether any rank was asked to stop: all leave after the same step. One 8 B all-reduce, not timed."""
    flag = torch.tensor(int(asked), dtype=torch.int64, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _not_finite(line: StepRecord) -> str | None:
    """What to tell the user if loss or gradients are not finite; the same on every rank."""
    for name, value in (("loss", line.loss), ("gradient norm", line.gradient_norm)):
        if not math.isfinite(value):
            return (
                f"step {line.step}: the {name} is {value} (learning rate {line.learning_rate:g}): use a "
                "lower learning_rate, longer warmup_steps or a clip_norm above 0; the steps before are in "
                f"{METRICS}"
            )
    return None


def _circumstances(device: torch.device, digest: str) -> dict[str, Any]:
    """Device, software and data of a run."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    return {
        "device": name,
        "world_size": dist.get_world_size(),
        "software": {
            "shardwright": shardwright.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "numpy": np.__version__,
            "system": platform.platform(),
        },
        "data_digest": digest,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
