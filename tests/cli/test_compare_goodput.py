"""``compare`` and ``goodput``: documents, reports and refusals."""

import pytest
from command import SPEC, refused

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.plan import explain
from shardwright.planfile import save_plan


@pytest.fixture
def other_plan(tmp_path):
    """The plan of ``plan_file`` with twice the batch and another stage."""
    job = Job(seq=32, global_batch=8, steps=5, precision="fp32")
    layout = Layout(dp_shard=2, zero_stage=1, microbatches=4)
    return save_plan(explain.plan_of(SPEC, job, cluster_of("cpu", 2), layout), tmp_path / "b.toml")


def test_compare_document(run, plan_file, other_plan):
    outcome = run("compare", plan_file, other_plan, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    document = outcome.document
    assert {
        *("model", "a", "b", "layout", "job", "cluster", "memory", "traffic", "step", "throughput"),
        *("same_batch", "batch", "faster", "smaller", "verdict"),
    } <= document.keys()
    assert {"term", "a", "b", "difference", "ratio"} == document["memory"][0].keys()
    assert {"axis", "quantity", "a", "b", "difference", "ratio"} == document["traffic"][0].keys()
    assert [row["field"] for row in document["layout"]] == ["zero_stage", "microbatches"]
    assert document["batch"]["ratio"] == 2


def test_compare_report(run, plan_file, other_plan):
    text = " ".join(run("compare", plan_file, other_plan).out.split())
    for part in (
        "zero_stage 3 1",
        "memory of the heaviest rank",
        "step time (of different batches)",
        "the global batch differs: A 4 sequences (128 tokens), B 8 (256 tokens), x 2",
        "A's 640 tokens are 5 steps of A, 3 of B",
        "becomes 0.0006 by the linear rule",
        "shown for this optimizer: square root",
    ):
        assert part in text
    same = run("compare", plan_file, plan_file).out
    assert "layout, job and cluster are the same" in same
    assert "the global batch differs" not in same


def test_compare_refuses(run, plan_file, tmp_path):
    model = SPEC.model_copy(update={"layers": 3})
    layout = Layout(dp_shard=2, zero_stage=3, microbatches=2)
    plan = explain.plan_of(model, Job(seq=32, global_batch=4), cluster_of("cpu", 2), layout)
    save_plan(plan, tmp_path / "b.toml")
    refused(
        run("compare", plan_file, "b.toml"),
        "shardwright: plans are of different models, tiny and tiny (layers=2 and 3): ",
        "plan the same model twice with 'shardwright plan MODEL ... -o'",
    )
    refused(run("compare", plan_file, "absent.toml"), "plan file absent.toml does not exist: make one with")
    refused(run("compare", plan_file), "Missing argument")


def test_goodput_document(run, plan_file):
    outcome = run("goodput", plan_file, "--tokens=1M", "--price=2.5", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    document = outcome.document
    assert {
        *("model", "layout", "devices", "tokens", "steps", "step_time", "device_mtbf", "mtbf", "save_time"),
        *("restart_time", "sources", "assumed", "price_per_device_hour", "ideal", "expected"),
        *("checkpoint", "intervals", "levers"),
    } <= document.keys()
    assert {"time", "device_time", "cost"} <= document["ideal"].keys()
    assert {"time", "cost", "goodput", "failures", "rework", "restarts"} <= document["expected"].keys()
    assert {"bytes", "interval_steps", "best", "young", "daly"} <= document["checkpoint"].keys()
    assert document["tokens"] == 10**6


def test_goodput_report(run, plan_file):
    options = ("--mtbf-hours=100", "--save-time=60 s", "--restart-time=10 min")
    text = " ".join(run("goodput", plan_file, "--tokens=1T", *options).out.split())
    for part in (
        "1.00 T tokens",
        "60.0 s given",
        "10.0 min given",
        "not stated",
        "Young",
        "failures expected",
    ):
        assert part in text
    assert "assumed" not in text
    text = run("goodput", plan_file, "--tokens=300B", "--price=2").out
    assert "assumed: 419 interruptions in 54 days" in text
    assert "at 2 a device-hour" in text


def test_goodput_of_measured_interruptions(run, plan_file):
    measured = ("--interruptions=419", "--days=54", "--devices=16384")
    document = run("goodput", plan_file, "--tokens=1B", *measured, "--json").document
    assert document["device_mtbf"] / 3600 == pytest.approx(50_677, abs=1)
    assert "device_mtbf" not in document["assumed"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ([], ["Missing option '--tokens'"]),
        (["--tokens=many"], ["shardwright: --tokens: 'many' is not a whole number", "with k, M, B or T"]),
        (["--tokens=0"], ["--tokens=0 must be at least 1"]),
        (["--tokens=-5B"], ["'-5B' is not a whole number"]),
        (
            ["--tokens=1B", "--save-time=60"],
            ["--save-time: '60' is not a finite number with a unit of s, ms"],
        ),
        (["--tokens=1B", "--storage-bandwidth=20 GB"], ["--storage-bandwidth: '20 GB' is not", "GB/s"]),
        (["--tokens=1B", "--mtbf-hours=nan"], ["--mtbf-hours must be finite and above 0"]),
        (["--tokens=1B", "--price=0"], ["--price must be finite and above 0"]),
        (["--tokens=1B", "--interruptions=3"], ["--days, --devices missing"]),
        (["--tokens=1B", "--interruptions=0"], ["'--interruptions'"]),
        (
            ["--tokens=0", "--save-time=1 s", "--storage-bandwidth=1 GB/s"],
            ["--tokens=0 must be", "; --save-time and --storage-bandwidth say the same: leave one out"],
        ),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--tok") else "",
)
def test_bad_options_of_goodput(run, plan_file, options, parts):
    refused(run("goodput", plan_file, *options), *parts)


def test_goodput_of_a_run_that_never_ends_is_status_1(run, plan_file):
    outcome = run("goodput", plan_file, "--tokens=1B", "--mtbf-hours=0.0001", "--save-time=1 h", "--json")
    refused(outcome, "the run never ends: the job fails every ", status=1)


@pytest.mark.parametrize("command", [["compare", "plan.toml"], ["goodput", "--tokens=1B"]])
def test_a_plan_that_is_not_there(run, plan_file, command):
    refused(run(*command, "p.toml"), "plan file p.toml does not exist: make one with")
