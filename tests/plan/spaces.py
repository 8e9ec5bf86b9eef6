"""What the tests of searching share: small models of several kinds, small devices, and all their layouts by
trying every number in every field."""

import math
from itertools import product

import numpy as np

from shardwright.axes import MESH_ORDERS
from shardwright.cluster import cluster_of
from shardwright.layout import (
    CONTEXT_KINDS,
    DISPATCH_KINDS,
    KEPT_BY_SELECTIVE,
    OFFLOAD_KINDS,
    SCHEDULE_NAMES,
    Layout,
    faults,
    model_faults,
)
from shardwright.model import ModelSpec, Moe
from shardwright.plan.memory import device_memory
from shardwright.plan.schedule import why_not
from shardwright.plan.space import CHUNKS, LOSS_CHUNKS, RECOMPUTED, SEARCHED_ORDERS
from shardwright.plan.splits import stage_layers
from shardwright.plan.step import step_time
from shardwright.plan.table import LayoutTable, table_of

SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_size=16, vocab=259
)
EXPERTS = SPEC.model_copy(
    update={"model_type": "qwen3_moe", "qk_norm": True, "moe": Moe(experts=4, top_k=2, ffn=48)}
)
"""Every layer has experts."""

MIXED = SPEC.model_copy(
    update={
        "model_type": "glm4_moe", "layers": 4,
        "moe": Moe(experts=4, top_k=2, ffn=32, shared_ffn=32, first_dense_layers=1),
    }
)  # fmt: skip
"""Shared experts beside the routed ones, and a first layer without any."""


def small_cluster(ranks, memory, per_node=4):
    """H100s of so little memory that small models are too large for some layouts."""
    cluster = cluster_of("h100-sxm", ranks, per_node)
    device = cluster.device.model_copy(update={"memory": memory, "context": 0, "communicator": 0})
    return cluster.model_copy(update={"device": device})


def alone(model, job, cluster, row):
    """Memory of the heaviest rank and time of a step, computed for a table of one layout."""
    device = device_memory(model, job, cluster.device, row)
    return float(device[0]), float(step_time(model, job, cluster, row).time[0])


def rows_of(table):
    """The columns of every row."""
    return list(zip(*(np.broadcast_to(column, table.shape).reshape(-1).tolist() for column in table)))  # noqa: B905


def every_layout(model, job, cluster):
    """The rows of all layouts that keep the rules and that a search tries."""
    plain = [
        layout
        for mesh in _every_mesh(cluster.ranks)
        for layout in _of_mesh(model, job, mesh)
        if not faults(layout, job, cluster) + model_faults(layout, model, job)
    ]
    rows = rows_of(table_of(plain, model.layers))
    recomputed = [({"none": 0, "selective": 1, "full": 2}[kind], k) for kind, k in RECOMPUTED]
    memory = product([pair for pair in recomputed if pair[1] < max(model.layers, 2)], LOSS_CHUNKS)
    choices = [
        {"recompute": kind, "recompute_every": k, "loss_chunks": chunks, "offload": offload}
        for ((kind, k), chunks), offload in product(memory, range(len(OFFLOAD_KINDS)))
        if not (
            k > 1 and "activations" in OFFLOAD_KINDS[offload]
        )  # what is offloaded need not be computed again
    ]
    return [tuple(LayoutTable(*row)._replace(**choice)) for row in rows for choice in choices]


def _every_mesh(ranks):
    degrees = range(1, ranks + 1)
    return [mesh for mesh in product(degrees, repeat=5) if math.prod(mesh) == ranks]


def _of_mesh(model, job, mesh):
    """Its layouts without recomputation, offload or parts of the loss."""
    pp, replicate, shard, cp, tp = mesh
    for micro_batch, m in product(range(1, job.global_batch + 1), repeat=2):
        if replicate * shard * micro_batch * m != job.global_batch:
            continue
        for sp, cp_kind, zero, pipeline, experts, order in product(
            {False, tp > 1}, CONTEXT_KINDS[1:] if cp > 1 else ["none"],
            [0] if shard * cp == 1 else [1, 2, 3] if pp == 1 else [1],
            _every_pipeline(pp, model.layers, m), _every_split_of_experts(model, mesh),
            SEARCHED_ORDERS if pp > 1 and replicate * shard > 1 else SEARCHED_ORDERS[:1],
        ):  # fmt: skip
            if experts[0] == 1 or tp == 1 or sp:
                yield Layout(
                    pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, sp=sp, cp_kind=cp_kind,
                    schedule=pipeline[0], chunks=pipeline[1], stage_layers=pipeline[2], zero_stage=zero,
                    micro_batch=micro_batch, microbatches=m, ep=experts[0], etp=experts[1],
                    dispatch=experts[2], order=MESH_ORDERS[order],
                )  # fmt: skip


def _every_pipeline(pp, layers, microbatches):
    """Schedule, chunks and layers of stages of every order that is tried."""
    if pp == 1:
        return {("none", 1, ())}
    found = set()
    for name in SCHEDULE_NAMES[1:]:
        for chunks in range(1, (layers + 2) // pp + 1):
            tried = chunks in CHUNKS.get(name, (chunks,)) and name != "DualPipe"
            if tried and why_not(name, pp, chunks, microbatches) is None:
                stages = pp * chunks
                if stages <= layers:
                    found.add((name, chunks, stage_layers(layers, stages)))
                if name == "Interleaved1F1B" and chunks > 1:
                    found.update(
                        (name, chunks, (0, *(n,) * (stages - 2), 0))
                        for n in (1, 2)
                        if n * (stages - 2) == layers
                    )  # embedding and head alone
                if layers // stages > 1:
                    found.add((name, chunks, stage_layers(layers, stages, 1)))
    return found


def _every_split_of_experts(model, mesh):
    """ep, etp and dispatch."""
    if model.moe is None:
        return [(1, 1, "all_to_all")]
    _, _, shard, cp, tp = mesh
    return [
        (ep, etp, dispatch)
        for ep, etp in product(range(1, model.moe.experts + 1), {1, tp})
        for dispatch in (DISPATCH_KINDS if ep > 1 else DISPATCH_KINDS[:1])
        if shard * cp * tp % (ep * etp) == 0
    ]


def recomputed_layout(recompute, **fields):
    """A layout with what goes with its recomputation."""
    kept = KEPT_BY_SELECTIVE if recompute == "selective" else ()
    return Layout(recompute=recompute, kept=kept, **fields)
