"""Search: equal to trying every layout alone; every rejected row has its reason, and a way out."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from spaces import EXPERTS, MIXED, SPEC, alone, every_layout, rows_of, small_cluster

import shardwright.plan.search as search_module
import shardwright.plan.sweep as sweep_module
from shardwright.cluster import cluster_of
from shardwright.errors import JobError, LayoutError, NothingFitsError
from shardwright.job import Job
from shardwright.layout import (
    KEPT_BY_SELECTIVE,
    OFFLOAD_KINDS,
    RECOMPUTE_KINDS,
    Layout,
    faults,
    model_faults,
)
from shardwright.model import preset
from shardwright.plan.explain import predict
from shardwright.plan.finding import find
from shardwright.plan.memory import device_memory
from shardwright.plan.pipeline import simulated_times
from shardwright.plan.search import check_found, rejection_notes, search
from shardwright.plan.splits import stage_layers
from shardwright.plan.step import mfu, step_time
from shardwright.plan.table import table_of
from shardwright.units import GiB

MiB = 2**20


def closed_forms(monkeypatch):
    """Finalists keep the times that ranked them."""

    def times(model, job, cluster, layouts):
        return step_time(model, job, cluster, table_of(layouts, model.layers)).time if layouts else []

    monkeypatch.setattr(search_module, "simulated_times", times)


def sweep_sizes(monkeypatch, few, tried, pieces):
    """How large a grid is tried whole, how many cells of it first, and how many pieces are timed once."""
    monkeypatch.setattr(sweep_module, "FEW_CELLS", few)
    monkeypatch.setattr(sweep_module, "TRIED_CELLS", tried)
    monkeypatch.setattr(sweep_module, "FEW_PIECES", pieces)


def assert_ranked(found, limit):
    """What fits and nothing else; what runs first, each part by time."""
    assert set(found.best.tolist()) == set(np.flatnonzero(found.device <= limit).tolist())
    runs = found.runs(found.best)
    assert (np.diff(runs.astype(int)) <= 0).all()
    for part in (found.best[runs], found.best[~runs]):
        assert (np.diff(found.time[part]) >= 0).all()


def assert_counted(found):
    """Every layout fits, is pruned or rejected for one reason; what cannot fit need not be evaluated."""
    assert found.considered == found.feasible + found.pruned + sum(found.rejected.values())
    assert found.feasible <= found.evaluated <= found.feasible + found.rejected.get("out_of_memory", 0)
    assert 0 <= found.feasible_runnable <= found.feasible
    assert found.pruned >= 0


@pytest.mark.parametrize(
    ("ranks", "batch", "model"),
    [(1, 2, SPEC), (2, 2, MIXED), (3, 3, SPEC), (4, 4, EXPERTS),
     (4, 6, SPEC.model_copy(update={"layers": 5})),
     (6, 6, SPEC.model_copy(update={"layers": 3})), (4, 4, SPEC.model_copy(update={"tied_embeddings": True})),
     (4, 6, SPEC.model_copy(update={"layers": 4, "kv_heads": 1}))],
)  # fmt: skip
def test_search_is_trying_every_layout_alone(ranks, batch, model):
    """Uneven stages, interleaving, more tp than key/value heads, context over two nodes, tied embeddings,
    experts in all or some layers; of the many layouts some dozens are computed alone."""
    job, cluster = Job(seq=64, global_batch=batch), small_cluster(ranks, 6 * MiB)
    found = search(model, job, cluster, exhaustive=True)
    rows = rows_of(found.table)
    assert len(set(rows)) == len(rows) == found.evaluated
    assert set(rows) == set(every_layout(model, job, cluster))
    for row in range(len(rows) // 50, len(rows), len(rows) // 25 + 1):
        expected = alone(model, job, cluster, found.rows([row]))
        assert (found.device[row], found.time[row]) == pytest.approx(expected, rel=1e-9)
    assert found.feasible == (found.device <= 6 * MiB).sum()
    assert found.feasible_runnable == found.runs(found.best).sum()
    assert_ranked(found, 6 * MiB)
    assert_counted(found)


@settings(deadline=None, max_examples=8)
@given(
    model=st.sampled_from([SPEC, EXPERTS, MIXED, SPEC.model_copy(update={"layers": 5})]),
    shape=st.sampled_from([(1, 4), (2, 2), (4, 4), (6, 6), (8, 4)]),
    memory=st.integers(MiB, 12 * MiB),
    precision=st.sampled_from(["bf16", "fp8", "fp32"]),
    sizes=st.sampled_from([(4096, 512, 16), (4096, 8, 16), (0, 512, 0)]),
)
@example(EXPERTS, (2, 2), MiB, "bf16", (0, 512, 0))  # two sequences at once fit, one by one gradients do not
def test_pruning_loses_nothing_that_is_best(model, shape, memory, precision, sizes):
    """Before finalists are simulated: the step of the best that runs and of the best of all, and the nearest
    and the farthest miss unless they were too slow to be looked at."""
    ranks, batch = shape
    job, cluster = Job(seq=64, global_batch=batch, precision=precision), small_cluster(ranks, memory)
    every = search(model, job, cluster, exhaustive=True)
    with pytest.MonkeyPatch.context() as patch:
        closed_forms(patch)
        sweep_sizes(patch, *sizes)
        found = search(model, job, cluster)
    assert found.considered == every.considered
    assert every.evaluated == every.feasible + every.rejected.get("out_of_memory", 0) >= found.evaluated
    assert (len(found.best) == 0) == (len(every.best) == 0)
    every_row = dict(zip(rows_of(every.table), zip(every.device, every.time, strict=True), strict=True))
    for row, device, time in zip(rows_of(found.table), found.device, found.time, strict=True):
        assert (device, time) == pytest.approx(every_row[row], rel=1e-9)
    for runs in (True, False):
        best = [
            result.time[result.best[result.runs(result.best) >= runs]].min(initial=np.inf)
            for result in (found, every)
        ]
        assert best[0] == pytest.approx(best[1], rel=1e-9)
    assert_ranked(found, memory)
    assert_counted(found)


def test_finalists_have_the_times_of_their_simulation():
    """Pipelines alone; what ranks below them keeps the closed form."""
    job, cluster = Job(seq=64, global_batch=8), small_cluster(4, 6 * MiB)
    model = SPEC.model_copy(update={"layers": 5})
    found = search(model, job, cluster)
    closed = step_time(model, job, cluster, found.table).time
    moved = ~np.isclose(found.time, closed, rtol=1e-9)
    assert moved.any()
    assert (np.broadcast_to(found.table.pp, found.time.shape)[moved] > 1).all()
    assert moved.sum() <= 2 * search_module.FINALISTS
    some = np.flatnonzero(moved)[:5].tolist()
    simulated = simulated_times(model, job, cluster, [found.layout(row) for row in some])
    assert found.time[some] == pytest.approx(simulated, rel=1e-9)


@settings(deadline=None, max_examples=10)
@given(
    ranks=st.integers(1, 24),
    batch=st.integers(1, 48),
    memory=st.integers(MiB, 16 * MiB),
    shard=st.none() | st.integers(1, 8),
    recompute=st.none() | st.integers(0, 2),
    offload=st.none() | st.integers(0, 3),
)
def test_what_is_asked_for_is_kept_and_every_layout_counted(ranks, batch, memory, shard, recompute, offload):
    job, cluster = Job(seq=64, global_batch=batch), small_cluster(ranks, memory)
    asked = {"dp_shard": shard, "recompute": recompute, "offload": offload}
    fixed = {column: [value] for column, value in asked.items() if value is not None}
    found = search(SPEC, job, cluster, fixed)
    assert_counted(found)
    assert_ranked(found, memory)
    assert set(rejection_notes(SPEC, job, cluster, found)) == set(found.rejected)
    for column, allowed in fixed.items():
        assert np.isin(getattr(found.table, column), allowed).all()
    for row in found.best[:: len(found.best) // 40 + 1].tolist():
        layout = found.layout(row)
        assert not faults(layout, job, cluster) + model_faults(layout, SPEC, job)


def test_fixing_a_column_finds_what_the_whole_search_has_there():
    job, cluster = Job(seq=64, global_batch=4), small_cluster(4, 6 * MiB)
    every = search(EXPERTS, job, cluster, exhaustive=True)
    for column in ("tp", "ep", "order", "schedule", "microbatches", "offload"):
        for value in np.unique(getattr(every.table, column)).tolist():
            part = search(EXPERTS, job, cluster, {column: [value]}, exhaustive=True)
            there = {row for row in rows_of(every.table) if row[every.table._fields.index(column)] == value}
            assert set(rows_of(part.table)) == there
            assert part.considered == every.considered


WHOLE = SPEC.model_copy(update={"heads": 1, "kv_heads": 1, "head_size": 64, "layers": 1})
"""With sequences of odd length, a model that only its data can split."""


def reason_of(job, cluster, model=SPEC, **fixed):
    """What check_found says of a search without result."""
    found = search(model, job, cluster, {column: [value] for column, value in fixed.items()})
    with pytest.raises(NothingFitsError) as raised:
        check_found(model, job, cluster, found)
    assert raised.value.exit_status == 1
    return str(raised.value)


def test_fewer_samples_than_ranks():
    message = reason_of(Job(seq=61, global_batch=6), cluster_of("h100-sxm", 8), model=WHOLE)
    assert message == (
        "no layout works, of 4 considered: fewer_samples_than_ranks (4): data ranks, each with a "
        "sequence of its own, outnumber global_batch=6; of 8 ranks at least 8 hold data: "
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
    assert "constraint (480): no row has dp_shard=3: use 1 or 2 or 4 or 8" in reason_of(
        job, cluster, WHOLE, dp_shard=3
    )
    assert "no row has micro_batch=4: use 1 or 2" in reason_of(job, cluster, WHOLE, micro_batch=4)


def test_wishes_that_exclude_each_other():
    message = reason_of(Job(seq=64, global_batch=16), cluster_of("h100-sxm", 8), dp_shard=8, zero_stage=0)
    assert "dp_shard=8 was asked for; zero_stage=0 was asked for; no row has all of these at once" in message


def test_a_wish_is_said_as_the_reason():
    found = search(WHOLE, Job(seq=61, global_batch=16), cluster_of("h100-sxm", 8), {"recompute": [2]})
    assert found.notes == {"constraint": "recompute=full was asked for"}


ON_THE_DEVICE = {"offload": [0]}


def test_out_of_memory_names_the_nearest_miss_and_the_document_the_farthest():
    model, job, cluster = preset("llama-2-70b"), Job(seq=4096, global_batch=8), cluster_of("h100-sxm", 8)
    with pytest.raises(NothingFitsError) as raised:
        find(model, job, cluster, {"offload": 0})
    message, document = str(raised.value), raised.value.document
    assert "out_of_memory (" in message
    assert f"more than 79.10 GiB a device; nearest [{document['nearest']['label']}] needs " in message
    assert "too much, " in message
    assert " of it optimizer" in message
    assert "; farthest [" not in message
    assert (
        "; farthest [dp_replicate=8 zero=0 b=1 m=1 recompute=full] needs "
        in document["rejected_notes"]["out_of_memory"]
    )


def test_the_nearest_miss_is_the_smallest():
    model, job, cluster = preset("llama-2-70b"), Job(seq=4096, global_batch=8), cluster_of("h100-sxm", 8)
    found = search(model, job, cluster, ON_THE_DEVICE, exhaustive=True)
    note = rejection_notes(model, job, cluster, found)["out_of_memory"]
    nearest, farthest = (found.layout(int(row)) for row in (found.device.argmin(), found.device.argmax()))
    assert f"nearest [{nearest.label}]" in note
    assert f"farthest [{farthest.label}]" in note


@pytest.mark.parametrize("share", [0.999, 0.25])  # a bound from below lets some pass, or none
@pytest.mark.parametrize("sizes", [(4096, 512, 16), (0, 512, 0)], ids=["whole", "by the least"])
@pytest.mark.parametrize("model", [SPEC, EXPERTS, MIXED], ids=["dense", "experts", "mixed"])
def test_where_nothing_fits_the_nearest_miss_is_that_of_all(model, share, sizes, monkeypatch):
    job, cluster = Job(seq=64, global_batch=8), small_cluster(8, 6 * GiB)
    least = search(model, job, cluster, exhaustive=True).device.min()
    sweep_sizes(monkeypatch, *sizes)
    found = search(model, job, cluster, max_memory=share * least)
    assert len(found.best) == 0
    assert found.misses.device.min() == pytest.approx(least, rel=1e-9)


def test_what_fits_in_no_other_way_rests_on_the_host():
    """A 70B on 8 devices of 80 GB: 16 bytes a parameter are 140 GB a device, without optimizer state 70."""
    model, job, cluster = preset("llama-2-70b"), Job(seq=4096, global_batch=8), cluster_of("h100-sxm", 8)
    assert "optimizer" in find(model, job, cluster, {}).best.layout.offload


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
        find(model, job, cluster, {}, f"{limit} GiB").best.prediction.step_time for limit in (79, 50, 30)
    ]
    assert times == sorted(times)


@pytest.mark.parametrize("limit", ["70", "seventy GiB", "0 GiB", "-1 GiB", "70 GB/s"])
def test_a_limit_that_is_no_amount_of_memory(limit):
    with pytest.raises(JobError, match="--max-memory"):
        find(SPEC, Job(seq=64, global_batch=8), cluster_of("h100-sxm", 8), {}, limit)


@pytest.mark.parametrize("limit", ["44 GiB", "48 GiB", "52 GiB", "56 GiB"])
def test_what_fits_is_no_miss(limit):
    """Nearly all of a small model fits, and of the layouts that do not none is looked at."""
    job, cluster = Job(seq=2048, global_batch=64), cluster_of("h100-sxm", 8)
    found = find(preset("llama-3.2-1b"), job, cluster, {}, limit)
    assert "fits the device" not in found.document["rejected_notes"].get("out_of_memory", "")


def test_only_what_runs_counts_what_is_only_modelled():
    """Each column of these runs, and not all together."""
    model, job, cluster = preset("llama-3.1-8b"), Job(seq=4096, global_batch=64), cluster_of("h100-sxm", 8)
    document = find(model, job, cluster, {}, "24 GiB", ranking="runnable_only").document
    assert document["considered"] == (
        document["feasible"] + document["pruned"] + sum(document["rejected"].values())
    )
    assert document["feasible"] == document["feasible_runnable"]
    assert "is only modelled" in document["rejected_notes"]["only_modelled"]
    both = {"recompute": RECOMPUTE_KINDS.index("full"), "offload": OFFLOAD_KINDS.index("activations")}
    assert find(model, job, cluster, both).document["feasible"] > 0
    with pytest.raises(LayoutError, match=r"nothing of it fits: .*is only modelled"):
        find(model, job, cluster, both, ranking="runnable_only")


@pytest.mark.parametrize("ranking", ["runnable_first", "runnable_only", "time"])
def test_the_document_agrees_with_the_plan_and_with_itself(ranking):
    model, job, cluster = preset("llama-3.1-8b"), Job(seq=4096, global_batch=64), cluster_of("h100-sxm", 8)
    found = find(model, job, cluster, {}, top=3, ranking=ranking)
    document, best = found.document, found.best
    assert len(document["best"]) == 3
    assert document["considered"] == (
        document["feasible"] + document["pruned"] + sum(document["rejected"].values())
    )
    at_most = document["feasible"] + document["rejected"]["out_of_memory"]
    assert document["feasible"] <= document["evaluated"] <= at_most
    first = document["best"][0]
    assert Layout.checked(first["layout"]) == best.layout
    assert first["step_time"] == pytest.approx(best.prediction.step_time, rel=1e-5)
    assert first["memory"]["allocated"] == pytest.approx(best.prediction.memory.allocated, abs=10)
    assert first["memory"]["reserved"] == pytest.approx(best.prediction.memory.reserved, abs=10)
    assert first["memory"]["device"] == pytest.approx(best.prediction.memory.total, abs=10)
    assert best.prediction == predict(model, job, cluster, best.layout)
    assert document["why"].startswith(f"chosen: [{best.layout.label}], ")


def test_what_does_not_run_is_planned_and_says_why():
    job = Job(seq=4096, global_batch=64, accounting="megatron")
    document = find(preset("llama-3.1-8b"), job, cluster_of("h100-sxm", 8), {}).document
    assert not any(row["runnable"] for row in document["best"])
    assert "accounting='megatron' is of another runtime" in document["not_runnable_reasons"][0]


# Classic answers


def by_time(found):
    """Fitting rows, fastest first, whether they run or are only modelled; and their table."""
    order = found.best[np.argsort(found.time[found.best], kind="stable")]
    return order, found.rows(order)


@pytest.mark.parametrize(
    ("name", "seq", "batch", "ranks"),
    [("llama-3.1-8b", 8192, 8, 64), ("llama-3.1-70b", 8192, 16, 64), ("llama-3.1-70b", 8192, 8, 128)],
)
def test_tp_never_crosses_a_node_when_another_layout_fits(name, seq, batch, ranks):
    """Also where ranks outnumber sequences: tp 16 over two nodes costs more than other axes do."""
    model, job, cluster = preset(name), Job(seq=seq, global_batch=batch), cluster_of("h100-sxm", ranks)
    found = search(model, job, cluster)
    order, table = by_time(found)
    assert table.tp[0] <= 8
    crossing = search(model, job, cluster, {"tp": [16, 32, 64]})
    assert crossing.time[by_time(crossing)[0][0]] > 1.05 * found.time[order[0]]


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
    assert fits.reshape(3, 3).any(axis=1).all()  # with some recomputation
    used = mfu(model, job, cluster, step_time(model, job, cluster, table).time)[fits]
    assert 0.2 < used.min() < used.max() < 0.7


def test_every_row_shown_has_its_own_memory():
    """Rows with a pipeline and without stand side by side; the heaviest rank is another in each."""
    model, job, cluster = preset("qwen3-30b-a3b"), Job(seq=4096, global_batch=64), cluster_of("h100-sxm", 16)
    rows = find(model, job, cluster, {"tp": [4]}, top=40, ranking="time").document["best"]
    layouts = [Layout(**row["layout"]) for row in rows]
    assert len({layout.pp > 1 for layout in layouts}) == 2
    device = device_memory(model, job, cluster.device, table_of(layouts, model.layers))
    assert [row["memory"]["device"] for row in rows] == pytest.approx(device.tolist(), rel=1e-9)


def test_what_the_host_has_no_room_for_is_said_so():
    """Nothing is offloaded from a CPU, whose memory is the host's."""
    job, cluster = Job(seq=64, global_batch=4, precision="fp32"), cluster_of("cpu", 2)
    found = find(SPEC, job, cluster, {"pp": 1}).document
    assert all(row["layout"]["offload"] == "none" for row in found["best"])
    assert "offloads more than its share of the host holds" in found["rejected_notes"]["out_of_memory"]
    assert "-" not in found["rejected_notes"]["out_of_memory"]
