"""The decoder in plain PyTorch, its modules named as Hugging Face names them.

B batch, S sequence, E hidden, H heads, G key/value heads, D head size, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.model import Llama3Rope, ModelSpec
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD
from shardwright.run.attend import Attend, CausalAttention
from shardwright.run.experts import MoE
from shardwright.run.kernels import rms_norm, rotate, swiglu, wide
from shardwright.run.linear import Join, Linear, local, same
from shardwright.run.loss import cross_entropy


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, local(self.weight), self.eps)


class Microbatch(NamedTuple):
    """A ``Sample`` of run/dataset.py on the device, each B x S."""

    tokens: Tensor
    targets: Tensor  # masked ones are MASKED
    documents: Tensor | None = None  # None: attention crosses documents


class Places(NamedTuple):
    """Where this rank's tokens stand: tables of the rotary embedding, S x D/2 each, and the document of each
    token, B x S, None where a sequence is one document."""

    cos_SD: Tensor
    sin_SD: Tensor
    document_BS: Tensor | None


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
        self.window = None if layer in spec.full_attention_layers else spec.sliding_window

    def forward(self, x_BSE: Tensor, places: Places) -> Tensor:
        x_BSE = self.enter(x_BSE)
        heads = (*x_BSE.shape[:2], -1, self.head_size)
        q_BSHD = self.q_proj(x_BSE).view(heads)
        k_BSGD = self.k_proj(x_BSE).view(heads)
        v_BSGD = self.v_proj(x_BSE).view(heads)
        if self.qk_norm:
            q_BSHD, k_BSGD = self.q_norm(q_BSHD), self.k_norm(k_BSGD)
        q_BSHD = rotate(q_BSHD, places.cos_SD, places.sin_SD)
        k_BSGD = rotate(k_BSGD, places.cos_SD, places.sin_SD)
        out_BHSD = self.attend(
            q_BSHD.transpose(1, 2),
            k_BSGD.transpose(1, 2),
            v_BSGD.transpose(1, 2),
            places.document_BS,
            window=self.window,
        )
        return self.o_proj(out_BHSD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias)
        self.up_proj = Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias)
        self.down_proj = Linear(spec.ffn, spec.hidden, bias=spec.mlp_bias)
        self.enter: Join = same

    def forward(self, x_BSE: Tensor) -> Tensor:
        x_BSE = self.enter(x_BSE)
        return self.down_proj(swiglu(self.gate_proj(x_BSE), self.up_proj(x_BSE)))


class Block(nn.Module):
    """One layer. ``recompute`` wraps the body where run/recompute.py has set it."""

    def __init__(self, spec: ModelSpec, layer: int = 0) -> None:
        super().__init__()
        self.self_attn = Attention(spec, layer)
        self.mlp = MoE(spec) if spec.moe is not None and spec.moe.covers(layer) else MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_eps)
        self.recompute: Callable[..., Tensor] | None = None

    def body(self, x_BSE: Tensor, places: Places) -> Tensor:
        x_BSE = x_BSE + self.self_attn(self.input_layernorm(x_BSE), places)
        return x_BSE + self.mlp(self.post_attention_layernorm(x_BSE))

    def forward(self, x_BSE: Tensor, places: Places) -> Tensor:
        if self.recompute is None or not torch.is_grad_enabled():
            return self.body(x_BSE, places)
        return self.recompute(self.body, x_BSE, places)


class Embedding(nn.Module):
    """Rows of a table by token id. With tp a rank has the rows from ``first_row`` on, and ``join`` adds up
    what each rank found."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.first_row: int | None = None
        self.join: Join = same

    def forward(self, token_BS: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.first_row is None:
            return nn.functional.embedding(token_BS, weight)
        row_BS = token_BS - self.first_row
        elsewhere_BS = (row_BS < 0) | (row_BS >= weight.shape[0])
        row_BS = row_BS.masked_fill_(elsewhere_BS, 0)
        found_BSE = nn.functional.embedding(row_BS, weight)
        return self.join(found_BSE.masked_fill(elsewhere_BS[..., None], 0.0))


class Head(nn.Module):
    """From the last norm to the loss of a microbatch, or to logits where no targets are given.

    ``chunked`` takes the loss without ever making all logits, where the layout asks for parts.
    """

    def __init__(self, inputs: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, inputs))
        self.enter: Join = same
        self.cross_entropy: Callable[[Tensor, Tensor, float], Tensor] = cross_entropy
        self.chunked: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None

    def forward(self, x_BSE: Tensor, target_BS: Tensor | None, global_tokens: float) -> Tensor:
        x_BSE, weight_VE = self.enter(x_BSE), local(self.weight)
        if self.chunked is not None and target_BS is not None:
            return self.chunked(x_BSE, weight_VE, target_BS, global_tokens)
        logits_BSV = nn.functional.linear(x_BSE, weight_VE)
        if target_BS is None:
            return logits_BSV
        return self.cross_entropy(logits_BSV, target_BS, global_tokens)


class Shares(NamedTuple):
    """Parameters that several ranks hold whole and find a share of the gradient of, and the ranks."""

    names: tuple[str, ...]
    group: dist.ProcessGroup


class Part(NamedTuple):
    """What of the model a pipeline stage has: layers, and the ends."""

    layers: range
    first: bool
    last: bool


class Decoder(nn.Module):
    """Embedding, blocks by the number of their layer, and final norm."""

    def __init__(self, spec: ModelSpec, part: Part) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab, spec.hidden) if part.first else None
        self.layers = nn.ModuleDict({str(layer): Block(spec, layer) for layer in part.layers})
        self.norm = RMSNorm(spec.hidden, spec.norm_eps) if part.last else None


class Transformer(nn.Module):
    """A causal language model or a stage of it: token ids (B x S) or the stage before's output, to logits
    (B x S x V), the loss (of shape 1), or this stage's output (B x S x E).

    ``positions``: of this rank's tokens in their sequence; 0, 1, ... where it is None. ``shares``: gradients
    that run/tp.py adds up.
    """

    def __init__(self, spec: ModelSpec, part: Part | None = None) -> None:
        super().__init__()
        self.spec, self.part = spec, part or Part(range(spec.layers), True, True)
        self.positions: Tensor | None = None
        self.shares: list[Shares] = []
        self.model = Decoder(spec, self.part)
        self.lm_head = Head(spec.hidden, spec.vocab) if self.part.last else None
        self.tie()

    def tie(self) -> None:
        """Make the head's matrix the embedding's, where the model has one for both and this stage too."""
        if self.spec.tied_embeddings and self.part.first and self.part.last:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        x: Tensor,
        target_BS: Tensor | None = None,
        document_BS: Tensor | None = None,
        global_tokens: float = 1.0,
    ) -> Tensor:
        places = self._places(x, document_BS)
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x)
        for layer in self.model.layers.values():
            x = layer(x, places)
        if self.lm_head is None:
            return x
        return self.lm_head(self.model.norm(x), target_BS, global_tokens)

    def _places(self, x: Tensor, document_BS: Tensor | None) -> Places:
        positions = self.positions
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        dtype = wide(next(self.parameters()).dtype)
        return Places(*rotary_tables(self.spec, positions, dtype), document_BS)

    def units(self) -> Iterator[tuple[str, list[nn.Module]]]:
        """FSDP units in forward order, as the units of plan/params.py: kind, and the modules of each."""
        embedding = [self.model.embed_tokens] if self.part.first else []
        shared = self.spec.tied_embeddings and self.part.last
        if embedding and not shared:
            yield EMBEDDING, embedding
        for layer in self.model.layers.values():
            yield BLOCK, [layer]
        if self.part.last:
            yield HEAD, [*(embedding if shared else ()), self.model.norm, self.lm_head]


class Stages(nn.Module):
    """What of the model this rank has: one stage, or several of a pipeline.

    Parameters go by their names in the whole model.
    """

    def __init__(self, stages: Iterable[Transformer]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    @property
    def spec(self) -> ModelSpec:
        """Of the whole model."""
        return self.stages[0].spec

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True):
        """Parameters of all stages, by their names in the whole model."""
        for stage in self.stages:
            yield from stage.named_parameters(prefix, recurse, remove_duplicate)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The whole model's, where one stage is all of it."""
        (stage,) = self.stages
        return stage(*args, **kwargs)


def build_model(spec: ModelSpec, dtype: torch.dtype, part: Part | None = None) -> Transformer:
    """The model, or a stage of it, without storage (meta device); run/init.py fills it."""
    with torch.device("meta"):
        model = Transformer(spec, part).to(dtype)
    model.tie()  # .to() keeps ties, this line makes it a rule
    return model


def rotary_tables(spec: ModelSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each of ``positions`` (S) and every frequency, S x D/2 each."""
    device = positions.device
    exponent = torch.arange(0, spec.head_size, 2, device=device, dtype=dtype) / spec.head_size
    frequency = 1.0 / spec.rope_theta**exponent
    if spec.rope_scaling is not None:
        frequency = _llama3_frequency(frequency, spec.rope_scaling)
    angle_SD = torch.outer(positions.to(dtype), frequency)
    return angle_SD.cos(), angle_SD.sin()


def _llama3_frequency(frequency: Tensor, rope: Llama3Rope) -> Tensor:
    """Low frequencies divided by the factor, high ones kept, those between blended.

    Source: transformers modeling_rope_utils.py, ``_compute_llama3_parameters``.
    """
    turns = rope.original_positions * frequency / (2 * math.pi)
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequency * (blend + (1 - blend) / rope.factor)
