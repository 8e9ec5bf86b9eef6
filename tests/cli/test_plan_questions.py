"""``plan`` asked for other than the least time of a bf16 job, and ``table``."""

import pytest
from command import H100, refused

from shardwright.planfile import load_plan

JOB = ("llama-3.1-8b", "--seq=4096", "--global-batch=64", *H100, "--json")
EXPERTS = ("qwen3-30b-a3b", "--seq=4096", "--global-batch=16", *H100, "--pp=1", "--micro-batch=1", "--json")


@pytest.mark.parametrize(
    ("job", "options", "field", "value"),
    [
        (JOB, ["--recompute-every=2"], "recompute_every", 2),
        (JOB, ["--loss-chunks=8"], "loss_chunks", 8),
        (JOB, ["--offload=optimizer"], "offload", "optimizer"),
        (
            JOB,
            ["--order=dp-replicate/dp-shard/pp/cp/tp"],
            "order",
            ["dp_replicate", "dp_shard", "pp", "cp", "tp"],
        ),
        (EXPERTS, ["--ep=4"], "ep", 4),
        (EXPERTS, ["--etp=2"], "etp", 2),
        (EXPERTS, ["--dispatch=by-node"], "dispatch", "by_node"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_a_fixed_column_is_kept(run, job, options, field, value):
    outcome = run("plan", *job, *options)
    assert outcome.status == 0, outcome.err
    for row in outcome.document["best"]:
        assert row["layout"][field] == value


def test_job_options_reach_the_plan(run, tmp_path):
    options = ("--precision=fp8", "--lora-rank=16", "--lora-targets=query,value", "--base-bits=4")
    outcome = run("plan", *JOB, *options, "-o", "p.toml")
    assert outcome.status == 0, outcome.err
    job = load_plan(tmp_path / "p.toml").job
    assert (job.precision, job.adapters, job.base_bits) == ("fp8", (16, ("query", "value")), 4)
    assert "lora_rank=16 is only modelled" in outcome.err
    whole = run("plan", *JOB).document["best"][0]
    assert outcome.document["best"][0]["memory"]["device"] < whole["memory"]["device"]


def test_experts_that_are_shared_out_rest_on_an_assumption(run):
    document = run("plan", *EXPERTS, "--ep=4", "--expert-imbalance=1.5").document
    assert any(line.startswith("expert_imbalance=1.5") for line in document["assumed"])
    capped = run("plan", *EXPERTS, "--ep=4", "--expert-capacity=1.25").document
    assert any(line.startswith("expert_capacity=1.25") for line in capped["assumed"])
    dense = run("plan", *JOB).document["assumed"]
    assert not any("expert" in line for line in dense)
    assert any("allocator margin (5 % of allocated, device file)" in line for line in dense)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--lora-rank=8"], ["lora_rank=8 does not go with lora_targets=[]: give both"]),
        (["--lora-rank=8", "--lora-targets=q"], ["lora_targets=['q'] are unknown"]),
        (["--base-bits=5"], ["base_bits=5"]),
        (["--expert-imbalance=0.5"], ["--expert-imbalance"]),
        (["--offload=gradients"], ["--offload='gradients' is unknown"]),
        (["--framework=megatron", "--zero=3"], ["zero_stage=3 is not of megatron, only 0 or 1"]),
        (["--framework=alpa"], ["--framework"]),
        (["--objective=cost"], ["--objective cost needs a price: give --price 2.5"]),
        (["--objective=cost", "--price=0"], ["--price=0.0 must be finite and above 0"]),
        (["--objective=gpus", "--why=tp=8"], ["--why compares with the fastest: leave out --objective gpus"]),
        (["--runnable", "--schedule=ZB-H2"], ["schedule=ZB-H2 is only modelled, and only what runs"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_bad_options(run, options, parts):
    refused(run("plan", *JOB, *options), *parts)


def test_a_framework_counts_as_it_does(run, tmp_path):
    document = run("plan", *JOB, "--framework=megatron", "-o", "p.toml").document
    assert document["framework"] == "megatron"
    assert load_plan(tmp_path / "p.toml").job.accounting == "megatron"
    assert {row["layout"]["zero_stage"] for row in document["best"]} <= {0, 1}
    run("plan", *JOB, "--framework=megatron", "--accounting=zero", "-o", "p.toml")
    assert load_plan(tmp_path / "p.toml").job.accounting == "zero"
    assert "only layouts that megatron runs" in run("plan", *JOB[:-1], "--framework=megatron").out


@pytest.mark.parametrize(
    ("objective", "keys", "said"),
    [
        ("gpus", {"name", "gpus", "misses"}, "are the fewest, of those tried, on which something fits"),
        ("micro-batch", {"name", "micro_batch", "cp", "tokens", "next"}, "is the largest that fits: "),
        (
            "sequence",
            {"name", "seq", "global_batch", "misses"},
            "is the longest that fits, with global_batch=",
        ),
        ("cost", {"name"}, "for 1e9 tokens"),
        ("time", {"name"}, "for 1e9 tokens"),
    ],
)
def test_objectives(run, objective, keys, said):
    options = (*JOB[:-1], "--price=2", f"--objective={objective}")
    document = run("plan", *options, "--json").document
    assert document["objective"].keys() == keys
    assert document["objective"]["name"] == objective
    assert document["best"][0]["cost_per_step"] > 0
    assert said in " ".join(run("plan", *options).out.split())


def test_the_front_is_shown_if_it_is_asked_for(run):
    front = run("plan", *JOB).document["pareto"]
    assert {"label", "step_time", "device_memory", "headroom"} == front[0].keys()
    shown = run("plan", *JOB[:-1], "--pareto").out
    assert "step time against memory" in shown
    assert "step time against memory" not in run("plan", *JOB[:-1]).out
    assert all(row["label"].split()[0] in shown for row in front)


def test_nothing_fits_is_told_by_kind(run):
    outcome = run("plan", "llama-3.1-70b", "--seq=8192", "--global-batch=16", *H100, "--max-memory=40 GiB")
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1
    words = " ".join(outcome.out.split())
    for part in (
        "nothing fits, of",
        "nearest to 40.00 GiB a device",
        "data axes alone",
        "tp and pp",
        "fits: ",
    ):
        assert part in words


def test_a_table_of_models_and_devices(run):
    options = (
        "table",
        "--models=llama-3.2-1b, llama-3.1-70b",
        "--gpus=8,16",
        "--tokens-per-step=300k",
        "--seq=4096",
    )
    outcome = run(*options, "--device=rtx4090", "--json")
    assert outcome.status == 0, outcome.err
    document = outcome.document
    assert (document["seq"], document["global_batch"], document["tokens_per_step"]) == (4096, 64, 262_144)
    rows = {(row["model"], row["gpus"]): row for row in document["rows"]}
    assert len(rows) == 4
    assert rows["llama-3.2-1b", 8]["fits"]
    assert not rows["llama-3.1-70b", 8]["fits"]
    assert len(outcome.err.splitlines()) == 4
    assert outcome.err.startswith("llama-3.2-1b on 8: [")
    out = run(*options, "--device=rtx4090").out
    assert "does not fit, needs " in out
    assert "MFU" in out


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--gpus=8,x"], "--gpus: 'x' is not a whole number"),
        (["--gpus=0"], "ranks=0"),
        (["--models=llama-9"], "llama-9"),
        (["--tokens-per-step=many"], "--tokens-per-step: 'many' is not a whole number"),
        (["--device=h100-smx"], "device 'h100-smx' is unknown"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_of_table(run, options, part):
    refused(run("table", *options), part)
