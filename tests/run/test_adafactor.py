"""Adafactor: the same update in every layout, and the paper's."""

import pytest
import torch
from sharded import (
    STEPS,
    WAYS,
    as_arrays,
    groups_of,
    plain_module,
    plain_steps,
    set_gradients,
    sharded_module,
    values,
    worst_part,
)

from shardwright.run.adafactor import Adafactor
from shardwright.run.launch import run_ranks

RATE, DECAY = 1e-2, 0.1


def build(module):
    return Adafactor(groups_of(module), lr=RATE)


def by_the_paper(parameter, gradients, decays):
    """Algorithms 4 and 5 of arXiv:1804.04235 on one matrix or vector, with sums for means."""
    x, row, column, square = parameter.clone(), 0.0, 0.0, 0.0
    for t, grad in enumerate(gradients, start=1):
        beta = 1 - t**-0.8
        squared = grad**2 + 1e-30
        if grad.ndim == 2:
            row = beta * row + (1 - beta) * squared.sum(1, keepdim=True)
            column = beta * column + (1 - beta) * squared.sum(0, keepdim=True)
            estimate = row @ column / row.sum()
        else:
            estimate = square = beta * square + (1 - beta) * squared
        update = grad / estimate.sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()))
        x = x * (1 - RATE * DECAY * decays) - RATE * update
    return x


def test_one_rank_follows_the_paper():
    found = plain_steps(build)
    first, gradients = values(0), [values(step + 1) for step in range(STEPS)]
    for name, parameter in found.items():
        if parameter.ndim == 3:
            experts = [
                by_the_paper(first[name][e], [g[name][e] for g in gradients], decays=True)
                for e in range(parameter.shape[0])
            ]
            expected = torch.stack(experts)
        else:
            expected = by_the_paper(first[name], [g[name] for g in gradients], decays=parameter.ndim > 1)
        assert (parameter - expected).abs().max() < 1e-12, name


@pytest.mark.parametrize("way", WAYS)
def test_every_layout_equals_one_rank(way):
    expected = as_arrays(plain_steps(build))
    found = run_ranks(
        worst_part, torch.Size(WAYS[way].degrees).numel(), WAYS[way], build, expected, timeout_s=60
    )
    assert max(found) < 1e-12


def held_state(way):
    """Elements of state of each parameter on this rank, its step counter left out, and of the parameter."""
    module, _, part = sharded_module(way)
    optimizer = build(module)
    set_gradients(module, 0, part)
    optimizer.step()
    return {
        name: (
            {
                key: tuple(value.to_local().shape)
                for key, value in optimizer.state[p].items()
                if key != "step"
            },
            {key: value.full_tensor().numpy() for key, value in optimizer.state[p].items() if key != "step"},
        )
        for name, p in module.named_parameters()
    }


def test_row_means_rest_where_rows_do_and_column_means_where_columns_do():
    first = run_ranks(held_state, 4, WAYS["fsdp-tp"], timeout_s=60)[0]
    assert first["up"][0] == {"row": (2,), "column": (6,)}
    assert first["down"][0] == {"row": (3,), "column": (4,)}
    assert first["norm"][0] == {"square": (3,)}
    assert first["experts"][0] == {"row": (2, 5), "column": (2, 6)}
    assert first["wide_experts"][0] == {"row": (1, 6), "column": (1, 4)}


def test_whole_state_of_a_sharded_run_is_that_of_one_rank():
    """A checkpoint of one layout can go on in another."""
    module = plain_module()
    optimizer = build(module)
    set_gradients(module, 0)
    optimizer.step()
    found = run_ranks(held_state, 4, WAYS["fsdp-tp"], timeout_s=60)[3]
    for name, parameter in module.named_parameters():
        for key, whole in found[name][1].items():
            assert (torch.from_numpy(whole) - optimizer.state[parameter][key]).abs().max() < 1e-12, (
                name,
                key,
            )


def test_a_zero_gradient_moves_nothing():
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = Adafactor([parameter], lr=RATE)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert parameter.eq(1).all()
