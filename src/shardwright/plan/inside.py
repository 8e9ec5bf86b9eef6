"""Moments inside a block, the same for every layer: each, for one layout, or row by row the largest."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.plan.activations import BlockWays, Kind
from shardwright.plan.block_kinds import BlockKinds
from shardwright.plan.flights import More
from shardwright.plan.holdings import Means, RankStep
from shardwright.plan.stages import Stage
from shardwright.plan.table import Floats, LayoutTable


class Inside(NamedTuple):
    """A moment inside a block, and the rows that have it."""

    name: str
    valid: NDArray[np.bool_]
    token_bytes: Floats | float
    fresh: Floats | float  # bytes of weight gradients


class Variant(NamedTuple):
    """Blocks of one kind, recomputed or not, and the rows whose rank has them: of every way of splitting
    them, moments of a backward pass and of one for weights."""

    ways: BlockWays
    row: NDArray[np.intp]
    valid: NDArray[np.bool_]
    plain: bool = False  # not recomputed, in rows that recompute others


def variants_of(
    table: LayoutTable, kinds: Mapping[Kind, BlockKinds], stage: Stage
) -> tuple[list[Variant], Means]:
    """Blocks that a rank may have, and what one of them keeps for each token, the mean.

    Of a rank with both kinds only the blocks with experts are looked at for the peak: theirs is higher.
    """
    some = table.recompute_every > 1
    variants: list[Variant] = []
    most = np.full((1,) * table.micro_batch.ndim, -np.inf)
    saved = waits = left = np.zeros((1,) * table.micro_batch.ndim)
    dense = stage.blocks - stage.expert_blocks
    in_two_passes = bool(stage.flight.apart.any() or stage.flight.tail.any())
    for kind, blocks in zip(kinds, (dense, stage.expert_blocks), strict=False):
        own = kinds[kind]
        looked_at = np.ones((1,) * table.pp.ndim, dtype=bool)  # small: what it joins grows to its shape
        if len(kinds) > 1:
            looked_at = (blocks > 0) & ((kind == "experts") | (blocks == stage.blocks))
        ways = [(own.row, looked_at)]
        if some.any():
            ways.append((own.plain, looked_at & some))
        variants += [Variant(own.ways, *way, plain=place > 0) for place, way in enumerate(ways)]
        share = 1.0 if len(kinds) == 1 else blocks / stage.blocks
        saved = saved + share * own.saved_bytes
        if in_two_passes:
            waits = waits + share * own.ways.apart[own.row, 1]
            left = left + share * own.ways.apart[own.row, 2]
            for row, valid in ways:
                most = np.maximum(most, np.where(valid, own.ways.apart[row, 0], -np.inf))
    return variants, Means(saved, waits, left, most)


def in_passes_apart(variants: Sequence[Variant], more: More | None) -> Sequence[Variant]:
    """Those that passes for weights go through: of a rank whose stages are unlike, as many in flight as there
    are go with one of them alone."""
    if more is None:
        return variants
    return [each._replace(valid=each.valid & (~more.plain if not each.plain else True)) for each in variants]


def each_inside(merges: NDArray[np.bool_], variants: Iterable[Variant]) -> Iterator[Inside]:
    """Every moment inside a block, of every way of splitting and recomputing it that some row has."""
    for variant in variants:
        for kind, activations in enumerate(variant.ways.kinds):
            rows = (variant.row == kind) & variant.valid
            for moment in activations.moments if rows.any() else ():
                fresh = np.where(merges, moment.fresh_bytes, moment.gradient_bytes)
                yield Inside(moment.name, rows, moment.token_bytes, fresh)


def each_weights(merges: NDArray[np.bool_], variants: Iterable[Variant]) -> Iterator[Inside]:
    """The same of a pass for weights, besides what the block keeps."""
    for variant in variants:
        for kind, activations in enumerate(variant.ways.kinds):
            rows = (variant.row == kind) & variant.valid
            for moment in activations.apart.weights if rows.any() else ():
                fresh = np.where(merges, moment.fresh_bytes, moment.gradient_bytes)
                yield Inside(moment.name, rows, moment.token_bytes - activations.saved_bytes, fresh)


def worst_inside(step: RankStep, merges: NDArray[np.bool_], variants: Iterable[Variant]) -> Inside:
    """The largest moment inside a block, row by row; where gradients merge, only the last made counts."""
    return _worst(step, merges, [(each.ways.moments, each.row, each.valid) for each in variants], "backward")


def worst_weights(step: RankStep, merges: NDArray[np.bool_], variants: Iterable[Variant]) -> Inside:
    """The same of a pass for weights, besides what the block keeps."""
    return _worst(step, merges, [(each.ways.weights, each.row, each.valid) for each in variants], "weights")


def _worst(
    step: RankStep,
    merges: NDArray[np.bool_],
    variants: Iterable[tuple[Floats, NDArray[np.intp], NDArray[np.bool_]]],
    name: str,
) -> Inside:
    token_bytes: Floats | float = 0.0
    fresh: Floats | float = 0.0
    most: Floats | float = -np.inf
    for moments, row, valid in variants:
        for moment in range(moments.shape[1]):
            tokens, made, alone = (moments[:, moment, part][row] for part in range(3))
            made = np.where(merges, alone, made)
            total = step.tokens * tokens + made
            larger = (total > most) & valid
            token_bytes, fresh = np.where(larger, tokens, token_bytes), np.where(larger, made, fresh)
            most = np.where(larger, total, most)
    return Inside(name, np.ones_like(step.table.pp, dtype=bool), token_bytes, fresh)
