"""``parity``: documents, reports, the picture, exit statuses and refusals."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from command import SPEC, refused

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.plan import explain
from shardwright.planfile import save_plan

JOB = {"seq": 32, "global_batch": 4, "steps": 5, "precision": "fp32"}


def written(path, layout, model=SPEC, **job):
    plan = explain.plan_of(model, Job(**JOB | job), cluster_of("cpu", layout.ranks), layout)
    return save_plan(plan, path)


@pytest.fixture
def tp_file(tmp_path):
    """The job of ``plan_file`` over tp."""
    return written(tmp_path / "tp.toml", Layout(tp=2, sp=True, micro_batch=2, microbatches=2))


@pytest.fixture
def halved(monkeypatch):
    """Gradients over dp_shard are means."""
    pytest.importorskip("torch")
    from shardwright.run import dp, step

    original = dp.apply_dp

    def apply_dp(model, mesh, **options):
        original(model, mesh, **options)
        for module in dp.sharded_modules(model):
            module.set_gradient_divide_factor(float(mesh.shard.size()))

    monkeypatch.setattr(step, "apply_dp", apply_dp)


def test_equal_layouts(run, plan_file, tp_file, tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    picture = ["-o", tmp_path / "p.html"] if importlib.util.find_spec("plotly") else []
    outcome = run("parity", plan_file, tp_file, "--steps=2", "--json", *picture)
    assert outcome.status == 0
    if picture:
        page = (tmp_path / "p.html").read_text()
        assert "model.layers.1.mlp.down_proj.weight" in page
        assert "gradients of step 1, relative difference" in page
    document = outcome.document
    assert {
        *("ok", "tolerance", "losses_a", "losses_b", "norms_a", "norms_b", "worst_gradient"),
        *("max_relative_difference", "cause", "certainty", "explanation", "precision", "gradients"),
    } <= document.keys()
    assert (document["ok"], document["cause"], document["precision"]) == (True, None, "fp64")
    assert {"name", "difference", "layer", "stage_a", "stage_b", "axes_a", "axes_b"} <= document[
        "worst_gradient"
    ].keys()
    assert document["losses_a"] == pytest.approx(document["losses_b"], rel=1e-12)
    assert len(document["losses_a"]) == len(document["norms_b"]) == 2
    assert document["max_relative_difference"] < 1e-11
    assert len(document["gradients"]) == 2 * 9 + 3
    assert document["changed"] == ["in fp64 instead of the plans' fp32"]
    assert "B: step 2 of 2, loss" in outcome.err
    assert list(own.glob("shardwright-*")) == []


def test_a_fault_is_reported_with_its_cause(run, plan_file, tp_file, halved):
    outcome = run("parity", tp_file, plan_file, "--steps=1")
    assert outcome.status == 1
    text = " ".join(outcome.out.split())
    for part in (
        "A: tiny, tp=2 sp zero=0 b=2 m=2, 2 ranks",
        "gradients of step 1, the worst of 21",
        "A and B differ: 21 of 21 gradients, worst",
        "cause (likely): B is wrong: all gradients x 0.5: divided by dp_shard (2)",
        "loss of 1 steps, A and B (= both), largest difference",
    ):
        assert part in text, text
    assert outcome.err.endswith("shardwright: the layouts do not train the same model: scaled_by_dp_shard\n")


def test_other_jobs_are_refused_by_what_differs(run, plan_file, tmp_path):
    layout = Layout(dp_shard=2, zero_stage=3, microbatches=4)
    other = written(tmp_path / "b.toml", layout, seq=16, global_batch=8, seed=3)
    refused(
        run("parity", plan_file, other),
        "plans are not of one job, seq=32 in A and 16 in B, global_batch=4 in A and 8 in B, seed=0 in A and "
        "3 in B: step 1 is then of other tokens or other weights, and a difference would prove nothing; plan "
        "both with the same --seq, --global-batch, --seed",
    )


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"packing": "documents"}, "packing='windows' in A and 'documents' in B"),
        (
            {"learning_rate": 1e-2},
            "learning_rate=0.0003 in A and 0.01 in B: their updates are not meant to be",
        ),
    ],
)
def test_one_differing_field(run, plan_file, tmp_path, job, message):
    other = written(tmp_path / "b.toml", Layout(dp_shard=2, zero_stage=3, microbatches=2), **job)
    refused(run("parity", plan_file, other), message)


def test_precision_matters_only_if_it_is_used(run, plan_file, tmp_path):
    other = written(tmp_path / "b.toml", Layout(dp_shard=2, zero_stage=3, microbatches=2), precision="bf16")
    refused(run("parity", plan_file, other, "--precision=job"), "precision='fp32' in A and 'bf16' in B")


def test_another_model_is_refused(run, plan_file, tmp_path):
    model = SPEC.model_copy(update={"layers": 3})
    other = written(tmp_path / "b.toml", Layout(dp_shard=2, zero_stage=3, microbatches=2), model)
    refused(run("parity", plan_file, other), "plans are of different models, tiny and tiny (layers=2 and 3)")


def test_what_is_too_large_is_refused_with_the_way_out(run, plan_file, tmp_path):
    wide = written(tmp_path / "wide.toml", Layout(dp_shard=4, zero_stage=3))
    refused(
        run("parity", plan_file, wide, "--max-ranks=2"),
        "plan B [dp_shard=4 zero=3 b=1 m=1] needs 4 ranks here, more than 2: allow them with --max-ranks 4",
    )
    large = SPEC.model_copy(update={"hidden": 32768, "ffn": 131072, "layers": 126, "head_size": 8192})
    layout = Layout(dp_shard=2, zero_stage=3, microbatches=2)
    paths = [written(tmp_path / name, layout, large) for name in ("c.toml", "d.toml")]
    refused(
        run("parity", *paths), "parameters on 2 ranks hold", "of a small model of this kind with --shrink"
    )


def test_a_picture_that_cannot_be_written_is_refused_first(run, plan_file):
    refused(run("parity", plan_file, plan_file, "-o", "x.png"), "picture x.png is no HTML file")
    refused(run("parity", plan_file, plan_file, "-o", "no/x.html"), "there is no folder no")


def test_missing_plan(run, plan_file):
    refused(run("parity", plan_file, "none.toml"), "plan file none.toml does not exist")


def test_ctrl_c_leaves_nothing(plan_file, tp_file, tmp_path):
    pytest.importorskip("torch")
    own = tmp_path / "tmp"
    own.mkdir()
    argv = [sys.executable, "-m", "shardwright", "parity", str(plan_file), str(tp_file), "--steps=4000"]
    environment = os.environ | {"TMPDIR": str(own), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        for line in process.stderr:
            if "A: step 2 of" in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert "shardwright: interrupted: all ranks were ended" in err
    deadline = time.monotonic() + 5
    while list(own.glob("shardwright-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(own.glob("shardwright-*")) == []


def test_a_large_model_is_shrunk_in_kind(run, tmp_path):
    from shardwright.model import preset

    model = preset("llama-3.1-8b")
    job = {"seq": 8192, "global_batch": 4, "precision": "bf16"}
    a = written(tmp_path / "a.toml", Layout(tp=2, sp=True, microbatches=4), model, **job)
    stages = {"pp": 2, "schedule": "1F1B", "stage_layers": (16, 16), "microbatches": 4}
    b = written(tmp_path / "b.toml", Layout(**stages), model, **job)
    outcome = run("parity", a, b, "--shrink", "--steps=1", "--json")
    assert outcome.status == 0, outcome.err
    document = outcome.document
    assert document["ok"]
    assert (document["seq"], document["global_batch"]) == (64, 4)
    assert document["parameters"] < 2e6
    assert "a small model of the kind of llama-3.1-8b, and short sequences" in document["changed"]
    assert json.loads(outcome.out)["worst_gradient"]["difference"] < 1e-11
