"""A bad input is one clear message with the way out, and leaves nothing behind."""

import json

import pytest
from command import CONFIG, H100, JOB, SPEC, fresh, refused

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.plan import explain
from shardwright.planfile import load_plan, save_plan

# A model that cannot be read


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"vocab_size": None, "hidden_size": None},
            ["key 'vocab_size' is missing", "key 'hidden_size' is missing"],
        ),
        ({"model_type": "lama"}, ["model_type='lama' is not supported (did you mean 'llama'?)"]),
        ({"model_type": None}, ["key 'model_type' is missing (known: llama"]),
        (
            {"num_attention_heads": 5},
            ["num_attention_heads=5 does not divide hidden_size=64", "give head_dim"],
        ),
        ({"num_key_value_heads": 3}, ["kv_heads=3 does not divide heads=4: use kv_heads in [1, 2, 4]"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0 must be a whole number of at least 1"]),
        ({"num_hidden_layers": 2.5}, ["num_hidden_layers=2.5 must be a whole number"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu' is not supported", "use 'silu'"]),
    ],
    ids=lambda value: None if isinstance(value, list) else ",".join(value),
)
@pytest.mark.parametrize("command", ["params", "plan"])
def test_a_model_with_faults(run, model, change, parts, command):
    config = {key: value for key, value in (CONFIG | change).items() if value is not None}
    model.write_text(json.dumps(config))
    more = JOB if command == "plan" else ()
    refused(
        run(command, model, *more), f"shardwright: {model}: " if "kv_heads" not in parts[0] else "", *parts
    )


def test_a_truncated_config(run, model):
    model.write_text(json.dumps(CONFIG)[:-30])
    refused(run("params", model), f"{model} is not valid JSON (line 1, column ", "fetch it again")


def test_a_config_that_is_no_object(run, model):
    model.write_text("[1, 2]")
    refused(run("params", model), "a model configuration is a JSON object, not list")


def test_a_model_that_does_not_exist(run, tmp_path):
    refused(
        run("params", "llama-3.1-8B"),
        "'llama-3.1-8B' is neither preset nor file (did you mean 'llama-3.1-8b'?)",
    )
    refused(run("params", tmp_path), "holds no config.json: give a Hugging Face model's folder")
    refused(run("params", "nowhere/config.json"), "'nowhere/config.json' is neither preset nor file")


# A job or a cluster that cannot be

DATA = ("--tp=1", "--pp=1", "--cp=1", "--runnable")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        *(
            ([f"{option}={value}"], [f"'{option}'"])  # the rest is in typer's words
            for option, value in (
                *(("--seq", 0), ("--seq", "many"), ("--global-batch", -4), ("--gpus", 0), ("--gpus", -1)),
                *(("--gpus-per-node", 0), ("--micro-batch", 0), ("--dp-shard", -2), ("--dp-replicate", 0)),
                *(
                    ("--zero", 4),
                    ("--steps", 0),
                    ("--learning-rate", -1),
                    ("--top", 0),
                    ("--precision", "fp7"),
                ),
                *(("--optimizer", "lion"), ("--seed", -1), ("--tp", 0), ("--pp", -1), ("--cp", "x")),
                ("--chunks", 0),
            )
        ),
        (
            ["--warmup-steps=2000"],
            ["warmup_steps=2000 is not less than steps=1000: shorten it or train longer"],
        ),
        (["--device=h100-smx"], ["device 'h100-smx' is unknown (did you mean 'h100-sxm'?)"]),
        (["--recompute=some"], ["--recompute='some' is unknown (known: full, none, selective)"]),
        (["--schedule=1F1C"], ["--schedule='1F1C' is unknown (did you mean '1F1B'?)"]),
        (["--cp-kind=rings"], ["--cp-kind='rings' is unknown (did you mean 'ring'?)"]),
        (["--runnable", "--modelled"], ["--runnable and --modelled contradict each other: leave one out"]),
        (
            ["--runnable", "--schedule=DualPipe"],
            ["schedule=DualPipe is only modelled, and only what runs is asked for: leave one"],
        ),
        (
            ["--runnable", "--lora-rank=8", "--lora-targets=query"],
            ["only what runs is asked for: lora_rank=8 is only modelled"],
        ),
        (["--why=tp"], ["--why: 'tp' is no part of a layout: give degrees as tp=8 (pp, "]),
        (["--why="], ["--why: '' is no part of a layout"]),
        (["--why=tp=0"], ["--why: 'tp=0': tp must be a whole number of at least 1"]),
        (["--why=zero=4"], ["--why: 'zero=4': zero must be a whole number from 0 to 3"]),
        (["--why=schedule=1F1C"], ["--why: schedule='1F1C' is unknown (did you mean '1F1B'?)"]),
        (["--why=tp=2 tp=4"], ["--why 'tp=2 tp=4' gives tp twice: leave one out"]),
        (["--max-memory=70"], ["--max-memory: '70' is not a finite number with a unit of B, kB"]),
        (["--accounting=zero", "--precision=fp32"], ["use accounting='fsdp2' or precision='bf16'"]),
        (["--cluster=absent.toml"], ["cannot read absent.toml: No such file"]),
        (["--gpu=8"], ["No such option: --gpu"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_bad_options_of_plan(run, tmp_path, options, parts):
    clashing = any(option.startswith("--cluster") for option in options)
    refused(
        run("plan", "bytes-5m", *JOB, *(() if clashing else ("--gpus=2",)), "-o", "p.toml", *options), *parts
    )
    assert not list(tmp_path.iterdir())


def test_gpus_of_a_device_must_be_counted(run):
    refused(
        run("plan", "bytes-5m", *JOB, "--device=h100-sxm"),
        "--gpus is missing: say how many of h100-sxm there are",
    )


def test_a_cluster_file_and_options_beside_it_clash(run, tmp_path):
    (tmp_path / "c.toml").write_text(cluster_of("h100-sxm", 8).to_toml())
    outcome = run("plan", "bytes-5m", *JOB, "--cluster=c.toml", "--gpus=4", "--device=cpu")
    refused(outcome, "--cluster c.toml says it all: leave out --device, --gpus")
    assert run("plan", "bytes-5m", "--seq=32", "--global-batch=8", "--cluster=c.toml").status == 0


def test_a_cluster_file_with_faults(run, tmp_path):
    text = cluster_of("h100-sxm", 8).to_toml().replace("ranks = 8", "rank = 8")
    (tmp_path / "c.toml").write_text(text)
    outcome = run("plan", "bytes-5m", *JOB, "--cluster=c.toml")
    refused(
        outcome, "cluster (c.toml): ", "unknown key 'rank' (did you mean 'ranks'?)", "key 'ranks' is missing"
    )


def test_measuring_is_for_this_machine(run):
    refused(run("plan", "bytes-5m", *JOB, *H100, "--measure"), "--measure is for CPU ranks of this machine")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--global-batch=12", *DATA], ["global_batch (4): ", "divide global_batch=12: ", " 8 or 16"]),
        (["--global-batch=4", *DATA], ["fewer_samples_than_ranks (4): ", "outnumber global_batch=4"]),
        (["--global-batch=8", "--dp-shard=3"], ["no row has dp_shard=3: use 1 or 2 or 4 or 8"]),
        (
            ["--global-batch=8", "--schedule=gpipe", "--pp=1"],
            ["schedule=GPipe was asked for", "no row has all of these at once"],
        ),
        (["--global-batch=8", "--max-memory=1 GiB"], ["more than 1.00 GiB a device; nearest ["]),
    ],
    ids=["global_batch", "fewer_samples", "constraint", "no_such_row", "memory"],
)
def test_no_as_an_answer_is_status_1(run, tmp_path, options, parts):
    outcome = run("plan", "llama-3.1-8b", "--seq=32", *H100, "-o", "p.toml", "--json", *options)
    assert (outcome.document["best"], outcome.document["feasible"]) == ([], 0)
    assert outcome.err == f"shardwright: {outcome.document['nothing_fits']}\n"
    outcome.out = ""
    refused(outcome, "shardwright: no layout works, of ", *parts, status=1)
    assert not list(tmp_path.iterdir())


def test_a_plan_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    refused(
        run("plan", "bytes-5m", *JOB, "--gpus=2", "-o", "file/p.toml"),
        "cannot write file/p.toml: ",
        "another path",
    )


# A plan file that is not one


@pytest.mark.parametrize("command", ["explain", "check", "train"])
@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        (
            "schema_version = 1",
            "schema_version = 2",
            "schema_version=2, this shardwright reads 1: upgrade shardwright",
        ),
        ("zero_stage = 3", "zero_stag = 3", "unknown key 'layout.zero_stag' (did you mean 'zero_stage'?)"),
        (
            "dp_shard = 2",
            "dp_shard = 4",
            "layout has 4 ranks (pp=1 x dp_replicate=1 x dp_shard=4 x cp=1 x tp=1), the cluster 2",
        ),
        ("tp = 1", "tp = 3", "tp=3 does not divide heads=4 (model tiny)"),
        ("microbatches = 2", "microbatches = 3", "is not global_batch=4: use microbatches=2"),
        ("[layout]", "[layout", "plan.toml is not valid TOML: "),
    ],
    ids=["version", "key", "ranks", "heads", "batch", "syntax"],
)
def test_a_malformed_plan(run, plan_file, tmp_path, command, old, new, part):
    plan_file.write_text(plan_file.read_text().replace(old, new))
    refused(run(command, plan_file), "shardwright: ", str(plan_file), part)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


@pytest.mark.parametrize("command", ["explain", "check", "memory", "train"])
def test_a_plan_that_is_not_there(run, tmp_path, command):
    refused(
        run(command, "p.toml"),
        "plan file p.toml does not exist: make one with 'shardwright plan ... -o p.toml'",
    )
    refused(run(command, tmp_path), "holds no plan.toml: make one with")


# Training that cannot start


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--nproc=3"], ["layout has 2 ranks but 3 processes were started: use --nproc 2"]),
        (["--nproc=0"], ["'--nproc'"]),
        (["--steps=0"], ["'--steps'"]),
        (["--data=absent.txt"], ["data path absent.txt does not exist: give a text file or a folder"]),
        (["--data=empty.txt"], ["data empty.txt is empty: give a text file or a folder"]),
        (["--data=empty"], ["data folder empty holds no tokens in 0 files: give a text file"]),
        (
            ["--data=short.txt"],
            ["data has 6 tokens, fewer than one window", "give more text or a shorter seq"],
        ),
        (["--run-dir=old"], ["run folder old already holds a run: give another --run-dir"]),
        (["--run-dir=other"], ["run folder other holds a plan.toml of another job: give another --run-dir"]),
        (["--run-dir=short.txt/x"], ["cannot make run folder short.txt/x: Not a directory: give another"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_training_that_cannot_start_leaves_no_folder(run, plan_file, tmp_path, options, parts):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").touch()
    other = load_plan(plan_file)
    save_plan(
        other.model_copy(update={"job": other.job.model_copy(update={"seed": 1})}),
        tmp_path / "other" / "plan.toml",
    )
    before = sorted(tmp_path.rglob("*"))
    refused(run("train", plan_file, *options), *parts)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (
            {"lora_rank": 8, "lora_targets": ("query",)},
            "lora_rank=8 is only modelled: train all parameters",
        ),
        (
            {"accounting": "zero", "precision": "bf16"},
            "accounting='zero' is of another runtime: train with 'fsdp2'",
        ),
    ],
    ids=["lora", "accounting"],
)
@pytest.mark.parametrize("command", ["train", "check", "memory"])
def test_what_is_only_modelled_is_refused(run, plan_file, change, part, command):
    plan = load_plan(plan_file)
    job = Job.checked(plan.job.model_dump() | change)
    save_plan(explain.plan_of(plan.model, job, plan.cluster, plan.layout), plan_file)
    refused(run(command, plan_file), "plan is not runnable: ", part)


def test_pipelines_train_and_are_compared(run, tmp_path):
    layout = Layout(pp=2, schedule="1F1B", stage_layers=(1, 1), microbatches=4)
    plan = explain.plan_of(SPEC, Job(seq=32, global_batch=4, precision="fp32"), cluster_of("cpu", 2), layout)
    save_plan(plan, tmp_path / "p.toml")
    checked = run("check", "p.toml", "--json")
    assert (checked.status, len(checked.document["stages"])) == (0, 2)
    assert {flow["stage"] for flow in checked.document["traffic"]} == {0, 1}
    refused(run("check", "p.toml", "--stage=2"), "stage 2: the plan has pp=2, choose from 0 to 1")
    assert [path.name for path in tmp_path.iterdir()] == ["p.toml"]
    assert run("explain", "p.toml").status == 0
    trained = run("train", "p.toml", "--steps=2", "--json")
    assert (trained.status, len(trained.document["losses"])) == (0, 2)


def test_memory_of_what_the_plan_has_not(run, plan_file):
    refused(run("memory", plan_file, "--stage=1"), "stage 1: the plan has pp=1, choose from 0 to 0")
    refused(run("memory", plan_file, "--rank=2"), "rank 2: the plan has 2 ranks, choose from 0 to 1")
    refused(run("memory", plan_file, "-o", "a.png"), "output a.png ends in '.png': use .html or .svg for a")


def test_a_plan_for_gpus_that_are_not_here(run, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    layout = Layout(dp_shard=4, zero_stage=3)
    plan = explain.plan_of(SPEC, Job(seq=32, global_batch=4), cluster_of("h100-sxm", 4), layout)
    save_plan(plan, tmp_path / "p.toml")
    refused(
        run("train", "p.toml"),
        "plan is for 4 x h100-sxm-80gb, this machine has 0 GPUs: start it there with torchrun",
    )
    assert not (tmp_path / "runs").exists()


NO_TORCH = "import sys; sys.modules['torch'] = None"


@pytest.mark.parametrize(
    ("command", "purpose"),
    [
        (["train", "plan.toml"], "train"),
        (["check", "plan.toml"], "check"),
        (["memory", "plan.toml"], "memory"),
        (["loop"], "loop"),
        (["plan", "bytes-5m", *JOB, "--gpus=2", "--measure"], "measuring this machine"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_missing_extra_is_one_line(plan_file, tmp_path, command, purpose):
    outcome = fresh(*command, code=NO_TORCH)
    refused(outcome)
    assert (
        outcome.err == f"shardwright: {purpose} needs the extra [train]: pip install 'shardwright[train]'\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]
