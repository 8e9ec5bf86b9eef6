"""The meter: a real step over gloo against its dry run, the life of storages, and nothing left behind."""

import contextlib
import gc

import pytest
import torch
from gloo import MODELS, RaggedBatches, job_of, layout_of, torch_batches
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

from shardwright.check.dryrun import dry_run
from shardwright.run.init import initialise
from shardwright.run.launch import run_ranks
from shardwright.run.mesh import build_mesh
from shardwright.run.meter import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    KINDS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    MemoryMeter,
)
from shardwright.run.step import Stepper, parallel_model

LARGER = MODELS["base"].model_copy(update={"hidden": 128, "ffn": 256, "vocab": 512})
"""Large enough that what kernels use for themselves is small beside it."""


def stepper_of(spec, job, layout):
    mesh = build_mesh(layout, "cpu")
    model = parallel_model(spec, job, layout, mesh)
    initialise(model, job.seed, torch.device("cpu"))
    return Stepper(model, job, layout, mesh)


def microbatches(stepper, index):
    rank = stepper.mesh.data.get_local_rank()
    batches = RaggedBatches(stepper.model.spec.vocab, stepper.job.seq)
    samples = torch_batches(batches, index, stepper.layout, rank)
    return [(tokens.clone(), targets.clone()) for tokens, targets in samples]


def metered_step(spec, job, layout):
    """What a rank's meter shows of its second step; runs under ``run_ranks``."""
    stepper = stepper_of(spec, job, layout)
    stepper.step(0, microbatches(stepper, 0))
    meter = MemoryMeter(stepper.model, stepper.optimizer, stepper.mesh)
    stepper.optimizer.register_step_pre_hook(lambda *_: meter.settle())
    with meter:
        stepper.step(1, microbatches(stepper, 1))
    return meter.at_rest, meter.peak, meter.at_peak, meter.traffic


PLANS = {
    "zero3": (layout_of(1, 2, 3, 2), {}),
    "zero3_full": (layout_of(1, 2, 3, 1, recompute="full"), {}),
    "zero3_selective": (layout_of(1, 2, 3, 2, recompute="selective"), {}),
    "zero2": (layout_of(1, 2, 2, 3), {}),
    "zero1": (layout_of(1, 2, 1, 3), {}),
    "replicas": (layout_of(2, 1, 0, 2), {}),
    "tied": (layout_of(1, 2, 3, 2), {"tied_embeddings": True}),
    "qk_norm_and_biases": (layout_of(1, 2, 1, 2), {"qk_norm": True, "qkv_bias": True, "mlp_bias": True}),
    "uneven": (layout_of(1, 2, 3, 1), {"vocab": 511}),
}


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_real_step_holds_and_sends_what_its_dry_run_does(plan, precision):
    layout, changes = PLANS[plan]
    spec = LARGER.model_copy(update=changes)
    job = job_of(layout.dp * 2 * layout.microbatches, precision, seq=64)
    dry = dry_run(spec, job, layout)
    for at_rest, peak, at_peak, traffic in run_ranks(metered_step, 2, spec, job, layout):
        assert at_rest == dry.at_rest
        assert traffic == dry.traffic
        print(plan, precision, peak / dry.peak - 1, {k: at_peak[k] - dry.at_peak[k] for k in KINDS})
        assert peak == pytest.approx(dry.peak, rel=0.01)
        for kind in KINDS:
            assert at_peak[kind] == pytest.approx(dry.at_peak[kind], rel=0.01, abs=0.001 * peak), kind
