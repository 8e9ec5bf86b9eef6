"""What a short run leaves for a comparison: each rank's part of the gradients of step 1, losses and norms.

Nothing is gathered: a rank writes the parts it holds and says which indices of the whole they are, so that
ranks that hold the same part can be compared as well. ``plain_gradients`` is the judge of two layouts: one
process in plain PyTorch, with the gradient of every sequence by itself.

B sequences of the global batch, S tokens, V vocabulary.
"""

import hashlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.run.dataset import MASKED, Batches, Sample
from shardwright.run.dp import parameter_dtype
from shardwright.run.expert_load import apply_balance
from shardwright.run.init import initialise, local_part, table_name
from shardwright.run.mesh import EXPERT_SHARD, RankMesh
from shardwright.run.model import build_model
from shardwright.run.pp import stage_parts
from shardwright.run.shards import local
from shardwright.run.step import Stepper
from shardwright.run.train import build_stepper, to_device

ONE_RANK = Layout()
"""Layout of the plain process, less its microbatches."""


class Piece(NamedTuple):
    """A rank's part of one parameter: the indices of each dim that it has, and what splits it."""

    name: str  # in the table of parameters: both copies of a tied matrix have one
    stage: int
    shape: tuple[int, ...]
    ranges: tuple[Sequence[int], ...]
    axes: tuple[str, ...]
    start: tuple[float, float]  # sum and sum of squares of the initial weights
    has_gradient: bool


class RankProbe(NamedTuple):
    """What one rank found: where it is in the mesh, its losses and norms, and what is in its file.

    ``counted``: tokens of its own sequences in step 1 that count; ``divisor``: what the step took for those
    of the whole batch; ``digest``: of its tokens and targets.
    """

    coordinates: dict[str, int]
    losses: list[float]
    norms: list[float]
    counted: int
    divisor: int
    digest: int
    pieces: dict[str, Piece]


def gradient_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its parts of the gradients, by the names of ``pieces``."""
    return folder / f"rank-{rank}.npz"


def probe(
    spec: ModelSpec, job: Job, layout: Layout, dataset: Batches, folder: Path, device_type: str, name: str
) -> RankProbe:
    """Train ``job.steps`` steps as ``train`` does, keeping the gradients of the first; runs on every rank.

    ``name``: of the run, for its progress on stderr.
    """
    stepper, _ = build_stepper(spec, job, layout, device_type, None)
    starts = {own: _sums(parameter) for own, parameter in stepper.model.named_parameters()}
    pieces: dict[str, Piece] = {}

    def keep(loss: float, norm: float) -> bool:
        """Before the first update: the gradients are whole and not yet clipped."""
        if not pieces:
            pieces.update(_pieces(stepper, starts))
            _write(gradient_file(folder, dist.get_rank()), stepper, pieces)
        return True

    stepper.admits = keep
    losses, norms, divisors = [], [], []
    first = dataset.microbatches(0, layout, stepper.mesh.data.get_local_rank())
    for index in range(job.steps):
        samples = dataset.microbatches(index, layout, stepper.mesh.data.get_local_rank())
        found = stepper.step(index, to_device(samples, device_type))
        losses.append(found.loss)
        norms.append(found.gradient_norm)
        divisors.append(found.tokens)
        if dist.get_rank() == 0:
            step = f"{name}: step {index + 1} of {job.steps}"
            print(f"{step}, loss {found.loss:.6f}, gradient norm {found.gradient_norm:.6f}", file=sys.stderr)
    place = _coordinates(stepper.mesh)
    return RankProbe(place, losses, norms, counted(first), divisors[0], digest(first), pieces)


def counted(samples: Iterable[Sample]) -> int:
    """Tokens that count."""
    return int(sum((sample.targets != MASKED).sum() for sample in samples))


def digest(samples: Iterable[Sample]) -> int:
    """Tells sequences with their targets from others, in any order and split: a sum over sequences."""
    total = 0
    for sample in samples:
        for tokens, targets in zip(sample.tokens, sample.targets, strict=True):
            found = hashlib.sha256(tokens.tobytes() + targets.tobytes()).digest()
            total += int.from_bytes(found[:8], "little")
    return total


def _coordinates(mesh: RankMesh) -> dict[str, int]:
    """This rank's place on every axis, those of the experts too."""
    found = {axis: mesh[axis].get_local_rank() for axis in mesh.root.mesh_dim_names}
    if mesh.experts is not None:
        found["ep"] = mesh.experts.ep.get_local_rank()
        found[EXPERT_SHARD] = mesh.experts.data[EXPERT_SHARD].get_local_rank()
    return found


def _pieces(stepper: Stepper, starts: dict[str, tuple[float, float]]) -> dict[str, Piece]:
    model, found = stepper.model, {}
    numbers = [
        number for number, _ in stage_parts(stepper.layout, model.spec, stepper.mesh["pp"].get_local_rank())
    ]
    for stage, part in zip(numbers, model.stages, strict=True):
        for own, parameter in part.named_parameters():
            _, ranges = local_part(parameter)
            found[own] = Piece(
                table_name(own, model.spec),
                stage,
                tuple(parameter.shape),
                tuple(ranges),
                _splitting_axes(parameter),
                starts[own],
                parameter.grad is not None,
            )
    return found


def _splitting_axes(parameter: Tensor) -> tuple[str, ...]:
    """Names of the axes of the mesh that split a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    split = zip(names, parameter.placements, strict=True)
    return tuple(
        name for axis, (name, at) in enumerate(split) if mesh.size(axis) > 1 and not at.is_replicate()
    )


def _sums(parameter: Tensor) -> tuple[float, float]:
    part = local(parameter).detach().double()
    return float(part.sum()), float(part.square().sum())


def _write(path: Path, stepper: Stepper, pieces: dict[str, Piece]) -> None:
    arrays = {
        own: local(parameter.grad).detach().cpu().numpy()
        for own, parameter in stepper.model.named_parameters()
        if pieces[own].has_gradient
    }
    np.savez(path, **arrays)


class SequenceGradients(NamedTuple):
    """Step 1 in one plain process: loss summed over the tokens of each sequence, tokens that count, and a
    sketch of each parameter's gradient of that sum, divided by the step's tokens: B x width."""

    losses: list[float]
    tokens: list[int]
    sketches: dict[str, NDArray[np.float64]]


def signs(name: str, numel: int) -> NDArray[np.int8]:
    """+1 or -1 for each entry of the parameter ``name``, always the same."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return generator.integers(0, 2, numel, dtype=np.int8) * np.int8(2) - np.int8(1)


def sketch(gradient: NDArray[np.float64], sign: NDArray[np.int8], width: int) -> NDArray[np.float64]:
    """``width`` sums of a gradient's entries under their signs: linear, and too few to store one of each
    sequence whole. Without signs the head's would be 0, for its columns add up to nothing."""
    flat = gradient.ravel() * sign
    padded = np.pad(flat, (0, -flat.size % width))
    folded: NDArray[np.float64] = padded.reshape(-1, width).sum(0)
    return folded


def plain_gradients(
    spec: ModelSpec, job: Job, dataset: Batches, folder: Path, width: int
) -> tuple[RankProbe, SequenceGradients]:
    """Gradients of step 1 in plain PyTorch, sequence by sequence, without anything that splits or reduces.

    Of this program only the model and its initial weights are used. bf16 and fp8 are judged in fp32.
    ``width``: numbers of each parameter's sketch.
    """
    model = build_model(spec, parameter_dtype(job.precision))
    initialise(model, job.seed, torch.device("cpu"))
    apply_balance(model, job.router_aux_weight, job.global_batch)
    layout = ONE_RANK.model_copy(update={"microbatches": job.global_batch})
    samples = dataset.microbatches(0, layout, 0)
    batches, counts = to_device(samples, "cpu"), [counted([sample]) for sample in samples]
    total = max(sum(counts), 1)
    parameters = dict(model.named_parameters())
    starts = {name: _sums(parameter) for name, parameter in parameters.items()}
    sign = {name: signs(name, parameter.numel()) for name, parameter in parameters.items()}
    sketches = {name: np.zeros((len(batches), width)) for name in parameters}
    gradients = {name: np.zeros(tuple(parameter.shape)) for name, parameter in parameters.items()}
    losses = []
    for index, batch in enumerate(batches):
        logits = model(batch.tokens, document_BS=batch.documents)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), ignore_index=MASKED, reduction="sum"
        )
        (loss / total).backward()
        losses.append(float(loss.detach()))
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            own = parameter.grad.double().numpy()
            gradients[name] += own
            sketches[name][index] = sketch(own, sign[name], width)
        model.zero_grad(set_to_none=True)
        if index + 1 == len(batches):
            print(f"one plain process: {len(batches)} sequences", file=sys.stderr)
    np.savez(gradient_file(folder, 0), **gradients)
    norm = float(np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values())))
    pieces = {
        name: Piece(name, 0, tuple(p.shape), tuple(map(range, p.shape)), (), starts[name], True)
        for name, p in parameters.items()
    }
    found = RankProbe({}, [sum(losses) / total], [norm], sum(counts), total, digest(samples), pieces)
    return found, SequenceGradients(losses, counts, sketches)
