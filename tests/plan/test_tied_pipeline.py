"""A tied matrix in a pipeline: the first and the last stage have a copy each, and trade its gradients."""

import pytest

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.explain import plan_of
from shardwright.plan.memory import device_memory, ledgers
from shardwright.plan.search import search
from shardwright.plan.step import step_time
from shardwright.plan.table import table_of
from shardwright.plan.traffic import merged, traffic

JOB = Job(seq=4096, global_batch=32)
TIED = preset("llama-3.2-1b")
UNTIED = TIED.model_copy(update={"tied_embeddings": False})
V = {"schedule": "ZBVZeroBubble", "chunks": 2, "stage_layers": (4,) * 4}
PIPELINES = {
    "1F1B": {"schedule": "1F1B", "stage_layers": (8, 8)},
    "V": V,
    "with shards": {"schedule": "1F1B", "stage_layers": (8, 8), "dp_shard": 4, "zero_stage": 1},
    "with tp": {"schedule": "Interleaved1F1B", "chunks": 2, "stage_layers": (4,) * 4, "tp": 4, "sp": True},
}


def layout_of(name):
    fields = PIPELINES[name]
    return Layout(pp=2, microbatches=32 // fields.get("dp_shard", 1), **fields)


def flows_of(model, layout):
    table = table_of([layout], model.layers)
    return {
        (flow.axis, flow.collective): (int(flow.launches[0]), int(flow.payload_bytes[0]))
        for flow in merged(traffic(model, JOB, table))
    }


@pytest.mark.parametrize("name", PIPELINES)
def test_memory_is_that_of_two_matrices(name):
    layout = layout_of(name)
    table = table_of([layout], TIED.layers)
    device = cluster_of("h100-sxm", layout.ranks).device
    assert device_memory(TIED, JOB, device, table) == device_memory(UNTIED, JOB, device, table)
    for tied, untied in zip(
        ledgers(TIED, JOB, device, table), ledgers(UNTIED, JOB, device, table), strict=True
    ):
        for term in ("parameters", "gradients", "optimizer", "allocated"):
            assert getattr(tied, term) == getattr(untied, term)


@pytest.mark.parametrize("name", PIPELINES)
def test_traffic_is_that_of_two_matrices_and_a_trade_of_gradients(name):
    layout = layout_of(name)
    table, cluster = table_of([layout], TIED.layers), cluster_of("h100-sxm", layout.ranks)
    tied, untied = flows_of(TIED, layout), flows_of(UNTIED, layout)
    elements = TIED.vocab * TIED.hidden // (layout.tp * layout.dp_shard)
    launches, payload = untied["pp", "send"]
    trade = (0, 0) if name == "V" else (1, 4 * elements)  # the ends of a V lie on one rank
    assert tied == untied | {("pp", "send"): (launches + trade[0], payload + trade[1])}
    times = [float(step_time(model, JOB, cluster, table).time[0]) for model in (TIED, UNTIED)]
    if name == "V":
        assert times[0] == pytest.approx(times[1], rel=1e-6)
    else:
        assert 0 < times[0] - times[1] < 0.01 * times[1]


def test_pipelines_of_it_are_searched_and_planned():
    cluster = cluster_of("h100-sxm", 4)
    found = search(TIED, JOB, cluster, {"pp": [2]}, exhaustive=True)
    assert found.feasible > 0
    layout = found.layout(int(found.best[0]))
    assert plan_of(TIED, JOB, cluster, layout).layout.pp == 2
