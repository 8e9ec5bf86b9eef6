"""Optimizers over the model's shards, and the learning-rate schedule: the same in every layout."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.accounting import is_decayed, is_orthogonalised
from shardwright.plan.params import Tensor, parameter_table
from shardwright.run.adafactor import Adafactor
from shardwright.run.init import table_name
from shardwright.run.local_adamw import LocalAdamW
from shardwright.run.muon import Muon
from shardwright.run.offload import OffloadedOptimizer
from shardwright.run.quantised import build_adamw_8bit

Groups = list[dict[str, Any]]
"""Parameters with the options that are theirs, as torch.optim takes them."""

Named = tuple[str, nn.Parameter]


def build_optimizer(
    parameters: Iterable[Named], spec: ModelSpec, job: Job, *, offload: bool = False
) -> torch.optim.Optimizer:
    """The job's optimizer over this rank's shards; decay on matrices, not on norms and biases.

    AdamW is fused, so that the step makes no temporary copy of the state. Fused SGD has no rule for sharded
    tensors in torch 2.13: SGD goes tensor by tensor, and with weight decay holds a copy of one gradient.

    Args: ``parameters`` by their names in the model, those of a pipeline stage too. ``offload``: keep state
    and the update on the host.

    Raises: LayoutError: a name that the model's parameter table has not. MissingExtraError: 8-bit Adam
    without its library.
    """
    groups = _groups(list(parameters), spec, job)
    if offload:
        return OffloadedOptimizer(groups, lambda on_host: _optimizer(on_host, job))
    return _optimizer(groups, job)


def _optimizer(groups: Groups, job: Job) -> torch.optim.Optimizer:
    rate, betas = job.learning_rate, (job.beta1, job.beta2)
    if job.optimizer == "adamw":
        return LocalAdamW(groups, lr=rate, betas=betas, eps=job.epsilon, fused=True)
    if job.optimizer in ("sgd", "sgd_momentum"):
        momentum = job.momentum if job.optimizer == "sgd_momentum" else 0.0
        return torch.optim.SGD(groups, lr=rate, momentum=momentum, foreach=False)
    if job.optimizer == "adafactor":
        return Adafactor(groups, lr=rate)
    if job.optimizer == "adamw_8bit":
        return build_adamw_8bit(groups, lr=rate, betas=betas, eps=job.epsilon)
    compute = torch.bfloat16 if job.precision == "bf16" else None
    return Muon(groups, lr=rate, momentum=job.momentum, betas=betas, eps=job.epsilon, compute=compute)


def _groups(parameters: list[Named], spec: ModelSpec, job: Job) -> Groups:
    """Parameters by what the optimizer does with them; no empty group."""
    table = {tensor.name: tensor for tensor in parameter_table(spec, job.adapters).tensors()}
    found: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        tensor = _row(table, table_name(name, spec))
        orthogonal = job.optimizer == "muon" and is_orthogonalised(tensor)
        found.setdefault((is_decayed(tensor), orthogonal), []).append(parameter)
    return [
        {"params": held, "weight_decay": job.weight_decay if decayed else 0.0}
        | ({"orthogonal": orthogonal} if job.optimizer == "muon" else {})
        for (decayed, orthogonal), held in found.items()
    ]


def _row(table: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in table:
        raise LayoutError(
            f"parameter {name!r} is none of the {len(table)} of the model's table: name it as the table does"
        )
    return table[name]


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
        if isinstance(group["lr"], torch.Tensor):  # compiled steps read it: a number would compile them anew
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
