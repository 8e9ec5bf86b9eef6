"""Recommended layouts: the fastest that fits, of every model on every number of devices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardwright.cluster import Cluster
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.finding import Wishes, columns_asked, step_cost
from shardwright.plan.nothing import miss_sentence, nearest_miss
from shardwright.plan.search import rejection_notes, search
from shardwright.plan.step import mfu, tokens_per_second_per_device
from shardwright.units import format_time

MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b", "qwen2.5-32b", "llama-3.1-70b", "llama-3.1-405b")
"""Presets of a table for which no models are named, one of them with experts."""


def sequences_of(tokens: int, seq: int) -> int:
    """Sequences of a step of about so many tokens: exactly, or the nearest power of two, which most numbers
    of ranks share out."""
    if tokens % seq == 0:
        return tokens // seq
    return 1 << max(round(math.log2(tokens / seq)), 0)


def recommended(
    models: Sequence[ModelSpec],
    clusters: Sequence[Cluster],
    job: Job,
    fixed: Wishes,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for every model on every cluster; ``say`` is told of each as it is done."""
    rows = []
    for model in models:
        for cluster in clusters:
            row = recommendation(model, job, cluster, fixed)
            rows.append(row)
            found = (
                f"[{row['label']}], {format_time(row['step_time'])} a step" if row["fits"] else row["why_not"]
            )
            say(f"{model.name} on {cluster.ranks:,}: {found} ({format_time(row['search_time'])})")
    return rows


def recommendation(model: ModelSpec, job: Job, cluster: Cluster, fixed: Wishes) -> dict[str, Any]:
    """The fastest layout of a job, or what misses by least; of keys that do not apply the value is None."""
    result = search(model, job, cluster, columns_asked(model, job, fixed, "time"))
    fits = len(result.best) > 0
    row: dict[str, Any] = {
        "model": model.name,
        "gpus": cluster.ranks,
        "global_batch": job.global_batch,
        "fits": fits,
        "nearest_miss": None if fits else nearest_miss(model, job, cluster, result),
        "why_not": None,
        "search_time": result.search_time,
    }
    if not fits:
        none = dict.fromkeys(("label", "layout", "step_time", "tokens_per_s_per_gpu", "mfu", "memory"))
        miss = row["nearest_miss"]
        notes = rejection_notes(model, job, cluster, result)
        row["why_not"] = "; ".join(notes.values()) if miss is None else miss_sentence(miss)
        return row | none
    best = int(result.best[np.argmin(result.time[result.best])])
    layout, time = result.layout(best), result.time[[best]]
    return row | {
        "label": layout.label,
        "layout": layout.model_dump(mode="json"),
        "step_time": float(time[0]),
        "tokens_per_s_per_gpu": float(tokens_per_second_per_device(job, cluster, time)[0]),
        "mfu": float(mfu(model, job, cluster, time)[0]),
        "memory": float(result.device[best]),
        **step_cost(job, cluster, float(time[0])),
    }
