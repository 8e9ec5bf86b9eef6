"""A real step over gloo holds and sends what its dry run does, tensors in flight included."""

import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo import MODELS
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.check.dryrun import dry_run
from shardwright.check.in_flight import held_in_flight
from shardwright.check.real import check_small, real_run
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.run import pp
from shardwright.units import GiB

PEAK = 0.01
"""Largest relative difference of the peaks. Seen to be equal to the byte but for views of a few KB."""

SMALLEST = 15e6
"""Peaks below it [B] prove little: what kernels use for themselves would show."""

WIDER = {"layers": 4, "hidden": 256, "ffn": 512, "heads": 8, "kv_heads": 4, "head_size": 32, "vocab": 2048}
INTERLEAVED = {"pp": 2, "chunks": 2, "schedule": "Interleaved1F1B"}
SP, RING = {"tp": 2, "sp": True}, {"cp": 2, "cp_kind": "ring"}

CASES = {
    "base": [
        SP | {"dp_replicate": 2},
        {"cp": 2, "cp_kind": "all_gather", "dp_shard": 2},
        {"pp": 4, "schedule": "1F1B"},
        {"pp": 2, "schedule": "GPipe", "dp_shard": 2},
        INTERLEAVED | SP,
        INTERLEAVED | RING | {"recompute": "full"},
        {"pp": 2, "chunks": 2, "schedule": "ZBVZeroBubble"},
        {"pp": 2, "chunks": 2, "schedule": "DualPipeV", "microbatches": 4},
    ],
    "experts": [{"ep": 2, "dp_shard": 2, "pp": 2, "schedule": "1F1B"}],
}


def layout_of(fields):
    shard, pp = fields.get("dp_shard", 1) * fields.get("cp", 1), fields.get("pp", 1)
    values = {"micro_batch": 1, "microbatches": pp}
    values["zero_stage"] = 0 if shard == 1 else 1 if pp > 1 else 3
    if pp > 1:
        parts = np.array_split(np.arange(WIDER["layers"]), pp * fields.get("chunks", 1))
        values["stage_layers"] = tuple(len(part) for part in parts)
    return Layout(**values | fields)


ROWS = [(name, layout_of(fields)) for name, cases in CASES.items() for fields in cases]


@pytest.mark.parametrize(("name", "layout"), ROWS, ids=[f"{name} {layout.label}" for name, layout in ROWS])
def test_real_equals_fake(name, layout):
    spec = MODELS[name]
    moe = None if spec.moe is None else spec.moe.model_copy(update={"ffn": 128})
    spec = spec.model_copy(update=WIDER | {"moe": moe})
    batch = layout.dp * layout.micro_batch * layout.microbatches
    job = Job(seq=64, global_batch=batch, precision="fp32", expert_imbalance=1.0)
    steps = real_run(spec, job, layout)
    for rank in (0, layout.ranks - 1):
        dry, executed = dry_run(spec, job, layout, rank, as_gloo=True), steps[rank].execution
        assert executed.peak > SMALLEST
        assert executed.at_rest == dry.at_rest
        assert executed.traffic == dry.traffic
        assert executed.peak == pytest.approx(dry.peak, rel=PEAK)
        assert executed.at_peak == pytest.approx(dry.at_peak, abs=PEAK * dry.peak)


def test_what_is_in_flight_is_a_border_a_stage_and_would_be_every_send(monkeypatch):
    """In whole tensors of the size of a border: beyond what is held anyway, and if torch kept all sends."""
    layout = layout_of(INTERLEAVED | {"microbatches": 6})
    spec = MODELS["base"].model_copy(update=WIDER)
    job = Job(seq=64, global_batch=6, precision="fp32")
    border = job.seq * spec.hidden * 4
    ours = dry_run(spec, job, layout, as_gloo=True).peak
    in_flight, rest = divmod(ours - dry_run(spec, job, layout, whole=True).peak, border)
    assert (in_flight, rest) == (1, 0)
    monkeypatch.setattr(pp, "Outbox", lambda: None)
    kept, rest = divmod(dry_run(spec, job, layout, as_gloo=True).peak - ours, border)
    assert (kept >= layout.microbatches / 2, rest) == (True, 0)


def test_a_work_holds_its_tensor():
    """A rank sends to itself, so to say: the fake group's works are all that is looked at."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with held_in_flight():
            tensor = torch.ones(3)
            gone = weakref.ref(tensor.untyped_storage())
            (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])
            del tensor
            assert gone() is not None
            del work
            assert gone() is None
    finally:
        dist.destroy_process_group()


def test_torch_is_as_it_was():
    before = dist.isend, dist.irecv
    with held_in_flight():
        assert dist.isend is not before[0]
    assert (dist.isend, dist.irecv) == before


def test_a_large_layout_is_not_run_for_real():
    with pytest.raises(LayoutError, match=r"layout has 64 ranks, a real step runs on at most 16"):
        check_small(Layout(dp_shard=64, zero_stage=3), 1.0, GiB)
    with pytest.raises(LayoutError, match=r"2 ranks hold 2.00 GiB, this machine has 1.00 GiB"):
        check_small(Layout(dp_shard=2, zero_stage=3), GiB, GiB)
