"""Recommendations: each is the fastest of a search, and says by how much what does not fit misses."""

import pytest

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset, preset_names
from shardwright.plan.explain import predict
from shardwright.plan.finding import find
from shardwright.plan.recommend import MODELS, recommendation, recommended, sequences_of

KEYS = {
    "model",
    "gpus",
    "global_batch",
    "label",
    "layout",
    "step_time",
    "tokens_per_s_per_gpu",
    "mfu",
    "memory",
}
KEYS |= {"fits", "nearest_miss", "why_not", "search_time"}


def test_default_models_are_presets_with_experts_among_them():
    assert set(MODELS) <= set(preset_names())
    assert any(preset(name).moe for name in MODELS)


def test_a_recommendation_is_the_fastest_that_fits():
    model, job, cluster = preset("llama-3.1-8b"), Job(seq=4096, global_batch=64), cluster_of("h100-sxm", 8)
    row = recommendation(model, job, cluster, {})
    best = find(model, job, cluster, {}, ranking="time").document["best"][0]
    assert row.keys() == KEYS
    assert row["step_time"] == pytest.approx(best["step_time"])
    assert row["tokens_per_s_per_gpu"] == pytest.approx(64 * 4096 / row["step_time"] / 8)
    assert row["memory"] <= cluster.device.memory
    layout = Layout(**row["layout"])
    assert layout.label == row["label"]
    if layout.pp == 1:
        assert predict(model, job, cluster, layout).step_time == pytest.approx(row["step_time"], rel=1e-5)


def test_a_constraint_is_kept_and_a_price_makes_a_cost():
    cluster = cluster_of("h100-sxm", 8).model_copy(update={"price_per_device_hour": 2.0})
    row = recommendation(preset("llama-3.1-8b"), Job(seq=4096, global_batch=64), cluster, {"tp": 4})
    assert row["layout"]["tp"] == 4
    assert row["cost_per_step"] == pytest.approx(2 * 8 * row["step_time"] / 3600)


def test_what_does_not_fit_says_what_it_needs():
    cluster = cluster_of("rtx4090", 2)
    row = recommendation(preset("llama-3.1-70b"), Job(seq=2048, global_batch=8), cluster, {})
    assert row.keys() == KEYS
    assert not row["fits"]
    assert row["layout"] is row["step_time"] is row["memory"] is None
    assert row["nearest_miss"]["needs"] > cluster.device.memory
    assert row["why_not"].endswith("too much")


def test_what_has_no_layout_says_why():
    row = recommendation(
        preset("llama-3.2-1b"), Job(seq=2048, global_batch=8), cluster_of("h100-sxm", 8), {"pp": 3}
    )
    assert row["nearest_miss"] is None
    assert "no row has pp=3: use 1 or 2 or 4 or 8" in row["why_not"]


def test_every_model_on_every_cluster_is_told_as_it_is_done():
    said = []
    models = [preset("llama-3.2-1b"), preset("llama-3.1-8b")]
    clusters = [cluster_of("h100-sxm", 8), cluster_of("h100-sxm", 16)]
    rows = recommended(models, clusters, Job(seq=2048, global_batch=32), {}, said.append)
    assert [(row["model"], row["gpus"]) for row in rows] == [
        (model.name, n) for model in models for n in (8, 16)
    ]
    assert [line.split(":")[0] for line in said] == [f"{row['model']} on {row['gpus']}" for row in rows]


@pytest.mark.parametrize(
    ("tokens", "seq", "sequences"),
    [(2**22, 8192, 512), (4_000_000, 8192, 512), (12288, 4096, 3), (100, 4096, 1)],
)
def test_sequences_are_exact_or_the_nearest_power_of_two(tokens, seq, sequences):
    assert sequences_of(tokens, seq) == sequences
