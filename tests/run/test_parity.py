"""Any layout trains the same model as one process in plain PyTorch: real ranks over gloo, ragged masks.

In fp64 a wrong program shows as 1e-2 and a right one as 1e-13. Gradients are compared, not losses alone:
AdamW does not see a gradient that is wrong by a factor.
"""

from typing import NamedTuple

import pytest
import torch
from gloo import (
    MODELS,
    RaggedBatches,
    gradient_difference,
    job_of,
    layout_of,
    parallel_steps,
    plain_steps,
    relative,
)

from shardwright.run.launch import run_ranks

LOSS, NORM, GRADIENT, PARAMETER = 1e-9, 1e-8, 1e-9, 1e-8


class Row(NamedTuple):
    """One plan of the table."""

    replicate: int
    shard: int
    stage: int
    microbatches: int = 1
    model: str = "base"
    recompute: str = "none"
    optimizer: str = "adamw"
    micro_batch: int = 2
    empty: tuple[int, ...] = ()  # sequences of the global batch without an unmasked token


PATHS = [
    (2, 1, 0),
    (4, 1, 0),
    *((1, n, stage) for n in (2, 4) for stage in (1, 2, 3)),
    *((2, 2, s) for s in (1, 2, 3)),
]
"""dp_replicate, dp_shard, zero_stage: DDP, ZeRO-1 to 3 and HSDP."""

ROWS = [
    *(Row(*path, microbatches=m) for path in PATHS for m in (1, 3)),
    Row(1, 1, 0, microbatches=3),
    # every sequence of rank 1's second microbatch is masked; then every one of rank 1
    *(Row(*path, microbatches=2, empty=(6, 7)) for path in [(2, 1, 0), (1, 2, 2), (1, 2, 3)]),
    Row(1, 2, 3, empty=(2, 3)),
    *(Row(1, 2, stage, 2, recompute=kind) for stage in (1, 3) for kind in ("selective", "full")),
    Row(2, 2, 3, 2, recompute="full"),
    Row(2, 1, 0, 2, recompute="selective"),
    *(Row(1, 2, 3, 2, model=name) for name in MODELS if name != "base"),
    *(
        Row(2, 2, 2, 2, model=name, recompute="selective")
        for name in ("tied", "qk_norm", "bias", "uneven_vocab")
    ),
    Row(1, 4, 1, 2, model="rows_below_shards"),
    Row(1, 4, 3, 2, model="rows_below_shards"),
    Row(1, 4, 3, 2, model="uneven_vocab"),
    Row(2, 1, 0, 2, model="tied"),
    *(Row(*path, 2, optimizer=name) for path in [(2, 1, 0), (1, 2, 3)] for name in ("sgd", "sgd_momentum")),
    Row(2, 2, 3, 2, optimizer="sgd"),
    Row(1, 2, 2, 3, micro_batch=1),
]


def name_of(row):
    return "-".join(str(value).replace(" ", "") for value in row)


def plan_of(row, precision="fp64"):
    spec = MODELS[row.model]
    layout = layout_of(row.replicate, row.shard, row.stage, row.microbatches, row.micro_batch, row.recompute)
    job = job_of(layout.dp * layout.micro_batch * layout.microbatches, precision, row.optimizer)
    return spec, job, layout, RaggedBatches(spec.vocab, job.seq, row.empty)


def both(row, precision="fp64"):
    """What ranks of the row's plan find (all must find the same), and what one process finds."""
    spec, job, layout, batches = plan_of(row, precision)
    found = run_ranks(parallel_steps, layout.ranks, spec, job, layout, batches, timeout_s=60)
    assert all(other.losses == found[0].losses and other.norms == found[0].norms for other in found)
    reference = job.model_copy(update={"precision": "fp32"}) if precision == "bf16" else job
    return found[0], plain_steps(spec, reference, batches)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_fp64_equals_one_process(row):
    found, expected = both(row)
    assert relative(found.losses, expected.losses) < LOSS
    assert relative(found.norms, expected.norms) < NORM
    difference, name = gradient_difference(found, expected)
    assert difference < GRADIENT, name
    for name, value in expected.parameters.items():
        assert relative(found.parameters[name], value) < PARAMETER, name


@pytest.mark.parametrize("path", [(2, 1, 0), (1, 2, 3), (2, 2, 3)], ids=["replicate", "shard", "hsdp"])
def test_fp32_equals_one_process_by_every_reduction_path(path):
    found, expected = both(Row(*path, microbatches=2), "fp32")
    assert relative(found.losses, expected.losses) < 1e-5
    assert relative(found.norms, expected.norms) < 1e-5
    assert gradient_difference(found, expected)[0] < 1e-5


@pytest.mark.parametrize("path", [(2, 1, 0), (1, 2, 1), (1, 2, 3), (2, 2, 2)], ids=str)
def test_bf16_trains_near_fp32(path):
    found, expected = both(Row(*path, microbatches=2), "bf16")
    assert relative(found.losses, expected.losses) < 2e-2
    assert relative(found.norms, expected.norms) < 5e-2


def test_global_norm_is_one_number_in_every_layout():
    """Six layouts of one global batch of 12 sequences."""
    norms = []
    for path, micro_batch, microbatches in [
        ((1, 1, 0), 12, 1), ((2, 1, 0), 3, 2), ((1, 2, 1), 6, 1), ((1, 4, 2), 1, 3), ((1, 4, 3), 3, 1),
        ((2, 2, 3), 1, 3),
    ]:  # fmt: skip
        spec, job, layout, batches = plan_of(Row(*path, microbatches=microbatches, micro_batch=micro_batch))
        assert job.global_batch == 12
        norms.append(
            run_ranks(parallel_steps, layout.ranks, spec, job, layout, batches, timeout_s=60)[0].norms[0]
        )
    assert relative(norms, norms[:1] * len(norms)) < 1e-12


@pytest.mark.parametrize("path", [(1, 2, 3), (2, 2, 3), (2, 1, 0)], ids=["shard", "hsdp", "replicate"])
def test_divided_gradients_are_seen_in_gradients_and_not_in_the_loss(path):
    """Why a loss curve proves nothing: without clipping, AdamW hides a factor in all gradients.

    A divide factor of 2 halves them, and quarters them on replicas alone (torch divides in both reductions).
    """
    spec, job, layout, batches = plan_of(Row(*path, microbatches=2))
    job = job.model_copy(update={"clip_norm": 0.0, "learning_rate": 1e-3})
    found = run_ranks(parallel_steps, layout.ranks, spec, job, layout, batches, 2.0, timeout_s=60)[0]
    expected = plain_steps(spec, job, batches)
    assert gradient_difference(found, expected)[0] > 0.49
    assert found.norms[0] < 0.51 * expected.norms[0]
    assert relative(found.losses, expected.losses) < 1e-6


def test_reference_sees_every_parameter():
    """A gradient of zero would make its comparison empty."""
    spec, job, _, batches = plan_of(Row(1, 1, 0))
    expected = plain_steps(spec, job, batches)
    assert all(abs(value).max() > 0 for value in expected.gradients.values())
    assert expected.parameters["model.norm.weight"].shape == (spec.hidden,)
    assert torch.get_num_threads() == 1
