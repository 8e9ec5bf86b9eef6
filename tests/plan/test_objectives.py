"""Objectives: each equals trying every choice of it by a search; the front equals its definition."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import cluster_of
from shardwright.errors import JobError, NothingFitsError
from shardwright.job import Job
from shardwright.model import ModelSpec, preset
from shardwright.plan.finding import find
from shardwright.plan.nothing import fewest_devices, least_memory, nearest_miss
from shardwright.plan.objectives import device_counts, find_best
from shardwright.plan.pareto import MOST, pareto_front, pareto_rows
from shardwright.plan.search import search
from shardwright.units import GiB, MiB

SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, head_size=16, vocab=259
)
LARGE = preset("llama-3.1-70b")


def small_cluster(ranks, memory):
    cluster = cluster_of("h100-sxm", ranks, 4)
    device = cluster.device.model_copy(update={"memory": memory, "context": 0, "communicator": 0})
    return cluster.model_copy(update={"device": device})


def fits(job, cluster, **fixed):
    return len(search(SPEC, job, cluster, {name: [value] for name, value in fixed.items()}).best) > 0


def test_time_is_what_find_says():
    job, cluster = Job(seq=64, global_batch=8), small_cluster(4, 4 * MiB)
    found = find_best("time", SPEC, job, cluster, {})
    assert found.document["objective"] == {"name": "time"}
    assert found.best == find(SPEC, job, cluster, {}).best


def test_cost_is_price_times_devices_times_time():
    job = Job(seq=64, global_batch=8)
    cluster = small_cluster(4, 4 * MiB).model_copy(update={"price_per_device_hour": 1.8})
    found = find_best("cost", SPEC, job, cluster, {})
    rows = found.document["best"]
    assert found.best.layout == find_best("time", SPEC, job, cluster, {}).best.layout
    for row in rows:
        assert row["cost_per_step"] == pytest.approx(1.8 * 4 * row["step_time"] / 3600)
        assert row["cost_per_1e9_tokens"] == pytest.approx(row["cost_per_step"] / (64 * 8) * 1e9)


def test_a_cost_needs_a_price():
    with pytest.raises(JobError, match=r"--objective cost needs a price: give --price 2.5"):
        find_best("cost", SPEC, Job(seq=64, global_batch=8), small_cluster(4, 4 * MiB), {})
    document = find(SPEC, Job(seq=64, global_batch=8), small_cluster(4, 4 * MiB), {}).document
    assert "cost_per_step" not in document["best"][0]


@pytest.mark.parametrize(
    ("ranks", "per_node", "counts"),
    [
        (1, 8, [1]),
        (6, 8, [1, 2, 4, 6]),
        (24, 8, [1, 2, 4, 8, 16, 24]),
        (64, 8, [1, 2, 4, 8, 16, 32, 64]),
        (144, 72, [1, 2, 4, 8, 16, 32, 64, 72, 144]),
        (12, 3, [1, 2, 3, 6, 12]),
    ],
)
def test_device_counts_double_inside_a_node_and_then_in_nodes(ranks, per_node, counts):
    assert device_counts(cluster_of("h100-sxm", ranks, per_node)) == counts


@settings(deadline=None, max_examples=4)
@given(memory=st.integers(int(0.3 * MiB), 4 * MiB))
def test_fewest_devices_is_the_first_count_on_which_something_fits(memory):
    job, cluster = Job(seq=64, global_batch=8), small_cluster(4, memory)
    fitting = [n for n in (1, 2, 4) if fits(job, small_cluster(n, memory))]
    if not fitting:
        with pytest.raises(NothingFitsError, match="no layout works"):
            find_best("gpus", SPEC, job, cluster, {})
        return
    found = find_best("gpus", SPEC, job, cluster, {})
    said = found.document["objective"]
    assert said["gpus"] == fitting[0] == found.best.cluster.ranks == found.best.layout.ranks
    assert [row["gpus"] for row in said["misses"]] == [n for n in (1, 2, 4) if n < fitting[0]]
    for row in said["misses"]:
        assert row["nearest_miss"]["needs"] - memory == pytest.approx(row["nearest_miss"]["too_much"])
        assert row["nearest_miss"]["too_much"] > 0


def test_a_count_that_has_no_such_layout_says_why():
    said = find_best(
        "gpus", SPEC, Job(seq=64, global_batch=8), small_cluster(4, 4 * MiB), {"tp": 2}
    ).document["objective"]
    assert said["gpus"] == 2
    (row,) = said["misses"]
    assert row["nearest_miss"] is None
    assert set(row["reasons"]) == {"constraint"}


@settings(deadline=None, max_examples=4)
@given(memory=st.integers(int(0.4 * MiB), 3 * MiB))
def test_largest_micro_batch_is_trying_all(memory):
    job, cluster = Job(seq=1024, global_batch=4), small_cluster(2, memory)
    sizes = {
        b * job.seq / cp
        for b, cp in itertools.product((1, 2, 4), (1, 2))
        if fits(job, cluster, micro_batch=b, cp=cp)
    }
    if not sizes:
        with pytest.raises(NothingFitsError, match="no layout works"):
            find_best("micro-batch", SPEC, job, cluster, {})
        return
    found = find_best("micro-batch", SPEC, job, cluster, {})
    said, layout = found.document["objective"], found.best.layout
    assert said["tokens"] == max(sizes) == layout.micro_batch * job.seq / layout.cp
    assert {(row["layout"]["micro_batch"], row["layout"]["cp"]) for row in found.document["best"]} == {
        (said["micro_batch"], said["cp"])
    }
    if said["next"] is not None:
        assert said["next"]["tokens"] > said["tokens"]
        assert said["next"]["nearest_miss"]["too_much"] > 0


def test_a_fixed_micro_batch_is_kept():
    found = find_best(
        "micro-batch", SPEC, Job(seq=64, global_batch=8), small_cluster(4, 4 * MiB), {"micro_batch": 1}
    )
    assert found.best.layout.micro_batch == 1
    assert found.best.layout.cp == 1  # a sequence whole is the most tokens


@settings(deadline=None, max_examples=4)
@given(memory=st.integers(int(0.4 * MiB), 3 * MiB), batch=st.sampled_from([4, 6, 8]))
def test_longest_sequence_is_trying_all(memory, batch):
    """Of one batch's tokens; a batch of 6 is halved once."""
    cluster = small_cluster(2, memory)
    lengths = [n for n in (1, 2, 4, 8) if batch % n == 0]
    fitting = [n for n in lengths if fits(Job(seq=256 * n, global_batch=batch // n), cluster)]
    job = Job(seq=256, global_batch=batch)
    if not fitting:
        with pytest.raises(NothingFitsError, match="no layout works"):
            find_best("sequence", SPEC, job, cluster, {})
        return
    found = find_best("sequence", SPEC, job, cluster, {})
    said = found.document["objective"]
    assert (said["seq"], said["global_batch"]) == (256 * max(fitting), batch // max(fitting))
    assert found.best.job.tokens_per_step == job.tokens_per_step
    assert [row["seq"] for row in said["misses"]] == [256 * n for n in reversed(lengths) if n > max(fitting)]


# The front of time against memory


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=30))
def test_the_front_is_what_no_other_beats(points):
    time, device = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    front = pareto_front(time, device)
    best = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    assert [points[i] for i in front] == sorted(best)


def test_rows_of_the_front_are_few_and_each_better_in_one():
    result = search(LARGE, Job(seq=8192, global_batch=128), cluster_of("h100-sxm", 64))
    rows = pareto_rows(result)
    assert 3 <= len(rows) <= MOST
    times, left = [row["step_time"] for row in rows], [row["headroom"] for row in rows]
    assert times == sorted(set(times))
    assert left == sorted(set(left))
    assert times[0] == result.time[result.best].min()
    assert left[-1] == pytest.approx(result.limit - result.device[result.best].min())
    assert [row["device_memory"] + row["headroom"] for row in rows] == pytest.approx(
        [result.limit] * len(rows)
    )
    few = pareto_rows(result, most=2)
    assert few == [rows[0], rows[-1]]


# When nothing fits


@pytest.mark.parametrize("name", ["tiny", "llama-3.1-8b", "deepseek-v2-lite", "gpt2-xl"])
@pytest.mark.parametrize("seq", [64, 4096])
def test_least_memory_is_the_least_of_all_to_a_thousandth(name, seq):
    model = SPEC if name == "tiny" else preset(name)
    for ranks, batch in ((1, 4), (4, 8)):
        job, cluster = Job(seq=seq, global_batch=batch), small_cluster(ranks, 1000)
        of_all = nearest_miss(model, job, cluster, search(model, job, cluster))
        least = nearest_miss(model, job, cluster, search(model, job, cluster, least_memory({})))
        assert of_all["needs"] <= least["needs"] <= of_all["needs"] * 1.001


def test_what_is_fixed_stays_fixed_where_least_memory_is_sought():
    assert least_memory({"recompute": [0, 1], "offload": [1], "tp": [2]}) == {
        "recompute": [0, 1],
        "offload": [1],
        "tp": [2],
        "recompute_every": [1],
        "loss_chunks": [8],
        "dispatch": [0],
        "order": [0],
    }


def test_nothing_fits_says_how_far_each_kind_misses_and_where_it_would_fit():
    job, cluster = Job(seq=8192, global_batch=128), cluster_of("h100-sxm", 8)
    with pytest.raises(NothingFitsError, match=r"too much, .* on 16 devices \[.*\] fits") as raised:
        find(LARGE, job, cluster, {}, "60 GiB")
    document = raised.value.document
    assert document["nothing_fits"] == str(raised.value)
    assert document["best"] == []
    kinds = {row["kind"]: row for row in document["kinds"]}
    assert {"data axes alone", "tp", "cp", "pp", "tp and cp", "tp and pp", "cp and pp"} <= set(kinds)
    needs = [row["needs"] for row in document["kinds"]]
    assert needs == sorted(needs)
    assert document["nearest"]["needs"] == pytest.approx(needs[0], rel=1e-3)
    for row in document["kinds"]:
        assert row["too_much"] == pytest.approx(row["needs"] - 60 * GiB)
        assert 0 < row["largest_term_bytes"] < row["needs"]
    assert document["fits_on"]["gpus"] == 16
    assert document["fits_on"]["device"] <= 60 * GiB
    alone = search(LARGE, job, cluster, {"tp": [1], "cp": [1], "pp": [1]}, 60 * GiB)
    assert kinds["data axes alone"]["needs"] == pytest.approx(float(alone.misses.device[0]), rel=1e-3)


def test_where_no_number_of_devices_helps_it_says_so():
    job, cluster = Job(seq=64, global_batch=4), small_cluster(1, 1000)
    tried, found = fewest_devices(SPEC, job, cluster, {}, None)
    assert (tried, found) == ([2, 4, 8, 16, 32, 64], None)
    with pytest.raises(NothingFitsError, match="nor does anything fit on 64 devices"):
        find(SPEC, job, cluster, {})


def test_a_batch_that_cannot_be_shared_has_no_miss():
    model = SPEC.model_copy(update={"heads": 1, "kv_heads": 1, "head_size": 64, "layers": 1})
    with pytest.raises(NothingFitsError, match="outnumber global_batch=6") as raised:
        find(model, Job(seq=61, global_batch=6), cluster_of("h100-sxm", 8), {})
    assert raised.value.document["kinds"] == []
    assert raised.value.document["nearest"] is None
    assert raised.value.document["fits_on"] is None
