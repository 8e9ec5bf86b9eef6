"""The report of ``explain``: every rank of a pipeline, traffic by axis, the bubble; at both widths."""

import pytest
from test_terminal import CLUSTER, JOB, LAYOUT, MODEL, WIDTHS, text_of, words_of

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.explain import explanation, plan_of
from shardwright.report.explain import explain_report

PIPELINE = Layout(
    pp=8, cp=2, tp=4, sp=True, cp_kind="ulysses", schedule="1F1B", zero_stage=1, microbatches=128,
    stage_layers=(10,) * 8,
)  # fmt: skip


def pipeline_document(**changes):
    layout = Layout.checked(PIPELINE.model_dump() | changes)
    job = Job(seq=8192, global_batch=128)
    return explanation(plan_of(preset("llama-3.1-70b"), job, cluster_of("h100-sxm", 64), layout))


@pytest.mark.parametrize("width", WIDTHS)
def test_explain_report_shows_every_part(width):
    document = explanation(plan_of(MODEL, JOB, CLUSTER, LAYOUT))
    text = text_of(explain_report(document), width)
    for part in (
        "parameters",
        "gathered",
        "total",
        "at rest",
        "dp_replicate+",
        "dp_shard (4)",
        "reduce_scatter",
    ):
        assert part in words_of(text)
    assert "stored" not in text


def test_explain_report_tells_of_a_stale_prediction_and_of_what_does_not_run():
    document = explanation(plan_of(MODEL, JOB, CLUSTER, LAYOUT))
    document |= {
        "stored_prediction_agrees": False,
        "runnable": False,
        "not_runnable_reasons": ["muon [only]"],
    }
    text = words_of(text_of(explain_report(document)))
    assert "the prediction stored in the plan is not of this layout" in text
    assert "not runnable: muon [only]" in text


def test_one_rank_has_no_traffic():
    plan = plan_of(MODEL, JOB, cluster_of("cpu", 1), Layout(micro_batch=8))
    assert "traffic: none, one rank" in text_of(explain_report(explanation(plan)))


def row_of(text, name):
    return next(line for line in text.splitlines() if line.startswith(name)).split()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_ranks_of_a_pipeline_stand_side_by_side(width):
    document = pipeline_document()
    text = text_of(explain_report(document), width)
    assert [stage["stage"] for stage in document["stages"]] == [0, 1, 7]
    assert row_of(text, "layers")[1:] == ["10", "10", "10"]
    assert row_of(text, "microbatches in flight")[3:] == ["8", "7", "1"]
    words = words_of(text)
    assert "rank 0* rank 1 rank 7 of the device, rank 0" in words
    assert "* the heaviest rank, at rest, end of backward: parameters" in words
    assert "ranks between the second and the last hold what the second does, or less" in words
    totals = [stage["total"] for stage in document["stages"]]
    assert totals[0] == max(totals)
    assert row_of(text, "total")[-1] == f"{totals[0] / document['device']['memory']:.1%}"


@pytest.mark.parametrize("width", WIDTHS)
def test_traffic_and_time_of_every_axis(width):
    document = pipeline_document()
    text = words_of(text_of(explain_report(document), width))
    flows = {(flow["axis"], flow["collective"]) for flow in document["traffic"]}
    assert {("pp", "send"), ("cp", "all_to_all"), ("tp", "all_gather"), ("tp", "reduce_scatter")} <= flows
    for part in ("pp (8) send", "cp (2) all_to_all", "tp (4) all_gather", ["dp_shard+", "cp", "(2)"][0]):
        assert part in text
    step = document["step"]
    assert sum(step["exposed_by_axis"].values()) == pytest.approx(step["exposed"])
    assert {"tp", "cp"} <= step["exposed_by_axis"].keys()
    assert step["bubble_fraction"] == pytest.approx(step["bubble"] / step["time"])
    assert "bubble: 1F1B on 8 ranks, 128 microbatches: the busiest rank is idle for " in text
    assert f"{step['bubble_fraction']:.1%} of the step" in text


def test_two_ranks_and_chunks_are_named_right():
    layers = {"stage_layers": (20,) * 4, "schedule": "Interleaved1F1B", "chunks": 2}
    document = pipeline_document(pp=2, dp_shard=4, microbatches=32, **layers)
    text = words_of(text_of(explain_report(document)))
    assert [stage["stage"] for stage in document["stages"]] == [0, 1]
    assert "bubble: Interleaved1F1B on 2 ranks x 2 chunks, 32 microbatches" in text
    assert "ranks between" not in text


def test_without_a_pipeline_there_is_no_bubble_line():
    text = text_of(explain_report(explanation(plan_of(MODEL, JOB, CLUSTER, LAYOUT))))
    assert "bubble:" not in text
    assert "in flight" not in text


def test_the_budget_the_picture_and_single_changes_are_shown():
    document = pipeline_document()
    text = text_of(explain_report(document), 100)
    words = words_of(text)
    assert "bandwidth budget of a step, an average rank" in words
    total = sum(row["share"] for row in document["budget"] if row["link"] == "network")
    assert f"network {total:.1%}" in words
    for line in document["timeline_text"].splitlines():
        assert line in text
    changes = {row["change"]: row for row in document["sensitivities"]}
    row = changes["recompute selective"]
    share = f"{row['step_time_change'] / document['step']['time']:+.1%}"
    assert share in row_of(text, "recompute selective")
    assert row_of(text, "bandwidth of network x 2")[-2:] == [
        f"{changes['bandwidth of network x 2']['step_time_change'] / document['step']['time']:+.1%}",
        "-",
    ]
    assert "rules forbid: dp_shard x 2 (ranks); dp_replicate x 2 (ranks)" in words
    assert "it fits: " in words


def test_what_does_not_fit_is_told_what_makes_it_fit():
    cluster = cluster_of("h100-sxm", 64)
    device = cluster.device.model_copy(update={"memory": 58 * 2**30})
    job, model = Job(seq=8192, global_batch=128), preset("llama-3.1-70b")
    document = explanation(plan_of(model, job, cluster.model_copy(update={"device": device}), PIPELINE))
    words = words_of(text_of(explain_report(document)))
    assert "it does not fit: " in words
    assert "most of it is activations" in words
    assert "recompute selective makes it fit: " in words


def test_experts_frozen_bases_and_the_host_have_lines():
    job = Job(seq=1024, global_batch=16, lora_rank=8, lora_targets=("query",))
    layout = Layout(dp_shard=8, zero_stage=3, microbatches=2, offload="optimizer+activations")
    cluster = cluster_of("h100-sxm", 8)
    text = text_of(explain_report(explanation(plan_of(preset("qwen3-30b-a3b"), job, cluster, layout))), 100)
    assert row_of(text, "  of experts")[2:]
    assert row_of(text, "  frozen")[1:]
    words = words_of(text)
    assert "on the host, for each rank: optimizer state " in words
    assert "a block with experts keeps " in words
    assert "host host " in words
    assert "context: 0.5 GiB, of 0.3 to 0.6 GiB" in words
