"""Any layout trains the same model as one process in plain PyTorch: real ranks over gloo, ragged masks.

In fp64 a wrong program shows as 1e-2 and a right one as 1e-13. Gradients are compared, not losses alone:
AdamW does not see a gradient that is wrong by a factor. tests/run/matrix.py has the table.
"""

import numpy as np
import pytest
import torch
from gloo import MODELS, gradient_difference, parallel_steps, plain_steps, relative, repeated_norms
from matrix import (
    DUAL,
    HSDP,
    KINDS,
    ONE,
    ONE_BY_ONE,
    RING,
    ROWS,
    SHARD,
    ZBV,
    compared,
    found_by_ranks,
    joined,
    plan_of,
    row,
)

from shardwright.run.launch import run_ranks

TRACED = pytest.mark.filterwarnings("ignore")
"""Of compiled rows: torch's tracer warns of what it does itself."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.label, marks=[TRACED] if case.compiled else []) for case in ROWS]
)
def test_fp64_equals_one_process(case):
    found = compared(case)
    assert found.ok, found


def test_the_table_covers_what_it_should():
    """World sizes 2, 4 and 8, every axis alone and every pair of axes, every schedule and kind."""
    assert len(ROWS) >= 80
    assert len({case.label for case in ROWS}) == len(ROWS)
    assert {2, 4, 8} <= {case.layout.ranks for case in ROWS}
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")

    def wide(case):
        return {axis for axis in axes if getattr(case.layout, axis) > 1}

    present = [wide(case) for case in ROWS]
    for i, axis in enumerate(axes):
        assert axis == "ep" or {axis} in present, axis  # ep is cut out of other axes
        for other in axes[i + 1 :]:
            assert any({axis, other} <= case for case in present), (axis, other)
    assert any({"pp", "tp", "cp", "dp_shard"} <= case for case in present)
    assert any({"pp", "tp", "cp", "ep"} <= case for case in present)
    assert len({case.layout.schedule for case in ROWS}) == 8
    assert {case.layout.cp_kind for case in ROWS} == {"none", *KINDS}
    assert {case.layout.recompute for case in ROWS} == {"none", "selective", "full"}


@pytest.mark.parametrize(
    "case",
    [row(**HSDP), row("deep", pp=2, **ZBV), row("experts", ep=2, tp=2, sp=True)],
    ids=lambda case: case.label,
)
def test_a_backward_pass_leaves_nothing_behind_that_changes_the_next(case):
    """To the bit, though the first has made buffers, shapes and caches."""
    spec, job, batches = plan_of(case)
    for first, second in run_ranks(repeated_norms, case.layout.ranks, spec, job, case.layout, batches):
        assert first == second > 0


@pytest.mark.parametrize(
    "case",
    [
        *(row(**data) for data in ({"dp_replicate": 2}, SHARD, HSDP)),
        row(tp=2),
        row(tp=2, sp=True, **SHARD),
        *(row(cp=2, cp_kind=kind) for kind in KINDS),
        *(row("deep", pp=2, **schedule, **ONE) for schedule in (ONE_BY_ONE, ZBV, DUAL)),
    ],
    ids=lambda case: case.label,
)
def test_fp32_equals_one_process_by_every_reduction_path(case):
    """At a learning rate of 1e-3, where three steps do not drift apart."""
    spec, job, batches = plan_of(case, "fp32")
    job = job.model_copy(update={"learning_rate": 1e-3})
    every = run_ranks(parallel_steps, case.layout.ranks, spec, job, case.layout, batches, timeout_s=120)
    found, expected = joined(every), plain_steps(spec, job, batches)
    assert relative(found.losses, expected.losses) < 1e-5
    assert relative(found.norms, expected.norms) < 1e-4
    assert gradient_difference(found, expected)[0] < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        row(dp_replicate=2),
        row(dp_shard=2, zero_stage=1),
        row(**HSDP),
        row(tp=2, sp=True),
        row(**RING),
        row("deep", pp=2, **ONE_BY_ONE, **ONE),
    ],
    ids=lambda case: case.label,
)
def test_bf16_trains_near_fp32(case):
    found = compared(case, "bf16")
    assert found.loss < 2e-2
    assert found.norm < 5e-2


def test_global_norm_is_one_number_in_every_layout():
    """Layouts of one global batch of 12 sequences."""
    norms = []
    for fields in [
        {"micro_batch": 12, "microbatches": 1},
        {"dp_replicate": 2, "micro_batch": 3, "microbatches": 2},
        {"dp_shard": 4, "zero_stage": 2, "micro_batch": 1, "microbatches": 3},
        {**HSDP, "micro_batch": 1, "microbatches": 3},
        {"tp": 2, "sp": True, "micro_batch": 6},
        {"tp": 4, "micro_batch": 6},
        {"pp": 2, **ONE_BY_ONE, "micro_batch": 3, "microbatches": 4},
        {"pp": 2, **ZBV, **RING, "micro_batch": 3, "microbatches": 4},
        {"cp": 2, "cp_kind": "ulysses", **SHARD, "micro_batch": 3},
    ]:
        found = found_by_ranks(row("deep", **fields))
        assert plan_of(row("deep", **fields))[1].global_batch == 12
        norms.append(found.norms[0])
    assert relative(norms, norms[:1] * len(norms)) < 1e-12


@pytest.mark.parametrize("data", [SHARD, HSDP, {"dp_replicate": 2}], ids=["shard", "hsdp", "replicate"])
def test_divided_gradients_are_seen_in_gradients_and_not_in_the_loss(data):
    """Why a loss curve proves nothing: without clipping, AdamW hides a factor in all gradients.

    A divide factor of 2 halves them, and quarters them on replicas alone (torch divides in both reductions).
    """
    case = row(**data)
    spec, job, batches = plan_of(case)
    job = job.model_copy(update={"clip_norm": 0.0, "learning_rate": 1e-3})
    found = run_ranks(parallel_steps, case.layout.ranks, spec, job, case.layout, batches, 2.0, timeout_s=60)[
        0
    ]
    expected = plain_steps(spec, job, batches)
    assert gradient_difference(found, expected)[0] > 0.49
    assert found.norms[0] < 0.51 * expected.norms[0]
    assert relative(found.losses, expected.losses) < 1e-6


def test_reference_sees_every_parameter():
    """A gradient of zero would make its comparison empty."""
    spec, job, batches = plan_of(row())
    expected = plain_steps(spec, job, batches)
    assert all(np.abs(value).max() > 0 for value in expected.gradients.values())
    assert expected.parameters["model.norm.weight"].shape == (MODELS["base"].hidden,)
    assert torch.get_num_threads() == 1
