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
    faults,
    model_faults,
    ulysses_degrees,
)
from shardwright.model import preset
from shardwright.plan.splits import stage_layers


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


# pp, cp and tp


PIPED = {"pp": 2, "schedule": "1F1B", "stage_layers": [16, 16]}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (PIPED | {"dp_shard": 2, "zero_stage": 2},
         "zero_stage=2 does not go with pp=2: a pipeline holds a stage's parameters and gradients whole "
         "through the step, use zero_stage 0 or 1"),
        (PIPED | {"dp_shard": 2, "zero_stage": 3}, "zero_stage=3 does not go with pp=2: a pipeline holds"),
        (PIPED | {"schedule": "none"},
         "schedule='none' does not go with pp=2: use one of GPipe, 1F1B, LoopedBFS, Interleaved1F1B, "
         "InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, ZB-H1, ZB-H2, DualPipe"),
        ({"schedule": "GPipe"}, "schedule='GPipe' does not go with pp=1: use 'none'"),
        (PIPED | {"stage_layers": [32]},
         "stage_layers=[32] does not go with pp=2 x chunks=1: give the layers of 2 stages"),
        (PIPED | {"chunks": 2, "schedule": "Interleaved1F1B"},
         "stage_layers=[16, 16] does not go with pp=2 x chunks=2: give the layers of 4 stages"),
        ({"stage_layers": [32]},
         "stage_layers=[32] does not go with pp=1 x chunks=1: give the layers of no stages"),
        ({"chunks": 2, "stage_layers": [16, 16]},
         "chunks=2 does not go with pp=1: a single rank is not interleaved, use 1"),
        ({"cp": 2, "zero_stage": 3},
         "cp_kind='none' does not go with cp=2: use 'ring', 'all_gather' or 'ulysses'"),
        ({"cp_kind": "ring"}, "cp_kind='ring' does not go with cp=1: use 'none'"),
        ({"sp": True}, "sp=true does not go with tp=1: sequence parallelism splits over tp"),
        ({"cp": 2, "cp_kind": "ring"},
         "zero_stage=0 does not go with dp_shard=1 x cp=2: stage 0 means dp_shard=1 and cp=1, stages 1 to 3 "
         "split over two ranks and more"),
    ],
)  # fmt: skip
def test_axes_agree_with_each_other(fields, fault):
    with pytest.raises(LayoutError) as raised:
        Layout.checked(fields)
    assert fault in str(raised.value)


def test_every_contradiction_of_the_axes_is_reported_at_once():
    with pytest.raises(LayoutError) as raised:
        Layout.checked({"pp": 2, "cp": 2, "sp": True})
    for part in ("zero_stage=0 ", "schedule='none' ", "stage_layers=[] ", "cp_kind='none' ", "sp=true "):
        assert part in str(raised.value)


def test_axes_multiply_and_are_named():
    layout = Layout(
        pp=2, dp_replicate=2, dp_shard=3, cp=4, tp=5, sp=True, cp_kind="ring", schedule="Interleaved1F1B",
        chunks=2, stage_layers=(1, 2, 2, 1), zero_stage=1, microbatches=8,
    )  # fmt: skip
    assert (layout.dp, layout.shard, layout.ranks) == (6, 12, 240)
    assert layout.label == (
        "pp=2 dp_replicate=2 dp_shard=3 cp=4 tp=5 sp ring Interleaved1F1B v=2 zero=1 b=1 m=8"
    )


def faults_of(model, seq=4096, **fields):
    job = Job(seq=seq, global_batch=8)
    return {fault.code: fault.message for fault in model_faults(Layout(**fields), model, job)}


def heads(query, key_value, **changes):
    shape = {"heads": query, "kv_heads": key_value, "head_size": 128, "hidden": 128 * query}
    return preset("llama-2-7b").model_copy(update=shape | changes)


def test_28_heads_and_4_key_value_heads_do_not_go_on_8_ranks():
    """DAMO-NLP-SG/LongPO issue 5: 28 query and 4 key/value heads on 8 GPUs."""
    model = heads(28, 4)
    assert faults_of(model, tp=8) == {
        "tp_heads": "tp=8 does not divide heads=28 (model llama-2-7b)",
    }
    found = faults_of(model, cp=8, cp_kind="ulysses", zero_stage=3)
    assert found == {
        "ulysses_heads": "cp=8 does not trade heads=28 and kv_heads=4 at tp=1: use cp in [1, 2, 4, 28]"
    }
    assert ulysses_degrees(model) == [1, 2, 4, 28]


def test_ulysses_degrees_of_40_heads_and_8_key_value_heads():
    assert ulysses_degrees(heads(40, 8)) == [1, 2, 4, 8, 40]
    assert ulysses_degrees(heads(40, 8), tp=2) == [1, 2, 4, 20]
    assert ulysses_degrees(heads(40, 8), tp=40) == [1]


@settings(deadline=None)
@given(kv=st.integers(1, 12), group=st.integers(1, 8), tp=st.integers(1, 12))
def test_ulysses_shares_out_heads_evenly(kv, group, tp):
    """Each rank has as many query heads as any, and as many key/value heads, or a copy of just one."""
    model = heads(kv * group, kv)
    if "tp_heads" in faults_of(model, tp=tp) or "tp_kv_heads" in faults_of(model, tp=tp):
        return
    for cp in ulysses_degrees(model, tp):
        mine, keys = model.heads // tp, max(kv // tp, 1)
        assert mine % cp == 0
        assert keys % cp == 0 or cp == mine


def test_tp_and_the_shape_of_the_model():
    model = preset("llama-3.1-8b")
    assert faults_of(model, tp=8) == faults_of(model, tp=32) == {}  # key/value heads repeated
    assert faults_of(heads(48, 6), tp=4)["tp_kv_heads"] == (
        "tp=4 neither divides kv_heads=6 nor is a multiple of it (model llama-2-7b)"
    )
    odd = model.model_copy(update={"ffn": 14_340})
    assert faults_of(odd, tp=8) == {"tp_ffn": "tp=8 does not divide ffn=14340 (model llama-3.1-8b)"}


@pytest.mark.parametrize(
    ("cp", "seq", "good"), [(2, 4096, True), (2, 4098, False), (3, 4096, False), (3, 6, True)]
)
def test_a_sequence_is_cut_in_two_parts_for_each_context_rank(cp, seq, good):
    found = faults_of(preset("llama-3.1-8b"), seq, cp=cp, cp_kind="ring", zero_stage=3)
    message = f"cp={cp} does not divide seq={seq} into two equal parts a rank, which balance causal work"
    assert found == ({} if good else {"cp_sequence": message})


def test_sp_cuts_the_sequence_of_a_context_rank():
    split = {"cp": 2, "cp_kind": "ring", "tp": 8, "sp": True, "zero_stage": 3}
    assert faults_of(preset("llama-3.1-8b"), 4096, **split) == {}
    assert faults_of(preset("llama-3.1-8b"), 4100, **split) == {
        "sp_sequence": "tp=8 with sp does not divide seq=4100 / cp=2"
    }


def test_no_layer_is_lost_between_stages():
    """30 layers on 4 stages: 8, 8, 7, 7 in some order, and no split that drops two."""
    model = preset("llama-2-7b").model_copy(update={"layers": 30})
    piped = {"pp": 4, "schedule": "1F1B"}
    assert sum(stage_layers(30, 4)) == 30
    assert faults_of(model, **piped, stage_layers=stage_layers(30, 4)) == {}
    assert faults_of(model, **piped, stage_layers=(7, 7, 7, 7)) == {
        "stage_layers": "stage_layers add up to 28, the model has layers=30"
    }
