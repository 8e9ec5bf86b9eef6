"""Activations as other programs keep them, each a formula with its source; the runtime's own are in
plan/activations.py. Bytes in 16-bit precision.
"""

from math import ceil
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright.layout import Recompute
from shardwright.model import ModelSpec, Moe
from shardwright.plan.table import Floats


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
    total += 4 * a if attention == "flash" else SCORE_BYTES["upcast"].saved * a * seq
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
    scores = SCORE_BYTES["dropout"].saved * a * s / h * (recompute == "none")
    each = (whole + split + scores) / tp if sp else whole + (split + scores) / tp
    return np.asarray(s * b * h * each)


def torchtitan_selective_saved_bytes(model: ModelSpec) -> float:
    """Saved for each token by a Llama block under torchtitan's selective recomputation, one rank [B].

    It keeps every second matrix product (queries, values, gate, down) and attention with its log-sum-exp.

    Source: torchtitan distributed/activation_checkpoint.py, ``_apply_op_sac``.
    """
    query, key = model.heads * model.head_size, model.kv_heads * model.head_size
    return float(4 * model.hidden + 4 * query + 2 * key + 2 * model.ffn + 4 * model.heads)


# Attention scores, where no fused kernel does without them


class Scores(NamedTuple):
    """Bytes of each score (query head, query, key): kept for backward, and allocated in all going forward."""

    saved: int
    made: int


SCORE_BYTES = {
    "flash": Scores(0, 0),
    "dropout": Scores(5, 7),
    "upcast": Scores(6, 12),
}
"""``dropout``: softmax and dropout outputs with a mask of 1 B are kept, the product before is not (GPT in
Megatron; Korthikanti et al. 2022, arXiv:2205.05198, 5as/h). ``upcast``: softmax in fp32 and its 16-bit copy
are kept, the product before, scaled and masked in copies, is not (Llama in Hugging Face,
``eager_attention_forward``)."""


def score_bytes(
    seq: int, heads: float, kind: Literal["flash", "dropout", "upcast"], *, made: bool = False
) -> float:
    """Scores of one block for each token, of the query heads of a rank [B]."""
    each = SCORE_BYTES[kind].made if made else SCORE_BYTES[kind].saved
    return float(each * heads * seq)


# State and traffic


def deepspeed_zero3_bytes(
    parameters: int, largest_layer: int, ranks: int, offload: Literal["none", "optimizer", "all"] = "none"
) -> float:
    """What DeepSpeed's estimator says a GPU needs for model state in stage 3 [B], activations left out.

    18 B a parameter split over all ranks (gradients in 16 bits and in fp32, fp32 parameters, Adam), 2 B with
    the optimizer on the host, none with all there; and the largest layer, gathered, in 4 B.

    Source: DeepSpeed deepspeed/runtime/zero/stage3.py, ``estimate_zero3_model_states_mem_needs``.
    """
    each = {"none": 18, "optimizer": 2, "all": 0}[offload]
    return 4 * largest_layer + each * parameters / ranks


def zero3_sent_elements(
    weight_bits: int = 16, gradient_bits: int = 16, *, secondary_shards: bool = False
) -> float:
    """Sent between nodes for each parameter and microbatch in stage 3, in elements of 16 bits.

    A gather forward, one more backward, and a reduction. ZeRO++ gathers weights in 8 bits, keeps
    ``secondary_shards`` in every node from which backward gathers, and reduces gradients in 4 bits.

    Source: ZeRO++, arXiv:2306.10209.
    """
    gathers = 1 if secondary_shards else 2
    return (gathers * weight_bits + gradient_bits) / 16


# Experts


def megatron_experts_saved_bytes(moe: Moe, hidden: int, *, weighted_inside: bool = True) -> float:
    """Saved for each token by the routed experts of a layer, gated, none dropped, evenly loaded [B].

    A copy keeps its input, gate, up and product, and its fp32 weight. Weighted after the experts instead,
    it keeps the expert's output too.

    Source: Megatron-LM core/transformer/moe/experts.py, ``weighted_bias_swiglu_impl``.
    """
    output = 0 if weighted_inside else 2 * hidden
    return float(moe.top_k * (2 * hidden + 6 * moe.ffn + 4 + output))


# Logits and loss


class LossBytes(NamedTuple):
    """For each token: kept between the passes, and the most going forward, with the 16-bit logits, and
    backward, without them: whoever holds them on pays 2 B an element more."""

    saved: float
    forward: float
    backward: float


def cross_entropy_bytes(vocab: int, *, upcast: bool) -> LossBytes:
    """``F.cross_entropy`` of bf16 logits, as they are or widened to fp32 first [B for each token].

    It keeps the logarithms of the softmax. Backward these, their gradient and that of its input are there at
    once. Source: measured with torch 2.13; transformers loss/loss_utils.py has ``logits.float()``.
    """
    e = 4 if upcast else 2
    return LossBytes(e * vocab, (2 + e + (e if upcast else 0)) * vocab, 3 * e * vocab)


def megatron_cross_entropy_bytes(vocab: int, tp: int = 1) -> LossBytes:
    """Cross-entropy over a vocabulary split by tp [B for each token].

    The bf16 logits are widened and exponentiated in place; kept are these, whether the target is on another
    rank (1 B) and its place (int64). The kept tensor becomes the gradient, and that a 16-bit one.

    Source: Megatron-LM core/tensor_parallel/cross_entropy.py.
    """
    marks, rows = 1 + 8, vocab / tp
    return LossBytes(4 * rows + marks, 6 * rows + marks, 6 * rows + marks)


def liger_chunk_tokens(tokens: int, hidden: int, vocab: int) -> int:
    """Tokens that Liger's fused head and loss takes at once, so that a chunk of logits is no larger than the
    head's input.

    Source: Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py.
    """
    chunks = ceil(vocab / hidden)
    return _power_of_two(ceil(tokens / chunks))


def liger_loss_bytes(tokens: int, hidden: int, vocab: int, gradient_bytes: int = 2) -> float:
    """Allocated by Liger's fused head and loss for a microbatch [B].

    A chunk of logits in bf16 and fp32, and both gradients, which the forward pass makes: of the head's input,
    and of its matrix in ``gradient_bytes`` an element.

    Source: as ``liger_chunk_tokens``.
    """
    chunk = liger_chunk_tokens(tokens, hidden, vocab) * vocab * (2 + 4)
    return float(chunk + 2 * tokens * hidden + gradient_bytes * vocab * hidden)


def tokens_of_logits(size: float, vocab: int, element_bytes: int = 4) -> float:
    """Tokens whose logits take ``size`` bytes: what an out-of-memory message says of the batch it met."""
    return size / (element_bytes * vocab)


def _power_of_two(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()
