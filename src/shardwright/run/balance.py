"""How evenly experts are used: counted in the backward pass, where the balancing loss adds its gradient.

N tokens of this rank, B sequences, S tokens of a sequence here, E experts.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TINY = 1e-20
"""Added to a token's sum of scores, which is divided by. Source: transformers modeling_deepseek_v3.py."""


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
