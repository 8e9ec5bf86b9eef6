"""Arithmetic of batches and pipelines: what does not come out even, and how large the bubble is."""

from collections.abc import Iterator
from math import prod

from shardwright.doctor.finding import Finding
from shardwright.doctor.setting import Setting
from shardwright.errors import LayoutError
from shardwright.layout import batches_that_work
from shardwright.plan.layer_notation import noted_stages

LARGE_BUBBLE = 0.15
"""Share of a step idle that is worth a word: 1F1B with 8 stages and 32 microbatches has 18 %."""

UNEVEN = (
    "use a number of stages that divides the layers, or say an uneven split: "
    "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers, or an explicit "
    "--pipeline-model-parallel-layout"
)

SHORT_WARMUP = ("megatron", "deepspeed")
"""Frameworks whose 1F1B warms up with as many microbatches as there are. Source: Megatron-LM,
megatron/core/pipeline_parallel/schedules.py; DeepSpeed, runtime/pipe/schedule.py."""

ANY_MICROBATCHES = ("gpipe", "loopedbfs")
"""Schedules that work with fewer microbatches than stages."""


def batch_findings(setting: Setting) -> Iterator[Finding]:
    """Whether degrees make up the world, and microbatches the global batch."""
    degrees = {name: getattr(setting, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
    said = {name: degree for name, degree in degrees.items() if degree is not None and degree > 0}
    world = setting.world
    product = prod(said.values())
    everything = setting.dp_shard is not None and setting.dp_shard > 0 and setting.dp_replicate is not None
    if world and (product > world or world % product or (everything and product != world)):
        yield Finding(
            "world_does_not_factor",
            "certain",
            f"{' x '.join(f'{name} {degree}' for name, degree in said.items())} = {product} does not "
            f"make up {world} ranks",
            (),
            (setting.source,),
            numbers={"product": product, "world": world},
        )
    dp, micro, batch, m = (
        setting.data_ranks,
        setting.micro_batch or 1,
        setting.global_batch,
        setting.microbatches,
    )
    if not dp or not batch:
        return
    if batch % (dp * micro) or (
        m is not None and setting.micro_batch is not None and dp * micro * m != batch
    ):
        yield batch_finding(setting, dp, micro, batch, m)


def batch_finding(setting: Setting, dp: int, micro: int, batch: int, m: int | None) -> Finding:
    """That dp x micro batch x microbatches is not the global batch, with what would be."""
    near = batches_that_work(dp, micro, batch)
    per = batch // micro if batch % micro == 0 else 0
    ranks = [n for n in range(1, per + 1) if per % n == 0]
    ranks = sorted(sorted(ranks, key=lambda n: abs(n - dp))[:3])
    ways = [f"a global batch of {' or '.join(map(str, near))}"]
    if ranks:
        ways.append(f"dp in {ranks}")
    if batch % (dp * micro) == 0:
        ways.insert(0, f"{batch // (dp * micro)} microbatches")
    times = f" x {m} microbatches" if m is not None else ""
    text = f"global batch {batch} is not dp {dp} x micro batch {micro}{times}"
    if batch % (dp * micro):
        text += f": {batch} % {dp * micro} = {batch % (dp * micro)}"
    return Finding(
        "batch_arithmetic",
        "certain",
        text,
        (),
        (setting.source,),
        (f"use {', or '.join(ways)}",),
        numbers={
            "global_batch": batch,
            "micro_batch": micro,
            "dp": dp,
            "microbatches": m,
            "batches_that_work": near,
            "dp_that_work": ranks,
        },
    )


def microbatches_of(setting: Setting) -> int | None:
    """Microbatches of a step on one rank, as said or as the batch makes them."""
    if setting.microbatches is not None:
        return setting.microbatches
    dp, batch = setting.data_ranks, setting.global_batch
    if dp and batch and batch % (dp * (setting.micro_batch or 1)) == 0:
        return batch // (dp * (setting.micro_batch or 1))
    return None


def pipeline_findings(setting: Setting) -> Iterator[Finding]:
    """Whether a pipeline has enough microbatches, and what its bubble is."""
    yield from _stages(setting)
    p, m = setting.pp or 1, microbatches_of(setting)
    if p == 1 or m is None:
        return
    chunks = setting.chunks or 1
    schedule = (setting.schedule or "1F1B").lower()
    fraction = (p - 1) / (chunks * m + p - 1)
    numbers = {
        "stages": p,
        "microbatches": m,
        "chunks": chunks,
        "bubble_fraction": fraction,
        "bubble_overhead": (p - 1) / (chunks * m),
    }
    least = 2 * p if schedule.startswith("dualpipe") else p
    short = schedule == "1f1b" and chunks == 1 and setting.framework in SHORT_WARMUP
    if m < least and schedule not in ANY_MICROBATCHES and not short:
        why = "" if setting.schedule else " (the schedule is not said; 1F1B is taken)"
        yield Finding(
            "too_few_microbatches",
            "certain" if setting.schedule else "likely",
            f"{m} microbatches for {p} stages with {setting.schedule or '1F1B'}{why}: it needs at "
            f"least {least}, and hangs "
            "or is refused with fewer; GPipe takes any number",
            (),
            (setting.source,),
            numbers=numbers,
        )
    elif chunks > 1 and m % p and "interleaved" in schedule:
        yield Finding(
            "too_few_microbatches",
            "certain",
            f"{m} microbatches are no multiple of {p} stages, which interleaved stages need",
            (),
            (setting.source,),
            numbers=numbers,
        )
    elif fraction >= LARGE_BUBBLE and not schedule.startswith(("zb", "dualpipe", "interleavedzero")):
        yield Finding(
            "large_bubble",
            "certain",
            f"{p} stages with {m} microbatches"
            + (f" and {chunks} chunks" if chunks > 1 else "")
            + f": the bubble is {fraction:.1%} of the step",
            (),
            (setting.source,),
            (f"with {4 * (p - 1)} microbatches it would be {(p - 1) / (chunks * 4 * (p - 1) + p - 1):.0%}",),
            numbers=numbers,
        )


def _stages(setting: Setting) -> Iterator[Finding]:
    """An explicit layout of stages: whether it adds up."""
    layers, text = setting.layers, setting.layout_text
    stages = (setting.pp or 1) * (setting.chunks or 1)
    if not text:
        yield from _even(setting, stages)
        return
    try:
        noted = noted_stages(text)
    except LayoutError as fault:
        yield Finding("unequal_schedule", "certain", str(fault), (), (setting.source,))
        return
    total = sum(stage.layers for stage in noted)
    numbers = {"layers": total, "stages": len(noted)}
    wrong = []
    if layers is not None and total != layers:
        wrong.append(f"{total} layers where the model has {layers}")
    if setting.pp and len(noted) % setting.pp:
        wrong.append(f"{len(noted)} stages, no multiple of {setting.pp} ranks")
    elif setting.chunks and len(noted) != stages:
        wrong.append(f"{len(noted)} stages where {stages} are asked for")
    if wrong:
        yield Finding(
            "unequal_schedule",
            "certain",
            f"the layout of stages {text!r} has {' and '.join(wrong)}",
            (),
            (setting.source,),
            numbers=numbers,
        )


def _even(setting: Setting, stages: int) -> Iterator[Finding]:
    """Megatron shares layers out evenly unless it is told otherwise; versions without the check drop the
    rest and train a smaller model. Source: NVIDIA/Megatron-LM#468, #1304."""
    layers = setting.layers
    if setting.framework != "megatron" or layers is None or stages < 2 or layers % stages == 0:
        return
    if setting.other.get("uneven"):
        return
    chunks = f" x {setting.chunks} chunks" if (setting.chunks or 1) > 1 else ""
    yield Finding(
        "unequal_schedule",
        "certain",
        f"{layers} layers do not divide by pp {setting.pp}{chunks} = {stages} stages: refused, or the last "
        f"{layers % stages} are dropped without a word",
        (),
        (setting.source,),
        (UNEVEN,),
        numbers={"layers": layers, "stages": stages},
    )
