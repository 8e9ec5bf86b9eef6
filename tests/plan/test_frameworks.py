"""Frameworks: values that stand in the table, and a search that keeps to them."""

import pytest

from shardwright.axes import MESH_ORDERS
from shardwright.cluster import cluster_of
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.model import preset
from shardwright.plan.columns import NAMED_COLUMNS
from shardwright.plan.finding import find
from shardwright.plan.frameworks import FRAMEWORKS, framework_columns, within_framework
from shardwright.plan.table import LayoutTable

MODEL, CLUSTER = preset("llama-3.1-8b"), cluster_of("h100-sxm", 16)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_column_and_value_is_one_of_the_table(name):
    for column, values in framework_columns(name).items():
        assert column in LayoutTable._fields
        known = NAMED_COLUMNS.get(column)
        assert values == sorted(set(values)) or column == "order"
        assert known is None or max(values) < len(known)
    assert FRAMEWORKS[name].source.split(":")[0]


@pytest.mark.parametrize(
    ("name", "runs", "never"),
    [
        (
            "megatron",
            {"schedule": {"none", "1F1B", "Interleaved1F1B"}, "zero_stage": {0, 1}},
            {"loss_chunks": 8},
        ),
        ("deepspeed", {"schedule": {"none", "1F1B"}, "cp_kind": {"none", "ulysses"}}, {"sp": True}),
        ("torchtitan", {"offload": {"none"}, "order": {MESH_ORDERS[0]}}, {"cp_kind": "ulysses"}),
        ("fsdp2", {"pp": {1}, "recompute": {"none", "full"}}, {"ep": 2}),
    ],
)
def test_only_what_the_framework_runs_is_found(name, runs, never):
    job = Job(seq=4096, global_batch=64, accounting=FRAMEWORKS[name].accounting)
    fixed = within_framework(name, {})
    found = find(MODEL, job, CLUSTER, fixed, top=40, ranking="time")
    layouts = [row["layout"] for row in found.document["best"]]
    assert len(layouts) > 5
    for field, values in runs.items():
        seen = {tuple(one[field]) if isinstance(one[field], list) else one[field] for one in layouts}
        assert seen <= values
    for field, value in never.items():
        assert value not in {one[field] for one in layouts}
    assert found.document["rejected"]["constraint"] > 0


def test_pipelines_of_deepspeed_run_1f1b():
    job = Job(seq=4096, global_batch=64, accounting="zero")
    fixed = within_framework("deepspeed", {"pp": [4]})
    assert find(MODEL, job, CLUSTER, fixed).best.layout.schedule == "1F1B"


def test_what_the_user_fixes_is_kept_within_the_framework():
    fixed = within_framework("megatron", {"zero_stage": [1], "tp": [2]})
    assert (fixed["zero_stage"], fixed["tp"], fixed["loss_chunks"]) == ([1], [2], [1])


def test_what_the_framework_cannot_run_is_refused_at_once():
    gpipe = NAMED_COLUMNS["schedule"].index("GPipe")
    with pytest.raises(
        LayoutError,
        match=r"schedule=GPipe is not of megatron, only none or 1F1B or Interleaved1F1B; zero_stage=3 is not "
        r"of megatron, only 0 or 1: leave it out, or --framework",
    ):
        within_framework("megatron", {"schedule": [gpipe], "zero_stage": [3]})


def test_an_unknown_framework():
    with pytest.raises(LayoutError, match=r"--framework='megatrn' is unknown .did you mean 'megatron'"):
        within_framework("megatrn", {})
