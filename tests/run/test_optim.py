"""The job's optimizer: what decays, what is made orthogonal, and the learning rate; whole runs with each."""

import functools
import importlib.util
import re

import pytest
import torch
from gloo import BASE, RaggedBatches, job_of, layout_of, parallel_steps, relative
from torch import nn

from shardwright.errors import LayoutError, MissingExtraError
from shardwright.model import Moe
from shardwright.plan.accounting import EIGHT_BIT_BLOCK, optimizer_elements
from shardwright.plan.params import Tensor, parameter_table
from shardwright.run import quantised
from shardwright.run.adafactor import Adafactor
from shardwright.run.launch import run_ranks
from shardwright.run.local_adamw import LocalAdamW
from shardwright.run.muon import Muon
from shardwright.run.offload import OffloadedOptimizer
from shardwright.run.optim import build_optimizer, learning_rate, set_learning_rate

MOE = BASE.model_copy(
    update={
        "model_type": "qwen3_moe", "qk_norm": True, "qkv_bias": True,
        "moe": Moe(experts=4, top_k=2, ffn=16),
    }
)  # fmt: skip
KINDS = {
    "adamw": LocalAdamW, "sgd": torch.optim.SGD, "sgd_momentum": torch.optim.SGD,
    "adafactor": Adafactor, "muon": Muon,
}  # fmt: skip


def named_parameters(spec):
    """The model's parameters by name, without a module."""
    return [(t.name, nn.Parameter(torch.zeros(t.shape))) for t in parameter_table(spec).tensors()]


def names_where(optimizer, parameters, option, value):
    held = {p for group in optimizer.param_groups if group.get(option) == value for p in group["params"]}
    return {re.sub(r"^model\.layers\.\d+\.", "", name) for name, parameter in parameters if parameter in held}


@pytest.mark.parametrize("name", KINDS)
def test_each_name_makes_its_optimizer_over_every_parameter(name):
    parameters = named_parameters(MOE)
    optimizer = build_optimizer(parameters, MOE, job_of(4, optimizer=name))
    assert type(optimizer) is KINDS[name]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(set(held)) == len(parameters)
    assert type(build_optimizer(parameters, MOE, job_of(4), offload=True)) is OffloadedOptimizer


def test_norms_and_biases_do_not_decay():
    parameters = named_parameters(MOE)
    optimizer = build_optimizer(parameters, MOE, job_of(4, weight_decay=0.1))
    kept = names_where(optimizer, parameters, "weight_decay", 0.0)
    assert kept == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight",
        "self_attn.k_norm.weight", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias",
        "model.norm.weight",
    }  # fmt: skip


def test_muon_takes_matrices_of_blocks_and_leaves_the_rest_to_adamw():
    parameters = named_parameters(MOE)
    optimizer = build_optimizer(parameters, MOE, job_of(4, optimizer="muon"))
    assert names_where(optimizer, parameters, "orthogonal", True) == {
        *(f"self_attn.{kind}_proj.weight" for kind in "qkvo"),
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "adafactor", "muon"])
def test_state_is_what_the_plan_counts(name):
    optimizer = build_optimizer(parameters := named_parameters(MOE), MOE, job_of(4, optimizer=name))
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    by_name = {tensor.name: tensor for tensor in parameter_table(MOE).tensors()}
    for tensor_name, parameter in parameters:
        state = optimizer.state[parameter]
        held = sum(value.numel() for key, value in state.items() if key != "step")
        assert held == optimizer_elements(name, by_name[tensor_name]), tensor_name


def test_a_name_the_model_has_not_is_refused():
    with pytest.raises(LayoutError, match=r"parameter 'layers.0.up' is none of the \d+ of the model's table"):
        build_optimizer([("layers.0.up", nn.Parameter(torch.zeros(1)))], BASE, job_of(4))


@pytest.mark.parametrize("name", ["adafactor", "muon"])
@pytest.mark.parametrize("path", [(1, 2, 3), (1, 4, 1), (2, 2, 2)])
def test_training_equals_one_rank(name, path):
    one, layout = (
        layout_of(1, 1, 0, 1, micro_batch=8),
        layout_of(*path, 1, micro_batch=8 // (path[0] * path[1])),
    )
    job = job_of(8, optimizer=name)
    run = functools.partial(run_ranks, parallel_steps)
    batches = RaggedBatches(BASE.vocab, job.seq)
    expected, found = (run(x.ranks, BASE, job, x, batches, timeout_s=60)[0] for x in (one, layout))
    assert relative(found.losses, expected.losses) < 1e-9
    assert relative(found.norms, expected.norms) < 1e-8
    for parameter, value in expected.parameters.items():
        assert relative(found.parameters[parameter], value) < 1e-9, parameter


def test_rate_warms_up_and_falls_to_its_minimum():
    job = job_of(4, learning_rate=1.0, warmup_steps=2, steps=10, min_learning_rate_ratio=0.1)
    assert [learning_rate(job, step) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert learning_rate(job, 10) == pytest.approx(0.1)


def test_a_rate_that_is_a_tensor_stays_one():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(1.0))
    rate = optimizer.param_groups[0]["lr"]
    set_learning_rate(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_8_bit_adam_names_its_extra(monkeypatch):
    monkeypatch.setattr(quantised.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"optimizer='adamw_8bit' needs the extra \[quant\]"):
        build_optimizer(named_parameters(BASE), BASE, job_of(4, optimizer="adamw_8bit"))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_8_bit_adam_keeps_what_the_plan_counts(capfd):
    """Made, not stepped: compiling its step takes half a minute."""
    parameter = nn.Parameter(torch.zeros(4 * EIGHT_BIT_BLOCK))
    optimizer = quantised.build_adamw_8bit([{"params": [parameter]}], 1e-3, (0.9, 0.95), 1e-8)
    assert capfd.readouterr().err == ""
    moments = [optimizer._new_buffer(parameter, signed) for signed in (True, False)]
    held = sum(part.nbytes for moment in moments for part in (moment.codes, moment.scale))
    tensor = Tensor("x", tuple(parameter.shape), "attention")
    assert held == 4 * optimizer_elements("adamw_8bit", tensor, 4)
