"""The parameter table: every tensor of a model by its Hugging Face name.

Counts, shards, FSDP units, memory and traffic are all read from this one table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.model import ModelSpec

Role = Literal["embedding", "norm", "attention", "feed_forward", "head"]

EMBEDDING, BLOCK, HEAD, ROOT = "embedding", "block", "head", "root"
"""Kinds of FSDP unit. ROOT stands for the whole model wrapped at once, which the runtime refuses to do."""


@dataclass(frozen=True)
class Tensor:
    """One trainable tensor.

    ``splits`` maps an axis to the dim it may split. FSDP splits dim 0 of every tensor into equal rows and
    pads the last shard.
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

    ``copies`` equal units stand in the model (one for each layer); ``tensors`` are those of the first.
    """

    kind: str
    copies: int
    tensors: tuple[Tensor, ...]

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


@dataclass(frozen=True)
class ParameterTable:
    """All trainable tensors of a model, by FSDP unit in forward order."""

    units: tuple[Unit, ...]
    layers: int

    @property
    def parameters(self) -> int:
        """Trainable parameters; equals transformers' own count."""
        return sum(unit.copies * unit.numel for unit in self.units)

    def unit(self, kind: str) -> Unit:
        """The unit of a kind; an empty one if the model has none."""
        return next((unit for unit in self.units if unit.kind == kind), Unit(kind, 0, ()))

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor of every layer, in forward order."""
        for unit in self.units:
            for copy in range(unit.copies):
                for tensor in unit.tensors:
                    name = tensor.name
                    if unit.kind == BLOCK:
                        name = name.replace("layers.0.", f"layers.{copy}.")
                    yield Tensor(name, tensor.shape, tensor.role, tensor.splits)


def parameter_table(model: ModelSpec) -> ParameterTable:
    """Build the table of a model of the Llama family.

    Embedding, each block, and final norm with head are units of their own; with tied embeddings the
    embedding, the final norm and the head, being one tensor and a norm, are the last unit.

    Source: transformers modeling_llama.py, modeling_mistral.py, modeling_qwen2.py, modeling_qwen3.py.
    """
    embedding = Tensor("model.embed_tokens.weight", (model.vocab, model.hidden), "embedding")
    norm = Tensor("model.norm.weight", (model.hidden,), "norm")
    block = Unit(BLOCK, model.layers, tuple(_block_tensors(model)))
    if model.tied_embeddings:
        return ParameterTable((block, Unit(HEAD, 1, (embedding, norm))), model.layers)
    head = Tensor("lm_head.weight", (model.vocab, model.hidden), "head")
    units = (Unit(EMBEDDING, 1, (embedding,)), block, Unit(HEAD, 1, (norm, head)))
    return ParameterTable(units, model.layers)


def root_only_table(table: ParameterTable) -> ParameterTable:
    """What FSDP would move if only the root module were wrapped: one unit with every tensor."""
    return ParameterTable((Unit(ROOT, 1, tuple(table.tensors())),), table.layers)


def _block_tensors(model: ModelSpec) -> Iterable[Tensor]:
    query, key = model.heads * model.head_size, model.kv_heads * model.head_size
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    projections: tuple[tuple[str, int, int, bool, Role], ...] = (
        (f"{attention}.q_proj", query, model.hidden, model.qkv_bias, "attention"),
        (f"{attention}.k_proj", key, model.hidden, model.qkv_bias, "attention"),
        (f"{attention}.v_proj", key, model.hidden, model.qkv_bias, "attention"),
        (f"{attention}.o_proj", model.hidden, query, model.out_bias, "attention"),
        (f"{mlp}.gate_proj", model.ffn, model.hidden, model.mlp_bias, "feed_forward"),
        (f"{mlp}.up_proj", model.ffn, model.hidden, model.mlp_bias, "feed_forward"),
        (f"{mlp}.down_proj", model.hidden, model.ffn, model.mlp_bias, "feed_forward"),
    )
    for name, rows, columns, bias, role in projections:
        yield Tensor(f"{name}.weight", (rows, columns), role)
        if bias:
            yield Tensor(f"{name}.bias", (rows,), role)
        if model.qk_norm and name.endswith("o_proj"):
            yield Tensor(f"{attention}.q_norm.weight", (model.head_size,), "norm")
            yield Tensor(f"{attention}.k_norm.weight", (model.head_size,), "norm")
    yield Tensor("model.layers.0.input_layernorm.weight", (model.hidden,), "norm")
    yield Tensor("model.layers.0.post_attention_layernorm.weight", (model.hidden,), "norm")
