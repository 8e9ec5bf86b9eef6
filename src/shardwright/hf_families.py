"""How to read each family's Hugging Face configuration: keys, defaults, and the fields that follow.

Source: transformers configuration_*.py and modeling_*.py, 5.24.
"""

import math
from collections.abc import Mapping
from typing import Any

from shardwright.hf_reader import Config, Fields, Reader, biases, every_bias, flag, given, window, with_types


def _llama(config: Config) -> Fields:
    return {**biases(config), "mlp_bias": flag(config, "mlp_bias")}


def _gemma2(config: Config) -> Fields:
    return {
        **biases(config),
        **window(config, 4096, 2),
        "attention_softcap": config.get("attn_logit_softcapping", 50.0),
        "logit_softcap": config.get("final_logit_softcapping", 30.0),
    }


def _gemma3(config: Config) -> Fields:
    local = given(config, "rope_parameters", {}).get("sliding_attention") or {}
    pattern = given(config, "sliding_window_pattern", given(config, "_sliding_window_pattern", 6))
    return {
        **biases(config),
        **window(config, 4096, pattern),
        "qk_norm": True,
        "attention_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
        "local_rope_theta": given(local, "rope_theta", given(config, "rope_local_base_freq", 10000.0)),
    }


GPT2_ODD = {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}
"""Settings that make other scores."""


def _gpt2(config: Config) -> Fields:
    width = given(config, "n_inner", 4 * config["n_embd"])
    odd = [f"{key}={value}" for key, value in GPT2_ODD.items() if flag(config, key, not value) == value]
    return {"ffn": width, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "unbuilt": tuple(odd)}


def _gpt_neox(config: Config) -> Fields:
    parallel = flag(config, "use_parallel_residual", True)
    return {**biases(config, default=True), "mlp_bias": True, "parallel_block": parallel}


def _cohere(config: Config) -> Fields:
    return {**biases(config), "qk_norm": flag(config, "use_qk_norm")}


def _cohere2(config: Config) -> Fields:
    """Layers without a window have no rotary embedding either."""
    windowed = window(config, 4096, given(config, "sliding_window_pattern", 4))
    full = windowed.get("full_attention_layers", ())
    return {**biases(config), **windowed, "no_rope_layers": full}


def _stablelm(config: Config) -> Fields:
    parallel = flag(config, "use_parallel_residual")
    return {
        "qkv_bias": flag(config, "use_qkv_bias"),
        "qk_norm": flag(config, "qk_layernorm"),
        "parallel_block": parallel,
        "shared_norm": parallel,
    }


def _falcon(config: Config) -> Fields:
    """Key-value heads count in the newer architecture alone; the older has one, or as many as heads."""
    newer, heads = flag(config, "new_decoder_architecture"), config["num_attention_heads"]
    norms = given(config, "num_ln_in_parallel_attn", 2 if newer else 1)
    parallel = newer or flag(config, "parallel_attn", True)
    kv_heads = given(config, "num_kv_heads", heads)
    if not newer:
        kv_heads = 1 if flag(config, "multi_query", True) else heads
    return {
        **every_bias(config, "bias", False),
        "kv_heads": kv_heads,
        "ffn": given(config, "ffn_hidden_size", 4 * config["hidden_size"]),
        "parallel_block": parallel,
        "shared_norm": parallel and norms != 2,
        "positions": "alibi" if flag(config, "alibi") else "rope",
    }


def _opt(config: Config) -> Fields:
    before = flag(config, "do_layer_norm_before", True)
    affine = flag(config, "layer_norm_elementwise_affine", True)
    width = given(config, "word_embed_proj_dim", config["hidden_size"])
    return {
        **every_bias(config, "enable_bias", True),
        "embedding_projection": 0 if width == config["hidden_size"] else width,
        "norm_weight": affine,
        "norm_bias": affine,
        "norm_placement": "pre" if before else "residual",
        "final_norm": before and not flag(config, "_remove_final_layer_norm"),
    }


def _moe(config: Config, experts: str, ffn: str, defaults: tuple[int, int | None, int | None]) -> Fields:
    """The fields that every mixture has, from their keys; ``defaults``: experts, experts a token, width."""
    values = {
        "experts": given(config, experts, given(config, "num_experts", defaults[0])),
        "top_k": given(config, "num_experts_per_tok", defaults[1]),
        "ffn": given(config, ffn, defaults[2]),
    }
    return {name: value for name, value in values.items() if value is not None}


def _mixtral(config: Config) -> Fields:
    moe = _moe(config, "num_local_experts", "intermediate_size", (8, 2, None))
    return {"moe": moe, "sliding_window": config.get("sliding_window")}


def _qwen_window(config: Config) -> Fields:
    """Qwen slides, if told to, in layers from ``max_window_layers`` on."""
    if not flag(config, "use_sliding_window"):
        return {}
    start = given(config, "max_window_layers", 28)
    return window(with_types(config, lambda layer: layer >= start), 4096, 1)


def _qwen2_moe_window(config: Config) -> Fields:
    """Qwen2-MoE slides, if told to, in every other layer before ``max_window_layers``."""
    if not flag(config, "use_sliding_window"):
        return {}
    end = given(config, "max_window_layers", 28)
    return window(with_types(config, lambda layer: layer % 2 == 0 and layer < end), 4096, 1)


def _qwen_moe(config: Config, experts: int, top_k: int, ffn: int) -> Fields:
    moe = _moe(config, "num_local_experts", "moe_intermediate_size", (experts, top_k, ffn))
    dense = tuple(given(config, "mlp_only_layers", ()))
    return {
        **moe,
        "layer_step": given(config, "decoder_sparse_step", 1),
        "dense_layers": dense,
        "normalise": flag(config, "norm_topk_prob"),
    }


def _qwen2_moe(config: Config) -> Fields:
    shared = given(config, "shared_expert_intermediate_size", 5632)
    moe = {**_qwen_moe(config, 60, 4, 1408), "shared_ffn": shared, "shared_gate": True}
    return {**_qwen2_moe_window(config), "qkv_bias": flag(config, "qkv_bias", True), "moe": moe}


def _qwen3_moe(config: Config) -> Fields:
    slides = flag(config, "use_sliding_window")
    return {
        **biases(config),
        "qk_norm": True,
        "sliding_window": config.get("sliding_window", 4096) if slides else None,
        "moe": _qwen_moe(config, 128, 8, 768),
    }


def _deepseek(
    config: Config, moe: Fields, shared: int, dense: int, groups: tuple[int, int] = (1, 1)
) -> Fields:
    """Shared experts, first dense layers and groups, as DeepSeek and GLM have them."""
    return {
        **moe,
        "shared_ffn": moe["ffn"] * given(config, "n_shared_experts", shared),
        "first_dense_layers": given(config, "first_k_dense_replace", dense),
        "groups": given(config, "n_group", groups[0]),
        "top_groups": given(config, "topk_group", groups[1]),
    }


def _mla(config: Config) -> Fields:
    nope, rope = given(config, "qk_nope_head_dim", 128), given(config, "qk_rope_head_dim", 64)
    values = {
        "q_rank": config.get("q_lora_rank", 1536) or 0,
        "kv_rank": given(config, "kv_lora_rank", 512),
        "nope_size": nope,
        "rope_size": rope,
        "value_size": given(config, "v_head_dim", 128),
        "interleaved": flag(config, "rope_interleave", True),
    }
    return {"mla": values, "head_size": nope + rope, "kv_heads": config["num_attention_heads"]}


def _corrected(config: Config, scale: float) -> Fields:
    """Routing by sigmoids and a correction bias, as DeepSeek-V3 and GLM have it."""
    return {
        "correction_bias": True,
        "score": "sigmoid",
        "normalise": flag(config, "norm_topk_prob", True),
        "scale": given(config, "routed_scaling_factor", scale),
    }


def _deepseek_v2(config: Config) -> Fields:
    """Groups count in one of its ways to choose; the weights are never normalised."""
    moe = _deepseek(config, _moe(config, "n_routed_experts", "moe_intermediate_size", (64, None, 1407)), 2, 0)
    if given(config, "topk_method", "greedy") == "greedy":
        moe |= {"groups": 1, "top_groups": 1}
    moe |= {"normalise": False, "scale": given(config, "routed_scaling_factor", 1.0)}
    return {**_llama(config), **_mla(config), "moe": moe}


def _deepseek_v3(config: Config) -> Fields:
    moe = _moe(config, "n_routed_experts", "moe_intermediate_size", (256, 8, 2048))
    return {
        **biases(config),
        **_mla(config),
        "mtp_layers": _mtp_layers(config),
        "moe": {**_deepseek(config, moe, 1, 3, (8, 4)), **_corrected(config, 2.5)},
    }


def _mtp_layers(config: Config) -> Any:
    return given(config, "num_nextn_predict_layers", given(config, "num_mtp_layers", 1))


def _glm4_moe(config: Config) -> Fields:
    moe = _moe(config, "n_routed_experts", "moe_intermediate_size", (128, 8, 1408))
    return {
        "qkv_bias": flag(config, "attention_bias"),
        "qk_norm": flag(config, "use_qk_norm"),
        "mtp_layers": _mtp_layers(config),
        "moe": {**_deepseek(config, moe, 1, 1), **_corrected(config, 1.0)},
    }


GPT_OSS_YARN: Fields = {
    "factor": 32.0,
    "original_positions": 4096,
    "truncate": False,
    "attention_factor": 0.1 * math.log(32.0) + 1.0,
}


def _gpt_oss(config: Config) -> Fields:
    top_k = given(config, "experts_per_token", 4)
    moe = _moe(config, "num_local_experts", "intermediate_size", (128, top_k, None))
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return {
        **({} if rope else {"yarn": GPT_OSS_YARN}),
        **biases(config, default=True),
        **window(config, 128, 2),
        "moe": {**moe, "router_bias": True, "expert_bias": True},
    }


def _llama4(config: Config) -> Fields:
    """Dense layers have a width of their own; where there is no rotary embedding there is no chunk either."""
    layers = config["num_hidden_layers"]
    interval = given(config, "no_rope_layer_interval", 4)
    rotates = given(config, "no_rope_layers", None) or [(layer + 1) % interval for layer in range(layers)]
    no_rope = tuple(layer for layer in range(layers) if not rotates[layer])
    moe = _moe(config, "num_local_experts", "intermediate_size", (16, 1, None))
    step = given(config, "interleave_moe_layer_step", 1)
    placed: Fields = {"layer_step": step}
    listed = given(config, "moe_layers", [*range(step - 1, layers, step)])
    if listed != [*range(step - 1, layers, step)]:
        placed = {"dense_layers": tuple(layer for layer in range(layers) if layer not in listed)}
    chunk = {"sliding_window": config.get("attention_chunk_size", 8192)}
    return {
        **biases(config),
        **window(with_types({**config, **chunk}, lambda layer: layer not in no_rope), None, 1),
        "window_kind": "chunked",
        "no_rope_layers": no_rope,
        "qk_norm": flag(config, "use_qk_norm", True),
        "moe": {
            **moe,
            "shared_ffn": config["intermediate_size"],
            "score": "sigmoid",
            "normalise": False,
            **placed,
        },
    }


_TANH = {"activation": "gelu_pytorch_tanh"}
_GEMMA = {**_TANH, "head_size": 256, "tied_embeddings": True}
_LAYER_NORM = {"norm_eps": "layer_norm_eps"}
_COHERE = {"norm_eps": 1e-5, "max_positions": 8192, "tied_embeddings": True}
_OWN_HEADS = ("head_size", "kv_heads")

READERS: Mapping[str, Reader] = {
    "llama": Reader(more=_llama),
    "mistral": Reader(
        defaults={"kv_heads": 8, "max_positions": 131072},
        more=lambda config: {"sliding_window": config.get("sliding_window", 4096)},
    ),
    "qwen2": Reader(
        defaults={"kv_heads": 32, "max_positions": 32768},
        more=lambda config: {**_qwen_window(config), "qkv_bias": True},
    ),
    "qwen3": Reader(
        defaults={"kv_heads": 32, "max_positions": 32768, "head_size": 128},
        more=lambda config: {**biases(config), **_qwen_window(config), "qk_norm": True},
    ),
    "gemma": Reader(defaults={**_GEMMA, "kv_heads": 16, "max_positions": 8192}, more=biases),
    "gemma2": Reader(
        {"activation": "hidden_activation"}, {**_GEMMA, "kv_heads": 4, "max_positions": 8192}, _gemma2
    ),
    "gemma3_text": Reader(
        {"activation": "hidden_activation"},
        {**_GEMMA, "vocab": 262208, "heads": 8, "kv_heads": 4, "max_positions": 131072, "rope_theta": 1e6},
        _gemma3,
    ),
    "phi3": Reader(
        defaults={"norm_eps": 1e-5, "max_positions": 4096},
        more=lambda config: {"sliding_window": config.get("sliding_window")},
    ),
    "gpt2": Reader(
        {
            "hidden": "n_embd",
            "ffn": "n_inner",
            "layers": "n_layer",
            "heads": "n_head",
            "max_positions": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
        },
        {"norm_eps": 1e-5, "max_positions": 1024, "tied_embeddings": True, "activation": "gelu_new"},
        _gpt2,
        own=("ffn", "kv_heads"),
        derived_head=True,
    ),
    "gpt_neox": Reader(
        _LAYER_NORM,
        {"norm_eps": 1e-5, "activation": "gelu", "rotary_share": 0.25},
        _gpt_neox,
        own=("kv_heads",),
        derived_head=True,
    ),
    "olmo2": Reader(defaults={"norm_eps": 1e-5}, more=lambda config: {**biases(config), "qk_norm": True}),
    "granite": Reader(more=_llama),
    "cohere": Reader(_LAYER_NORM, {**_COHERE, "rope_theta": 500000.0}, _cohere),
    "cohere2": Reader(_LAYER_NORM, _COHERE, _cohere2, derived_head=True),
    "starcoder2": Reader(
        {"norm_eps": "norm_epsilon"},
        {
            **_TANH,
            "kv_heads": 2,
            "norm_eps": 1e-5,
            "max_positions": 4096,
            "initializer_range": 0.018042,
            "tied_embeddings": True,
        },
        lambda config: {
            **every_bias(config, "use_bias", True),
            "sliding_window": config.get("sliding_window"),
        },
    ),
    "stablelm": Reader(
        _LAYER_NORM,
        {"kv_heads": 32, "norm_eps": 1e-5, "max_positions": 4096, "rotary_share": 0.25},
        _stablelm,
        derived_head=True,
    ),
    "falcon": Reader(
        {"norm_eps": "layer_norm_epsilon", "activation": "activation", "ffn": "ffn_hidden_size"},
        {"norm_eps": 1e-5, "tied_embeddings": True, "activation": "gelu"},
        _falcon,
        own=("ffn", "kv_heads"),
        derived_head=True,
    ),
    "opt": Reader(
        {"ffn": "ffn_dim", "activation": "activation_function", "initializer_range": "init_std"},
        {"norm_eps": 1e-5, "tied_embeddings": True, "activation": "relu"},
        _opt,
        own=("kv_heads",),
        derived_head=True,
    ),
    "mixtral": Reader(
        defaults={"kv_heads": 8, "norm_eps": 1e-5, "max_positions": 131072, "rope_theta": 1e6},
        more=_mixtral,
    ),
    "qwen2_moe": Reader(defaults={"kv_heads": 16, "max_positions": 32768}, more=_qwen2_moe),
    "qwen3_moe": Reader(defaults={"kv_heads": 4, "max_positions": 32768}, more=_qwen3_moe),
    "deepseek_v2": Reader(more=_deepseek_v2, own=_OWN_HEADS, needs=("num_experts_per_tok",)),
    "deepseek_v3": Reader(defaults={"max_positions": 4096}, more=_deepseek_v3, own=_OWN_HEADS),
    "gpt_oss": Reader(
        defaults={
            "kv_heads": 8,
            "head_size": 64,
            "norm_eps": 1e-5,
            "max_positions": 131072,
            "rope_theta": 150000.0,
        },
        more=_gpt_oss,
    ),
    "glm4_moe": Reader(
        defaults={"kv_heads": 8, "norm_eps": 1e-5, "max_positions": 131072, "rotary_share": 0.5},
        more=_glm4_moe,
        floors_head=True,
    ),
    "llama4_text": Reader(
        {"ffn": "intermediate_size_mlp"},
        {
            "ffn": 16384,
            "kv_heads": 8,
            "head_size": 128,
            "norm_eps": 1e-5,
            "max_positions": 131072,
            "rope_theta": 500000.0,
        },
        _llama4,
        needs=("intermediate_size",),
    ),
}
