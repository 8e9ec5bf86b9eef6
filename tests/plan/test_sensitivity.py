"""Single changes of a plan: allowed ones keep every rule, their prices are those of their own plans."""

import pytest
from test_explain import CLUSTER, DENSE, EVERY, JOB, MOE, ONE, PIPELINE

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout, faults, model_faults
from shardwright.model import preset
from shardwright.plan.explain import explanation, plan_of, predict
from shardwright.plan.memory import device_memory
from shardwright.plan.neighbours import neighbours
from shardwright.plan.sensitivity import doubled_clusters, fitting, sensitivities
from shardwright.plan.table import table_of
from shardwright.planfile import MemoryTerms


def changes(model, layout, cluster=CLUSTER, job=JOB):
    return {row["change"]: row for row in sensitivities(plan_of(model, job, cluster, layout))}


@pytest.mark.parametrize(("model", "layout"), EVERY)
def test_allowed_changes_keep_ranks_batch_and_rules(model, layout):
    allowed = {row["label"] for row in changes(model, layout).values() if row["allowed"]}
    made = [each for each in neighbours(layout, model, JOB) if each.fields is not None]
    kept = 0
    for neighbour in made:
        if Layout.model_construct(**neighbour.fields).label in allowed:
            other = Layout.checked(dict(neighbour.fields))
            assert faults(other, JOB, CLUSTER) + model_faults(other, model, JOB) == []
            assert other != layout
            kept += 1
    assert kept >= 4


@pytest.mark.parametrize(("model", "layout"), EVERY)
def test_a_change_costs_what_its_own_plan_says(model, layout):
    own = predict(model, JOB, CLUSTER, layout)
    rows = changes(model, layout)
    for neighbour in neighbours(layout, model, JOB):
        row = rows[neighbour.change]
        if row["allowed"]:
            other = Layout(**neighbour.fields)
            assert row["label"] == other.label
            priced = predict(model, JOB, CLUSTER, other)
            assert row["step_time"] == pytest.approx(priced.step_time, rel=1e-5)
            assert row["memory"] == pytest.approx(priced.memory.total, abs=10)
            assert row["memory_change"] == pytest.approx(priced.memory.total - own.memory.total, abs=20)
        else:
            assert row["rules"]
            assert all(rule["message"] for rule in row["rules"])
            assert row["step_time"] is row["memory"] is None


def test_what_follows_from_a_change():
    found = {each.change: each.fields for each in neighbours(ONE, DENSE, JOB)}
    deeper = Layout(**found["pp x 2, dp_shard / 2"])
    assert deeper.label == "pp=2 dp_shard=4 1F1B zero=1 b=1 m=4"
    assert deeper.stage_layers == (4, 4)
    assert Layout(**found["tp x 2, dp_shard / 2"]).label == "dp_shard=4 tp=2 sp zero=3 b=1 m=4"
    assert Layout(**found["cp x 2, dp_shard / 2"]).label == "dp_shard=4 cp=2 ring zero=3 b=1 m=4"
    assert Layout(**found["dp_replicate x 2, dp_shard / 2"]).label.startswith("dp_replicate=2 dp_shard=4")
    assert Layout(**found["micro_batch x 2"]).label == "dp_shard=8 zero=3 b=2 m=1"
    back = {each.change: each.fields for each in neighbours(PIPELINE, DENSE, JOB)}
    assert Layout(**back["pp / 2, dp_shard x 2"]).label.startswith("pp=2 dp_shard=4")
    flat = {each.change: each.fields for each in neighbours(deeper, DENSE, JOB)}["pp / 2, dp_shard x 2"]
    assert Layout(**flat).label == "dp_shard=8 zero=3 b=1 m=2"


def test_experts_are_cut_by_tp_where_ep_does_not_cover_it():
    found = {each.change: each.fields for each in neighbours(ONE, MOE, JOB)}
    assert Layout(**found["tp x 2, dp_shard / 2"]).etp == 2
    assert Layout(**found["ep x 2"]).label == "dp_shard=8 ep=2 zero=3 b=1 m=2"


def test_forbidden_changes_name_the_rule():
    rows = changes(DENSE, Layout(dp_shard=8, zero_stage=3, micro_batch=2))
    assert [rule["code"] for rule in rows["micro_batch x 2"]["rules"]] == ["global_batch"]
    assert (
        "no axis can give half of its ranks (dp_replicate=1)" in rows["dp_shard x 2"]["rules"][0]["message"]
    )
    small = DENSE.model_copy(update={"heads": 3, "kv_heads": 3, "head_size": 64})
    assert {rule["code"] for rule in changes(small, ONE)["tp x 2, dp_shard / 2"]["rules"]} == {
        "tp_heads",
        "tp_kv_heads",
    }
    poor = CLUSTER.model_copy(update={"device": CLUSTER.device.model_copy(update={"host_memory": 1000})})
    assert [rule["code"] for rule in changes(DENSE, ONE, poor)["offload optimizer"]["rules"]] == [
        "host_memory"
    ]


def test_twice_the_bandwidth_never_costs_time():
    for model, layout in EVERY:
        rows = [row for row in changes(model, layout).values() if row["kind"] == "bandwidth"]
        assert {"bandwidth of node x 2", "bandwidth of network x 2", "peak FLOP/s x 2"} <= {
            row["change"] for row in rows
        }
        assert all(row["step_time_change"] <= 0 and row["memory_change"] == 0 for row in rows)
        assert ("host bandwidth x 2" in {row["change"] for row in rows}) == (layout.offload != "none")


def test_one_number_is_doubled():
    found = doubled_clusters(CLUSTER, ONE)
    node, network = found["bandwidth of network"].domains
    assert node == CLUSTER.domains[0]
    assert network.link.bandwidth == 2 * CLUSTER.domains[1].link.bandwidth
    assert found["peak FLOP/s"].device.bf16 == 2 * CLUSTER.device.bf16
    assert found["memory bandwidth"].device.memory_bandwidth == 2 * CLUSTER.device.memory_bandwidth
    assert all(cluster.ranks == CLUSTER.ranks for cluster in found.values())


def test_compute_alone_halves_with_twice_the_peak_and_bandwidth_of_memory():
    """On one rank without launches, what is left is products, and what the memory's bandwidth limits."""
    device = cluster_of("h100-sxm", 1).device.model_copy(update={"launch": 0.0})
    one = cluster_of("h100-sxm", 1).model_copy(update={"device": device})
    job = Job(seq=1024, global_batch=4)
    layout = Layout(microbatches=4)
    faster = doubled_clusters(one, layout)["peak FLOP/s"]
    both = doubled_clusters(faster, layout)["memory bandwidth"]
    times = [predict(DENSE, job, cluster, layout).step_time for cluster in (one, faster, both)]
    assert times[2] == pytest.approx(times[0] / 2, rel=1e-4)
    row = changes(DENSE, layout, one, job)["peak FLOP/s x 2"]
    assert row["step_time_change"] == pytest.approx(times[1] - times[0], rel=1e-3)


def test_what_does_not_fit_is_told_what_to_attack_and_what_makes_it_fit():
    model, job, cluster = preset("llama-3.1-8b"), Job(seq=8192, global_batch=8), cluster_of("h100-sxm", 8)
    plan = plan_of(model, job, cluster, Layout(dp_shard=8, zero_stage=3))
    document = explanation(plan)
    found = document["fitting"]
    small = cluster.model_copy(
        update={"device": cluster.device.model_copy(update={"memory": found["total"] - 2**30})}
    )
    tight = explanation(plan_of(model, job, small, plan.layout))
    assert found["fits"]
    assert found["terms"] == found["ways"] == []
    missing = tight["fitting"]
    assert not missing["fits"]
    assert missing["left"] == -(2**30)
    sizes = [term["bytes"] for term in missing["terms"]]
    assert sizes == sorted(sizes, reverse=True)
    assert missing["terms"][0]["term"] == max(
        MemoryTerms.model_fields, key=lambda term: document["stages"][0][term]
    )
    times = [way["step_time"] for way in missing["ways"]]
    assert times == sorted(times)
    assert "recompute selective" in {way["change"] for way in missing["ways"]}
    assert all(way["memory"] <= small.device.memory for way in missing["ways"])


def test_a_host_without_room_is_told():
    layout = ONE.model_copy(update={"offload": "optimizer"})
    plan = plan_of(DENSE, JOB, CLUSTER, layout)
    stage = explanation(plan)["stages"][0]
    device = CLUSTER.device.model_copy(update={"host_memory": stage["host_optimizer"] - 1})
    poor = plan.model_copy(update={"cluster": CLUSTER.model_copy(update={"device": device})})
    assert fitting(plan, stage, [])["fits"]
    assert not fitting(poor, stage, [])["fits"]
    assert device_memory(DENSE, JOB, device, table_of([layout], 8))[0] > 1e29
