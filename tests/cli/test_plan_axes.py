"""``plan`` over all axes: what is fixed, what runs and what is only modelled, and --why."""

import pytest
from command import H100, refused

from shardwright.planfile import load_plan

JOB = ("llama-3.1-8b", "--seq=4096", "--global-batch=64", *H100, "--json")
LARGE = ("llama-3.1-70b", "--seq=8192", "--global-batch=16", "--device=h100-sxm", "--gpus=16")


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (["--tp=2"], "tp", 2),
        (["--pp=2"], "pp", 2),
        (["--cp=4"], "cp", 4),
        (["--sp"], "sp", True),
        (["--no-sp", "--tp=4"], "sp", False),
        (["--cp-kind=all-gather"], "cp_kind", "all_gather"),
        (["--schedule=zbvzerobubble"], "schedule", "ZBVZeroBubble"),
        (["--chunks=4"], "chunks", 4),
        (["--recompute=full"], "recompute", "full"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_fixed_column_is_kept(run, options, field, value):
    outcome = run("plan", *JOB, *options)
    assert outcome.status == 0, outcome.err
    assert {row["layout"][field] for row in outcome.document["best"]} == {value}
    assert outcome.document["rejected"]["constraint"] > 0


def test_what_runs_comes_first(run):
    document = run("plan", *JOB).document
    runs = [row["runnable"] for row in document["best"]]
    assert document["ranking"] == "runnable_first"
    assert runs == sorted(runs, reverse=True)
    fastest = document["best"][0]["step_time"]
    assert all(row["step_time"] < fastest for row in document["best"] if not row["runnable"])


def test_only_what_runs(run):
    document = run("plan", *JOB, "--runnable").document
    assert all(row["runnable"] for row in document["best"])
    assert document["feasible"] == document["feasible_runnable"]
    assert document["best"][0] == run("plan", *JOB).document["best"][0]


def test_ranked_by_time_alone(run):
    document = run("plan", *JOB, "--modelled", "--top=20").document
    times = [row["step_time"] for row in document["best"]]
    assert document["ranking"] == "time"
    assert times == sorted(times)
    assert times[0] <= run("plan", *JOB).document["best"][0]["step_time"]


def test_a_modelled_plan_is_written_with_a_note(run, tmp_path):
    outcome = run("plan", *LARGE[:-1], "--gpus=32", "--schedule=ZB-H1", "-o", "p.toml")
    assert outcome.status == 0
    assert "best layouts, only modelled" in outcome.out
    wrote, note = outcome.err.splitlines()
    assert wrote == "wrote p.toml"
    assert note.startswith("p.toml is only modelled, train will refuse it: ")
    assert run("explain", "p.toml", "--json").document["runnable"] is False
    assert load_plan(tmp_path / "p.toml").layout.schedule == "ZB-H1"
    refused(run("train", "p.toml"), "plan is not runnable: schedule='ZB-H1' is only modelled: train with one")
    assert [path.name for path in tmp_path.iterdir()] == ["p.toml"]


def test_a_job_that_does_not_run_is_ranked_by_time(run):
    outcome = run("plan", *JOB, "--lora-rank=8", "--lora-targets=query", "-o", "p.toml")
    assert outcome.document["ranking"] == "time"
    assert outcome.document["feasible_runnable"] == 0
    assert "lora_rank=8 is only modelled" in outcome.err


def test_why(run, tmp_path):
    outcome = run("plan", *JOB, "--why", "tp=8 sp", "-o", "p.toml")
    assert (outcome.status, outcome.err) == (0, "wrote p.toml\n")
    why = outcome.document["why_layout"]
    assert {
        *("asked", "label", "completed", "faults", "layout", "runnable", "not_runnable_reasons"),
        *("memory", "step", "fits_with", "verdict", "batch"),
    } == why.keys()
    assert {"total", "limit", "left", "stage"} <= why["memory"].keys()
    assert {"time", "best_time", "best_label", "ratio", "parts"} == why["step"].keys()
    assert {"part", "time", "best", "difference"} == why["step"]["parts"][0].keys()
    assert outcome.document["best"][0]["label"] == why["step"]["best_label"]
    assert "tp=3 does not divide heads=32" in run("plan", *JOB[:-1], "--why", "tp=3").out


def test_why_of_a_job_that_fits_nowhere_answers_and_ends_with_1(run, tmp_path):
    outcome = run("plan", *LARGE, "--max-memory=1 GiB", "--why=tp=8", "--json", "-o", "p.toml")
    assert outcome.status == 1
    assert outcome.err.startswith("shardwright: no layout works")
    assert outcome.document["why_layout"]["memory"]["left"] < 0
    assert not list(tmp_path.iterdir())
