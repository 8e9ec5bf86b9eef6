"""One optimizer step: the program that training executes and the dry run replays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.run.dp import apply_dp, parameter_dtype, set_microbatch_schedule
from shardwright.run.loss import MASKED
from shardwright.run.mesh import RankMesh
from shardwright.run.model import Transformer, build_model
from shardwright.run.optim import (
    build_optimizer,
    clip_gradients,
    gradient_norm,
    learning_rate,
    set_learning_rate,
)
from shardwright.run.recompute import apply_recompute
from shardwright.run.tp import apply_tp, sum_shares

Microbatch = tuple[Tensor, Tensor]
"""Token ids and targets (masked ones are MASKED), both B x S, on the device."""


@dataclass(frozen=True)
class StepResult:
    """What a step found: the global loss, the norm of the gradients before clipping, unmasked tokens."""

    loss: float
    gradient_norm: float
    tokens: int


def parallel_model(spec: ModelSpec, job: Job, layout: Layout, mesh: RankMesh) -> Transformer:
    """The model of a plan, split as the layout says, still without storage."""
    model = build_model(spec, parameter_dtype(job.precision))
    apply_tp(model, mesh["tp"], sequence_parallel=layout.sp)
    apply_recompute(model, layout.recompute, layout.kept)
    apply_dp(model, mesh, zero_stage=layout.zero_stage, precision=job.precision)
    return model


class Stepper:
    """Holds what one step needs: model, optimizer, mesh, job and layout."""

    def __init__(
        self,
        model: Transformer,
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
        self.optimizer = build_optimizer(model, job)
        self.token_group = mesh.tokens.get_group() if mesh.tokens.size() > 1 else None

    def step(self, index: int, microbatches: Sequence[Microbatch]) -> StepResult:
        """Forward and backward over ``microbatches``, then one update of the parameters."""
        loss, tokens = self.backward(microbatches)
        norm = self.read(gradient_norm(self.model, self.mesh))
        clip_gradients(self.model, norm, self.job.clip_norm)
        set_learning_rate(self.optimizer, learning_rate(self.job, index))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, tokens)

    def backward(self, microbatches: Sequence[Microbatch]) -> tuple[float, int]:
        """Leave the step's gradients on the parameters; returns the global loss and token count."""
        tokens = self.global_tokens([target for _, target in microbatches])
        total = None
        for i, (token_BS, target_BS) in enumerate(microbatches):
            set_microbatch_schedule(
                self.model, zero_stage=self.layout.zero_stage, last=i == len(microbatches) - 1
            )
            loss = self.model(token_BS, target_BS, global_tokens=tokens)
            loss.backward()
            detached = loss.detach().double()
            total = detached if total is None else total + detached
            del loss, detached
            self.after_microbatch(i)
        sum_shares(self.model)
        return self.read(self.sum_over_tokens(total)), int(tokens)

    def global_tokens(self, targets: Sequence[Tensor]) -> float:
        """Unmasked tokens of the global batch; at least 1, so that an empty batch has loss 0."""
        counts = torch.stack([(target != MASKED).sum() for target in targets])
        return max(self.read(self.sum_over_tokens(counts.sum())), 1.0)

    def sum_over_tokens(self, value: Tensor) -> Tensor:
        """Sum of a scalar over all ranks with different tokens."""
        if self.token_group is not None:
            dist.all_reduce(value, group=self.token_group)
        return value
