"""What one collective of a step sends, and how often blocks have one."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardwright.plan.table import Floats, Ints

RING_SHARE: Mapping[str, int] = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
"""A rank of n sends payload x share x (n-1)/n; of a "send" to its neighbour, all. Source: NVIDIA/nccl-tests
doc/PERFORMANCE.md."""


class Flow(NamedTuple):
    """One kind of collective on one axis in one step, a row a layout."""

    axis: str
    collective: str
    degree: Ints  # ranks of the group
    launches: Ints
    payload_bytes: Ints

    @property
    def sent_bytes(self) -> Floats:
        """What one rank sends in a ring [B]."""
        if self.collective == "send":
            return np.asarray(self.payload_bytes, dtype=np.float64)
        return self.payload_bytes * RING_SHARE[self.collective] * (1 - 1 / self.degree)


class Rounds(NamedTuple):
    """How often a block passes something round in the forward and the backward pass, a row a layout."""

    forward: Floats
    backward: Floats
    trades: Floats | float = 0.0  # of Ulysses


def rounded(values: Floats) -> Ints:
    """Bytes or launches, which are whole."""
    return np.asarray(np.rint(values), dtype=np.int64)
