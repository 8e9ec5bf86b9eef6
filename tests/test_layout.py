"""Layout: the rules it keeps by itself, and against its job and cluster."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import cluster_of
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import (
    KEPT_BY_SELECTIVE,
    Layout,
    batches_that_work,
    check_layout,
    check_runnable,
    faults,
    not_runnable_reasons,
)
from shardwright.model import preset


def cpus(ranks: int):
    return cluster_of("cpu", ranks)


def test_degrees_multiply():
    layout = Layout(dp_replicate=2, dp_shard=4, zero_stage=3)
    assert layout.dp == layout.ranks == 8
    assert layout.label == "dp_replicate=2 dp_shard=4 zero=3 b=1 m=1"
    assert Layout(recompute="full").label == "zero=0 b=1 m=1 recompute=full"


@pytest.mark.parametrize(("stage", "shard"), [(0, 2), (1, 1), (2, 1), (3, 1)])
def test_the_zero_stage_agrees_with_dp_shard(stage, shard):
    with pytest.raises(
        LayoutError, match=f"zero_stage={stage} does not go with dp_shard={shard}: stage 0 means"
    ):
        Layout.checked({"zero_stage": stage, "dp_shard": shard})


def test_stages_above_three_do_not_exist():
    with pytest.raises(LayoutError, match=r"zero_stage=4: .*less than or equal to 3"):
        Layout.checked({"zero_stage": 4, "dp_shard": 2})


def test_kept_operations_agree_with_recompute():
    with pytest.raises(
        LayoutError, match=r"kept=\[\] does not go with recompute='selective': use \['q_proj'"
    ):
        Layout.checked({"recompute": "selective"})
    with pytest.raises(LayoutError, match=r"kept=\['q_proj'\] does not go with recompute='full': use \[\]"):
        Layout.checked({"recompute": "full", "kept": ["q_proj"]})
    assert Layout(recompute="selective", kept=KEPT_BY_SELECTIVE).kept == KEPT_BY_SELECTIVE


def test_both_contradictions_are_reported_at_once():
    with pytest.raises(LayoutError, match=r"zero_stage=1 does not go with dp_shard=1.*; kept="):
        Layout.checked({"zero_stage": 1, "recompute": "selective"})


def test_a_layout_that_fits_has_no_faults():
    check_layout(
        Layout(dp_shard=4, zero_stage=3, micro_batch=2, microbatches=3), Job(seq=8, global_batch=24), cpus(4)
    )


def test_a_batch_that_does_not_divide_names_the_nearest_that_do():
    layout, job = Layout(dp_shard=4, zero_stage=2, micro_batch=2), Job(seq=8, global_batch=20)
    with pytest.raises(LayoutError) as raised:
        check_layout(layout, job, cpus(4))
    assert "dp=4 x micro_batch=2 x microbatches=1 is not global_batch=20: use " in str(raised.value)
    assert "global_batch=16 (microbatches=2) or global_batch=24 (microbatches=3)" in str(raised.value)
    for batch, microbatches in ((16, 2), (24, 3)):
        check_layout(
            layout.model_copy(update={"microbatches": microbatches}),
            job.model_copy(update={"global_batch": batch}),
            cpus(4),
        )


def test_a_batch_that_divides_names_the_microbatches():
    with pytest.raises(LayoutError, match="is not global_batch=8: use microbatches=4"):
        check_layout(Layout(dp_replicate=2, microbatches=3), Job(seq=8, global_batch=8), cpus(2))


def test_more_ranks_than_samples():
    with pytest.raises(
        LayoutError,
        match=r"dp=8 ranks each need a sequence but global_batch=4: use at most 4 ranks or a global batch of",
    ):
        check_layout(Layout(dp_replicate=8), Job(seq=8, global_batch=4), cpus(8))


def test_all_faults_are_reported_at_once():
    found = faults(Layout(dp_replicate=2, micro_batch=3), Job(seq=8, global_batch=8), cpus(4))
    assert [fault.code for fault in found] == ["ranks", "global_batch"]
    with pytest.raises(
        LayoutError, match=r"layout has 2 ranks .*the cluster 4: make their product 4; dp=2 x micro"
    ):
        check_layout(Layout(dp_replicate=2, micro_batch=3), Job(seq=8, global_batch=8), cpus(4))


@settings(deadline=None)
@given(dp=st.integers(1, 64), micro_batch=st.integers(1, 8), wanted=st.integers(1, 4096))
def test_batches_that_work_are_the_nearest_on_each_side(dp, micro_batch, wanted):
    unit = dp * micro_batch
    found = batches_that_work(dp, micro_batch, wanted)
    assert found
    assert all(batch > 0 and batch % unit == 0 and abs(batch - wanted) <= unit for batch in found)
    assert found == sorted(found)


@settings(deadline=None)
@given(
    replicate=st.integers(1, 4),
    shard=st.integers(1, 4),
    micro_batch=st.integers(1, 4),
    microbatches=st.integers(1, 4),
    batch=st.integers(1, 64),
    ranks=st.integers(1, 16),
)
def test_no_fault_exactly_if_ranks_and_batch_agree(replicate, shard, micro_batch, microbatches, batch, ranks):
    layout = Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        zero_stage=3 if shard > 1 else 0,
        micro_batch=micro_batch,
        microbatches=microbatches,
    )
    agree = replicate * shard == ranks and replicate * shard * micro_batch * microbatches == batch
    assert (faults(layout, Job(seq=8, global_batch=batch), cluster_of("h100-sxm", ranks)) == []) == agree


def test_what_the_runtime_refuses_is_said_with_every_reason():
    job = Job(seq=8192, global_batch=8, optimizer="muon", accounting="megatron")
    with pytest.raises(
        LayoutError, match=r"sliding_window=4096 is shorter.*optimizer='muon' is only.*accounting='meg"
    ):
        check_runnable(preset("mistral-7b"), job, Layout())
    assert not_runnable_reasons(preset("llama-3.1-8b"), Job(seq=8192, global_batch=8), Layout()) == []
    assert not_runnable_reasons(preset("mistral-7b"), Job(seq=4096, global_batch=8), Layout()) == []
