"""A block's attention: grouped-query, or latent.

B batch, S sequence, E hidden, H heads, G key/value heads, D head size, V value head size, P plain numbers of
a head, R rotated ones, L a latent vector.
"""

import torch
from torch import Tensor, nn

from shardwright.model import ModelSpec
from shardwright.run.attend import Attend, CausalAttention
from shardwright.run.layer_norm import RMSNorm
from shardwright.run.linear import Join, Linear, same
from shardwright.run.rotary import Places

LATENT_EPS = 1e-6
"""Of the norms of latent vectors, whatever the model's is. Source: transformers modeling_deepseek_v3.py."""


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding; biases and query/key norms as the model has them.

    ``enter`` and ``o_proj.join`` are the two places where ranks of tp meet; ``attend`` is replaced where the
    sequence is split over cp.
    """

    def __init__(self, spec: ModelSpec, layer: int = 0) -> None:
        super().__init__()
        query, key = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
        self.q_proj = Linear(spec.hidden, query, bias=spec.qkv_bias)
        self.k_proj = Linear(spec.hidden, key, bias=spec.qkv_bias)
        self.v_proj = Linear(spec.hidden, key, bias=spec.qkv_bias)
        self.o_proj = Linear(query, spec.hidden, bias=spec.out_bias)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_size, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_size, spec.norm_eps)
        self.qk_norm = spec.qk_norm
        self.head_size = spec.head_size
        self.enter: Join = same
        self.attend: Attend = CausalAttention()
        self.window = window_of(spec, layer)

    def forward(self, x_BSE: Tensor, places: Places) -> Tensor:
        x_BSE = self.enter(x_BSE)
        heads = (*x_BSE.shape[:2], -1, self.head_size)
        q_BSHD = self.q_proj(x_BSE).view(heads)
        k_BSGD = self.k_proj(x_BSE).view(heads)
        v_BSGD = self.v_proj(x_BSE).view(heads)
        if self.qk_norm:
            q_BSHD, k_BSGD = self.q_norm(q_BSHD), self.k_norm(k_BSGD)
        out_BHSD = self.attend(
            places.rotate(q_BSHD).transpose(1, 2),
            places.rotate(k_BSGD).transpose(1, 2),
            v_BSGD.transpose(1, 2),
            places.document_BS,
            window=self.window,
        )
        return self.o_proj(out_BHSD.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries, and keys with values, go through narrow vectors.

    Only what is made of those is split by heads over tp: the narrow vectors are the same on every rank, of
    tokens gathered by ``enter``, and their matrices' gradients are found in shares. Values stay a view of the
    product that makes plain keys too.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    def __init__(self, spec: ModelSpec, layer: int = 0) -> None:
        super().__init__()
        assert spec.mla is not None, "a model with latent attention"
        self.mla, mla = spec.mla, spec.mla
        query, values = spec.heads * spec.head_size, spec.heads * mla.value_size
        if mla.q_rank:
            self.q_a_proj = Linear(spec.hidden, mla.q_rank, bias=spec.qkv_bias)
            self.q_a_layernorm = RMSNorm(mla.q_rank, LATENT_EPS)
            self.q_b_proj = Linear(mla.q_rank, query, bias=False)
        else:
            self.q_proj = Linear(spec.hidden, query, bias=False)
        self.kv_a_proj_with_mqa = Linear(spec.hidden, mla.kv_rank + mla.rope_size, bias=spec.qkv_bias)
        self.kv_a_layernorm = RMSNorm(mla.kv_rank, LATENT_EPS)
        self.kv_b_proj = Linear(mla.kv_rank, spec.heads * mla.nope_size + values, bias=False)
        self.o_proj = Linear(values, spec.hidden, bias=spec.out_bias)
        self.head_size = spec.head_size
        self.scale = spec.head_size**-0.5 * (1.0 if spec.yarn is None else spec.yarn.score_factor)
        self.enter: Join = same
        self.attend: Attend = CausalAttention()
        self.window = window_of(spec, layer)

    def forward(self, x_BSE: Tensor, places: Places) -> Tensor:
        x_BSE = self.enter(x_BSE)
        mla, plain = self.mla, self.mla.nope_size
        q_BSHD = self._queries(x_BSE).unflatten(-1, (-1, self.head_size))
        latent_BSL, k_BSR = self.kv_a_proj_with_mqa(x_BSE).split((mla.kv_rank, mla.rope_size), -1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent_BSL)).unflatten(-1, (-1, plain + mla.value_size))
        k_BSHP, v_BSHV = both.split((plain, mla.value_size), -1)
        k_BS1R = places.rotate(k_BSR[:, :, None], interleaved=mla.interleaved)
        k_BSHD = torch.cat([k_BSHP, k_BS1R.expand(-1, -1, k_BSHP.shape[2], -1)], -1)
        out_BHSV = self.attend(
            places.rotate(q_BSHD, plain, interleaved=mla.interleaved).transpose(1, 2),
            k_BSHD.transpose(1, 2),
            v_BSHV.transpose(1, 2),
            places.document_BS,
            scale=self.scale,
            window=self.window,
        )
        return self.o_proj(out_BHSV.transpose(1, 2).flatten(2))

    def _queries(self, x_BSE: Tensor) -> Tensor:
        if self.mla.q_rank == 0:
            return self.q_proj(x_BSE)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSE)))


def window_of(spec: ModelSpec, layer: int) -> int | None:
    """Keys that a query of a layer sees; None: all."""
    return None if layer in spec.full_attention_layers else spec.sliding_window
