"""Activations of one block: what is saved for the backward pass and what is in use at its worst moments.

plan/block_steps.py writes the block's operations, plan/tape.py plays them.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Job
from shardwright.layout import RECOMPUTE_KINDS, Recompute
from shardwright.model import ModelSpec
from shardwright.plan.block_ops import ELEMENT_BYTES, WIDE_BYTES, Rank, Split
from shardwright.plan.block_steps import Kind, block_steps
from shardwright.plan.tape import BlockActivations, Moment
from shardwright.plan.tapes import Alike, Played, padded, played_together

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
    (found,) = _played(model, job, [split], kind)
    return found.ways[recompute]


def _played(model: ModelSpec, job: Job, splits: Sequence[Split], kind: Kind) -> list[Played]:
    """Of each split, those not known yet played together."""
    known = _known(model, job, kind)
    matter = [_that_matters(split, kind) for split in splits]
    new = [split for split in dict.fromkeys(matter) if split not in known]
    ranks = [Rank(model, job, split) for split in new]
    found = played_together([(block_steps(rank, kind), {"input": rank.residual}) for rank in ranks])
    known.update(zip(new, found, strict=True))
    return [known[split] for split in matter]


@cache
def _known(model: ModelSpec, job: Job, kind: Kind) -> dict[Split, Played]:
    return {}


def _that_matters(split: Split, kind: Kind) -> Split:
    """The split without degrees that change nothing, so that a search plays each block once."""
    cp = split.cp if split.cp_kind in ("all_gather", "ulysses") else 1
    return split._replace(cp=cp) if kind == "experts" else split._replace(cp=cp, ep=1, etp=1)


class BlockWays:
    """A block split in several ways, each recomputed in every way: as columns what it keeps for each token,
    its moments, three amounts each, and the same of passes apart (``Alike``)."""

    def __init__(self, splits: Sequence[Played]) -> None:
        self.splits = splits

    @cached_property
    def kinds(self) -> tuple[BlockActivations, ...]:
        """Each by itself: of every split, every kind of recomputation."""
        every = [split.ways for split in self.splits]
        return tuple(ways[recompute] for ways in every for recompute in RECOMPUTE_KINDS)

    @cached_property
    def saved(self) -> NDArray[np.float64]:
        """By split and kind of recomputation."""
        return self._gathered(lambda alike: alike.saved)

    @cached_property
    def moments(self) -> NDArray[np.float64]:
        """The same by moment and amount; the last is repeated where others have more."""
        return self._gathered(lambda alike: alike.moments, of_moments=True)

    @cached_property
    def apart(self) -> NDArray[np.float64]:
        """The three numbers of two passes apart, ``most`` besides what the block keeps."""
        return self._gathered(lambda alike: alike.apart)

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """The moments of the pass for weights, besides what the block keeps."""
        return self._gathered(lambda alike: alike.weights, of_moments=True)

    def _gathered(
        self, column: Callable[[Alike], NDArray[np.float64]], *, of_moments: bool = False
    ) -> NDArray[np.float64]:
        every = list({id(split.alike): split.alike for split in self.splits}.values())
        parts = [column(alike) for alike in every]
        if of_moments:
            parts = padded(parts, max(part.shape[1] for part in parts), axis=1)
        starts = dict(zip(map(id, every), np.cumsum([0, *(part.shape[-1] for part in parts)]), strict=False))
        places = [starts[id(split.alike)] + split.number for split in self.splits]
        lined = np.moveaxis(np.concatenate(parts, axis=-1)[..., places], -1, 0)
        return lined.reshape(-1, *lined.shape[2:])


@lru_cache(maxsize=256)
def activations_of(model: ModelSpec, job: Job, splits: tuple[Split, ...], kind: Kind = "dense") -> BlockWays:
    """Of every split, every kind of recomputation."""
    return BlockWays(_played(model, job, splits, kind))


def rotary_table_bytes(model: ModelSpec, seq: int, precision: str) -> float:
    """Cosine and sine tables, made once a forward pass and shared by all blocks [B].

    A family with another frequency in its windowed layers has a second pair.
    """
    if model.positions != "rope":
        return 0.0
    turned = model.mla.rope_size if model.mla else model.head_size * model.rotary_share
    pairs = 1 if model.local_rope_theta is None else 2
    return WIDE_BYTES[precision] * seq * turned * pairs
