"""Ledger and dry run of pipelines and of real models; ``make prove`` has every row."""

import pytest
from large import LARGE
from matrix import ROWS
from proof import proof_plan

from shardwright.check.compare import check_plan, global_rank
from shardwright.errors import LayoutError
from shardwright.layout import Layout

PIPELINES = [
    row
    for row in ROWS
    if row.layout.pp == 2
    and row.layout.tp * row.layout.cp * row.layout.dp_replicate * row.layout.ep == 1
    and row.layout.recompute == "none"
    and row.layout.offload == "none"
    and row.model in ("deep", "deep_tied", "deep_gpt2")
    and not row.compiled
]
"""Every schedule alone, with ZeRO 1, with a tied matrix, with chunked loss."""

WITH_OTHER_AXES = [
    row
    for row in ROWS
    if row.layout.pp == 2
    and row.layout.schedule == "1F1B"
    and row.layout.tp * row.layout.cp * row.layout.ep > 1
][:6]

SIX = [
    large
    for large in LARGE
    if large.label
    in (
        "llama-3.1-8b dp_shard=64 zero=3 b=1 m=4 recompute=full",
        "mistral-7b-v0.3 dp_shard=32 tp=2 sp zero=3 b=1 m=4 loss_chunks=8",
        "qwen2.5-14b pp=4 dp_shard=16 1F1B zero=1 b=1 m=16 recompute=full",
        "gpt2-xl dp_replicate=4 dp_shard=8 zero=2 b=1 m=4",
        "mixtral-8x7b dp_shard=64 ep=8 zero=3 b=1 m=4 recompute=full",
        "deepseek-v2-lite dp_shard=32 ep=16 zero=3 b=1 m=4 recompute=selective",
    )
]


def faults(found):
    """Rows that do not hold; of memory at the peak the sum decides."""
    terms = [term for term in found.terms if not term.ok and (term.moment == "rest" or term.term == "total")]
    return terms + [flow for flow in found.traffic if not flow.ok]


@pytest.mark.parametrize("row", PIPELINES, ids=lambda row: row.label)
def test_every_stage_of_a_pipeline(row):
    found = check_plan(proof_plan(row))
    assert len(found.stages) == 2
    assert faults(found) == []


@pytest.mark.parametrize("row", WITH_OTHER_AXES, ids=lambda row: row.label)
def test_pipelines_with_other_axes(row):
    assert faults(check_plan(proof_plan(row))) == []


@pytest.mark.parametrize("large", SIX, ids=lambda large: large.label)
def test_real_models(large):
    assert faults(check_plan(large.plan)) == []


def test_six_real_models_are_there():
    assert len(SIX) == 6


def test_a_stage_that_is_not_there():
    with pytest.raises(LayoutError, match="stage 2: the plan has pp=2, choose from 0 to 1"):
        check_plan(proof_plan(PIPELINES[0]), stages=[2])


def test_the_first_rank_of_a_stage():
    layout = Layout(pp=4, dp_shard=2, tp=2, cp=2, cp_kind="ring", schedule="1F1B", stage_layers=(1,) * 4,
                    zero_stage=1, micro_batch=1, microbatches=4)  # fmt: skip
    inside = layout.order[layout.order.index("pp") + 1 :]
    stride = 1
    for axis in inside:
        stride *= getattr(layout, axis)
    assert [global_rank(layout, stage) for stage in range(4)] == [0, stride, 2 * stride, 3 * stride]
