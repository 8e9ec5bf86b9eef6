"""A tape of a step: every change of what is held, in order, cut into segments by what the program is at.

Two tapes of a step with one layer more or less are compared event by event; check/extrapolate.py makes the
tape of a long step of them.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.run.mesh import RankMesh
from shardwright.run.meter import ACTIVATIONS, Collective, MemoryMeter, Sent
from shardwright.run.model import Stages
from shardwright.run.recorder import Recorder

Event = list[Any]
"""[kind, bytes]: a storage of that kind is born or grows (positive), dies or shrinks (negative)."""

INITIAL = "initial"
"""Label of the first segment: the state that exists before the step."""


@dataclass
class Segment:
    """What happened from one mark of the program to the next: changes, and what was sent."""

    label: Hashable
    events: list[Event] = field(default_factory=list)
    sent: dict[Collective, Sent] = field(default_factory=dict)


class Tape(MemoryMeter):  # type: ignore[misc]
    """A meter that keeps all it sees in ``segments``, labelled by ``begin``.

    A storage that is given its kind after its birth (a gradient, born unnamed) has it from birth on.
    """

    def __init__(
        self,
        model: Stages,
        optimizer: torch.optim.Optimizer,
        mesh: RankMesh,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, optimizer, mesh, recorder)
        self.segments = [Segment(INITIAL)]
        self.of_storage: dict[int, list[Event]] = {}
        self.ended = False
        self.before: tuple[Counter[Collective], Counter[Collective]] = (Counter(), Counter())

    def begin(self, label: Hashable) -> None:
        """Close the present segment and begin the next."""
        self._close()
        self.segments.append(Segment(label))

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        self._close()
        self.ended = True

    def _close(self) -> None:
        launches, sent = self.before
        self.segments[-1].sent = {
            key: Sent(count - launches[key], self.sent[key] - sent[key])
            for key, count in self.launches.items()
            if count > launches[key]
        }
        self.before = (self.launches.copy(), self.sent.copy())

    def mark(self, tensor: torch.Tensor | None, kind: str) -> None:
        """Say what the storage of a tensor is, whatever it was born as."""
        if tensor is None:
            return
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        known = self.storages.get(id(storage))
        super().mark(tensor, kind)
        if known is None or known.kind == kind:
            return
        if known.kind == ACTIVATIONS:
            for event in self.of_storage[id(storage)]:
                event[0] = kind
        else:
            self.segments[-1].events += [[known.kind, -known.nbytes], [kind, known.nbytes]]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Account for a storage that FSDP has emptied or filled again in place."""
        known = self.storages.get(id(storage))
        super().resized(storage)
        if known is not None:
            self._note(id(storage), known.kind, storage.nbytes() - known.nbytes)

    def _born(self, storage: torch.UntypedStorage, kind: str, tensor: torch.Tensor | None = None) -> None:
        key = id(storage)
        if key in self.storages:
            return
        super()._born(storage, kind, tensor)
        self.of_storage[key] = []
        self._note(key, kind, self.storages[key].nbytes)

    def _died(self, key: int) -> None:
        gone = self.storages[key]
        self._note(key, gone.kind, -gone.nbytes)
        del self.of_storage[key]
        super()._died(key)

    def _note(self, key: int, kind: str, nbytes: int) -> None:
        if nbytes and not self.ended:
            event = [kind, nbytes]
            self.segments[-1].events.append(event)
            self.of_storage[key].append(event)
