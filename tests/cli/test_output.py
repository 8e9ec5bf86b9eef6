"""What commands print: --json is one document with the keys promised; and the loop by hand."""

import json
import math
import pickle
import subprocess
import sys

import pytest
from command import H100, fresh, refused

from shardwright import __version__
from shardwright.layout import Layout
from shardwright.planfile import load_plan


def test_help_and_version(run):
    assert run("--version").out == f"shardwright {__version__}\n"
    text = run("--help").out
    assert all(name in text for name in ("params", "presets", "plan", "explain", "check", "train", "loop"))
    assert "--max-memory" in run("plan", "--help").out
    refused(run("paln"), "No such command 'paln'")


def test_params_document(run, model):
    outcome = run("params", model, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    document = outcome.document
    assert {"model", "parameters", "active_parameters", "mtp_parameters", "tensors"} <= document.keys()
    assert document["model"] == "tiny"
    total = sum(math.prod(tensor["shape"]) for tensor in document["tensors"])
    assert document["parameters"] == document["active_parameters"] == total
    assert {"name", "shape", "role"} == document["tensors"][0].keys()
    assert run("params", model.parent, "--json").document == document


def test_presets_document(run):
    document = run("presets", "--json").document
    parameters = {entry["name"]: entry["parameters"] for entry in document["models"]}
    assert parameters["llama-3.1-8b"] == 8_030_261_248
    assert {"h100-sxm-80gb", "a100-sxm-80gb", "mi300x-192gb", "cpu"} <= {
        kind["name"] for kind in document["devices"]
    }


def test_plan_document(run, tmp_path):
    outcome = run("plan", "llama-3.1-8b", "--seq=4096", "--global-batch=64", *H100, "-o", "p.toml", "--json")
    assert (outcome.status, outcome.err) == (0, "wrote p.toml\n")
    document = outcome.document
    assert {"considered", "evaluated", "feasible", "rejected", "search_time", "best"} <= document.keys()
    best = document["best"][0]
    assert {"layout", "runnable", "memory", "step_time", "tokens_per_s_per_gpu", "mfu"} <= best.keys()
    assert {"allocated", "reserved", "device"} <= best["memory"].keys()
    assert Layout.checked(best["layout"]) == load_plan(tmp_path / "p.toml").layout


@pytest.mark.parametrize(
    "options", [["--zero=2"], ["--micro-batch=4"], ["--recompute=full"], ["--dp-replicate=2"]]
)
def test_a_fixed_degree_is_kept(run, options):
    key, value = options[0].removeprefix("--").replace("-", "_").split("=")
    key = {"zero": "zero_stage"}.get(key, key)
    document = run(
        "plan", "llama-3.1-8b", "--seq=4096", "--global-batch=64", *H100, "--json", *options
    ).document
    assert {str(row["layout"][key]) for row in document["best"]} == {value}
    assert document["rejected"]["constraint"] > 0


def test_explain_document(run, plan_file):
    outcome = run("explain", plan_file, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    document = outcome.document
    stage, flow, step = document["stages"][0], document["traffic"][0], document["step"]
    terms = {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "gathered",
        "communicators",
        "margin",
    }
    assert {"stage", "total"} | terms <= stage.keys()
    assert stage["total"] == sum(stage[term] for term in terms | {"context"})
    assert {"axis", "collective", "payload_bytes", "bytes", "launches", "link", "exposed_time"} <= flow.keys()
    assert {"time", "compute", "bubble", "exposed", "optimizer"} <= step.keys()
    assert step["time"] == pytest.approx(
        sum(step[part] for part in ("compute", "bubble", "exposed", "optimizer"))
    )


def test_explain_of_an_edited_layout_says_so(run, plan_file):
    assert "stored" not in run("explain", plan_file).out
    plan_file.write_text(plan_file.read_text().replace("zero_stage = 3", "zero_stage = 1"))
    outcome = run("explain", plan_file)
    assert "the prediction stored in the plan is not of this layout" in outcome.out
    assert not run("explain", plan_file, "--json").document["stored_prediction_agrees"]


def test_check_document(run, plan_file):
    outcome = run("check", plan_file, "--json")
    document = outcome.document
    assert (outcome.status, outcome.err) == (0, "")
    assert {"ok", "terms", "traffic", "time", "host_memory"} <= document.keys()
    assert document["ok"]
    assert {"stage", "term", "predicted", "executed", "difference"} <= document["terms"][0].keys()
    assert {
        "axis",
        "collective",
        "predicted_payload_bytes",
        "executed_payload_bytes",
        "predicted_launches",
        "executed_launches",
    } <= document["traffic"][0].keys()


def test_check_says_what_terms_are_made_of_and_runs_a_real_step(run, plan_file):
    assert run("check", plan_file, "--json").document["tensors"] == []
    document = run("check", plan_file, "--tensors", "--real", "--json").document
    assert document["ok"]
    total = next(term for term in document["terms"] if term["term"] == "total")
    assert total["real"] == pytest.approx(total["executed"], rel=0.01)
    assert sum(group["bytes"] for group in document["tensors"]) == total["executed"]
    assert document["tensors"][0].keys() == {"stage", "kind", "module", "source", "count", "bytes"}
    for flow in document["traffic"]:
        assert flow["real_payload_bytes"] == flow["executed_payload_bytes"]
        assert flow["real_launches"] == flow["executed_launches"]


def test_memory(run, plan_file, tmp_path):
    """Document, chart, picture and snapshot of one step."""
    outcome = run("memory", plan_file, "-o", "step.svg", "--json")
    assert (outcome.status, outcome.err) == (0, "wrote step.svg\n")
    (stage,) = outcome.document["stages"]
    assert {"stage", "rank", "peak", "peak_moment", "peak_held", "tensors", "timeline"} <= stage.keys()
    assert max(sum(sample["held"].values()) for sample in stage["timeline"]) == stage["peak"]
    assert stage["peak_moment"] in (tmp_path / "step.svg").read_text()
    text = run("memory", plan_file, "--rank=1", "-o", "step.pickle").out
    assert "stage 0, rank 1: peak 1.28 MiB (" in text
    trace = pickle.loads((tmp_path / "step.pickle").read_bytes())["device_traces"][0]
    assert {"alloc", "free_requested", "free_completed"} <= {event["action"] for event in trace}


def test_a_difference_is_status_1_and_the_document_is_whole(run, plan_file, monkeypatch):
    from shardwright.check import compare

    right = compare.stage_ledger

    def wrong(*args):
        ledger = right(*args)
        return type(ledger)(**(vars(ledger) | {"parameters": ledger.parameters + 4}))

    monkeypatch.setattr(compare, "stage_ledger", wrong)
    outcome = run("check", plan_file, "--json")
    assert outcome.status == 1
    assert outcome.err == "shardwright: the ledger and the program differ: see the rows that are not ok\n"
    assert not outcome.document["ok"]
    differing = [(t["term"], t["moment"]) for t in outcome.document["terms"] if not t["ok"]]
    assert differing == [("parameters", "rest")]
    assert "DIFFERS" in run("check", plan_file).out


def test_plan_explain_check_train(run, model, tmp_path):
    """The loop by hand, on two ranks, data of its own."""
    plan = ("plan", model, "--seq=32", "--global-batch=4", "--gpus=2", "--steps=100", "--warmup-steps=10")
    assert run(*plan, "--pp=1", "-o", "exp/plan.toml").status == 0
    assert run("explain", "exp").status == 0
    assert run("check", "exp").status == 0
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("abcdefgh " * 200)
    outcome = run("train", "exp", "--steps=3", "--nproc=2", "--data=text", "--run-dir=runs/a", "--json")
    assert outcome.status == 0, outcome.err
    document = outcome.document
    assert {"steps", "losses", "tokens_per_s", "peak_memory", "predicted", "run_directory"} <= document.keys()
    assert (document["steps"], len(document["losses"])) == (3, 3)
    kept = load_plan(tmp_path / "runs" / "a")
    assert kept.job.steps == 3
    assert document["predicted"]["memory"] == kept.prediction.memory.allocated
    assert document["peak_memory"] == pytest.approx(kept.prediction.memory.allocated, rel=0.02)
    assert document["predicted"]["step_time"] == kept.prediction.step_time
    assert json.loads((tmp_path / "runs" / "a" / "result.json").read_text()) == document
    assert load_plan(tmp_path / "exp").job.steps == 100


def test_training_with_an_edited_layout_predicts_afresh(run, plan_file):
    plan_file.write_text(plan_file.read_text().replace("zero_stage = 3", "zero_stage = 1"))
    stale = load_plan(plan_file)
    document = run("train", plan_file, "--steps=2", "--run-dir=r", "--json").document
    assert document["predicted"]["memory"] != stale.prediction.memory.allocated
    assert document["predicted"]["memory"] == pytest.approx(document["peak_memory"], rel=0.02)
    kept = load_plan(plan_file.parent / "r")
    assert kept.prediction.memory.allocated == document["predicted"]["memory"]


def test_loop_document(run, tmp_path):
    """On three ranks, which do not divide the batch of two."""
    outcome = run("loop", "--steps=3", "--nproc=3", "--run-dir=r", "--json")
    assert outcome.status == 0, outcome.err
    document = outcome.document
    assert {"plan", "explain", "train", "check", "plan_file"} <= document.keys()
    assert document["check"]["ok"]
    assert document["train"]["steps"] == 3
    assert load_plan(tmp_path / "r").layout.ranks == 3


def test_loop_report(run):
    outcome = run("loop", "--steps=3")
    assert outcome.status == 0, outcome.err
    for part in (
        "1  plan",
        "2  train",
        "3  check",
        "the ledger is what the program does",
        "measured in training",
    ):
        assert part in outcome.out


def test_reports_go_through_a_pipe_of_any_encoding(plan_file):
    """As redirected on Windows, where stdout knows no block characters."""
    for encoding in ("ascii", "cp1252", "utf-8"):
        outcome = fresh("explain", plan_file, PYTHONIOENCODING=encoding)
        assert outcome.status == 0, outcome.err
        assert "total" in outcome.out


def test_as_a_module(plan_file):
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "explain", str(plan_file), "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runnable"]
