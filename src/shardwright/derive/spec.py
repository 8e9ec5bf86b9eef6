"""A ModelSpec of any decoder that transformers knows, from its model on the meta device.

What a ModelSpec cannot express is refused, with the reason.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.derive import fields as of_config
from shardwright.derive.naming import Ends, ends_of, naming_of
from shardwright.derive.placement import Placement, placement_of, unrotated_layers
from shardwright.derive.sizes import attention_fields, feed_forward_fields, norms_of
from shardwright.derive.tensors import Layer, layer_of
from shardwright.derive.trace import Block, traced
from shardwright.errors import ModelError
from shardwright.hf_config import config_path, model_from, read_config
from shardwright.hf_families import READERS
from shardwright.hf_meta import is_foreign, layer_list, live_table, meta_model
from shardwright.model import ModelSpec
from shardwright.plan.counts import active_parameters, mtp_parameters
from shardwright.plan.params import ParameterTable, parameter_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHOWN = 5
"""Tensors that a message names."""

LOOKS: Mapping[str, str] = {
    r"A_log|dt_bias|conv1d|time_decay|mlstm|linear_attn|rg_lru": "a state-space or linear-attention layer",
    r"encoder_attn|cross_?attn|crossattention": "attention to an encoder",
    r"vision|image|audio|visual": "an encoder of images or sound",
    r"indexer": "sparse attention that selects its keys",
    r"act_fn|alpha_p": "a trained activation",
    r"gate_proj|g_proj|output_gate": "a gate on attention or of a network",
    r"emb\w*norm|norm_emb|embeddings?\.(Layer)?[nN]orm": "a norm of the embedding",
}
"""What tensors that are not modelled are for, by their names; a hint in a message and no more."""


def model_of(argument: str) -> ModelSpec:
    """The model named by a preset, a ``config.json``, or a folder holding one, of a known family or not.

    Raises: ModelError: as ``model_from``; or the family is not known and transformers does not know it
        either, or its blocks are none that can be planned, with every reason.
        MissingExtraError: transformers is needed and absent.
    """
    foreign = _foreign(argument)
    if foreign is None:
        return model_from(argument)
    model = meta_model(foreign.config, foreign.source)
    return derived(model, foreign.model_type, foreign.name, foreign.source)


class _Foreign(NamedTuple):
    """A configuration of a family without a reader."""

    config: Mapping[str, Any]
    model_type: str
    name: str
    source: str


def _foreign(argument: str) -> _Foreign | None:
    path = config_path(argument)
    if not path.is_file() or path.suffix == ".toml":
        return None
    config = read_config(path)
    if not isinstance(config, Mapping) or not is_foreign(config):
        return None
    name = str(config.get("_name_or_path") or path.resolve().parent.name)
    return _Foreign(config, str(config["model_type"]), name, str(path))


class Counted(NamedTuple):
    """A model's name, its table, the parameters a token meets, and those of multi-token prediction."""

    name: str
    table: ParameterTable
    active: int
    mtp: int


def counted(argument: str) -> Counted:
    """Count the model named by a preset, a ``config.json``, or a folder holding one.

    Where it cannot be planned, every parameter counts as active.

    Raises: ModelError: as ``model_from``, or transformers cannot build the model either.
        MissingExtraError: transformers is needed and absent.
    """
    foreign = _foreign(argument)
    if foreign is None:
        spec = model_from(argument)
    else:
        model = meta_model(foreign.config, foreign.source)
        try:
            spec = derived(model, foreign.model_type, foreign.name, foreign.source)
        except ModelError:
            table = live_table(model)
            return Counted(foreign.name, table, table.parameters, 0)
    return Counted(spec.name, parameter_table(spec), active_parameters(spec), mtp_parameters(spec))


def derived(model: "PreTrainedModel", model_type: str, name: str, source: str = "config.json") -> ModelSpec:
    """The ModelSpec of a causal language model on the meta device.

    Its sizes are read off its tensors, its order off a run, the rest off its configuration; its parameter
    table then equals the model's own, name by name and shape by shape.

    Raises: ModelError: something of it is not understood or not modelled.
    """
    try:
        return _derived(model, model_type, name, source)
    except ModelError as fault:
        raise ModelError(
            f"{source}: model_type={model_type!r} has no reader of its own and cannot be planned: {fault}: "
            "'shardwright params' lists its parameters; to plan, take a model of its size of one of "
            f"{', '.join(READERS)}"
        ) from None


def _derived(model: "PreTrainedModel", model_type: str, name: str, source: str) -> ModelSpec:
    config: Any = model.config
    stem, number = layer_list(model)
    of_config.layer_kinds(config, number)
    table = live_table(model)
    blocks = {index: model.get_submodule(f"{stem}.{index}") for index in range(number)}
    layers = _layers(table, blocks)
    ends = ends_of(model, table, stem)
    inside = [f"{stem}.{layer.index}.{name}" for layer in layers for name in layer.unknown]
    _check_understood(table, [*ends.unknown, *inside])
    heads = of_config.whole(config, ("num_attention_heads",), "the number of heads")
    runs = traced(model, stem)
    placement = _placement(runs, layers, table, blocks, heads)
    values = {
        "name": name,
        "model_type": model_type,
        "source": source,
        "layers": number,
        "heads": heads,
        **_read_off(model, model_type, layers, ends, table, heads, placement),
        "naming": naming_of(layers, ends, stem, placement.shared_norm),
    }
    unrotated = unrotated_layers([runs[index][0] for index in blocks])
    if values["positions"] == "rope" and unrotated:
        values["no_rope_layers"] = unrotated
    spec = ModelSpec.checked(values, source)
    _check_table(parameter_table(spec), table)
    return spec


def _read_off(
    model: "PreTrainedModel",
    model_type: str,
    layers: list[Layer],
    ends: Ends,
    table: ParameterTable,
    heads: int,
    placement: Placement,
) -> dict[str, Any]:
    """Fields that tensors, modules and configuration say, with what was assumed."""
    config: Any = model.config
    stem = table.blocks[0].stem
    blocks = {index: model.get_submodule(f"{stem}.{index}") for index in range(table.layers)}
    attention = attention_fields(config, layers[0], heads, placement.qk_norm_calls)
    modules = [blocks[index].get_submodule(layers[0].attention_path.rstrip(".")) for index in blocks]
    if any(getattr(module, "is_causal", True) is False for module in modules):
        raise ModelError("its attention is not causal, it sees the tokens that are to be predicted")
    network = feed_forward_fields(config, layers, ends.hidden)
    if "moe" in network:
        covered = [i for x, unit in zip(layers, table.blocks, strict=True) if x.experts for i in unit.layers]
        network["moe"] |= of_config.expert_layers(sorted(covered), table.layers)
        network["moe"]["correction_bias"] = any("correction_bias" in name for name in model.state_dict())
    activation, found_in = of_config.activation_of(config, [blocks[x.index] for x in layers])
    window = of_config.window_fields(config, modules)
    values = {
        "vocab": ends.vocab,
        "hidden": ends.hidden,
        "tied_embeddings": ends.tied,
        "head_bias": ends.head_bias,
        "final_norm": bool(ends.final_norm),
        **attention,
        **network,
        **of_config.norm_fields(norms_of(layers, blocks, ends, model)),
        **placement.fields(),
        "activation": activation,
        **window,
        **of_config.position_fields(config, config.to_dict(), model, ends.positions, attention["head_size"]),
        **of_config.plain_numbers(config),
    }
    return values | {"assumed": tuple(_assumed(model_type, values, found_in, table.layers))}


def _assumed(model_type: str, values: Mapping[str, Any], found_in: str, layers: int) -> Iterator[str]:
    """What was taken for what no tensor says."""
    from transformers import __version__

    yield f"model_type={model_type!r} read off transformers {__version__}'s model on the meta device"
    seen = "in full"
    if "sliding_window" in values:
        windowed = layers - len(values["full_attention_layers"])
        seen = f"within {values['sliding_window']:,} tokens in {windowed} of {layers} layers"
    yield f"attention is causal, {seen}"
    yield f"activation={values['activation']} ({found_in})"
    yield f"positions={values['positions']}"


def _check_understood(table: ParameterTable, unknown: Sequence[str]) -> None:
    """Raises: ModelError: there are tensors whose purpose is not known, with what they look like."""
    if not unknown:
        return
    shapes = {tensor.name: tensor.shape for tensor in table.tensors()}
    shown = ", ".join(f"{name} {list(shapes[name])}" for name in unknown[:SHOWN])
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    looks = [what for pattern, what in LOOKS.items() if any(re.search(pattern, name) for name in unknown)]
    hint = f" (they look like {' and '.join(looks)})" if looks else ""
    raise ModelError(f"these tensors are not understood: {shown}{more}{hint}")


def _layers(table: ParameterTable, blocks: Mapping[int, Any]) -> list[Layer]:
    """One layer of each shape."""
    found = []
    for unit in table.blocks:
        prefix = f"{unit.stem}.{unit.layers[0]}."
        tensors = {tensor.name.removeprefix(prefix): tensor for tensor in unit.tensors}
        found.append(layer_of(unit.layers[0], blocks[unit.layers[0]], tensors))
    return found


def _placement(
    runs: Mapping[int, list[Block]],
    layers: list[Layer],
    table: ParameterTable,
    blocks: Mapping[int, Any],
    heads: int,
) -> Placement:
    """That of every layer, which must be one.

    Raises: ModelError: a layer is not run once, in its turn, or they differ.
    """
    if any(len(runs.get(index, ())) != 1 for index in blocks):
        raise ModelError("its layers are not run once each")
    order = [runs[index][0] for index in sorted(runs)]
    if any(later.read != earlier.made for earlier, later in pairwise(order)):
        raise ModelError("a layer does not read what the one before has made")
    sorts = {
        index: replace(layer, index=index)
        for layer, unit in zip(layers, table.blocks, strict=True)
        for index in unit.layers
    }
    found = {placement_of(runs[index][0], sorts[index], blocks[index], heads) for index in blocks}
    if len(found) > 1:
        raise ModelError("its layers differ in where their norms stand")
    return found.pop()


def _check_table(ours: ParameterTable, theirs: ParameterTable) -> None:
    """Raises: ModelError: a tensor of the model is not in our table with its shape, or the reverse."""
    expected = {tensor.name: tensor.shape for tensor in theirs.tensors()}
    found = {tensor.name: tensor.shape for tensor in ours.tensors()}
    wrong = [
        f"{name} has {list(expected[name]) if name in expected else 'no place in the model'}, "
        f"read as {list(found[name]) if name in found else 'nothing'}"
        for name in dict.fromkeys((*expected, *found))
        if expected.get(name) != found.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ModelError(f"these tensors are not understood: {'; '.join(wrong[:SHOWN])}{more}")
    assert ours.parameters == theirs.parameters
