"""The parameter table: every tensor of a model by its Hugging Face name.

Counts, shards, FSDP units, memory and traffic are all read from this one table.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Adapters
from shardwright.model import ModelSpec, Moe
from shardwright.naming import Matrices, Naming
from shardwright.plan.names import attention_matrices, block_norms, naming

Role = Literal[
    "embedding", "position", "norm", "attention", "feed_forward", "router", "expert", "shared_expert", "head",
    "mtp", "adapter",
]  # fmt: skip

EMBEDDING, BLOCK, HEAD, ROOT = "embedding", "block", "head", "root"
"""Kinds of FSDP unit. ROOT stands for the whole model wrapped at once, which the runtime refuses to do."""


NO_ADAPTERS = Adapters()


@dataclass(frozen=True)
class Tensor:
    """One trainable tensor.

    ``splits`` maps an axis to the dim it may split. FSDP splits dim 0 of every tensor into equal rows and
    pads the last shard. ``tp`` splits heads, feed-forward width (also inside an expert) or vocabulary, ``ep``
    the stacked experts. An axis without a dim leaves the tensor whole.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    splits: Mapping[str, int] = field(default_factory=lambda: {"dp_shard": 0})

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Unit:
    """Tensors that FSDP gathers and reduces together, in the order of the module's parameters.

    ``copies`` equal units stand in the model (one for each layer); ``tensors`` are those of the first. A
    block names its ``layers`` and the module list they stand in, ``stem``.
    """

    kind: str
    copies: int
    tensors: tuple[Tensor, ...]
    layers: tuple[int, ...] = ()
    stem: str = ""

    @property
    def numel(self) -> int:
        """Elements of one copy."""
        return sum(tensor.numel for tensor in self.tensors)

    def shard_numel(self, shard: NDArray[np.int64]) -> NDArray[np.int64]:
        """Elements of one copy on rank 0 of ``shard`` ranks: rows rounded up, as FSDP pads. Broadcasts."""
        rows = np.array([tensor.shape[0] for tensor in self.tensors])
        widths = np.array([tensor.numel // tensor.shape[0] for tensor in self.tensors])
        shard = np.asarray(shard, dtype=np.int64)[..., None]
        return np.asarray((-(-rows // shard) * widths).sum(-1), dtype=np.int64)

    def at(self, layer: int) -> Iterator[Tensor]:
        """The tensors of the copy at ``layer``, by their own names."""
        first = f"{self.stem}.{self.layers[0]}."
        for tensor in self.tensors:
            name = f"{self.stem}.{layer}." + tensor.name.removeprefix(first)
            yield Tensor(name, tensor.shape, tensor.role, tensor.splits)


@dataclass(frozen=True)
class ParameterTable:
    """All trainable tensors of a model, by FSDP unit in forward order.

    Blocks of different shapes (dense and with experts) are units of their own, in the order of their first
    layers.
    """

    units: tuple[Unit, ...]
    layers: int

    @property
    def parameters(self) -> int:
        """Trainable parameters; equals transformers' own count."""
        return sum(unit.copies * unit.numel for unit in self.units)

    @property
    def blocks(self) -> tuple[Unit, ...]:
        """Units of blocks, one for each shape."""
        return tuple(unit for unit in self.units if unit.kind == BLOCK)

    def unit(self, kind: str) -> Unit:
        """The unit of a kind; an empty one if the model has none. With blocks of two shapes ask ``block``."""
        found = [unit for unit in self.units if unit.kind == kind]
        assert len(found) <= 1, f"{len(found)} kinds of {kind}: say which layer"
        return found[0] if found else Unit(kind, 0, ())

    def block(self, layer: int) -> Unit:
        """The unit that covers a layer, counted from 0."""
        return next(unit for unit in self.blocks if layer in unit.layers)

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor of every layer, in forward order."""
        at_layer = {layer: unit for unit in self.blocks for layer in unit.layers}
        first = next(iter(self.blocks), None)
        for unit in self.units:
            if unit is first:
                for layer in sorted(at_layer):
                    yield from at_layer[layer].at(layer)
            elif unit.kind != BLOCK:
                yield from unit.tensors


@cache
def parameter_table(model: ModelSpec, adapters: Adapters = NO_ADAPTERS) -> ParameterTable:
    """Build the table of a model of a known family, with its adapters if it has any.

    Embedding with learned positions, each block, and final norm with head are units of their own; a tied
    embedding, being the head too, is in the last unit.

    Source: transformers modeling_*.py of each family.
    """
    blocks = tuple(_block(model, layers, adapters) for layers in _layers_by_shape(model))
    first, last = _ends(model, naming(model))
    ends = Unit(EMBEDDING, 1, first) if first else None, Unit(HEAD, 1, last)
    return ParameterTable(tuple(unit for unit in (ends[0], *blocks, ends[1]) if unit), model.layers)


def root_only_table(table: ParameterTable) -> ParameterTable:
    """What FSDP would move if only the root module were wrapped: one unit with every tensor."""
    return ParameterTable((Unit(ROOT, 1, tuple(table.tensors())),), table.layers)


# The tensors


def _splits(tp: int | None = None, ep: int | None = None) -> dict[str, int]:
    dims = {"dp_shard": 0, "tp": tp, "ep": ep}
    return {axis: dim for axis, dim in dims.items() if dim is not None}


def _norm(model: ModelSpec, name: str, size: int) -> Iterator[Tensor]:
    if model.norm_weight:
        yield Tensor(f"{name}.weight", (size,), "norm")
    if model.norm_bias:
        yield Tensor(f"{name}.bias", (size,), "norm")


def _ends(model: ModelSpec, names: Naming) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Tensors before the blocks, and behind them."""
    width = model.embedding_projection or model.hidden
    embedding = Tensor(f"{names.embedding}.weight", (model.vocab, width), "embedding", _splits(tp=0))
    head = [Tensor(f"{names.head}.weight", (model.vocab, width), "head", _splits(tp=0))]
    if model.tied_embeddings:
        head = []
    if model.head_bias:
        head.append(Tensor(f"{names.head}.bias", (model.vocab,), "head", _splits(tp=0)))
    first = [] if model.tied_embeddings else [embedding]
    last = [embedding] if model.tied_embeddings else []
    if model.positions == "learned":
        rows = model.max_positions + model.position_offset
        first.append(Tensor(f"{names.position}.weight", (rows, model.hidden), "position"))
    if model.embedding_projection:
        first.append(Tensor(f"{names.project_in}.weight", (model.hidden, width), "embedding"))
        last.append(Tensor(f"{names.project_out}.weight", (width, model.hidden), "head"))
    if model.final_norm:
        last += _norm(model, names.final_norm, model.hidden)
    return tuple(first), (*last, *head)


def _layers_by_shape(model: ModelSpec) -> list[tuple[int, ...]]:
    """Layers whose blocks have the same tensors, together; in the order of their first."""
    moe = model.moe
    if moe is None:
        return [tuple(range(model.layers))]
    kinds = [
        tuple(layer for layer in range(model.layers) if moe.covers(layer) == has_experts)
        for has_experts in (False, True)
    ]
    return sorted((layers for layers in kinds if layers), key=lambda layers: layers[0])


def _block(model: ModelSpec, layers: tuple[int, ...], adapters: Adapters) -> Unit:
    names = naming(model)
    prefix = f"{names.stem}.{layers[0]}."
    norms = iter(block_norms(model))
    tensors: list[Tensor] = []
    for part in names.order:
        if part == "norm":
            tensors += _norm(model, prefix + next(norms), model.hidden)
        elif part == "norms":
            tensors += (t for name in norms for t in _norm(model, prefix + name, model.hidden))
        elif part == "attention":
            tensors += _attention(model, names, prefix + names.attention)
        elif model.moe is not None and model.moe.covers(layers[0]):
            tensors += _experts(model, model.moe, names, prefix + names.feed_forward)
        else:
            width, path = model.ffn, prefix + names.feed_forward
            tensors += _matrices(model, names, path, names.matrices, "feed_forward", width)
    tensors += _adapters(model, names, tensors, prefix, adapters)
    return Unit(BLOCK, len(layers), tuple(tensors), layers, names.stem)


ADAPTED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("query", "key", "value"),
    "gate_up": ("gate", "up"),
    "query_up": ("query",),
    "key_up": ("key", "value"),
    "mla_out": ("out",),
}
"""Targets that stand for a matrix, where it is not called as they are."""


def _adapters(
    model: ModelSpec, names: Naming, tensors: list[Tensor], prefix: str, adapters: Adapters
) -> Iterator[Tensor]:
    """Adapters of a block: A (rank x inputs) and B (outputs x rank). tp splits them as their matrix.

    Source: Hu et al. 2021, arXiv:2106.09685; names as in huggingface/peft.
    """
    kinds = {
        prefix + path + name: kind
        for path, matrices in (
            (names.attention, attention_matrices(model)),
            (names.feed_forward, names.matrices),
            (f"{names.feed_forward}{names.shared}.", names.matrices),
        )
        for kind, name in matrices
    }
    for tensor in tensors:
        name = tensor.name.removesuffix(".weight")
        kind = kinds.get(name, "")
        if not adapters.rank or len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
            continue
        if not set(ADAPTED.get(kind, (kind,))) & set(adapters.targets):
            continue
        rows, columns = reversed(tensor.shape) if names.transposed else tensor.shape
        dim = tensor.splits.get("tp")
        out_dim = dim if dim is None or not names.transposed else 1 - dim
        a = _splits(tp=1 if out_dim == 1 else None), _splits(tp=0 if out_dim == 0 else None)
        yield Tensor(f"{name}.lora_A.weight", (adapters.rank, columns), "adapter", a[0])
        yield Tensor(f"{name}.lora_B.weight", (rows, adapters.rank), "adapter", a[1])
    for tensor in tensors:
        if tensor.role == "expert" and len(tensor.shape) == 3 and adapters.rank:
            yield from _expert_adapters(tensor, names, adapters)


def _expert_adapters(tensor: Tensor, names: Naming, adapters: Adapters) -> Iterator[Tensor]:
    """Adapters of every expert, stacked as the experts are."""
    experts, rows, columns = tensor.shape
    kinds = ("gate", "up") if "gate_up" in tensor.name else ("down",)
    if not set(kinds) & set(adapters.targets):
        return
    split = tensor.splits["tp"]
    if names.transposed_experts:
        rows, columns, split = columns, rows, 3 - split
    a = _splits(tp=2 if split == 2 else None, ep=0), _splits(tp=1 if split == 1 else None, ep=0)
    yield Tensor(f"{tensor.name}.lora_A", (experts, adapters.rank, columns), "adapter", a[0])
    yield Tensor(f"{tensor.name}.lora_B", (experts, rows, adapters.rank), "adapter", a[1])


def _attention(model: ModelSpec, names: Naming, path: str) -> Iterator[Tensor]:
    if model.attention_sinks:
        yield Tensor(f"{path}sinks", (model.heads,), "attention", _splits(tp=0))
    yield from _matrices(model, names, path, attention_matrices(model), "attention", model.ffn)
    if not model.qk_norm or model.qk_norm_kind == "weightless":
        return
    for name, heads in zip(names.qk_norms, (model.heads, model.kv_heads), strict=True):
        if names.norm_module_per_head:
            for head in range(heads):
                yield Tensor(f"{path}{name}.norms.{head}.weight", (model.head_size,), "norm")
            continue
        shapes: dict[str, tuple[int, ...]] = {
            "head": (model.head_size,),
            "per_head": (heads, model.head_size),
            "projection": (heads * model.head_size,),
        }
        yield Tensor(f"{path}{name}.weight", shapes[model.qk_norm_kind], "norm")
        if model.qk_norm_bias:
            yield Tensor(f"{path}{name}.bias", shapes[model.qk_norm_kind], "norm")


def _matrices(
    model: ModelSpec, names: Naming, path: str, matrices: Matrices, role: Role, width: int
) -> Iterator[Tensor]:
    """Matrices of attention, or of a feed-forward network of ``width``, with their biases."""
    shapes = _shapes(model, width)
    for kind, name in matrices:
        rows, columns, bias, tp = shapes[kind]
        if not columns:  # a norm
            yield Tensor(f"{path}{name}.weight", (rows,), "norm")
            continue
        shape, dim = (rows, columns), tp
        if names.transposed:
            shape, dim = (columns, rows), None if tp is None else 1 - tp
        yield Tensor(f"{path}{name}.weight", shape, role, _splits(tp=dim))
        if bias:
            # GPT-2's of three matrices side by side, of which tp takes a part each, stays whole: its rows are
            # FSDP's to split
            split = tp == 0 and not (names.transposed and kind == "qkv")
            yield Tensor(f"{path}{name}.bias", (rows,), role, _splits(tp=0 if split else None))


def _shapes(model: ModelSpec, width: int) -> dict[str, tuple[int, int, bool, int | None]]:
    """Rows (outputs), columns (inputs), bias, and the dim that tp splits, by kind; a norm has no columns."""
    h, query, key = model.hidden, model.heads * model.head_size, model.kv_heads * model.head_size
    shapes: dict[str, tuple[int, int, bool, int | None]] = {
        "query": (query, h, model.qkv_bias and model.mla is None, 0),
        "key": (key, h, model.qkv_bias, 0),
        "value": (key, h, model.qkv_bias, 0),
        "qkv": (query + 2 * key, h, model.qkv_bias, 0),
        "out": (h, query, model.out_bias, 1),
        "gate": (width, h, model.mlp_bias, 0),
        "up": (width, h, model.mlp_bias, 0),
        "gate_up": (2 * width, h, model.mlp_bias, 0),
        "down": (h, width, model.mlp_bias, 1),
    }
    if model.mla is not None:
        q, kv = model.mla.q_rank, model.mla.kv_rank
        shapes |= {
            "query_down": (q, h, model.qkv_bias, None),
            "query_norm": (q, 0, False, None),
            "query_up": (query, q, False, 0),
            "key_down": (kv + model.mla.rope_size, h, model.qkv_bias, None),
            "key_norm": (kv, 0, False, None),
            "key_up": (model.heads * (model.mla.nope_size + model.mla.value_size), kv, False, 0),
            "mla_out": (h, model.heads * model.mla.value_size, model.out_bias, 1),
        }
    return shapes


def _experts(model: ModelSpec, moe: Moe, names: Naming, path: str) -> Iterator[Tensor]:
    """Router, routed experts (stacked: dim 0 is the expert) and shared experts of one layer."""
    for part in names.moe_order:
        if part == "experts":
            yield from _stacked_experts(model, moe, names.transposed_experts, f"{path}experts.")
        elif part == "router":
            yield Tensor(f"{path}{names.router}.weight", (moe.experts, model.hidden), "router")
            if moe.router_bias:
                yield Tensor(f"{path}{names.router}.bias", (moe.experts,), "router")
        elif part == "shared" and moe.shared_ffn:
            shared = f"{path}{names.shared}."
            yield from _matrices(model, names, shared, names.matrices, "shared_expert", moe.shared_ffn)
        elif part == "shared_gate" and moe.shared_gate:
            yield Tensor(f"{path}{names.shared}_gate.weight", (1, model.hidden), "shared_expert")


def _stacked_experts(model: ModelSpec, moe: Moe, transposed: bool, path: str) -> Iterator[Tensor]:
    shapes = {"gate_up_proj": (2 * moe.ffn, model.hidden, 1), "down_proj": (model.hidden, moe.ffn, 2)}
    for name, (rows, columns, tp) in shapes.items():
        shape = (moe.experts, columns, rows) if transposed else (moe.experts, rows, columns)
        yield Tensor(f"{path}{name}", shape, "expert", _splits(tp=3 - tp if transposed else tp, ep=0))
        if moe.expert_bias:
            bias = _splits(tp=1 if tp == 1 else None, ep=0)
            yield Tensor(f"{path}{name}_bias", (moe.experts, rows), "expert", bias)
