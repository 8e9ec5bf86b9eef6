"""Which rank holds what, as a run starts: a table for the log, all of it in ranks.json."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from shardwright.layout import Layout
from shardwright.run.linear import local
from shardwright.run.pp import stage_parts
from shardwright.run.step import Stepper
from shardwright.units import format_bytes

RANKS = "ranks.json"

MOST_LINES = 32
"""Lines of the table; what more there is stands in the file."""


class Predicted(NamedTuple):
    """What the plan says a rank holds, B: between steps, and in all at its peak."""

    parameters: int
    optimizer: int
    peak: int


def gather_holdings(stepper: Stepper, predicted: Sequence[Predicted]) -> list[dict[str, Any]] | None:
    """What every rank holds, by rank; on rank 0, None elsewhere. ``predicted``: by rank of pp, or empty."""
    own = _holding(stepper, predicted)
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, found, dst=0)
    return found


def write_holdings(holdings: Sequence[Mapping[str, Any]], layout: Layout, folder: Path) -> None:
    """Keep them in the run folder."""
    document = {"mesh": mesh_of(layout), "experts": _expert_axes(layout), "ranks": list(holdings)}
    (folder / RANKS).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def mesh_of(layout: Layout) -> dict[str, int]:
    """Degree of each axis, the outermost first."""
    return {axis: getattr(layout, axis) for axis in layout.order}


def _expert_axes(layout: Layout) -> dict[str, int]:
    return {"ep": layout.ep, "etp": layout.etp}


def _product(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)


def holdings_table(holdings: Sequence[Mapping[str, Any]], layout: Layout) -> str:
    """The mesh, then a line for all ranks that hold the same."""
    order = _product(mesh_of(layout)) or "one rank"
    experts = _product(_expert_axes(layout))
    alike: dict[str, list[int]] = {}
    for holding in holdings:
        alike.setdefault(_line(holding), []).append(holding["rank"])
    lines = [f"{spans(ranks)}: {text}" for text, ranks in alike.items()]
    more = len(lines) - MOST_LINES
    return "\n".join(
        [
            f"mesh, outermost first: {order}" + (f"; of experts: {experts}" if experts else ""),
            *lines[:MOST_LINES],
            *([f"{more} more lines: see {RANKS}"] if more > 0 else []),
        ]
    )


def spans(ranks: Sequence[int]) -> str:
    """``ranks 0-3, 8``."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][-1] == rank - 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join('-'.join(map(str, span)) for span in found)}"


def _holding(stepper: Stepper, predicted: Sequence[Predicted]) -> dict[str, Any]:
    layout, mesh = stepper.layout, stepper.mesh
    model, pp_rank = stepper.model, mesh["pp"].get_local_rank()
    parameters = [local(parameter) for parameter in model.parameters()]
    units = Counter(kind for stage in model.stages for kind, _ in stage.units())
    return {
        "rank": dist.get_rank(),
        "coordinates": {axis: mesh[axis].get_local_rank() for axis in layout.order},
        "stages": [
            {"stage": number, "layers": list(part.layers), "embedding": part.first, "head": part.last}
            for number, part in stage_parts(layout, model.spec, pp_rank)
        ],
        "units": dict(units),
        "unit_shards": mesh.shard.size(),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": sum(_storage_sizes(parameters)),
        "predicted": predicted[pp_rank]._asdict() if predicted else None,
    }


def _storage_sizes(tensors: Iterable[Any]) -> Iterable[int]:
    """Of each storage once, the padding of shards included."""
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return (storage.nbytes() for storage in storages.values())


def _line(holding: Mapping[str, Any]) -> str:
    """All that a rank holds, without what tells it from others that hold as much."""
    parts = [_stage_text(stage) for stage in holding["stages"]]
    units = ", ".join(f"{count} {kind}" for kind, count in holding["units"].items())
    share = f" in {holding['unit_shards']} shards" if holding["unit_shards"] > 1 else ""
    state = f"{holding['parameters']:,} parameters in {format_bytes(holding['parameter_bytes'])}"
    if holding["predicted"] is not None:
        sizes = {name: format_bytes(size) for name, size in holding["predicted"].items()}
        state += (
            f"; predicted: parameters {sizes['parameters']}, optimizer {sizes['optimizer']}, "
            f"peak {sizes['peak']}"
        )
    return "; ".join([*parts, f"units {units}{share}", state])


def _stage_text(stage: Mapping[str, Any]) -> str:
    layers = stage["layers"]
    held = ["embedding"] if stage["embedding"] else []
    if layers:
        held.append(f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
    held += ["head"] if stage["head"] else []
    return f"stage {stage['stage']}: {', '.join(held)}"
