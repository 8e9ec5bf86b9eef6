"""What a decoder does, seen by running it on the meta device: the order of modules, and who reads what.

Nothing is computed and no memory is taken; a tensor is known by its storage and the version of it.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from textwrap import shorten
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

TOKENS = 13
"""Of the sequence that is run: a prime, so that no other size is taken for it."""

NORM_OPERATIONS = ("rsqrt", "native_layer_norm", "_fused_rms_norm", "linalg_vector_norm")
"""Of torch, one of which every norm calls once."""

PRODUCTS = ("bmm", "baddbmm")
"""Of torch, with which two activations are multiplied: scores, and what they weigh."""

REASON_WIDTH = 200
"""Characters quoted of an error."""

Mark = tuple[int, int]
"""A tensor: its storage, and how often that was written to."""


class Call(NamedTuple):
    """A module that was called; ``name`` is relative to its block."""

    name: str
    read: Mark
    made: Mark


@dataclass
class Block:
    """One call of one layer. ``operations`` counts torch's by name; ``attention`` has the heads of each
    softmax over the sequence."""

    read: Mark = (0, 0)
    made: Mark = (0, 0)
    calls: list[Call] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    attention: list[int] = field(default_factory=list)


def traced(model: "PreTrainedModel", stem: str) -> dict[int, list[Block]]:
    """Every call of every layer of a model on the meta device, whose layers are the list ``stem``.

    Stacked experts are passed by, for their rows depend on the tokens.

    Raises: ModelError: the model does not run on the meta device.
    """
    import torch

    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    ready = torch.zeros(1, 1, TOKENS, TOKENS, dtype=model.dtype, device="meta")
    plain = torch.ones(1, TOKENS, device="meta")
    # one over the scores is taken as it is; models that make their own want none, or one over tokens
    masks: tuple[dict[str, torch.Tensor], ...] = (
        {"attention_mask": ready},
        {},
        {"attention_mask": plain},
    )
    model.eval()  # type: ignore[no-untyped-call]
    first: BaseException | None = None
    for more in masks:
        recorder = _Recorder()
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore")
            stack.enter_context(torch.no_grad())
            stack.enter_context(_passed_by(model))
            stack.enter_context(recorder.watching(model.get_submodule(stem)))
            try:
                model(input_ids=ids, use_cache=False, **more)
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as fault:
                first = first or fault
                continue
        return recorder.blocks
    reason = shorten(str(first), REASON_WIDTH, placeholder=" ...")
    raise ModelError(f"it does not run on the meta device, so that its order is not known ({reason})")


@contextmanager
def _passed_by(model: "nn.Module") -> Iterator[None]:
    """Modules that hold stacked matrices give back what they read, as a new tensor."""

    def give_back(_: "nn.Module", hidden: "torch.Tensor", *rest: Any, **more: Any) -> "torch.Tensor":
        return hidden * 1

    stacked = [m for m in model.modules() if any(p.ndim == 3 for p in m.parameters(recurse=False))]
    for module in stacked:
        module.forward = MethodType(give_back, module)
    try:
        yield
    finally:
        for module in stacked:
            del module.forward


class _Recorder:
    """Hooks on all modules of the layers, and the operations between them."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[Block]] = {}
        self.inside: list[Block] = []
        self.reads: list[Mark] = []
        self.alive: list[torch.Tensor] = []  # a storage that is freed might be another's later

    @contextmanager
    def watching(self, layers: "nn.Module") -> Iterator[None]:
        with ExitStack() as stack:
            for index, layer in enumerate(layers.children()):
                for name, module in layer.named_modules():
                    entering = module.register_forward_pre_hook(self._enter(index, name), with_kwargs=True)
                    leaving = module.register_forward_hook(self._leave(name))
                    stack.callback(entering.remove)
                    stack.callback(leaving.remove)
            stack.enter_context(self._operations())
            yield

    def _enter(self, index: int, name: str) -> Any:
        def hook(module: "nn.Module", args: Sequence[Any], more: dict[str, Any]) -> None:
            mark = self._mark(
                (more["hidden_states"],) if "hidden_states" in more else (*args, *more.values())
            )
            if not name:
                self.inside.append(Block(read=mark))
                self.blocks.setdefault(index, []).append(self.inside[-1])
            self.reads.append(mark)

        return hook

    def _leave(self, name: str) -> Any:
        def hook(module: "nn.Module", args: Sequence[Any], made: Any) -> None:
            read, mark = self.reads.pop(), self._mark((made,))
            if name:
                self.inside[-1].calls.append(Call(name, read, mark))
            else:
                self.inside.pop().made = mark

        return hook

    def _mark(self, values: Sequence[Any]) -> Mark:
        """Of the first tensor among some values, or in a tuple among them."""
        import torch

        for value in values:
            if isinstance(value, tuple | list):
                return self._mark(value)
            if isinstance(value, torch.Tensor):
                self.alive.append(value)
                return value.untyped_storage()._cdata, value._version
        return 0, 0

    def _operations(self) -> Any:
        from torch.utils._python_dispatch import TorchDispatchMode

        note = self._note

        class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                made = func(*args, **(kwargs or {}))
                note(func.overloadpacket.__name__, made)
                return made

        return Operations()  # type: ignore[no-untyped-call]

    def _note(self, name: str, made: Any) -> None:
        if not self.inside:
            return
        block = self.inside[-1]
        block.operations[name] += 1
        if name == "_softmax" and made.shape[-2:-1] == (TOKENS,) and made.shape[-1] in (TOKENS, TOKENS + 1):
            block.attention.append(made.numel() // made.shape[-1] // TOKENS)  # TOKENS + 1: with a sink
