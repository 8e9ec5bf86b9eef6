"""Every family that is built: logits and gradients equal those of transformers' model of the same config.

Configurations are transformers' own, made small; weights go over by name.
"""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.hf_config import model_from_config
from shardwright.model import BUILT_TYPES
from shardwright.plan.params import parameter_table
from shardwright.run.init import table_name
from shardwright.run.model import Transformer

TOLERANCE = 1e-4
"""Of the largest entry, in fp32."""

SEQ = 40

USUAL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0} | {
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
UNTRUNCATED = {"truncate": False, "attention_factor": 0.8, "beta_fast": 1.5, "beta_slow": 0.3}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.7}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12} | {
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8} | {
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
GROUPS = {"n_group": 4, "topk_group": 2}
SLIDES = {"use_sliding_window": True, "sliding_window": 9}

CONFIGS = {
    "llama": ("llama", {**USUAL, "head_dim": 12}),
    "llama with biases": ("llama", {**USUAL, "attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {**USUAL, "tie_word_embeddings": True}),
    "llama llama3": ("llama", {**USUAL, "rope_parameters": LLAMA3}),
    "llama linear": ("llama", {**USUAL, "rope_parameters": LINEAR}),
    "llama yarn": ("llama", {**USUAL, "head_dim": 16, "rope_parameters": YARN}),
    "llama yarn untruncated": (
        "llama",
        {**USUAL, "head_dim": 16, "rope_parameters": YARN | UNTRUNCATED},
    ),
    "mistral": ("mistral", {**USUAL, "sliding_window": None}),
    "mistral windowed": ("mistral", {**USUAL, "sliding_window": 9}),
    "qwen2": ("qwen2", {**USUAL, **SLIDES, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**USUAL, "head_dim": 12}),
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied": ("gpt2", {**GPT2, "tie_word_embeddings": False, "n_inner": 40}),
    "gpt2 gelu": ("gpt2", {**GPT2, "activation_function": "gelu"}),
    "gpt2 relu": ("gpt2", {**GPT2, "activation_function": "relu"}),
    "starcoder2": ("starcoder2", {**USUAL, "sliding_window": 9}),
    "starcoder2 without biases": ("starcoder2", {**USUAL, "use_bias": False, "tie_word_embeddings": False}),
    "mixtral": ("mixtral", {**USUAL, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", {**USUAL, **QWEN_EXPERTS, "shared_expert_intermediate_size": 20}),
    "qwen3_moe": ("qwen3_moe", {**USUAL, **QWEN_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "deepseek_v2": ("deepseek_v2", {**USUAL, **EXPERTS, **LATENT, **GROUPS, "rope_parameters": YARN}),
    "deepseek_v2 by groups": (
        "deepseek_v2",
        {**USUAL, **EXPERTS, **LATENT, **GROUPS, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    ),
    "deepseek_v3": ("deepseek_v3", {**USUAL, **EXPERTS, **LATENT, **GROUPS}),
    "deepseek_v3 yarn": (
        "deepseek_v3",
        {**USUAL, **EXPERTS, **LATENT, **GROUPS, "rope_parameters": YARN | MSCALE, "attention_bias": True},
    ),
    "deepseek_v3 by halves": (
        "deepseek_v3",
        {**USUAL, **EXPERTS, **LATENT, **GROUPS, "rope_interleave": False, "q_lora_rank": None},
    ),
    "glm4_moe": ("glm4_moe", {**USUAL, **EXPERTS, "head_dim": 12, "use_qk_norm": True}),
}


def pair(family, values):
    """Transformers' model with random weights, and ours with the same."""
    config = AutoConfig.for_model(family, **values)
    config._attn_implementation = "eager"
    theirs = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
        if "norm" in name or "ln_" in name:
            tensor.data.normal_(1.0, 0.2, generator=generator)
        elif "inv_freq" not in name:
            tensor.data.normal_(0.0, 0.2, generator=generator)
    # as a file has it
    read = json.loads(json.dumps(config.to_dict()))
    ours = Transformer(model_from_config(read, name=family))
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if "inv_freq" not in name}
    ours.load_state_dict(weights)
    return ours, theirs


def test_every_built_family_has_a_case():
    assert {family for family, _ in CONFIGS.values()} == set(BUILT_TYPES)


@pytest.mark.parametrize("name", CONFIGS)
def test_names_logits_and_gradients(name):
    ours, theirs = pair(*CONFIGS[name])
    found = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
    assert list(found) == [name for name, _ in theirs.named_parameters()]
    table = {tensor.name: tensor.shape for tensor in parameter_table(ours.spec).tensors()}
    assert {table_name(name, ours.spec): shape for name, shape in found.items()} == table
    token_BS = torch.randint(0, 96, (2, SEQ), generator=torch.Generator().manual_seed(1))
    logits = ours(token_BS), theirs(token_BS, use_cache=False).logits
    assert apart(*logits) < TOLERANCE
    weight_BSV = torch.randn(logits[0].shape, generator=torch.Generator().manual_seed(2))
    for side in logits:
        (side * weight_BSV).sum().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert apart(parameter.grad, expected[name].grad) < TOLERANCE, name


def apart(found, expected):
    """Largest difference over the largest expected entry."""
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())
