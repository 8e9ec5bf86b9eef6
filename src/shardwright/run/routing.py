"""Which experts a token goes to, and how many copies travel where: what a dry run answers in its own way.

N tokens of this rank, E experts, K experts of a token, R ranks of ep, L experts of one of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.model import Moe


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
