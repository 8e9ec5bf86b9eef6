"""Training: steps and evaluation on every rank inside a process group; rank 0 keeps the record."""

import contextlib
import importlib.util
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

import shardwright
from shardwright.errors import MissingExtraError, PlanFileError, RunFailedError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.run import checkpoint
from shardwright.run.dataset import Batches, Sample
from shardwright.run.dp import reshard
from shardwright.run.fp8 import check_fp8
from shardwright.run.init import initialise
from shardwright.run.mesh import RankMesh, build_mesh
from shardwright.run.model import Stages
from shardwright.run.optim import learning_rate
from shardwright.run.options import RunOptions
from shardwright.run.profile import StepTrace
from shardwright.run.ranks import Predicted, gather_holdings, holdings_table, write_holdings
from shardwright.run.record import METERED_STEP, Record, StepRecord, prepare_run_folder, read_lines
from shardwright.run.step import Microbatch, Stepper, parallel_model
from shardwright.run.watch import Watch, remembered


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
    predicted_state: Sequence[Predicted] = (),
    device_type: str = "cpu",
    step_flops: float | None = None,
    peak_flops_per_s: float | None = None,
    meter_factory: MeterFactory | None = None,
    plan_text: str = "",
    compile_backend: str | None = None,
    options: RunOptions = RunOptions(),  # noqa: B008  (a tuple of plain values)
    after_step: Callable[[StepRecord], None] | None = None,
) -> dict[str, Any] | None:
    """Train on this rank with all others; rank 0 returns what result.json holds, the others None.

    ``step_flops`` [FLOP] of the whole model and global batch, and ``peak_flops_per_s`` of one device: with
    both, MFU is known. ``meter_factory`` measures memory around one step where the device does not itself
    (CPU). ``predicted_state``: what each rank of pp holds by the plan. ``plan_text`` is kept in the folder as
    plan.toml. ``compile_backend``, a name that ``torch.compile`` knows, compiles blocks. ``after_step`` is
    called on every rank. On SIGINT or SIGTERM every rank ends after the same step. A run that resumes goes on
    from the newest checkpoint, whose model, job and data the caller has compared.

    Raises: PlanFileError: the folder already holds a run; to resume, it has no checkpoint. RunFailedError:
    ``options`` end the run for a loss that is no number or jumps, or a checkpoint cannot be written or read.
    LayoutError: fp8 on a device without.
    """
    start = _agree_on_start(run_directory, job.steps, options)
    run_directory = start.folder
    stepper, device = build_stepper(spec, job, layout, device_type, compile_backend)
    watch = Watch(options.on_nan, options.on_spike, start.recent, lambda action: _largest(action, device))
    stepper.admits = watch.admits
    if start.checkpoint is not None:
        checkpoint.load(start.checkpoint, stepper)
    record = _open_record(start, stepper, predicted_state, plan_text, options.tensorboard)
    digest = dataset.digest() if record is not None else ""
    memory = MemoryGauge(stepper, device, meter_factory, start.step)
    trace = StepTrace(options.profile, run_directory, device)
    peak_time = step_flops / (peak_flops_per_s * layout.ranks) if step_flops and peak_flops_per_s else None
    result = None
    with record or contextlib.nullcontext(), _stop_requests() as stop:
        interrupted, fault = False, None
        for index in range(start.step, job.steps):
            with trace.around(index + 1):
                line = _one_step(stepper, dataset, index, memory, peak_time)
            if record is not None:
                record.add(line)
            if after_step is not None:
                after_step(line)
            fault = watch.fault(line)
            interrupted = bool(_largest(int(stop()), device)) and line.step < job.steps
            if not fault and _is_saved(line.step, job.steps, options.checkpoint_every, interrupted):
                checkpoint.save(run_directory, stepper, line.step, digest, keep=options.keep)
            if fault or interrupted:
                break
        trace.finish()
        peak_memory = memory.peak_of_all_ranks()
        if record is not None:
            ending = {"interrupted": interrupted, "fault": fault, "peak_memory": peak_memory}
            predicted = {"step_time": predicted_step_time, "memory": predicted_memory}
            result = record.finish({**ending, "predicted": predicted, **_circumstances(device, digest)})
    if fault:
        raise RunFailedError(fault)
    return result


def _open_record(
    start: "Start", stepper: Stepper, predicted: Sequence[Predicted], plan_text: str, tensorboard: bool
) -> Record | None:
    """The run's record on rank 0, after telling which rank holds what; None on the others."""
    holdings, layout = gather_holdings(stepper, predicted), stepper.layout
    if holdings is None:
        return None
    write_holdings(holdings, layout, start.folder)
    print(holdings_table(holdings, layout), file=sys.stderr)
    lines = read_lines(start.folder, start.step)
    return Record(start.folder, stepper.job, layout, plan_text, tensorboard, lines)


def build_stepper(
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

    def __init__(
        self, stepper: Stepper, device: torch.device, meter_factory: MeterFactory | None, first: int
    ) -> None:
        """``first``: index of the first step that this process makes."""
        self.device, self.peak = device, 0
        self._metered = min(first + METERED_STEP, stepper.job.steps - 1)
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
        return _largest(self.peak, self.device) or None


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
        skipped=not found.applied,
        fullest_expert=None if found.experts is None else found.experts.fullest,
        emptiest_expert=None if found.experts is None else found.experts.emptiest,
        balance_loss=None if found.experts is None else found.experts.balance_loss,
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


class Start(NamedTuple):
    """Where rank 0 keeps a run and where it starts: after ``step`` steps, of which the watch remembers the
    ``recent`` ones."""

    folder: Path
    step: int = 0
    checkpoint: Path | None = None
    recent: tuple[StepRecord, ...] = ()


def _agree_on_start(folder: Path, steps: int, options: RunOptions) -> Start:
    """Rank 0 makes the run folder or finds the newest checkpoint in it; all ranks raise what it found."""
    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError("train", "--tensorboard")
    answer: list[Start | str] = [""]
    if dist.get_rank() == 0:
        try:
            if options.resume:
                answer = [_resumed(folder, steps)]
            else:
                prepare_run_folder(folder)
                answer = [Start(folder)]
        except PlanFileError as error:
            answer = [str(error)]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], str):
        raise PlanFileError(answer[0])
    return answer[0]


def _resumed(folder: Path, steps: int) -> Start:
    newest = checkpoint.newest(folder)
    step = checkpoint.read_about(newest).step
    if step >= steps:
        raise PlanFileError(f"run {folder} has made all of its {steps} steps: ask for more with --steps")
    checkpoint.remove_partial(folder)
    print(f"continuing run {folder} after step {step} of {steps}, from {newest}", file=sys.stderr)
    return Start(folder, step, newest, remembered(read_lines(folder, step)))


def _is_saved(step: int, steps: int, every: int, interrupted: bool) -> bool:
    """Whether a checkpoint is due after ``step``: every so many, and whenever a run ends well."""
    return every > 0 and (step % every == 0 or step == steps or interrupted)


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


def _largest(value: int, device: torch.device) -> int:
    """The largest of all ranks: they decide alike. One all-reduce of 8 B."""
    found = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


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
