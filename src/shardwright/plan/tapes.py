"""Sequences of operations that differ in amounts alone, played once for all.

A search asks for blocks of one model split in many ways: most have the same operations on the same tensors.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from shardwright.layout import RECOMPUTE_KINDS, Recompute
from shardwright.plan.table import Floats
from shardwright.plan.tape import (
    Amount,
    Apart,
    BlockActivations,
    Moment,
    Op,
    Step,
    amounts_of,
    exceeded,
    is_there,
    played,
    worst,
)

Block = tuple[Sequence[Step], Mapping[str, Amount]]
"""Operations and the one tensor they start from."""

Shape = tuple[tuple[object, ...], ...]
"""What of operations must be alike for them to be played together: all but amounts."""


class Alike:
    """Sequences that differ in amounts alone, played at once: of every kind of recomputation, amounts with a
    number for each sequence. Columns lie by kind, in the order of ``RECOMPUTE_KINDS``, and by sequence."""

    def __init__(self, ways: Mapping[Recompute, BlockActivations]) -> None:
        self.ways = {kind: ways[kind] for kind in RECOMPUTE_KINDS}
        self._each: dict[int, Mapping[Recompute, BlockActivations]] = {}

    def of(self, number: int) -> Mapping[Recompute, BlockActivations]:
        """Of one sequence."""
        if number not in self._each:
            self._each[number] = {kind: _one_of(each, number) for kind, each in self.ways.items()}
        return self._each[number]

    @cached_property
    def saved(self) -> Floats:
        """What is kept for each token."""
        return np.array([np.atleast_1d(sum(each.saved.values())) for each in self.ways.values()])

    @cached_property
    def moments(self) -> Floats:
        """Between kind and sequence by moment and amount; the last is repeated where others have more."""
        return _padded([_moments(each.moments) for each in self.ways.values()])

    @cached_property
    def apart(self) -> Floats:
        """The three amounts of two passes apart, ``most`` besides what is kept."""
        every = [np.broadcast_arrays(*each.apart[:3], saved) for each, saved in self._kept]
        return np.array([[most - saved, waits, left] for most, waits, left, saved in every])

    @cached_property
    def weights(self) -> Floats:
        """Moments of the pass for weights, besides what is kept, as ``moments``."""
        return _padded([_moments(each.apart.weights, saved) for each, saved in self._kept])

    @property
    def _kept(self) -> Iterable[tuple[BlockActivations, Floats]]:
        return zip(self.ways.values(), self.saved, strict=True)


class Played(NamedTuple):
    """One of several sequences that were played at once."""

    alike: Alike
    number: int

    @property
    def ways(self) -> Mapping[Recompute, BlockActivations]:
        """Of every kind of recomputation."""
        return self.alike.of(self.number)


def played_together(sequences: Sequence[Block]) -> list[Played]:
    """``played`` of each."""
    like: dict[Shape, list[int]] = defaultdict(list)
    for place, (steps, _) in enumerate(sequences):
        like[_shape(steps)].append(place)
    found: dict[int, Played] = {}
    for places in like.values():
        steps, source = sequences[places[0]]
        if len(places) > 1:
            steps = _joined([sequences[place][0] for place in places])
            source = _joined_amounts([sequences[place][1] for place in places])
        alike = Alike(played(steps, source))
        found |= {place: Played(alike, number) for number, place in enumerate(places)}
    return [found[place] for place in range(len(sequences))]


def _moments(moments: Sequence[Moment], saved: Floats | float = 0.0) -> Floats:
    """The worst of each sequence, first of all that it has, by moment, amount and sequence; tokens without
    what is ``saved``."""
    amounts = amounts_of(moments)
    over = exceeded(amounts)
    count = np.count_nonzero(~over, axis=0)
    places = np.minimum(np.arange(count.max())[:, None], count - 1)
    index = np.take_along_axis(np.argsort(over, axis=0, kind="stable"), places, axis=0)
    kept = np.take_along_axis(amounts, index[:, None], axis=0)
    kept[:, 0] -= saved
    return kept


def _padded(moments: Sequence[Floats]) -> Floats:
    return np.array(padded(moments, max(map(len, moments)), axis=0))


def padded(columns: Sequence[Floats], count: int, axis: int) -> list[Floats]:
    """Each with the last place along an axis repeated up to ``count``."""
    return [each.take(np.minimum(np.arange(count), each.shape[axis] - 1), axis) for each in columns]


def _shape(steps: Sequence[Step]) -> Shape:
    return tuple(
        (
            *(op.name, op.reads, op.keeps, op.stays, op.adds, is_there(op.gradient)),
            tuple((name, is_there(size)) for name, size in op.makes.items()),
        )
        for step in steps
        for op in (*step, _END)
    )


_END = Op("end of a step", (), {})


def _joined(sequences: Sequence[Sequence[Step]]) -> list[Step]:
    return [
        tuple(_joined_op(ops) for ops in zip(*steps, strict=True)) for steps in zip(*sequences, strict=True)
    ]


def _joined_op(ops: Sequence[Op]) -> Op:
    return ops[0]._replace(
        makes=_joined_amounts([op.makes for op in ops]),
        gradient=np.array([op.gradient for op in ops]),
        around=np.array([op.around for op in ops]),
        around_backward=np.array([op.around_backward for op in ops]),
    )


def _joined_amounts(amounts: Sequence[Mapping[str, Amount]]) -> dict[str, Amount]:
    return {name: np.array([each[name] for each in amounts]) for name in amounts[0]}


def _one_of(activations: BlockActivations, number: int) -> BlockActivations:
    saved = {name: _amount(size, number) for name, size in activations.saved.items()}
    two_passes = partial(_apart_of, activations, number)
    return BlockActivations(saved, _moments_of(activations.moments, number), two_passes)


def _apart_of(activations: BlockActivations, number: int) -> Apart:
    most, waits, left = (_amount(each, number) for each in activations.apart[:3])
    return Apart(most, waits, left, _moments_of(activations.apart.weights, number))


def _moments_of(moments: Sequence[Moment], number: int) -> tuple[Moment, ...]:
    return worst([Moment(name, *(_amount(part, number) for part in parts)) for name, *parts in moments])


def _amount(amount: Amount, number: int) -> float:
    return float(amount[number]) if isinstance(amount, np.ndarray) else float(amount)
