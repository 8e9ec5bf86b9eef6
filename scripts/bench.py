"""Benchmark figures: search rate, dry run, start-up, training throughput on CPU ranks. ``make bench``.

Machines are noisy: each figure is the best of a few repeats, and comparisons belong into one run.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from shardwright.cluster import cluster_of, usable_cores
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset

REPEATS = 3


def best_time(function: Callable[[], Any]) -> float:
    """Shortest of a few calls [s]."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def figures_of(code: str) -> dict[str, float]:
    """What a process of its own prints, so that the peak of its memory is its own."""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(output)
    return figures


SETTING = (
    "import json, resource, time; from shardwright.cluster import cluster_of;"
    "from shardwright.job import Job;"
    "from shardwright.model import preset;"
    "job, cluster = Job(seq={seq}, global_batch={batch}), cluster_of('h100-sxm', {ranks});"
    "model = preset({model!r});"
    "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024;"
)


def search_figures(model: str, ranks: int, batch: int, seq: int) -> dict[str, float]:
    """A whole search on one core, finalists simulated: layouts, of which evaluated, and time.

    The first search of a process, and the best of two more, when what depends on the model alone is known.
    """
    found = figures_of(
        SETTING.format(model=model, ranks=ranks, batch=batch, seq=seq)
        + "from shardwright.plan.search import search;"
        "found = [search(model, job, cluster) for _ in range(3)];"
        "print(json.dumps({'layouts': found[0].considered, 'evaluated': found[0].evaluated,"
        " 'first_s': found[0].search_time, 's': min(each.search_time for each in found[1:]),"
        " 'host_memory_bytes': peak()}))"
    )
    return {f"search_{model}_on_{ranks}_{name}": value for name, value in found.items()}


def evaluation_figures(model: str, ranks: int, batch: int, seq: int) -> dict[str, float]:
    """Memory and step time of every plain layout, none passed over: layouts a second on one core."""
    found = figures_of(
        SETTING.format(model=model, ranks=ranks, batch=batch, seq=seq)
        + "from shardwright.plan.evaluate import evaluate, least, of_microbatches, whole_step;"
        "from shardwright.plan.sweep import plain_grids; start = time.perf_counter();"
        "rows = sum(piece.grid.ordered_rows for grid in plain_grids(model, job, cluster.ranks) for piece in"
        " evaluate(model, job, cluster,"
        " whole_step(model, job, cluster, of_microbatches(model, job, least(model, job, cluster, grid)))));"
        "seconds = time.perf_counter() - start;"
        "print(json.dumps({'layouts': rows, 'layouts_per_s': rows / seconds, 'host_memory_bytes': peak()}))"
    )
    return {f"evaluate_{model}_on_{ranks}_{name}": value for name, value in found.items()}


def search_rate() -> dict[str, float]:
    """Searches of small and large spaces, and the rate of evaluation."""
    cases = (
        ("llama-3.1-8b", 8, 128, 8192),
        ("llama-3.1-70b", 64, 128, 8192),
        ("llama-3.1-405b", 16384, 2048, 8192),
        ("llama-3.1-405b", 16384, 128, 131072),
        ("deepseek-v3", 1024, 1024, 4096),
    )
    figures: dict[str, float] = {}
    for case in cases:
        found = search_figures(*case)
        figures |= found if case[3] < 131072 else {f"{name}_long": value for name, value in found.items()}
    return figures | evaluation_figures("llama-3.1-405b", 16384, 2048, 8192)


DRY_RUNS = {
    "8b_on_64": (
        "llama-3.1-8b", "dp_shard=64, zero_stage=3, microbatches=8, recompute='full'", (0,),
    ),
    "70b_on_512": (
        "llama-3.1-70b", "tp=8, sp=True, dp_shard=64, zero_stage=3, microbatches=16, recompute='full'", (0,),
    ),
    "405b_on_16384": (
        "llama-3.1-405b",
        "tp=8, sp=True, cp=2, cp_kind='ring', pp=16, schedule='1F1B', stage_layers=(7,) + (8,) * 14 + (7,),"
        "dp_shard=64, zero_stage=1, microbatches=32, recompute='full'",
        (0, 8 * 1024, 15 * 1024),  # a rank of the first stage, of the middle, of the last
    ),
    "405b_on_16384_dualpipev": (
        "llama-3.1-405b",
        "tp=8, sp=True, cp=2, cp_kind='ring', pp=16, schedule='DualPipeV', chunks=2,"
        "stage_layers=(3,) + (4,) * 30 + (3,), dp_shard=64, zero_stage=1, microbatches=32, recompute='full'",
        (8 * 1024,),
    ),
}  # fmt: skip
"""Model, layout and ranks of dry runs that are timed; sequences of 8192."""


def dry_run_figures() -> dict[str, float]:
    """Time (of the process, imports too: the machine may be shared) and host memory of dry runs of one rank
    each, every one in a process of its own."""
    figures = {}
    for name, (model, layout, ranks) in DRY_RUNS.items():
        for rank in ranks:
            found = figures_of(
                "import json, time; from shardwright.check.dryrun import dry_run;"
                "from shardwright.job import Job; from shardwright.layout import Layout;"
                "from shardwright.model import preset;"
                "from shardwright.check.compare import peak_host_memory;"
                f"layout = Layout({layout});"
                "job = Job(seq=8192, global_batch=layout.dp * layout.microbatches);"
                f"run = dry_run(preset({model!r}), job, layout, {rank});"
                "print(json.dumps({'s': time.process_time(), 'host_memory_bytes': peak_host_memory(),"
                " 'layers': run.layers, 'microbatches': run.microbatches}))"
            )
            figures |= {f"dry_run_{name}_rank_{rank}_{key}": value for key, value in found.items()}
    return figures


def start_up() -> dict[str, float]:
    """``shardwright plan`` of a 70B on 64 devices as a command, its modules compiled before [s]."""
    shardwright = str(Path(sys.executable).with_name("shardwright"))
    job = ["--gpus", "64", "--device", "h100-sxm", "--seq", "8192", "--global-batch", "1024", "--json"]
    command = [shardwright, "plan", "llama-3.1-70b", *job]
    setting = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = partial(subprocess.run, command, check=True, capture_output=True, env=setting)
    run()
    return {"plan_command_s": best_time(run)}


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
