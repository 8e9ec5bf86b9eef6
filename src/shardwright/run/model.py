"""The decoder in plain PyTorch, its modules named as Hugging Face names them.

B batch, S sequence, E hidden, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.model import ModelSpec, unbuilt_reasons
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD
from shardwright.run.attention import Attention, LatentAttention
from shardwright.run.embedding import Embedding
from shardwright.run.experts import MoE
from shardwright.run.feed_forward import MLP, PlainMLP
from shardwright.run.gpt2 import GPT2Decoder
from shardwright.run.kernels import wide
from shardwright.run.layer_norm import build_norm
from shardwright.run.linear import Join, local, same
from shardwright.run.loss import cross_entropy
from shardwright.run.rotary import Places, rotary_tables


class Microbatch(NamedTuple):
    """A ``Sample`` of run/dataset.py on the device, each B x S."""

    tokens: Tensor
    targets: Tensor  # masked ones are MASKED
    documents: Tensor | None = None  # None: attention crosses documents


class Block(nn.Module):
    """One layer. ``recompute`` wraps the body where run/recompute.py has set it."""

    def __init__(self, spec: ModelSpec, layer: int = 0) -> None:
        super().__init__()
        self.self_attn = Attention(spec, layer) if spec.mla is None else LatentAttention(spec, layer)
        self.mlp = _feed_forward(spec, layer)
        self.input_layernorm = build_norm(spec)
        self.post_attention_layernorm = build_norm(spec)
        self.recompute: Callable[..., Tensor] | None = None

    def body(self, x_BSE: Tensor, places: Places) -> Tensor:
        x_BSE = x_BSE + self.self_attn(self.input_layernorm(x_BSE), places)
        return x_BSE + self.mlp(self.post_attention_layernorm(x_BSE))

    def forward(self, x_BSE: Tensor, places: Places) -> Tensor:
        if self.recompute is None or not torch.is_grad_enabled():
            return self.body(x_BSE, places)
        return self.recompute(self.body, x_BSE, places)


def _feed_forward(spec: ModelSpec, layer: int) -> MoE | MLP | PlainMLP:
    if spec.moe is not None and spec.moe.covers(layer):
        return MoE(spec)
    return MLP(spec) if spec.gated_mlp else PlainMLP(spec)


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

    layers: Sequence[int]
    first: bool
    last: bool


class Decoder(nn.Module):
    """Embedding, blocks by the number of their layer, and final norm."""

    def __init__(self, spec: ModelSpec, part: Part) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab, spec.hidden) if part.first else None
        self.layers = nn.ModuleDict({str(layer): Block(spec, layer) for layer in part.layers})
        self.norm = build_norm(spec) if part.last else None

    @property
    def embeddings(self) -> list[nn.Module]:
        """What is before the blocks, that of the tokens first."""
        return [] if self.embed_tokens is None else [self.embed_tokens]

    def embed(self, token_BS: Tensor, position_S: Tensor) -> Tensor:
        """The stream before the first block; ``position_S``: of the tokens of this rank's part of it."""
        return self.embed_tokens(token_BS)


class Transformer(nn.Module):
    """A causal language model or a stage of it: token ids (B x S) or the stage before's output, to logits
    (B x S x V), the loss (of shape 1), or this stage's output (B x S x E).

    ``positions``: of this rank's tokens in their sequence; 0, 1, ... where it is None. ``own``: picks those
    of the tokens whose stream this rank has, where tp splits it by sequence. ``shares``: gradients that
    run/tp.py adds up.

    Raises: ModelError: the model has what is not built, with every reason.
    """

    def __init__(self, spec: ModelSpec, part: Part | None = None) -> None:
        super().__init__()
        faults = unbuilt_reasons(spec)
        if faults:
            raise ModelError(f"model {spec.name}: " + "; ".join(faults))
        self.spec, self.part = spec, part or Part(range(spec.layers), True, True)
        self.positions: Tensor | None = None
        self.own: Join = same
        self.shares: list[Shares] = []
        if spec.model_type == "gpt2":
            self.transformer = GPT2Decoder(spec, *self.part)
        else:
            self.model = Decoder(spec, self.part)
        self.lm_head = Head(spec.hidden, spec.vocab) if self.part.last else None
        self.tie()

    @property
    def decoder(self) -> Decoder | GPT2Decoder:
        """All but the head."""
        return self.transformer if self.spec.model_type == "gpt2" else self.model

    def tie(self) -> None:
        """Make the head's matrix the embedding's, where the model has one for both and this stage too."""
        if self.spec.tied_embeddings and self.part.first and self.part.last:
            self.lm_head.weight = self.decoder.embed_tokens.weight

    def forward(
        self,
        x: Tensor,
        target_BS: Tensor | None = None,
        document_BS: Tensor | None = None,
        global_tokens: float = 1.0,
    ) -> Tensor:
        position_S = self.positions
        if position_S is None:
            position_S = torch.arange(x.shape[1], device=x.device)
        places = self._places(position_S, document_BS)
        if self.part.first:
            x = self.decoder.embed(x, self.own(position_S))
        for layer in self.decoder.layers.values():
            x = layer(x, places)
        if self.lm_head is None:
            return x
        return self.lm_head(self.decoder.norm(x), target_BS, global_tokens)

    def _places(self, position_S: Tensor, document_BS: Tensor | None) -> Places:
        if self.spec.positions != "rope":
            return Places(None, None, document_BS)
        dtype = wide(next(self.parameters()).dtype)
        return Places(*rotary_tables(self.spec, position_S, dtype), document_BS)

    def units(self) -> Iterator[tuple[str, list[nn.Module]]]:
        """FSDP units in forward order, as the units of plan/params.py: kind, and the modules of each."""
        embeddings = self.decoder.embeddings
        shared = embeddings[:1] if self.spec.tied_embeddings and self.part.last else []
        if embeddings[len(shared) :]:
            yield EMBEDDING, embeddings[len(shared) :]
        for layer in self.decoder.layers.values():
            yield BLOCK, [layer]
        if self.part.last:
            yield HEAD, [*shared, self.decoder.norm, self.lm_head]


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
