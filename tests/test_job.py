"""Job: its rules."""

import pytest

from shardwright.errors import JobError
from shardwright.job import Job

BASE = {"seq": 128, "global_batch": 8}


def test_tokens_of_a_step():
    assert Job(seq=8192, global_batch=16).tokens_per_step == 131_072


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seq": 0}, "seq=0: "),
        ({"global_batch": -1}, "global_batch=-1: "),
        (
            {"warmup_steps": 10, "steps": 10},
            "warmup_steps=10 is not less than steps=10: shorten it or train longer",
        ),
        ({"eval_every": 5, "held_out": 0.0}, "eval_every is set but held_out is 0: keep a share of the data"),
        ({"precision": "fp16"}, "precision='fp16': .*'bf16', 'fp8', 'fp32' or 'fp64'"),
        ({"optimizer": "amsgrad"}, "optimizer='amsgrad': .*'adamw', 'sgd', 'sgd_momentum'"),
        (
            {"accounting": "pure_bf16", "precision": "fp32"},
            "accounting='pure_bf16' .* precision='fp32': use accoun",
        ),
        (
            {"accounting": "zero", "precision": "fp64"},
            "accounting='zero' counts bf16 weights but precision='fp64'",
        ),
        ({"learning_rate": float("nan")}, "learning_rate=nan: .*finite"),
        ({"beta2": 1.0}, "beta2=1.0: .*less than 1"),
    ],
)
def test_a_bad_value_is_one_clear_error(values, message):
    with pytest.raises(JobError, match=message):
        Job.checked(BASE | values)


def test_rules_that_need_several_keys_are_reported_together():
    values = {
        "steps": 3,
        "warmup_steps": 5,
        "eval_every": 1,
        "held_out": 0.0,
        "accounting": "zero",
        "precision": "fp32",
    }
    with pytest.raises(JobError, match=r"warmup_steps=5.*accounting='zero'.*eval_every is set"):
        Job.checked(BASE | values)


def test_missing_keys_are_all_listed():
    with pytest.raises(JobError, match="key 'seq' is missing; key 'global_batch' is missing"):
        Job.checked({})
