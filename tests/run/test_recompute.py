"""Recomputation changes neither loss nor gradients, keeps what it says, and sends what the plan says."""

import gc
import warnings

import numpy as np
import pytest
import torch
from gloo import (
    MODELS,
    RaggedBatches,
    gradient_difference,
    job_of,
    parallel_steps,
    plain_steps,
    relative,
    torch_batches,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.model import preset
from shardwright.plan.table import table_of
from shardwright.plan.traffic import merged, traffic
from shardwright.run.init import initialise
from shardwright.run.launch import run_ranks
from shardwright.run.mesh import build_mesh
from shardwright.run.meter import MemoryMeter
from shardwright.run.model import Part, Transformer
from shardwright.run.recompute import apply_recompute, forget_recomputed, kept_modules, weight_pass
from shardwright.run.step import Stepper, parallel_model

DEEP = MODELS["base"].model_copy(update={"layers": 4})
BIAS_DEEP = MODELS["bias"].model_copy(update={"layers": 4})


def layout_with(recompute, every=1, **others):
    values = {"micro_batch": 2, "microbatches": 2, **others}
    return Layout(
        recompute=recompute,
        recompute_every=every,
        kept=KEPT_BY_SELECTIVE if recompute == "selective" else (),
        **values,
    )


LAYOUTS = {
    "every 2nd": layout_with("full", 2),
    "every 3rd x shard": layout_with("full", 3, dp_shard=2, zero_stage=3),
    "selective": layout_with("selective"),
    "every 2nd x tp": layout_with("full", 2, tp=2),
    **{f"{kind} x tp": layout_with(kind, tp=2) for kind in ("selective", "full")},
    **{f"{kind} x tp x sp": layout_with(kind, tp=2, sp=True) for kind in ("selective", "full")},
    "selective x tp x sp x shard": layout_with("selective", tp=2, sp=True, dp_shard=2, zero_stage=3),
}


@pytest.mark.parametrize("spec", [DEEP, BIAS_DEEP], ids=["base", "bias"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_fp64_equals_one_process(name, spec):
    layout = LAYOUTS[name]
    job = job_of(layout.dp * layout.micro_batch * layout.microbatches)
    batches = RaggedBatches(spec.vocab, job.seq)
    found = run_ranks(parallel_steps, layout.ranks, spec, job, layout, batches, timeout_s=60)[0]
    expected = plain_steps(spec, job, batches)
    assert relative(found.losses, expected.losses) < 1e-9
    assert relative(found.norms, expected.norms) < 1e-8
    difference, parameter = gradient_difference(found, expected)
    assert difference < 1e-9, parameter


# What is sent


def sent_in_a_step(spec, job, layout, batches):
    """Launches and payload over tp in the second step, as the meter sees them."""
    mesh = build_mesh(layout, "cpu")
    model = parallel_model(spec, job, layout, mesh)
    initialise(model, job.seed, torch.device("cpu"))
    stepper = Stepper(model, job, layout, mesh)
    microbatches = torch_batches(batches, 0, layout, mesh.data.get_local_rank())
    stepper.step(0, microbatches)
    with MemoryMeter(model, stepper.optimizer, mesh) as meter:
        stepper.step(1, microbatches)
    return {key.name: tuple(sent) for key, sent in meter.traffic.items() if key.axis == "tp"}


def planned(spec, job, layout):
    flows = merged(traffic(spec, job, table_of([layout], spec.layers)))
    return {
        flow.collective: (int(flow.launches[0]), int(flow.payload_bytes[0]))
        for flow in flows
        if flow.axis == "tp"
    }


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_tp_sends_again_what_the_plan_says(sp):
    """Selective recomputation gathers what norms made again; full repeats all but the last product's sum."""
    layouts = [
        layout_with(kind, every, tp=2, sp=sp)
        for kind, every in (("none", 1), ("selective", 1), ("full", 1), ("full", 2))
    ]
    job = job_of(4)
    batches = RaggedBatches(DEEP.vocab, job.seq)
    found = [run_ranks(sent_in_a_step, 2, DEEP, job, layout, batches, timeout_s=60)[0] for layout in layouts]
    plan = [planned(DEEP, job, layout) for layout in layouts]
    for kind, each in enumerate(layouts):
        assert more(found[kind], found[0]) == more(plan[kind], plan[0]), each.label


def more(sent, than):
    """Launches and payload beyond those of another step, by collective."""
    return {name: tuple(np.subtract(sent[name], than[name])) for name in than if sent[name] != than[name]}


# Gradients of inputs and of weights apart, as zero-bubble schedules make them


def both_passes(model, x_BSE, grad_BSE):
    """Gradients of the input and of every parameter, and calls of block bodies, by torch's own two passes."""
    calls = []
    for layer in model.model.layers.values():
        layer.input_layernorm.register_forward_pre_hook(lambda *_: calls.append(1))
    out_BSE = model(x_BSE)
    weights = list(model.parameters())
    (of_x,), groups = stage_backward_input([out_BSE], [grad_BSE], [x_BSE], iter(weights))
    with weight_pass():
        stage_backward_weight(iter(weights), groups)
    return [of_x, *(weight.grad for weight in weights)], len(calls)


def middle_stage(recompute):
    model = Transformer(DEEP, Part(range(1, 3), first=False, last=False)).double()
    initialise(model, 0, torch.device("cpu"))
    kept = KEPT_BY_SELECTIVE if recompute == "selective" else ()
    apply_recompute(model, recompute, kept, passes=2)
    return model


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_two_passes_recompute_twice(recompute):
    torch.manual_seed(0)
    x_BSE = torch.randn(2, 24, DEEP.hidden, dtype=torch.float64, requires_grad=True)
    grad_BSE = torch.randn_like(x_BSE)
    plain = middle_stage("none")
    expected = torch.autograd.grad(plain(x_BSE), [x_BSE, *plain.parameters()], grad_BSE)
    found, bodies = both_passes(middle_stage(recompute), x_BSE, grad_BSE)
    torch.testing.assert_close(found, list(expected), rtol=0, atol=1e-12)
    assert bodies == 2 * (1 if recompute == "none" else 3)  # 2 layers: once, and once in each pass


def test_a_pass_for_inputs_keeps_nothing_that_is_made_again_for_weights():
    """Functions written in Python keep inputs for the gradients of weights, which the first pass has no use
    for: the products of experts."""
    torch.manual_seed(0)
    spec = MODELS["deep_experts"]
    models = [Transformer(spec, Part(range(1, 3), first=False, last=False)).double() for _ in range(2)]
    for model in models:
        initialise(model, 0, torch.device("cpu"))
    plain, model = models
    apply_recompute(model, "full", (), passes=2)
    x_BSE = torch.randn(2, 24, spec.hidden, dtype=torch.float64, requires_grad=True)
    grad_BSE = torch.randn_like(x_BSE)
    copies = (2 * 24 * spec.moe.top_k, spec.hidden)
    weights = list(model.parameters())
    out_BSE = model(x_BSE)
    (of_x,), groups = stage_backward_input([out_BSE], [grad_BSE], [x_BSE], iter(weights))
    before = alive(copies)
    forget_recomputed()
    assert alive(copies) == before - 2  # one in each layer
    with weight_pass():
        stage_backward_weight(iter(weights), groups)
    found = [of_x, *(weight.grad for weight in weights)]
    expected = torch.autograd.grad(plain(x_BSE), [x_BSE, *plain.parameters()], grad_BSE)
    torch.testing.assert_close(found, list(expected), rtol=0, atol=1e-12)


def alive(shape):
    """Tensors of a shape that there are."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when names it is to lose are looked at
        return sum(type(each) is torch.Tensor and each.shape == shape for each in gc.get_objects())


def products_made(passes, backwards):
    """Matrix products in the backward pass of one block, its gradients' two each left out."""
    model = Transformer(DEEP, Part(range(1), first=False, last=False)).double()
    initialise(model, 0, torch.device("cpu"))
    apply_recompute(model, "selective", KEPT_BY_SELECTIVE, passes=passes)
    x_BSE = torch.randn(2, 24, DEEP.hidden, dtype=torch.float64, requires_grad=True)
    out_BSE = model(x_BSE)
    with Counted() as counted:
        for left in reversed(range(backwards)):
            out_BSE.sum().backward(retain_graph=left > 0)
    return counted.products - 14 * backwards


class Counted(TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_kept_outputs_are_there_for_every_pass_and_no_longer():
    assert products_made(passes=1, backwards=1) == 0
    assert products_made(passes=2, backwards=2) == 0
    with pytest.raises(AssertionError, match="one pass through a block more"):
        products_made(passes=1, backwards=2)


# What is kept, in every family


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3-8b", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}),
        ("phi-3-mini", {"qkv_proj", "o_proj", "gate_up_proj"}),
        ("deepseek-v3", {"q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj"}),
        ("gpt2-xl", {"c_attn", "c_proj", "c_fc"}),
    ],
)
def test_products_whose_outputs_are_kept(name, expected):
    """Never the last of the feed-forward network, nor the narrow ones of latent attention."""
    found = kept_modules(preset(name), KEPT_BY_SELECTIVE)
    assert {module for _, module in found} == expected
    assert ("mlp.", "c_proj") not in found
