"""Attention of one microbatch: keys that a query sees, and time by the length of what a kernel works on."""

from typing import NamedTuple

import numpy as np

from shardwright.cluster import Device
from shardwright.layout import CONTEXT_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.gemm import memory_rate
from shardwright.plan.table import Floats, Ints
from shardwright.program import Program

BACKWARD_ATTENTION = 2.5
"""Flash attention's backward pass over its forward pass: five matrix products against two."""

FILL_KEYS = 128
"""Keys after which a kernel works at half its rate: its rate grows as l / (l + 128) with the keys l that a
query sees. FlashAttention-2 and 3 on H100 go from 309 to 370 and from 467 to 648 TFLOP/s between 512 and 16k
keys, which is 104 and 206; a causal mask, of which a tile on the diagonal is half idle, adds 128. Source:
shared FORMULAE 5.4."""

STATED_KEYS = 4096
"""Keys that a query saw where ``Device.attention_efficiency`` was measured: a causal sequence of 8192."""

SCORE_FILL = 64
"""Inner dimension at which a batched product of one head works at half its rate; an assumption."""

SCORE_TOUCHES = (4, 7)
"""Reads and writes of a score in 16 bits forward and backward, where scores go through memory: product,
softmax with mask, product; and the same with gradients."""

DROPOUT_BYTES = (5, 5)
"""What dropout adds: read, written, with a mask of 1 B, in both passes."""

ALIGNMENT = 8
"""Elements of 16 bits that a row of a product must be a multiple of for all of a tensor core's rate."""

MISALIGNED_RATE = 1 / 16
"""Of a product whose rows are not: that of cores that are no tensor cores, on A100 19.5 of 312 TFLOP/s."""

QUERY_TILE = 128
"""Queries of one head that a multiprocessor works on."""


class AttentionTimes(NamedTuple):
    """Seconds of the attention of one block of one microbatch."""

    forward: Floats
    backward: Floats


def attended_length(seq: int, window: int | None = None, chunked: bool = False, diagonal: int = 1) -> float:
    """Keys that a query sees under a causal mask, mean over the positions of a sequence.

    A sliding window shows the last ``window`` keys, a chunked one those of the query's own chunk.
    ``diagonal``: 1 counts the query's own key, 0 takes the triangle for half a square, as FLOP counts do.
    """
    if window is None or window >= seq:
        return (seq + diagonal) / 2
    if chunked:
        chunks, rest = divmod(seq, window)
        return (chunks * window * (window + diagonal) + rest * (rest + diagonal)) / (2 * seq)
    return (window * (window + diagonal) / 2 + (seq - window) * window) / seq


def ring_share(cp: int, *, zigzag: bool) -> float:
    """Causal work that a ring of ``cp`` ranks does, over what it could do in the same time.

    At every step each rank holds its queries and the keys that have come round; all wait for the slowest.
    ``zigzag`` gives rank i parts i and 2 cp - 1 - i of the sequence, otherwise it has one part in a row.

    Source: zhuzilin/ring-flash-attention README: 52 to 54 % of the ideal was measured for 8 ranks.
    """
    rank = np.arange(cp)
    parts = np.stack([rank, 2 * cp - 1 - rank]) if zigzag else np.stack([2 * rank, 2 * rank + 1])
    query, key = parts[:, None, :, None], parts[None, :, None, :]
    seen = np.where(query > key, 1.0, np.where(query == key, 0.5, 0.0)).sum(axis=(0, 1))  # query, key rank
    steps = [seen[rank, (rank - step) % cp].max() for step in range(cp)]
    return float(seen.sum() / (cp * sum(steps)))


def attended_lengths(model: ModelSpec, seq: int, diagonal: int = 1) -> tuple[tuple[int, float], ...]:
    """Layers, and keys that a query sees in them, by kind of layer: without a window and with."""
    full = model.layers if model.sliding_window is None else len(model.full_attention_layers)
    chunked = model.window_kind == "chunked"
    lengths = (
        (full, attended_length(seq, diagonal=diagonal)),
        (model.layers - full, attended_length(seq, model.sliding_window, chunked, diagonal)),
    )
    return tuple(pair for pair in lengths if pair[0])


def head_sizes(model: ModelSpec) -> tuple[int, int]:
    """Numbers of a query or key, and of a value."""
    return model.head_size, model.mla.value_size if model.mla else model.head_size


def attention_times(
    model: ModelSpec,
    seq: int,
    precision: str,
    device: Device,
    program: Program,
    tokens: Floats,
    tp: Ints,
    cp: Ints,
    cp_kind: Ints,
) -> AttentionTimes:
    """Flash attention over the model's mean layer [s]. All broadcast.

    A ring works on blocks of seq / (2 cp) keys (zig-zag) and, for every block but its own, adds what it found
    to output and log-sum-exp; of the ranks the one with the most queries counts. Gathered keys and traded
    heads (Ulysses) leave a rank whole rows. Heads and query tiles fewer than multiprocessors leave some idle.

    Source: shared FORMULAE 3.5 and 5.4.
    """
    heads, kv_heads = model.heads, model.kv_heads
    query, value = head_sizes(model)
    ring = cp_kind == CONTEXT_KINDS.index("ring")
    if program.attention == "scores":
        return _score_times(model, seq, precision, device, program, tokens, tp)
    peak = device.peak("bf16" if precision == "fp8" else precision)
    peak *= device.attention_efficiency * program.attention_rate
    peak *= program.newer_rate if device.fp8 else 1.0
    keys = _weighted_keys(model, seq, device, np.where(ring, cp, 1))
    each = 2 * (query + value) / peak * keys  # of a query of one head
    element, rate = ELEMENT_BYTES[precision], memory_rate(device)
    moved = element * (heads * (query + value) + kv_heads * (query + value)) / heads / rate
    load = tokens * (heads / tp)
    core = np.maximum(load * np.maximum(each, moved), each * (QUERY_TILE * device.sms))
    wide = WIDE_BYTES[precision]
    touched, summed = 2 * wide + element, 3 * wide  # of a partial result, and of a log-sum-exp
    ahead = (touched * value + summed) / rate
    back = touched * (query + (query + value) * kv_heads / heads) / rate
    steps = np.where(ring, cp - 1, 0)
    return AttentionTimes(
        core + steps * (ahead * load + 2 * device.launch),
        BACKWARD_ATTENTION / device.attention_backward * core + steps * (back * load + 4 * device.launch),
    )


def _score_times(
    model: ModelSpec,
    seq: int,
    precision: str,
    device: Device,
    program: Program,
    tokens: Floats,
    tp: Ints,
) -> AttentionTimes:
    """Attention whose scores go through memory [s]: two products over all keys, masked or not, at the rate of
    products with an inner dimension of a head, and a fused scale, mask, softmax and dropout between.

    Source: Megatron-LM megatron/core/fusions/fused_softmax.py and transformer/dot_product_attention.py.
    """
    query, value = head_sizes(model)
    element, memory = ELEMENT_BYTES[precision], memory_rate(device) / program.score_traffic
    scores = tokens * (model.heads / tp) * seq
    each = (query + value) / 2
    rate = device.peak(precision) * device.matmul_efficiency * each / (each + SCORE_FILL)
    rate *= MISALIGNED_RATE if query % ALIGNMENT or value % ALIGNMENT else 1.0
    products = 2 * (query + value) * scores / rate
    dropped = model.model_type == "gpt2"
    moved = [
        scores * (touches * element + dropped * more) / memory
        for touches, more in zip(SCORE_TOUCHES, DROPOUT_BYTES, strict=True)
    ]
    return AttentionTimes(products + moved[0], 2 * products + moved[1])


def _weighted_keys(model: ModelSpec, seq: int, device: Device, blocks: Ints) -> Floats:
    """Keys that a query sees, at the rate of ``STATED_KEYS``: as many more as its kernel is slower."""
    fill = FILL_KEYS if device.sms else 0
    full_rate = STATED_KEYS / (STATED_KEYS + fill)
    total: Floats | float = 0.0
    for layers, keys in attended_lengths(model, seq):
        in_one_kernel = np.minimum(keys, np.where(blocks > 1, seq / (2 * blocks), np.inf))
        total = total + layers / model.layers * keys * (1 + fill / in_one_kernel)
    return np.asarray(full_rate * total)
