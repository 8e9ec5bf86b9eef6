"""The router: which experts a token goes to, with what weight, and how evenly the experts are used.

N tokens of this rank, B sequences, H hidden, E experts, K experts of a token, C copies (N*K) sorted by
expert.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwright.model import ModelSpec, Moe
from shardwright.run.balance import TINY, Balance, Tally
from shardwright.run.kernels import row_slices, wide
from shardwright.run.linear import local
from shardwright.run.routing import Routing


@torch.library.custom_op("shardwright::router_scores", mutates_args=())
def _router_scores(x_NH: Tensor, weight_EH: Tensor, sigmoid: bool) -> Tensor:
    dtype = wide(x_NH.dtype)
    score_NE = x_NH.new_empty((x_NH.shape[0], weight_EH.shape[0]), dtype=dtype)
    weight_HE = weight_EH.to(dtype).t()
    for rows in row_slices(x_NH.shape[0], x_NH.shape[1] * dtype.itemsize):
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
    for rows in row_slices(x_NH.shape[0], (x_NH.shape[1] + 2 * score_NE.shape[1]) * dtype.itemsize):
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
        balances = self.balance_weight > 0 and torch.is_grad_enabled()
        score_NE = RouterScores.apply(x_BSH.flatten(0, 1), local(self.weight), sigmoid)
        with torch.no_grad():
            index_NK = self.routing.experts(score_NE, self.bias, self.moe)
            order_C = index_NK.flatten().argsort(stable=True)
            count_BE = _counts(index_NK.view(len(x_BSH), -1), self.moe.experts)
            count_E = count_BE.sum(0)
            load_BE = self._load(count_BE, x_BSH.shape[1]) if balances else None
        score_NE = Balance.apply(score_NE, load_BE, count_E, self.tally, sigmoid, self.repeats)
        return Routed(CopyWeights.apply(score_NE, index_NK, order_C, count_E, self.moe), order_C, count_E)

    def _load(self, count_BE: Tensor, tokens: int) -> Tensor:
        """What the balancing loss multiplies a token's share of an expert by, in every sequence."""
        for group in self.sequence_groups:
            dist.all_reduce(count_BE, group=group)
            tokens *= group.size()
        scale = self.balance_weight * self.moe.experts / (self.moe.top_k * tokens**2)
        return count_BE.to(wide(self.weight.dtype)) * scale


def _counts(index_BC: Tensor, experts: int) -> Tensor:
    """How often each expert stands in each row; its shape does not depend on the numbers."""
    zeros_BE = torch.zeros((len(index_BC), experts), dtype=torch.int64, device=index_BC.device)
    return zeros_BE.scatter_add_(1, index_BC, torch.ones_like(index_BC))
