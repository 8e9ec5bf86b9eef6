"""Traffic of cp: keys and values that go round a ring or are gathered, heads that Ulysses trades.

Source: shared FORMULAE 3.5; run/cp.py issues them.
"""

from collections.abc import Iterator

import numpy as np

from shardwright.job import Job
from shardwright.layout import CONTEXT_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.attention import head_sizes
from shardwright.plan.flow import Flow, Rounds, rounded
from shardwright.plan.table import Floats, LayoutTable

ID_BYTES = 8
"""The number of a token's document, int64."""


def keys_and_values(model: ModelSpec, precision: str, table: LayoutTable, tokens: Floats) -> Floats:
    """Keys and values of one context rank in one block [B]."""
    kv_heads = np.maximum(model.kv_heads / table.tp, 1)
    return np.asarray(ELEMENT_BYTES[precision] * kv_heads * sum(head_sizes(model)) * tokens)


def traded_heads(model: ModelSpec, precision: str, table: LayoutTable, tokens: Floats) -> Floats:
    """What Ulysses trades in one pass of a block: queries, keys, values, and the output back [B].

    Key/value heads fewer than the ranks are repeated. The four differ in size with grouped or latent heads.
    """
    kv_heads = np.maximum(np.maximum(model.kv_heads / table.tp, 1), table.cp)
    heads = model.heads / table.tp + kv_heads  # a query and a key; an output and a value
    return np.asarray(ELEMENT_BYTES[precision] * heads * sum(head_sizes(model)) * tokens)


def context_rounds(table: LayoutTable, precision: str) -> Rounds:
    """Rounds over cp in a block, each of the keys and values of all ranks once; and passes of Ulysses.

    Ring: keys and values go round forward, and backward again with their gradients in a wide type, which go
    one hop further. All-gather: once forward, again backward, and a reduce-scatter of gradients.
    Recomputation repeats the forward ones.

    Source: shared FORMULAE 3.5.
    """
    ratio = WIDE_BYTES[precision] / ELEMENT_BYTES[precision]
    n = np.maximum(table.cp, 2)
    ring, gather = (
        table.cp_kind == CONTEXT_KINDS.index("ring"),
        table.cp_kind == CONTEXT_KINDS.index("all_gather"),
    )
    once = np.where(ring | gather, 1.0, 0.0)
    backward = np.where(ring, 1 + ratio * n / (n - 1), np.where(gather, 2.0, 0.0))
    again = np.where(table.recompute > 0, 1.0 / table.recompute_every, 0.0)
    trades = np.where(table.cp_kind == CONTEXT_KINDS.index("ulysses"), 2.0 + again, 0.0)
    return Rounds(once, backward + again * once, trades)


def document_flows(job: Job, table: LayoutTable) -> Iterator[Flow]:
    """Where documents begin, told to all ranks of cp."""
    packed = (table.cp > 1) & (job.packing == "documents")
    count = np.where(packed, 1.0 * table.microbatches * table.chunks, 0.0)
    size = count * (1.0 * ID_BYTES * table.micro_batch * job.seq)
    yield Flow("cp", "all_gather", table.cp, rounded(count), rounded(size))


def context_flows(model: ModelSpec, job: Job, table: LayoutTable, blocks: Floats) -> list[Flow]:
    tokens = table.micro_batch * job.seq / table.cp
    rounds = context_rounds(table, job.precision)
    each = table.microbatches * blocks
    own = keys_and_values(model, job.precision, table, tokens)
    payload = own * table.cp
    again = np.where(table.recompute > 0, 1.0 / table.recompute_every, 0.0)
    ring = np.where(table.cp_kind == CONTEXT_KINDS.index("ring"), each * (table.cp - 1), 0.0)
    back = np.where(ring > 0, ring * (1 + again) + each * table.cp, 0.0)
    gathered = table.cp_kind == CONTEXT_KINDS.index("all_gather")
    gathers = np.where(gathered, each * (2 + again), 0.0)
    scatters = np.where(gathered, each, 0.0)
    trades = traded_heads(model, job.precision, table, tokens) * each * rounds.trades
    amounts = (
        ("send", ring * rounds.forward, ring * rounds.forward * own),
        ("send", back, ring * rounds.backward * own),
        ("all_gather", gathers, gathers * payload),
        ("reduce_scatter", scatters, scatters * payload),
        ("all_to_all", 4 * each * rounds.trades, trades),
    )
    return [Flow("cp", name, table.cp, rounded(count), rounded(size)) for name, count, size in amounts]
