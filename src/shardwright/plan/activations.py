"""Activations of one block: what is saved for the backward pass and what is in use at its worst moments.

plan/block_steps.py writes the block's operations, plan/tape.py plays them.
"""

from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Job
from shardwright.layout import RECOMPUTE_KINDS, Recompute
from shardwright.model import ModelSpec
from shardwright.plan.block_ops import ELEMENT_BYTES, WIDE_BYTES, Rank, Split
from shardwright.plan.block_steps import Kind, block_steps
from shardwright.plan.tape import BlockActivations, Moment
from shardwright.plan.tapes import played_together

__all__ = [
    "ELEMENT_BYTES", "WHOLE", "WIDE_BYTES", "BlockActivations", "Kind", "Moment", "Split",
    "block_activations", "rotary_table_bytes",
]  # fmt: skip

WHOLE = Split()


def block_activations(
    model: ModelSpec, job: Job, recompute: Recompute, split: Split = WHOLE, kind: Kind = "dense"
) -> BlockActivations:
    """Saved tensors and moments of one block, for each token of a rank (it has micro_batch * seq / cp).

    The four families that the runtime builds are counted as it executes them (check/ compares), the others
    as they would be with its kernels. The residual stream's input counts as saved by the block that reads it.
    In families whose layers differ in window or rotation only, every layer keeps the same.
    """
    assert kind == "dense" or model.moe, f"model {model.name} has no experts"
    (ways,) = _activations(model, job, [split], kind)
    return ways[recompute]


def _activations(
    model: ModelSpec, job: Job, splits: Sequence[Split], kind: Kind
) -> list[Mapping[Recompute, BlockActivations]]:
    """Of each split, those not known yet played together."""
    known = _known(model, job, kind)
    matter = [_that_matters(split, kind) for split in splits]
    new = [split for split in dict.fromkeys(matter) if split not in known]
    ranks = [Rank(model, job, split) for split in new]
    found = played_together([(block_steps(rank, kind), {"input": rank.residual}) for rank in ranks])
    known.update(zip(new, found, strict=True))
    return [known[split] for split in matter]


@cache
def _known(model: ModelSpec, job: Job, kind: Kind) -> dict[Split, Mapping[Recompute, BlockActivations]]:
    return {}


def _that_matters(split: Split, kind: Kind) -> Split:
    """The split without degrees that change nothing, so that a search plays each block once."""
    cp = split.cp if split.cp_kind in ("all_gather", "ulysses") else 1
    return split._replace(cp=cp) if kind == "experts" else split._replace(cp=cp, ep=1, etp=1)


class BlockWays:
    """A block split and recomputed in several ways: each, and of each as columns its moments, three amounts
    each, the last repeated where others have more, and what it keeps for each token."""

    def __init__(self, kinds: tuple[BlockActivations, ...]) -> None:
        self.kinds = kinds
        self.saved = np.array([each.saved_bytes for each in kinds])
        self.moments = _columns([each.moments for each in kinds])

    @cached_property
    def apart(self) -> NDArray[np.float64]:
        """The three numbers of two passes apart, ``most`` besides what the block keeps."""
        apart = np.array([each.apart[:3] for each in self.kinds])
        apart[:, 0] -= self.saved
        return apart

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """The moments of the pass for weights, besides what the block keeps."""
        weights = _columns([each.apart.weights for each in self.kinds])
        weights[:, :, 0] -= self.saved[:, None]
        return weights


@lru_cache(maxsize=256)
def activations_of(model: ModelSpec, job: Job, splits: tuple[Split, ...], kind: Kind = "dense") -> BlockWays:
    """Of every split, every kind of recomputation."""
    found = _activations(model, job, splits, kind)
    return BlockWays(tuple(ways[recompute] for ways in found for recompute in RECOMPUTE_KINDS))


def _columns(moments: Sequence[tuple[Moment, ...]]) -> NDArray[np.float64]:
    count = max(map(len, moments))
    padded = [each + each[-1:] * (count - len(each)) for each in moments]
    return np.array([[moment[1:] for moment in each] for each in padded])


def rotary_table_bytes(model: ModelSpec, seq: int, precision: str) -> float:
    """Cosine and sine tables, made once a forward pass and shared by all blocks [B].

    A family with another frequency in its windowed layers has a second pair.
    """
    if model.positions != "rope":
        return 0.0
    turned = model.mla.rope_size if model.mla else model.head_size * model.rotary_share
    pairs = 1 if model.local_rope_theta is None else 2
    return WIDE_BYTES[precision] * seq * turned * pairs
