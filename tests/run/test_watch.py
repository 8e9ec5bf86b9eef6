"""Losses that are no number or jump: what is decided, and that all ranks decide alike."""

import json
import math

import pytest
import torch
from gloo import BASE, RaggedBatches, job_of, layout_of, with_experts

from shardwright.errors import RunFailedError
from shardwright.layout import Layout
from shardwright.run import train as train_module
from shardwright.run.launch import run_ranks
from shardwright.run.options import RunOptions
from shardwright.run.record import StepRecord
from shardwright.run.watch import ACTIONS, LEAST_STEPS, MOST_SKIPS, SPIKE_WINDOW, Watch, remembered


def line(step, loss, skipped=False):
    return StepRecord(step, loss, 1.0, 1e-3, 1, 1.0, 1.0, None, None, None, skipped)


def waves(steps):
    """A loss that falls, with noise of about 0.1."""
    return [5.0 - 0.01 * step + 0.1 * math.sin(37.0 * step) for step in range(steps)]


def test_by_default_the_first_value_that_is_no_number_ends_the_run():
    watch = Watch("stop", "ignore")
    assert watch.admits(2.0, 1.0)
    assert watch.fault(line(1, 2.0)) is None
    assert not watch.admits(2.0, math.inf)
    assert watch.fault(line(2, 2.0)) == (
        "step 2: the gradient norm is inf (learning rate 0.001): use a lower learning_rate, longer "
        "warmup_steps or a clip_norm above 0; the steps before are in metrics.jsonl"
    )


def test_updates_are_left_out_until_too_many_in_a_row():
    watch = Watch("skip", "ignore")
    for step in range(MOST_SKIPS):
        assert not watch.admits(math.nan, math.nan)
        assert watch.fault(line(step, math.nan)) is None
    assert watch.admits(2.0, 1.0)  # the count starts again
    for step in range(MOST_SKIPS):
        assert not watch.admits(math.nan, math.nan)
        assert watch.fault(line(step, math.nan)) is None
    assert not watch.admits(math.nan, math.nan)
    assert watch.fault(line(99, math.nan)).startswith(
        "step 99: the loss is nan (learning rate 0.001), the 11th update in a row to be left out: "
    )


@pytest.mark.parametrize("policy", ["ignore", "stop", "skip"])
def test_a_spike_is_far_above_what_losses_differ_by(policy):
    watch = Watch("stop", policy)
    assert all(watch.admits(loss, 1.0) for loss in waves(200))
    assert watch.admits(3.4, 1.0)  # a bad batch
    assert watch.admits(9.0, 1.0) == (policy == "ignore")
    fault = watch.fault(line(202, 9.0))
    assert (fault is not None) == (policy == "stop")
    if fault:
        assert fault.startswith("step 202: the loss is 9.0000, above ")
        assert "6 standard deviations over the mean of 128 steps" in fault
        assert "--on-spike skip" in fault
    assert watch.admits(3.0, 1.0)


def test_no_spike_is_judged_before_enough_is_known_nor_in_a_loss_that_stands():
    watch = Watch("stop", "stop")
    for loss in waves(LEAST_STEPS - 1):
        assert watch.admits(loss, 1.0)
    assert watch.admits(50.0, 1.0)
    watch = Watch("stop", "stop", [line(step, 1e-3) for step in range(LEAST_STEPS)])
    assert watch.admits(1.001e-3, 1.0)
    assert not watch.admits(1.1e-3, 1.0)


def test_a_watch_that_resumes_remembers_what_it_would_have_known():
    whole, lines = Watch("skip", "skip"), []
    for step, loss in enumerate([*waves(90), 30.0, *waves(120), 30.0, math.nan]):
        lines.append(line(step, loss, skipped=not whole.admits(loss, 1.0)))
    assert [entry.step for entry in lines if entry.skipped] == [90, 211, 212]
    resumed = Watch("skip", "skip", remembered(lines))
    assert len(remembered(lines)) <= SPIKE_WINDOW + 3
    assert (list(resumed.losses), resumed.skips) == (list(whole.losses), whole.skips)


def test_the_gravest_decision_of_all_ranks_is_every_rank_s():
    watch = Watch("skip", "ignore", gravest=lambda action: max(action, ACTIONS.index("stop")))
    assert not watch.admits(2.0, 1.0)
    assert watch.fault(line(7, 2.0)) == (
        "step 7: only some ranks have a loss or gradient norm that is sound (learning rate 0.001): ranks of "
        "tp must find the same numbers: see whether a device is failing; the steps before are in "
        "metrics.jsonl"
    )


@pytest.fixture
def poisoned(monkeypatch):
    """Make the loss of the last rank alone NaN in the third step, its gradients left as they are."""
    build = train_module.build_stepper

    def poison(spec, job, layout, *args):
        stepper, device = build(spec, job, layout, *args)
        calls = iter(range(99))

        def spoil(module, inputs, loss):
            return loss + math.nan if next(calls) // layout.microbatches == 2 and is_last() else loss

        stepper.model.stages[-1].register_forward_hook(spoil)
        return stepper, device

    def is_last():
        return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

    monkeypatch.setattr(train_module, "build_stepper", poison)


def trains(spec, job, layout, folder, options):
    batches = RaggedBatches(spec.vocab, job.seq)
    return train_module.train(spec, job, layout, batches, folder, predicted_step_time=1.0,
                              predicted_memory=1.0, options=options)  # fmt: skip


def losses_of(folder, spec, layout, options):
    job = job_of(4, steps=5, router_bias_rate=0.05)
    result = run_ranks(trains, layout.ranks, spec, job, layout, folder, options, timeout_s=60)[0]
    assert result["skipped_steps"] == [3]
    del result["losses"][2]  # under tp rank 0 has its own, a sound one
    return result["losses"]


BIASED = with_experts("deepseek_v3", score="sigmoid", correction_bias=True)
LAYOUTS = {
    "replicas": (BASE, {"dp_replicate": 2}),
    "shards": (BASE, {"dp_shard": 2, "zero_stage": 3}),
    "tp": (BASE, {"tp": 2, "sp": True}),
    "pp": (BASE, {"pp": 2, "schedule": "1F1B", "stage_layers": (1, 1), "microbatches": 2}),
    "cp": (BASE, {"cp": 2, "cp_kind": "ring", "zero_stage": 1}),
    "ep": (BIASED, {"ep": 2, "dp_shard": 2, "zero_stage": 3}),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", LAYOUTS)
def test_one_rank_without_a_number_makes_all_leave_the_update_out(tmp_path, case):
    spec, axes = LAYOUTS[case]
    axes = {"zero_stage": 0, "microbatches": 1, **axes}
    replicas = axes.get("dp_replicate", 1) * axes.get("dp_shard", 1) * axes["microbatches"]
    layout = Layout(micro_batch=4 // replicas, **axes)
    options = RunOptions(on_nan="skip")
    one = losses_of(tmp_path / "one", spec, layout_of(1, 1, 0, 1, micro_batch=4), options)
    assert losses_of(tmp_path / "run", spec, layout, options) == pytest.approx(one, rel=1e-9)
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["skipped"] for entry in lines] == [False, False, True, False, False]


@pytest.mark.usefixtures("poisoned")
def test_one_rank_without_a_number_stops_all_by_default(tmp_path):
    layout, job = layout_of(1, 2, 3, 1), job_of(4, steps=5)
    with pytest.raises(RunFailedError, match=r"^step 3: the loss is nan .* use a lower learning_rate"):
        run_ranks(trains, 2, BASE, job, layout, tmp_path, RunOptions(), timeout_s=60)
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 3
