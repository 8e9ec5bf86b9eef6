"""Bytes of model state: golden numbers of the papers, and torch's own optimizers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import JobError
from shardwright.job import Job
from shardwright.plan.accounting import (
    ACCOUNTINGS,
    EIGHT_BIT_BLOCK,
    accounting_row,
    optimizer_elements,
    state_bytes_per_parameter,
)
from shardwright.plan.params import Tensor

GB = 1e9
ZERO, MEGATRON, FSDP2 = ACCOUNTINGS["zero"], ACCOUNTINGS["megatron"], ACCOUNTINGS["fsdp2"]
ADAM = 2  # moments
MATRIX = Tensor("x", (2048, 512), "attention")


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    [(0, [112, 208, 1120]), (1, [38.5, 71.5, 385]), (2, [26.25, 48.75, 262.5]), (3, [14, 26, 140])],
)
def test_7_13_and_70_billion_on_8_ranks(stage, gigabytes):
    parameters = np.array([7e9, 13e9, 70e9])
    assert (parameters * state_bytes_per_parameter(ZERO, ADAM, stage, 8)).tolist() == [
        g * GB for g in gigabytes
    ]


def test_figure_1_of_zero():
    """7.5 B parameters on 64 ranks: 120, 31.4, 16.6, 1.88 GB. arXiv:1910.02054, figure 1."""
    found = 7.5e9 * state_bytes_per_parameter(ZERO, ADAM, [0, 1, 2, 3], 64) / GB
    assert found.tolist() == [120, 31.40625, 16.640625, 1.875]


@pytest.mark.parametrize(
    ("parameters", "ranks", "gigabytes"),
    [
        (7.5e9, 4, [52.5, 41.25, 30.0]),
        (128e9, 64, [536, 284, 32]),
        (1e12, 1024, [4011.71875, 2013.671875, 15.625]),
    ],
)
def test_table_1_of_zero(parameters, ranks, gigabytes):
    """arXiv:1910.02054, table 1, which prints 4011.7, 2013.7 and 15.6."""
    found = parameters * state_bytes_per_parameter(ZERO, ADAM, [1, 2, 3], ranks)
    assert (found / GB).tolist() == gigabytes


def test_megatron_keeps_18_and_its_distributed_optimizer_6_plus_12_over_d():
    """NVIDIA/Megatron-LM docs/user-guide/features/dist_optimizer.md."""
    assert state_bytes_per_parameter(MEGATRON, ADAM, 0, 8) == 18
    assert state_bytes_per_parameter(MEGATRON, ADAM, 1, 8) == 7.5
    assert state_bytes_per_parameter(MEGATRON, ADAM, 1, 2**60) == pytest.approx(6)


@settings(deadline=None)
@given(ranks=st.integers(2, 10**9))
def test_stage_1_never_goes_below_28_gb_for_7_billion(ranks):
    assert 7e9 * state_bytes_per_parameter(ZERO, ADAM, 1, ranks) >= 28 * GB


@pytest.mark.parametrize("row", ACCOUNTINGS.values(), ids=ACCOUNTINGS)
@settings(deadline=None)
@given(ranks=st.integers(1, 4096))
def test_a_higher_stage_and_more_ranks_never_hold_more(row, ranks):
    stages = state_bytes_per_parameter(row, ADAM, np.arange(4), ranks)
    assert (np.diff(stages) <= 0).all()
    assert (state_bytes_per_parameter(row, ADAM, np.arange(4), ranks + 1) <= stages).all()


@pytest.mark.parametrize("row", ACCOUNTINGS.values(), ids=ACCOUNTINGS)
def test_one_rank_holds_everything_at_any_stage(row):
    whole = row.weight + row.gradient + row.master + ADAM * row.moment
    assert state_bytes_per_parameter(row, ADAM, np.arange(4), 1).tolist() == [whole] * 4


def test_fsdp2_rests_split_from_stage_1_on():
    assert state_bytes_per_parameter(FSDP2, ADAM, [0, 1, 2, 3], 8).tolist() == [16, 2, 2, 2]


def test_stages_and_degrees_broadcast():
    found = state_bytes_per_parameter(ZERO, ADAM, np.array([[1], [3]]), np.array([2, 4, 8]))
    assert found.tolist() == [[10, 7, 5.5], [8, 4, 2]]


def test_fp64_jobs_keep_everything_in_eight_bytes():
    assert accounting_row("fsdp2", "fp64") is ACCOUNTINGS["fsdp2_fp64"]
    assert accounting_row("fsdp2", "bf16") is accounting_row("fsdp2", "fp32") is FSDP2
    assert accounting_row("zero", "bf16") is ZERO


def total_bytes(row_name: str, optimizer: str, tensor: Tensor = MATRIX) -> float:
    """Bytes per parameter of weight, gradient, master and optimizer state on one rank."""
    row = ACCOUNTINGS[row_name]
    moments = optimizer_elements(optimizer, tensor, row.moment) / tensor.numel
    return float(state_bytes_per_parameter(row, moments, 0, 1))


@pytest.mark.parametrize(
    ("row", "optimizer", "bytes_each"),
    [
        ("fsdp2", "adamw", 16),
        ("zero", "adamw", 16),
        ("megatron", "adamw", 18),
        ("pure_bf16", "adamw", 8),
        ("fsdp2_fp64", "adamw", 32),
        ("fsdp2", "sgd_momentum", 12),
        ("zero", "sgd_momentum", 12),
        ("zero", "sgd", 8),
        ("fsdp2", "sgd", 8),
        ("zero", "muon", 12),
        ("zero", "adamw_8bit", 8 + 2 * (1 + 4 / EIGHT_BIT_BLOCK)),  # 10 with the master
        ("pure_bf16", "adamw_8bit", 4 + 2 * (1 + 4 / EIGHT_BIT_BLOCK)),  # 6 without
    ],
)
def test_bytes_of_a_matrix_parameter(row, optimizer, bytes_each):
    assert total_bytes(row, optimizer) == bytes_each


@pytest.mark.parametrize("moment", [2, 4, 8])
def test_8_bit_adam_keeps_2_004_bytes_of_state_in_every_accounting(moment):
    assert moment * optimizer_elements("adamw_8bit", MATRIX, moment) / MATRIX.numel == pytest.approx(
        2.004, abs=1e-4
    )


def test_a_part_of_a_block_has_scales_of_its_own():
    tensor = Tensor("x", (EIGHT_BIT_BLOCK + 1,), "norm")
    assert 4 * optimizer_elements("adamw_8bit", tensor) == 2 * (EIGHT_BIT_BLOCK + 1) + 2 * 2 * 4


def test_adafactor_keeps_a_row_and_a_column():
    """0.0098 B for each parameter of 2048 x 512: 4 (R + C) / (R C). Source: torch.optim.Adafactor."""
    state = 4 * optimizer_elements("adafactor", MATRIX) / MATRIX.numel
    assert state == 4 * (2048 + 512) / (2048 * 512)
    assert optimizer_elements("adafactor", Tensor("x", (512,), "norm")) == 512


def test_muon_keeps_one_moment_for_matrices_of_blocks_and_two_elsewhere():
    shapes = {"attention": (8, 4), "feed_forward": (8, 4), "embedding": (8, 4), "head": (8, 4), "norm": (8,)}
    moments = {
        role: optimizer_elements("muon", tensor) / tensor.numel
        for role, shape in shapes.items()
        for tensor in [Tensor("x", shape, role)]
    }
    assert moments == {"attention": 1, "feed_forward": 1, "embedding": 2, "head": 2, "norm": 2}


def state_elements(optimizer: torch.optim.Optimizer) -> int:
    """Elements of tensors that a torch optimizer holds after a step, its step counters left out."""
    held = (value for state in optimizer.state.values() for key, value in state.items() if key != "step")
    return sum(value.numel() for value in held if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("shape", [(16, 6), (6, 16), (10,)])
@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("adamw", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("sgd_momentum", lambda parameters: torch.optim.SGD(parameters, momentum=0.9)),
        ("adafactor", torch.optim.Adafactor),
        ("muon", torch.optim.Muon),
    ],
)
def test_state_is_that_of_torch(name, build, shape):
    if name == "muon" and len(shape) == 1:  # torch's Muon takes matrices only: the rest goes to AdamW
        build = torch.optim.AdamW
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = build([parameter])
    parameter.grad = torch.ones(shape)
    optimizer.step()
    role = "norm" if len(shape) == 1 else "attention"
    assert state_elements(optimizer) == optimizer_elements(name, Tensor("x", shape, role))


def test_amsgrad_is_not_supported():
    with pytest.raises(KeyError, match="amsgrad"):
        optimizer_elements("amsgrad", MATRIX)
    with pytest.raises(JobError, match="optimizer='amsgrad'"):
        Job.checked({"seq": 1, "global_batch": 1, "optimizer": "amsgrad"})
