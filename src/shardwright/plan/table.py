"""A table of layouts as a struct of arrays: one layout is a row, and every formula takes columns."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.layout import KEPT_BY_SELECTIVE, RECOMPUTE_KINDS, Layout

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class LayoutTable(NamedTuple):
    """Columns of equal length; ``recompute`` indexes ``layout.RECOMPUTE_KINDS``."""

    dp_replicate: Ints
    dp_shard: Ints
    zero_stage: Ints
    micro_batch: Ints
    microbatches: Ints
    recompute: Ints

    @property
    def rows(self) -> int:
        """Number of layouts."""
        return len(self.dp_shard)

    @property
    def dp(self) -> Ints:
        """Ranks that hold different sequences."""
        return self.dp_replicate * self.dp_shard

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "LayoutTable":
        """The rows of an index or a mask."""
        return LayoutTable(*(column[index] for column in self))

    def layout(self, row: int) -> Layout:
        """One row as a Layout."""
        kind = RECOMPUTE_KINDS[int(self.recompute[row])]
        return Layout(
            dp_replicate=int(self.dp_replicate[row]),
            dp_shard=int(self.dp_shard[row]),
            zero_stage=int(self.zero_stage[row]),
            micro_batch=int(self.micro_batch[row]),
            microbatches=int(self.microbatches[row]),
            recompute=kind,
            kept=KEPT_BY_SELECTIVE if kind == "selective" else (),
        )


def table_of(layouts: Sequence[Layout]) -> LayoutTable:
    """The table whose rows are ``layouts``."""
    rows = [
        (
            x.dp_replicate,
            x.dp_shard,
            x.zero_stage,
            x.micro_batch,
            x.microbatches,
            RECOMPUTE_KINDS.index(x.recompute),
        )
        for x in layouts
    ]
    return LayoutTable(*np.array(rows, dtype=np.int64).reshape(-1, len(LayoutTable._fields)).T)
