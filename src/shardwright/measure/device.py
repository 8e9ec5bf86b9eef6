"""What this machine reaches: matrix products, attention, memory and collectives, on all local ranks at once.

Each rank measures while the others do the same, because that is how they will train.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwright.cluster import Cluster
from shardwright.job import Job
from shardwright.measure.call_time import SECONDS_EACH, timing
from shardwright.model import ModelSpec
from shardwright.plan.compute import BACKWARD_ATTENTION
from shardwright.run.dp import PRECISION_DTYPE
from shardwright.run.kernels import causal_attention
from shardwright.run.launch import run_ranks

LINK_BYTES = 4 * 2**20
"""Payload of the bandwidth measurement; the latency measurement sends 8 B."""


def measured_cluster(model: ModelSpec, job: Job, cluster: Cluster) -> Cluster:
    """``cluster`` (CPU ranks of this machine) with measured rates in place of the typical ones.

    Takes about two seconds. Rates are those of the slowest rank, at the shapes of ``model``.
    """
    found = run_ranks(_measure_rank, cluster.ranks, model, job)
    slowest = {key: min(rank[key] for rank in found) for key in found[0]}
    peak = cluster.device.peak(job.precision)
    matmul = min(slowest["matmul"] / peak, 1.0)
    if slowest["matmul"] > peak:
        peak = slowest["matmul"]
    link = cluster.intra_link
    if cluster.ranks > 1:
        latency = slowest["launch"] / (2 * (cluster.ranks - 1))
        link = link.model_copy(update={"bandwidth": slowest["link"], "latency": latency})
    device = cluster.device.model_copy(
        update={
            job.precision: peak,
            "matmul_efficiency": matmul,
            "attention_efficiency": min(slowest["attention"] / peak, 1.0),
            "memory_bandwidth": slowest["memory"],
            "memory_efficiency": 1.0,
            "intra_link": link,
            "inter_link": link,
            "source": f"rates measured here with torch {torch.__version__} at the model's shapes; "
            f"peak: {cluster.device.source}",
        }
    )
    assumed = (*cluster.assumed, "rates measured on this machine")
    return cluster.model_copy(update={"device": device, "assumed": assumed})


def repeat_time(function: Callable[[], Any], seconds: float = SECONDS_EACH) -> float:
    """Median time of one call on the CPU [s], after one warm-up."""
    return timing(function, torch.device("cpu"), seconds).time


def _measure_rank(model: ModelSpec, job: Job) -> dict[str, float]:
    """Rates of this rank: FLOP/s of products and attention, B/s of memory and link, s of one small launch."""
    dtype = PRECISION_DTYPE[job.precision]
    dist.barrier()
    found = {
        "matmul": _matmul_rate(model, job, dtype),
        "attention": _attention_rate(model, job, dtype),
        "memory": _memory_rate(),
    }
    if dist.get_world_size() > 1:
        found["link"], found["launch"] = _link()
    return found


def _matmul_rate(model: ModelSpec, job: Job, dtype: torch.dtype) -> float:
    """Forward and backward of the feed-forward products of one sequence [FLOP/s]."""
    x = torch.randn(job.seq, model.hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(model.ffn, model.hidden, dtype=dtype, requires_grad=True)
    grad = torch.randn(job.seq, model.ffn, dtype=dtype)

    def both() -> None:
        torch.autograd.grad(torch.nn.functional.linear(x, weight), (x, weight), grad)

    return 6 * job.seq * model.hidden * model.ffn / repeat_time(both)


def _attention_rate(model: ModelSpec, job: Job, dtype: torch.dtype) -> float:
    """Forward and backward of causal attention of one sequence, the masked half not counted [FLOP/s]."""
    shape = (1, model.heads, job.seq, model.head_size)
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, dtype=dtype)

    def both() -> None:
        torch.autograd.grad(causal_attention(q, k, v), (q, k, v), grad)

    forward = 2 * model.heads * model.head_size * job.seq * job.seq
    return (1 + BACKWARD_ATTENTION) * forward / repeat_time(both)


def _memory_rate() -> float:
    """Copy of an array larger than the caches, reads and writes counted [B/s]."""
    source, target = torch.zeros(2**24), torch.zeros(2**24)
    return 2 * source.nbytes / repeat_time(lambda: target.copy_(source))


def _link() -> tuple[float, float]:
    """Bus bandwidth of a large all-reduce [B/s], and time of a small one [s], as often on every rank."""
    n = dist.get_world_size()
    large, small = torch.zeros(LINK_BYTES // 4), torch.zeros(2)
    timed = []
    for tensor in (large, small):
        dist.all_reduce(tensor)
        repeats = 20
        start = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(tensor)
        timed.append((time.perf_counter() - start) / repeats)
    return 2 * (n - 1) / n * large.nbytes / max(timed[0] - timed[1], 1e-9), timed[1]
