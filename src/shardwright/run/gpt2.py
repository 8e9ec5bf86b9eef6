"""GPT-2 by its own names of modules. Properties give those that the rest of the runtime knows them by.

B batch, S sequence, E hidden, H heads, D head size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardwright.model import ModelSpec
from shardwright.run.attend import Attend, CausalAttention
from shardwright.run.embedding import Embedding
from shardwright.run.feed_forward import PlainMLP
from shardwright.run.layer_norm import build_norm
from shardwright.run.linear import Join, Linear, same
from shardwright.run.rotary import Places


class GPT2Attention(nn.Module):
    """Attention whose queries, keys and values come from one matrix, side by side: all queries first."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        width = spec.heads * spec.head_size
        self.c_attn = Linear(spec.hidden, 3 * width, bias=spec.qkv_bias, transposed=True)
        self.c_proj = Linear(width, spec.hidden, bias=spec.out_bias, transposed=True)
        self.head_size = spec.head_size
        self.enter: Join = same
        self.attend: Attend = CausalAttention()

    @property
    def o_proj(self) -> Linear:
        """The matrix whose output is added to the stream."""
        return self.c_proj

    def forward(self, x_BSE: Tensor, places: Places) -> Tensor:
        both = self.c_attn(self.enter(x_BSE)).unflatten(-1, (3, -1, self.head_size))
        q_BHSD, k_BHSD, v_BHSD = (x_BSHD.transpose(1, 2) for x_BSHD in both.unbind(2))
        out_BHSD = self.attend(q_BHSD, k_BHSD, v_BHSD, places.document_BS)
        return self.c_proj(out_BHSD.transpose(1, 2).flatten(2))


class GPT2Block(nn.Module):
    """One layer; ``recompute`` as in run/model.py:Block."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.ln_1 = build_norm(spec)
        self.attn = GPT2Attention(spec)
        self.ln_2 = build_norm(spec)
        self.mlp = PlainMLP(spec, transposed=True)
        self.recompute: Callable[..., Tensor] | None = None

    @property
    def self_attn(self) -> GPT2Attention:
        """The attention."""
        return self.attn

    def body(self, x_BSE: Tensor, places: Places) -> Tensor:
        x_BSE = x_BSE + self.attn(self.ln_1(x_BSE), places)
        return x_BSE + self.mlp(self.ln_2(x_BSE))

    def forward(self, x_BSE: Tensor, places: Places) -> Tensor:
        if self.recompute is None or not torch.is_grad_enabled():
            return self.body(x_BSE, places)
        return self.recompute(self.body, x_BSE, places)


class GPT2Decoder(nn.Module):
    """Embeddings of tokens and of positions, blocks by the number of their layer, and final norm.

    As run/model.py:Decoder; the arguments are those of a ``Part`` of the model.
    """

    def __init__(self, spec: ModelSpec, layers: Sequence[int], first: bool, last: bool) -> None:
        super().__init__()
        self.wte = Embedding(spec.vocab, spec.hidden) if first else None
        self.wpe = Embedding(spec.max_positions, spec.hidden) if first else None
        self.h = nn.ModuleDict({str(layer): GPT2Block(spec) for layer in layers})
        self.ln_f = build_norm(spec) if last else None

    @property
    def embed_tokens(self) -> Embedding | None:
        """The embedding of tokens."""
        return self.wte

    @property
    def layers(self) -> nn.ModuleDict:
        """The blocks."""
        return self.h

    @property
    def norm(self) -> nn.Module | None:
        """The final norm."""
        return self.ln_f

    @property
    def embeddings(self) -> list[nn.Module]:
        """What is before the blocks, that of the tokens first."""
        return [] if self.wte is None or self.wpe is None else [self.wte, self.wpe]

    def embed(self, token_BS: Tensor, position_S: Tensor) -> Tensor:
        """The stream before the first block; ``position_S``: of the tokens of this rank's part of it."""
        return self.wte(token_BS) + self.wpe(position_S)
