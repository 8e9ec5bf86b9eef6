"""What one block, the embedding and the head take on one rank, for each microbatch: computation, and the
communication inside them that nothing hides.

tp is exposed, and so are the trades of experts; a ring of keys and values hides under attention; offloaded
activations travel under the computation of their block.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.cluster import Cluster, Device
from shardwright.job import Job
from shardwright.layout import CONTEXT_KINDS, OFFLOAD_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES, Kind
from shardwright.plan.block_kinds import block_kinds
from shardwright.plan.collectives import Route, collective_time
from shardwright.plan.compute import (
    BlockTimes,
    block_times,
    embedding_times,
    head_times,
    logits_again,
)
from shardwright.plan.compute import Work as Computation
from shardwright.plan.context_traffic import context_rounds, keys_and_values, traded_heads
from shardwright.plan.experts import dispatch_time, gather_time
from shardwright.plan.flight_points import passes_apart
from shardwright.plan.flow import Rounds
from shardwright.plan.placement import routes_of
from shardwright.plan.table import ColumnMap, Floats, LayoutTable, by_schedule
from shardwright.plan.traffic import expert_tp_rounds, tp_rounds


class Part(NamedTuple):
    """Seconds of one microbatch in a block, the embedding or the head: computation, and what is exposed
    inside, by axis, forward and backward together."""

    forward: Floats
    backward: Floats
    weight_gradients: Floats | float = 0.0  # of backward
    tp: Floats | float = 0.0
    cp: Floats | float = 0.0
    ep: Floats | float = 0.0
    host: Floats | float = 0.0

    @property
    def beside(self) -> Floats:
        """Exposed communication."""
        return np.asarray(self.tp + self.cp + self.ep + self.host)

    @property
    def inside(self) -> Floats:
        """All of it."""
        return self.forward + self.backward + self.beside

    @property
    def folded(self) -> "Part":
        """The same in fewer columns: half of what is exposed stands as forward, half as backward."""
        half = self.beside / 2
        return Part(self.forward + half, self.backward + half, self.weight_gradients)

    def mapped(self, part: ColumnMap) -> "Part":
        """The same with ``part`` of every time."""
        return Part(*(part(np.asarray(time)) for time in self))


class Parts(NamedTuple):
    """The parts of a model; ``experts`` is a block with experts, if there is one, and ``block`` it too if all
    have. ``again``: what recomputing ``block`` takes, if schedules do so in a pass for weights too; all of it
    stands as backward."""

    block: Part
    experts: Part | None
    embedding: Part
    head: Part
    again: Part | None = None
    experts_again: Part | None = None

    def mapped(self, part: ColumnMap) -> "Parts":
        """The same with ``part`` of every time."""
        return self._each(lambda one: one.mapped(part))

    @property
    def folded(self) -> "Parts":
        """The same in fewer columns, of which a microbatch's times in a pipeline are those of all."""
        return self._each(lambda one: one.folded)

    @property
    def summed(self) -> "Parts":
        """The same in one column each, which stands as forward."""
        return self._each(lambda one: Part(one.inside, *[np.zeros((1,) * one.forward.ndim)] * 6))

    def _each(self, change: Callable[[Part], Part]) -> "Parts":
        def each(other: Part | None) -> Part | None:
            return None if other is None else change(other)

        ends = change(self.embedding), change(self.head)
        return Parts(
            change(self.block), each(self.experts), *ends, each(self.again), each(self.experts_again)
        )


def part_times(
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    table: LayoutTable,
    routes: Mapping[str, Route] | None = None,
    *,
    again: bool = True,
) -> Parts:
    """Seconds of one microbatch in each part, for every row; ``routes`` of all axes if they are at hand.
    ``again``: with what recomputing for weights takes."""
    routes = routes or routes_of(cluster, table)
    tokens = table.micro_batch * job.seq / table.cp
    by_sequence = np.where(table.sp == 1, table.tp, 1)
    work = Computation(tokens, table.tp, by_sequence, table.cp, table.cp_kind, table.ep, table.etp)
    blocks = [_block(model, job, cluster.device, table, routes, work, kind) for kind in model.block_kinds]
    more: list[Part | None] = [None]
    if again:
        more = _again(model, job, cluster.device, table, routes, work, blocks)
    ends = _ends(model, job, cluster.device, table, routes, work)
    if "experts" not in model.block_kinds:
        return Parts(blocks[0], None, *ends, more[0], None)
    return Parts(blocks[0], blocks[-1], *ends, more[0], more[-1])


def hop_time(model: ModelSpec, job: Job, table: LayoutTable, routes: Mapping[str, Route]) -> Floats:
    """Passing one microbatch's residual stream to the next stage [s]; without a pipeline, 0.

    With sp a rank has a part of it; a program may have ranks of tp without sp send a part each, too.
    """
    parted = (table.sp == 1) | job.program.hops_split
    tokens = table.micro_batch * job.seq / table.cp
    vector = ELEMENT_BYTES[job.precision] * model.hidden * tokens
    hop = collective_time("send", vector / np.where(parted, table.tp, 1), 1, routes["pp"])
    if job.program.hops_split:
        gathered = collective_time("all_gather", vector, 1, routes["tp"])
        hop = hop + np.where(table.sp == 1, 0.0, gathered)
    return np.where(table.pp > 1, hop, 0.0)


def beyond(communication: Floats, computation: Floats, overlap: float) -> Floats:
    """Part of ``communication`` that ``computation`` does not hide."""
    hidden = np.minimum(communication, computation)
    return communication - (hidden if overlap == 1 else overlap * hidden)


def _block(
    model: ModelSpec,
    job: Job,
    device: Device,
    table: LayoutTable,
    routes: Mapping[str, Route],
    work: Computation,
    kind: Kind,
) -> Part:
    times = block_times(model, job, device, work, kind)
    full = times.recompute_full / table.recompute_every
    again = np.where(
        table.recompute == 2, full, np.where(table.recompute == 1, times.recompute_selective, 0.0)
    )
    rounds = tp_rounds(table) if kind == "dense" else expert_tp_rounds(model, table)
    return Part(
        forward=times.forward,
        backward=times.backward + again,
        weight_gradients=times.weight_gradients,
        tp=_tensor_time(model, job, table, routes["tp"], work.tokens, rounds),
        cp=_context_time(model, job, table, routes["cp"], work.tokens, times, device.overlap),
        ep=_experts_time(model, job, table, routes, times.forward + times.backward + again)
        if kind == "experts"
        else 0.0,
        host=_offload_time(model, job, device, table, times, kind),
    )


def _again(
    model: ModelSpec,
    job: Job,
    device: Device,
    table: LayoutTable,
    routes: Mapping[str, Route],
    work: Computation,
    blocks: Sequence[Part],
) -> list[Part | None]:
    """What blocks take longer if recomputed twice, as passes for inputs and for weights do; None: no row has
    both such passes and recomputation."""
    apart = by_schedule(table.schedule, passes_apart, table.pp, table.microbatches)
    if not (apart.any() and table.recompute.any()):
        return [None] * len(blocks)
    table = table._replace(recompute_every=table.recompute_every / 2)  # type: ignore[arg-type]
    found: list[Part | None] = []
    for kind, block in zip(model.block_kinds, blocks, strict=True):
        twice = _block(model, job, device, table, routes, work, kind)
        found.append(Part(*(np.asarray(a - b) for a, b in zip(twice, block, strict=True))))
    return found


def _experts_time(
    model: ModelSpec, job: Job, table: LayoutTable, routes: Mapping[str, Route], computation: Floats
) -> Floats:
    """Tokens to their experts and back, as far as the block's ``computation`` for another microbatch does not
    hide them, and gathered over ranks that split an expert."""
    trades = dispatch_time(model, job, table, routes["ep"])
    if job.program.ep_hidden:
        trades = beyond(trades, computation, job.program.ep_hidden)
    return job.program.ep_exposed * trades + gather_time(model, job, table, routes["etp"])


def _tensor_time(
    model: ModelSpec, job: Job, table: LayoutTable, route: Route, tokens: Floats, rounds: Rounds
) -> Floats:
    """Exchanges over tp in one block: two all-reduces a pass, or with sp gathers and scatters."""
    if (table.tp == 1).all():
        return np.zeros((1,) * table.tp.ndim)
    vector = ELEMENT_BYTES[job.precision] * model.hidden * tokens
    count = rounds.forward + rounds.backward
    split = count * collective_time("all_gather", vector, 1, route)
    whole = count / 2 * collective_time("all_reduce", vector, 1, route)
    exposed = np.where(table.sp == 1, split, whole) * job.program.tp_exposed
    return np.where(table.tp > 1, exposed, 0.0)


def _context_time(
    model: ModelSpec,
    job: Job,
    table: LayoutTable,
    route: Route,
    tokens: Floats,
    times: BlockTimes,
    overlap: float,
) -> Floats:
    """Exposed time of context parallelism in one block: a ring hides under attention, the others do not.

    A rank computes on one part of the keys while the next arrives: the last one hides nothing.
    """
    if (table.cp == 1).all():
        return np.zeros((1,) * table.cp.ndim)
    rounds, cp = context_rounds(table, job.precision), table.cp
    own = keys_and_values(model, job.precision, table, tokens)
    again = np.where(table.recompute > 0, 1.0 / table.recompute_every, 0.0)
    full = np.where(
        table.recompute == 2, again, 0.0
    )  # selective keeps what attention made, not what came round
    under, under_back = times.attention * (cp - 1) / cp, times.attention_backward * (cp - 1) / cp
    ahead = collective_time("send", rounds.forward * own * (cp - 1), rounds.forward * (cp - 1), route)
    back = collective_time("send", rounds.backward * own * (cp - 1), (1 + again) * (cp - 1) + cp, route)
    ring = beyond(ahead, under, overlap) + beyond(back, under_back + full * under, overlap)
    passes = rounds.forward + rounds.backward
    gathered = passes * collective_time("all_gather", own * cp, 1, route)
    traded = (
        4
        * rounds.trades
        * collective_time("all_to_all", traded_heads(model, job.precision, table, tokens) / 4, 1, route)
    )
    assert CONTEXT_KINDS == ("none", "ring", "all_gather", "ulysses")
    kind = table.cp_kind
    return np.where(kind == 0, 0.0, np.where(kind == 1, ring, np.where(kind == 2, gathered, traded)))


def _offload_time(
    model: ModelSpec, job: Job, device: Device, table: LayoutTable, times: BlockTimes, kind: Kind
) -> Floats:
    """What a block's saved tensors wait for on their way to the host and back, beside its computation."""
    moved = table.offload >= OFFLOAD_KINDS.index("activations")
    if not moved.any():
        return np.zeros((1,) * table.offload.ndim)
    tokens = table.micro_batch * job.seq / table.cp
    copy = block_kinds(model, job, table, kind).saved_bytes * tokens / device.host_bandwidth
    return np.where(moved, beyond(copy, times.forward, 1.0) + beyond(copy, times.backward, 1.0), 0.0)


def _ends(
    model: ModelSpec,
    job: Job,
    device: Device,
    table: LayoutTable,
    routes: Mapping[str, Route],
    work: Computation,
) -> tuple[Part, Part]:
    """Embedding and head: over tp, each passes one vector a token as a block's half does, an all-reduce or
    with sp a gather and a scatter; and the loss three sums, however many parts it is taken in."""
    vector = ELEMENT_BYTES[job.precision] * model.hidden * work.tokens
    loss = WIDE_BYTES[job.precision] * work.tokens
    split = 2 * collective_time("all_gather", vector, 1, routes["tp"])
    passed = np.where(table.sp == 1, split, collective_time("all_reduce", vector, 1, routes["tp"]))
    summed = 3 * collective_time("all_reduce", loss, 1, routes["tp"])
    chunks = table.loss_chunks
    embedding = embedding_times(model, job, device, work)
    some = work._replace(tokens=work.tokens / chunks)
    ahead, back = head_times(model, job, device, some)
    back = back + np.where(chunks > 1, logits_again(model, job, device, some), 0.0)
    head = Part(chunks * ahead, chunks * back, tp=passed + summed)
    return Part(embedding[0], embedding[1], tp=passed), head
