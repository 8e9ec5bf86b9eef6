"""Checkpoints: torch.distributed.checkpoint's files, read back into any layout.

checkpoints/step-000123/    complete, or absent: written beside it as .partial, then renamed
  .metadata, *.distcp       parameters, optimizer state, persistent buffers, by names in the whole model
  run.json                  step, model, job, layout and data of the run

Nothing else has to be kept: data and learning rate of a step are functions of its number.
"""

import json
import os
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwright.errors import PlanFileError, RunFailedError, ShardwrightError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.run.init import table_name
from shardwright.run.linear import local
from shardwright.run.optim import set_learning_rate
from shardwright.run.record import CHECKPOINTS
from shardwright.run.step import Stepper

ABOUT, PARTIAL = "run.json", ".partial"

METADATA = ".metadata"
"""Torch's own index of a checkpoint, which it writes last."""

DIGEST = 12
"""Characters of a digest that tell data from other data."""

OPTIMIZER = "optim."
"""Starts the keys of optimizer state: ``optim.<parameter>.<kind>``."""

STACKED = {"experts.gate_up_proj": (".gate", ".up"), "attn.c_attn.weight": (".q", ".k", ".v")}
"""Ends of the names of parameters that are several matrices along dim 1, and of the keys of each: tp gives a
rank a part of every one, but in a file its part of a tensor is one block."""


class About(NamedTuple):
    """The run that wrote a checkpoint, after ``step`` steps."""

    step: int
    model: ModelSpec
    job: Job
    layout: Layout
    data_digest: str


def save(run_directory: Path, stepper: Stepper, step: int, data_digest: str, *, keep: int) -> Path:
    """Write what the run holds after ``step`` steps, then delete all but the newest ``keep``. On all ranks.

    ``data_digest`` is used on rank 0 alone.

    Raises: RunFailedError: a rank could not write; checkpoints from before are left.
    """
    whole = run_directory / CHECKPOINTS / f"step-{step:06d}"
    partial = whole.with_name(whole.name + PARTIAL)
    tensors, _ = held_tensors(stepper)
    try:
        dcp.save(tensors, checkpoint_id=partial)
    except CheckpointException as fault:
        raise RunFailedError(
            f"checkpoint {whole} was not written: {_first_failure(fault)}: continue with --resume"
        ) from fault
    if dist.get_rank() == 0:
        about = {
            "step": step,
            "data_digest": data_digest,
            "model": stepper.model.spec.model_dump(mode="json"),
            "job": stepper.job.model_dump(mode="json"),
            "layout": stepper.layout.model_dump(mode="json"),
        }
        (partial / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        if whole.exists():  # it is damaged, or the run would have gone on from it
            shutil.rmtree(whole)
        os.replace(partial, whole)
        for old in list(_complete(run_directory))[:-keep]:
            shutil.rmtree(old)
    return whole


def load(checkpoint: Path, stepper: Stepper) -> None:
    """Give a new ``stepper`` of any layout the parameters, buffers and optimizer state of a checkpoint.

    On all ranks. Optimizer state that the checkpoint has is created first by a step of rate 0 with gradients
    of 0; what it has not (no update was made yet) stays absent.

    Raises: RunFailedError: a file is missing or damaged.
    """
    try:
        names = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata.keys()
        _create_state(stepper, {_parameter_of(name) for name in names if name.startswith(OPTIMIZER)})
        tensors, copies = held_tensors(stepper)
        dcp.load(tensors, checkpoint_id=checkpoint)
    except CheckpointException as fault:
        raise RunFailedError(
            f"checkpoint {checkpoint} cannot be read: {_first_failure(fault)}: delete its folder to continue "
            "from the one before"
        ) from fault
    with torch.no_grad():
        for copy, source in copies:
            local(copy).copy_(local(source))
        for parameter in stepper.model.parameters():
            increment_version(local(parameter))  # written behind autograd's back: run/offload.py must see it


def latest(run_directory: Path) -> Path | None:
    """The newest complete checkpoint of a run; None if it has none."""
    return next(reversed(list(_complete(run_directory))), None)


def newest(run_directory: Path) -> Path:
    """The same, where there must be one.

    Raises: PlanFileError: the folder has none.
    """
    found = latest(run_directory)
    if found is None:
        raise PlanFileError(
            f"run folder {run_directory} has no complete checkpoint to resume from: leave out --resume and "
            "give another --run-dir, with --checkpoint-every above 0"
        )
    return found


def read_about(checkpoint: Path) -> About:
    """The run that wrote a checkpoint; fields that its version of shardwright had not take their defaults.

    Raises: PlanFileError: the file is damaged.
    """
    try:
        about = json.loads((checkpoint / ABOUT).read_text(encoding="utf-8"))
        model, job = ModelSpec.checked(about["model"]), Job.checked(about["job"])
        layout = Layout.checked(about["layout"])
        return About(int(about["step"]), model, job, layout, str(about["data_digest"]))
    except (OSError, ValueError, KeyError, TypeError, ShardwrightError) as fault:
        raise PlanFileError(
            f"checkpoint {checkpoint} has no readable {ABOUT} ({fault}): delete its folder to continue from "
            "the one before"
        ) from None


def check_same_run(about: About, model: ModelSpec, job: Job, layout: Layout, data_digest: str) -> None:
    """Refuse to go on with another model, job or data than a checkpoint's; steps are free, and the layout
    unless the optimizer's state is cut by it.

    Raises: PlanFileError: naming the fields that differ.
    """
    pairs: list[tuple[str, Any, Any]] = [("data", about.data_digest[:DIGEST], data_digest[:DIGEST])]
    for before, now in ((about.model, model), (about.job, job)):
        values = now.model_dump()
        pairs += [(name, old, values[name]) for name, old in before.model_dump().items() if name != "steps"]
    faults = [f"{name}={new!r} was {old!r}" for name, old, new in pairs if old != new]
    if faults:
        raise PlanFileError(
            f"{'; '.join(faults)} when the run began: a run goes on with its model, job and data, only steps "
            "and layout may change; or start another with another --run-dir"
        )
    if job.optimizer == "adamw_8bit" and layout != about.layout:
        raise PlanFileError(
            f"layout [{layout.label}] was [{about.layout.label}] when the checkpoint was written, and "
            "optimizer='adamw_8bit' rounds its state by blocks of a rank's shard: resume with that layout"
        )


def remove_partial(run_directory: Path) -> None:
    """Delete what a run that died left half written."""
    for path in (run_directory / CHECKPOINTS).glob(f"*{PARTIAL}"):
        shutil.rmtree(path)


def held_tensors(stepper: Stepper) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """What this rank holds, by key of the checkpoint; and second copies of a tied matrix on the same rank,
    each with the tensor it equals."""
    found: dict[str, Tensor] = {}
    copies = []
    for key, tensor in _keyed(stepper):
        if key in found:
            copies.append((tensor, found[key]))
        else:
            found[key] = tensor
    return found, copies


def _keyed(stepper: Stepper) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in stepper.model.named_parameters():
        key = table_name(name, stepper.model.spec)
        parts = next((parts for end, parts in STACKED.items() if key.endswith(end)), ())
        yield from _blocks(key, parameter.detach(), parts, parameter.shape)
        for kind, value in stepper.optimizer.state.get(parameter, {}).items():
            if value is not None:  # SGD's momentum before its first step
                assert isinstance(value, Tensor), f"optimizer state {kind} is no tensor"
                yield from _blocks(f"{OPTIMIZER}{key}.{kind}", value, parts, parameter.shape)
    for stage in stepper.model.stages:
        buffers = dict(stage.named_buffers())
        persistent = stage.state_dict() if buffers else {}
        yield from ((name, buffer) for name, buffer in buffers.items() if name in persistent)


def _blocks(
    key: str, tensor: Tensor, names: tuple[str, ...], shape: torch.Size
) -> Iterator[tuple[str, Tensor]]:
    """The tensor of a parameter of ``shape``, or views of the matrices ``names`` that it is of."""
    if not names or tensor.ndim < 2 or tensor.shape[1] != shape[1]:
        yield key, tensor
        return
    parts = local(tensor).unflatten(1, (len(names), -1)).unbind(1)
    one = torch.Size((tensor.shape[0], shape[1] // len(names), *tensor.shape[2:]))
    for name, part in zip(names, parts, strict=True):
        yield key + name, _like(tensor, part, one) if isinstance(tensor, DTensor) else part


def _like(stack: DTensor, part: Tensor, shape: torch.Size) -> DTensor:
    """One matrix of a stack, split as it is."""

    def of_one(placement: Placement) -> Placement:
        return Shard(1) if isinstance(placement, _StridedShard) and placement.dim == 1 else placement

    placements = tuple(of_one(placement) for placement in stack.placements)
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), stack.dtype)
    # from_local would copy what is offloaded to the mesh's device
    return DTensor(part, DTensorSpec(stack.device_mesh, placements, meta), requires_grad=False)


def _parameter_of(key: str) -> str:
    """Name of the parameter that optimizer state is of."""
    for name in chain.from_iterable(STACKED.values()):
        key = key.removesuffix(name)
    return key.removeprefix(OPTIMIZER).rpartition(".")[0]


def _create_state(stepper: Stepper, names: set[str]) -> None:
    """Have the optimizer make its state for the parameters of ``names``."""
    if not names:
        return
    for name, parameter in stepper.model.named_parameters():
        if table_name(name, stepper.model.spec) in names:
            parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(stepper.optimizer, 0.0)
    stepper.optimizer.step()
    stepper.optimizer.zero_grad(set_to_none=True)


def _complete(run_directory: Path) -> Iterator[Path]:
    """Complete checkpoints, the oldest first."""
    found = [
        path
        for path in (run_directory / CHECKPOINTS).glob("step-*[0-9]")
        if (path / ABOUT).exists() and (path / METADATA).exists()
    ]
    yield from sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _first_failure(fault: CheckpointException) -> str:
    rank, (error, _) = min(fault.failures.items(), key=lambda failure: failure[0])
    return f"rank {rank}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
