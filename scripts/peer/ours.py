"""One rank of shardwright in the throughput comparison; started by scripts/bench_peer.py."""

import os

import torch
import torch.distributed as dist
from host_memory import keep_freed_memory
from serve import (
    LEARNING_RATE,
    SEQ,
    SEQUENCES,
    SHAPE,
    STEPS,
    WARMUP_STEPS,
    global_batch,
    own_output,
    question,
    serve,
)

from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.run.init import initialise
from shardwright.run.mesh import build_mesh, init_process_group
from shardwright.run.model import Microbatch
from shardwright.run.step import Stepper, parallel_model


def layout_of(asked: dict) -> Layout:
    """The layout that was asked for, with as few microbatches as it takes."""
    axes = {axis: asked.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp", "pp")}
    microbatches = 2 * axes["pp"] if axes["pp"] > 1 else 1
    share = SEQUENCES // (axes["dp_replicate"] * axes["dp_shard"])
    pipeline = {"schedule": "1F1B", "stage_layers": (SHAPE["layers"] // axes["pp"],) * axes["pp"]}
    return Layout(
        **axes,
        sp=axes["tp"] > 1,
        zero_stage=3 if axes["dp_shard"] > 1 else 0,
        micro_batch=share // microbatches,
        microbatches=microbatches,
        recompute=asked["recompute"],
        **(pipeline if axes["pp"] > 1 else {}),
    )


def main() -> None:
    """Build the model as training does, then step on request."""
    answers, layout = own_output(), layout_of(question())
    keep_freed_memory()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    init_process_group(torch.device("cpu"), "env://", rank, world, timeout_s=300)
    sizes = {"kv_heads": SHAPE["heads"], "head_size": SHAPE["hidden"] // SHAPE["heads"]}
    spec = ModelSpec(name="peer", model_type="llama", **SHAPE, **sizes)
    job = Job(seq=SEQ, global_batch=SEQUENCES, steps=STEPS, precision="fp32", learning_rate=LEARNING_RATE,
              warmup_steps=WARMUP_STEPS)  # fmt: skip
    mesh = build_mesh(layout, "cpu")
    model = parallel_model(spec, job, layout, mesh)
    initialise(model, job.seed, torch.device("cpu"))
    stepper = Stepper(model, job, layout, mesh)
    done = 0

    def step(_: bool) -> float:
        nonlocal done
        share = SEQUENCES // layout.dp
        first = mesh.data.get_local_rank() * share
        parts = global_batch(done)[first : first + share].split(layout.micro_batch)
        found = stepper.step(done, [Microbatch(part[:, :-1].clone(), part[:, 1:].clone()) for part in parts])
        done += 1
        return found.loss

    serve(step, sum(parameter.numel() for parameter in model.parameters()), answers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
