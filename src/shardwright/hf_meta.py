"""Any decoder that transformers knows, as its model on the meta device, and the parameter table of that.

For families without a reader of their own: names and shapes are the model's, roles are guessed from names,
and no axis but FSDP's may split a tensor. derive/ makes more of it, where it understands the model.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from shardwright.description import nearest
from shardwright.errors import MissingExtraError, ModelError
from shardwright.hf_config import text_part
from shardwright.hf_families import READERS
from shardwright.plan.params import (
    BLOCK,
    EMBEDDING,
    HEAD,
    ParameterTable,
    Role,
    Tensor,
    Unit,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROLES: tuple[tuple[str, Role], ...] = (
    (r"shared_(expert|mlp)", "shared_expert"),
    (r"norm|^ln(_|\d|$)", "norm"),
    (r"^experts?$", "expert"),
    (r"^(router|gate)$", "router"),
    (r"^wpe$|position|pos_emb", "position"),
    (r"attn|attention", "attention"),
)
"""Patterns, each sought in every part of a tensor's dotted name; the first found decides, and what none fits
is of the feed-forward network.
"""


REASON_WIDTH = 300
"""Characters quoted of what transformers says to a configuration."""


def is_foreign(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is of a family without a reader of its own."""
    model_type = text_part(config).get("model_type")
    return isinstance(model_type, str) and model_type not in READERS


def meta_table(config: Mapping[str, Any], source: str = "config.json") -> ParameterTable:
    """The table of a configuration's causal language model, built by transformers without memory.

    Raises: as ``meta_model``.
    """
    return live_table(meta_model(config, source))


def meta_model(config: Mapping[str, Any], source: str = "config.json") -> "PreTrainedModel":
    """A configuration's causal language model, built by transformers without memory.

    Raises: ModelError: transformers does not know the model_type, or refuses the configuration.
        MissingExtraError: transformers, or the torch it builds with, is not installed.
    """
    model_type = str(config.get("model_type"))
    near = nearest(model_type, list(READERS))
    hint = near if "did you mean" in near else ""
    purpose = f"model_type={model_type!r}, which has no reader of its own{hint},"
    try:
        import torch
    except ImportError:
        raise MissingExtraError("train", purpose) from None
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        raise MissingExtraError("hf", purpose) from None
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{source}: model_type={model_type!r} is not supported{hint}: it is no causal language model "
            "that the installed transformers knows"
        )
    refusals = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError)
    values = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            known = AutoConfig.for_model(model_type, **values)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                known, attn_implementation="eager"
            )
        except (*refusals, StrictDataclassError) as fault:
            reason = shorten(str(fault), REASON_WIDTH, placeholder=" ...")
            raise ModelError(f"{source}: transformers cannot build this {model_type}: {reason}") from None
    return model


def live_table(model: "PreTrainedModel") -> ParameterTable:
    """The table of a live causal language model: trainable parameters, in its own order and names.

    Layers are the largest numbered module list; what stands before them is the embedding's unit, what
    stands behind them, or is a tied embedding, the head's.
    """
    stem, layers = layer_list(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[no-untyped-call]
    embedding, head = (names.get(id(getattr(module, "weight", None)), "") for module in ends)
    before: list[Tensor] = []
    behind: list[Tensor] = []
    inside: dict[int, list[Tensor]] = {layer: [] for layer in range(layers)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        role: Role = "embedding" if name == embedding else "head" if name == head else _role(name)
        tensor = Tensor(name, tuple(parameter.shape), role)
        if name.startswith(f"{stem}."):
            inside[int(name.removeprefix(f"{stem}.").partition(".")[0])].append(tensor)
        elif name == head or any(inside.values()):
            behind.append(tensor)
        else:
            before.append(tensor)
    units = (Unit(EMBEDDING, 1, tuple(before)), *_blocks(stem, inside), Unit(HEAD, 1, tuple(behind)))
    return ParameterTable(tuple(unit for unit in units if unit.tensors), layers)


def layer_list(model: "PreTrainedModel") -> tuple[str, int]:
    """Name and length of the outermost module list that holds most parameters."""
    from torch import nn

    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if not outer:
        raise ModelError(f"{type(model).__name__} has no list of layers: it is no decoder of equal blocks")
    stem = max(outer, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return stem, len(lists[stem])


def _role(name: str) -> Role:
    parts = name.split(".")
    return next(
        (role for pattern, role in ROLES if any(re.search(pattern, part) for part in parts)), "feed_forward"
    )


def _blocks(stem: str, inside: Mapping[int, list[Tensor]]) -> list[Unit]:
    """One unit for all layers with the same tensors; a "gate" routes only where there are experts."""
    layers: dict[tuple[tuple[str, tuple[int, ...]], ...], list[int]] = {}
    for layer, tensors in inside.items():
        shapes = tuple((tensor.name.removeprefix(f"{stem}.{layer}."), tensor.shape) for tensor in tensors)
        layers.setdefault(shapes, []).append(layer)
    units = []
    for shared in layers.values():
        tensors = inside[shared[0]]
        if not any(tensor.role == "expert" for tensor in tensors):
            tensors = [replace(t, role="feed_forward") if t.role == "router" else t for t in tensors]
        units.append(Unit(BLOCK, len(shared), tuple(tensors), tuple(shared), stem))
    return units
