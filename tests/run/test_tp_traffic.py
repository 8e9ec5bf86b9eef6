"""What tp sends in a step, gradients that its ranks add up among it, to the byte of the executed program."""

import pytest
from gloo import MODELS

from shardwright.check.compare import compare
from shardwright.check.dryrun import dry_run
from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.plan.explain import plan_of

CASES = {
    "sp": ("base", {"tp": 2, "sp": True}),
    "without sp": ("qk_norm", {"tp": 2}),
    "biases": ("bias", {"tp": 2, "sp": True}),
    "biases without sp": ("bias", {"tp": 2}),
    "copies of keys": ("base", {"tp": 4, "sp": True}),
    "shards": ("base", {"tp": 2, "sp": True, "dp_shard": 2, "zero_stage": 3}),
    "fused queries, keys and values": ("gpt2", {"tp": 2}),
    "tied": ("tied", {"tp": 2, "sp": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_traffic_of_tp_is_as_planned(case):
    name, degrees = CASES[case]
    layout = Layout(micro_batch=2, microbatches=2, **degrees)
    job = Job(seq=32, global_batch=4 * layout.dp, precision="bf16")
    plan = plan_of(MODELS[name], job, cluster_of("cpu", layout.ranks), layout)
    flows = compare(plan, dry_run(plan.model, job, layout)).traffic
    assert any(flow.axis == "tp" for flow in flows)
    assert [flow for flow in flows if not flow.ok] == []
