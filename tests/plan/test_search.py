"""Search: equal to trying every layout alone; every rejected row has its reason, and a way out."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import cluster_of
from shardwright.errors import JobError, NothingFitsError
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, RECOMPUTE_KINDS, Layout, faults
from shardwright.model import ModelSpec, preset
from shardwright.plan.explain import predict
from shardwright.plan.finding import find
from shardwright.plan.memory import memory_ledger
from shardwright.plan.search import FITS, check_found, divisors, search, search_space
from shardwright.plan.step import step_time
from shardwright.plan.table import table_of
from shardwright.units import GiB

SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_size=16, vocab=259
)


def small_cluster(ranks, memory):
    cluster = cluster_of("h100-sxm", ranks, 4)
    device = cluster.device.model_copy(update={"memory": memory, "context": 0, "communicator": 0})
    return cluster.model_copy(update={"device": device})


def every_layout(job, cluster):
    """All layouts that keep the rules, by trying every number in every field."""
    found = []
    for shard in range(1, cluster.ranks + 1):
        for replicate in range(1, cluster.ranks + 1):
            if shard * replicate != cluster.ranks:
                continue
            for micro_batch in range(1, job.global_batch + 1):
                for microbatches in range(1, job.global_batch + 1):
                    if cluster.ranks * micro_batch * microbatches != job.global_batch:
                        continue
                    found += [
                        Layout(
                            dp_replicate=replicate, dp_shard=shard, zero_stage=stage, micro_batch=micro_batch,
                            microbatches=microbatches, recompute=kind,
                            kept=KEPT_BY_SELECTIVE if kind == "selective" else (),
                        )
                        for stage in ([0] if shard == 1 else [1, 2, 3])
                        for kind in RECOMPUTE_KINDS
                    ]  # fmt: skip
    return [layout for layout in found if not faults(layout, job, cluster)]


@settings(deadline=None, max_examples=12)
@given(
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8]),
    share=st.integers(1, 6),
    extra=st.sampled_from([0, 0, 0, 1]),
    memory=st.integers(1 * 2**20, 12 * 2**20),
)
def test_search_is_trying_every_layout_alone(ranks, share, extra, memory):
    job, cluster = Job(seq=64, global_batch=ranks * share + extra), small_cluster(ranks, memory)
    fitting = {}
    for layout in every_layout(job, cluster):
        row = table_of([layout])
        if memory_ledger(SPEC, job, cluster.device, row).device[0] <= memory:
            fitting[layout] = float(step_time(SPEC, job, cluster, row).time[0])
    found = search(SPEC, job, cluster)
    ranked = [found.evaluated.layout(row) for row in found.best.tolist()]
    assert set(ranked) == set(fitting)
    assert [fitting[layout] for layout in ranked] == sorted(fitting.values())


@settings(deadline=None, max_examples=40)
@given(
    ranks=st.integers(1, 24),
    batch=st.integers(1, 48),
    memory=st.integers(2**20, 16 * 2**20),
    shard=st.none() | st.integers(1, 8),
    recompute=st.none() | st.integers(0, 2),
)
def test_every_row_is_feasible_or_has_one_reason(ranks, batch, memory, shard, recompute):
    job, cluster = Job(seq=64, global_batch=batch), small_cluster(ranks, memory)
    fixed = {"dp_shard": shard, "recompute": recompute}
    found = search(
        SPEC, job, cluster, {column: [value] for column, value in fixed.items() if value is not None}
    )
    rejected = found.rejected
    assert found.table.rows == len(found.reason) == len(found.best) + sum(rejected.values())
    assert len(found.rows) == len(found.best) + rejected.get("out_of_memory", 0)
    assert set(found.notes) == set(rejected)
    assert (found.reason[found.rows[found.best]] == FITS).all()
    assert (
        len({tuple(int(c[row]) for c in found.table) for row in range(found.table.rows)}) == found.table.rows
    )
    for row in found.best.tolist():
        layout = found.evaluated.layout(row)
        assert not faults(layout, job, cluster)
        assert shard in (None, layout.dp_shard)
        assert recompute in (None, RECOMPUTE_KINDS.index(layout.recompute))
    assert (np.diff(found.step.time[found.best]) >= 0).all()
    assert (found.device[found.best] <= memory).all()


@given(number=st.integers(1, 5000))
def test_divisors(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_the_table_has_every_stage_microbatch_and_recomputation():
    table = search_space(Job(seq=64, global_batch=16), 4)
    # dp_shard 1 with stage 0, dp_shard 2 and 4 with three stages; microbatches of 1, 2, 4; three kinds
    assert table.rows == (1 + 3 + 3) * 3 * 3
    assert (table.dp == 4).all()
    assert (table.dp * table.micro_batch * table.microbatches == 16).all()


def reason_of(job, cluster, **fixed):
    """What check_found says of a search without result."""
    found = search(SPEC, job, cluster, {column: [value] for column, value in fixed.items()})
    with pytest.raises(NothingFitsError) as raised:
        check_found(found)
    assert raised.value.exit_status == 1
    return str(raised.value)


def test_fewer_samples_than_ranks():
    message = reason_of(Job(seq=64, global_batch=6), cluster_of("h100-sxm", 8))
    assert message == (
        "no layout works, of 30 considered: fewer_samples_than_ranks (30): 8 ranks each need a sequence but "
        "global_batch=6: use at most 6 ranks or a global batch of at least 8"
    )


@pytest.mark.parametrize(("batch", "near"), [(20, "16 or 24"), (15, "8 or 16"), (9, "8 or 16")])
def test_a_global_batch_that_the_ranks_do_not_divide_names_the_nearest(batch, near):
    message = reason_of(Job(seq=64, global_batch=batch), cluster_of("h100-sxm", 8))
    assert f"global_batch (30): 8 ranks do not divide global_batch={batch}: use {near}" in message
    for good in map(int, near.split(" or ")):
        assert len(search(SPEC, Job(seq=64, global_batch=good), cluster_of("h100-sxm", 8)).best)


def test_a_wish_that_no_row_has_lists_what_there_is():
    job, cluster = Job(seq=64, global_batch=16), cluster_of("h100-sxm", 8)
    assert "constraint (60): no row has dp_shard=3: use 1 or 2 or 4 or 8" in reason_of(
        job, cluster, dp_shard=3
    )
    assert "no row has micro_batch=4: use 1 or 2" in reason_of(job, cluster, micro_batch=4)


def test_wishes_that_exclude_each_other():
    message = reason_of(Job(seq=64, global_batch=16), cluster_of("h100-sxm", 8), dp_shard=8, zero_stage=0)
    assert "dp_shard=8 was asked for; zero_stage=0 was asked for; no row has all of these at once" in message


def test_a_wish_is_said_as_the_reason():
    found = search(SPEC, Job(seq=64, global_batch=16), cluster_of("h100-sxm", 8), {"recompute": [2]})
    assert found.notes == {"constraint": "recompute=full was asked for"}


def test_out_of_memory_names_the_nearest_miss():
    model, job = preset("llama-2-70b"), Job(seq=4096, global_batch=8)
    message = reason_of_model(model, job, cluster_of("h100-sxm", 8))
    assert "out_of_memory (" in message
    assert (
        "more than 79.10 GiB a device; nearest [dp_shard=8 zero=3 b=1 m=1 recompute=full] needs " in message
    )
    assert "too much, " in message
    assert " of it optimizer" in message


def reason_of_model(model, job, cluster):
    with pytest.raises(NothingFitsError) as raised:
        find(model, job, cluster, {})
    return str(raised.value)


def test_the_nearest_miss_is_the_smallest():
    model, job, cluster = preset("llama-2-70b"), Job(seq=4096, global_batch=8), cluster_of("h100-sxm", 8)
    found = search(model, job, cluster)
    smallest = found.evaluated.layout(int(np.argmin(found.device)))
    assert f"nearest [{smallest.label}]" in found.notes["out_of_memory"]


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.1-8b", "llama-2-13b", "qwen2.5-14b"])
def test_a_model_of_7_to_14_b_on_one_node_ends_in_sharded_data_parallel(name):
    """What is trained in practice: fully sharded, no replicas, over the fast links of one node."""
    best = find(preset(name), Job(seq=4096, global_batch=64), cluster_of("h100-sxm", 8), {}).best
    assert best.layout.dp_shard == 8
    assert best.prediction.memory.total <= best.cluster.device.memory


@pytest.mark.parametrize("limit", ["40 GiB", "60 GiB"])
def test_max_memory_is_kept(limit):
    found = find(preset("llama-3.1-8b"), Job(seq=4096, global_batch=64), cluster_of("h100-sxm", 8), {}, limit)
    bytes_allowed = int(limit.split()[0]) * GiB
    assert found.document["device_memory"] == bytes_allowed
    assert found.best.prediction.memory.total <= bytes_allowed
    assert all(row["memory"]["device"] <= bytes_allowed for row in found.document["best"])
    assert (
        f"more than {limit.replace(' ', '.00 ')} a device"
        in found.document["rejected_notes"]["out_of_memory"]
    )


def test_less_memory_is_never_faster():
    model, job, cluster = preset("llama-3.1-8b"), Job(seq=4096, global_batch=64), cluster_of("h100-sxm", 8)
    times = [
        find(model, job, cluster, {}, f"{limit} GiB").best.prediction.step_time for limit in (79, 60, 40, 30)
    ]
    assert times == sorted(times)


@pytest.mark.parametrize("limit", ["70", "seventy GiB", "0 GiB", "-1 GiB", "70 GB/s"])
def test_a_limit_that_is_no_amount_of_memory(limit):
    with pytest.raises(JobError, match="--max-memory"):
        find(SPEC, Job(seq=64, global_batch=8), cluster_of("h100-sxm", 8), {}, limit)


def test_the_document_agrees_with_the_plan_and_with_itself():
    model, job, cluster = preset("llama-3.1-8b"), Job(seq=4096, global_batch=64), cluster_of("h100-sxm", 8)
    found = find(model, job, cluster, {}, top=3)
    document, best = found.document, found.best
    assert len(document["best"]) == 3
    assert document["considered"] == document["feasible"] + sum(document["rejected"].values())
    assert document["evaluated"] == document["feasible"] + document["rejected"]["out_of_memory"]
    first = document["best"][0]
    assert Layout.checked(first["layout"]) == best.layout
    assert first["step_time"] == pytest.approx(best.prediction.step_time, rel=1e-5)
    assert first["memory"]["allocated"] == pytest.approx(best.prediction.memory.allocated, abs=10)
    assert first["memory"]["reserved"] == pytest.approx(best.prediction.memory.reserved, abs=10)
    assert first["memory"]["device"] == pytest.approx(best.prediction.memory.total, abs=10)
    assert best.prediction == predict(model, job, cluster, best.layout)
    assert document["why"].startswith(f"chosen: [{best.layout.label}], ")


def test_what_does_not_run_is_planned_and_says_why():
    job = Job(seq=4096, global_batch=64, optimizer="muon")
    document = find(preset("llama-3.1-8b"), job, cluster_of("h100-sxm", 8), {}).document
    assert not any(row["runnable"] for row in document["best"])
    assert "optimizer='muon' is only modelled" in document["not_runnable_reasons"][0]


def test_time_of_a_large_search(record_property):
    """Reported, not judged: a shared machine's time is no property of the program."""
    found = search(preset("llama-3.1-70b"), Job(seq=8192, global_batch=1024), cluster_of("h100-sxm", 64))
    rate = len(found.rows) / found.search_time
    record_property("layouts", len(found.rows))
    print(f"{len(found.rows)} layouts in {found.search_time * 1e3:.1f} ms, {rate:,.0f}/s")
    assert math.isfinite(rate)
