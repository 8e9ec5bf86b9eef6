"""Training end to end on real ranks: what it writes, what it refuses, how it stops."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from gloo import BASE, RaggedBatches, job_of, layout_of, plain_steps, with_experts
from torch.distributed.fsdp import fully_shard

from shardwright.errors import JobError, LayoutError, PlanFileError, RunFailedError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.plan.params import parameter_table
from shardwright.run.dataset import TokenDataset, join_documents
from shardwright.run.dp import check_units
from shardwright.run.init import initialise
from shardwright.run.launch import run_ranks
from shardwright.run.mesh import build_mesh
from shardwright.run.meter import MemoryMeter
from shardwright.run.model import build_model
from shardwright.run.optim import learning_rate
from shardwright.run.options import RunOptions
from shardwright.run.profile import parse_steps
from shardwright.run.ranks import Predicted, spans
from shardwright.run.record import StepRecord, progress_line, steady_step_time
from shardwright.run.step import Stepper, parallel_model
from shardwright.run.train import evaluate, to_device, train

SPEC = BASE.model_copy(update={"vocab": 257})
TEXT = [
    b"the quick brown fox jumps over the lazy dog. " * 40,
    b"pack my box with five dozen liquor jugs! " * 40,
]


def short_job(layout, **others):
    return job_of(
        layout.dp * layout.micro_batch * layout.microbatches, "fp32", **{"seq": 16, "steps": 12, **others}
    )


def start(folder, layout, job, dataset=None, **options):
    """Train on local ranks; result of rank 0, after checking that the others have none."""
    dataset = dataset or TokenDataset(join_documents(TEXT), job)

    first, *others = run_ranks(
        call_train, layout.ranks, (SPEC, job, layout, dataset, folder), options, timeout_s=60
    )
    assert others == [None] * len(others)
    return first


def call_train(args, options):
    return train(*args, predicted_step_time=0.5, predicted_memory=1e6, **options)


def test_training_learns_and_records_the_run(tmp_path):
    layout = layout_of(1, 2, 3, 2)
    job = short_job(layout, steps=30, eval_every=10, learning_rate=2e-2)
    data = TokenDataset(join_documents(TEXT), job)
    result = start(
        tmp_path / "run", layout, job, data, step_flops=1e6, peak_flops_per_s=1e9, meter_factory=MemoryMeter
    )
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == len(result["losses"]) == 30
    assert result["losses"][0] == pytest.approx(math.log(257), abs=0.1)
    assert result["losses"][-1] < result["losses"][0] - 1.5
    assert [entry["step"] for entry in result["eval_losses"]] == [10, 20, 30]
    assert result["eval_losses"][-1]["loss"] < result["eval_losses"][0]["loss"]
    assert result["predicted"] == {"step_time": 0.5, "memory": 1e6}
    assert result["tokens_per_s"] == pytest.approx(job.tokens_per_step / result["step_time"])
    assert 0 < result["mfu"] < 1
    assert 10**5 < result["peak_memory"] < 10**8
    assert (result["interrupted"], result["fault"]) == (False, None)
    assert result["data_digest"] == data.digest()
    assert (result["world_size"], result["seed"], result["device"] != "") == (2, 0, True)
    assert result["software"]["torch"] == torch.__version__
    assert result["run_directory"] == str(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert [line["loss"] for line in lines] == result["losses"]
    assert lines[3]["learning_rate"] == learning_rate(job, 3)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "metrics.jsonl",
        "plan.toml",
        "ranks.json",
        "result.json",
    ]


def test_loss_curve_does_not_depend_on_the_layout(tmp_path):
    curves = []
    for i, layout in enumerate(
        [layout_of(1, 1, 0, 2, 4), layout_of(2, 1, 0, 4, 1), layout_of(1, 2, 1, 2, 2)]
    ):
        job = job_of(8, seq=16, eval_every=4)
        result = start(tmp_path / str(i), layout, job)
        curves.append(result["losses"] + [entry["loss"] for entry in result["eval_losses"]])
    assert curves[1] == pytest.approx(curves[0], rel=1e-10)
    assert curves[2] == pytest.approx(curves[0], rel=1e-10)


def evaluated(job, layout, batches):
    """Held-out loss before any step, between two steps, and the losses of the steps around it."""
    mesh = build_mesh(layout, "cpu")
    model = parallel_model(SPEC, job, layout, mesh)
    initialise(model, job.seed, torch.device("cpu"))
    stepper = Stepper(model, job, layout, mesh)
    rank = mesh.data.get_local_rank()
    losses = [evaluate(stepper, batches)]
    for index in range(2):
        samples = batches.microbatches(index, layout, rank)
        losses.append(stepper.step(index, to_device(samples, "cpu")).loss)
        losses.append(evaluate(stepper, batches))
    return losses


@pytest.mark.parametrize("path", [(2, 1, 0), (1, 2, 1), (1, 2, 2), (1, 2, 3), (2, 2, 3)], ids=str)
def test_evaluation_is_the_mean_of_all_held_out_tokens_and_changes_nothing(path):
    layout = layout_of(*path, 2, micro_batch=1 if path[0] * path[1] == 4 else 2)
    job = job_of(8, seq=16, eval_batches=2)
    batches = RaggedBatches(SPEC.vocab, 16)
    expected = plain_steps(SPEC, job, batches).losses
    (one,) = run_ranks(evaluated, 1, job, layout_of(1, 1, 0, 1, 8), batches)
    for losses in run_ranks(evaluated, layout.ranks, job, layout, batches, timeout_s=60):
        assert losses == pytest.approx(one, rel=1e-12)
        assert losses[1::2] == pytest.approx(expected[:2], rel=1e-12)


def test_used_run_folder_is_refused_and_left_alone(tmp_path):
    layout = layout_of(2, 1, 0, 1)
    (tmp_path / "metrics.jsonl").write_text("kept\n")
    with pytest.raises(
        PlanFileError,
        match=r"run folder \S+ already holds a run: give another --run-dir, or continue it with --resume",
    ):
        start(tmp_path, layout, short_job(layout))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept\n"]


def test_run_folder_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    layout = layout_of(1, 1, 0, 1)
    with pytest.raises(PlanFileError, match="cannot make run folder"):
        start(tmp_path / "file" / "run", layout, short_job(layout))


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step(tmp_path):
    layout = layout_of(1, 2, 2, 1)
    job = short_job(layout, learning_rate=1e30, clip_norm=0.0, warmup_steps=0)
    with pytest.raises(
        RunFailedError, match=r"^step \d+: the (loss|gradient norm) is (nan|inf) .*learning_rate"
    ):
        start(tmp_path, layout, job)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["fault"].startswith(f"step {result['steps']}:")
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_tensorboard_on_request(tmp_path):
    layout = layout_of(1, 1, 0, 1)
    start(tmp_path, layout, short_job(layout, steps=2, warmup_steps=0), options=RunOptions(tensorboard=True))
    assert [path.stat().st_size > 0 for path in (tmp_path / "events").iterdir()] == [True]


def interrupt_at_third_step(line):
    if line.step == 3 and torch.distributed.get_rank() == 0:  # the parent gets one, as from a terminal
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.05)


@pytest.mark.usefixtures("ctrl_c")
def test_interrupt_ends_all_ranks_after_one_step_and_loses_nothing(tmp_path):
    layout = layout_of(1, 2, 3, 1)
    result = start(tmp_path, layout, short_job(layout, steps=500), after_step=interrupt_at_third_step)
    assert result["interrupted"]
    assert 3 <= result["steps"] < 100
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == result["steps"]


def test_signal_to_one_rank_stops_all_after_the_same_step(tmp_path):
    layout = layout_of(2, 1, 0, 1)
    result = start(tmp_path, layout, short_job(layout, steps=500), after_step=terminate_rank_one)
    assert (result["interrupted"], result["steps"]) == (True, 3)


def terminate_rank_one(line):
    if line.step == 3 and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path):
    program = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from pathlib import Path
import test_train as t
layout = t.layout_of(1, 1, 0, 1)
t.start(Path({str(tmp_path)!r}), layout, t.short_job(layout, steps=4))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "mesh, outermost first: one rank"
    assert lines[1].startswith(
        "rank 0: stage 0: embedding, layers 0-1, head; units 1 embedding, 2 block, 1 head; "
    )
    assert lines[2].startswith("step 1/4  loss 5.5")
    assert lines[-1].startswith("step 4/4  loss ")
    assert lines[-1].endswith("0:00 left")


def test_progress_line_has_what_is_known():
    line = StepRecord(7, 2.5, 0.75, 1e-3, 100, 0.5, 2048.0, 0.414, 3 * 2**30, 2.25)
    assert progress_line(line, 100, 2.0) == (
        "step   7/100  loss 2.5000  held out 2.2500  gradient norm 0.750  2,048 tokens/s  MFU 41.4%  "
        "memory 3.00 GiB  3:06 left"
    )


def test_steady_step_time_leaves_out_the_first_and_the_metered_step():
    lines = [
        StepRecord(i + 1, 1, 1, 1, 1, time, 1, None, None, None) for i, time in enumerate([9, 8, 1, 3, 2])
    ]
    assert steady_step_time(lines) == 2
    assert steady_step_time(lines[:2]) == 8.5
    assert steady_step_time([]) is None


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    job = Job(
        seq=1, global_batch=1, steps=104, warmup_steps=4, learning_rate=1.0, min_learning_rate_ratio=0.1
    )
    assert [learning_rate(job, step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(job, 4) == 1.0
    assert learning_rate(job, 54) == pytest.approx(0.55)
    assert learning_rate(job, 104) == pytest.approx(0.1)
    rates = [learning_rate(job, step) for step in range(4, 105)]
    assert rates == sorted(rates, reverse=True)


def root_only():
    layout = layout_of(1, 2, 3, 1)
    model = build_model(SPEC, torch.float32)
    fully_shard(model, mesh=build_mesh(layout, "cpu")["dp_shard"])
    check_units(model)


def test_fsdp_on_the_root_alone_is_refused_with_what_it_costs():
    with pytest.raises(
        LayoutError, match=r"root holds 100% of the parameters: gathering it would gather them all"
    ):
        run_ranks(root_only, 2)


def test_no_thread_is_left(tmp_path):
    layout, before = layout_of(1, 2, 2, 1), threading.active_count()
    start(tmp_path, layout, short_job(layout, steps=3))
    assert threading.active_count() == before


def test_a_trace_of_the_steps_asked_for_on_every_rank(tmp_path):
    layout = layout_of(1, 2, 2, 1)
    start(tmp_path, layout, short_job(layout, steps=4), options=RunOptions(profile=range(2, 4)))
    for rank in range(2):
        events = json.loads((tmp_path / f"trace-rank{rank}.json").read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"step 2", "step 3"} <= names
        assert not {"step 1", "step 4"} & names
        assert "gloo:_reduce_scatter_base" in names or any("reduce_scatter" in str(name) for name in names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "is no range of steps: write 5..7"),
        ("0..2", "not within the steps of the run, 1..9"),
        ("7..6", "not within the steps of the run"),
        ("8..10", "not within the steps of the run"),
    ],
)
def test_traces_of_no_step_are_refused(text, message):
    assert parse_steps("2..9", 1, 9) == range(2, 10)
    with pytest.raises(JobError, match=message):
        parse_steps(text, 1, 9)


def test_what_each_rank_holds_is_kept_and_shown_once_for_those_alike(tmp_path, capfd):
    layout = Layout(
        pp=2, dp_shard=2, zero_stage=1, schedule="1F1B", stage_layers=(1, 1), microbatches=2, micro_batch=2
    )
    predicted = [Predicted(4 * 2**30, 8 * 2**30, 2**34), Predicted(2**30, 2**31, 2**33)]
    start(tmp_path, layout, short_job(layout, steps=2, warmup_steps=0), predicted_state=predicted)
    document = json.loads((tmp_path / "ranks.json").read_text())
    assert document["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert [holding["rank"] for holding in document["ranks"]] == [0, 1, 2, 3]
    last = document["ranks"][3]
    assert last["coordinates"] == {"pp": 1, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 0}
    assert last["stages"] == [{"stage": 1, "layers": [1], "embedding": False, "head": True}]
    assert (last["units"], last["unit_shards"]) == ({"block": 1, "head": 1}, 2)
    assert sum(holding["parameters"] for holding in document["ranks"]) == parameter_table(SPEC).parameters
    assert all(holding["parameter_bytes"] >= 4 * holding["parameters"] for holding in document["ranks"])
    assert last["predicted"] == {"parameters": 2**30, "optimizer": 2**31, "peak": 2**33}
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "mesh, outermost first: pp 2 x dp_shard 2"
    (first,) = [line for line in lines if line.startswith(("ranks 0-1: ", "rank 0: "))]
    assert ": stage 0: embedding, layer 0; units 1 embedding, 1 block in 2 shards; " in first
    assert first.endswith("; predicted: parameters 4.00 GiB, optimizer 8.00 GiB, peak 16.00 GiB")


def test_ranks_are_named_in_spans():
    assert [spans(ranks) for ranks in ([3], [0, 1, 2, 3], [0, 2, 3, 8])] == [
        "rank 3",
        "ranks 0-3",
        "ranks 0, 2-3, 8",
    ]


def test_how_evenly_experts_are_used_is_recorded(tmp_path):
    layout = Layout(dp_shard=2, ep=2, zero_stage=3, micro_batch=2)
    job = short_job(layout, steps=2, warmup_steps=0, router_aux_weight=0.01)
    spec = with_experts("qwen3_moe").model_copy(update={"vocab": SPEC.vocab})
    data = TokenDataset(join_documents(TEXT), job)
    run_ranks(call_train, 2, (spec, job, layout, data, tmp_path), {}, timeout_s=60)
    for text in (tmp_path / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        assert 0 <= line["emptiest_expert"] <= 1 <= line["fullest_expert"] <= 4
        assert line["balance_loss"] > 0
    record = StepRecord(1, 2.5, 0.75, 1e-3, 100, 0.5, 2048.0, None, None, None, fullest_expert=1.5)
    assert "fullest expert 1.5 x mean" in progress_line(record, 9, None)
