"""One layout explained: one step time everywhere, terms that add up, parts of terms by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import EXPERTS as EXPERTS_SPEC
from spaces import MIXED, SPEC

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.model import ModelSpec, Moe, preset
from shardwright.plan.explain import accounts, explanation, plan_of, predict
from shardwright.plan.finding import find
from shardwright.plan.space import search_space
from shardwright.planfile import MemoryTerms
from shardwright.units import significant

DENSE = ModelSpec(
    name="dense", model_type="llama", layers=8, hidden=512, ffn=1024, heads=8, kv_heads=4, head_size=64,
    vocab=1000,
)  # fmt: skip
MOE = DENSE.model_copy(
    update={
        "name": "moe",
        "model_type": "qwen3_moe",
        "qk_norm": True,
        "moe": Moe(experts=8, top_k=2, ffn=256),
    }
)
JOB = Job(seq=1024, global_batch=16)
CLUSTER = cluster_of("h100-sxm", 8, 4)

ONE = Layout(dp_shard=8, zero_stage=3, microbatches=2)
PIPELINE = Layout(
    pp=4, dp_shard=2, zero_stage=1, schedule="1F1B", stage_layers=(2, 2, 2, 2), microbatches=8, order=(
        "dp_replicate", "dp_shard", "pp", "cp", "tp"
    ),
)  # fmt: skip
EXPERTS = Layout(dp_shard=4, tp=2, sp=True, ep=4, zero_stage=2, microbatches=4)
HOSTED = Layout(
    dp_replicate=2, cp=2, tp=2, sp=True, cp_kind="ring", zero_stage=1, microbatches=8, recompute="selective",
    kept=KEPT_BY_SELECTIVE, offload="optimizer+activations", loss_chunks=8,
)  # fmt: skip
EVERY = [(DENSE, ONE), (DENSE, PIPELINE), (MOE, EXPERTS), (MOE, PIPELINE), (DENSE, HOSTED)]


def document(model, layout, job=JOB, cluster=CLUSTER):
    return accounts(plan_of(model, job, cluster, layout))


@pytest.mark.parametrize(("model", "layout"), EVERY)
def test_the_parts_of_a_step_add_up(model, layout):
    step = document(model, layout)["step"]
    assert step["time"] == pytest.approx(
        step["compute"] + step["bubble"] + step["exposed"] + step["optimizer"]
    )
    assert step["compute"] == pytest.approx(step["forward"] + step["backward"] + step["copies"])
    assert step["exposed"] == pytest.approx(sum(step["exposed_by_axis"].values()))
    assert (step["bubble"] > 0) == (layout.pp > 1)


@pytest.mark.parametrize(("model", "layout"), EVERY)
def test_the_terms_of_a_stage_add_up_and_a_fresh_plan_agrees_with_itself(model, layout):
    found = document(model, layout)
    assert found["stored_prediction_agrees"]
    for stage in found["stages"]:
        assert stage["total"] == sum(stage[term] for term in MemoryTerms.model_fields)
        assert stage["expert_parameters"] <= stage["parameters"]
    heaviest = max(found["stages"], key=lambda stage: stage["total"])
    assert heaviest["stage"] == found["heaviest_stage"]


def test_one_layout_has_one_step_time():
    """The search's row, the prediction of its plan and its explanation: the same to the last digit."""
    found = find(DENSE, JOB, CLUSTER, {"pp": 4, "tp": 1}, top=3)
    rows = found.document["best"]
    assert [row["runnable"] for row in rows[:3]] == [True] * 3
    assert not any(row["runnable"] for row in rows[3:])  # faster ones that are only modelled
    for row in rows:
        layout = Layout.checked(row["layout"])
        step = document(DENSE, layout)["step"]
        assert row["step_time"] == step["time"]
        assert row["bubble_time"] == step["bubble"]
        assert row["mfu"] == step["mfu"]
        assert predict(DENSE, JOB, CLUSTER, layout).step_time == significant(step["time"])


def test_the_simulated_bubble_stands_beside_the_closed_form():
    """Stages with the embedding or the head are longer, so that no rank waits as long as if all were."""
    step = document(DENSE.model_copy(update={"vocab": 100_000}), PIPELINE)["step"]
    assert 0 < step["bubble"] < step["bubble_closed_form"]


def test_parameters_of_experts_are_a_part_of_parameters():
    """4 B a parameter (fsdp2): 8 layers of 8 experts of 3 x 512 x 256, on ep 4 x expert_shard 2 ranks."""
    (stage,) = document(MOE, EXPERTS)["stages"]
    assert stage["expert_parameters"] == 8 * 8 * 3 * 512 * 256 // 8 * 4
    assert stage["expert_layers"] == 8
    assert document(DENSE, ONE)["stages"][0]["expert_parameters"] == 0


def test_a_frozen_base_is_a_part_of_parameters():
    """2 B a parameter: 8 layers of matrices and norms, embedding and head; adapters of 4 B apart."""
    job = Job(seq=1024, global_batch=16, lora_rank=8, lora_targets=("query", "value"))
    (stage,) = document(DENSE, ONE, job)["stages"]
    block = 512 * (512 + 256 + 256 + 512) + 3 * 512 * 1024 + 2 * 512
    whole = 2 * (8 * block + 512 + 2 * 1000 * 512)
    assert stage["frozen_parameters"] == whole // 8
    adapters = 8 * 8 * ((512 + 512) + (512 + 256))
    assert stage["parameters"] - stage["frozen_parameters"] == 4 * adapters // 8
    assert document(DENSE, ONE)["stages"][0]["frozen_parameters"] == 0


def test_what_is_offloaded_is_told_and_counted_once():
    kept = document(DENSE, HOSTED.model_copy(update={"offload": "none"}))["stages"][0]
    moved = document(DENSE, HOSTED)["stages"][0]
    assert kept["host_optimizer"] == kept["host_activations"] == 0
    assert moved["optimizer"] == 0
    assert moved["host_optimizer"] == kept["optimizer"]
    saved = sum(document(DENSE, HOSTED)["activations"]["saved_by_block"].values())
    assert moved["host_activations"] == pytest.approx(8 * saved, abs=8)


def test_measured_terms_name_their_source():
    sources = document(DENSE, ONE)["sources"]
    assert sources["context"].startswith("0.5 GiB, of 0.3 to 0.6 GiB for CUDA context")
    assert "nccl issue 964" in sources["communicators"]
    assert sources["margin"] == "5 %, of 3 to 8 % of peak"
    bare = CLUSTER.device.model_copy(update={"source": "a data sheet"})
    found = document(DENSE, ONE, cluster=CLUSTER.model_copy(update={"device": bare}))["sources"]
    assert "its file gives no source for it" in found["context"]


FAMILIES = (
    "gpt2", "opt-125m", "pythia-6.9b", "falcon-7b", "gemma-2-9b", "gemma-3-4b", "command-r", "olmo-2-7b",
    "starcoder2-15b", "stablelm-3b", "phi-3-mini", "mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b",
    "glm-4.5-air", "llama-4-scout", "qwen1.5-moe-a2.7b",
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_explained(name):
    model = preset(name)
    job = Job(seq=1024, global_batch=16)
    found = explanation(plan_of(model, job, CLUSTER, Layout(dp_shard=8, zero_stage=3, microbatches=2)))
    assert found["stored_prediction_agrees"]
    assert found["fitting"]["total"] == found["stages"][0]["total"]
    assert sum(found["activations"]["saved_by_block"].values()) > 0


SMALL_JOB = Job(seq=96, global_batch=8)
SPACES = [(model, search_space(model, SMALL_JOB, 8).flat()) for model in (SPEC, EXPERTS_SPEC, MIXED)]


@given(which=st.integers(0, 2), place=st.integers(0, 2**40))
@settings(max_examples=25, deadline=None)
def test_every_layout_of_a_space_adds_up(which, place):
    model, table = SPACES[which]
    layout = table.layout(place % table.rows, model.layers)
    found = explanation(plan_of(model, SMALL_JOB, CLUSTER, layout))
    step = found["step"]
    parts = step["compute"] + step["bubble"] + step["exposed"] + step["optimizer"]
    assert found["stored_prediction_agrees"]
    assert step["time"] == pytest.approx(parts)
    assert sum(row["exposed_time"] for row in found["budget"]) == pytest.approx(step["exposed"])
    assert sum(step["exposed_by_axis"].values()) == pytest.approx(step["exposed"])
    for stage in found["stages"]:
        assert stage["total"] == sum(stage[term] for term in MemoryTerms.model_fields)
    assert max(map(len, found["timeline_text"].splitlines())) <= 80
