"""Benchmark figures: search rate, dry run, start-up, training throughput on CPU ranks. ``make bench``.

Machines are noisy: each figure is the best of a few repeats, and comparisons belong into one run.
"""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from shardwright.cluster import cluster_of, usable_cores
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.memory import device_memory
from shardwright.plan.search import search
from shardwright.plan.space import search_space
from shardwright.plan.step import step_time
from shardwright.plan.table import LayoutTable

REPEATS = 3
TABLE_ROWS = 16_384


def best_time(function: Callable[[], Any]) -> float:
    """Shortest of a few calls [s]."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def search_rate() -> dict[str, float]:
    """Layouts a second, memory and step time both computed, on one core; and one whole search."""
    model, job = preset("llama-3.1-70b"), Job(seq=8192, global_batch=1024)
    cluster = cluster_of("h100-sxm", 64)
    space = search_space(model, job, 64).wide()
    table = LayoutTable(*(np.resize(column, TABLE_ROWS) for column in space))

    def evaluate() -> None:
        device_memory(model, job, cluster.device, table)
        step_time(model, job, cluster, table)

    return {
        "layouts_per_s": TABLE_ROWS / best_time(evaluate),
        "search_70b_on_64_s": best_time(lambda: search(model, job, cluster)),
    }


def dry_run_figures() -> dict[str, float]:
    """Time and memory of a dry run of one rank of 64, Llama-3.1-8B, in a process of its own."""
    code = (
        "import json; from shardwright.check.dryrun import dry_run; from shardwright.job import Job;"
        "from shardwright.layout import Layout; from shardwright.model import preset;"
        "from shardwright.check.compare import peak_host_memory;"
        "run = dry_run(preset('llama-3.1-8b'), Job(seq=8192, global_batch=512),"
        " Layout(dp_shard=64, zero_stage=3, micro_batch=1, microbatches=8, recompute='full'));"
        "print(json.dumps({'dry_run_8b_s': run.time, 'dry_run_8b_host_memory_bytes': peak_host_memory()}))"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(output)
    return figures


def start_up() -> dict[str, float]:
    """``shardwright plan`` of a 70B on 64 devices as a command [s]."""
    shardwright = str(Path(sys.executable).with_name("shardwright"))
    job = ["--gpus", "64", "--device", "h100-sxm", "--seq", "8192", "--global-batch", "1024", "--json"]
    command = [shardwright, "plan", "llama-3.1-70b", *job]
    return {"plan_command_s": best_time(lambda: subprocess.run(command, check=True, capture_output=True))}


def training() -> dict[str, float]:
    """Tokens a second of the loop's model in fp32, one and two CPU ranks, one thread each."""
    from shardwright.launcher import train_plan
    from shardwright.plan.explain import plan_of

    model = preset("bytes-5m")
    figures = {}
    for layout in (Layout(micro_batch=8), Layout(dp_shard=2, zero_stage=3, micro_batch=4)):
        job = Job(seq=256, global_batch=8, steps=8, precision="fp32")
        plan = plan_of(model, job, cluster_of("cpu", layout.ranks), layout)
        with TemporaryDirectory() as folder:
            result = train_plan(plan, run_directory=Path(folder) / "run")
        assert result is not None
        figures[f"tokens_per_s_{layout.ranks}_ranks"] = result["tokens_per_s"]
    return figures


def main() -> None:
    """Print all figures as one JSON document."""
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }
    print(json.dumps({**about, **search_rate(), **start_up(), **dry_run_figures(), **training()}, indent=2))


if __name__ == "__main__":
    main()
