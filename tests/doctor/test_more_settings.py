"""What is wrapped, which version widens weights, and heads and counts in other programs' words."""

import json

import pytest
from evidence_files import causes

TRAINER = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
ROOT = ("root_only_unit", "likely", [])


@pytest.mark.parametrize(
    ("fsdp", "config", "expected"),
    [
        ("full_shard", {}, [ROOT]),
        ("full_shard", None, [ROOT]),
        (["full_shard", "offload"], {"activation_checkpointing": True}, [ROOT]),
        ("full_shard auto_wrap", {}, []),
        ("full_shard", {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}, []),
        ("full_shard", {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, []),
        ("full_shard", {"min_num_params": 10}, [("sharding_no_help", "likely", [])]),
        ("full_shard", {"min_num_params": 100_000_000}, []),
        ("shard_grad_op", {}, []),
        ("", {}, []),
    ],
)
def test_what_a_trainer_wraps(tmp_path, fsdp, config, expected):
    path = tmp_path / "args.json"
    path.write_text(json.dumps(TRAINER | {"fsdp": fsdp, "fsdp_config": config}))
    assert causes(path, given="gpus=8 parameters=7e9") == expected


def test_wrapped_blocks_are_no_units_of_experts(tmp_path):
    path = tmp_path / "args.json"
    path.write_text(json.dumps(TRAINER | {"fsdp": "full_shard auto_wrap", "fsdp_config": {}}))
    assert causes(path, given="gpus=8 experts=128") == []


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: {version}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
mixed_precision: {precision}
num_machines: 1
num_processes: 8
"""


@pytest.mark.parametrize("text", ["- `Accelerate` version: 1.13.{}\n", "accelerate==1.13.{}\n"])
@pytest.mark.parametrize(
    ("version", "precision", "told"), [(2, "bf16", True), (1, "bf16", False), (2, "no", False)]
)
def test_weights_that_stay_narrow(tmp_path, text, version, precision, told):
    """huggingface/accelerate#3979."""
    (tmp_path / "acc.yaml").write_text(ACCELERATE.format(version=version, precision=precision))
    (tmp_path / "env.txt").write_text(text.format(0))
    assert causes(tmp_path) == ([("low_precision_master", "likely", [])] if told else [])
    (tmp_path / "env.txt").write_text(text.format(0).replace("1.13", "1.12"))
    assert causes(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "num_attention_heads (28) must be a multiple of tensor_model_parallel_size (8).\n",
            True,
        ),
        ("ValueError: num_query_groups (6) must be a multiple of tensor parallel size (4)\n", True),
        ("ValueError: hidden_size (28) must be a multiple of num_attention_heads (8)\n", False),
    ],
)
def test_heads_in_megatrons_words(tmp_path, text, told):
    path = tmp_path / "train.log"
    path.write_text(text)
    assert ("heads_do_not_divide" in [cause for cause, _, _ in causes(path)]) == told


@pytest.mark.parametrize(("count", "told"), [("105.28774", True), ("6738.415616", False), ("3000.0", False)])
def test_millions_of_one_shard(tmp_path, count, told):
    """foundation-model-stack/fms-fsdp#67, on 64 ranks: 6738.415616 / 64."""
    path = tmp_path / "train.log"
    path.write_text(f"--> llama2_7b has {count} Million params\n")
    found = causes(path, given="gpus=64 zero_stage=3 parameters=6738415616")
    assert ("local_parameter_count" in [cause for cause, _, _ in found]) == told
