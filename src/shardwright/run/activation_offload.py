"""Tensors that blocks save for backward, in host memory until backward needs them.

On a CPU rank host and device are one memory; the code path is the same, without streams.
"""

import collections
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from shardwright.plan.holdings import OFFLOADED_BLOCKS
from shardwright.run.shards import local


def apply_activation_offload(blocks: Iterable[nn.Module]) -> None:
    """Have every block keep what it saves for backward on the host, in place.

    Copies go over streams of their own: down while the device computes on; up a block ahead, so that at most
    two blocks' saved tensors are on the device. Parameters stay, and inputs without a gradient (rotary
    tables). Call before FSDP wraps the blocks: what it gathers is seen inside their forward pass only.
    """
    copier = Copier()
    for number, block in enumerate(blocks):
        block.forward = functools.partial(_offloading, copier, number, block, block.forward)


def _offloading(
    copier: "Copier", number: int, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``forward`` of the block with its saved tensors on the host."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    copier.wait_for_room()
    call = copier.begin(number)
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.requires_grad]
    call.keep([*block.parameters(), *given])
    with saved_tensors_hooks(call.pack, call.unpack):
        found = forward(*args, **kwargs)
    call.forget_sources()
    copier.mark()
    return found


class Copier:
    """Streams that copy, one each way.

    The host would otherwise run ahead of the copies, and the device hold every block's tensors at once: it
    waits for those of the block before last.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[_Call] | None = None
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
        self._copied: collections.deque[list[torch.cuda.Event]] = collections.deque(maxlen=OFFLOADED_BLOCKS)

    def begin(self, number: int) -> "_Call":
        """A forward pass of block ``number``, after the one begun last."""
        last = self._last() if self._last is not None else None
        call = _Call(self, number, last)
        self._last = weakref.ref(call)
        return call

    def wait_for_room(self) -> None:
        """Wait until only the last block's tensors may still be on their way down."""
        for event in self._copied[0] if len(self._copied) == OFFLOADED_BLOCKS else ():
            event.synchronize()

    def mark(self) -> None:
        """All copies down of a block have been started."""
        down = [stream for (_, way), stream in self._streams.items() if way == "down"]
        self._copied.append([stream.record_event() for stream in down])

    def down(self, source: Tensor) -> Tensor:
        """A copy on the host; on CUDA under way, after what the device has been given so far."""
        room = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        if not source.is_cuda:
            return room.copy_(source)
        stream = self._stream(source.device, "down")
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            room.copy_(source, non_blocking=True)
        source.record_stream(stream)
        return room

    def up(self, host: Tensor, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
        """A copy on the device, and on CUDA what to wait for before it is read."""
        if device.type != "cuda":
            return host.clone(), None
        stream = self._stream(device, "up")
        stream.wait_stream(self._stream(device, "down"))
        with torch.cuda.stream(stream):
            found = host.to(device, non_blocking=True)
            return found, stream.record_event()

    def _stream(self, device: torch.device, way: str) -> torch.cuda.Stream:
        if (device, way) not in self._streams:
            self._streams[device, way] = torch.cuda.Stream(device)
        return self._streams[device, way]


class _Saved:
    """One saved tensor: on the host, and while backward is near on the device again."""

    def __init__(self, copier: Copier, source: Tensor) -> None:
        part = local(source)
        self.copier, self.device, self.host = copier, part.device, copier.down(part)
        self.spec = source._spec if isinstance(source, DTensor) else None
        self.here: tuple[Tensor, torch.cuda.Event | None] | None = None

    def fetch(self) -> None:
        """Start the copy up, once."""
        if self.here is None:
            self.here = self.copier.up(self.host, self.device)

    def take(self) -> Tensor:
        """The tensor on the device, for the operations that follow."""
        self.fetch()
        found, arrived = self.here
        if arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            found.record_stream(stream)
        return found if self.spec is None else DTensor(found, self.spec, requires_grad=False)


class _View:
    """Another shape of a saved tensor: the same numbers in the same place."""

    def __init__(self, saved: _Saved, tensor: Tensor) -> None:
        self.saved, self.size, self.stride = saved, tensor.shape, tensor.stride()

    def take(self) -> Tensor:
        """The view of the tensor on the device."""
        return self.saved.take().as_strided(self.size, self.stride)


class _Call:
    """One forward pass of one block: what it saved, and the block before it, which backward reaches next.

    Autograd holds it, and the saved tensors, as long as it needs them: nothing else does.
    """

    def __init__(self, copier: Copier, number: int, last: "_Call | None") -> None:
        self.copier, self.number = copier, number
        # another microbatch's last block is not what backward reaches after the first block
        follows = last is not None and last.number == number - 1
        self._before = weakref.ref(last) if follows else None
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._kept: set[int] = set()
        self._sources: dict[tuple[Any, ...], tuple[StorageWeakRef, _Saved]] = {}
        self._reached = False

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Leave these, and views of them, where they are."""
        self._kept = {_storage(tensor) for tensor in tensors}

    def forget_sources(self) -> None:
        """The forward pass is over: nothing more is packed."""
        self._kept, self._sources = set(), {}

    def pack(self, tensor: Tensor) -> "_Saved | _View | Tensor":
        """What autograd holds instead of ``tensor``; the same for one that several operations save, if in
        another shape (attention's output, which the matrix behind it reads by rows)."""
        if _storage(tensor) in self._kept:
            return tensor
        part = local(tensor)
        whole = part is tensor and _without_gaps(part)
        shape = () if whole else (part.shape, part.stride())
        place = (part.storage_offset(), part.numel(), *shape)
        key = (_storage(tensor), *place, part.dtype, part._version)
        if key in self._sources and not self._sources[key][0].expired():  # not a new tensor at an old address
            saved = self._sources[key][1]
            return _View(saved, part) if whole else saved
        saved = _Saved(self.copier, tensor)
        self._saved.add(saved)
        self._sources[key] = (StorageWeakRef(part.untyped_storage()), saved)
        return saved

    def unpack(self, held: "_Saved | _View | Tensor") -> Tensor:
        """The saved tensor; the first of a block starts the copies of the block that backward needs next."""
        if not self._reached:
            self._reached = True
            self.fetch()
            before = self._before() if self._before is not None else None
            if before is not None:
                before.fetch()
        return held if isinstance(held, Tensor) else held.take()

    def fetch(self) -> None:
        """Start the copies up, after the device is done with the block that backward has left."""
        for device in {saved.device for saved in self._saved if saved.here is None}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        for saved in self._saved:
            saved.fetch()


def _without_gaps(tensor: Tensor) -> bool:
    """Whether its numbers lie side by side, in whatever order of dimensions: a copy has them in the same."""
    dims = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for step, size in dims:
        if step != expected:
            return False
        expected *= size
    return True


def _storage(tensor: Tensor) -> int:
    return local(tensor).untyped_storage()._cdata
