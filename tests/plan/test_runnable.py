"""What cannot be right, and what the runtime has not: every refusal by its code and with its text.

The same rules mask the rows of a search, and are looked at before a process group exists.
"""

import pytest
import torch.distributed as dist

from shardwright import launcher
from shardwright.cluster import cluster_of
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, SCHEDULE_NAMES, Layout, expert_rules, model_rules
from shardwright.model import preset
from shardwright.plan.explain import plan_of
from shardwright.plan.rules import broken_rules
from shardwright.plan.runnable import (
    MODELLED_SCHEDULES,
    REFUSALS,
    RUNNABLE_COLUMNS,
    check_runnable,
    check_trainable,
    not_runnable_reasons,
    runnable_rows,
)
from shardwright.plan.table import LayoutTable, table_of

JOB = Job(seq=8192, global_batch=8)
LLAMA, EXPERTS = "llama-3.1-8b", "qwen3-30b-a3b"


def pipeline(schedule="1F1B", pp=2, chunks=1, **fields):
    """Fields of a pipeline of a model of 32 layers."""
    stages = pp * chunks
    layers = {"stage_layers": (32 // stages,) * stages}
    return {"pp": pp, "schedule": schedule, "chunks": chunks, **layers, "microbatches": 8, **fields}


CANNOT_BE_RIGHT = {  # code: fields, model, changes of the job, part of the sentence
    "ranks": ({"dp_shard": 4, "zero_stage": 3}, LLAMA, {}, "layout has 4 ranks"),
    "fewer_samples_than_ranks": (
        {"dp_shard": 8, "zero_stage": 3}, LLAMA, {"global_batch": 4},
        "dp=8 ranks each need a sequence but global_batch=4",
    ),
    "global_batch": (
        {"dp_shard": 8, "zero_stage": 3, "microbatches": 2}, LLAMA, {},
        "dp=8 x micro_batch=1 x microbatches=2 is not global_batch=8: use microbatches=1",
    ),
    "tp_heads": ({"tp": 3}, LLAMA, {}, "tp=3 does not divide heads=32"),
    "tp_kv_heads": ({"tp": 12}, LLAMA, {}, "tp=12 neither divides kv_heads=8 nor is a multiple of it"),
    "tp_ffn": ({"tp": 5}, LLAMA, {}, "tp=5 does not divide ffn=14336"),
    "cp_sequence": (
        {"cp": 8, "cp_kind": "ring", "zero_stage": 3}, LLAMA, {"seq": 8200},
        "cp=8 does not divide seq=8200 into two equal parts a rank",
    ),
    "sp_sequence": ({"tp": 8, "sp": True}, LLAMA, {"seq": 8188}, "tp=8 with sp does not divide seq=8188"),
    "ulysses_heads": (
        {"cp": 8, "cp_kind": "ulysses", "tp": 2, "zero_stage": 3}, LLAMA, {},
        "cp=8 does not trade heads=32 and kv_heads=8 at tp=2: use cp in [1, 2, 4, 16]",
    ),
    "stage_layers": (
        pipeline() | {"stage_layers": (16, 15)}, LLAMA, {},
        "stage_layers add up to 31, the model has layers=32",
    ),
    "experts": (
        {"ep": 5, "dp_shard": 5, "zero_stage": 3}, EXPERTS, {}, "ep=5 does not divide experts=128",
    ),
    "experts_over_tp": ({"tp": 2, "sp": True}, EXPERTS, {}, "tp=2 splits no expert at etp=1"),
    "tp_shared_experts": (
        {"tp": 3, "etp": 3}, "qwen1.5-moe-a2.7b", {}, "tp=3 does not divide shared_ffn=5632",
    ),
    "etp_ffn": ({"tp": 3, "etp": 3}, "deepseek-v2-lite", {}, "etp=3 does not divide the experts' ffn=1408"),
    "stages": (
        {"pp": 40, "schedule": "1F1B", "stage_layers": (1,) * 40}, LLAMA, {},
        "40 stages, model llama-3.1-8b has layers=32: give each stage a layer",
    ),
    "schedule": (
        pipeline("Interleaved1F1B", pp=4, chunks=2, microbatches=9), LLAMA, {"global_batch": 9},
        "microbatches=9 of Interleaved1F1B on 4 ranks does not divide into 2 equal rounds: use 8 or 10",
    ),
    "host_memory": (
        {"offload": "optimizer", "microbatches": 8}, "llama-3.1-70b", {}, "a device's share of its memory is",
    ),
}  # fmt: skip

CONTRADICTIONS = {  # of a layout alone
    "ZeRO-3 in a pipeline": (
        pipeline(dp_shard=2, zero_stage=3), "zero_stage=3 does not go with pp=2: a pipeline holds a stage's",
    ),
    "ZeRO-2 in a pipeline": (pipeline(dp_shard=2, zero_stage=2), "use zero_stage 0 or 1"),
    "ZeRO without shards": ({"zero_stage": 3}, "zero_stage=3 does not go with dp_shard=1"),
    "shards without ZeRO": ({"dp_shard": 2}, "zero_stage=0 does not go with dp_shard=2"),
    "pipeline without schedule": ({"pp": 2, "stage_layers": (1, 1)}, "schedule='none' does not go with pp=2"),
    "chunks without pipeline": ({"chunks": 2, "stage_layers": (1, 1)}, "chunks=2 does not go with pp=1"),
    "layers of too few stages": (pipeline() | {"stage_layers": (32,)}, "give the layers of 2 stages"),
    "cp without kind": ({"cp": 2, "zero_stage": 3}, "cp_kind='none' does not go with cp=2"),
    "sp alone": ({"sp": True}, "sp=true does not go with tp=1"),
    "etp beside tp": ({"etp": 2, "tp": 4}, "etp=2 does not go with tp=4: use 1 or 4"),
    "ep of tp without sp": ({"ep": 2, "tp": 2}, "ep=2 with tp=2 needs sp"),
    "ep over the data ranks": (
        {"ep": 4, "dp_shard": 2, "zero_stage": 3}, "ep=4 x etp=1 does not divide dp_shard=2 x cp=1 x tp=1",
    ),
    "dispatch without ep": ({"dispatch": "by_node"}, "dispatch='by_node' does not go with ep=1"),
    "kept without selective": ({"kept": ("o_proj",)}, "kept=['o_proj'] does not go with recompute='none'"),
    "every other of nothing": ({"recompute_every": 2}, "recompute_every=2 does not go with recompute='none'"),
}  # fmt: skip

REFUSED = {  # by the runtime: fields, changes of the job, the sentence
    "schedule": (pipeline("ZB-H1"), {}, "schedule='ZB-H1' is only modelled: train with one of GPipe, 1F1B,"),
    "dispatch": (
        {"ep": 2, "dp_shard": 2, "zero_stage": 3, "dispatch": "by_node"}, {},
        "dispatch='by_node' is only modelled: train with 'all_to_all'",
    ),
    "offloaded_optimizer": (
        {"offload": "optimizer"}, {"optimizer": "muon"},
        "optimizer='muon' has no element-wise update to run on the host: use an offload without 'optimizer'",
    ),
    "offload_or_recompute": (
        {"offload": "activations", "recompute": "full"}, {},
        "offload='activations' with recompute='full' is only modelled: use 'none' for one of them",
    ),
    "offload_in_two_passes": (
        pipeline("ZBVZeroBubble", chunks=2, offload="activations"), {},
        "offload='activations' with schedule='ZBVZeroBubble' is only modelled: what a pass for gradients of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", CANNOT_BE_RIGHT)
def test_what_cannot_be_right_is_refused_by_its_rule(code):
    fields, name, changes, part = CANNOT_BE_RIGHT[code]
    layout, model = Layout(**fields), preset(name)
    job = JOB.model_copy(update=changes)
    cluster = cluster_of("h100-sxm", layout.ranks if code != "ranks" else 8)
    if code == "host_memory":
        cluster = cluster_of("l40s", 1)
    found = {fault.code: fault.message for fault in broken_rules(layout.model_dump(), model, job, cluster)}
    assert part in found[code]
    with pytest.raises(LayoutError, match=r"^layout: "):
        check_trainable(model, job, cluster, layout)


def test_a_rank_without_layers_is_priced_and_not_run():
    fields = pipeline("ZBVZeroBubble", chunks=2) | {"stage_layers": (0, 16, 16, 0)}
    layout, model = Layout(**fields), preset(LLAMA)
    assert model.layers == 32
    cluster = cluster_of("h100-sxm", layout.ranks)
    found = {fault.code: fault.message for fault in broken_rules(layout.model_dump(), model, JOB, cluster)}
    assert "leaves a rank without layers" in found["stages"]
    looped = layout.model_dump() | {"schedule": "Interleaved1F1B"}
    assert "stages" not in {fault.code for fault in broken_rules(looped, model, JOB, cluster)}
    with pytest.raises(LayoutError, match="leave a stage between the ends without a layer"):
        Layout.checked(fields | {"stage_layers": (16, 0, 0, 16)})


def test_every_rule_has_its_test():
    layout, model = Layout(), preset(LLAMA)
    rules = {*model_rules(layout, model, JOB), *expert_rules(layout, model)}
    others = {"ranks", "fewer_samples_than_ranks", "global_batch", "stages", "schedule", "host_memory"}
    assert rules | others == CANNOT_BE_RIGHT.keys()
    assert REFUSALS.keys() == REFUSED.keys()


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_layout_that_contradicts_itself_is_none(what):
    fields, part = CONTRADICTIONS[what]
    with pytest.raises(LayoutError) as raised:
        Layout.checked(fields)
    assert part in str(raised.value)


@pytest.mark.parametrize("code", REFUSED)
def test_what_the_runtime_has_not_is_refused_with_its_text(code):
    """By the same rule for one layout and for the rows of a table."""
    fields, changes, part = REFUSED[code]
    kept = {"kept": KEPT_BY_SELECTIVE} if fields.get("recompute") == "selective" else {}
    layout, model = Layout(**fields, **kept), preset(EXPERTS if "ep" in fields else LLAMA)
    job = JOB.model_copy(update=changes)
    (reason,) = not_runnable_reasons(model, job, layout)
    assert reason.startswith(part)
    both = table_of([layout, Layout()], model.layers)
    assert runnable_rows(both, job).tolist() == [False, True]
    with pytest.raises(LayoutError, match=r"^plan is not runnable: "):
        check_runnable(model, job, layout)


def test_a_job_that_no_layout_runs_is_said_with_every_reason():
    changes = {"lora_rank": 8, "lora_targets": ("query",), "accounting": "megatron", "expert_capacity": 1.25}
    job = Job.checked(JOB.model_dump() | changes)
    with pytest.raises(
        LayoutError, match=r"accounting='meg.*lora_rank=8 is only.*expert_capacity=1.25 is only modelled"
    ):
        check_runnable(preset(EXPERTS), job, Layout())


def test_sequences_beyond_the_learned_positions_are_refused():
    with pytest.raises(LayoutError, match="seq=8192 is beyond the 1024 learned positions of model gpt2"):
        check_runnable(preset("gpt2"), JOB, Layout())
    assert not_runnable_reasons(preset("gpt2"), Job(seq=1024, global_batch=8), Layout()) == []


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"tp": 2}, {"tp": 8, "sp": True}, {"cp": 2, "cp_kind": "ulysses", "zero_stage": 3},
        *(pipeline(name) for name in ("GPipe", "1F1B")),
        *(pipeline(name, chunks=2) for name in SCHEDULE_NAMES[3:8]),
        {"offload": "optimizer+activations"}, {"recompute": "full", "recompute_every": 2}, {"loss_chunks": 8},
        {"recompute": "selective", "kept": KEPT_BY_SELECTIVE},
    ],
    ids=str,
)  # fmt: skip
def test_what_runs_is_not_refused(fields):
    for changes in ({}, {"precision": "fp8"}, {"packing": "documents"}):
        job = JOB.model_copy(update=changes)
        assert not_runnable_reasons(preset(LLAMA), job, Layout(**fields)) == []
    assert runnable_rows(table_of([Layout(**fields)], 32), JOB).all()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sgd_momentum", "adamw_8bit", "adafactor", "muon"])
def test_every_optimizer_trains(optimizer):
    job = JOB.model_copy(update={"optimizer": optimizer})
    assert not_runnable_reasons(preset(LLAMA), job, Layout()) == []


def test_columns_of_what_runs_are_the_mask():
    """A grid of every schedule and dispatch: those of the columns run, the others do not."""
    one = table_of([Layout(**pipeline())], 32)
    for column, runs in RUNNABLE_COLUMNS.items():
        for value in range(max(runs) + 1 + len(MODELLED_SCHEDULES)):
            row = LayoutTable(**one._asdict() | {column: one.pp * 0 + value})
            assert runnable_rows(row, JOB).all() == (value in runs)


def test_training_is_refused_before_a_rank_starts(monkeypatch):
    """Whatever a plan file says."""
    plan = plan_of(preset(LLAMA), JOB, cluster_of("cpu", 2), Layout(**pipeline("ZB-H1")))
    monkeypatch.setattr(launcher, "run_ranks", lambda *_, **__: 1 / 0)
    with pytest.raises(LayoutError, match=r"^plan is not runnable: schedule='ZB-H1' is only modelled"):
        launcher.train_plan(plan)
    job = Job(seq=8192, global_batch=9)
    plan = plan_of(preset(LLAMA), job, cluster_of("cpu", 2), Layout(**pipeline("GPipe", microbatches=9)))
    odd = Layout(**pipeline("Interleaved1F1B", pp=4, chunks=2, microbatches=9))
    with pytest.raises(LayoutError, match=r"^layout: microbatches=9 of Interleaved1F1B"):
        launcher.train_plan(plan.model_copy(update={"layout": odd, "cluster": cluster_of("cpu", 4)}))
    assert not dist.is_initialized()
