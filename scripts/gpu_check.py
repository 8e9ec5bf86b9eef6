"""Figures that need a GPU: allocator peaks against dry runs, MFU, fp8. Less than 8 minutes on one device.

One device stands for one rank of a large job: under the fake process group nothing is sent, and all that the
rank holds is really allocated. Results replace their section of docs/measurements.md. ``--toy`` goes the same
way on a CPU with tiny models, where run/meter.py stands for the allocator.
"""

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_dtensor_caches
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright
from shardwright.check.dryrun import dry_run
from shardwright.cluster import device as device_of
from shardwright.cluster import device_names
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec, preset
from shardwright.plan.compute import model_flops_per_token
from shardwright.run.fp8 import check_fp8
from shardwright.run.init import initialise
from shardwright.run.mesh import build_mesh, init_process_group
from shardwright.run.meter import MemoryMeter
from shardwright.run.model import Microbatch
from shardwright.run.step import Stepper, parallel_model
from shardwright.units import format_bytes

MEMORY_GOAL, MFU_GOAL = 0.03, 0.55
"""Largest difference between allocator and dry run, and least MFU."""

USABLE_MEMORY = 0.85
"""Share of a device's memory that a dry run may come to where the microbatch is chosen: the rest is for
library workspaces and fragments."""

MEASUREMENTS = Path(__file__).parents[1] / "docs" / "measurements.md"
BEGIN, END = "<!-- gpu_check: begin -->", "<!-- gpu_check: end -->"


@dataclass(frozen=True)
class Case:
    """One rank of a job to hold in memory."""

    name: str
    model: ModelSpec
    job: Job
    layout: Layout


@dataclass(frozen=True)
class MemoryRow:
    """Peak of a rank in its second step [B], as the dry run has it and as it was."""

    case: str
    predicted: int
    allocated: int
    difference: float  # of the allocated
    ok: bool


@dataclass(frozen=True)
class SpeedRow:
    """A model on one device: s a step (median), share of the device's bf16 peak, loss of the last step."""

    model: str
    precision: str
    compiled: bool
    micro_batch: int
    step_time: float
    tokens_per_s: float
    mfu: float | None  # None on a CPU
    loss: float


@dataclass(frozen=True)
class Scale:
    """Sizes of a check: for a GPU, or toy sizes for any machine."""

    large: ModelSpec  # split over eight ranks
    small: tuple[ModelSpec, ...]  # whole on one
    seq: int
    micro_batches: tuple[int, ...]  # the first that fits is taken
    loss_chunks: int
    warm_up: int
    steps: int
    compiler: str


def toy(name: str, layers: int) -> ModelSpec:
    """A model for the CPU; its matrices are large beside the handful of scalars that a step needs."""
    return ModelSpec(
        name=name, model_type="llama", layers=layers, hidden=128, ffn=256, heads=8, kv_heads=8, head_size=16,
        vocab=1024,
    )  # fmt: skip


def scale_of(device: torch.device) -> Scale:
    """The sizes for a kind of device."""
    if device.type == "cuda":
        small = (preset("llama-3.2-1b"), preset("llama-3.2-3b"))
        return Scale(preset("llama-3.1-8b"), small, 4096, (4, 2, 1), 8, 3, 5, "inductor")
    return Scale(toy("toy-large", 2), (toy("toy-small", 1),), 64, (2, 1), 2, 1, 1, "aot_eager")


def memory_cases(scale: Scale) -> list[Case]:
    """Jobs of eight ranks, two microbatches each."""
    plain = {"dp_shard": 8, "zero_stage": 3, "microbatches": 2}
    layouts = {
        "FSDP 8": plain,
        "FSDP 4 x TP 2": plain | {"dp_shard": 4, "tp": 2, "sp": True},
        "FSDP 8, full recompute": plain | {"recompute": "full"},
        "FSDP 8, loss in chunks": plain | {"recompute": "full", "loss_chunks": 8},
    }
    cases = []
    for name, fields in layouts.items():
        layout = Layout(**fields)
        job = Job(seq=scale.seq, global_batch=layout.dp * layout.microbatches, precision="bf16")
        cases.append(Case(f"{scale.large.name}, {name}", scale.large, job, layout))
    return cases


@contextmanager
def ranks(world: int, device: torch.device) -> Iterator[None]:
    """A process group of one real rank, or of one rank of ``world`` to which the others answer nothing."""
    with tempfile.TemporaryDirectory() as folder:
        if world == 1:
            init_process_group(device, Path(folder, "store").as_uri(), 0, 1, timeout_s=300)
        else:
            dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
            clear_dtensor_caches()
            torch._dynamo.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def stepper_of(case: Case, device: torch.device, compiler: str | None = None) -> Stepper:
    """The rank's model with its weights, ready to step."""
    mesh = build_mesh(case.layout, device.type)
    model = parallel_model(case.model, case.job, case.layout, mesh, compile_backend=compiler)
    initialise(model, case.job.seed, device)
    return Stepper(model, case.job, case.layout, mesh)


def batch_of(case: Case, device: torch.device) -> list[Microbatch]:
    """Random ids, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    size = (case.layout.micro_batch, case.job.seq + 1)
    drawn = [
        torch.randint(case.model.vocab, size, generator=generator) for _ in range(case.layout.microbatches)
    ]
    return [Microbatch(ids[:, :-1].to(device, copy=True), ids[:, 1:].to(device, copy=True)) for ids in drawn]


def allocated_peak(case: Case, device: torch.device) -> int:
    """Most that the rank holds in its second step [B]."""
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    with ranks(case.layout.ranks, device):
        stepper = stepper_of(case, device)
        stepper.step(0, batch_of(case, device))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            stepper.step(1, batch_of(case, device))
            return torch.cuda.max_memory_allocated() - before
        meter = MemoryMeter(stepper.model, stepper.optimizer, stepper.mesh)
        with meter:
            stepper.step(1, batch_of(case, device))
        return meter.peak


def memory_rows(scale: Scale, device: torch.device) -> Iterator[MemoryRow]:
    """Every case, dry and real."""
    for case in memory_cases(scale):
        predicted = dry_run(case.model, case.job, case.layout).peak
        allocated = allocated_peak(case, device)
        difference = (predicted - allocated) / allocated
        yield MemoryRow(case.name, predicted, allocated, difference, abs(difference) <= MEMORY_GOAL)


def speed_case(model: ModelSpec, precision: str, scale: Scale, memory: float) -> Case:
    """One rank, with the largest microbatch that fits into ``memory`` [B] by its dry run."""
    for micro_batch in scale.micro_batches:
        layout = Layout(micro_batch=micro_batch, loss_chunks=scale.loss_chunks)
        job = Job(seq=scale.seq, global_batch=micro_batch, precision=precision)
        if dry_run(model, job, layout).peak <= USABLE_MEMORY * memory:
            return Case(model.name, model, job, layout)
    raise SystemExit(f"{model.name} does not fit into {format_bytes(memory)}")


def speed_row(
    case: Case, scale: Scale, device: torch.device, *, compiled: bool, peak: float | None
) -> SpeedRow:
    """Time a few steps; ``peak`` [FLOP/s] of the device in bf16, whatever the precision."""
    times, loss = [], 0.0
    with ranks(1, device):
        stepper = stepper_of(case, device, scale.compiler if compiled else None)
        for index in range(scale.warm_up + scale.steps):
            batch = batch_of(case, device)
            start = time.perf_counter()
            loss = stepper.step(index, batch).loss  # a number: the device has come that far
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        del stepper
    step_time = sorted(times[scale.warm_up :])[scale.steps // 2]
    rate = case.job.tokens_per_step / step_time
    mfu = None if peak is None else model_flops_per_token(case.model, case.job.seq) * rate / peak
    precision, micro_batch = case.job.precision, case.layout.micro_batch
    return SpeedRow(case.name, precision, compiled, micro_batch, step_time, rate, mfu, loss)


def speed_rows(scale: Scale, device: torch.device, peak: float | None) -> Iterator[SpeedRow]:
    """Every small model in bf16, not compiled and compiled; the last in fp8 besides, where the device can."""
    memory = torch.cuda.mem_get_info()[1] if device.type == "cuda" else float("inf")
    for model in scale.small:
        case = speed_case(model, "bf16", scale, memory)
        for compiled in (False, True):
            yield speed_row(case, scale, device, compiled=compiled, peak=peak)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return
    check_fp8(device)
    job = case.job.model_copy(update={"precision": "fp8"})
    case = Case(case.name, case.model, job, case.layout)
    yield speed_row(case, scale, device, compiled=True, peak=peak)


def peak_of(name: str) -> float:
    """Dense bf16 peak [FLOP/s] of a device by what CUDA calls it."""
    words = name.lower().replace("-", " ").split()
    known = [alias for alias in device_names() if alias in words]
    if not known:
        raise SystemExit(f"device {name!r} is none of {', '.join(device_names())}: name one with --device")
    return device_of(known[0]).peak("bf16")


def section(about: dict, memory: list[MemoryRow], speed: list[SpeedRow]) -> str:
    """The results as Markdown."""
    lines = [
        f"{about['device']}, torch {about['torch']}, CUDA {about['cuda']}, "
        f"shardwright {about['shardwright']}, {about['date']}; all in {about['time']:.0f} s.",
        "",
        "| one rank of a larger job | dry run | allocator | difference |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row.case} | {format_bytes(row.predicted)} | {format_bytes(row.allocated)} "
        f"| {row.difference:+.2%} |"
        for row in memory
    ]
    lines += [
        "",
        "| model | precision | compiled | microbatch | step | tokens/s | MFU | last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.model} | {row.precision} | {'yes' if row.compiled else 'no'} | {row.micro_batch} | "
        f"{row.step_time * 1e3:.1f} ms | {row.tokens_per_s:.0f} | "
        f"{'-' if row.mfu is None else f'{row.mfu:.1%}'} | {row.loss:.4f} |"
        for row in speed
    ]
    lines += ["", "MFU is of the bf16 peak, in fp8 too."]
    return "\n".join(lines)


def replaced(text: str, content: str) -> str:
    """``text`` with ``content`` between the two marks; at its end, where it has none."""
    new = f"{BEGIN}\n{content}\n{END}"
    if BEGIN not in text:
        return f"{text.rstrip()}\n\n{new}\n".lstrip()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + new + tail


def main() -> None:
    """Run the checks, write them down, and exit with 1 if one misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="tiny models on the CPU")
    parser.add_argument(
        "--device", help="name of the device's data sheet, found by its own name if not given"
    )
    parser.add_argument("--write", type=Path, help="file whose section is replaced; toys write none unasked")
    options = parser.parse_args()
    if not options.toy and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is here: use --toy to try the script on the CPU")
    device = torch.device("cpu") if options.toy else torch.device("cuda", 0)
    name = platform.machine() if options.toy else torch.cuda.get_device_name(device)
    peak = None if options.toy else peak_of(options.device or name)
    scale, start = scale_of(device), time.perf_counter()
    memory, speed = [], []
    for rows, found in ((memory_rows(scale, device), memory), (speed_rows(scale, device, peak), speed)):
        for row in rows:
            print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
            found.append(row)
    about = {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "shardwright": shardwright.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "time": time.perf_counter() - start,
    }
    content = section(about, memory, speed)
    print(content)
    target = options.write or (None if options.toy else MEASUREMENTS)
    if target is not None:
        old = target.read_text(encoding="utf-8") if target.exists() else ""
        target.write_text(replaced(old, content), encoding="utf-8")
    fast = all(row.mfu is None or not row.compiled or row.mfu >= MFU_GOAL for row in speed)
    raise SystemExit(0 if fast and all(row.ok for row in memory) else 1)


if __name__ == "__main__":
    main()
