"""Experts shared out over ranks: copies of tokens that travel, and how full the fullest rank is.

Source: shared FORMULAE 2.4 and 3.6; DeepSeek-V3, arXiv:2412.19437, section 3.2.2, for node-limited routing.
"""

import numpy as np
from numpy.typing import ArrayLike

from shardwright.job import Job
from shardwright.layout import DISPATCH_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES
from shardwright.plan.collectives import Route, collective_time
from shardwright.plan.table import Floats, LayoutTable

BY_NODE = DISPATCH_KINDS.index("by_node")


def fullness(job: Job, table: LayoutTable) -> Floats:
    """Copies that the fullest rank of ep works on, over the mean: as dropless routing comes out, 1 where the
    ranks hold all experts or a capacity makes buffers of equal size."""
    imbalance = 1.0 if job.expert_capacity else job.expert_imbalance
    return np.where(table.ep > 1, imbalance, 1.0)


def copies_per_token(model: ModelSpec, job: Job) -> float:
    """Copies of a token that experts work on, or room kept for them: top k, times the capacity factor."""
    return (model.moe.top_k if model.moe else 0) * (job.expert_capacity or 1.0)


def routed_tokens(job: Job, table: LayoutTable) -> Floats:
    """Tokens of a microbatch that a rank routes: with sp its own share of tp's, unless tp splits the experts,
    whose ranks then route the same tokens."""
    alone = (table.etp == 1) | job.program.trades_own
    own = np.where((table.sp == 1) & alone, table.tp, 1)
    return np.asarray(table.micro_batch * job.seq / table.cp / own)


def dispatched_bytes(model: ModelSpec, job: Job, table: LayoutTable) -> Floats:
    """What a rank gives to one all-to-all of one block with experts, the part it keeps too [B]."""
    tokens = routed_tokens(job, table)
    return np.asarray(ELEMENT_BYTES[job.precision] * model.hidden * copies_per_token(model, job) * tokens)


def dispatch_launches(table: LayoutTable) -> Floats:
    """All-to-alls of one block and microbatch: two forward and two backward; recomputation repeats those of
    the forward pass."""
    return 2 * forward_passes(table) + 2


def forward_passes(table: LayoutTable) -> Floats:
    """How often a microbatch goes through the experts of a block, recomputation counted: selective keeps none
    of their outputs."""
    return np.where(table.recompute > 0, 1 + 1 / table.recompute_every, 1.0)


def nodes_of_a_token(model: ModelSpec, nodes: ArrayLike) -> Floats:
    """Nodes, of so many that share out the experts evenly, that hold one of a token's experts, on average.

    Uniform routing: N (1 - C(E - E/N, k) / C(E, k)). Node-limited routing caps it at the nodes of the groups
    it may use: as many as these where a node has one group, fewer where it has several.
    """
    moe = model.moe
    assert moe is not None, "a model with experts"
    count = np.asarray(nodes, dtype=np.float64)
    elsewhere = moe.experts - moe.experts / count
    missed = np.prod([np.maximum(elsewhere - j, 0) / (moe.experts - j) for j in range(moe.top_k)], axis=0)
    found = count * (1 - missed)
    if moe.groups == 1:
        return np.asarray(found)
    others = moe.groups - np.maximum(moe.groups / count, 1.0)
    without = [np.maximum(others - j, 0) / (moe.groups - j) for j in range(moe.top_groups)]
    return np.asarray(np.minimum(found, np.minimum(count, moe.groups) * (1 - np.prod(without, axis=0))))


def tensor_rounds(model: ModelSpec, table: LayoutTable) -> Floats:
    """Rounds over tp that the feed-forward part of a block with experts takes, over those of a dense one.

    Experts cut by tp (etp) need the tokens of all its ranks, which meet around all experts. Whole experts
    need none; shared ones beside them are cut as a dense network is.
    """
    assert model.moe is not None, "a model with experts"
    return np.where(table.etp > 1, 1.0, 1.0 if model.moe.shared_ffn else 0.0)


def gather_time(model: ModelSpec, job: Job, table: LayoutTable, route: Route) -> Floats:
    """Where ranks of tp that split experts trade their own tokens: gathers of what came in and reductions of
    what goes back, of one block with experts and one microbatch [s]."""
    if not job.program.trades_own or (table.etp == 1).all():
        return np.zeros((1,) * table.etp.ndim)
    each = dispatched_bytes(model, job, table) * table.tp
    time = dispatch_launches(table) * collective_time("all_gather", each, 1, route)
    return np.where(table.etp > 1, time, 0.0)


def dispatch_time(model: ModelSpec, job: Job, table: LayoutTable, route: Route) -> Floats:
    """The all-to-alls of one block with experts and one microbatch, forward and backward [s].

    The fullest rank's. By node, what leaves a node is one copy of a token for each other node that it goes
    to; inside, all copies travel as before. What was measured of all-to-alls corrects both ways.
    """
    if (table.ep == 1).all():
        return np.zeros((1,) * table.ep.ndim)
    each = dispatched_bytes(model, job, table) * fullness(job, table)
    plain = collective_time("all_to_all", each, 1, route)
    time = plain
    if (table.dispatch == BY_NODE).any():
        inside, between = route.crossings[0], route.crossings[-1]
        nodes = route.spread(np.maximum(between.domains_below, 1))
        remote = nodes_of_a_token(model, nodes) * (1 - 1 / nodes) / copies_per_token(model, job)
        far = each * remote / between.bandwidth
        near = each * (1 - nodes / table.ep) / inside.bandwidth
        hop = route.spread(route.start + route.latency(small=False))
        sent = route.corrected("all_to_all", hop + np.maximum(far, near), each, np.ones(1))
        grouped = np.where(nodes > 1, sent, plain)
        time = np.where(table.dispatch == BY_NODE, np.minimum(grouped, plain), plain)
    return np.where(table.ep > 1, dispatch_launches(table) * time, 0.0)
