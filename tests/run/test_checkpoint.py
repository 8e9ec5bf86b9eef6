"""Checkpoints: a run that goes on is the run that never stopped, in its own layout and in any other."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from gloo import BASE, MODELS, RaggedBatches, job_of, relative, torch_batches, whole, with_experts

from shardwright.errors import PlanFileError, RunFailedError
from shardwright.layout import Layout
from shardwright.run import checkpoint
from shardwright.run.init import initialise
from shardwright.run.launch import run_ranks
from shardwright.run.mesh import build_mesh
from shardwright.run.options import RunOptions
from shardwright.run.step import Stepper, parallel_model
from shardwright.run.train import train

BATCH = 8


def plan(spec=BASE, *, m=2, **axes):
    """A layout of eight sequences a step, ``m`` microbatches each."""
    replicas = axes.get("dp_shard", 1) * axes.get("dp_replicate", 1)
    if axes.get("pp", 1) > 1:
        stages = axes["pp"] * axes.get("chunks", 1)
        axes |= {"stage_layers": (spec.layers // stages,) * stages}
        axes.setdefault("schedule", "1F1B")
    split = axes.get("dp_shard", 1) * axes.get("cp", 1) > 1
    stage = (1 if axes.get("pp", 1) > 1 else 3) if split else 0
    return Layout(**{"zero_stage": stage, **axes, "microbatches": m, "micro_batch": BATCH // replicas // m})


def stepper_of(spec, job, layout):
    mesh = build_mesh(layout, "cpu")
    model = parallel_model(spec, job, layout, mesh)
    initialise(model, job.seed, torch.device("cpu"))
    return Stepper(model, job, layout, mesh)


def losses_of(stepper, spec, steps):
    batches, rank = RaggedBatches(spec.vocab, stepper.job.seq), stepper.mesh.data.get_local_rank()
    found = [stepper.step(i, torch_batches(batches, i, stepper.layout, rank)) for i in steps]
    return [(step.loss, step.gradient_norm) for step in found]


def held(stepper):
    """Every parameter and buffer of this rank's stages, whole."""
    parameters = {name: whole(parameter) for name, parameter in stepper.model.named_parameters()}
    buffers = (stage.named_buffers() for stage in stepper.model.stages)
    return parameters | {name: whole(buffer) for some in buffers for name, buffer in some}


def saves(spec, job, layout, folder):
    """Two steps, a checkpoint, two more."""
    stepper = stepper_of(spec, job, layout)
    losses_of(stepper, spec, range(2))
    checkpoint.save(folder, stepper, 2, "data", keep=2)
    return losses_of(stepper, spec, range(2, 4)), held(stepper)


def loads(spec, job, layout, folder):
    """The two steps after the checkpoint."""
    stepper = stepper_of(spec, job.model_copy(update={"seed": 1}), layout)  # weights must come from the file
    checkpoint.load(checkpoint.newest(folder), stepper)
    return losses_of(stepper, spec, range(2, 4)), held(stepper)


def of_all(ranks):
    """Losses and norms, the same on every rank, and what all ranks hold."""
    assert all(losses == ranks[0][0] for losses, _ in ranks)
    return ranks[0][0], {name: value for _, own in ranks for name, value in own.items()}


def goes_on(folder, spec, job, before, after):
    """Largest differences of losses and norms, and of parameters, to a run that was not interrupted."""
    arguments = (spec, job, before, folder)
    expected, parameters = of_all(run_ranks(saves, before.ranks, *arguments, timeout_s=60))
    found, others = of_all(run_ranks(loads, after.ranks, spec, job, after, folder, timeout_s=60))
    names = parameters.keys() & others.keys()
    assert (parameters.keys() ^ others.keys()) <= {"lm_head.weight"}  # a last stage's copy of a tied matrix
    return relative(found, np.array(expected)), max(relative(others[n], parameters[n]) for n in names)


ZBV = {"pp": 2, "schedule": "ZBVZeroBubble", "chunks": 2, "m": 4}
SHARD, RING = {"dp_shard": 2}, {"cp": 2, "cp_kind": "ring"}
DEEP_TIED, EXPERTS, DEEP_EXPERTS = MODELS["deep_tied"], MODELS["shared_experts"], MODELS["deep_experts"]
BIASED = with_experts("deepseek_v3", score="sigmoid", correction_bias=True, scale=2.5)

MOVES = {
    "pp-to-offloaded-momentum": (BASE, "sgd_momentum", {"pp": 2}, {**SHARD, "offload": "optimizer"}),
    "gpt2-tp-to-shard": (MODELS["gpt2"], "adamw", {"tp": 2, "sp": True}, SHARD),
    "latent-shard-to-tp": (MODELS["latent"], "adamw", SHARD, {"tp": 2, "sp": True, "etp": 2, **SHARD}),
    "hsdp-to-one": (BASE, "adamw", {"dp_replicate": 2, **SHARD}, {}),
    "cp-to-cp-shard": (BASE, "adamw", {"cp": 2, "cp_kind": "ulysses"}, {**RING, **SHARD}),
    "uneven-shard-tp-to-pp": (MODELS["uneven_vocab"], "adamw", {**SHARD, "tp": 2, "sp": True}, {"pp": 2}),
    "uneven-adafactor": (MODELS["uneven_vocab"], "adafactor", {**SHARD, "tp": 2}, {"pp": 2}),
    "tied-v-to-shard-tp-muon": (DEEP_TIED, "muon", ZBV, {**SHARD, "tp": 2}),
    "key-copies-to-shard": (BASE, "adamw", {"tp": 4}, SHARD),
    "one-to-tied-stages": (MODELS["tied"], "adamw", {}, {"pp": 2}),
    "tied-to-tied-v": (DEEP_TIED, "adamw", {"dp_shard": 2, "zero_stage": 1}, ZBV),
    "offloaded-to-not": (BASE, "adamw", {**SHARD, "offload": "optimizer"}, {"tp": 2}),
    "pp-to-ep-bias": (BIASED, "adamw", {"pp": 2}, {"ep": 2, "tp": 2, "sp": True}),
    "etp-to-ep": (EXPERTS, "adamw", {"tp": 2, "etp": 2}, {"ep": 2, **SHARD}),
    "ep-etp-to-cp": (EXPERTS, "adamw", {"ep": 2, "etp": 2, "tp": 2, "sp": True, **SHARD}, {**RING, "ep": 2}),
    "ep-to-etp-adafactor": (EXPERTS, "adafactor", {"ep": 2, **SHARD}, {"tp": 2, "etp": 2}),
    "v-ep-to-etp-muon": (DEEP_EXPERTS, "muon", {**ZBV, "ep": 2, "dp_shard": 2}, {"tp": 2, "etp": 2}),
}


@pytest.mark.parametrize("move", MOVES)
def test_another_layout_goes_on_as_the_first_would_have(tmp_path, move):
    spec, optimizer, before, after = MOVES[move]
    job = job_of(BATCH, optimizer=optimizer, router_aux_weight=1.0, router_bias_rate=1e-3)
    differences = goes_on(tmp_path, spec, job, plan(spec, **before), plan(spec, **after))
    assert max(differences) < (1e-9 if spec.moe or optimizer == "muon" else 1e-11)


SAME = {
    "shard": (BASE, "adamw", SHARD),
    "tp-offloaded": (BASE, "adamw", {"tp": 2, "sp": True, "offload": "optimizer"}),
    "tied-pp-adafactor": (MODELS["tied"], "adafactor", {"pp": 2}),
    "hsdp-cp-muon": (BASE, "muon", {"dp_replicate": 2, **RING}),
    "ep-etp-bias-offloaded": (
        BIASED,
        "adamw",
        {"ep": 2, "etp": 2, "tp": 2, "sp": True, "dp_shard": 2, "offload": "optimizer"},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_layout_goes_on_to_the_bit_in_fp32(tmp_path, case):
    spec, optimizer, axes = SAME[case]
    job = job_of(BATCH, "fp32", optimizer=optimizer, router_aux_weight=1.0, router_bias_rate=1e-3)
    assert goes_on(tmp_path, spec, job, plan(spec, **axes), plan(spec, **axes)) == (0.0, 0.0)


def saves_before_any_update(spec, job, layout, folder):
    stepper = stepper_of(spec, job, layout)
    checkpoint.save(folder, stepper, 0, "data", keep=2)
    return losses_of(stepper, spec, range(2))


def loads_before_any_update(spec, job, layout, folder):
    stepper = stepper_of(spec, job, layout)
    checkpoint.load(checkpoint.newest(folder), stepper)
    return losses_of(stepper, spec, range(2))


def test_a_checkpoint_without_optimizer_state_counts_no_step(tmp_path):
    layout, job = plan(), job_of(BATCH)
    expected = run_ranks(saves_before_any_update, 1, BASE, job, layout, tmp_path)
    assert run_ranks(loads_before_any_update, 1, BASE, job, layout, tmp_path) == expected


class Tagged(torch.nn.Module):
    """Has a buffer that persists and one that does not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def buffers(folder, write):
    stepper = stepper_of(BASE, job_of(BATCH), plan())
    stepper.model.stages[0].model.tagged = tagged = Tagged()
    if write:
        tagged.bias += 7.0
        tagged.scratch += 7.0
        checkpoint.save(folder, stepper, 1, "data", keep=1)
    else:
        checkpoint.load(checkpoint.newest(folder), stepper)
    return tagged.bias.tolist(), tagged.scratch.tolist(), sorted(checkpoint.held_tensors(stepper)[0])[-1]


def test_persistent_buffers_are_kept(tmp_path):
    run_ranks(buffers, 1, tmp_path, True)
    ((bias, scratch, last),) = run_ranks(buffers, 1, tmp_path, False)
    assert (bias, scratch, last) == ([7.0] * 3, [0.0] * 3, "model.tagged.bias")


# what follows goes through train()


def start(folder, layout, job, batches=None, **options):
    """Train on local ranks; result of rank 0."""
    batches = batches or RaggedBatches(BASE.vocab, job.seq)
    after_step = options.pop("after_step", None)
    arguments = (job, layout, batches, folder, RunOptions(**options), after_step)
    return run_ranks(call_train, layout.ranks, *arguments, timeout_s=60)[0]


def call_train(job, layout, batches, folder, options, after_step):
    return train(BASE, job, layout, batches, folder, predicted_step_time=0.5, predicted_memory=1e6,
                 options=options, after_step=after_step)  # fmt: skip


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def dies_after_four(line):
    if line.step == 4 and torch.distributed.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_died_resumes_and_ends_as_if_nothing_had_happened(tmp_path, capfd):
    layout, job = plan(dp_shard=2, zero_stage=3), job_of(BATCH, "fp32", steps=6, eval_every=2)
    whole = start(tmp_path / "whole", layout, job)
    run = tmp_path / "run"
    with pytest.raises(RunFailedError, match="SIGKILL"):
        start(run, layout, job, checkpoint_every=3, after_step=dies_after_four)
    assert checkpoints(run) == ["step-000003"]
    assert len(metrics(run)) == 4
    (run / "checkpoints" / "step-000006.partial").mkdir()
    with pytest.raises(PlanFileError, match=r"already holds a run: .* or continue it with --resume"):
        start(run, layout, job)
    capfd.readouterr()
    result = start(run, layout, job, checkpoint_every=3, resume=True)
    assert (
        f"continuing run {run} after step 3 of 6, from {run}/checkpoints/step-000003\n"
        in capfd.readouterr().err
    )
    assert result["losses"] == whole["losses"]
    assert result["gradient_norms"] == whole["gradient_norms"]
    assert result["eval_losses"] == whole["eval_losses"]
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert checkpoints(run) == ["step-000003", "step-000006"]
    with pytest.raises(PlanFileError, match="has made all of its 6 steps: ask for more with --steps"):
        start(run, layout, job, resume=True)


def terminates_itself(line):
    if line.step == 2 and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_run_loses_nothing_and_goes_on_in_another_layout(tmp_path):
    job = job_of(BATCH, steps=5)
    whole = start(tmp_path / "whole", plan(), job)
    stopped = start(tmp_path / "run", plan(tp=2), job, checkpoint_every=100, after_step=terminates_itself)
    assert (stopped["steps"], stopped["interrupted"]) == (2, True)
    assert checkpoints(tmp_path / "run") == ["step-000002"]
    result = start(tmp_path / "run", plan(pp=2), job, resume=True)
    assert result["losses"] == pytest.approx(whole["losses"], rel=1e-12)
    assert (result["steps"], result["interrupted"]) == (5, False)


def test_the_newest_are_kept(tmp_path):
    start(tmp_path, plan(), job_of(BATCH, steps=5, warmup_steps=0), checkpoint_every=1, keep=2)
    assert checkpoints(tmp_path) == ["step-000004", "step-000005"]


def test_nothing_is_written_unless_asked(tmp_path):
    start(tmp_path, plan(), job_of(BATCH, steps=2, warmup_steps=0))
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(PlanFileError, match="has no complete checkpoint to resume from"):
        start(tmp_path, plan(), job_of(BATCH, steps=2, warmup_steps=0), resume=True)


def test_a_checkpoint_without_its_index_is_none(tmp_path):
    start(tmp_path, plan(), job_of(BATCH, steps=2, warmup_steps=0), checkpoint_every=1)
    (tmp_path / "checkpoints" / "step-000002" / ".metadata").unlink()
    assert checkpoint.newest(tmp_path).name == "step-000001"
    start(tmp_path, plan(), job_of(BATCH, steps=2, warmup_steps=0), checkpoint_every=1, resume=True)
    assert checkpoint.newest(tmp_path).name == "step-000002"


def test_a_checkpoint_that_was_being_written_is_never_resumed_from(tmp_path, monkeypatch):
    layout, job = plan(**SHARD), job_of(BATCH, steps=4)
    write = dcp.FileSystemWriter.write_data

    def dies_in_the_second(self, *args):
        if torch.distributed.get_rank() == 1 and "step-000004" in str(self.path):
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *args)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", dies_in_the_second)
    with pytest.raises(RunFailedError, match="SIGKILL"):
        start(tmp_path, layout, job, checkpoint_every=2)
    monkeypatch.undo()
    assert checkpoints(tmp_path) == ["step-000002", "step-000004.partial"]
    assert list((tmp_path / "checkpoints" / "step-000004.partial").iterdir())  # rank 0 has written its part
    result = start(tmp_path, layout, job, checkpoint_every=2, resume=True)
    assert checkpoints(tmp_path) == ["step-000002", "step-000004"]
    assert result["losses"] == start(tmp_path.with_name("whole"), layout, job)["losses"]


def test_damage_is_one_error(tmp_path):
    job = job_of(BATCH, steps=2, warmup_steps=0)
    start(tmp_path, plan(), job, checkpoint_every=1)
    longer = job.model_copy(update={"steps": 3})
    for data in checkpoint.newest(tmp_path).glob("*.distcp"):
        data.unlink()
    with pytest.raises(
        RunFailedError, match=r"step-000002 cannot be read: rank 0: FileNotFoundError: .*: delete"
    ):
        start(tmp_path, plan(), longer, resume=True)
    (checkpoint.newest(tmp_path) / "run.json").write_text("{")
    with pytest.raises(PlanFileError, match=r"step-000002 has no readable run.json"):
        start(tmp_path, plan(), longer, resume=True)
    shutil.rmtree(checkpoint.newest(tmp_path))
    assert start(tmp_path, plan(), longer, resume=True)["steps"] == 3


def test_a_run_goes_on_with_its_model_job_and_data_only():
    job = job_of(BATCH)
    about = checkpoint.About(2, BASE, job, plan(), "a" * 64)
    other = {"steps": 99, "warmup_steps": 7, "seed": 3}
    checkpoint.check_same_run(about, BASE, job.model_copy(update={"steps": 99}), plan(tp=2), "a" * 64)
    with pytest.raises(PlanFileError) as caught:
        checkpoint.check_same_run(
            about, BASE.model_copy(update={"layers": 3}), job.model_copy(update=other), plan(), "b" * 64
        )
    message = str(caught.value)
    for part in (
        "data='bbbbbbbbbbbb' was 'aaaaaaaaaaaa'",
        "layers=3 was 2",
        "seed=3 was 0",
        "warmup_steps=7 was 2",
    ):
        assert part in message
    assert "steps=99" not in message.replace("warmup_steps", "")


def test_state_in_8_bits_goes_on_in_its_own_layout_only():
    job = job_of(BATCH, "fp32", optimizer="adamw_8bit")
    about = checkpoint.About(2, BASE, job, plan(**SHARD), "a")
    checkpoint.check_same_run(about, BASE, job, plan(**SHARD), "a")
    with pytest.raises(PlanFileError, match=r"layout \[tp=2 .*\] was \[dp_shard=2 .*\] when .*adamw_8bit"):
        checkpoint.check_same_run(about, BASE, job, plan(tp=2), "a")


def test_a_folder_with_checkpoints_alone_holds_a_run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(PlanFileError, match="already holds a run"):
        start(tmp_path, plan(), job_of(BATCH, steps=2, warmup_steps=0))
