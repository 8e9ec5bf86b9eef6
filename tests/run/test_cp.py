"""Context parallelism: attention over ranks against a dense softmax, and who holds which tokens."""

import pytest
import torch
from attention import CASES, KINDS, SEQ, attention_of_rank, cases_of_rank, worst_difference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright.job import Job
from shardwright.layout import Layout, model_faults
from shardwright.model import preset
from shardwright.run.attend import CausalAttention
from shardwright.run.cp import apply_cp, positions, slice_sequence
from shardwright.run.launch import run_ranks


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_ranks_equals_a_dense_softmax(kind, degree):
    ranks = run_ranks(cases_of_rank, degree, kind, list(CASES.values()))
    for name, parts in zip(CASES, zip(*ranks, strict=True), strict=True):
        assert worst_difference(parts, CASES[name]) < 1e-13, name


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_attention_is_the_same(kind, recompute):
    chosen = [CASES["gqa"], CASES["documents"]]
    ranks = run_ranks(cases_of_rank, 4, kind, chosen, recompute)
    for case, parts in zip(chosen, zip(*ranks, strict=True), strict=True):
        assert worst_difference(parts, case) < 1e-13


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_types(kind, dtype, tolerance):
    chosen = [CASES[name]._replace(dtype=dtype) for name in ("gqa", "documents", "narrow_values", "window")]
    ranks = run_ranks(cases_of_rank, 4, kind, chosen)
    for case, parts in zip(chosen, zip(*ranks, strict=True), strict=True):
        assert worst_difference(parts, case) < tolerance


def strided_groups_of_rank(kind):
    """Ranks 0 and 2, and 1 and 3, are groups of two: a rank's place in its group is not its own number."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))["cp"]
    model = nn.ModuleDict({"plain": nn.Linear(1, 1), "attention": nn.Linear(1, 1)})
    model["attention"].attend = CausalAttention()
    apply_cp(model, mesh, kind)
    assert not hasattr(model["plain"], "attend")
    return attention_of_rank(model["attention"].attend, kind, CASES["gqa"], group=mesh.get_group())


@pytest.mark.parametrize("kind", KINDS)
def test_groups_within_the_world(kind):
    ranks = run_ranks(strided_groups_of_rank, 4, kind)
    for parts in (ranks[0::2], ranks[1::2]):
        assert worst_difference(parts, CASES["gqa"]) < 1e-13


# Who holds what


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_dealt_out_once(kind, degree):
    held = [positions(SEQ, degree, rank, kind) for rank in range(degree)]
    assert all(at.dtype == torch.int64 and len(at) == SEQ // degree for at in held)
    assert sorted(torch.cat(held).tolist()) == list(range(SEQ))
    assert all(bool((at.diff() > 0).all()) for at in held)


def test_positions_by_hand():
    assert positions(16, 4, 1, "ring").tolist() == [2, 3, 12, 13]
    assert positions(16, 4, 1, "all_gather").tolist() == [2, 3, 12, 13]
    assert positions(16, 4, 1, "ulysses").tolist() == [4, 5, 6, 7]
    assert positions(4, 1, 0, "none").tolist() == [0, 1, 2, 3]


def test_a_slice_has_the_tokens_at_its_positions():
    tokens = torch.arange(32).view(2, 16)
    assert slice_sequence(tokens, positions(16, 4, 0, "ring")).tolist() == [
        [0, 1, 14, 15],
        [16, 17, 30, 31],
    ]


def test_a_sequence_that_does_not_divide_is_refused():
    layout = Layout(cp=4, cp_kind="ring", zero_stage=1)
    (fault,) = model_faults(layout, preset("llama-3-8b"), Job(seq=36, global_batch=1))
    assert fault.code == "cp_sequence"
    assert "cp=4 does not divide seq=36" in fault.message
