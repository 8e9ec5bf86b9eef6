"""The decoder in plain PyTorch, its modules named as Hugging Face names them.

B batch, S sequence, E hidden, H heads, G key/value heads, D head size, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shardwright.model import Llama3Rope, ModelSpec
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD
from shardwright.run.kernels import causal_attention, rms_norm, rotate, swiglu, wide


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding; biases and query/key norms as the model has them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        query, key = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
        self.q_proj = nn.Linear(spec.hidden, query, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden, key, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden, key, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(query, spec.hidden, bias=spec.out_bias)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_size, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_size, spec.norm_eps)
        self.qk_norm = spec.qk_norm
        self.head_size = spec.head_size

    def forward(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        heads = (*x_BSE.shape[:2], -1, self.head_size)
        q_BSHD = self.q_proj(x_BSE).view(heads)
        k_BSGD = self.k_proj(x_BSE).view(heads)
        v_BSGD = self.v_proj(x_BSE).view(heads)
        if self.qk_norm:
            q_BSHD, k_BSGD = self.q_norm(q_BSHD), self.k_norm(k_BSGD)
        q_BSHD, k_BSGD = rotate(q_BSHD, cos_SD, sin_SD), rotate(k_BSGD, cos_SD, sin_SD)
        out_BHSD = causal_attention(q_BSHD.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2))
        return self.o_proj(out_BHSD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.ffn, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x_BSE: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_BSE), self.up_proj(x_BSE)))


class Block(nn.Module):
    """One layer. ``recompute`` wraps the body where run/recompute.py has set it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_eps)
        self.recompute: Callable[..., Tensor] | None = None

    def body(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        x_BSE = x_BSE + self.self_attn(self.input_layernorm(x_BSE), cos_SD, sin_SD)
        return x_BSE + self.mlp(self.post_attention_layernorm(x_BSE))

    def forward(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        if self.recompute is None or not torch.is_grad_enabled():
            return self.body(x_BSE, cos_SD, sin_SD)
        return self.recompute(self.body, x_BSE, cos_SD, sin_SD)


class Decoder(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)


class Transformer(nn.Module):
    """A causal language model: token ids (B x S) to logits (B x S x V)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model = Decoder(spec)
        self.lm_head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if spec.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, token_BS: Tensor) -> Tensor:
        x_BSE = self.model.embed_tokens(token_BS)
        cos_SD, sin_SD = rotary_tables(self.spec, token_BS.shape[1], token_BS.device, wide(x_BSE.dtype))
        for layer in self.model.layers:
            x_BSE = layer(x_BSE, cos_SD, sin_SD)
        return self.lm_head(self.model.norm(x_BSE))

    def units(self) -> Iterator[tuple[str, list[nn.Module]]]:
        """FSDP units in forward order, as the units of plan/params.py: kind, and the modules of each."""
        if not self.spec.tied_embeddings:
            yield EMBEDDING, [self.model.embed_tokens]
        for layer in self.model.layers:
            yield BLOCK, [layer]
        ends = [self.model.norm, self.lm_head]
        yield HEAD, [self.model.embed_tokens, *ends] if self.spec.tied_embeddings else ends


def build_model(spec: ModelSpec, dtype: torch.dtype) -> Transformer:
    """The model without storage (meta device); run/init.py fills it."""
    with torch.device("meta"):
        model = Transformer(spec).to(dtype)
    if spec.tied_embeddings:  # .to() keeps ties, this line makes it a rule
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def rotary_tables(
    spec: ModelSpec, seq: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and frequency, S x D/2 each."""
    exponent = torch.arange(0, spec.head_size, 2, device=device, dtype=dtype) / spec.head_size
    frequency = 1.0 / spec.rope_theta**exponent
    if spec.rope_scaling is not None:
        frequency = _llama3_frequency(frequency, spec.rope_scaling)
    angle_SD = torch.outer(torch.arange(seq, device=device, dtype=dtype), frequency)
    return angle_SD.cos(), angle_SD.sin()


def _llama3_frequency(frequency: Tensor, rope: Llama3Rope) -> Tensor:
    """Low frequencies divided by the factor, high ones kept, those between blended.

    Source: transformers modeling_rope_utils.py, ``_compute_llama3_parameters``.
    """
    turns = rope.original_positions * frequency / (2 * math.pi)
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequency * (blend + (1 - blend) / rope.factor)
