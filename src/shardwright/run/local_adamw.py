"""AdamW whose update reads and writes this rank's parts, whatever tensors are split over."""

from typing import Any

import torch
from torch import Tensor

from shardwright.run.shards import local


class LocalAdamW(torch.optim.AdamW):
    """torch's AdamW without DTensor in its update, which is element-wise and so the same on a part.

    On DTensors each process works out a rule of sharding for every tensor of a group on every axis of its
    mesh: a fifth of the time of three steps of a small model on 8 ranks. State is split as parameters are.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill ``lists`` (parameters, gradients, state) with what the update of a group takes."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex
