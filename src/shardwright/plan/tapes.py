"""Sequences of operations that differ in amounts alone, played once for all.

A search asks for blocks of one model split in many ways: most have the same operations on the same tensors.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from shardwright.layout import Recompute
from shardwright.plan.tape import Amount, Apart, BlockActivations, Moment, Op, Step, is_there, played, worst

Block = tuple[Sequence[Step], Mapping[str, Amount]]
"""Operations and the one tensor they start from."""

Shape = tuple[tuple[object, ...], ...]
"""What of operations must be alike for them to be played together: all but amounts."""


def played_together(sequences: Sequence[Block]) -> list[Mapping[Recompute, BlockActivations]]:
    """``played`` of each."""
    alike: dict[Shape, list[int]] = defaultdict(list)
    for place, (steps, _) in enumerate(sequences):
        alike[_shape(steps)].append(place)
    found: list[Mapping[Recompute, BlockActivations]] = [{}] * len(sequences)
    for places in alike.values():
        if len(places) == 1:
            found[places[0]] = played(*sequences[places[0]])
            continue
        steps = _joined([sequences[place][0] for place in places])
        source = _joined_amounts([sequences[place][1] for place in places])
        every = played(steps, source)
        for number, place in enumerate(places):
            found[place] = {kind: _one_of(activations, number) for kind, activations in every.items()}
    return found


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
