"""Two plans side by side: every difference is there, the parts add up, and batches are not mixed up."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import cluster_of
from shardwright.errors import PlanFileError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.batch import batch_change
from shardwright.plan.comparison import compare_plans
from shardwright.plan.explain import accounts, plan_of

MODEL = preset("llama-3.1-8b")


def plan(stage=3, ranks=8, batch=64, device="h100-sxm", model=MODEL, seq=4096, **job):
    layout = Layout(dp_shard=ranks, zero_stage=stage, microbatches=batch // ranks)
    return plan_of(model, Job(seq=seq, global_batch=batch, **job), cluster_of(device, ranks, 8), layout)


SMALL = MODEL.model_copy(
    update={"name": "small", "layers": 2, "hidden": 512, "ffn": 1024, "heads": 4, "kv_heads": 4}
)

PLANS = st.builds(
    plan,
    model=st.just(SMALL),
    stage=st.integers(1, 3),
    ranks=st.sampled_from([2, 4, 16]),
    batch=st.sampled_from([32, 64]),
    device=st.sampled_from(["h100-sxm", "a100-sxm"]),
)


def rows_of(found, key, name):
    return {row[name]: row for row in found[key]}


@settings(deadline=None, max_examples=6)
@given(a=PLANS, b=PLANS)
def test_both_sides_are_what_explain_says_and_differences_add_up(a, b):
    found = compare_plans(a, b)
    json.dumps(found, allow_nan=False)
    for side, of in (("a", a), ("b", b)):
        explained = accounts(of)
        memory = rows_of(found, "memory", "term")
        total = memory.pop("total")
        assert sum(row[side] for row in memory.values()) == total[side] == explained["stages"][0]["total"]
        step = rows_of(found, "step", "part")
        time = step.pop("time")
        assert sum(row[side] for row in step.values()) == pytest.approx(time[side])
        sent = sum(row[side] for row in found["traffic"] if row["quantity"] == "bytes")
        assert sent == pytest.approx(sum(flow["bytes"] for flow in explained["traffic"]))
    for key in ("memory", "throughput"):
        for row in found[key]:
            assert row["difference"] == row["b"] - row["a"]
            assert row["ratio"] == (row["b"] / row["a"] if row["a"] else None)


@settings(deadline=None, max_examples=6)
@given(a=PLANS, b=PLANS)
def test_the_other_way_round_is_the_same_answer(a, b):
    there, back = compare_plans(a, b), compare_plans(b, a)
    other = {"A": "B", "B": "A", None: None}
    assert there["smaller"] == other[back["smaller"]]
    assert there["faster"] == other[back["faster"]]
    assert {row["field"] for row in there["layout"]} == {row["field"] for row in back["layout"]}


def test_a_plan_beside_itself_differs_in_nothing():
    found = compare_plans(plan(), plan())
    assert found["layout"] == found["job"] == found["cluster"] == []
    assert found["faster"] is found["smaller"] is found["batch"] is None
    assert found["same_batch"]
    for key in ("memory", "step", "traffic", "throughput"):
        assert all(row["difference"] == 0 for row in found[key])
    assert found["verdict"] == [
        f"A and B are equally fast within 0.1% ({found['throughput'][1]['a']:,.0f} tokens/s/GPU)",
        "A and B take the same memory within 0.1% (" + found["verdict"][1].split("(")[1],
    ]


def test_the_verdict_names_the_terms_that_decide():
    found = compare_plans(plan(stage=2), plan(stage=3))
    assert [row["field"] for row in found["layout"]] == ["zero_stage"]
    assert (found["faster"], found["smaller"]) == ("A", "B")
    speed, memory = found["verdict"]
    assert "A is " in speed
    assert "% faster (" in speed
    assert "exposed dp_shard +" in speed
    assert "B is smaller by " in memory
    assert "mostly gathered -" in memory


def test_terms_against_the_verdict_are_named_as_such():
    split = plan(stage=2)
    layout = Layout(dp_replicate=2, dp_shard=4, zero_stage=3, microbatches=8)
    found = compare_plans(split, plan_of(MODEL, split.job, split.cluster, layout))
    memory = found["verdict"][1]
    assert found["smaller"] == "A"
    assert memory.index("mostly optimizer +") < memory.index(", against gathered -")


def test_clusters_of_other_devices_and_sizes():
    found = compare_plans(plan(), plan(ranks=16, device="a100-sxm"))
    fields = rows_of(found, "cluster", "field")
    assert fields["device.name"]["b"] == "a100-sxm-80gb"
    assert fields["ranks"] == {"field": "ranks", "a": 8, "b": 16}
    assert not any(name.startswith("device.") and name != "device.name" for name in fields)
    assert "tokens/s on 16 devices of B and 8 of A; a device of B does " in found["verdict"][0]


# Batches


def test_other_batches_are_not_compared_by_step():
    found = compare_plans(plan(stage=2), plan(batch=256))
    assert not found["same_batch"]
    assert all(row["difference"] is None and row["ratio"] is None for row in found["step"])
    assert all(row["difference"] is None for row in found["traffic"])
    rates = rows_of(found, "throughput", "quantity")
    assert rates["tokens_per_s_per_gpu"]["difference"] is not None
    assert found["faster"] == ("A" if rates["tokens_per_s"]["difference"] < 0 else "B")
    assert "a step of one is not a step of the other" in found["verdict"][0]
    assert "a million tokens" in found["verdict"][0]


def test_another_batch_says_what_it_does_to_the_schedule():
    """Linear: Goyal et al. 2017, arXiv:1706.02677; square root: Malladi et al. 2022, arXiv:2205.10287."""
    a = Job(seq=4096, global_batch=256, steps=1000, warmup_steps=100, learning_rate=3e-4)
    b = a.model_copy(update={"global_batch": 1024})
    found = batch_change(a, b)
    assert found["ratio"] == 4
    assert (found["steps"], found["warmup_steps"]) == ([1000, 250], [100, 25])
    assert (found["linear"], found["square_root"]) == (pytest.approx(1.2e-3), pytest.approx(6e-4))
    assert (found["beta1"], found["beta2"]) == (pytest.approx(0.6), pytest.approx(0.8))
    assert (found["rule"], found["planned_learning_rate"]) == ("square_root", 3e-4)
    assert "1706.02677" in found["sources"]["linear"]
    assert "2205.10287" in found["sources"]["square_root"]
    assert batch_change(a.model_copy(update={"optimizer": "sgd_momentum"}), b)["rule"] == "linear"
    assert batch_change(a.model_copy(update={"optimizer": "muon"}), b)["rule"] is None
    assert batch_change(a, a.model_copy(update={"global_batch": 256 * 32}))["beta2"] is None


@settings(deadline=None)
@given(left=st.integers(1, 4096), right=st.integers(1, 4096), steps=st.integers(1, 10**6))
def test_steps_of_the_other_batch_reach_the_tokens_and_no_more(left, right, steps):
    a, b = Job(seq=64, global_batch=left, steps=steps), Job(seq=64, global_batch=right)
    found = batch_change(a, b)
    assert (found is None) == (left == right)
    if found is not None:
        tokens, other = steps * a.tokens_per_step, found["steps"][1]
        assert (other - 1) * b.tokens_per_step < tokens <= other * b.tokens_per_step
        assert found["linear"] / found["square_root"] == pytest.approx(math.sqrt(found["ratio"]), rel=1e-4)


def test_a_batch_is_counted_in_tokens():
    found = compare_plans(plan(batch=64, seq=4096), plan(batch=32, seq=8192))
    assert found["same_batch"]
    assert {row["field"] for row in found["job"]} == {"seq", "global_batch"}


# Models


def test_different_models_are_refused():
    other = preset("llama-3.2-1b")
    with pytest.raises(
        PlanFileError,
        match=r"different models, llama-3.1-8b and llama-3.2-1b \(.*layers=32 and 16.*plan the same",
    ):
        compare_plans(plan(), plan(model=other))


def test_the_same_model_under_another_name_is_not():
    renamed = MODEL.model_copy(update={"name": "mine", "source": "elsewhere"})
    assert compare_plans(plan(), plan(model=renamed))["faster"] is None
