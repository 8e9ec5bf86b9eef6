"""What routing sends besides the tokens: counts, weights, how evenly experts are used, and the norm's parts.

run/dispatch.py, run/router.py, run/expert_load.py and run/norm.py send them.
"""

from collections.abc import Iterator

import numpy as np

from shardwright.axes import joined_axis
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.activations import WIDE_BYTES
from shardwright.plan.experts import copies_per_token, forward_passes, routed_tokens
from shardwright.plan.optimizer_traffic import Exchange
from shardwright.plan.table import Floats, LayoutTable

NUMBER_BYTES = 8
"""A count (int64), a loss or a part of the norm (fp64)."""


def routing_exchanges(
    model: ModelSpec, job: Job, table: LayoutTable, blocks: Floats, shard: str
) -> Iterator[Exchange]:
    """``blocks``: blocks with experts of a rank; ``shard``: name of the axis that splits parameters.

    Each block and microbatch: counts go to the experts' ranks and, forward and backward, the weight of each
    copy. The balancing loss counts over all ranks that hold tokens of one sequence. Once a step: use of the
    experts over all ranks of different tokens, and the norm of the experts' gradients over those that split
    them.
    """
    if model.moe is None:
        return
    passes = table.microbatches * blocks
    forward = passes * forward_passes(table)
    experts = NUMBER_BYTES * model.moe.experts
    tokens = routed_tokens(job, table)
    weights = WIDE_BYTES[job.precision] * copies_per_token(model, job) * tokens
    payload = forward * experts + (forward + passes) * weights
    yield Exchange("ep", "all_to_all", table.ep, 2 * forward + passes, payload)
    by_tokens = np.where(table.etp == 1, table.tp, 1)  # ranks of tp that route tokens of their own
    for axis, degree in (("cp", table.cp), ("tp", by_tokens)):
        if job.router_aux_weight > 0:
            yield Exchange(axis, "all_reduce", degree, forward, forward * experts * table.micro_batch)
    split, replicated = table.shard > 1, table.dp_replicate > 1
    some = np.where(blocks > 0, 1.0, 0.0)
    for axis, degree in (
        (shard, np.where(replicated, 1, table.shard)),
        ("dp_replicate", np.where(split, 1, table.dp_replicate)),
        (joined_axis(("dp_replicate", shard)), np.where(split & replicated, table.dp * table.cp, 1)),
        ("tp", by_tokens),
    ):
        yield Exchange(axis, "all_reduce", degree, 2 * some, blocks * experts + NUMBER_BYTES * some)
    yield Exchange("pp", "all_reduce", table.pp, 2 + 0 * blocks, 3 * NUMBER_BYTES + 0 * blocks)
    tp_is_ep = (by_tokens > 1) & (table.ep == by_tokens)  # the same ranks: tp or the shard axis sums both
    alone = ((by_tokens == 1) & (table.ep == table.shard)) | tp_is_ep
    for axis, degree, same in (
        ("ep", table.ep, alone),
        ("expert_shard", table.expert_shard, tp_is_ep | (table.expert_shard == table.shard * by_tokens)),
    ):
        apart = np.where(same, 1, degree)
        yield Exchange(axis, "all_reduce", apart, some, NUMBER_BYTES * some)
    # tp, which splits the experts too, sums theirs as a number of its own where other ranks hold the rest
    both = np.where((table.etp > 1) & (table.ep > 1) & (table.ep != table.shard), table.tp, 1)
    yield Exchange("tp", "all_reduce", both, 0.0 * some, NUMBER_BYTES * some)
