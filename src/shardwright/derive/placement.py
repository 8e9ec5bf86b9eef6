"""Where a block's norms stand and whether its branches are parallel, from who reads whose output."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.derive.tensors import Layer, is_norm
from shardwright.derive.trace import NORM_OPERATIONS, PRODUCTS, Block, Call, Mark
from shardwright.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

READS_STREAM = ("query", "key", "value", "qkv", "query_down", "key_down", "gate", "up", "gate_up", "router")
"""Kinds of matrices that read what their branch reads."""


class Placement(NamedTuple):
    """Fields of a ModelSpec. ``norms``: those that the block's branches read through, where they do."""

    norm_placement: str
    parallel_block: bool
    shared_norm: bool
    qk_norm_calls: int

    def fields(self) -> dict[str, Any]:
        """Without what is no field."""
        return {key: value for key, value in self._asdict().items() if key != "qk_norm_calls"}


TURNS = ("neg", "view_as_complex")
"""Operations of torch in a rotary embedding's two usual forms."""


def unrotated_layers(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Layers without a rotary embedding where others have one; none if that cannot be seen."""
    turns = [sum(block.operations[name] for name in TURNS) for block in blocks]
    return tuple(layer for layer, turned in enumerate(turns) if not turned) if any(turns) else ()


def placement_of(block: Block, layer: Layer, module: "nn.Module", heads: int) -> Placement:
    """How the branches of a layer stand to its residual stream.

    Raises: ModelError: it is no block of softmax attention and a feed-forward network, or its norms stand
        where none of the known placements has them.
    """
    _check_operations(block, layer, module, heads)
    calls = {call.name: call for call in block.calls}
    reads = [
        _read(layer.attention, calls),
        _read([*layer.feed_forward, *layer.shared, *_router(layer)], calls),
    ]
    norms = [calls[name] for name in layer.norms if name in calls]
    if len(norms) != len(layer.norms) or None in reads:
        raise ModelError("its branches read more than one tensor, or a norm is not called")
    makers = {norm.made: norm for norm in norms}
    through = [makers.get(read) if read is not None else None for read in reads]
    qk = sum(
        is_norm(module.get_submodule(call.name)) and call.name.startswith(layer.attention_path)
        for call in block.calls
        if layer.attention_path
    )
    behind = [norm for norm in norms if norm not in through]
    kind = _kind(block, layer, calls, through, behind, reads)
    if kind is None:
        where = ", ".join(layer.norms) or "none"
        raise ModelError(f"its norms ({where}) stand where no known block has them")
    return Placement(*kind, qk)


def _router(layer: Layer) -> list[Any]:
    return [layer.router] if layer.router else []


def _read(matrices: list[Any], calls: dict[str, Call]) -> Mark | None:
    """What all matrices of a branch read that read its input; None if they do not agree."""
    found = {calls[m.module].read for m in matrices if m.kind in READS_STREAM and m.module in calls}
    return found.pop() if len(found) == 1 else None


def _kind(
    block: Block,
    layer: Layer,
    calls: dict[str, Call],
    through: list[Call | None],
    behind: list[Call],
    reads: list[Mark | None],
) -> tuple[str, bool, bool] | None:
    first, second = through
    made = {call.made: call.name for call in block.calls}
    of_branches = [_branch(made.get(norm.read, ""), layer) for norm in behind]
    both_behind = sorted(of_branches) == ["attention", "feed_forward"]
    if first is not None and second is not None:
        if first.read != block.read:
            return None
        if second.read == block.read:
            return None if behind else ("pre", True, first is second)
        if second.read in made:
            return None
        return ("sandwich", False, False) if both_behind else None if behind else ("pre", False, False)
    if first is not None or reads[0] != block.read:
        return None
    if second is None and both_behind and reads[1] not in made:
        return "post", False, False
    last = [norm for norm in behind if norm.made == block.made and norm.read not in made]
    if second is not None and second.read not in made and len(behind) == len(last) == 1:
        return "residual", False, False
    return None


def _branch(name: str, layer: Layer) -> str:
    """The branch that a module is of, by its name relative to the block."""
    if not name:
        return ""
    if name.startswith(layer.attention_path.rstrip(".")) and layer.attention_path:
        return "attention"
    return "feed_forward" if name.startswith(layer.feed_forward_path.rstrip(".")) else ""


def _check_operations(block: Block, layer: Layer, module: "nn.Module", heads: int) -> None:
    """Raises: ModelError: attention is not softmax over the sequence, once; or there are norms that no module
    stands for, or matrices used twice or never."""
    products = sum(block.operations[name] for name in PRODUCTS)
    if block.attention != [heads] or products != 2:
        raise ModelError(
            f"its layer {layer.index} has {len(block.attention)} softmax over the sequence and {products} "
            f"products of activations, softmax attention of {heads} heads has 1 and 2"
        )
    norms = sum(is_norm(module.get_submodule(call.name)) for call in block.calls)
    counted = sum(block.operations[name] for name in NORM_OPERATIONS)
    if counted > norms:
        raise ModelError(f"its layer {layer.index} norms {counted} times, {norms} of them in a module")
    times = [call.name for call in block.calls]
    matrices = [m.module for m in (*layer.attention, *layer.feed_forward, *layer.shared)]
    uneven = [name for name in matrices if times.count(name) != 1]
    if uneven:
        raise ModelError(f"its layer {layer.index} calls {', '.join(uneven)} not once")
