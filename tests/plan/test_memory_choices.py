"""Memory of what is offloaded, recomputed in part, trained by adapters, or shared out as experts."""

from itertools import product

import numpy as np
import pytest
from spaces import EXPERTS, MIXED, SPEC, rows_of
from test_memory import H100, job_of, layout_of, ledger_of

from shardwright.job import Job
from shardwright.model import preset
from shardwright.plan.activations import block_activations
from shardwright.plan.memory import device_memory
from shardwright.plan.moments import in_two_passes, timeline
from shardwright.plan.params import parameter_table
from shardwright.plan.shards import EXPERTS as EXPERT_UNIT
from shardwright.plan.shards import unit_elements, unit_tensors
from shardwright.plan.space import search_space
from shardwright.plan.table import LayoutTable, table_of

LONG = job_of(seq=8192)

# Ways to hold less


WHERE = ("recompute", "recompute_every", "loss_chunks", "offload")
"""Columns of what is kept, and where."""


def whole_space(model, job, ranks=4):
    """Every layout of the space, the bytes of a device, and rows by what is kept where, of each mesh."""
    table = search_space(model, job, ranks).flat()
    found: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    for row, values in enumerate(rows_of(table)):
        one = dict(zip(LayoutTable._fields, values, strict=True))
        where = tuple(one.pop(name) for name in WHERE)
        found.setdefault(tuple(one.values()), {})[where] = row
    return table, device_memory(model, job, H100, table), list(found.values())


SAME = 1 + 2e-3

MADE_AGAIN = 1 + 6e-3
"""In two passes apart: the one for weights makes a block again beside what waits for it, while the other
blocks in flight keep all they did."""

KINDS_OF_MODELS = [*(model.model_copy(update={"layers": 3}) for model in (SPEC, EXPERTS)), MIXED]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", KINDS_OF_MODELS, ids=["dense", "experts", "mixed"])
def test_offload_parts_of_the_loss_and_recomputation_never_take_memory(model, precision):
    """Of every second layer recomputed, a mean block's saved tensors lie between; the peak may be a moment of
    a single block, which recomputes or not. Which flight of a pipeline is the fullest is decided without the
    buffers of a moment."""
    table, device, meshes = whole_space(model, Job(seq=512, global_batch=4, precision=precision))
    assert len(meshes) > 100
    apart = in_two_passes(table)
    for rows in meshes:
        for (recompute, every, chunks, offload), row in rows.items():
            less = [rows[recompute, every, 8, offload], rows[recompute, every, chunks, offload | 1]]
            if every == 1:  # what is offloaded is not recomputed by halves
                less.append(rows[recompute, every, chunks, offload | 2])
            assert all(device[each] <= device[row] * SAME for each in less)
        for chunks, offload in product((1, 8), (0, 1)):
            none, half, full = (device[rows[(*kind, chunks, offload)]] for kind in ((0, 1), (2, 2), (2, 1)))
            assert full <= half * SAME
            assert half <= none * (MADE_AGAIN if apart[rows[2, 2, chunks, offload]] else SAME)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_the_optimizer_on_the_host_takes_nothing_of_the_device(name):
    model, layout = preset(name), layout_of(8)
    here = ledger_of(model, LONG, layout)
    away = ledger_of(model, LONG, layout.model_copy(update={"offload": "optimizer"}))
    assert here.optimizer > 0 == away.optimizer
    assert (here.parameters, here.gradients) == (away.parameters, away.gradients)
    assert here.allocated - away.allocated == here.optimizer


def test_activations_on_the_host_leave_those_of_two_blocks():
    """The block at work and the one on its way."""
    model = preset("llama-3.1-8b")
    here, away = (
        ledger_of(model, LONG, layout_of(8).model_copy(update={"offload": offload}))
        for offload in ("none", "activations")
    )
    saved = block_activations(model, LONG, "none").saved_bytes * LONG.seq
    assert here.at_peak.activations - away.at_peak.activations == pytest.approx(30 * saved, rel=0.05)


@pytest.mark.parametrize("chunks", [2, 8, 64])
def test_a_loss_in_parts_has_logits_of_one_part(chunks):
    model = preset("llama-3.1-8b")
    rows = [layout_of(8, recompute="full"), layout_of(8, recompute="full").model_copy(
        update={"loss_chunks": chunks})]  # fmt: skip
    table = table_of(rows, model.layers)
    stage = ledger_of(model, LONG, *rows).stage
    whole, parts = np.max([held.logits for _, _, held in timeline(model, LONG, table, stage)], axis=0)
    assert parts == pytest.approx(whole / chunks, rel=1e-3)


@pytest.mark.parametrize("model", KINDS_OF_MODELS, ids=["dense", "experts", "mixed"])
def test_fp8_holds_what_bf16_holds(model):
    """Inputs are saved in bf16, state and gathered parameters are the same."""
    table = search_space(model, Job(seq=64, global_batch=2), 2).flat()
    bf16, fp8 = (
        device_memory(model, Job(seq=64, global_batch=2, precision=precision), H100, table)
        for precision in ("bf16", "fp8")
    )
    assert (bf16 == fp8).all()


# LoRA


def lora(rank=16, targets=("query", "value"), **others):
    return job_of(seq=4096, lora_rank=rank, lora_targets=targets, **others)


@pytest.mark.parametrize(
    ("targets", "each"),
    [(("query",), 4096 + 4096), (("query", "value"), 2 * 4096 + 4096 + 1024),
     (("gate", "up", "down"), 3 * (4096 + 14336)), (("key", "out"), 4096 + 1024 + 2 * 4096)],
)  # fmt: skip
@pytest.mark.parametrize("rank", [1, 16])
def test_lora_trains_its_adapters_alone(rank, targets, each):
    """r (inputs + outputs) of every matrix that has one, arXiv:2106.09685, section 4.1; gradient and two
    moments in fp32. The others rest frozen in bf16."""
    model, job = preset("llama-3.1-8b"), lora(rank, targets)
    found = ledger_of(model, job, layout_of())
    adapters = 32 * rank * each
    frozen = parameter_table(model).parameters
    assert parameter_table(model, job.adapters).parameters == frozen + adapters
    assert found.gradients == 4 * adapters
    assert found.optimizer == 8 * adapters
    assert found.parameters == 4 * adapters + 2 * frozen


@pytest.mark.parametrize(("bits", "each"), [(16, 2.0), (8, 1.0), (4, 0.5 + 0.127 / 8)])
def test_a_frozen_base_of_few_bits(bits, each):
    """Matrices, norms stay in bf16; 4 bits with their scales: arXiv:2305.14314, section 3."""
    model = preset("llama-3.1-8b")
    found = ledger_of(model, lora(base_bits=bits), layout_of())
    norms = 65 * 4096
    frozen = each * (parameter_table(model).parameters - norms) + 2 * norms
    adapters = 32 * 16 * (2 * 4096 + 4096 + 1024)
    assert found.parameters == pytest.approx(frozen + 4 * adapters, rel=1e-12)


def test_experts_have_adapters_each():
    model = EXPERTS
    job = job_of(lora_rank=2, lora_targets=("gate", "up", "down"))
    found = ledger_of(model, job, layout_of())
    experts = model.layers * model.moe.experts
    fused = 2 * (64 + 2 * 48) + 2 * (48 + 64)  # gate and up are one matrix
    assert found.gradients == 4 * experts * fused


# Experts


@pytest.mark.parametrize("model", [EXPERTS, MIXED], ids=["experts", "mixed"])
def test_expert_shards_sum_to_at_least_the_whole(model):
    """Over ep, etp and the ranks left over; rows are rounded up as FSDP pads them."""
    table = search_space(model, Job(seq=64, global_batch=8), 8).flat()
    units = unit_elements(model, table)
    whole = sum(tensor.numel for tensor in unit_tensors(model)[EXPERT_UNIT])
    held = units[EXPERT_UNIT].shard * table.ep * table.etp * table.expert_shard
    assert (held >= whole).all()
    assert (units[EXPERT_UNIT].whole * table.ep * table.etp >= whole).all()
    alone = (table.ep == 1) & (table.etp == 1) & (table.expert_shard == 1)
    assert (np.broadcast_to(held, table.shape)[alone] == whole).all()
