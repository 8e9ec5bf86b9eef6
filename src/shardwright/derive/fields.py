"""Fields of a ModelSpec from a configuration's standard names, and from attributes of modules."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwright.derive.tensors import is_norm
from shardwright.errors import ModelError
from shardwright.hf_config import rope_faults, rope_fields
from shardwright.hf_reader import ACTIVATIONS, Reader

if TYPE_CHECKING:
    from torch import nn

MAX_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
TOP_K = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk", "moe_k", "top_k")
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "activation")
ROPE = (
    "rope_parameters",
    "rope_theta",
    "rotary_dim",
    "rotary_pct",
    "rotary_emb_base",
    "partial_rotary_factor",
)
"""Names under which configurations have one thing."""

ACTIVATION_MODULES: Mapping[str, str] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "BloomGelu": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
"""Classes of activations, of torch and transformers, and our names; ``nn.GELU`` says itself which it is."""

OF_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
NOT_OF_A_NETWORK = ("Softmax", "Sigmoid", "Dropout")
"""Activations that routers and attention have."""

OLDER_KINDS = {"global": "full_attention", "local": "sliding_attention"}
"""GPT-Neo's names of kinds of layers, and today's."""

LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


def first(config: Any, names: Sequence[str]) -> Any:
    """The first of some attributes that is there and not None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def whole(config: Any, names: Sequence[str], what: str) -> int:
    """The first of some attributes, a whole number above 0.

    Raises: ModelError: none is there, or it is no such number.
    """
    value = first(config, names)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{what} is not known: {' or '.join(names)} must be a whole number, found {value!r}")
    return value


def activation_of(config: Any, blocks: Sequence["nn.Module"]) -> tuple[str, str]:
    """The activation of the feed-forward networks, and where it was found.

    Raises: ModelError: there is none, more than one, or one that is not modelled.
    """
    found = {}
    for module in (module for block in blocks for module in block.modules()):
        name = type(module).__name__
        if name in NOT_OF_A_NETWORK or not (
            name in ACTIVATION_MODULES or type(module).__module__ in OF_ACTIVATIONS
        ):
            continue
        if name == "GELU":
            found[name] = "gelu" if getattr(module, "approximate", "none") == "none" else "gelu_tanh"
        else:
            found[name] = ACTIVATION_MODULES.get(name, "")
    unknown = sorted(name for name, ours in found.items() if not ours)
    if unknown:
        raise ModelError(f"activation {', '.join(unknown)} is not modelled: {_known_activations()} are")
    if len(set(found.values())) > 1:
        raise ModelError(f"its blocks have several activations: {', '.join(sorted(found))}")
    if found:
        return next(iter(found.values())), next(iter(found))
    key = next((key for key in ACTIVATION_KEYS if getattr(config, key, None) is not None), "hidden_act")
    value = getattr(config, key, None)
    if str(value) not in ACTIVATIONS:
        raise ModelError(f"activation {key}={value!r} is not modelled: {_known_activations()} are")
    return ACTIVATIONS[str(value)], f"config {key}"


def _known_activations() -> str:
    return ", ".join(dict.fromkeys(ACTIVATION_MODULES.values()))


def norm_fields(norms: Sequence["nn.Module"]) -> dict[str, Any]:
    """Kind, weights, bias and epsilon of norms that are all alike.

    Raises: ModelError: they are not, or are neither RMSNorm nor LayerNorm.
    """
    names = sorted({type(norm).__name__ for norm in norms})
    kinds = {_norm_kind(name) for name in names}
    weights = {tuple(sorted(name for name, _ in norm.named_parameters())) for norm in norms}
    if len(kinds) != 1 or len(weights) != 1 or "" in kinds:
        raise ModelError(f"its norms ({', '.join(names)}) are not all RMSNorm or all LayerNorm, alike")
    has = weights.pop()
    eps = first(norms[0], ("variance_epsilon", "eps", "epsilon"))
    fields = {"norm": kinds.pop(), "norm_weight": "weight" in has, "norm_bias": "bias" in has}
    return fields | ({"norm_eps": float(eps)} if isinstance(eps, float) and eps > 0 else {})


def _norm_kind(name: str) -> str:
    plain = name.lower()
    return "rms" if "rmsnorm" in plain else "layer" if "layernorm" in plain and "t5" not in plain else ""


def window_fields(config: Any, attention: Sequence["nn.Module"]) -> dict[str, Any]:
    """The window of attention and the layers without it; ``attention``: the module of each layer.

    Raises: ModelError: there are windows of several sizes.
    """
    kinds = layer_kinds(config, len(attention))
    chunked = "chunked_attention" in kinds
    size = first(config, ("attention_chunk_size",) if chunked else ("sliding_window", "window_size"))
    if kinds:
        windows = [None if kind == "full_attention" else size for kind in kinds]
    elif getattr(config, "use_sliding_window", True) is False:
        windows = [None] * len(attention)
    else:
        windows = [getattr(module, "sliding_window", size) for module in attention]
    sizes = {window for window in windows if isinstance(window, int) and window > 0}
    if len(sizes) > 1:
        raise ModelError(
            f"its layers have windows of {', '.join(map(str, sorted(sizes)))} tokens, not of one size"
        )
    if not sizes:
        return {}
    window = sizes.pop()
    full = tuple(layer for layer, found in enumerate(windows) if found != window)
    fields: dict[str, Any] = {"sliding_window": window, "full_attention_layers": full}
    return fields | ({"window_kind": "chunked"} if chunked else {})


def layer_kinds(config: Any, layers: int) -> list[str]:
    """What the configuration says of each layer's attention; nothing if it says nothing.

    Raises: ModelError: there are layers of a kind that is not modelled.
    """
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    older = [str(kind) for kind in getattr(config, "attention_layers", None) or ()]
    mixed = [str(kind) for kind in getattr(config, "layers_block_type", None) or ()]
    kinds = kinds or [OLDER_KINDS.get(kind, kind) for kind in older]
    unknown = sorted({*kinds, *mixed} - {*LAYER_KINDS, "attention"})
    if unknown:
        raise ModelError(
            f"it has layers of kind {', '.join(unknown)}: only {', '.join(LAYER_KINDS)} are modelled"
        )
    if kinds and len(kinds) < layers:
        raise ModelError(f"its configuration names the kinds of {len(kinds)} layers, the model has {layers}")
    return kinds[:layers]


def position_fields(
    config: Any, values: Mapping[str, Any], model: "nn.Module", learned: int | None, head_size: int
) -> dict[str, Any]:
    """How positions come in; ``learned``: rows of a trained table of them, if there is one.

    Raises: ModelError: by none of rotary embedding, trained table and ALiBi, or in an unknown form of them.
    """
    most = first(config, MAX_POSITIONS)
    limit = {"max_positions": most} if isinstance(most, int) and most > 0 else {}
    if learned is not None:
        known = most if isinstance(most, int) and 0 < most <= learned else learned
        return {"positions": "learned", "max_positions": known, "position_offset": learned - known}
    if _has_alibi(config, model):
        return {"positions": "alibi", **limit}
    rotary = any("rotary" in type(module).__name__.lower() for module in model.modules())
    if not rotary and first(config, ROPE) is None:
        raise ModelError("positions come in neither by a rotary embedding, a trained table, nor ALiBi")
    faults = list(rope_faults(values))
    if faults:
        raise ModelError("; ".join(faults))
    fields = {key: value for key, value in rope_fields(values, Reader()).items() if value is not None}
    turned = getattr(config, "rotary_dim", None)
    if isinstance(turned, int) and 0 < turned <= head_size:
        fields["rotary_share"] = turned / head_size
    local = (values.get("rope_parameters") or {}).get("sliding_attention")
    if isinstance(local, Mapping):
        fields["local_rope_theta"] = local.get("rope_theta", 10000.0)
    return {"positions": "rope", **limit, **fields, **_unrotated(config)}


def _has_alibi(config: Any, model: "nn.Module") -> bool:
    """What the configuration says, or whether a module has a method for it."""
    stated = [getattr(part, "alibi", None) for part in (config, getattr(config, "attn_config", None))]
    if any(isinstance(value, bool) for value in stated):
        return True in stated
    return any("alibi" in name for module in model.modules() for name in vars(type(module)))


def _unrotated(config: Any) -> dict[str, Any]:
    """``no_rope_layers``, one truth for each layer, 1 where it rotates."""
    rotates = getattr(config, "no_rope_layers", None)
    if not isinstance(rotates, list | tuple):
        return {}
    return {"no_rope_layers": tuple(layer for layer, turned in enumerate(rotates) if not turned)}


def expert_layers(covered: Sequence[int], layers: int) -> dict[str, Any]:
    """How to say which layers have experts: the first dense ones, every so many, or a list of dense ones."""
    ways: list[dict[str, Any]] = [{"first_dense_layers": covered[0]}]
    ways += [{"layer_step": step} for step in range(2, layers + 1)]
    for way in ways:
        start, step = way.get("first_dense_layers", 0), way.get("layer_step", 1)
        if list(covered) == [i for i in range(start, layers) if (i + 1) % step == 0]:
            return way
    return {"dense_layers": tuple(layer for layer in range(layers) if layer not in covered)}


def plain_numbers(config: Any) -> dict[str, float]:
    """Fields that are taken as the configuration has them."""
    names = {
        "initializer_range": ("initializer_range",),
        "attention_softcap": ("attn_logit_softcapping",),
        "logit_softcap": ("final_logit_softcapping", "logits_soft_cap"),
    }
    found = {ours: first(config, theirs) for ours, theirs in names.items()}
    return {ours: float(x) for ours, x in found.items() if isinstance(x, int | float) and x > 0}


def norms_outside(model: "nn.Module", stem: str) -> list[str]:
    """Norms that are in no layer."""
    norms = [name for name, module in model.named_modules() if is_norm(module)]
    return [name for name in norms if not name.startswith(f"{stem}.")]
