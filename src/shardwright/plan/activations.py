"""Activations of one block: what is saved for the backward pass and what is in use at its worst moments.

The block is written as the sequence of tensors that ``run/model.py`` makes and frees. From that one
sequence come the saved bytes by tensor and the working set at every moment, per token; so a change of the
runtime's block is a change here. Formulas of other runtimes stand at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright.layout import ContextKind, Recompute
from shardwright.model import ModelSpec
from shardwright.plan.table import Floats

ELEMENT_BYTES: Mapping[str, int] = {"bf16": 2, "fp8": 2, "fp32": 4, "fp64": 8}
"""Bytes of one activation or gathered parameter."""

WIDE_BYTES: Mapping[str, int] = {"bf16": 4, "fp8": 4, "fp32": 4, "fp64": 8}
"""Bytes of one statistic (norm deviation, log-sum-exp), reduced gradient and resting parameter."""


class Moment(NamedTuple):
    """A candidate for the peak inside one block's backward pass."""

    name: str
    token_bytes: float  # of the block's own tensors, for each token
    gradient_bytes: float  # of weight gradients made so far, not yet reduced
    fresh_bytes: float  # of the one made last: all there is when it is added to an older one at once


@dataclass(frozen=True)
class BlockActivations:
    """What a block keeps [B for each token, by tensor] and the moments that may be the peak."""

    saved: Mapping[str, float]
    moments: tuple[Moment, ...]

    @property
    def saved_bytes(self) -> float:
        """Kept for the backward pass, for each token [B]."""
        return sum(self.saved.values())


@dataclass
class _Tape:
    """Tensors alive while the block's sequence is played; remembers every moment something was made."""

    live: dict[str, float] = field(default_factory=dict)
    gradients: float = 0.0
    moments: list[Moment] = field(default_factory=list)

    def make(self, step: str, gradient: float = 0.0, **tensors: float) -> None:
        self.live.update(tensors)
        self.gradients += gradient
        self.moments.append(Moment(step, sum(self.live.values()), self.gradients, gradient))

    def free(self, *names: str) -> None:
        for name in names:
            del self.live[name]


class Split(NamedTuple):
    """How a block's tensors are split: what of the layout its activations depend on."""

    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_kind: ContextKind = "none"


WHOLE = Split()


class _Sizes(NamedTuple):
    """Bytes of the widths a block has, on one rank for each of its tokens; and of its weights' gradients.

    ``residual``: the residual stream; ``normed``: what a column-parallel matrix reads, gathered over tp and
    kept so; ``passed``: keys, values and their gradients of other context ranks in backward; ``traded``: the
    attention output after Ulysses has given the heads back.
    """

    residual: float
    normed: float
    query: float
    key: float
    ffn: float
    rstd: float
    heads: float  # one statistic a query head
    kv_heads: float
    passed: float
    traded: float
    weights: Mapping[str, float]


def _sizes(model: ModelSpec, precision: str, split: Split) -> _Sizes:
    e, w = ELEMENT_BYTES[precision], WIDE_BYTES[precision]
    heads, kv_heads = model.heads / split.tp, max(model.kv_heads / split.tp, 1)
    query, key, ffn = heads * model.head_size, kv_heads * model.head_size, model.ffn / split.tp
    by_sequence = split.tp if split.sp else 1
    weights = {
        "q": query * (model.hidden + model.qkv_bias),
        "k": key * (model.hidden + model.qkv_bias),
        "v": key * (model.hidden + model.qkv_bias),
        "o": model.hidden * (query + model.out_bias),
        "gate": ffn * (model.hidden + model.mlp_bias),
        "up": ffn * (model.hidden + model.mlp_bias),
        "down": model.hidden * (ffn + model.mlp_bias),
        "norm": model.hidden,
        "qk_norm": model.head_size,
    }
    passed = {"none": 0.0, "ring": 2 * e + 2 * w, "all_gather": split.cp * (2 * e + 2 * e), "ulysses": 0.0}
    return _Sizes(
        residual=e * model.hidden / by_sequence, normed=e * model.hidden, query=e * query, key=e * key,
        ffn=e * ffn, rstd=w / by_sequence, heads=w * heads, kv_heads=w * kv_heads,
        passed=passed[split.cp_kind] * key, traded=e * query if split.cp_kind == "ulysses" else 0.0,
        weights={name: e * numel for name, numel in weights.items()},
    )  # fmt: skip


@cache
def block_activations(
    model: ModelSpec, precision: str, recompute: Recompute, split: Split = WHOLE
) -> BlockActivations:
    """Saved tensors and moments of one block as the runtime executes it, for each token of a rank.

    The residual stream's input counts as saved by the block that reads it. Under tp, what the projections
    read is kept whole: torch's DTensor gathers outside the product and the product saves what it was given.
    """
    sizes = _sizes(model, precision, split)
    tape = _Tape(live={"input": sizes.residual})
    _forward(tape, sizes, model.qk_norm)
    tape.free("output")
    saved = {name: size for name, size in tape.live.items() if size}
    if recompute != "none":
        kept = {"input"}
        if recompute == "selective":
            kept |= {"q_raw", "k_raw", "v", "attention", "lse", "o", "gate", "up"}
        sizes_of = saved | {"q_raw": sizes.query, "k_raw": sizes.key, "o": sizes.residual}
        saved = {name: sizes_of[name] for name in sizes_of if name in kept}
    backward = _Tape(live=dict(saved) | {"grad": sizes.residual})
    if recompute != "none":
        _recompute(backward, sizes, model.qk_norm)
    backward.live.setdefault("traded", 0.0)
    _backward(backward, sizes, model.qk_norm)
    return BlockActivations(saved, _worst(backward.moments))


def _forward(tape: _Tape, z: _Sizes, qk_norm: bool) -> None:
    tape.make("input norm", norm1=z.normed, rstd1=z.rstd)
    tape.make("query, key, value", q_raw=z.query, k_raw=z.key, v=z.key)
    _rotate(tape, z, qk_norm)
    tape.make("attention", attention=z.query, lse=z.heads, traded=z.traded)
    tape.make("attention output", o=z.residual)
    _feed_forward(tape, z)
    tape.make("down", down=z.residual)
    tape.make("residual", output=z.residual)
    tape.free("down")


def _rotate(tape: _Tape, z: _Sizes, qk_norm: bool) -> None:
    """Rotary embedding, after query/key norms where the model has them; these keep their input."""
    if qk_norm:
        tape.make("query/key norm", q_norm=z.query, k_norm=z.key, q_rstd=z.heads, k_rstd=z.kv_heads)
    tape.make("rotary embedding", q=z.query, k=z.key)
    tape.free(*(("q_norm", "k_norm") if qk_norm else ("q_raw", "k_raw")))


def _feed_forward(tape: _Tape, z: _Sizes) -> None:
    tape.make("residual", middle=z.residual)
    tape.free("o")
    tape.make("second norm", norm2=z.normed, rstd2=z.rstd)
    tape.make("gate and up", gate=z.ffn, up=z.ffn)
    tape.make("SwiGLU", product=z.ffn)


def _recompute(tape: _Tape, z: _Sizes, qk_norm: bool) -> None:
    """The forward pass again, up to the last saved tensor; kept outputs are taken, not made."""
    tape.make("recompute", norm1=z.normed, rstd1=z.rstd)
    tape.make("recompute", q_raw=z.query, k_raw=z.key, v=z.key)
    _rotate(tape, z, qk_norm)
    tape.make("recompute", attention=z.query, lse=z.heads, traded=z.traded)
    tape.make("recompute", o=z.residual)
    _feed_forward(tape, z)


def _backward(tape: _Tape, z: _Sizes, qk_norm: bool) -> None:
    weights = z.weights
    tape.make("down backward", weights["down"], d_product=z.ffn)
    tape.free("product")
    tape.make("SwiGLU backward", d_gate=z.ffn, d_up=z.ffn)
    tape.free("gate", "up", "d_product")
    tape.make("up backward", weights["up"], d_norm2=z.normed)
    tape.free("d_up")
    tape.make("gate backward", weights["gate"], d_norm2_too=z.normed)
    tape.free("d_gate", "norm2", "d_norm2_too")
    tape.make("second norm backward", weights["norm"], d_middle=z.residual)
    tape.free("d_norm2", "middle", "rstd2")
    tape.free("d_middle")  # added into the residual's gradient
    tape.make("attention output backward", weights["o"], d_attention=z.query)
    tape.make("attention backward", d_q=z.query, d_k=z.key, d_v=z.key, passed=z.passed)
    tape.free("passed", "q", "k", "v", "attention", "traded", "lse", "d_attention")
    tape.make("rotary backward", d_k_raw=z.key)
    tape.free("d_k")
    tape.make("rotary backward", d_q_raw=z.query)
    tape.free("d_q")
    if qk_norm:
        tape.make("key norm backward", weights["qk_norm"], d_k_norm=z.key)
        tape.free("d_k_norm", "k_raw", "k_rstd")
        tape.make("query norm backward", weights["qk_norm"], d_q_norm=z.query)
        tape.free("d_q_norm", "q_raw", "q_rstd")
    tape.make("value backward", weights["v"], d_norm1=z.normed)
    tape.free("d_v")
    tape.make("key backward", weights["k"], d_norm1_too=z.normed)
    tape.free("d_norm1_too", "d_k_raw")
    tape.make("query backward", weights["q"], d_norm1_too=z.normed)
    tape.free("d_norm1_too", "d_q_raw", "norm1")
    tape.make("input norm backward", weights["norm"], d_input=z.residual)


def _worst(moments: list[Moment]) -> tuple[Moment, ...]:
    """Moments that no other one exceeds in tensors and gradients alike."""
    return tuple(
        m
        for i, m in enumerate(moments)
        if not any(
            all(theirs >= ours for theirs, ours in zip(o[1:], m[1:], strict=True))
            and (o[1:] != m[1:] or j < i)
            for j, o in enumerate(moments)
            if j != i
        )
    )


def rotary_table_bytes(model: ModelSpec, seq: int, precision: str) -> float:
    """Cosine and sine tables, made once a forward pass and shared by all blocks [B]."""
    return WIDE_BYTES[precision] * seq * model.head_size


# Formulas of other runtimes


def llama_block_saved_bytes(
    model: ModelSpec,
    seq: int,
    *,
    swiglu: Literal["fused", "eager"] = "eager",
    norm: Literal["fused", "upcast", "decomposed"] = "fused",
    attention: Literal["flash", "scores"] = "flash",
    repeat_kv: bool = False,
) -> float:
    """Saved for each token by a Llama block in bf16, as written in other ways [B].

    ``eager`` SwiGLU keeps silu(gate) besides gate, up and product (8f); ``fused`` does not (6f, the runtime's
    form). ``upcast`` is the norm of Hugging Face (fp32 input and normalised copy), ``decomposed`` torch's
    without a fused kernel. ``scores`` keeps fp32 softmax and its bf16 copy, no log-sum-exp.

    Source: shared FORMULAE 2.2, each measured to the byte on CPU; Korthikanti et al. 2022 for the method.
    """
    h, a = model.hidden, model.heads
    query, key = a * model.head_size, model.kv_heads * model.head_size
    keys = 2 * query if repeat_kv else 2 * key
    total = 8 * h + 4 * query + 2 * keys + {"fused": 6, "eager": 8}[swiglu] * model.ffn + 8
    total += 2 * h * {"fused": 0, "upcast": 4, "decomposed": 6}[norm]
    total += 4 * a if attention == "flash" else 6 * a * seq
    if model.qk_norm:
        total += 2 * query + 2 * key + 4 * (a + model.kv_heads)
    return float(total)


def gpt_block_activation_bytes(
    s: ArrayLike,
    b: ArrayLike,
    h: ArrayLike,
    a: ArrayLike,
    recompute: Recompute = "none",
    tp: ArrayLike = 1,
    sp: bool = False,
) -> Floats:
    """Saved by one GPT block with dropout and materialised scores, 16-bit, on one rank [B]. All broadcast.

    ``selective`` recomputes the attention core, ``full`` keeps the input alone. Without ``sp``, norms,
    dropouts and inputs of the matrices are whole on every rank of tp.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, table 2; full with sp keeps a split input.
    """
    s, b, h, a, tp = (np.asarray(x, dtype=np.float64) for x in (s, b, h, a, tp))
    whole, split = (2.0, 0.0) if recompute == "full" else (10.0, 24.0)
    scores = 5 * a * s / h * (recompute == "none")
    each = (whole + split + scores) / tp if sp else whole + (split + scores) / tp
    return np.asarray(s * b * h * each)
