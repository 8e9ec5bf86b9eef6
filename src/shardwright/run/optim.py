"""Optimizers, gradient norm, clipping and the learning-rate schedule: the same in every layout."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.run.mesh import RankMesh


def build_optimizer(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    """AdamW or SGD over the model's shards; weight decay on matrices, not on norms and biases.

    AdamW is fused, so that the step makes no temporary copy of the state. Fused SGD has no rule for sharded
    tensors in torch 2.13: SGD goes tensor by tensor, and with weight decay holds a copy of one gradient.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": job.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if job.optimizer == "adamw":
        return torch.optim.AdamW(
            groups, lr=job.learning_rate, betas=(job.beta1, job.beta2), eps=job.epsilon, fused=True
        )
    if job.optimizer in ("sgd", "sgd_momentum"):
        momentum = job.momentum if job.optimizer == "sgd_momentum" else 0.0
        return torch.optim.SGD(groups, lr=job.learning_rate, momentum=momentum, foreach=False)
    raise LayoutError(f"optimizer={job.optimizer!r} is only modelled: train with adamw, sgd or sgd_momentum")


def learning_rate(job: Job, step: int) -> float:
    """Rate of step ``step`` (from 0): linear warm-up, then a cosine down to the minimum ratio at the end."""
    if step < job.warmup_steps:
        return job.learning_rate * (step + 1) / job.warmup_steps
    progress = (step - job.warmup_steps) / max(job.steps - job.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return job.learning_rate * (job.min_learning_rate_ratio + (1 - job.min_learning_rate_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` in the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradient_norm(model: nn.Module, mesh: RankMesh, left_out: Sequence[Tensor] = ()) -> Tensor:
    """Global 2-norm of the gradients, summed in fp64 so that no layout changes it. Scalar, on every rank.

    One sum each over the shard axes, tp and pp; replicas hold equal gradients. What several ranks of shard
    and tp hold counts for its part on each; ``left_out`` are parameters that another rank counts.
    plan/traffic.py predicts it.
    """
    skip = {id(parameter) for parameter in left_out}
    split = mesh.shard.size() * mesh["tp"].size()
    grads = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in skip]
    total = torch.stack([_square_sum(grad) * (_ranks_that_split(grad) / split) for grad in grads]).sum()
    for axis in (mesh.shard, mesh["tp"], mesh["pp"]):
        if axis.size() > 1:
            dist.all_reduce(total, group=axis.get_group())
    return total.sqrt()


def _ranks_that_split(tensor: Tensor) -> int:
    """Ranks of the mesh that hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(
        mesh.size(axis) for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()
    )


def clip_gradients(model: nn.Module, norm: float, clip_norm: float) -> None:
    """Scale all gradients so that their global norm is at most ``clip_norm``; 0 leaves them."""
    if clip_norm <= 0 or norm <= clip_norm:
        return
    local = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(local, clip_norm / norm)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _square_sum(grad: Tensor) -> Tensor:
    return torch.linalg.vector_norm(_local(grad), dtype=torch.float64).square()
