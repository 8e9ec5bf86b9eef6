"""Experts on many ranks train as on one: fp64, every gradient, counts, balancing loss and biases."""

from dataclasses import replace

import numpy as np
import pytest
from expert_stack import SPECS, Case, many_ranks, one_rank
from gloo import relative

from shardwright.run.launch import run_ranks

GRADIENT = 1e-9

CASES = [
    Case(shard=2, ep=2),
    Case(shard=4, ep=4),
    Case(shard=4, ep=2, microbatches=2),
    Case(replicate=2, shard=2, ep=2, microbatches=2),
    Case(replicate=2, shard=4, ep=2),
    Case(cp=2, ep=2),
    Case(shard=2, cp=2, ep=4),
    Case(tp=2, ep=2, sp=True),
    Case(shard=2, tp=2, ep=4, sp=True),
    Case(shard=2, tp=2, ep=2, sp=True, reshard=False),
    Case(tp=2, etp=2),
    Case(tp=2, etp=2, sp=True),
    Case(shard=2, tp=2, ep=2, etp=2, sp=True),
    Case(shard=4, tp=2, ep=2, etp=2, sp=True),
]


def compare(spec, case):
    """All ranks' findings against one rank's."""
    expected = one_rank(spec, case)
    for rank in run_ranks(many_ranks, case.ranks, spec, case, timeout_s=60):
        assert relative(rank.loss, expected.loss) < 1e-12
        assert rank.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            assert relative(rank.gradients[name], gradient) < GRADIENT, name
        np.testing.assert_array_equal(rank.counts, expected.counts)
        assert rank.balance == pytest.approx(expected.balance, rel=1e-12)
        assert all(map(np.array_equal, rank.biases, expected.biases))
    return expected


@pytest.mark.parametrize("model", ["mixtral", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_on_many_ranks_are_as_on_one(case, model):
    expected = compare(SPECS[model], replace(case, aux=0.3))
    assert expected.balance > 0
