"""The router: which experts a token goes to, with what weight, and how evenly the experts are used.

N tokens of this rank, B sequences, H hidden, E experts, K experts of a token, C copies (N*K) sorted by
expert.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

from shardwright.model import ModelSpec, Moe
from shardwright.run.kernels import _slices, wide

TINY = 1e-20
"""Added to a token's sum of scores, which is divided by. Source: transformers modeling_deepseek_v3.py."""


@torch.library.custom_op("shardwright::router_scores", mutates_args=())
def _router_scores(x_NH: Tensor, weight_EH: Tensor, sigmoid: bool) -> Tensor:
    dtype = wide(x_NH.dtype)
    score_NE = x_NH.new_empty((x_NH.shape[0], weight_EH.shape[0]), dtype=dtype)
    weight_HE = weight_EH.to(dtype).t()
    for rows in _slices(x_NH.shape[0], x_NH.shape[1] * dtype.itemsize):
        logits = x_NH[rows].to(dtype) @ weight_HE
        score_NE[rows] = logits.sigmoid() if sigmoid else logits.softmax(-1)
    return score_NE


@_router_scores.register_fake
def _(x_NH, weight_EH, sigmoid):
    return x_NH.new_empty((x_NH.shape[0], weight_EH.shape[0]), dtype=wide(x_NH.dtype))


@torch.library.custom_op("shardwright::router_scores_backward", mutates_args=())
def _router_scores_backward(
    grad_NE: Tensor, x_NH: Tensor, weight_EH: Tensor, score_NE: Tensor, sigmoid: bool
) -> tuple[Tensor, Tensor]:
    dtype = score_NE.dtype
    dx_NH, dweight_EH = torch.empty_like(x_NH), torch.zeros_like(weight_EH, dtype=dtype)
    wide_EH = weight_EH.to(dtype)
    for rows in _slices(x_NH.shape[0], (x_NH.shape[1] + 2 * score_NE.shape[1]) * dtype.itemsize):
        score, grad = score_NE[rows], grad_NE[rows] * score_NE[rows]
        dlogit = grad * (1 - score) if sigmoid else grad - score * grad.sum(-1, keepdim=True)
        dx_NH[rows] = (dlogit @ wide_EH).to(dx_NH.dtype)
        dweight_EH += dlogit.t() @ x_NH[rows].to(dtype)
    return dx_NH, dweight_EH.to(weight_EH.dtype, copy=True)


@_router_scores_backward.register_fake
def _(grad_NE, x_NH, weight_EH, score_NE, sigmoid):
    return torch.empty_like(x_NH), torch.empty_like(weight_EH)


class RouterScores(torch.autograd.Function):
    """Softmax or sigmoid of the router's numbers; keeps its input, the weight and the scores."""

    @staticmethod
    def forward(ctx, x_NH: Tensor, weight_EH: Tensor, sigmoid: bool) -> Tensor:
        score_NE = _router_scores(x_NH, weight_EH, sigmoid)
        ctx.save_for_backward(x_NH, weight_EH, score_NE)
        ctx.sigmoid = sigmoid
        return score_NE

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NE: Tensor):
        return *_router_scores_backward(grad_NE, *ctx.saved_tensors, ctx.sigmoid), None


def chosen_experts(score_NE: Tensor, bias_E: Tensor | None, moe: Moe) -> Tensor:
    """Experts of every token (N x K): the best scores, a correction bias counted in, of the best groups.

    A group counts by its best expert; with a correction bias by its two best.

    Source: DeepSeek-V2 arXiv:2405.04434 section 2.2.2, DeepSeek-V3 arXiv:2412.19437 section 2.1.2.
    """
    choice_NE = score_NE if bias_E is None else score_NE + bias_E
    if moe.groups > 1:
        grouped = choice_NE.unflatten(1, (moe.groups, -1))
        best = min(1 if bias_E is None else 2, grouped.shape[2])
        group = grouped.topk(best, dim=2).values.sum(2).topk(moe.top_groups, dim=1).indices
        left_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=score_NE.device)
        left_out.scatter_(1, group, False)
        choice_NE = grouped.masked_fill(left_out[:, :, None], float("-inf")).flatten(1)
    return choice_NE.topk(moe.top_k, dim=1).indices


class CopyWeights(torch.autograd.Function):
    """The weight of every copy: its score, or its share of its token's scores, times the scale.

    Keeps the scores and the order of the copies; from the order and the counts follow token and expert.
    """

    @staticmethod
    def forward(ctx, score_NE: Tensor, index_NK: Tensor, order_C: Tensor, count_E: Tensor, moe: Moe):
        value_NK = score_NE.gather(1, index_NK)
        if moe.normalise:
            value_NK /= value_NK.sum(1, keepdim=True) + TINY
        ctx.save_for_backward(score_NE, order_C, count_E)
        ctx.moe = moe
        return value_NK.flatten()[order_C] * moe.scale

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_C: Tensor):
        score_NE, order_C, count_E = ctx.saved_tensors
        experts = torch.arange(len(count_E), device=grad_C.device)
        expert_C = experts.repeat_interleave(count_E, output_size=len(order_C))
        place_C = order_C // ctx.moe.top_k * len(count_E) + expert_C
        grad_C = grad_C * ctx.moe.scale
        if ctx.moe.normalise:
            chosen_NE = torch.zeros_like(score_NE)
            value_C = score_NE.flatten()[place_C]
            total_N1 = chosen_NE.flatten().index_copy_(0, place_C, value_C).view_as(chosen_NE).sum(1) + TINY
            token_C = order_C // ctx.moe.top_k
            chosen_NE.zero_().flatten().index_copy_(0, place_C, grad_C * value_C)
            mean_N = chosen_NE.sum(1) / total_N1
            grad_C = (grad_C - mean_N[token_C]) / total_N1[token_C]
        dscore_NE = torch.zeros_like(score_NE)
        dscore_NE.flatten().index_copy_(0, place_C, grad_C)
        return dscore_NE, None, None, None, None


class Tally:
    """What the backward passes of a step have counted on this rank: copies of each expert, balancing loss.

    In the backward pass, for it runs once a microbatch: a forward pass is repeated by recomputation, and runs
    without a step in an evaluation.
    """

    def __init__(self) -> None:
        self.count_E: Tensor | None = None
        self.loss: Tensor | None = None

    def add(self, count_E: Tensor, loss: Tensor) -> None:
        """Count one microbatch."""
        if self.count_E is None or self.loss is None:
            self.count_E, self.loss = count_E.clone(), loss.clone()
        else:
            self.count_E += count_E
            self.loss += loss

    def clear(self) -> None:
        """Start the next step."""
        self.count_E = self.loss = None


class Balance(torch.autograd.Function):
    """Hands the scores on; its backward pass counts, and adds the gradient of the balancing loss.

    The loss of a sequence of T tokens is the sum over experts of E/(K T) x copies x mean score, a sigmoid's
    as a share of its token's sum. ``load_BE``: what each token's score is multiplied by; ``repeats``: ranks
    that work on the same tokens and whose gradients are summed.

    Source: DeepSeek-V3 arXiv:2412.19437, equations 17 to 20.
    """

    @staticmethod
    def forward(ctx, score_NE, load_BE: Tensor | None, count_E: Tensor, tally: Tally, shares, repeats):
        ctx.tally, ctx.shares, ctx.repeats = tally, shares, repeats
        ctx.save_for_backward(count_E, *(() if load_BE is None else (score_NE, load_BE)))
        return score_NE.view_as(score_NE)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NE: Tensor):
        count_E, *balancing = ctx.saved_tensors
        loss = grad_NE.new_zeros(())
        if balancing:
            score_NE, load_BE = balancing
            score_BSE, load_B1E = score_NE.unflatten(0, (len(load_BE), -1)), load_BE[:, None]
            if ctx.shares:
                total_BS1 = score_BSE.sum(-1, keepdim=True) + TINY
                mean_BS1 = (score_BSE * load_B1E).sum(-1, keepdim=True) / total_BS1
                loss, dscore_BSE = mean_BS1.sum(), (load_B1E - mean_BS1) / total_BS1
            else:
                loss, dscore_BSE = (score_BSE.sum(1) * load_BE).sum(), load_B1E
            grad_NE = (grad_NE.view_as(score_BSE) + dscore_BSE / ctx.repeats).view_as(score_NE)
        ctx.tally.add(count_E, loss)
        return grad_NE, None, None, None, None, None


class Splits(NamedTuple):
    """Copies this rank sends to each of all experts; and those it gets for each of its own, by sender."""

    sent: list[int]
    received: list[list[int]]


class Routing:
    """Which experts tokens go to. A seam: a dry run, whose tensors hold no numbers, has another."""

    def experts(self, score_NE: Tensor, bias_E: Tensor | None, moe: Moe) -> Tensor:
        """Experts of every token, N x K, all different."""
        return chosen_experts(score_NE, bias_E, moe)

    def splits(self, copies: int, sent_E: Tensor, received_RL: Tensor, rank: int) -> Splits:
        """The counts as numbers: of ``copies`` sent, and received from each rank for each local expert."""
        ranks, experts = received_RL.shape
        numbers = torch.cat([sent_E, received_RL.flatten()]).tolist()
        sent, received = numbers[: len(sent_E)], numbers[len(sent_E) :]
        return Splits(sent, [received[i * experts : (i + 1) * experts] for i in range(ranks)])


class BalancedRouting(Routing):
    """Copies go to the experts round robin, whatever the scores; so every count is known without looking.

    All ranks must have equally many tokens. ``fullness``: in a dry run, copies that this rank gets over the
    mean, as the fullest rank does; ranks that really trade must leave it 1.
    """

    def __init__(self, fullness: float = 1.0) -> None:
        self.fullness = fullness

    def experts(self, score_NE: Tensor, bias_E: Tensor | None, moe: Moe) -> Tensor:
        copies = torch.arange(len(score_NE) * moe.top_k, device=score_NE.device)
        return copies.remainder(moe.experts).view(-1, moe.top_k)

    def splits(self, copies: int, sent_E: Tensor, received_RL: Tensor, rank: int) -> Splits:
        ranks, experts = received_RL.shape
        each, rest = divmod(copies, len(sent_E))
        sent = [each + (expert < rest) for expert in range(len(sent_E))]
        own = [round(count * self.fullness) for count in sent[rank * experts : (rank + 1) * experts]]
        return Splits(sent, [own] * ranks)


class Routed(NamedTuple):
    """Where the copies of this rank's tokens go."""

    weights: Tensor  # C, differentiable
    order: Tensor  # C: copy n*K + k of token n
    counts: Tensor  # E


class Router(nn.Module):
    """Scores every expert for every token, in fp32 (fp64 for fp64), and chooses.

    ``balance_weight`` is the weight of the balancing loss over the global number of sequences;
    ``sequence_groups`` are the groups of ranks that hold the tokens of one sequence between them; ``repeats``
    is the number of ranks that route the same tokens.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.moe is not None, "a model with experts"
        self.moe = spec.moe
        self.weight = nn.Parameter(torch.empty(spec.moe.experts, spec.hidden))
        if spec.moe.correction_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(spec.moe.experts))
        self.routing = Routing()
        self.tally = Tally()
        self.balance_weight = 0.0
        self.sequence_groups: tuple[dist.ProcessGroup, ...] = ()
        self.repeats = 1

    @property
    def bias(self) -> Tensor | None:
        """The correction bias, for families that have one."""
        return self.e_score_correction_bias if self.moe.correction_bias else None

    def forward(self, x_BSH: Tensor) -> Routed:
        sigmoid = self.moe.score == "sigmoid"
        score_NE = RouterScores.apply(x_BSH.flatten(0, 1), split_weight(self.weight), sigmoid)
        with torch.no_grad():
            index_NK = self.routing.experts(score_NE, self.bias, self.moe)
            order_C = index_NK.flatten().argsort(stable=True)
            count_BE = _counts(index_NK.view(len(x_BSH), -1), self.moe.experts)
            count_E = count_BE.sum(0)
            load_BE = self._load(count_BE, x_BSH.shape[1]) if self.balance_weight else None
        score_NE = Balance.apply(score_NE, load_BE, count_E, self.tally, sigmoid, self.repeats)
        return Routed(CopyWeights.apply(score_NE, index_NK, order_C, count_E, self.moe), order_C, count_E)

    def _load(self, count_BE: Tensor, tokens: int) -> Tensor:
        """What the balancing loss multiplies a token's share of an expert by, in every sequence."""
        for group in self.sequence_groups:
            dist.all_reduce(count_BE, group=group)
            tokens *= group.size()
        scale = self.balance_weight * self.moe.experts / (self.moe.top_k * tokens**2)
        return count_BE.to(wide(self.weight.dtype)) * scale


def split_weight(weight: Tensor) -> Tensor:
    """What this rank computes with. Where the parameter is whole on ranks with different tokens, or with
    different parts of the work, each has a part of its gradient."""
    if not isinstance(weight, DTensor):
        return weight
    parts = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
    return weight.to_local(grad_placements=parts)


def _counts(index_BC: Tensor, experts: int) -> Tensor:
    """How often each expert stands in each row; its shape does not depend on the numbers."""
    zeros_BE = torch.zeros((len(index_BC), experts), dtype=torch.int64, device=index_BC.device)
    return zeros_BE.scatter_add_(1, index_BC, torch.ones_like(index_BC))


# Once a step


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
    plan/traffic.py must count one all-reduce of B x E int64 a layer, microbatch and group.
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
