"""Offload: state on the host and saved tensors on the host change nothing but where they are."""

import functools
from typing import NamedTuple

import pytest
import torch
from gloo import BASE, RaggedBatches, job_of, layout_of, parallel_steps, relative
from sharded import WAYS, as_arrays, groups_of, plain_module, plain_steps, set_gradients, worst_part
from torch import nn

from shardwright.run.activation_offload import Copier, _Saved, apply_activation_offload
from shardwright.run.launch import run_ranks
from shardwright.run.offload import OffloadedOptimizer

OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "sgd_momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False),
}


def direct(name, module):
    return OPTIMIZERS[name](groups_of(module))


def offloaded(name, module):
    return OffloadedOptimizer(groups_of(module), OPTIMIZERS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_steps_as_without_to_the_bit(name):
    kept, moved = (plain_steps(functools.partial(build, name)) for build in (direct, offloaded))
    assert all(kept[key].equal(moved[key]) for key in kept)


@pytest.mark.parametrize(
    ("name", "way", "build"),
    [
        ("adamw", "hsdp", direct),
        ("sgd_momentum", "fsdp-tp", direct),
        *(("adamw", way, offloaded) for way in ("fsdp4", "fsdp-tp", "fsdp-ep")),
        ("sgd_momentum", "fsdp-tp", offloaded),
    ],
)
def test_every_layout_equals_one_rank(name, way, build):
    expected = as_arrays(plain_steps(functools.partial(direct, name)))
    found = run_ranks(worst_part, 4, WAYS[way], functools.partial(build, name), expected, timeout_s=60)
    assert max(found) < 1e-14


def test_rates_reach_the_host_and_foreign_writes_too():
    one, two = plain_module(), plain_module()
    optimizers = direct("adamw", one), offloaded("adamw", two)
    for step in range(3):
        for module, optimizer in zip((one, two), optimizers, strict=True):
            set_gradients(module, step)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:  # what a checkpoint does
                with torch.no_grad():
                    module.up.copy_(torch.ones_like(module.up))
    assert all(a.equal(b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert optimizers[1].state[two.up]["exp_avg"].equal(optimizers[0].state[one.up]["exp_avg"])
    assert two.up.grad is None


def test_a_parameter_without_a_gradient_stays():
    module = plain_module()
    optimizer = offloaded("adamw", module)
    set_gradients(module, 0)
    module.up.grad = None
    before = module.up.detach().clone()
    optimizer.step()
    assert module.up.equal(before)
    assert module.up not in optimizer.state


class Doubled(nn.Module):
    """A block that saves its input twice, a weight, and a table without a gradient."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size, dtype=torch.float64))

    def forward(self, x, table):
        return (x @ self.weight).sigmoid() * x * table


def stack(offload):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Doubled(6) for _ in range(3))
    if offload:
        apply_activation_offload(blocks)
    return blocks


def gradients_of(blocks):
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(4, 6, dtype=torch.float64, generator=generator).requires_grad_()
    table = torch.randn(6, dtype=torch.float64, generator=generator)
    halves = []
    for microbatch in range(2):  # both in flight, as in a pipeline
        x = first * (microbatch + 1)
        for block in blocks:
            x = block(x, table)
        halves.append(x.square().sum())
    for half in halves:
        half.backward()
    return [first.grad, *(block.weight.grad for block in blocks)]


def test_saved_tensors_come_back_as_they_were(monkeypatch):
    moved = []
    take = _Saved.take
    monkeypatch.setattr(_Saved, "take", lambda self: moved.append(self) or take(self))
    kept, offloaded = gradients_of(stack(False)), gradients_of(stack(True))
    assert all(a.equal(b) for a, b in zip(kept, offloaded, strict=True))
    assert {tuple(saved.host.shape) for saved in moved} == {(4, 6)}  # neither weights nor the table
    # the input, which two operations save, and the sigmoid, once each: 2 microbatches, 3 blocks
    assert len(set(moved)) == 2 * 3 * 2


class Tables(NamedTuple):
    table: torch.Tensor


def test_a_tensor_saved_in_two_shapes_moves_once():
    """Each of two operations has its own shape of one tensor; what comes back is equal."""
    held = torch.randn(2, 3, 4, dtype=torch.float64).transpose(0, 1)
    call = Copier().begin(0)
    first, second = call.pack(held), call.pack(held.transpose(0, 1).reshape(6, 4))
    part = call.pack(held[:, :1])
    assert isinstance(first, _Saved)
    assert second.saved is first
    assert isinstance(part, _Saved)
    assert first.take().equal(held)
    assert second.take().equal(held.transpose(0, 1).reshape(6, 4))
    assert part.take().equal(held[:, :1])


class Scaled(nn.Module):
    """A block that saves a table it is given in a tuple, and what it makes."""

    def forward(self, x, tables):
        return (x * tables.table).sigmoid()


def test_tables_in_a_tuple_stay(monkeypatch):
    moved = []
    down = Copier.down
    monkeypatch.setattr(Copier, "down", lambda self, source: moved.append(source.shape) or down(self, source))
    blocks = nn.ModuleList([Scaled()])
    apply_activation_offload(blocks)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    blocks[0](x, Tables(torch.randn(6, dtype=torch.float64)))
    assert moved == [(4, 6)]  # the sigmoid


def test_nothing_is_held_after_backward():
    blocks = stack(True)
    gradients_of(blocks)
    copier = blocks[0].forward.args[0]
    assert copier._last() is None


def test_no_tensor_moves_in_evaluation():
    with torch.no_grad():
        stack(True)[0](torch.ones(2, 6, dtype=torch.float64), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize(
    ("kind", "path", "microbatches"),
    [
        ("optimizer", (1, 2, 3), 1),
        ("activations", (1, 2, 1), 2),
        ("activations", (1, 2, 3), 1),
        ("optimizer+activations", (2, 1, 0), 2),
    ],
)
def test_training_with_offload_equals_training_without(kind, path, microbatches):
    plain = layout_of(*path, microbatches)
    job = job_of(plain.dp * plain.micro_batch * microbatches)
    batches = RaggedBatches(BASE.vocab, job.seq)
    found, expected = (
        run_ranks(parallel_steps, 2, BASE, job, layout, batches, timeout_s=60)[0]
        for layout in (plain.model_copy(update={"offload": kind}), plain)
    )
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    for name, value in expected.parameters.items():
        assert relative(found.parameters[name], value) == 0, name
