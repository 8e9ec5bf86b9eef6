"""Configurations of five frameworks under one set of names, and what a person adds."""

import json

import pytest
from evidence_files import causes, found

from shardwright.cluster import Cluster, Level, cluster_of
from shardwright.doctor.inputs import gather
from shardwright.doctor.setting import parse_given
from shardwright.errors import EvidenceError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.explain import plan_of
from shardwright.planfile import save_plan

TITAN_OLD = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 2
seq_len = 8192
data_parallel_degree = -1
tensor_parallel_degree = 4
[experimental]
pipeline_parallel_degree = 2
"""
TITAN_NEW = """
[model]
name = "deepseek_v3"
flavor = "671B"
[training]
local_batch_size = 16
seq_len = 4096
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
expert_parallel_degree = 8
[activation_checkpoint]
mode = "full"
"""
DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: SHARD_GRAD_OP
num_machines: 2
num_processes: 16
"""
MEGATRON = """#!/bin/bash
TP=8
torchrun pretrain_gpt.py --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 4 --num-layers 80
\\
  --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention
  --num-query-groups 8 \\ --seq-length 4096 --micro-batch-size 1 --global-batch-size 512 --sequence-parallel
  --use-distributed-optimizer \\ --num-layers-per-virtual-pipeline-stage 5 --recompute-granularity selective
"""
PRINTED = """------------------------ arguments ------------------------
  context_parallel_size ........................... 2
  global_batch_size ............................... 256
  micro_batch_size ................................ 2
  num_layers ...................................... 32
  pipeline_model_parallel_size .................... 1
  seq_length ...................................... 8192
  sequence_parallel ............................... True
  tensor_model_parallel_size ...................... 4
  world_size ...................................... 64
-------------------- end of arguments ---------------------
"""
TRAINER = (
    "model_name_or_path: x\nper_device_train_batch_size: 2\ngradient_accumulation_steps: "
    "4\ncutoff_len: 4096\n"
)

READ = {
    "old.toml": (TITAN_OLD, {"tp": 4, "pp": 2, "dp_shard": -1, "seq": 8192, "model_name": "llama3 8B"}),
    "new.toml": (
        TITAN_NEW,
        {
            "tp": 8,
            "pp": 4,
            "ep": 8,
            "dp_replicate": 2,
            "dp_shard": 8,
            "micro_batch": 1,
            "microbatches": 16,
            "schedule": "Interleaved1F1B",
            "recompute": "full",
        },
    ),
    "ds.json": (
        json.dumps(DEEPSPEED),
        {
            "zero_stage": 3,
            "micro_batch": 4,
            "microbatches": 8,
            "global_batch": None,
            "offload_parameters": True,
        },
    ),
    "a.yaml": (ACCELERATE, {"world": 16, "gpus_per_node": 8, "zero_stage": 2, "units": "blocks"}),
    "run.sh": (
        MEGATRON,
        {"tp": 8, "pp": 4, "chunks": 4, "kv_heads": 8, "sp": True, "zero_stage": 1, "recompute": "selective"},
    ),
    "start.log": (PRINTED, {"tp": 4, "cp": 2, "world": 64, "data_ranks": 8, "tokens": 8192}),
    "sft.yaml": (TRAINER, {"micro_batch": 2, "microbatches": 4, "seq": 4096}),
}


@pytest.mark.parametrize("name", READ)
def test_configuration(tmp_path, name):
    text, expected = READ[name]
    (tmp_path / name).write_text(text)
    (setting,) = gather([str(tmp_path / name)]).settings
    assert {key: getattr(setting, key) for key in expected} == expected


def test_a_shape_in_megatron_arguments_is_a_model(tmp_path):
    (tmp_path / "run.sh").write_text(
        MEGATRON.replace("--num-layers ", "--swiglu --vocab-size 128256 --num-layers ")
    )
    (setting,) = gather([str(tmp_path / "run.sh")]).settings
    assert setting.count == pytest.approx(70.55e9, rel=0.02)


def test_what_a_person_gives_fills_what_a_file_leaves_open(tmp_path):
    (tmp_path / "old.toml").write_text(TITAN_OLD)
    evidence = gather([str(tmp_path / "old.toml")])
    evidence.given = parse_given("gpus=64 tp=2 gpus-per-node=8")
    (setting,) = evidence.stated
    assert (setting.tp, setting.world, setting.sharding) == (4, 64, 8)  # the file's tp stands


def test_a_name_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(EvidenceError, match="did you mean 'micro_batch'"):
        parse_given("micro_bacth=2")
    with pytest.raises(EvidenceError, match="'two' is no number"):
        parse_given("tp=two")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("gpus=16 gpus_per_node=8 tp=16", "tp_across_nodes"),
        ("gpus=16 gpus_per_node=8 tp=8 heads=64 kv_heads=8", None),
        ("gpus=16 gpus_per_node=4 tp=8", "tp_across_nodes"),
        ("pp=4 microbatches=2", "too_few_microbatches"),
        ("pp=4 microbatches=2 schedule=GPipe", None),
        ("gpus=8 tp=3", "world_does_not_factor"),
        ("gpus=8 zero_stage=3 dp_shard=1 dp_replicate=8", "sharding_degree_one"),
        ("tp=8 vocab=50257", "padded_vocabulary"),
        ("tp=8 vocab=128256", None),
        ("experts=8 tp=2 sp=no", "routed_tokens_repeated"),
        ("experts=8 zero_stage=3 leaf_modules=yes", None),
    ],
)
def test_what_is_wrong_with_a_layout(tmp_path, given, expected):
    (tmp_path / "note.txt").write_text("nothing\n")
    named = [cause for cause, _, _ in causes(tmp_path / "note.txt", given=given)]
    assert (expected in named) if expected else named in ([], ["large_bubble"])


def test_a_plan_that_breaks_its_rules_is_evidence(tmp_path):
    (tmp_path / "plan.toml").write_text("schema_version = 1\n[layout]\npp = 3\n")
    (finding,) = found(tmp_path / "plan.toml")
    assert (finding["cause"], finding["certainty"]) == ("bad_layout", "certain")
    assert "schedule='none' does not go with pp=3" in finding["summary"]


def test_a_plan_whose_tp_leaves_the_nvlink_pairs_of_its_node(tmp_path):
    """As NVIDIA/nccl-tests#178: 8 A100 PCIe in 4 bridged pairs."""
    device = cluster_of("a100-pcie", 8).device
    pair, switch = device.intra_link, device.intra_link.model_copy(update={"bandwidth": 20e9})
    levels = (Level(name="pair", ranks=2, link=pair), Level(name="node", ranks=8, link=switch))
    cluster = Cluster(ranks=8, gpus_per_node=8, device=device, levels=levels)
    named = {}
    for tp in (2, 4):
        layout = Layout(tp=tp, dp_shard=8 // tp, zero_stage=3, recompute="full")
        plan = plan_of(preset("llama-3.2-1b"), Job(seq=512, global_batch=8 // tp), cluster, layout)
        path = save_plan(plan, tmp_path / f"tp{tp}.toml")
        named[tp] = [cause for cause, _, _ in causes(path)]
    assert named == {2: [], 4: ["tp_across_nodes"]}
