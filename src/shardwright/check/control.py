"""Runs that tell degrees apart: where a factor of 2 may be dp or accumulation, one of them is changed."""

from collections.abc import Iterator, Sequence
from typing import Any

from shardwright.check.verdict import Cause
from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.rules import broken_rules
from shardwright.plan.runnable import not_runnable_reasons


def control_layouts(
    layout: Layout, candidates: Sequence[str], model: ModelSpec, job: Job
) -> Iterator[Layout]:
    """Layouts of the same batch in which one of the candidate degrees is another, those that run."""
    for changes in _changes(layout, candidates):
        values: dict[str, Any] = layout.model_dump() | changes
        shard = values["dp_shard"] * values["cp"]
        values["zero_stage"] = 0 if shard == 1 else max(layout.zero_stage, 1)
        cluster = cluster_of("cpu", values["pp"] * values["dp_replicate"] * shard * values["tp"])
        if not list(broken_rules(values, model, job, cluster)):
            control = Layout.checked(values)
            if not not_runnable_reasons(model, job, control):
                yield control


def _changes(layout: Layout, candidates: Sequence[str]) -> Iterator[dict[str, Any]]:
    b, m = layout.micro_batch, layout.microbatches
    names = {part for name in candidates for part in name.split("+")}
    if "microbatches" in names:
        if b % 2 == 0:
            yield {"micro_batch": b // 2, "microbatches": 2 * m}
        elif m % 2 == 0:
            yield {"micro_batch": 2 * b, "microbatches": m // 2}
    if "ep" in names:
        yield {"ep": 1}
    for axis in ("dp_shard", "dp_replicate"):
        if axis in names:
            yield {axis: 1, "microbatches": m * getattr(layout, axis)}
    if "cp" in names:
        yield {"cp": 1, "cp_kind": "none"}
    if "tp" in names:
        yield {"tp": 1, "sp": False, "etp": 1}


def narrowed(cause: Cause, control: Cause, layout: Layout) -> Cause:
    """``cause`` with the candidates that explain the ``control`` run of ``layout`` too; all, if none does.

    A candidate whose degree is 1 there explains that nothing is wrong.
    """
    right = control.key == "unknown"
    degrees = {name: _degree(layout, name) for name in cause.candidates}
    kept = tuple(
        name for name in cause.candidates if (right and degrees[name] == 1) or name in control.candidates
    )
    if len(kept) != 1 or len(kept) == len(cause.candidates):
        return cause if not kept else cause._replace(candidates=kept)
    named = f"_by_{kept[0]}"
    key = cause.key.removesuffix(named) + named
    text = f"{cause.text}; with [{layout.label}] only {kept[0]} explains what is found"
    return Cause(key, "likely", text, kept)


def _degree(layout: Layout, name: str) -> int:
    product = 1
    for part in name.split("+"):
        product *= int(getattr(layout, part, 1))
    return product
