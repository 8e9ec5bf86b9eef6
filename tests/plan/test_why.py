"""``plan --why``: a layout read from words, completed, judged by rules, memory and time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import cluster_of
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import CONTEXT_KINDS, OFFLOAD_KINDS, SCHEDULE_NAMES, Layout
from shardwright.model import preset
from shardwright.plan.asked import completed, layout_fields, parse_layout
from shardwright.plan.explain import plan_of
from shardwright.plan.pipeline import simulated_times
from shardwright.plan.search import search
from shardwright.plan.space import search_space
from shardwright.plan.splits import ENDS
from shardwright.plan.why import answer_why, why_layout

MODEL = preset("llama-3.1-70b")
JOB = Job(seq=8192, global_batch=32)
CLUSTER = cluster_of("h100-sxm", 32)
LIMIT = float(CLUSTER.device.memory)
BEST = plan_of(MODEL, JOB, CLUSTER, Layout(dp_shard=32, zero_stage=3, recompute="full"))


def why(text, model=MODEL, job=JOB, cluster=CLUSTER, best=BEST, limit=LIMIT):
    return why_layout(model, job, cluster, parse_layout(text), limit, best)


def codes(text, **changes):
    return [fault["code"] for fault in why(text, **changes)["faults"]]


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("tp=16 pp=4", {"tp": 16, "pp": 4}),
        ("TP=8, sp,PP=2", {"tp": 8, "sp": 1, "pp": 2}),
        ("no-sp", {"sp": 0}),
        ("sp=false", {"sp": 0}),
        ("zb-h1 v=2", {"schedule": SCHEDULE_NAMES.index("ZB-H1"), "chunks": 2}),
        ("schedule=1f1b", {"schedule": SCHEDULE_NAMES.index("1F1B")}),
        ("ends=2", {"ends": ENDS.index((2, 2))}),
        ("ends=0/1", {"ends": ENDS.index((0, 1))}),
        ("ends=3/2 pp=4", {"ends": ENDS.index((3, 2)), "pp": 4}),
        ("all-gather cp=2", {"cp_kind": CONTEXT_KINDS.index("all_gather"), "cp": 2}),
        (
            "zero=1 b=2 m=3 recompute=full",
            {"zero_stage": 1, "micro_batch": 2, "microbatches": 3, "recompute": 2},
        ),
        ("recompute=full/2", {"recompute": 2, "recompute_every": 2}),
        ("recompute=full recompute_every=3", {"recompute": 2, "recompute_every": 3}),
        ("ep=8 etp=2 dispatch=by_node", {"ep": 8, "etp": 2, "dispatch": 1}),
        ("order=dp_replicate/dp_shard/pp/cp/tp", {"order": 2}),
        ("offload=optimizer", {"offload": OFFLOAD_KINDS.index("optimizer")}),
        ("Offload=Optimizer+Activations loss-chunks=8", {"offload": 3, "loss_chunks": 8}),
    ],
)
def test_words_become_columns(text, columns):
    assert parse_layout(text) == columns


def test_what_is_missing_is_completed():
    layout = Layout(**layout_fields(completed({"tp": 4, "pp": 2, "cp": 2}, MODEL, JOB, 32), MODEL))
    assert layout.label == "pp=2 dp_shard=2 cp=2 tp=4 ring 1F1B zero=1 b=1 m=16"
    flat = Layout(**layout_fields(completed({"tp": 4, "dp_replicate": 2}, MODEL, JOB, 32), MODEL))
    assert flat.label == "dp_replicate=2 dp_shard=4 tp=4 zero=3 b=1 m=4"
    whole = Layout(**layout_fields(completed({"dp": 8, "dp_shard": 1, "tp": 4}, MODEL, JOB, 32), MODEL))
    assert whole.label == "dp_replicate=8 tp=4 zero=0 b=1 m=4"


SPACES = {
    name: (model, job, ranks, search_space(model, job, ranks).flat())
    for name, model, job, ranks in (
        ("dense", preset("llama-3.1-8b"), Job(seq=4096, global_batch=16), 8),
        ("experts", preset("qwen3-30b-a3b"), Job(seq=4096, global_batch=8), 8),
    )
}


@pytest.mark.parametrize("name", SPACES)
@given(place=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_every_label_of_the_planner_reads_back(name, place):
    model, job, ranks, table = SPACES[name]
    layout = table.layout(place % table.rows, model.layers)
    again = Layout(**layout_fields(completed(parse_layout(layout.label), model, job, ranks), model))
    assert again.label == layout.label
    assert again.model_copy(update={"stage_layers": layout.stage_layers}) == layout


def test_a_row_of_the_search_is_judged_by_the_same_numbers():
    model, job, cluster = preset("llama-3.1-8b"), Job(seq=4096, global_batch=16), cluster_of("h100-sxm", 16)
    result = search(model, job, cluster)
    for row in np.random.default_rng(1).choice(len(result.time), 12, replace=False).tolist():
        layout = result.layout(row)
        ends = "/".join(map(str, ENDS[int(np.ravel(result.table.ends)[row])]))
        found = why(f"{layout.label} ends={ends}", model=model, job=job, cluster=cluster, best=None)
        assert found["faults"] == []
        assert found["memory"]["total"] == pytest.approx(result.device[row], abs=10)
        assert found["step"]["time"] == simulated_times(model, job, cluster, [layout])[0]


def test_experts_are_cut_by_tp_unless_ep_shares_them_out():
    model, job = preset("qwen3-30b-a3b"), Job(seq=4096, global_batch=8)

    def read(text):
        return Layout(**layout_fields(completed(parse_layout(text), model, job, 8), model))

    assert read("tp=4").etp == 4
    assert (read("tp=4 ep=8").etp, read("tp=4 ep=8").sp) == (1, True)
    assert (read("tp=4 ep=2").etp, read("tp=4 ep=2").ep) == (4, 2)
    assert read("ep=8 dispatch=by-node").dispatch == "by_node"
    assert (
        why("tp=4 ep=8", model=model, job=job, cluster=cluster_of("h100-sxm", 8), best=None)["faults"] == []
    )


def test_a_batch_that_is_not_the_jobs_is_told_with_its_schedule():
    """Twice the batch: half the steps; 2 x the rate by the linear rule, its root by the other."""
    found = why("dp_shard=32 zero=3 b=1 m=2")
    assert [fault["code"] for fault in found["faults"]] == ["global_batch"]
    assert found["batch"]["global_batch"] == [32, 64]
    assert found["batch"]["steps"] == [1000, 500]
    assert found["batch"]["linear"] == 6e-4
    sentence = found["verdict"][-1]
    assert sentence.startswith(
        "its global batch would be 64, not 32 (x 2): the same tokens in 500 steps, not 1,000"
    )
    assert "0.0006 by the linear rule, 0.000424 by the square root" in sentence
    assert why("dp_shard=32 zero=3")["batch"] is None
    assert why("dp_shard=16 zero=3 m=1")["batch"] is None  # ranks are wrong too


def test_a_host_without_room_is_a_broken_rule():
    device = CLUSTER.device.model_copy(update={"host_memory": 10**9})
    poor = CLUSTER.model_copy(update={"device": device})
    found = why("dp_shard=32 offload=optimizer recompute=full", cluster=poor)
    assert [fault["code"] for fault in found["faults"]] == ["host_memory"]
    assert "offload='optimizer' keeps 32.85 GiB on the host" in found["verdict"][0]
    assert codes("dp_shard=32 offload=optimizer recompute=full") == []


def test_experts_beyond_a_node_are_said_with_their_bytes():
    model, job, cluster = preset("qwen3-30b-a3b"), Job(seq=4096, global_batch=16), cluster_of("h100-sxm", 16)
    verdict = why("ep=16", model=model, job=job, cluster=cluster, best=None)["verdict"]
    assert any("a group of ep=16 reaches over 2 nodes of 8 devices" in sentence for sentence in verdict)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("tp=3", ["ranks", "tp_heads", "tp_kv_heads", "tp_ffn"]),
        ("dp_shard=3 tp=8", ["ranks", "global_batch"]),
        ("cp=16 ulysses", ["ulysses_heads"]),
        ("pp=4 zero=3", ["layout"]),
        ("1F1B", ["layout"]),
        ("pp=32 v=4 LoopedBFS", ["stages"]),
        ("pp=2000000000", ["stages", "ranks", "schedule"]),
        ("pp=16 m=8 dp_shard=2 b=2", ["schedule"]),
        ("dp=8 dp_shard=4 dp_replicate=4 tp=2", ["dp"]),
    ],
)
def test_every_broken_rule_is_named(text, broken):
    found = why(text)
    assert [fault["code"] for fault in found["faults"]] == broken
    assert found["verdict"] == [fault["message"] for fault in found["faults"]]
    assert found["memory"] is found["step"] is found["layout"] is None


def test_a_layout_that_fits_is_compared_part_by_part():
    found = why("tp=8 sp pp=4 recompute=selective")
    memory, step = found["memory"], found["step"]
    assert found["faults"] == []
    assert memory["left"] == memory["limit"] - memory["total"] > 0
    assert sum(row["time"] for row in step["parts"]) == pytest.approx(step["time"])
    assert sum(row["best"] for row in step["parts"]) == pytest.approx(step["best_time"])
    assert sum(row["difference"] for row in step["parts"]) == pytest.approx(step["time"] - step["best_time"])
    assert {"bubble", "exposed tp"} <= {row["part"] for row in step["parts"]}
    assert step["best_label"] == BEST.layout.label
    assert found["runnable"] is True
    modelled = why("tp=8 sp pp=4 ZB-H1")
    assert modelled["runnable"] is False
    assert found["verdict"][0].startswith("it fits, ")


def test_tp_beyond_a_node_is_said_with_its_bytes():
    sentence = next(
        each for each in why("tp=16 sp recompute=full pp=2")["verdict"] if "tp=16 reaches" in each
    )
    assert "reaches over 2 nodes of 8 devices" in sentence
    assert "over the network" in sentence
    assert not any("reaches" in each for each in why("tp=8 sp pp=4")["verdict"])


def test_what_does_not_fit_is_told_what_would():
    found = why("dp_shard=32 b=1")
    assert found["memory"]["left"] < 0
    other = found["fits_with"]
    assert other["label"].startswith("dp_shard=32 zero=3 b=1 m=1 ")
    layout = Layout(**layout_fields(completed(parse_layout(other["label"]), MODEL, JOB, 32), MODEL))
    assert other["step_time"] == simulated_times(MODEL, JOB, CLUSTER, [layout])[0]
    assert other["total"] <= LIMIT
    assert any(other["label"] in sentence for sentence in found["verdict"])
    assert why("dp_replicate=32")["fits_with"] is None


def test_an_answer_holds_the_search_too():
    answer = answer_why("tp=8 pp=4", MODEL, JOB, CLUSTER, {}, top=2)
    assert answer.nothing is None
    assert answer.best is not None
    assert answer.document["why_layout"]["asked"] == "tp=8 pp=4"
    assert answer.document["why_layout"]["step"]["best_label"] == answer.document["best"][0]["label"]
    nothing = answer_why("tp=8", MODEL, JOB, CLUSTER, {}, max_memory="1 GiB")
    assert nothing.best is None
    assert nothing.document["why_layout"]["step"]["best_time"] is None


@pytest.mark.parametrize(
    "text",
    [
        "tp",
        "foo=3",
        "tp=-1",
        "tp=1.5",
        "zero=4",
        "schedule=x",
        "tp=2 tp=3",
        "",
        "recompute=full/0",
        "recompute=all/2",
        "order=tp/pp",
        "offload=weights",
        "loss_chunks=0",
        "recompute=full/2 recompute_every=3",
    ],
)
def test_words_that_name_no_layout(text):
    with pytest.raises(LayoutError, match="--why"):
        parse_layout(text)


@pytest.mark.parametrize(
    "text", ["ends=4", "ends=1/4", "ends=1/1/1", "ends=-1", "ends=0/", "ends=", "ends=a/0"]
)
def test_ends_that_have_no_code(text):
    with pytest.raises(
        LayoutError, match="ends must be from 0 to 3, layers less on both ends, or two numbers"
    ):
        parse_layout(text)
