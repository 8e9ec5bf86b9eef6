"""Muon: whole matrices in every layout, and the published iteration."""

import functools

import pytest
import torch
from sharded import WAYS, as_arrays, groups_of, plain_steps, worst_part

from shardwright.run.launch import run_ranks
from shardwright.run.muon import Muon, orthogonalised

RATE = 1e-2


def build(module, compute=None):
    return Muon(groups_of(module, orthogonal=True), lr=RATE, momentum=0.9, compute=compute)


@pytest.mark.parametrize("way", WAYS)
def test_every_layout_equals_one_rank(way):
    expected = as_arrays(plain_steps(build))
    found = run_ranks(
        worst_part, torch.Size(WAYS[way].degrees).numel(), WAYS[way], build, expected, timeout_s=60
    )
    assert max(found) < 1e-12


@pytest.mark.parametrize("way", ["fsdp", "fsdp-tp"])
def test_bf16_iterations_round_alike_in_every_layout(way):
    """Whole matrices are the same on every rank that iterates them; shards would differ by 1e-3."""
    build_bf16 = functools.partial(build, compute=torch.bfloat16)
    expected = as_arrays(plain_steps(build_bf16, torch.float32))
    found = run_ranks(
        worst_part, torch.Size(WAYS[way].degrees).numel(), WAYS[way], build_bf16, expected, torch.float32,
        timeout_s=60,
    )  # fmt: skip
    assert max(found) < 1e-6


@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (16, 16)])
def test_one_rank_is_torch_s_but_for_its_rounding(shape):
    """Both iterate in bf16, which moves an entry of a small matrix by some hundredths of the largest."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=generator)
    ours, theirs = (torch.nn.Parameter(first.clone()) for _ in range(2))
    mine = Muon([{"params": [ours], "orthogonal": True}], lr=RATE, momentum=0.9, weight_decay=0.1,
                compute=torch.bfloat16)  # fmt: skip
    other = torch.optim.Muon(
        [theirs], lr=RATE, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        grad = torch.randn(shape, generator=generator)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        mine.step()
        other.step()
    assert (ours - theirs).abs().max() < 0.1 * (first - theirs).abs().max()


def test_others_are_adamw_s():
    """The same step as torch's AdamW, state included."""
    first = torch.randn(5, 3, dtype=torch.float64)
    ours, theirs = (torch.nn.Parameter(first.clone()) for _ in range(2))
    mine = Muon([ours], lr=RATE, betas=(0.8, 0.9), weight_decay=0.1)
    other = torch.optim.AdamW([theirs], lr=RATE, betas=(0.8, 0.9), weight_decay=0.1, fused=True)
    for _ in range(3):
        ours.grad = torch.randn_like(first)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
    assert ours.equal(theirs)
    assert mine.state[ours]["exp_avg_sq"].equal(other.state[theirs]["exp_avg_sq"])


@pytest.mark.parametrize("shape", [(3, 8, 5), (5, 8), (7, 7)])
def test_singular_values_come_near_one(shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(x))
    assert 0.3 < values.min() <= values.max() < 1.3


def test_a_zero_matrix_stays_zero():
    assert orthogonalised(torch.zeros(4, 3)).eq(0).all()
