"""What a pipeline rank holds of FSDP's at a point of a step: gathered parameters, waiting gradients, buffers.

Which units are gathered, whose gradients wait unreduced, and which buffers live follows the runtime
(run/step.py, run/dp.py) and torch's ``fully_shard``, torch/distributed/fsdp/_fully_shard of torch 2.13
(_fsdp_param_group.py, _fsdp_collectives.py). plan/rank_moments.py puts it together moment by moment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Job
from shardwright.layout import OFFLOAD_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import (
    ELEMENT_BYTES,
    WIDE_BYTES,
    rotary_table_bytes,
)
from shardwright.plan.amounts import (
    Amounts,
    block_amounts,
    experts_apart,
    gathered_ahead,
    gathered_ahead_of_head,
    held_of,
    joined,
)
from shardwright.plan.flights import NOTHING_ELSE, Flight, Kept, More, Tail, flights_at, remaining, tails
from shardwright.plan.params import EMBEDDING, HEAD
from shardwright.plan.shards import (
    EXPERTS,
    TIED,
)
from shardwright.plan.stages import Stage
from shardwright.plan.table import Floats, Ints, LayoutTable, added


def token_bytes(job: Job) -> int:
    """Of every token of a step [B]: its id, its target and, where documents are packed, its document, int64
    each."""
    return 8 * (2 if job.packing == "windows" else 3)


class Held(NamedTuple):
    """Bytes by kind at one moment, besides parameters and optimizer state."""

    gradients: Floats
    activations: Floats
    logits: Floats
    gathered: Floats

    @property
    def total(self) -> Floats:
        """Sum of the kinds, small columns first."""
        return added(*self)


class HeldParts(NamedTuple):
    """The same with what is gathered in two: ``gathered`` follows from how state is split, ``waiting`` may
    depend on the microbatch: gradients that are to be reduced, and those just made."""

    gradients: Floats
    activations: Floats
    logits: Floats
    gathered: Floats
    waiting: Floats

    @property
    def held(self) -> Held:
        """By kind."""
        return Held(self.gradients, self.activations, self.logits, added(self.gathered, self.waiting))


class Means(NamedTuple):
    """What a block of a rank keeps, the mean; in two passes apart what ``waits`` for the weights' one, what
    that has ``left`` of a block, and the ``most`` that any has in the inputs' one besides what it keeps
    [B for each token]."""

    saved: Floats
    waits: Floats
    left: Floats
    most: Floats


@dataclass(frozen=True)
class RankStep:
    """Columns and sizes of one pipeline rank from which every moment is computed.

    ``block`` is the largest block, ``mean`` the mean one: they differ where some blocks have experts.
    """

    table: LayoutTable
    layers: Floats  # blocks of the rank
    tied: bool
    opens: NDArray[np.bool_]  # has the first stage
    embedding: Amounts
    block: Amounts
    mean: Amounts
    experts: Amounts  # of that block, as a group of parameters of its own; 0 where they are in the block's
    ahead: Floats  # gathered of the block whose backward comes next, while another's runs
    ahead_of_head: Floats  # the same while the head's runs
    head: Amounts
    tokens: Floats  # of a microbatch on a rank
    saved: Floats  # of one block, the mean
    resident: NDArray[np.bool_]  # saved tensors stay on the device
    flights: Sequence[Flight]  # of a pipeline: what else is there at the points that may be its fullest
    head_flights: Sequence[Flight]  # the same, while the head is at work
    apart_flights: Sequence[Flight]  # the same, in one of two passes apart
    flight: Flight  # the one looked at
    reducing: Floats  # of microbatches in flight when the gradients of a first stage are reduced
    reduced: Floats  # ``past`` at that time
    left_over: Floats  # share of stages with gradients not added up at that time
    stages: Floats
    apart: Floats  # microbatches of which only the gradients of weights are to come
    tails: Sequence[Tail]  # points where no forward pass is left
    apart_bytes: Floats  # of a block that makes the gradients of its inputs alone, besides what it keeps
    settled: Floats  # passes for inputs find gradients of their block in both types
    begun: Floats  # the same of the first of a turn
    waits: Floats  # gradients of outputs that a block leaves then, for each token
    left: Floats  # what a pass for weights leaves of a block, for each token
    own_inputs: Floats  # share of its stages whose input is not another's output here
    ids: Floats  # token ids and targets of a step
    tables: Floats  # rotary, one pair for all layers of a stage
    residual: Floats  # bytes of one vector of the residual stream
    normed: float  # bytes of what the head reads
    rstd: Floats
    wide: float  # bytes of one statistic
    vocab: Floats  # bytes of one row of logits
    loss_tokens: Floats  # of one part of a microbatch that the loss takes at once
    merges: bool  # gradients add to an older one at once: no wider type to reduce in
    tied_gradient: Floats | float  # of a tied matrix from the head: held until the embedding's is there

    @property
    def inputs(self) -> Floats:
        """Token ids and rotary tables, held until the first layer's backward pass is over; and what the other
        microbatches in flight keep."""
        return self.ids + self.tables + self.flight.others

    def kept(self, blocks: Floats) -> Floats:
        """Saved tensors of the present microbatch on the device, of so many blocks before the one at work."""
        return kept_blocks(blocks, self.resident) * self.saved

    def kept_at_head(self) -> Floats:
        """The same of all blocks while the head is at work: what is offloaded is down then."""
        return np.where(self.resident, self.layers * self.saved, 0.0)


OFFLOADED_BLOCKS = 2
"""Blocks whose saved tensors are on the device although they rest on the host: the one at work and the one
on its way; run/activation_offload.py sees to it."""


def kept_blocks(blocks: Floats, resident: NDArray[np.bool_]) -> Floats:
    """Blocks before the one at work of which the saved tensors are on the device: all, or the next one."""
    if resident.all():
        return blocks
    return np.where(resident, blocks, np.minimum(blocks, OFFLOADED_BLOCKS - 1))


def rank_step(
    model: ModelSpec,
    job: Job,
    table: LayoutTable,
    units: Mapping[str, Amounts],
    means: Means,
    stage: Stage,
    more: More | None = None,
) -> RankStep:
    """``units``: bytes of one unit of each kind; ``more``: of a rank whose stages are unlike."""
    element, wide = ELEMENT_BYTES[job.precision], WIDE_BYTES[job.precision]
    tokens = table.micro_batch * job.seq / table.cp
    saved = means.saved * tokens
    by_sequence = np.where(table.sp == 1, table.tp, 1)
    residual = element * model.hidden / by_sequence
    resident = table.offload < OFFLOAD_KINDS.index("activations")
    tied, embedding = model.tied_embeddings, units[EMBEDDING]
    if tied and (table.pp > 1).any():  # two matrices
        tied, embedding = False, joined(units[TIED], embedding)
    block, mean = block_amounts(units, model, stage)
    experts = experts_apart(units[EXPERTS], table, stage)
    ahead = gathered_ahead(block, units[EXPERTS], table, stage)
    vocab = stage.head * np.ceil(model.vocab / table.tp) * element
    tables = stage.stages * rotary_table_bytes(model, job.seq, job.precision) / table.cp
    rstd, normed = wide / by_sequence, element * model.hidden
    kept = Kept(
        blocks=tables
        + (
            stage.blocks * saved
            if resident.all()
            else np.where(resident, stage.blocks * saved, (1 - stage.embedding) * residual * tokens)
        ),
        output=residual * tokens,
        head=(residual + normed + rstd) * tokens,
        logits=np.where(table.loss_chunks == 1, vocab * tokens, 0.0),
        waits=(stage.blocks * means.waits + (stage.stages - stage.flight.turn) * residual) * tokens,
        gradients=stage.blocks * mean.whole,
        slack=stage.head * (units[HEAD].whole + units[HEAD].fresh) + stage.blocks * mean.fresh,
    )
    at_block, at_head, apart = flights_at(stage, kept, more and more.of_tokens(tokens))
    return RankStep(
        table=table,
        layers=stage.blocks,
        tied=tied,
        opens=stage.embedding > 0,
        embedding=held_of(embedding, stage.embedding),
        block=block,
        mean=mean,
        experts=experts,
        ahead=ahead,
        ahead_of_head=gathered_ahead_of_head(ahead, experts, table),
        head=held_of(units[HEAD], stage.head),
        tokens=tokens,
        saved=saved,
        resident=resident,
        flights=at_block,
        head_flights=at_head,
        apart_flights=apart,
        flight=NOTHING_ELSE,
        reducing=remaining(stage, kept, more and more.of_tokens(tokens)),
        reduced=stage.flight.reduced,
        left_over=stage.flight.left,
        stages=stage.stages,
        apart=np.where((stage.stages == 1) & (stage.embedding > 0), 0.0, stage.flight.apart),
        tails=tails(stage, kept),
        apart_bytes=means.most if more is None else more.most,
        settled=stage.flight.settled,
        begun=stage.flight.begun,
        waits=means.waits,
        left=means.left,
        own_inputs=1 - stage.flight.turn / stage.stages,
        ids=token_bytes(job) * tokens * table.microbatches,
        tables=tables,
        residual=residual,
        normed=normed,
        rstd=rstd,
        wide=wide,
        vocab=vocab,
        loss_tokens=np.ceil(tokens / table.loss_chunks),
        merges=job.precision not in ("bf16", "fp8"),
        tied_gradient=element * np.ceil(model.vocab / table.tp) * model.hidden if tied else 0.0,
    )


class Role(NamedTuple):
    """A microbatch by its place in the step, as columns."""

    name: str
    valid: NDArray[np.bool_]
    first: NDArray[np.bool_]  # parameters are gathered in its forward pass
    last: bool
    older: NDArray[np.bool_]  # an earlier microbatch has left gradients


class Open(NamedTuple):
    """Units that are not yet through their backward pass: so many blocks, perhaps the head. The embedding,
    last of all, always counts as open."""

    blocks: Floats
    head: bool


PIPELINE = "pipeline"
"""The one microbatch that is looked at in a pipeline, with others in flight."""


def roles_of(table: LayoutTable) -> tuple[Role, ...]:
    """The microbatches of a step that differ in what is held."""
    m, alone = table.microbatches, table.pp == 1
    return (
        Role("first microbatch", (m >= 2) & alone, m >= 2, False, m < 0),
        Role("middle microbatch", (m >= 3) & alone, m < 0, False, m >= 0),
        Role("last microbatch", alone, m == 1, True, m >= 2),
        Role(PIPELINE, ~alone, m < 0, False, m >= 0),
    )


def reduces(step: RankStep, role: Role) -> NDArray[np.bool_]:
    """Rows that reduce gradients in this microbatch."""
    return np.asarray(role.last | (step.table.zero_stage >= 2))


def merges_at_once(step: RankStep, role: Role) -> NDArray[np.bool_]:
    """Rows whose fresh gradients are added at once to older ones of the same type."""
    return np.asarray(step.merges & role.older & (step.table.zero_stage <= 1))


def resident(step: RankStep, role: Role, still: Open) -> Floats:
    """Gathered parameters of stages 0 to 2: all, until each unit's backward in the last microbatch."""
    blocks, head = (still.blocks, still.head) if role.last else (step.layers, True)
    held = step.embedding.gathered + blocks * step.mean.gathered + (step.head.gathered if head else 0.0)
    return np.asarray(held)


def gathered_parameters(step: RankStep, role: Role, still: Open, stage3: Floats | float) -> Floats:
    """Gathered parameters: ``stage3`` in stage 3, the resident ones in the others."""
    return np.where(step.table.zero_stage == 3, stage3, resident(step, role, still))


def reduced_shards(step: RankStep, role: Role, still: Open) -> Floats:
    """Reduced gradients: those of units done, or all where an earlier microbatch was reduced too."""
    if not role.last and not (step.table.zero_stage >= 2).any():
        return np.zeros((1,) * step.table.pp.ndim)
    done = (step.layers - still.blocks) * step.mean.shard + (0.0 if still.head else step.head.shard)
    every = step.embedding.shard + step.layers * step.mean.shard + step.head.shard
    made = done if role.last else 0.0
    return np.where(step.table.zero_stage >= 2, np.where(role.older, every, done), made)


def pooled_gradients(step: RankStep) -> Floats:
    """Memory that the reduced gradients of a rank take all through a step, once they have been made.

    ``foreach_reduce`` allocates them on the stream of reductions, and the caching allocator of an accelerator
    has a pool for each stream: what they leave, no activation takes.
    """
    return np.asarray(step.embedding.shard + step.layers * step.mean.shard + step.head.shard)


def waiting_gradients(step: RankStep, role: Role, still: Open) -> Floats:
    """Whole gradients that wait for the last microbatch, in stages 0 and 1."""
    not_done = (
        step.embedding.whole + still.blocks * step.mean.whole + (step.head.whole if still.head else 0.0)
    )
    every = step.embedding.whole + step.layers * step.mean.whole + step.head.whole
    if role.last:
        waiting = np.where(role.older, not_done, 0.0)
    else:
        earlier = every
        if role.name == PIPELINE:
            blocks = step.flight.past * step.layers * step.mean.whole
            earlier = np.where(step.flight.past == 1, step.embedding.whole, 0.0) + blocks + step.head.whole
        waiting = np.where(role.older, earlier, every - not_done)
    whole = step.table.zero_stage <= 1
    return waiting if whole.all() else np.where(whole, waiting, 0.0)


def reduction_buffers(step: RankStep, role: Role, unit: Amounts) -> Floats:
    """Buffers while a unit's gradients are reduced; those that wait for the last microbatch are widened or
    added."""
    added = np.where(role.older, np.where(merges_at_once(step, role), 0.0, unit.fresh), unit.whole)
    return np.where(reduces(step, role), _reduction(step, role, unit, step.table.shard), added)


def block_reduction_buffers(step: RankStep, role: Role) -> Floats:
    """The same of the largest block: where its experts are a group of their own, they come first, while the
    rest's gradients wait."""
    joined = reduction_buffers(step, role, step.block)
    if not step.experts.gathered.any():
        return joined
    rest = rest_of_block(step)
    first = _reduction(step, role, step.experts, step.table.expert_shard) + _source(step, role, rest)
    made = np.where(role.older & (step.table.zero_stage >= 2), 0.0, step.experts.shard)
    then = _reduction(step, role, rest, step.table.shard) + made
    return np.where(reduces(step, role) & (step.experts.gathered > 0), np.maximum(first, then), joined)


def rest_of_block(step: RankStep) -> Amounts:
    """What is reduced last of the largest block: all of it, or what is not experts."""
    return step.block.less(step.experts)


def _reduction(step: RankStep, role: Role, unit: Amounts, degree: Ints) -> Floats:
    """The input, and either the gradients it is made from, or the reduced shard with the unit's last gradient
    (a loop variable of ``foreach_reduce`` holds it); a single rank copies the input once more instead."""
    source = _source(step, role, unit)
    beside = np.where(degree == 1, unit.reduce_input, source * unit.last_share)
    return unit.reduce_input + np.maximum(source, beside + unit.shard)


def _source(step: RankStep, role: Role, unit: Amounts) -> Floats:
    """Gradients that a unit's reduction starts from."""
    return np.where(role.older & (step.table.zero_stage <= 1), unit.whole, unit.fresh)
