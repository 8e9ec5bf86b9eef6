"""A sequence of operations played forward and backward: what autograd keeps, and what lives at every moment.

The operations are data: what each reads, makes and keeps. From them follow the saved tensors, and the
working set while the sequence is computed again and while its gradients are made, in autograd's order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.layout import Recompute

Amount = float | NDArray[np.float64]
"""Bytes; of several sequences that differ in amounts alone, an array."""


class Op(NamedTuple):
    """One operation. Amounts are bytes for each token, but for ``gradient``.

    ``reads``: tensors that it makes gradients of; ``makes``: its outputs; ``keeps``: what it needs in the
    backward pass; ``stays``: outputs that selective recomputation keeps. An operation that ``adds`` hands its
    output's gradient on as it is. ``around`` and ``around_backward`` live while it works.
    """

    name: str
    reads: tuple[str, ...]
    makes: Mapping[str, Amount]
    keeps: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()
    gradient: Amount = 0.0  # bytes of weight gradients
    adds: bool = False
    around: Amount = 0.0
    around_backward: Amount = 0.0


Step = tuple[Op, ...]
"""Operations whose inputs are freed together, when the last is done; backward they follow one another."""


class Moment(NamedTuple):
    """A candidate for the peak inside one block's backward pass."""

    name: str
    token_bytes: Amount  # of the block's own tensors, for each token
    gradient_bytes: Amount  # of weight gradients made so far, not yet reduced
    fresh_bytes: Amount  # of the one made last: all there is when it is added to an older one at once


class Apart(NamedTuple):
    """Backward passes that make the gradients of inputs and those of weights apart [B for each token].

    ``most``: of the block's own tensors at the worst moment of the pass for inputs. ``waits``: gradients of
    outputs that it leaves for the pass for weights, besides what is saved. ``weights``: moments of that one.
    ``left``: what no weight needs, which stays until the pass has been through all blocks.
    """

    most: Amount
    waits: Amount
    left: Amount
    weights: tuple[Moment, ...]


@dataclass(frozen=True)
class BlockActivations:
    """What a block keeps [B for each token, by tensor] and the moments that may be the peak."""

    saved: Mapping[str, Amount]
    moments: tuple[Moment, ...]
    two_passes: Callable[[], Apart]

    @cached_property
    def apart(self) -> Apart:
        """Of a pass for inputs and one for weights, which few schedules have: played once it is asked for."""
        return self.two_passes()

    @property
    def saved_bytes(self) -> float:
        """Kept for the backward pass, for each token [B]; of one sequence."""
        return float(sum(self.saved.values()))


@dataclass
class _Tape:
    """Tensors alive while a sequence is played; remembers every moment something was made."""

    live: dict[str, Amount]
    gradients: Amount = 0.0
    moments: list[Moment] = field(default_factory=list)

    def make(self, step: str, tensors: Mapping[str, Amount], around: Amount, gradient: Amount = 0.0) -> None:
        self.live.update(tensors)
        self.gradients = self.gradients + gradient
        self.moments.append(Moment(step, sum(self.live.values()) + around, self.gradients, gradient))

    def free(self, *names: str) -> None:
        for name in names:
            del self.live[name]


def played(steps: Sequence[Step], source: Mapping[str, Amount]) -> dict[Recompute, BlockActivations]:
    """Saved tensors and moments of a sequence that starts from the one tensor of ``source``, of every kind of
    recomputation.

    With recomputation the block's input is kept whether an operation needs it or not; what is needed is there
    again before the first gradient, so that the backward pass is the same. The output, which the last
    operation makes first, belongs to whoever reads it.
    """
    ops = [op for step in steps for op in step]
    sizes = dict(source) | {name: size for op in ops for name, size in op.makes.items()}
    needed = {name for op in ops for name in op.keeps}
    again = needed | set(source)
    stays = {name for op in ops for name in op.stays}
    output = next(iter(ops[-1].makes))
    backward = _backward(ops, sizes, needed, output)
    after = backward if again == needed else _backward(ops, sizes, again, output)
    two_passes = partial(_apart, steps, sizes, needed, needed, output)
    found: dict[Recompute, BlockActivations] = {
        "none": BlockActivations(_kept(sizes, needed), backward, two_passes)
    }
    recomputed: tuple[tuple[Recompute, set[str]], ...]
    recomputed = (("selective", stays | set(source)), ("full", set(source)))
    for kind, saved in recomputed:
        kept = _kept(sizes, saved)
        tape = _Tape(dict(kept) | {"grad": sizes[output]})
        _recompute(tape, steps, again)
        least = _most(moment.token_bytes for moment in tape.moments)
        largest = [Moment(tape.moments[0].name, least, 0.0, 0.0)] if tape.moments else []  # no gradients yet
        two_passes = partial(_apart, steps, sizes, again, saved, output, least)
        found[kind] = BlockActivations(kept, worst([*largest, *after]), two_passes)
    return found


def _kept(sizes: Mapping[str, Amount], names: set[str]) -> dict[str, Amount]:
    return {name: size for name, size in sizes.items() if name in names and is_there(size)}


def is_there(amount: Amount) -> bool:
    """Whether it is more than nothing; of several sequences that are played together, it is in each."""
    return bool(amount.any() if isinstance(amount, np.ndarray) else amount)


def _most(amounts: Iterable[Amount]) -> Amount:
    found = list(amounts)
    if any(isinstance(amount, np.ndarray) for amount in found):
        return reduce(np.maximum, found)
    return max(found, default=0.0)


def _recompute(tape: _Tape, steps: Sequence[Step], needed: set[str]) -> None:
    """The forward pass again, up to the last tensor that is needed; kept outputs are taken, not made."""
    makers = reversed(range(len(steps)))
    needing = (place for place in makers if any(not needed.isdisjoint(op.makes) for op in steps[place]))
    end = next(needing, -1)
    last_use = {name: place for place, step in enumerate(steps) for op in step for name in op.reads}
    lasting = needed | {"grad"}
    for place, step in enumerate(steps[: end + 1]):
        makes = {name: size for op in step for name, size in op.makes.items()}
        tape.make("recompute", makes, _most(op.around for op in step))
        tape.free(*(name for name in tape.live if last_use.get(name) == place and name not in lasting))
    tape.free(*(name for name in tape.live if name not in lasting))


def _backward(
    ops: Sequence[Op], sizes: Mapping[str, Amount], saved: set[str], output: str
) -> tuple[Moment, ...]:
    """Gradients, last operation first; a saved tensor goes when the first operation that kept it is done.
    Returns the worst moments."""
    tape, held = _played_back(ops, sizes, saved, output)
    left = set(tape.live) - set(held.buffer)
    assert left == set(held.buffer.values()), f"left after the backward pass: {left}"
    return worst(tape.moments)


def _apart(
    steps: Sequence[Step],
    sizes: Mapping[str, Amount],
    needed: set[str],
    saved: set[str],
    output: str,
    least: Amount = 0.0,
) -> Apart:
    """The gradients of inputs alone, ``least`` before there are any, then those of weights. A graph that
    waits for its second pass frees nothing that is ``saved``, and keeps the gradient of the output of each
    operation with weights; what is ``needed`` besides is made again in each pass."""
    ops = [op for step in steps for op in step]
    inputs = [op._replace(gradient=0.0) for op in ops]
    trained = {name for op in ops if is_there(op.gradient) for name in op.makes}
    tape, held = _played_back(inputs, sizes, needed, output, trained, stays=saved)
    last = set(held.buffer.values())
    waits = {name: size for name, size in tape.live.items() if name not in needed | saved | last}
    weights = _Tape(_kept(sizes, saved) | waits)
    if saved != needed:
        _recompute(weights, steps, needed | set(waits))
    _weights(weights, ops, sizes, held.left, stays=saved if saved != needed else set())
    return Apart(
        _most([least, *(moment.token_bytes for moment in tape.moments)]),
        sum(waits.values()),
        sum(weights.live.values()),
        worst(weights.moments),
    )


def _weights(
    tape: _Tape,
    ops: Sequence[Op],
    sizes: Mapping[str, Amount],
    left: Mapping[str, str],
    stays: Set[str],
) -> None:
    """Gradients of weights, in the order of a block's parameters, norms last; ``left``: the buffer of each
    output's gradient. What a weight needed goes with the last that does, unless it ``stays`` or an operation
    without weights has kept it as well: that one is not run and lets go of nothing. A norm makes its input's
    gradient again.
    """
    order = sorted((op for op in ops if is_there(op.gradient)), key=lambda op: "norm" in op.name)
    for place, op in enumerate(order):
        normed = op.reads[0] if "norm" in op.name else None
        tape.make(f"{op.name} weights", {}, sizes[normed] if normed else 0.0, op.gradient)
        rest = [other for other in ops if other not in order[: place + 1]]
        kept = {name for other in rest for name in other.keeps}
        waiting = {
            left[name] for other in rest if is_there(other.gradient) for name in other.makes if name in left
        }
        done = {name for name in op.keeps if name not in kept | stays}
        done |= {left[name] for name in op.makes if name in left} - waiting
        tape.free(*(name for name in done if name in tape.live))


def _played_back(
    ops: Sequence[Op],
    sizes: Mapping[str, Amount],
    saved: set[str],
    output: str,
    waiting: Set[str] = frozenset(),
    *,
    stays: Set[str] = frozenset(),
) -> tuple["_Tape", "_Gradients"]:
    """The tape at the end of a backward pass; the gradients of ``waiting`` tensors are kept, and saved ones
    that ``stays`` names."""
    tape = _Tape(_kept(sizes, saved | stays) | {"grad": sizes[output]})
    keeper: dict[str, Op] = {}
    for op in ops:
        for name in op.keeps:
            keeper.setdefault(name, op)
    held = _Gradients(tape, sizes, {output: "grad"}, waiting)
    for op in reversed(ops):
        if op.adds:
            held.share(next(iter(op.makes)), op.reads)
            continue
        held.make(op)
        done = (name for name in dict.fromkeys(op.keeps) if keeper[name] is op and name in tape.live)
        tape.free(*(name for name in done if name not in stays))
    return tape, held


@dataclass
class _Gradients:
    """Gradients on their way: the buffer of each tensor's; several tensors may share one, as summands do."""

    tape: _Tape
    sizes: Mapping[str, Amount]
    buffer: dict[str, str]
    waiting: Set[str] = frozenset()  # tensors whose gradients are kept to the end
    kept: set[str] = field(default_factory=set)  # their buffers
    left: dict[str, str] = field(default_factory=dict)  # the buffer of each of them
    sums: set[str] = field(default_factory=lambda: {"grad"})  # buffers that are no view of another tensor

    def share(self, total: str, parts: tuple[str, ...]) -> None:
        """The gradient of a sum is that of each summand."""
        shared = self.buffer.pop(total)
        assert not any(part in self.buffer for part in parts), f"a summand of {total} has a gradient"
        self.buffer |= dict.fromkeys(parts, shared)

    def make(self, op: Op) -> None:
        """Backward of ``op``; a second gradient of one tensor is added to the first, in place if that is a
        sum already and nothing else shares it: products and norms hand on a view of what they make, whose
        base counts as another (torch/csrc/autograd/input_buffer.cpp)."""
        again = [name for name in op.reads if name in self.buffer]
        self.left |= {
            name: self.buffer[name] for name in op.makes if name in self.buffer and name in self.waiting
        }
        self.kept |= set(self.left.values())
        fresh = {name: f"d_{name}_too" if name in again else f"d_{name}" for name in op.reads}
        self.tape.make(
            f"{op.name} backward",
            {buffer: self.sizes[name] for name, buffer in fresh.items()},
            op.around_backward,
            op.gradient,
        )
        self._release(op.makes)
        for name in again:
            before = self.buffer[name]
            shared = list(self.buffer.values()).count(before) > 1 or before in self.kept
            if shared or before not in self.sums:
                total = f"{before}_sum"
                self.tape.make(f"{op.name} backward", {total: self.sizes[name]}, 0.0)
                self.buffer[name] = total
                self.sums.add(total)
                if not shared:
                    self.tape.free(before)
            self.tape.free(fresh[name])
        self.buffer = {name: buffer for name, buffer in fresh.items() if name not in again} | self.buffer

    def _release(self, outputs: Mapping[str, Amount]) -> None:
        done = {self.buffer.pop(name) for name in outputs if name in self.buffer}
        self.tape.free(*(done - set(self.buffer.values()) - self.kept))


def worst(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Moments that no other one exceeds in tensors and gradients alike; the first of equal ones. Of several
    sequences, those that are so in one."""
    if any(isinstance(moment.token_bytes, np.ndarray) for moment in moments):
        return _worst_of_several(moments)
    kept = []
    for place, (_, token_bytes, made, fresh) in enumerate(moments):
        for other, (_, tokens, gradients, last) in enumerate(moments):
            more = tokens >= token_bytes and gradients >= made and last >= fresh
            if more and (other < place or (tokens, gradients, last) != (token_bytes, made, fresh)):
                break
        else:
            kept.append(moments[place])
    return tuple(kept)


def _worst_of_several(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    over = exceeded(amounts_of(moments)).all(axis=1)
    return tuple(moments[place] for place in np.flatnonzero(~over).tolist())


def amounts_of(moments: Sequence[Moment]) -> NDArray[np.float64]:
    """By moment, amount and sequence."""
    columns = np.broadcast_arrays(*(part for moment in moments for part in moment[1:]))
    return np.array(columns, dtype=np.float64).reshape(len(moments), 3, -1)


def exceeded(amounts: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which moments, of which sequence, another one exceeds, as ``worst`` has it."""
    no_less = np.all(amounts[None] >= amounts[:, None], axis=2)  # of a moment and another one
    equal = np.all(amounts[None] == amounts[:, None], axis=2)
    earlier = np.tri(len(amounts), k=-1, dtype=bool)[..., None]
    return np.asarray(np.any(no_less & (~equal | earlier), axis=1))
