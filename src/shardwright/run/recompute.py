"""Recomputation of activations: which outputs of a block are kept, the rest computed again in backward.

Outputs are kept by the operation that makes them, and an operation is found by its module's name, whatever
the family calls it. A product whose parts tp adds up is kept as the sum: neither is made again.
"""

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import GraphExecGroup, checkpoint

from shardwright.layout import Recompute, ScheduleName
from shardwright.model import ModelSpec
from shardwright.plan.names import attention_matrices, naming
from shardwright.run.experts import Experts
from shardwright.run.linear import Linear, same
from shardwright.run.model import Block, Transformer

OPERATIONS: Mapping[str, str] = {
    "query": "q_proj", "query_up": "q_proj", "qkv": "q_proj", "key": "k_proj", "key_up": "k_proj",
    "value": "v_proj", "out": "o_proj", "mla_out": "o_proj",
    "gate": "gate_proj", "gate_up": "gate_proj", "up": "up_proj",
}  # fmt: skip
"""Operation that each kind of matrix (plan/params.py) belongs to. Those left out are never kept: the last of
a network, whose output nothing needs, and the narrow ones of latent attention."""

_ATEN = torch.ops.aten
_PRODUCTS = {
    *(_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN._scaled_mm.default),
    torch.ops.shardwright.grouped_product.default,
}
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    torch.ops.shardwright.narrow_attention.default,
}
_MEETINGS = {
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def apply_recompute(
    model: Transformer, kind: Recompute, kept: Sequence[str], *, every: int = 1, passes: int = 1
) -> None:
    """Have blocks recompute their bodies, in place. Call after tp, before compile and FSDP.

    ``full`` keeps a block's input alone, in every layer whose number ``every`` divides; ``selective`` keeps
    the outputs of the operations named in ``kept`` besides. Inside the FSDP unit, so that the parameters are
    gathered once for recomputation and backward. ``passes``: backward passes through a block, 2 where a
    zero-bubble schedule makes the gradients of inputs and of weights apart; see ``weight_pass``.
    """
    if kind == "none":
        return
    wrap = functools.partial(
        _recomputing if passes > 1 else checkpoint,
        use_reentrant=False,
        preserve_rng_state=False,
        determinism_check="none",
    )
    for number, layer in model.decoder.layers.items():
        if kind == "selective":
            modules = kept_modules(model.spec, kept)
            attention, routed = "attention" in kept, "gate_proj" in kept
            region = _watch(layer, modules, attention=attention, routed=routed)
            contexts = functools.partial(_contexts, region, passes)
            layer.recompute = functools.partial(wrap, context_fn=contexts)
        elif int(number) % every == 0:
            layer.recompute = wrap


def passes_of(schedule: ScheduleName) -> int:
    """Backward passes through a block under a pipeline schedule."""
    return 2 if schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV") else 1


def weight_pass() -> GraphExecGroup:
    """Context for the weight pass of a stage in a zero-bubble schedule: each block is recomputed once in it.

    Without, torch recomputes a block once for every group of its parameters.
    """
    return GraphExecGroup()


class _Call(checkpointing._CheckpointFrame):
    """What torch knows of one call of a recomputed block."""

    alive: ClassVar[weakref.WeakSet["_Call"]] = weakref.WeakSet()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alive.add(self)


def _recomputing(*args: Any, **kwargs: Any) -> Any:
    """``checkpoint``, whose calls ``forget_recomputed`` finds."""
    original = checkpointing._CheckpointFrame
    checkpointing._CheckpointFrame = _Call
    try:
        return checkpoint(*args, **kwargs)
    finally:
        checkpointing._CheckpointFrame = original


def forget_recomputed() -> None:
    """Let go of what a pass for the gradients of inputs has made again and had no use for: what functions
    written in Python keep for weights. Without, torch holds it until the pass for weights, which makes it
    once more."""
    for call in list(_Call.alive):
        call.recomputed.clear()


def kept_modules(spec: ModelSpec, kept: Sequence[str]) -> list[tuple[str, str]]:
    """Where the products are that make the outputs in ``kept``: start and end of their paths in a block."""
    names = naming(spec)
    matrices = [
        *((names.attention, kind, name) for kind, name in attention_matrices(spec)),
        *((names.feed_forward, kind, name) for kind, name in names.matrices),
    ]
    return [(branch, name) for branch, kind, name in matrices if OPERATIONS.get(kind) in kept]


@dataclass
class _Region:
    """The kept operation that a block is at, set by its modules; ``joined``: ranks of tp add up its parts."""

    path: str | None = None
    joined: bool = False

    def open(self, path: str, joined: bool = False) -> None:
        self.path, self.joined = path, joined

    def close(self) -> None:
        self.path = None


def _watch(layer: Block, modules: Sequence[tuple[str, str]], *, attention: bool, routed: bool) -> _Region:
    """Have the modules of a block say when they are at work."""
    region = _Region()
    for path, module in layer.named_modules():
        named = any(path.startswith(branch) and path.split(".")[-1] == name for branch, name in modules)
        if named or (isinstance(module, Experts) and routed):
            _announce(module, path, region)
    if attention:
        attend = layer.self_attn.attend

        def announced(*args: Any, **kwargs: Any) -> Tensor:
            region.open("attention")
            out = attend(*args, **kwargs)
            region.close()
            return out

        layer.self_attn.attend = announced
    return region


def _announce(module: nn.Module, path: str, region: _Region) -> None:
    joined = isinstance(module, Linear) and module.join is not same
    module.register_forward_pre_hook(lambda *_: region.open(path, joined))
    module.register_forward_hook(lambda *_: region.close())


class _Shape(NamedTuple):
    """What an operation made that is not needed, for what follows is kept."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device

    def stand_in(self) -> Tensor:
        """A tensor of this shape that takes no memory."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.size)


@dataclass
class _Entry:
    """What an operation made, for so many readings."""

    operation: Any
    made: Any
    readings: int

    def read(self) -> Any:
        assert self.readings, "one pass through a block more than apply_recompute was told of"
        made = self.made
        self.readings -= 1
        if not self.readings:
            self.made = None
        if isinstance(made, _Shape):
            return made.stand_in()
        return tree_map_only(Tensor, Tensor.detach, made)


@dataclass
class _Tape:
    """Entries of each region in one call of one block."""

    region: _Region
    passes: int
    entries: dict[str, list[_Entry]] = field(default_factory=dict)


class _Recording(TorchDispatchMode):
    """The forward pass: keeps what the regions make."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        region = self.tape.region
        if region.path is None or func.is_view:
            return out
        entries = self.tape.entries.setdefault(region.path, [])
        if region.joined:
            if not isinstance(out, Tensor) or (entries and entries[-1].operation in _MEETINGS):
                return out  # fake tensors are asked for their device
            made = out.detach() if func in _MEETINGS else _Shape(out.shape, out.dtype, out.device)
            entries.append(_Entry(func, made, self.tape.passes))
        elif func in _ATTENTION or (func in _PRODUCTS and not entries):  # of experts, the first of two
            # detached: an output that its own graph keeps would never be freed
            entries.append(_Entry(func, tree_map_only(Tensor, Tensor.detach, out), self.tape.passes))
        return out


class _Replaying(TorchDispatchMode):
    """The pass again: what was kept is given, not made."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self.tape = tape
        self.given: dict[str, int] = {}

    def __enter__(self):
        self.given.clear()
        self.tape.region.close()  # a pass that ended early may have left it open
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        path = self.tape.region.path
        if path is None or func.is_view:
            return func(*args, **(kwargs or {}))
        entries, place = self.tape.entries.get(path, []), self.given.get(path, 0)
        if place == len(entries) or entries[place].operation is not func:
            return func(*args, **(kwargs or {}))
        self.given[path] = place + 1
        return entries[place].read()


def _contexts(region: _Region, passes: int) -> tuple[_Recording, _Replaying]:
    """Contexts of one call of one block: its forward pass, and every time it is computed again."""
    tape = _Tape(region, passes)
    return _Recording(tape), _Replaying(tape)
