"""The document of ``goodput``: what is given wins, what is assumed is said, and no price means no cost."""

import pytest

from shardwright.cluster import cluster_of
from shardwright.errors import AnswerIsNo, JobError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.explain import plan_of
from shardwright.plan.goodput import checkpoint_bytes
from shardwright.plan.operation import Given, check_given, operation, run_goodput
from shardwright.units import DAY, HOUR

PLAN = plan_of(
    preset("llama-3.1-8b"),
    Job(seq=8192, global_batch=128),
    cluster_of("h100-sxm", 64),
    Layout(dp_shard=64, zero_stage=3, microbatches=2),
)
TOKENS = 10**12


def test_what_nobody_gave_is_assumed_and_said():
    found = run_goodput(PLAN, Given(TOKENS))
    assert found["assumed"] == ["device_mtbf", "save_time", "restart_time"]
    assert "419 interruptions in 54 days of 16,384 devices, Llama-3 405B" in found["sources"]["device_mtbf"]
    assert "89.75 GiB of parameters and optimizer state at 7.8 GB/s" in found["sources"]["save_time"]
    assert found["sources"]["step_time"] == "predicted by the plan"
    assert found["step_time"] == PLAN.prediction.step_time
    assert found["mtbf"] * 64 == pytest.approx(found["device_mtbf"])
    assert found["restart_time"] == 600


def test_what_is_given_is_taken():
    given = Given(TOKENS, step_time=2.0, device_mtbf=1e3 * HOUR, storage_bandwidth=20e9, restart_time=120.0)
    found = run_goodput(PLAN, given)
    assert found["assumed"] == []
    assert (found["step_time"], found["mtbf"]) == (2.0, pytest.approx(1e3 * HOUR / 64))
    assert found["save_time"] == checkpoint_bytes(PLAN.model, PLAN.job) / 20e9
    assert run_goodput(PLAN, given._replace(storage_bandwidth=None, save_time=4.0))["save_time"] == 4.0
    measured = Given(TOKENS, failures=12, days=10.0, devices=512)
    assert run_goodput(PLAN, measured)["device_mtbf"] == pytest.approx(10 * DAY * 512 / 12)


def test_tokens_steps_time_and_parts_agree():
    found = run_goodput(PLAN, Given(TOKENS))
    assert (
        (found["steps"] - 1) * found["tokens_per_step"] < TOKENS <= found["steps"] * found["tokens_per_step"]
    )
    assert found["ideal"]["time"] == pytest.approx(found["steps"] * found["step_time"])
    expected = found["expected"]
    parts = sum(expected[part] for part in ("work", "checkpoints", "rework", "restarts"))
    assert expected["time"] == pytest.approx(parts)
    assert expected["goodput"] == pytest.approx(found["ideal"]["time"] / expected["time"])
    assert expected["device_time"] == pytest.approx(64 * expected["time"])
    assert expected["failures"] == pytest.approx(expected["time"] / found["mtbf"])
    assert found["checkpoint"]["saves"] == pytest.approx(
        found["steps"] / found["checkpoint"]["interval_steps"]
    )


def test_no_price_no_cost():
    free = run_goodput(PLAN, Given(TOKENS))
    assert free["ideal"]["cost"] is None
    assert free["expected"]["cost"] is None
    dear = run_goodput(PLAN, Given(TOKENS, price_per_device_hour=2.5))
    assert dear["expected"]["cost"] == pytest.approx(2.5 * dear["expected"]["device_time"] / HOUR)
    of_cluster = PLAN.cluster.model_copy(update={"price_per_device_hour": 3.0})
    priced = plan_of(PLAN.model, PLAN.job, of_cluster, PLAN.layout)
    assert operation(priced, Given(TOKENS)).price_per_device_hour == 3.0
    assert operation(priced, Given(TOKENS, price_per_device_hour=2.5)).price_per_device_hour == 2.5


def test_the_interval_chosen_is_the_best_of_those_shown():
    found = run_goodput(PLAN, Given(TOKENS, device_mtbf=1e3 * HOUR, save_time=60.0))
    rows = {row["interval_steps"]: row for row in found["intervals"]}
    best = found["checkpoint"]["interval_steps"]
    assert len(rows) == 7
    assert rows[best]["time"] == min(row["time"] for row in rows.values()) == found["expected"]["time"]
    for lever in found["levers"]:
        assert lever["time"] < found["expected"]["time"]


def test_a_short_run_is_saved_at_its_end():
    found = run_goodput(PLAN, Given(1))
    assert (found["steps"], found["checkpoint"]["interval_steps"], len(found["intervals"])) == (1, 1, 1)


def test_a_run_that_never_ends_is_the_answer_no():
    with pytest.raises(
        AnswerIsNo, match=r"the run never ends: the job fails every .*: use fewer devices or save"
    ):
        run_goodput(PLAN, Given(TOKENS, device_mtbf=1.0, save_time=600.0))


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (Given(0), "--tokens=0 must be at least 1"),
        (Given(1, device_mtbf=float("nan")), "--mtbf-hours must be finite and above 0"),
        (Given(1, device_mtbf=float("inf")), "--mtbf-hours must be finite and above 0"),
        (Given(1, step_time=0.0), "--step-time must be finite and above 0"),
        (Given(1, save_time=-1.0), "--save-time must be finite and at least 0"),
        (Given(1, restart_time=-1.0), "--restart-time must be finite and at least 0"),
        (Given(1, storage_bandwidth=0.0), "--storage-bandwidth must be finite and above 0"),
        (
            Given(1, price_per_device_hour=0.0),
            "--price must be finite and above 0: give another, or leave it out",
        ),
        (Given(1, failures=0, days=1.0, devices=8), "--interruptions must be finite and above 0"),
        (
            Given(1, failures=3),
            "--days, --devices missing: --interruptions, --days and --devices go together",
        ),
        (Given(1, device_mtbf=1.0, failures=3, days=1.0, devices=8), "say the same: leave one out"),
        (Given(1, save_time=1.0, storage_bandwidth=1.0), "--save-time and --storage-bandwidth say the same"),
    ],
)
def test_what_makes_no_sense_is_refused(given, part):
    with pytest.raises(JobError, match="goodput: ") as raised:
        check_given(given)
    assert part in str(raised.value)


def test_all_faults_are_named_at_once():
    with pytest.raises(JobError, match=r"--tokens=0.*--save-time.*--price"):
        check_given(Given(0, save_time=-1.0, price_per_device_hour=-1.0))
