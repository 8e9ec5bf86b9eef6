"""A record of a step's storages: what each is, who made it, and when it came and went.

run/meter.py tells a recorder, where it is given one, of every birth, resize and death. Who made a storage is
the module that was running and the innermost line of this package. In backward, where kernels of torch have
no line of ours, it is those of the forward operation, found by the number that autograd gives both.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import shardwright
from shardwright.run.model import Stages

START, FORWARD, BACKWARD, OPTIMIZER_STEP, BETWEEN = "start", "forward", "backward", "optimizer", "between"
PHASES = (START, FORWARD, BACKWARD, OPTIMIZER_STEP, BETWEEN)
"""Parts of a step. START: what exists when it begins. BETWEEN: data, sums over ranks, norm and clipping."""

PACKAGE = Path(shardwright.__file__).parent
WATCHERS = ("run/meter.py", "run/recorder.py", "check/in_flight.py")
"""Files of the package that only look on."""

ENGINE = "_engine_run_backward"
"""torch's function below which frames belong to the backward pass."""


class Origin(NamedTuple):
    """Who made a storage: name of the module in the whole model ("" outside), and ``file:line``."""

    module: str
    source: str


@dataclass(slots=True)
class Life:
    """One storage. ``kinds`` and ``sizes`` [B]: each with the number of the event since which it holds."""

    origin: Origin
    kinds: list[tuple[int, str]]
    sizes: list[tuple[int, int]]
    death: int | None = None


class Event(NamedTuple):
    """A change: bytes more or less of a storage (0 where only its kind changed); of none where the optimizer
    starts."""

    life: int | None
    change: int
    phase: str


@dataclass
class Recording:
    """All of a step: plain data, which a rank can send home."""

    lives: list[Life] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Recorder:
    """Given to a MemoryMeter. Costs a walk up the stack at every operation, so only where it is asked for."""

    def __init__(self) -> None:
        self.recording = Recording()
        self._current: dict[int, int] = {}  # number of the life of a storage that lives, by the meter's key
        self._state: dict[int, Origin] = {}  # by the id of a parameter or of a tensor of optimizer state
        self._modules: list[str] = []
        self._forward: dict[int, Origin] = {}  # by sequence number of autograd
        self._here = Origin("", "")
        self._phase, self._optimizing = START, False

    @contextlib.contextmanager
    def attached(self, model: Stages, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Follow modules and the optimizer inside."""
        names = {
            id(module): re.sub(r"^stages\.\d+\.?", "", name)
            for name, module in model.named_modules()
            if name != ""
        }
        self._name_state(model, optimizer)

        def enter(module: torch.nn.Module, _: object) -> None:
            outer = self._modules[-1] if self._modules else ""
            self._modules.append(names.get(id(module), outer))

        def leave(*_: object) -> None:
            self._modules.pop()

        def optimize(*_: object) -> None:
            self._optimizing, self._phase = True, OPTIMIZER_STEP
            self.recording.events.append(Event(None, 0, OPTIMIZER_STEP))

        def done(*_: object) -> None:
            self._optimizing, self._phase = False, BETWEEN

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
            optimizer.register_step_pre_hook(optimize),
            optimizer.register_step_post_hook(done),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # What the meter tells

    def look(self) -> None:
        """Find out who is at work; told at every operation, for what it or its backward may make."""
        node = torch._C._current_autograd_node()
        source, inside = _innermost(sys._getframe(1))
        module = self._modules[-1] if self._modules else ""
        if node is None:
            self._here = Origin(module, source)
            self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._here)
            self._phase = OPTIMIZER_STEP if self._optimizing else FORWARD if self._modules else BETWEEN
            return
        forward = self._forward.get(node._sequence_nr(), Origin("", source))
        if inside and self._modules:  # recomputation is a forward of its own
            self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, Origin(module, source))
        self._here = Origin(module or forward.module, source if inside else forward.source)
        self._phase = BACKWARD

    def born(self, key: int, kind: str, nbytes: int, tensor: torch.Tensor | None = None) -> None:
        """A storage is there; ``tensor``: the parameter or state it belongs to, of which there is no
        operation."""
        origin = self._here if tensor is None else self._state.get(id(tensor), self._here)
        self._current[key] = len(self.recording.lives)
        now = len(self.recording.events)
        self.recording.lives.append(Life(origin, [(now, kind)], [(now, nbytes)]))
        self._note(key, nbytes)

    def renamed(self, key: int, kind: str) -> None:
        """A storage turned out to be something else."""
        self.recording.lives[self._current[key]].kinds.append((len(self.recording.events), kind))
        self._note(key, 0)

    def resized(self, key: int, nbytes: int) -> None:
        """A storage has another size now; filled again, it is the work of whoever is at work."""
        life = self.recording.lives[self._current[key]]
        before = life.sizes[-1][1]
        life.sizes.append((len(self.recording.events), nbytes))
        self._note(key, nbytes - before)

    def died(self, key: int) -> None:
        """A storage is gone."""
        life = self.recording.lives[self._current[key]]
        life.death = len(self.recording.events)
        self._note(key, -life.sizes[-1][1])
        del self._current[key]

    def _note(self, key: int, change: int) -> None:
        self.recording.events.append(Event(self._current[key], change, self._phase))

    # What exists before a step

    def _name_state(self, model: Stages, optimizer: torch.optim.Optimizer) -> None:
        made_by = _class_line(type(optimizer))
        for stage in model.stages:
            for name, module in stage.named_modules():
                for own, parameter in module.named_parameters(recurse=False):
                    full = f"{name}.{own}" if name else own
                    self._state[id(parameter)] = Origin(full, _parameter_line(type(module), own))
                    for kind, value in optimizer.state.get(parameter, {}).items():
                        self._state[id(value)] = Origin(f"{full} {kind}", made_by)


def _innermost(frame: FrameType | None) -> tuple[str, bool]:
    """Innermost line of this package's code at work, and whether autograd's engine called it."""
    inside = True
    while frame is not None:
        own = _own_file(frame.f_code)
        if own is not None:
            return f"{own}:{frame.f_lineno}", inside
        if frame.f_code.co_name == ENGINE:
            inside = False
        frame = frame.f_back
    return "", False


@cache
def _own_file(code: CodeType) -> str | None:
    """Path inside the package of the file with this code, but for the files that look on."""
    return _inside_package(Path(code.co_filename))


def _inside_package(path: Path) -> str | None:
    if not path.is_relative_to(PACKAGE):
        return None
    own = path.relative_to(PACKAGE).as_posix()
    return None if own in WATCHERS else own


@cache
def _parameter_line(owner: type, name: str) -> str:
    """Where a module's class makes a parameter: the assignment, else the class."""
    for kind in owner.__mro__:
        path = inspect.getsourcefile(kind) if kind.__module__.startswith(shardwright.__name__) else None
        own = None if path is None else _inside_package(Path(path))
        if own is None:
            continue
        lines, first = inspect.getsourcelines(kind)
        for offset, line in enumerate(lines):
            if re.match(rf"\s*self\.{name}\b.*=", line):
                return f"{own}:{first + offset}"
    return _class_line(owner)


@cache
def _class_line(kind: type) -> str:
    """Where a class is defined."""
    own = [base for base in kind.__mro__ if base.__module__.startswith((shardwright.__name__, "torch.optim"))]
    kind = own[0] if own else kind
    path = Path(inspect.getsourcefile(kind) or "")
    short = _inside_package(path) or kind.__module__.replace(".", "/") + ".py"
    return f"{short}:{inspect.getsourcelines(kind)[1]}"
