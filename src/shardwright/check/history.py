"""What a step held at every moment: a recording played back.

A storage that was nameless until it proved to be, say, a gradient has been one from birth, as in
run/meter.py.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardwright.run.meter import ACTIVATIONS, KINDS
from shardwright.run.recorder import OPTIMIZER_STEP, START, Life, Recording

T = TypeVar("T")

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tensors:
    """Storages alike, of one moment: in their module every number is an N."""

    kind: str
    module: str
    source: str
    count: int
    bytes: int

    def document(self) -> dict[str, Any]:
        """As a part of a JSON document."""
        return asdict(self)


class Sample(NamedTuple):
    """A moment of the timeline: number of the event, part of the step, bytes by kind."""

    event: int
    phase: str
    held: dict[str, int]


class History:
    """A step played back."""

    def __init__(self, recording: Recording) -> None:
        self.lives = [_named(life) for life in recording.lives]
        self.events = recording.events

    @cached_property
    def held(self) -> Bytes:
        """Bytes after each event, by kind: events x kinds."""
        changes = np.zeros((len(self.events), len(KINDS)), dtype=np.int64)
        column = {kind: place for place, kind in enumerate(KINDS)}
        for life in self.lives:
            size, kind = 0, life.kinds[0][1]
            marks = sorted({event for event, _ in (*life.kinds, *life.sizes)})
            for event in marks:
                changes[event, column[kind]] -= size
                size, kind = value_at(life.sizes, event), value_at(life.kinds, event)
                changes[event, column[kind]] += size
            if life.death is not None:
                changes[life.death, column[kind]] -= size
        return changes.cumsum(0)

    @cached_property
    def peak_event(self) -> int:
        """Number of the event that first reaches the peak."""
        return int(self.held.sum(1).argmax())

    @property
    def peak(self) -> int:
        """Most bytes held at once."""
        return int(self.held[self.peak_event].sum())

    def sample(self, event: int) -> Sample:
        """What is held after an event."""
        held = {kind: int(count) for kind, count in zip(KINDS, self.held[event], strict=True)}
        return Sample(event, self.events[event].phase, held)

    def samples(self, most: int) -> list[Sample]:
        """The timeline in at most ``most`` moments: of equally many events in a row the one that holds most,
        so that the peak is one of them. The optimizer, which makes nothing, is not left out. It starts
        with all in place that exists before."""
        totals = self.held.sum(1)
        first = max(sum(event.phase == START for event in self.events) - 1, 0)
        edges = np.linspace(first, len(totals), min(most, len(totals) - first) + 1).astype(int)
        found = []
        for low, high in pairwise(edges):
            sample = self.sample(int(low + totals[low:high].argmax()))
            updates = any(event.phase == OPTIMIZER_STEP for event in self.events[low:high])
            found.append(sample._replace(phase=OPTIMIZER_STEP) if updates else sample)
        return found

    def moment(self, event: int) -> str:
        """What was being done at an event: part of the step, module, line."""
        change = self.events[event]
        if change.life is None:
            return str(change.phase)
        origin = self.lives[change.life].origin
        where = f" of {origin.module}" if origin.module else ""
        return f"{change.phase}{where} ({origin.source})"

    def tensors(self, event: int) -> list[Tensors]:
        """What exists after an event, in groups, the largest first."""
        count: Counter[tuple[str, str, str]] = Counter()
        nbytes: Counter[tuple[str, str, str]] = Counter()
        for life in self.lives:
            size = size_at(life, event)
            if size:
                module = re.sub(r"\b\d+\b", "N", life.origin.module)
                key = value_at(life.kinds, event), module, life.origin.source
                count[key] += 1
                nbytes[key] += size
        return [Tensors(*key, count[key], size) for key, size in nbytes.most_common()]


def size_at(life: Life, event: int) -> int:
    """Bytes of a storage after an event; 0 before its birth and from its death on."""
    if event < life.sizes[0][0] or (life.death is not None and life.death <= event):
        return 0
    size: int = value_at(life.sizes, event)
    return size


def value_at(values: Sequence[tuple[int, T]], event: int) -> T:
    """The last value given at or before an event, of pairs in the order of their events."""
    return values[bisect_right(values, event, key=lambda pair: pair[0]) - 1][1]


def _named(life: Life) -> Life:
    kinds = list(life.kinds)
    for place in range(len(kinds) - 2, -1, -1):
        if kinds[place][1] == ACTIVATIONS:
            kinds[place] = (kinds[place][0], kinds[place + 1][1])
    return Life(life.origin, kinds, life.sizes, life.death)
