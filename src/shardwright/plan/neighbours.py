"""Layouts one change away from a given one, of the same ranks and the same global batch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, OFFLOAD_KINDS, RECOMPUTE_KINDS, Layout
from shardwright.model import ModelSpec
from shardwright.plan.schedule import SCHEDULES
from shardwright.plan.splits import ends_of, stage_layers

CHUNKS_OF_LOSS = 8
"""Parts of the loss to try. Source: as space.py:LOSS_CHUNKS."""

GIVERS: Mapping[str, tuple[str, ...]] = {
    "tp": ("dp_shard", "dp_replicate", "cp", "pp"),
    "pp": ("dp_shard", "dp_replicate", "cp", "tp"),
    "cp": ("dp_shard", "dp_replicate", "tp", "pp"),
    "dp_shard": ("dp_replicate",),
    "dp_replicate": ("dp_shard",),
}
"""Axes that give half of their ranks to one that doubles, the first that can; those of an axis that is halved
go to the first."""

HALVED = ("tp", "pp", "cp")
"""Axes that are halved too; what doubling an axis of the data takes from the other is its halving."""


class Neighbour(NamedTuple):
    """A change in words, and the fields of the layout that it makes, not checked; without fields, why there
    is none."""

    change: str
    fields: Mapping[str, Any] | None
    reason: str = ""


def neighbours(layout: Layout, model: ModelSpec, job: Job) -> Iterator[Neighbour]:
    """Every single change: degrees doubled and halved, the microbatch, recomputation, ZeRO, what rests on the
    host, the loss in parts. What must follow, follows: microbatches, layers of stages, sp."""
    fields = layout.model_dump()

    def made(change: str, **changes: Any) -> Neighbour:
        return Neighbour(change, _followed(fields | changes, layout, model, job))

    for axis, givers in GIVERS.items():
        yield _doubled(axis, givers, fields, made)
        if axis in HALVED and layout.model_dump()[axis] > 1:
            yield _halved(axis, fields, made)
    if model.moe is not None:
        yield made("ep x 2", ep=2 * layout.ep)
        if layout.ep > 1:
            yield _split(fields, "ep", 2) or made("ep / 2", ep=layout.ep // 2)
    yield made("micro_batch x 2", micro_batch=2 * layout.micro_batch)
    if layout.micro_batch > 1:
        yield _split(fields, "micro_batch", 2) or made("micro_batch / 2", micro_batch=layout.micro_batch // 2)
    yield from _memory_changes(layout, made)


def _memory_changes(layout: Layout, made: Callable[..., Neighbour]) -> Iterator[Neighbour]:
    """What is kept, where, and how parameters are split."""
    for kind in RECOMPUTE_KINDS:
        if kind != layout.recompute:
            yield made(f"recompute {kind}", recompute=kind, recompute_every=1)
    if layout.recompute == "full":
        every = 2 if layout.recompute_every == 1 else 1
        yield made("recompute full/2" if every == 2 else "recompute full", recompute_every=every)
    if layout.zero_stage and layout.pp == 1:
        for stage in (layout.zero_stage - 1, layout.zero_stage + 1):
            if 1 <= stage <= 3:
                yield made(f"zero {stage}", zero_stage=stage)
    moved = set(layout.offload.split("+")) - {"none"}
    for what in ("optimizer", "activations"):
        name = _offload_name(moved ^ {what})
        yield made(f"offload {what}" if what not in moved else f"{what} back on the device", offload=name)
    chunks = CHUNKS_OF_LOSS if layout.loss_chunks == 1 else 1
    yield made(f"loss_chunks {chunks}", loss_chunks=chunks)


def _offload_name(moved: set[str]) -> str:
    return next(name for name in OFFLOAD_KINDS if set(name.split("+")) - {"none"} == moved)


def _doubled(
    axis: str, givers: tuple[str, ...], fields: Mapping[str, Any], made: Callable[..., Neighbour]
) -> Neighbour:
    giver = next((name for name in givers if fields[name] % 2 == 0), None)
    if giver is None:
        degrees = ", ".join(f"{name}={fields[name]}" for name in givers)
        reason = f"no axis can give half of its ranks ({degrees}): use more ranks"
        return Neighbour(f"{axis} x 2", None, reason)
    return made(f"{axis} x 2, {giver} / 2", **{axis: 2 * fields[axis], giver: fields[giver] // 2})


def _halved(axis: str, fields: Mapping[str, Any], made: Callable[..., Neighbour]) -> Neighbour:
    taker = GIVERS[axis][0]
    change = f"{axis} / 2, {taker} x 2"
    return _split(fields, axis, 2, change) or made(
        change, **{axis: fields[axis] // 2, taker: 2 * fields[taker]}
    )


def _split(fields: Mapping[str, Any], name: str, by: int, change: str = "") -> Neighbour | None:
    """That a value is odd, if it is."""
    if fields[name] % by == 0:
        return None
    return Neighbour(change or f"{name} / {by}", None, f"{name}={fields[name]} is odd: it cannot be halved")


def _followed(fields: dict[str, Any], before: Layout, model: ModelSpec, job: Job) -> dict[str, Any]:
    """Fields with what must follow from a change."""
    pp, tp, cp = fields["pp"], fields["tp"], fields["cp"]
    shard, data = fields["dp_shard"] * cp, fields["dp_replicate"] * fields["dp_shard"]
    if shard == 1:
        fields["zero_stage"] = 0
    elif pp > 1:
        fields["zero_stage"] = 1
    else:
        fields["zero_stage"] = fields["zero_stage"] if before.zero_stage and before.pp == 1 else 3
    wanted = before.tp == 1 or fields["ep"] > 1  # without sp, ranks of tp would dispatch the same tokens
    fields["sp"] = tp > 1 and (before.sp or (wanted and job.seq % (cp * tp) == 0))
    if model.moe is not None:
        fields["etp"] = tp if before.etp == before.tp > 1 or fields["ep"] % tp else 1
        if fields["ep"] == 1:
            fields["dispatch"] = "all_to_all"
    if cp == 1:
        fields["cp_kind"] = "none"
    elif before.cp == 1:
        fields["cp_kind"] = "ring"
    if pp == 1:
        fields |= {"schedule": "none", "chunks": 1}
    elif before.pp == 1:
        fields |= {"schedule": "1F1B", "chunks": SCHEDULES["1F1B"].chunks}
    fields["microbatches"] = max(job.global_batch // (data * fields["micro_batch"]), 1)
    fields["kept"] = KEPT_BY_SELECTIVE if fields["recompute"] == "selective" else ()
    fields["stage_layers"] = _split_layers(fields, before, model)
    return fields


def _split_layers(fields: Mapping[str, Any], before: Layout, model: ModelSpec) -> tuple[int, ...]:
    """Layers of the stages: as before if there are as many, else with lighter ends if they had these."""
    stages = fields["pp"] * fields["chunks"]
    if stages == before.pp * before.chunks:
        return before.stage_layers
    if not 1 < stages <= model.layers:
        return ()
    ends = ends_of(before, model.layers)
    light = stage_layers(model.layers, stages, ends) if ends == 1 else ()
    return light if light and min(light) > 0 else stage_layers(model.layers, stages)
