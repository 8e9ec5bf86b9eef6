"""Search: equal to trying every layout alone; every rejected row has its reason, and a way out."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import cluster_of
from shardwright.errors import JobError, NothingFitsError
from shardwright.job import Job
from shardwright.layout import (
    CONTEXT_KINDS,
    KEPT_BY_SELECTIVE,
    RECOMPUTE_KINDS,
    SCHEDULE_NAMES,
    Layout,
    faults,
    model_faults,
)
from shardwright.model import ModelSpec, preset
from shardwright.plan.explain import predict
from shardwright.plan.finding import find
from shardwright.plan.memory import device_memory, memory_ledger
from shardwright.plan.schedule import why_not
from shardwright.plan.search import FITS, check_found, runnable_rows, search
from shardwright.plan.step import mfu, step_time
from shardwright.plan.table import stage_layers, table_of
from shardwright.units import GiB

SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_size=16, vocab=259
)


def small_cluster(ranks, memory):
    cluster = cluster_of("h100-sxm", ranks, 4)
    device = cluster.device.model_copy(update={"memory": memory, "context": 0, "communicator": 0})
    return cluster.model_copy(update={"device": device})


def every_mesh(ranks):
    """Degrees of pp, dp_replicate, dp_shard, cp and tp whose product is ``ranks``."""
    degrees = range(1, ranks + 1)
    return [mesh for mesh in product(degrees, repeat=5) if math.prod(mesh) == ranks]


def every_pipeline(pp, layers, microbatches):
    """Schedule, chunks and layers of stages of every order there is."""
    if pp == 1:
        return {("none", 1, ())}
    found = set()
    for name in SCHEDULE_NAMES[1:]:
        for chunks in range(1, layers // pp + 1):
            loops = chunks > 1 or name not in ("LoopedBFS", "Interleaved1F1B")  # of one chunk are others
            if name != "DualPipe" and loops and why_not(name, pp, chunks, microbatches) is None:
                stages = pp * chunks
                found.add((name, chunks, stage_layers(layers, stages)))
                if layers // stages > 1:
                    found.add((name, chunks, stage_layers(layers, stages, 1)))
    return found


def every_layout(model, job, cluster):
    """All layouts that keep the rules, by trying every number in every field."""
    found = []
    for pp, replicate, shard, cp, tp in every_mesh(cluster.ranks):
        for micro_batch, m in product(range(1, job.global_batch + 1), repeat=2):
            if replicate * shard * micro_batch * m != job.global_batch or (pp > 1 and model.tied_embeddings):
                continue
            for sp, cp_kind, zero, recompute, pipeline in product(
                {False, tp > 1}, CONTEXT_KINDS[1:] if cp > 1 else ["none"],
                [0] if shard * cp == 1 else [1, 2, 3] if pp == 1 else [1], RECOMPUTE_KINDS,
                every_pipeline(pp, model.layers, m),
            ):  # fmt: skip
                layout = Layout(
                    pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, sp=sp, cp_kind=cp_kind,
                    schedule=pipeline[0], chunks=pipeline[1], stage_layers=pipeline[2], zero_stage=zero,
                    micro_batch=micro_batch, microbatches=m, recompute=recompute,
                    kept=KEPT_BY_SELECTIVE if recompute == "selective" else (),
                )  # fmt: skip
                if not faults(layout, job, cluster) + model_faults(layout, model, job):
                    found.append(layout)
    return found


def alone(model, job, cluster, layout):
    """Memory of the heaviest rank and time of a step, computed for one layout by itself."""
    row = table_of([layout], model.layers)
    ledger = memory_ledger(model, job, cluster.device, row)
    return float(ledger.device[0]), float(step_time(model, job, cluster, row).time[0])


def assert_search_finds(found, fitting):
    """The same layouts at the same times: what runs first, each part by time."""
    ranked = [found.layout(row) for row in found.best.tolist()]
    assert len(ranked) == len(set(ranked))
    assert set(ranked) == set(fitting)
    times = [fitting[layout] for layout in ranked]
    runs = [layout.pp == layout.cp == layout.tp == 1 for layout in ranked]
    first = sum(runs)
    assert runs == sorted(runs, reverse=True)
    assert times == sorted(times[:first]) + sorted(times[first:])


@settings(deadline=None, max_examples=4)
@given(
    ranks=st.sampled_from([1, 2, 3]),
    share=st.integers(1, 2),
    extra=st.sampled_from([0, 0, 0, 1]),
    memory=st.integers(1 * 2**20, 12 * 2**20),
)
def test_search_is_trying_every_layout_alone(ranks, share, extra, memory):
    job, cluster = Job(seq=64, global_batch=ranks * share + extra), small_cluster(ranks, memory)
    tried = {layout: alone(SPEC, job, cluster, layout) for layout in every_layout(SPEC, job, cluster)}
    fitting = {layout: time for layout, (device, time) in tried.items() if device <= memory}
    assert_search_finds(search(SPEC, job, cluster), fitting)


@pytest.mark.parametrize(
    ("ranks", "batch", "changes"),
    [(4, 8, {"layers": 5}), (8, 4, {}), (6, 6, {"layers": 3}), (4, 4, {"tied_embeddings": True}),
     (4, 6, {"layers": 4, "kv_heads": 1})],
)  # fmt: skip
def test_search_over_several_axes_is_trying_every_layout_alone(ranks, batch, changes):
    """Uneven stages, interleaving, more tp than key/value heads, context over two nodes, tied embeddings; of
    the many layouts some dozens are computed alone."""
    model = SPEC.model_copy(update=changes)
    job, cluster = Job(seq=64, global_batch=batch), small_cluster(ranks, 6 * 2**20)
    found, every = search(model, job, cluster), every_layout(model, job, cluster)
    tried = {found.layout(row): row for row in range(len(found.rows))}
    assert len(tried) == len(found.rows)
    assert set(tried) == set(every)
    for layout in every[:: len(every) // 40 + 1]:
        row = tried[layout]
        assert alone(model, job, cluster, layout) == (found.device[row], found.time[row])
    fits = {layout: float(found.time[row]) for layout, row in tried.items() if found.device[row] <= 6 * 2**20}
    assert_search_finds(found, fits)


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
        layout = found.layout(row)
        assert not faults(layout, job, cluster) + model_faults(layout, SPEC, job)
        assert shard in (None, layout.dp_shard)
        assert recompute in (None, RECOMPUTE_KINDS.index(layout.recompute))
    runs = runnable_rows(found.evaluated(found.best))
    assert (np.diff(runs.astype(int)) <= 0).all()  # what runs first
    for part in (found.best[runs], found.best[~runs]):
        assert (np.diff(found.time[part]) >= 0).all()
    assert (found.device[found.best] <= memory).all()


WHOLE = SPEC.model_copy(update={"heads": 1, "kv_heads": 1, "head_size": 64, "layers": 1})
"""With sequences of odd length, a model that only its data can split."""


def reason_of(job, cluster, model=SPEC, **fixed):
    """What check_found says of a search without result."""
    found = search(model, job, cluster, {column: [value] for column, value in fixed.items()})
    with pytest.raises(NothingFitsError) as raised:
        check_found(found)
    assert raised.value.exit_status == 1
    return str(raised.value)


def test_fewer_samples_than_ranks():
    message = reason_of(Job(seq=61, global_batch=6), cluster_of("h100-sxm", 8), model=WHOLE)
    assert message == (
        "no layout works, of 4 considered: fewer_samples_than_ranks (4): data ranks, each with a "
        "sequence of its own, outnumber global_batch=6; meshes of 8 ranks have 8 and more of them: "
        "use at most 6 data ranks or a larger global batch"
    )


@pytest.mark.parametrize(("batch", "near"), [(20, "16 or 24"), (15, "8 or 16"), (9, "8 or 16")])
def test_a_global_batch_that_the_ranks_do_not_divide_names_the_nearest(batch, near):
    message = reason_of(Job(seq=61, global_batch=batch), cluster_of("h100-sxm", 8), model=WHOLE)
    expected = f"the data ranks do not divide global_batch={batch}: 8 of them reach {near}"
    assert message == f"no layout works, of 4 considered: global_batch (4): {expected}"
    for good in map(int, near.split(" or ")):
        assert len(search(WHOLE, Job(seq=61, global_batch=good), cluster_of("h100-sxm", 8)).best)


def test_a_wish_that_no_row_has_lists_what_there_is():
    job, cluster = Job(seq=61, global_batch=16), cluster_of("h100-sxm", 8)
    assert "constraint (60): no row has dp_shard=3: use 1 or 2 or 4 or 8" in reason_of(
        job, cluster, WHOLE, dp_shard=3
    )
    assert "no row has micro_batch=4: use 1 or 2" in reason_of(job, cluster, WHOLE, micro_batch=4)


def test_wishes_that_exclude_each_other():
    message = reason_of(Job(seq=64, global_batch=16), cluster_of("h100-sxm", 8), dp_shard=8, zero_stage=0)
    assert "dp_shard=8 was asked for; zero_stage=0 was asked for; no row has all of these at once" in message


def test_a_wish_is_said_as_the_reason():
    found = search(WHOLE, Job(seq=61, global_batch=16), cluster_of("h100-sxm", 8), {"recompute": [2]})
    assert found.notes == {"constraint": "recompute=full was asked for"}


def test_out_of_memory_names_the_nearest_miss():
    model, job = preset("llama-2-70b"), Job(seq=4096, global_batch=8)
    message = reason_of_model(model, job, cluster_of("h100-sxm", 8))
    assert "out_of_memory (" in message
    assert "more than 79.10 GiB a device; nearest [tp=8 sp zero=0 b=8 m=1 recompute=full] needs " in message
    assert "too much, " in message
    assert " of it optimizer" in message


def reason_of_model(model, job, cluster):
    with pytest.raises(NothingFitsError) as raised:
        find(model, job, cluster, {})
    return str(raised.value)


def test_the_nearest_miss_is_the_smallest():
    model, job, cluster = preset("llama-2-70b"), Job(seq=4096, global_batch=8), cluster_of("h100-sxm", 8)
    found = search(model, job, cluster)
    smallest = found.layout(int(np.argmin(found.device)))
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


# Classic answers


def by_time(found):
    """Fitting rows, fastest first, whether they run or are only modelled; and their table."""
    order = found.best[np.argsort(found.time[found.best], kind="stable")]
    return order, found.evaluated(order)


@pytest.mark.parametrize(
    ("name", "seq", "batch", "ranks"),
    [("llama-3.1-8b", 8192, 8, 64), ("llama-3.1-70b", 8192, 16, 64), ("llama-3.1-70b", 8192, 8, 128)],
)
def test_tp_never_crosses_a_node_when_another_layout_fits(name, seq, batch, ranks):
    """Also where ranks outnumber sequences: tp 16 over two nodes costs more than other axes do."""
    found = search(preset(name), Job(seq=seq, global_batch=batch), cluster_of("h100-sxm", ranks))
    order, table = by_time(found)
    assert table.tp[0] <= 8
    crossing = table.tp > 8
    assert found.time[order[crossing][0]] > 1.1 * found.time[order[0]]


def test_a_sequence_too_long_for_one_rank_is_split_over_cp():
    """Half a million tokens of an 8B on one node: with microbatches of one sequence, all recomputed, no
    layout of the data axes fits."""
    found = search(preset("llama-3.1-8b"), Job(seq=524_288, global_batch=8), cluster_of("h100-sxm", 8))
    _, table = by_time(found)
    assert table.cp[0] > 1
    assert not (table.cp * table.tp * table.pp == 1).any()
    near = search(preset("llama-3.1-8b"), Job(seq=524_288, global_batch=8), cluster_of("h100-sxm", 8),
                  {"pp": [1], "cp": [1], "tp": [1], "micro_batch": [1], "recompute": [2]})  # fmt: skip
    assert len(near.best) == 0
    assert len(near.rows) > 0


@pytest.mark.parametrize(
    ("seq", "batch", "cp"), [(8192, 2048, 1), (131_072, 128, 16)], ids=["8k, dp 128", "128k, dp 8"]
)
def test_the_published_layouts_of_llama_3_405b_fit(seq, batch, cp):
    """arXiv:2407.21783, table 4, on 16,384 H100: tp 8, pp 16 and the rest data; recomputation and schedule
    are left to the planner."""
    model, job, cluster = (
        preset("llama-3.1-405b"),
        Job(seq=seq, global_batch=batch),
        cluster_of("h100-sxm", 16_384),
    )
    layouts = [
        Layout(
            tp=8, sp=True, pp=16, cp=cp, cp_kind="ring" if cp > 1 else "none", dp_shard=128 // cp,
            zero_stage=1,
            schedule=schedule, chunks=chunks, stage_layers=stage_layers(126, 16 * chunks), microbatches=16,
            recompute=kind, kept=KEPT_BY_SELECTIVE if kind == "selective" else (),
        )
        for schedule, chunks in (("1F1B", 1), ("Interleaved1F1B", 7), ("InterleavedZeroBubble", 7))
        for kind in RECOMPUTE_KINDS
    ]  # fmt: skip
    for layout in layouts:
        assert not faults(layout, job, cluster) + model_faults(layout, model, job)
    table = table_of(layouts, model.layers)
    fits = device_memory(model, job, cluster.device, table) <= cluster.device.memory
    assert fits.reshape(3, 3).any(axis=1).all()  # each schedule, with some recomputation
    used = mfu(model, job, cluster, step_time(model, job, cluster, table).time)[fits]
    assert 0.2 < used.min() < used.max() < 0.7
