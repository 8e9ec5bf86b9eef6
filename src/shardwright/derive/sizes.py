"""Sizes and options of a model, read off the shapes of its tensors."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwright.derive import fields as of_config
from shardwright.derive.naming import Ends, normal
from shardwright.derive.tensors import Layer, Matrix
from shardwright.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

MLA_SIZES = {
    "kv_rank": "kv_lora_rank",
    "nope_size": "qk_nope_head_dim",
    "rope_size": "qk_rope_head_dim",
    "value_size": "v_head_dim",
}
"""Our fields of latent attention and their names in a configuration."""


def attention_fields(config: Any, layer: Layer, heads: int, qk_norm_calls: int) -> dict[str, Any]:
    """Heads, biases and query/key norms.

    Raises: ModelError: its matrices are not those of grouped-query or latent attention.
    """
    by_kind = {matrix.kind: matrix for matrix in layer.attention}
    latent = "key_down" in by_kind
    sizes = _latent(config, by_kind, heads) if latent else _grouped(by_kind, heads)
    biased = ("query_down", "key_down") if latent else ("qkv", "query", "key", "value")
    inputs = [matrix for kind, matrix in by_kind.items() if kind in biased]
    return {
        **sizes,
        "qkv_bias": _one_bias(inputs, "query, key and value"),
        "out_bias": by_kind["out" if "out" in by_kind else "mla_out"].bias,
        "attention_sinks": layer.sinks,
        **_qk_norm(layer, heads, sizes["head_size"], qk_norm_calls),
    }


def _grouped(by_kind: dict[str, Matrix], heads: int) -> dict[str, Any]:
    kinds = set(by_kind)
    if kinds not in ({"qkv", "out"}, {"query", "key", "value", "out"}):
        raise ModelError(f"its attention has the matrices {', '.join(m.name for m in by_kind.values())}")
    size, rest = divmod(by_kind["out"].inputs, heads)
    fused = "qkv" in kinds
    if not fused and by_kind["query"].outputs != by_kind["out"].inputs:
        raise ModelError(
            f"its queries have {by_kind['query'].outputs} numbers and its values {by_kind['out'].inputs}: "
            "heads of two sizes are not modelled"
        )
    keys = (by_kind["qkv"].outputs - heads * size) / 2 if fused else by_kind["key"].outputs
    if rest or not size or keys % size or keys < size:
        raise ModelError(
            f"heads={heads} do not divide its attention of {by_kind['out'].inputs} values and {keys:g} keys"
        )
    return {"head_size": size, "kv_heads": int(keys // size)}


def _latent(config: Any, by_kind: dict[str, Matrix], heads: int) -> dict[str, Any]:
    sizes = {ours: of_config.whole(config, (theirs,), theirs) for ours, theirs in MLA_SIZES.items()}
    sizes["q_rank"] = by_kind["query_down"].outputs if "query_down" in by_kind else 0
    return {"mla": sizes, "head_size": sizes["nope_size"] + sizes["rope_size"], "kv_heads": heads}


def _one_bias(matrices: Sequence[Matrix], what: str) -> bool:
    found = {matrix.bias for matrix in matrices}
    if len(found) != 1:
        raise ModelError(f"of {what} some have a bias and some have none, that is not modelled")
    return found.pop()


def _qk_norm(layer: Layer, heads: int, size: int, calls: int) -> dict[str, Any]:
    """Norms of queries and keys; ``calls``: how often norms inside attention are called."""
    if not layer.qk_norms:
        latent = sum(matrix.kind in ("query_norm", "key_norm") for matrix in layer.attention)
        if calls == latent:
            return {}
        if calls != 2:
            raise ModelError(f"its attention calls {calls} norms, of queries and keys there are 2")
        return {"qk_norm": True, "qk_norm_kind": "weightless"}
    shape = next(iter(layer.qk_norms.values()))
    kinds = {(heads * size,): "projection", (heads, size): "per_head", (size,): "head"}
    kind = "per_head" if layer.norm_module_per_head else kinds.get(shape)
    if kind is None:
        raise ModelError(f"its norm of queries has a weight of {list(shape)}, heads={heads} of {size}")
    biased = {layer.attention_path + name in layer.norm_biases for name in layer.qk_norms}
    return {"qk_norm": True, "qk_norm_kind": kind, "qk_norm_bias": True in biased}


def feed_forward_fields(config: Any, layers: Sequence[Layer], hidden: int) -> dict[str, Any]:
    """Width, gate and bias of dense feed-forward networks, or of shared experts, and the experts.

    Raises: ModelError: a layer has neither a network nor experts.
    """
    networks = [layer.feed_forward for layer in layers if layer.feed_forward]
    sparse = [layer for layer in layers if layer.experts]
    if len(networks) + len(sparse) != len(layers):
        raise ModelError("a layer of it has no feed-forward network that is understood")
    fields: dict[str, Any] = {"gated_mlp": True, "mlp_bias": False}
    for network in [*networks, *(layer.shared for layer in sparse if layer.shared)]:
        matrices = normal(network)
        gated = any(matrix.kind in ("gate", "gate_up") for matrix in matrices)
        fields |= {"gated_mlp": gated, "mlp_bias": _one_bias(matrices, "up and down")}
    widths = {matrix.inputs for network in networks for matrix in network if matrix.kind == "down"}
    if len(widths) > 1:
        raise ModelError(
            f"its layers have feed-forward networks of widths {', '.join(map(str, sorted(widths)))}"
        )
    if sparse:
        fields["moe"] = _experts(config, sparse[0], hidden)
    stated = getattr(config, "intermediate_size", None)
    if widths:
        return fields | {"ffn": widths.pop()}
    return fields | {"ffn": stated if isinstance(stated, int) and stated > 0 else fields["moe"]["ffn"]}


def _experts(config: Any, layer: Layer, hidden: int) -> dict[str, Any]:
    up, down = layer.experts.get("gate_up_proj"), layer.experts.get("down_proj")
    if up is None or down is None or layer.router is None:
        raise ModelError("its experts are not a gate_up_proj and a down_proj with a router")
    number, width = down[0], down[1] if layer.transposed_experts(hidden) else down[2]
    if sorted(up[1:]) != sorted((hidden, 2 * width)):
        raise ModelError(
            f"its experts have gate_up_proj {list(up)} and down_proj {list(down)}: they are not gated"
        )
    values = {
        "experts": number,
        "top_k": of_config.whole(config, of_config.TOP_K, "the number of experts of a token"),
        "ffn": width,
        "router_bias": layer.router.bias,
        "expert_bias": layer.expert_bias,
        "shared_gate": layer.shared_gate,
        "shared_ffn": sum(matrix.inputs for matrix in layer.shared if matrix.kind == "down"),
    }
    groups = {"groups": "n_group", "top_groups": "topk_group"}
    given = {ours: getattr(config, theirs, None) for ours, theirs in groups.items()}
    return values | {ours: value for ours, value in given.items() if isinstance(value, int) and value > 0}


def norms_of(layers: Sequence[Layer], blocks: Any, ends: Ends, model: "nn.Module") -> list["nn.Module"]:
    """All norms of the residual stream."""
    found = [blocks[layer.index].get_submodule(name) for layer in layers for name in layer.norms]
    return [*found, *([model.get_submodule(ends.final_norm)] if ends.final_norm else [])]
