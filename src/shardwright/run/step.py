"""One optimizer step: the program that training executes and the dry run replays."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.run.activation_offload import apply_activation_offload
from shardwright.run.chunked_loss import apply_chunked_loss
from shardwright.run.compile import apply_compile
from shardwright.run.cp import apply_cp, positions, slice_sequence
from shardwright.run.dp import apply_dp, parameter_dtype, set_microbatch_schedule
from shardwright.run.ep import apply_ep
from shardwright.run.expert_load import apply_balance, expert_load, routers, update_router_bias
from shardwright.run.fp8 import apply_fp8
from shardwright.run.loss import MASKED
from shardwright.run.mesh import RankMesh
from shardwright.run.model import Microbatch, Part, Stages, build_model
from shardwright.run.norm import clip_gradients, gradient_norm
from shardwright.run.optim import build_optimizer, learning_rate, set_learning_rate
from shardwright.run.pp import Pipeline, stage_parts, sum_tied, tied_copies
from shardwright.run.recompute import apply_recompute, passes_of
from shardwright.run.tp import apply_tp, sum_shares


class ExpertUse(NamedTuple):
    """How evenly experts were used in the worst layer: copies of the fullest and the emptiest expert over the
    mean; and the balancing loss of all layers."""

    fullest: float
    emptiest: float
    balance_loss: float


@dataclass(frozen=True)
class StepResult:
    """What a step found: the global loss, the norm of the gradients before clipping, unmasked tokens; and
    whether it changed the parameters."""

    loss: float
    gradient_norm: float
    tokens: int
    experts: ExpertUse | None = None
    applied: bool = True


def parallel_model(
    spec: ModelSpec,
    job: Job,
    layout: Layout,
    mesh: RankMesh,
    *,
    compile_backend: str | None = None,
    parts: Sequence[Part] | None = None,
) -> Stages:
    """What of a plan's model this rank has, split as the layout says, still without storage; its blocks
    compiled by ``compile_backend``, where there is one. ``parts`` stand in for what the layout says this
    rank's stages are: a dry run leaves layers out."""
    passes = passes_of(layout.schedule)
    stages = []
    place = positions(job.seq, layout.cp, mesh["cp"].get_local_rank(), layout.cp_kind).to(mesh.device_type)
    if parts is None:
        parts = [part for _, part in stage_parts(layout, spec, mesh["pp"].get_local_rank())]
    for part in parts:
        stage = build_model(spec, parameter_dtype(job.precision), part)
        stage.positions = place
        apply_tp(stage, mesh["tp"], sequence_parallel=layout.sp, split_experts=layout.etp > 1)
        if mesh.experts is not None:
            apply_ep(stage, mesh.experts)
        if layout.cp > 1:
            apply_cp(stage, mesh["cp"], layout.cp_kind)
        apply_chunked_loss(stage, layout.loss_chunks)
        apply_balance(stage, job.router_aux_weight, job.global_batch, sequence_groups(layout, mesh))
        if job.precision == "fp8":
            apply_fp8(stage)
        own = 1 if part.first else passes  # the first stage makes all its gradients in one
        apply_recompute(stage, layout.recompute, layout.kept, every=layout.recompute_every, passes=own)
        if "activations" in layout.offload:
            apply_activation_offload(stage.decoder.layers.values())
        if compile_backend is not None:
            apply_compile(stage, compile_backend, passes=passes)
        apply_dp(stage, mesh, zero_stage=layout.zero_stage, precision=job.precision)
        stages.append(stage)
    return Stages(stages)


def sequence_groups(layout: Layout, mesh: RankMesh) -> list[dist.ProcessGroup]:
    """Groups of ranks that route the tokens of one sequence between them."""
    spread = {"cp": layout.cp > 1, "tp": layout.tp > 1 and layout.etp == 1}
    return [mesh[axis].get_group() for axis, present in spread.items() if present]


class Stepper:
    """Holds what one step needs: model, optimizer, mesh, job and layout."""

    def __init__(
        self,
        model: Stages,
        job: Job,
        layout: Layout,
        mesh: RankMesh,
        read: Callable[[Tensor], float] = float,
        after_microbatch: Callable[[int], None] = lambda index: None,
    ) -> None:
        """``read`` turns a scalar tensor into a number; a dry run, whose tensors hold none, replaces it.
        ``after_microbatch`` is told the index of each microbatch whose backward pass is done."""
        self.model, self.job, self.layout, self.mesh = model, job, layout, mesh
        self.read, self.after_microbatch = read, after_microbatch
        self.admits: Callable[[float, float], bool] = lambda loss, norm: True  # run/watch.py sets it
        self.optimizer = build_optimizer(
            model.named_parameters(), model.spec, job, offload="optimizer" in layout.offload
        )
        device = torch.device(mesh.device_type)
        self.pipeline = Pipeline(model, job, layout, mesh["pp"], device) if layout.pp > 1 else None
        spread = sequence_groups(layout, mesh)[1:] if layout.cp > 1 else sequence_groups(layout, mesh)
        self.count_groups = [*spread, *([mesh.tokens.get_group()] if mesh.tokens.size() > 1 else [])]
        _, head_copy = tied_copies(model)
        self.uncounted = () if head_copy is None else (head_copy,)
        self.token_group = mesh.tokens.get_group() if mesh.tokens.size() > 1 else None

    def step(self, index: int, microbatches: Sequence[Microbatch]) -> StepResult:
        """Forward and backward over ``microbatches``, then one update of the parameters.

        ``admits`` is asked whether a step of this loss and norm may change them; all ranks answer alike.
        """
        loss, tokens = self.backward(microbatches)
        norm = self.norm()
        applied = self.admits(loss, norm)
        if applied:
            clip_gradients(self.model.parameters(), norm, self.job.clip_norm)
            set_learning_rate(self.optimizer, learning_rate(self.job, index))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, tokens, self._balance(applied), applied)

    def backward(self, microbatches: Sequence[Microbatch]) -> tuple[float, int]:
        """Leave the step's gradients on the parameters; returns the global loss and token count."""
        own = [self.own_part(microbatch) for microbatch in microbatches]
        tokens = self.global_tokens([microbatch.targets for microbatch in own])
        total = (
            self._one_by_one(own, tokens) if self.pipeline is None else self.pipeline.backward(own, tokens)
        )
        for stage in self.model.stages:
            sum_shares(stage)
        sum_tied(self.model, self.mesh["pp"])
        return self.read(self.sum_over_stages(self.sum_over_tokens(total))), int(tokens)

    def norm(self) -> float:
        """Global norm of the gradients."""
        groups = [self.mesh["pp"].get_group()] if self.layout.pp > 1 else []
        skipped = set(map(id, self.uncounted))
        norm = gradient_norm(self.model.parameters(), groups, lambda parameter: id(parameter) not in skipped)
        return self.read(norm)

    def _one_by_one(self, microbatches: Sequence[Microbatch], tokens: float) -> Tensor:
        total = None
        for i, microbatch in enumerate(microbatches):
            set_microbatch_schedule(
                self.model, zero_stage=self.layout.zero_stage, last=i == len(microbatches) - 1
            )
            loss = self.model(*microbatch, tokens)
            loss.backward()
            detached = loss.detach().double()
            total = detached if total is None else total + detached
            del loss, detached
            self.after_microbatch(i)
        return total

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """This rank's part of the loss, summed over tokens, and its unmasked tokens; without gradients."""
        own = [self.own_part(microbatch) for microbatch in microbatches]
        if self.pipeline is not None:
            loss = self.pipeline.loss(own, 1.0)
        else:
            loss = torch.stack([self.model(*microbatch, 1.0).double() for microbatch in own]).sum()
        tokens = torch.stack([(microbatch.targets != MASKED).sum() for microbatch in own]).sum()
        return torch.stack([loss, tokens.double()])

    def _balance(self, applied: bool) -> ExpertUse | None:
        """What the step has counted of the experts; the routers' biases move by it if it was ``applied``.
        None without experts."""
        if self.model.spec.moe is None:
            return None
        worst = torch.tensor([0.0, -math.inf, 0.0], dtype=torch.float64, device=self.mesh.device_type)
        if routers(self.model):
            load = expert_load(self.model, self.count_groups)
            if applied:
                update_router_bias(self.model, load.counts, self.job.router_bias_rate)
            worst = torch.stack([load.fullest, -load.emptiest, load.loss])
        if self.mesh["pp"].size() > 1:
            group = self.mesh["pp"].get_group()
            dist.all_reduce(worst[:2], op=dist.ReduceOp.MAX, group=group)
            dist.all_reduce(worst[2:], group=group)
        fullest, emptiest, balance = (self.read(value) for value in worst)
        return ExpertUse(fullest, -emptiest, balance)

    def own_part(self, microbatch: Microbatch) -> Microbatch:
        """The tokens of a microbatch's sequences that this rank of cp has."""
        if self.layout.cp == 1:
            return microbatch
        place = self.model.stages[0].positions
        return Microbatch(*(None if part is None else slice_sequence(part, place) for part in microbatch))

    def global_tokens(self, targets: Sequence[Tensor]) -> float:
        """Unmasked tokens of the global batch; at least 1, so that an empty batch has loss 0."""
        counts = torch.stack([(target != MASKED).sum() for target in targets])
        return max(self.read(self.sum_over_tokens(counts.sum())), 1.0)

    def sum_over_tokens(self, value: Tensor) -> Tensor:
        """Sum of a scalar over all ranks with different tokens."""
        if self.token_group is not None:
            dist.all_reduce(value, group=self.token_group)
        return value

    def sum_over_stages(self, value: Tensor) -> Tensor:
        """Sum of a scalar over the ranks of a pipeline."""
        if self.mesh["pp"].size() > 1:
            dist.all_reduce(value, group=self.mesh["pp"].get_group())
        return value
