"""The activations of a model's blocks in every row of a table, by kind of block."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Job
from shardwright.layout import CONTEXT_KINDS, RECOMPUTE_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import BlockWays, Kind, Split, activations_of
from shardwright.plan.table import Floats, LayoutTable, distinct


class BlockKinds(NamedTuple):
    """Activations of a block for each way of splitting and recomputing it, and which one a row has.

    ``plain`` is the same block without recomputation, which a row has beside it if it recomputes every k-th.
    """

    ways: BlockWays
    row: NDArray[np.intp]
    plain: NDArray[np.intp]
    share: Floats  # of blocks that recompute

    @property
    def saved_bytes(self) -> Floats:
        """Kept by a block for each token, the mean [B]."""
        saved = self.ways.saved
        if (self.share == 1).all():
            return np.asarray(saved[self.row])
        return saved[self.row] * self.share + saved[self.plain] * (1 - self.share)


def block_kinds(model: ModelSpec, job: Job, table: LayoutTable, kind: Kind = "dense") -> BlockKinds:
    """The activations of blocks of one kind in every row."""
    experts = (table.ep, table.etp) if kind == "experts" else ()
    gathered = np.where(table.cp_kind == CONTEXT_KINDS.index("all_gather"), table.cp, 1)
    cases, row = distinct(table.tp, table.sp, gathered, table.cp_kind, *experts)
    splits = (
        Split(tp, bool(sp), cp, CONTEXT_KINDS[cp_kind], *of_experts)
        for tp, sp, cp, cp_kind, *of_experts in cases
    )
    ways = activations_of(model, job, tuple(splits), kind)
    plain = row * len(RECOMPUTE_KINDS)
    return BlockKinds(ways, plain + table.recompute, plain, 1 / table.recompute_every)
