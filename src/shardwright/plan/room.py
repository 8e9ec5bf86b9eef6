"""What layouts take of a device at least: a few terms of the ledger, soon worked out, so that a search leaves
alone what is sure not to fit.

At every moment a rank has its parameters, its optimizer state and, on devices with pools, the memory of its
reduced gradients. At the head's backward pass, or in the block where a pipeline's rank has most microbatches
in flight, it has besides gathered parameters in the stages below 3, what its blocks have saved, and gradients
that wait for the last microbatch (plan/moments.py).
"""

from typing import NamedTuple

import numpy as np

from shardwright.cluster import Device
from shardwright.job import Job
from shardwright.layout import OFFLOAD_KINDS
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES
from shardwright.plan.held_units import held_units
from shardwright.plan.memory import RankStates, has_pools
from shardwright.plan.moments import model_blocks
from shardwright.plan.params import BLOCK
from shardwright.plan.shards import EXPERT_BLOCK, EXPERTS
from shardwright.plan.space import DATA, GRID_AXES, ORDER
from shardwright.plan.stages import Stage
from shardwright.plan.table import Floats, LayoutTable, added


class Room(NamedTuple):
    """Bytes of a device that layouts of a grid take at least: ``resting`` by how the data axes split,
    whatever is kept of a microbatch, with optimizer state on the device and with it on the host; and with
    what is kept, however they split, as ``whole``."""

    resting: tuple[Floats, Floats]
    whole: Floats


def least_room(model: ModelSpec, job: Job, device: Device, table: LayoutTable, ranks: RankStates) -> Room:
    """Of every layout of a grid; ``memory.device_memory`` is never less."""
    stage, parameters, optimizer, units, communicators = ranks
    held, blocks = held_units(table, stage), (BLOCK, EXPERT_BLOCK, EXPERTS)
    gathered = added(*(held[kind] * units[kind].gathered for kind in units))
    pool = added(*(held[kind] * units[kind].shard for kind in units)) if has_pools(device) else 0.0
    rests = added(parameters, pool, np.where(table.zero_stage < 3, gathered, 0.0))
    both = [np.where(stage.valid, part, -np.inf) for part in (rests + optimizer, rests)]
    here, away = (_of_any_split(part) for part in both)
    kept = np.where(table.offload & 1, away, here)
    if (table.pp > 1).all():
        waiting = added(*(held[kind] * units[kind].whole for kind in blocks))
        whole = _in_flight(model, job, table, stage, kept, kept + waiting)
    else:
        whole = (kept + _at_the_head(model, job, table, stage))[0]
    beside, scale = communicators + float(device.context), 1 + device.allocator_margin
    resting = (scale * both[0].max(axis=0) + beside, scale * both[1].max(axis=0) + beside)
    return Room(resting, scale * whole + _of_any_split(beside))


def _of_any_split(part: Floats) -> Floats:
    """The least of any way in which the data axes split and lie."""
    return np.asarray(part.min(axis=(ORDER - GRID_AXES, DATA - GRID_AXES), keepdims=True))


def _in_flight(
    model: ModelSpec, job: Job, table: LayoutTable, stage: Stage, first: Floats, steady: Floats
) -> Floats:
    """A rank of a pipeline with most microbatches in flight: before it has gradients, beside ``first``, or
    when all its stages have, beside ``steady``."""
    tokens = table.micro_batch * job.seq / table.cp
    output = ELEMENT_BYTES[job.precision] * model.hidden * tokens / np.where(table.sp == 1, table.tp, 1)
    passed = (stage.stages - stage.head) * output
    saved = np.broadcast_to(_saved(model, job, table, stage), (len(stage.valid), *_cells_of(table)))
    most = np.full(saved.shape[1:], -np.inf)
    held = np.empty_like(most)
    for in_flight, beside in ((stage.flight.first, first), (stage.flight.steady, steady)):
        blocks, others = (in_flight * stage.blocks - 1) * tokens, in_flight * passed + beside
        for rank in range(len(saved)):  # of one rank at a time, columns stay in the caches
            np.multiply(_of_rank(blocks, rank), saved[rank], out=held)
            held += _of_rank(others, rank)
            np.maximum(most, held, out=most)
    return most


def _of_rank(part: Floats, rank: int) -> Floats:
    return np.asarray(part[rank if len(part) > 1 else 0])


def _cells_of(table: LayoutTable) -> tuple[int, ...]:
    """The shape of a table whose order of the mesh and data axes are left out."""
    return tuple(1 if axis in (ORDER, DATA) else n for axis, n in enumerate(table.shape))


def _at_the_head(model: ModelSpec, job: Job, table: LayoutTable, stage: Stage) -> Floats:
    """What a rank without a pipeline has of a microbatch when it makes the gradients of the head."""
    tokens = table.micro_batch * job.seq / table.cp
    logits = (
        np.ceil(tokens / table.loss_chunks) * np.ceil(model.vocab / table.tp) * ELEMENT_BYTES[job.precision]
    )
    return np.asarray(stage.blocks * tokens * _saved(model, job, table, stage) + logits)


def _saved(model: ModelSpec, job: Job, table: LayoutTable, stage: Stage) -> Floats:
    """Kept on the device by a block of a rank for each token, the mean; nothing where it is offloaded."""
    kinds = model_blocks(model, job, table)
    saved = added(*(own.saved_bytes for own in kinds.values()))
    if len(kinds) > 1:
        share = stage.expert_blocks / stage.blocks
        saved = (1 - share) * kinds["dense"].saved_bytes + share * kinds["experts"].saved_bytes
    return np.where(table.offload < OFFLOAD_KINDS.index("activations"), saved, 0.0)
