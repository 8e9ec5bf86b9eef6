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
    return torch_batches(batches, index, stepper.layout, rank)


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
}
ROWS = [*((plan, "bf16") for plan in PLANS), ("zero2", "fp32"), ("zero3", "fp64"), ("tied", "fp64")]


@pytest.mark.parametrize(("plan", "precision"), ROWS)
def test_a_real_step_holds_and_sends_what_its_dry_run_does(plan, precision):
    """Both ranks hold the same, every dim being even. Seen equal to the byte; but a thread of gloo lets go of
    a buffer when it likes, and so the peak has a tolerance."""
    layout, changes = PLANS[plan]
    spec = LARGER.model_copy(update=changes)
    job = job_of(layout.dp * 2 * layout.microbatches, precision, seq=64)
    dry = dry_run(spec, job, layout)
    for at_rest, peak, at_peak, traffic in run_ranks(metered_step, 2, spec, job, layout):
        assert at_rest == dry.at_rest
        assert traffic == dry.traffic
        assert peak == pytest.approx(dry.peak, rel=0.01)
        assert at_peak == pytest.approx(dry.at_peak, abs=0.01 * peak)
        assert sum(at_peak.values()) == peak


def test_uneven_rows_by_rank():
    """The second rank has a row less of each matrix of odd height: FSDP pads it, the optimizer does not."""
    layout = layout_of(1, 2, 3, 1)
    spec = LARGER.model_copy(update={"vocab": 511})
    job = job_of(4, "bf16", seq=64)
    for rank, (at_rest, peak, _, traffic) in enumerate(run_ranks(metered_step, 2, spec, job, layout)):
        dry = dry_run(spec, job, layout, rank)
        assert (at_rest, traffic) == (dry.at_rest, dry.traffic)
        assert peak == pytest.approx(dry.peak, rel=0.01)


def test_a_dry_run_leaves_nothing_that_a_real_mesh_of_its_shape_could_meet():
    """torch's sharding cache holds meshes; the dry run's names groups that no real rank has."""
    layout = layout_of(2, 1, 0, 1)
    job = job_of(4, "fp32")
    dry_run(MODELS["base"], job, layout)
    assert len(run_ranks(metered_step, 2, MODELS["base"], job, layout)) == 2


# Storages


def meter_of_one_rank():
    stepper = stepper_of(MODELS["base"], job_of(2, "fp32"), layout_of(1, 1, 0, 1))
    return MemoryMeter(stepper.model, stepper.optimizer, stepper.mesh)


def lives_of_storages():
    """Bytes by kind after each event, as differences from the state; runs under ``run_ranks``."""
    meter, seen = meter_of_one_rank(), []

    def look():
        gc.collect()
        seen.append({kind: meter.held[kind] for kind in KINDS if kind != PARAMETERS and meter.held[kind]})

    with meter:
        look()
        activation = torch.ones(256)  # 1 KiB
        view, gradient = activation[1:], torch.ones(512)
        look()
        meter.mark(gradient, GATHERED)
        look()
        meter.mark(gradient, GRADIENTS)
        look()
        with meter.making(LOGITS):
            logits = activation + 1
        look()
        del activation
        look()  # the view holds it
        del view, gradient, logits
        look()
        buffer = torch.ones(256)
        meter.mark(buffer, GATHERED)
        for size in (0, 4096):
            buffer.untyped_storage().resize_(size)
            meter.resized(buffer.untyped_storage())
            look()
    return seen


def test_storages_are_followed_from_birth_to_death():
    (seen,) = run_ranks(lives_of_storages, 1)
    kib = 1024
    assert seen == [
        {},
        {ACTIVATIONS: 3 * kib},
        {ACTIVATIONS: kib, GATHERED: 2 * kib},
        {ACTIVATIONS: kib, GRADIENTS: 2 * kib},
        {ACTIVATIONS: kib, GRADIENTS: 2 * kib, LOGITS: kib},
        {ACTIVATIONS: kib, GRADIENTS: 2 * kib, LOGITS: kib},
        {},
        {},
        {GATHERED: 4 * kib},
    ]


def named_after_the_peak():
    """Peaks by kind: a gradient is told from an activation only once the peak is past."""
    meter = meter_of_one_rank()
    with meter:
        rest = sum(meter.held.values())
        gradient, other = torch.ones(256), torch.ones(256)
        del other
        meter.mark(gradient, GATHERED)
        before = meter.at_peak
        late = torch.ones(128)
        meter.mark(late, GATHERED)
    return before, meter.at_peak, meter.peak - rest


def test_the_peak_is_named_by_what_its_storages_turn_out_to_be():
    ((before, after, peak),) = run_ranks(named_after_the_peak, 1)
    assert peak == 2048
    assert (before[ACTIVATIONS], before[GATHERED]) == (1024, 1024)
    assert after == before  # what was born later was not there


def state_of_one_rank():
    stepper = stepper_of(MODELS["base"], job_of(2, "fp32"), layout_of(1, 1, 0, 1))
    stepper.step(0, microbatches(stepper, 0))
    with MemoryMeter(stepper.model, stepper.optimizer, stepper.mesh) as meter:
        pass
    parameters = sum(parameter.numel() for parameter in stepper.model.parameters())
    return parameters, {kind: meter.held[kind] for kind in KINDS}


def test_state_is_known_before_anything_runs():
    ((parameters, held),) = run_ranks(state_of_one_rank, 1)
    assert held == dict.fromkeys(KINDS, 0) | {PARAMETERS: 4 * parameters, OPTIMIZER: 8 * parameters}


# Nothing is left behind


GROUP = _fsdp_param_group.FSDPParamGroup
PATCHED = [
    (GROUP, "unshard"),
    (GROUP, "wait_for_unshard"),
    (GROUP, "post_backward"),
    (_fsdp_param, "alloc_storage"),
    (_fsdp_param, "free_storage"),
    (_fsdp_param_group, "alloc_storage"),
]


def patched():
    return [getattr(owner, name) for owner, name in PATCHED]


def hooks(stepper):
    model, optimizer = stepper.model, stepper.optimizer
    modules = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    counts = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    unsharded = [
        len(parameter._unsharded_param._backward_hooks or {})
        for module in model.modules()
        if hasattr(module, "_get_fsdp_state")
        for group in module._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    ]
    return modules, counts, set(unsharded)


def leave(fails):
    """What is patched and hooked before, inside and after; runs under ``run_ranks``."""
    stepper = stepper_of(MODELS["base"], job_of(2, "fp32"), layout_of(1, 1, 0, 1))
    stepper.step(0, microbatches(stepper, 0))
    before = patched(), hooks(stepper)
    meter = MemoryMeter(stepper.model, stepper.optimizer, stepper.mesh)
    with contextlib.suppress(ZeroDivisionError), meter:
        stepper.step(1, microbatches(stepper, 1))
        replaced = [one is not other for one, other in zip(patched(), before[0], strict=True)]
        hooked = hooks(stepper) != before[1]
        if fails:
            _ = 1 / 0
    same = [one is other for one, other in zip(patched(), before[0], strict=True)]
    result = stepper.step(2, microbatches(stepper, 2))
    return all(replaced), hooked, all(same), hooks(stepper) == before[1], result.loss > 0


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_fsdp_is_as_it_was(fails):
    assert run_ranks(leave, 1, fails) == [(True,) * 5]
