"""Whole gradients of a short run, put together from what each rank left; and whether ranks agree."""

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.layout import Layout
from shardwright.run.probe import Piece, RankProbe, gradient_file

Array = NDArray[np.float64]


class Run(NamedTuple):
    """One layout's short run: what each rank found, and the folder of their gradients."""

    layout: Layout
    ranks: Sequence[RankProbe]
    folder: Path


class Whole(NamedTuple):
    """The gradient of one parameter; None where a rank had none.

    ``apart``: largest difference between ranks that hold the same part, and the axes that separate them.
    ``start``: sum and sum of squares of the initial weights.
    """

    gradient: Array | None
    stage: int
    axes: tuple[str, ...]
    apart: float
    apart_axes: tuple[str, ...]
    start: tuple[float, float]


class Holder(NamedTuple):
    """A rank that has a part of a parameter, by its own name for it."""

    rank: int
    own: str
    piece: Piece


class Gathered:
    """Gradients of a run by name; use it in a ``with``, for it holds files open."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._holders: dict[str, list[Holder]] = defaultdict(list)
        for rank, found in enumerate(run.ranks):
            for own, piece in found.pieces.items():
                self._holders[piece.name].append(Holder(rank, own, piece))
        self._stack = contextlib.ExitStack()
        self._files: list[Mapping[str, Any]] = []

    def __enter__(self) -> "Gathered":
        for rank in range(len(self.run.ranks)):
            self._files.append(self._stack.enter_context(np.load(gradient_file(self.run.folder, rank))))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """Parameters, in the order of the stages and of their modules."""
        return sorted(self._holders, key=lambda name: self._holders[name][0].piece.stage)

    def whole(self, name: str) -> Whole:
        """One parameter put together; the lowest rank that has a part speaks for it."""
        first, *_ = holders = self._holders[name]
        stage, axes = self.place(name)
        gradient = np.zeros(first.piece.shape)
        owners: dict[tuple[object, ...], Holder] = {}
        apart, missing = 0.0, False
        apart_axes: tuple[str, ...] = ()
        for holder in holders:
            key = tuple(_key(indices) for indices in holder.piece.ranges)
            owner = owners.setdefault(key, holder)
            if not holder.piece.has_gradient:
                missing = True
                continue
            part, place = self._part(holder), _place(holder.piece.ranges)
            if owner is holder:
                gradient[place] = part
                continue
            distance = largest(part - gradient[place])
            between = self._between(owner.rank, holder.rank)
            if distance > 0 and (not apart or len(between) < len(apart_axes)):
                apart_axes = between
            apart = max(apart, distance)
        sums = np.array([owner.piece.start for owner in owners.values()]).sum(0)
        start = (float(sums[0]), float(sums[1]))
        return Whole(None if missing else gradient, stage, axes, apart, apart_axes, start)

    def place(self, name: str) -> tuple[int, tuple[str, ...]]:
        """Stage of a parameter, and the axes that split it."""
        holders = self._holders[name]
        return holders[0].piece.stage, tuple(
            sorted({axis for holder in holders for axis in holder.piece.axes})
        )

    def copies(self, name: str) -> int:
        """Stages that have a copy of a parameter: 2 of a tied matrix in a pipeline."""
        return len({(holder.piece.stage, holder.own) for holder in self._holders[name]})

    def rank_norm(self, rank: int = 0) -> float:
        """2-norm of the parts that one rank has, a tied matrix's second copy included."""
        squares = [np.square(np.asarray(array, np.float64)).sum() for array in self._files[rank].values()]
        return float(np.sqrt(sum(squares)))

    def _part(self, holder: Holder) -> Array:
        return np.asarray(self._files[holder.rank][holder.own], dtype=np.float64)

    def _between(self, first: int, other: int) -> tuple[str, ...]:
        """Axes on which two ranks stand at different places."""
        left, right = self.run.ranks[first].coordinates, self.run.ranks[other].coordinates
        mesh = [axis for axis in left if axis in self.run.layout.order and left[axis] != right[axis]]
        return tuple(mesh)


def largest(values: Array) -> float:
    """Largest absolute value; infinite where one is no number."""
    if not values.size:
        return 0.0
    found = float(np.abs(values).max())
    return found if np.isfinite(found) else float("inf")


def _key(indices: Sequence[int]) -> object:
    return indices if isinstance(indices, range) else tuple(indices)


def _place(ranges: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """An index into the whole: slices, or a grid where a dim has several stretches."""
    if all(isinstance(indices, range) for indices in ranges):
        return tuple(slice(indices[0], indices[-1] + 1) if indices else slice(0, 0) for indices in ranges)
    return tuple(np.ix_(*ranges))
