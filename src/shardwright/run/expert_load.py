"""Once a step: the load of the experts over the global batch, and what is done about it.

B sequences, E experts, L layers with experts.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.run.router import Router
from shardwright.run.routing import Routing


def routers(model: nn.Module) -> list[Router]:
    """Routers of the model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, Router)]


def set_routing(model: nn.Module, routing: Routing) -> None:
    """Route every layer by ``routing``."""
    for router in routers(model):
        router.routing = routing


def apply_balance(
    model: nn.Module, weight: float, global_batch: int, groups: Sequence[dist.ProcessGroup] = ()
) -> None:
    """Add the balancing loss of every layer and sequence to the gradients, not to the loss, in place.

    Each sequence counts ``weight`` / ``global_batch``, so that microbatches and ranks add up. ``groups``:
    each holds the tokens of one sequence between its ranks (cp; and tp where tokens are split over it).
    Costs one all-reduce of B x E int64 a layer, forward pass and group.
    """
    for router in routers(model):
        router.balance_weight, router.sequence_groups = weight / global_batch, tuple(groups)


def initialise_bias(model: nn.Module) -> None:
    """Set every correction bias to 0, after ``to_empty``."""
    for router in routers(model):
        if router.bias is not None:
            router.bias.zero_()


class Load(NamedTuple):
    """Copies of each expert in a step, layers x E, and the balancing loss of all layers."""

    counts: Tensor
    loss: Tensor

    @property
    def fullest(self) -> Tensor:
        """Copies of the fullest expert over the mean, the worst layer's; 1 is even."""
        return (self.counts.amax(1) / self.counts.double().mean(1)).amax()

    @property
    def emptiest(self) -> Tensor:
        """Copies of the emptiest expert over the mean, the worst layer's; 0: an expert had none."""
        return (self.counts.amin(1) / self.counts.double().mean(1)).amin()


def expert_load(model: nn.Module, groups: Iterable[dist.ProcessGroup] = ()) -> Load:
    """What the layers have counted since the last call, summed over ``groups``; starts the next count.

    The groups together are all ranks of different tokens, such as dp_replicate, dp_shard and cp.
    """
    tallies = [router.tally for router in routers(model)]
    counts = [tally.count_E for tally in tallies if tally.count_E is not None]
    losses = [tally.loss for tally in tallies if tally.loss is not None]
    assert len(counts) == len(tallies), "a step has run"
    count_LE, loss = torch.stack(counts), torch.stack(losses).sum().double()
    for tally in tallies:
        tally.clear()
    for group in groups:
        dist.all_reduce(count_LE, group=group)
        dist.all_reduce(loss, group=group)
    return Load(count_LE, loss)


def update_router_bias(model: nn.Module, count_LE: Tensor, rate: float) -> None:
    """Move each expert's correction bias by ``rate``: down where it had more copies than the mean, up where
    fewer.

    ``count_LE``: over the whole global batch, one row a router of ``model``.

    Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    for router, count_E in zip(routers(model), count_LE.double(), strict=True):
        if router.bias is not None:
            router.bias.add_(torch.sign(count_E.mean() - count_E), alpha=rate)
