"""Reports of ``plan`` and ``plan --why``: what runs before what is only modelled; at both widths."""

import pytest
from test_terminal import CLUSTER, JOB, MODEL, WIDTHS, plan_document, text_of, words_of

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.model import preset
from shardwright.plan.columns import column_code
from shardwright.plan.finding import find
from shardwright.plan.why import answer_why
from shardwright.report.plan import plan_report, why_report

LARGE = preset("llama-3.1-70b"), Job(seq=8192, global_batch=16), cluster_of("h100-sxm", 16)


@pytest.mark.parametrize("width", WIDTHS)
def test_brackets_in_a_plan_report_survive(width):
    document = plan_document(
        rejected={"out_of_memory": 3}, rejected_notes={"out_of_memory": "[zero=3 b=1] no"}
    )
    text = words_of(text_of(plan_report(document), width))
    assert "out_of_memory: [zero=3 b=1] no" in text
    assert f"chosen: [{document['best'][0]['label'].split(' zero=')[0]} zero=" in text
    assert "assumed: precision=fp32" in text


JOB_OF_32 = Job(seq=8192, global_batch=32)


def rows(document, runnable):
    return [row for row in document["best"] if row["runnable"] == runnable]


def lines_of(text):
    return [line.rstrip() for line in text.splitlines()]


def test_what_is_faster_but_only_modelled_comes_behind_in_a_table_of_its_own():
    document = plan_document()
    row = document["best"][0]
    faster = row | {"label": "tp=2 zero=0 b=1", "runnable": False, "step_time": row["step_time"] / 2}
    text = text_of(plan_report(document | {"best": [row, faster]}))
    lines = lines_of(text)
    assert lines.index("best layouts") + 2 < lines.index("faster, but only modelled")
    assert text.index(row["label"]) < text.index("faster, but") < text.index("tp=2 zero=0 b=1")
    assert "bubble" not in text
    piped = text_of(plan_report(document | {"best": [row, faster | {"bubble_time": 1e-3}]}))
    assert [line.split()[-1] for line in piped.splitlines() if "MFU" in line] == ["bubble", "bubble"]


@pytest.mark.parametrize("width", WIDTHS)
def test_where_nothing_that_runs_fits_it_says_so(width):
    asked = {"schedule": column_code("schedule", "ZB-H1", "")}
    document = find(*LARGE[:2], cluster_of("h100-sxm", 32), asked, top=3).document
    assert document["feasible_runnable"] == 0
    assert not rows(document, True)
    text = text_of(plan_report(document), width)
    words = words_of(text)
    assert "best layouts, only modelled" in words
    assert "train will refuse the best: " in words
    assert "no layout that train can execute is left" in words
    for row in document["best"]:
        share = row["exposed_time"] / row["step_time"]
        assert {f"{row['mfu']:.1%}", f"{share:.1%}"} <= set(words.split())  # nothing is broken over two lines


@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_of_a_label_is_broken(width):
    job = Job(seq=8192, global_batch=128)
    fixed = {"schedule": column_code("schedule", "InterleavedZeroBubble", ""), "tp": 2}
    document = find(preset("llama-3.1-8b"), job, cluster_of("h100-sxm", 8), fixed).document
    words = set(words_of(text_of(plan_report(document), width)).split())
    for row in document["best"]:
        assert set(row["label"].split()) <= words
        assert f"{row['bubble_time'] / row['step_time']:.1%}" in words


def test_ranked_by_time_alone_rows_say_whether_they_run():
    both = [column_code("schedule", name, "") for name in ("1F1B", "ZB-H1")]
    document = find(MODEL, JOB, CLUSTER, {"schedule": both}, ranking="time", top=30).document
    times = [row["step_time"] for row in document["best"]]
    assert times == sorted(times)
    assert rows(document, True)
    assert rows(document, False)
    text = text_of(plan_report(document))
    assert " runs" in text
    assert "faster, but" not in text


def why_of(text, *search, **options):
    return answer_why(text, *(search or LARGE), {}, **options).document


@pytest.mark.parametrize("width", WIDTHS)
def test_broken_rules_are_listed(width):
    text = words_of(text_of(why_report(why_of("tp=3 cp=3")), width))
    assert ["[dp_shard", "1"][0][:1] + "cp=3 tp=3 ring zero=3 b=1 m=16]" in text
    for part in ("ranks layout has 9 ranks", "tp_heads tp=3 does not divide heads=64", "cp_sequence cp=3"):
        assert part in text
    assert "step time" not in text


def test_another_batch_is_told_with_its_schedule():
    text = words_of(text_of(why_report(why_of("tp=8 b=2 m=64", *LARGE))))
    assert "global_batch dp=2 x micro_batch=2 x microbatches=64 is not" in text
    assert "the same tokens in " in text
    assert "by the linear rule" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_layout_that_does_not_fit_is_measured(width):
    document = why_of("pp=4 tp=8 b=4 ZB-H1", preset("llama-3.1-70b"), JOB_OF_32, cluster_of("h100-sxm", 32))
    text = words_of(text_of(why_report(document), width))
    for part in (
        "not asked for, taken as: dp_replicate=1, dp_shard=1, cp=1, sp=false",
        "memory of pipeline rank 3, the heaviest",
        "it does not fit: pipeline rank 3 needs",
        "on this mesh [",
        "exposed tp",
        "schedule='ZB-H1' is only modelled",
    ):
        assert part in text


def test_without_a_best_there_is_nothing_to_compare_with():
    document = why_of("tp=8", max_memory="1 GiB")
    text = words_of(text_of(why_report(document)))
    assert document["best"] == []
    assert document["nothing_fits"].startswith("no layout works")
    assert "nothing on this mesh fits with less kept" in text
    assert "nothing fits to compare it with" in text
