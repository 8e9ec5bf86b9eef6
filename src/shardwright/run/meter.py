"""A meter of what a step holds and sends, for devices with and without allocator statistics.

A dispatch mode that follows every storage from birth to death and every collective. The same meter runs over
a real step and, in check/dryrun.py, over a fake one; plan/memory.py predicts its numbers by the same kinds.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.run.activation_offload import Copier
from shardwright.run.mesh import RankMesh
from shardwright.run.model import Stages
from shardwright.run.offload import OffloadedOptimizer
from shardwright.run.recorder import Recorder
from shardwright.run.tp import TP_PARTS

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, LOGITS, ACTIVATIONS = "gathered", "logits", "activations"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, GATHERED)
"""What a storage is. GATHERED is all that FSDP holds whole for a while: parameters, gradients not yet
reduced, and communication buffers. ACTIVATIONS is the rest, saved or in use."""

HOST = "host"
"""What is offloaded: followed, for on a CPU rank nothing else tells it from the device's, and not counted."""

STATE = (PARAMETERS, GRADIENTS, OPTIMIZER)


class Collective(NamedTuple):
    """A kind of call on an axis."""

    axis: str
    name: str


class Sent(NamedTuple):
    """What a collective was given in one step: launches, and payload [B], padding included.

    Payload is the whole tensor: gathered for an all-gather, not yet scattered for a reduce-scatter.
    """

    launches: int
    payload_bytes: int


class _Storage(NamedTuple):
    kind: str
    nbytes: int
    birth: int  # counts all births
    alive: weakref.ref[torch.UntypedStorage]


class MemoryMeter(TorchDispatchMode):
    """Use as ``with meter:`` around a step; then read ``peak``, ``at_peak`` and ``traffic``.

    ``at_rest`` holds the state's bytes as ``settle`` last found them: call that when the gradients are
    complete. A ``recorder`` is told of every storage.
    """

    def __init__(
        self,
        model: Stages,
        optimizer: torch.optim.Optimizer,
        mesh: RankMesh,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        self.recorder = recorder
        self.model, self.optimizer = model, optimizer
        self.axes = _axes_of_groups(model, mesh)
        self.storages: dict[int, _Storage] = {}
        self.held: Counter[str] = Counter()
        self.births = 0
        self.peak = 0
        self.births_at_peak = 0
        self.at_peak: dict[str, int] = {}
        self.at_rest: dict[str, int] = {}
        self.sent: Counter[Collective] = Counter()
        self.launches: Counter[Collective] = Counter()
        self.kind = ACTIVATIONS
        self.undo = contextlib.ExitStack()

    @property
    def traffic(self) -> dict[Collective, Sent]:
        """Launches and payload of each kind of call on each axis."""
        return {key: Sent(self.launches[key], self.sent[key]) for key in sorted(self.launches)}

    def __enter__(self) -> "MemoryMeter":
        if self.recorder is not None:
            self.undo.enter_context(self.recorder.attached(self.model, self.optimizer))
        self._register_state()
        self.undo.enter_context(_watched_fsdp(self))
        self.undo.enter_context(_watched_offload(self))
        for stage in self.model.stages:
            if stage.lm_head is not None:
                self._watch(stage.lm_head, LOGITS)
                loss = stage.lm_head.register_forward_hook(lambda _, __, loss: self.mark(loss, ACTIVATIONS))
                self.undo.callback(loss.remove)
        updates = HOST if isinstance(self.optimizer, OffloadedOptimizer) else OPTIMIZER
        pre = self.optimizer.register_step_pre_hook(lambda *_: self._start(updates))
        post = self.optimizer.register_step_post_hook(lambda *_: self._start(ACTIVATIONS))
        self.undo.callback(pre.remove)
        self.undo.callback(post.remove)
        super().__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        self.undo.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if self.recorder is not None:
            self.recorder.look()
        if func.namespace in ("c10d", "_c10d_functional"):
            self._record(func, args, out)
        if func.is_view:
            return out  # of a storage that is known, or of a backend's own buffer: gloo reduces a copy
        kind = LOGITS if "cross_entropy" in func.__name__ else self.kind
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._born(tensor.untyped_storage(), kind)
        return out

    # Storages

    def mark(self, tensor: torch.Tensor | None, kind: str) -> None:
        """Say what the storage of a tensor is, whatever it was born as."""
        if tensor is None:
            return
        storage = _local(tensor).untyped_storage()
        known = self.storages.get(id(storage))
        if known is None:
            self._born(storage, kind, tensor)
        elif known.kind != kind:
            self.held[known.kind] -= known.nbytes
            self.held[kind] += known.nbytes
            self.storages[id(storage)] = known._replace(kind=kind)
            if self.recorder is not None:
                self.recorder.renamed(id(storage), kind)
            if known.kind == ACTIVATIONS and known.birth <= self.births_at_peak:
                # a weight's gradient, born unnamed, was there at the peak: name it there too
                self.at_peak[ACTIVATIONS] -= known.nbytes
                self.at_peak[kind] += known.nbytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Account for a storage that FSDP has emptied or filled again in place."""
        known = self.storages.get(id(storage))
        if known is None:
            self._born(storage, self.kind)
            return
        self.storages[id(storage)] = known._replace(nbytes=storage.nbytes())
        if self.recorder is not None:
            self.recorder.resized(id(storage), storage.nbytes())
        self._add(known.kind, storage.nbytes() - known.nbytes)

    def settle(self) -> None:
        """Measure the resting state: parameters, gradients and optimizer state that exist now."""
        self._register_state()
        self.at_rest = {kind: self.held[kind] for kind in STATE}

    def _born(self, storage: torch.UntypedStorage, kind: str, tensor: torch.Tensor | None = None) -> None:
        key = id(storage)
        if key in self.storages:
            return
        self.births += 1
        alive = weakref.ref(storage, lambda _: self._died(key))
        nbytes = 0 if kind == HOST else storage.nbytes()
        self.storages[key] = _Storage(kind, nbytes, self.births, alive)
        if self.recorder is not None and kind != HOST:
            self.recorder.born(key, kind, nbytes, tensor)
        self._add(kind, nbytes)

    def _died(self, key: int) -> None:
        gone = self.storages.pop(key)
        if self.recorder is not None and gone.kind != HOST:
            self.recorder.died(key)
        self.held[gone.kind] -= gone.nbytes

    def _add(self, kind: str, nbytes: int) -> None:
        self.held[kind] += nbytes
        total = sum(self.held.values())
        if nbytes > 0 and total > self.peak:
            self.peak, self.at_peak = total, {k: self.held[k] for k in KINDS}
            self.births_at_peak = self.births

    def _register_state(self) -> None:
        for parameter in self.model.parameters():
            self.mark(parameter, PARAMETERS)
            self.mark(parameter.grad, GRADIENTS)
        kept = HOST if isinstance(self.optimizer, OffloadedOptimizer) else OPTIMIZER
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and name != "step":  # counters stay on the host
                    self.mark(value, kept)

    # Who makes what

    def _start(self, kind: str) -> None:
        self.kind = kind

    @contextlib.contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Storages born inside are of ``kind``."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def _watch(self, module: torch.nn.Module, kind: str) -> None:
        before = module.register_forward_pre_hook(lambda *_: self._start(kind))
        after = module.register_forward_hook(lambda *_: self._start(ACTIVATIONS))
        self.undo.callback(before.remove)
        self.undo.callback(after.remove)

    # Collectives

    def _record(self, func, args, out) -> None:
        name, payload = _collective(func.__name__.split(".")[0], (args, out))
        if name is None:
            return
        key = Collective(self.axes.get(_group_name(args), "world"), name)
        self.launches[key] += 1
        self.sent[key] += payload


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _axes_of_groups(model: Stages, mesh: RankMesh) -> dict[str, str]:
    """Name of the axis behind each process group of the mesh and of parts of tp; groups of one rank send
    nothing."""
    meshes = {tensor.device_mesh for tensor in model.parameters() if isinstance(tensor, DTensor)}
    parts = {
        own.get_group(name).group_name: "tp"
        for own in meshes
        for name in own.mesh_dim_names or ()
        if name in TP_PARTS
    }
    named = {axis.get_group().group_name: axis.mesh_dim_names[0] for axis in reversed(mesh.axes())}
    return parts | named  # of names of one group the first


def _group_name(args) -> str | None:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):
                return dist.ProcessGroup.unbox(arg).group_name
        if isinstance(arg, dist.ProcessGroup):
            return arg.group_name
    strings = [arg for arg in args if isinstance(arg, str)]
    return strings[-1] if strings else None


def _collective(op: str, values) -> tuple[str | None, int]:
    """Our name of a c10d operator and its payload [B]; (None, 0) for waits and barriers.

    ``values``: arguments and result. A functional collective is not given what it fills, and returns it.
    """
    arguments, result = ([t for t in tree_leaves(v) if isinstance(t, torch.Tensor)] for v in values)
    if "allgather" in op or "all_gather" in op:
        return "all_gather", max(t.nbytes for t in [*arguments, *result])
    if "reduce_scatter" in op:
        return "reduce_scatter", max(t.nbytes for t in arguments)
    if "allreduce" in op or "all_reduce" in op:
        return "all_reduce", sum(t.nbytes for t in arguments)
    if "alltoall" in op or "all_to_all" in op:
        return "all_to_all", arguments[-1].nbytes  # what is sent, which need not be as much as what comes
    if op == "send":
        return "send", sum(t.nbytes for t in arguments)
    if "broadcast" in op:
        return "broadcast", sum(t.nbytes for t in arguments)
    return None, 0


@contextlib.contextmanager
def _watched_fsdp(meter: MemoryMeter) -> Iterator[None]:
    """Have FSDP's own storages reported as GATHERED, its gradients as GRADIENTS once reduced.

    FSDP empties and refills gathered parameters by resizing a storage, which dispatches nothing, and so its
    allocation functions are wrapped. Hooks on gathered parameters tell unreduced gradients from activations.
    """
    hooked = _GatheredGradients(meter)

    def group_method(original: Callable, after: Callable) -> Callable:
        def method(group, *args, **kwargs):
            with meter.making(GATHERED):
                result = original(group, *args, **kwargs)
                after(group)
            return result

        return method

    def resize(original: Callable) -> Callable:
        def function(tensor: torch.Tensor):
            with meter.making(GATHERED):
                result = original(tensor)
                meter.resized(tensor.untyped_storage())
            return result

        return function

    group_class = _fsdp_param_group.FSDPParamGroup
    replaced = [
        (group_class, "unshard", group_method(group_class.unshard, lambda group: None)),
        (group_class, "wait_for_unshard", group_method(group_class.wait_for_unshard, hooked.watch)),
        (group_class, "post_backward", group_method(group_class.post_backward, hooked.settle)),
        (_fsdp_param, "alloc_storage", resize(_fsdp_param.alloc_storage)),
        (_fsdp_param, "free_storage", resize(_fsdp_param.free_storage)),
        (_fsdp_param_group, "alloc_storage", resize(_fsdp_param_group.alloc_storage)),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, replacement in replaced:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
        hooked.remove()


@contextlib.contextmanager
def _watched_offload(meter: MemoryMeter) -> Iterator[None]:
    """Have copies of saved tensors on the host reported as HOST."""
    down = Copier.down

    def copy(copier: Copier, source: torch.Tensor) -> torch.Tensor:
        with meter.making(HOST):
            return down(copier, source)

    Copier.down = copy
    try:
        yield
    finally:
        Copier.down = down


class _GatheredGradients:
    """Marks gradients of gathered parameters, before and after their reduction."""

    def __init__(self, meter: MemoryMeter) -> None:
        self.meter = meter
        self.handles: dict[int, torch.utils.hooks.RemovableHandle] = {}

    def watch(self, group) -> None:
        for fsdp_param in group.fsdp_params:
            parameter = getattr(fsdp_param, "_unsharded_param", None)
            if parameter is not None and id(parameter) not in self.handles:
                self.handles[id(parameter)] = parameter.register_hook(
                    lambda grad: self.meter.mark(grad, GATHERED)
                )

    def settle(self, group) -> None:
        for fsdp_param in group.fsdp_params:
            self.meter.mark(fsdp_param.sharded_param.grad, GRADIENTS)
        self.meter.mark(group._partial_reduce_output, GRADIENTS)  # a shard that waits for its replicas

    def remove(self) -> None:
        for handle in self.handles.values():
            handle.remove()
