"""One layout explained: its prediction, ledger by stage, traffic by axis and link, and step time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import shardwright
from shardwright.cluster import Cluster
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.activations import Split, block_activations
from shardwright.plan.budget import HOST, budget_rows, traffic_rows
from shardwright.plan.gantt import parts_text, pipeline_text
from shardwright.plan.measured import links_words
from shardwright.plan.memory import Ledger, ledgers, memory_ledger
from shardwright.plan.moments import timeline
from shardwright.plan.other_runtimes import llama_block_saved_bytes
from shardwright.plan.params import parameter_table
from shardwright.plan.pipeline import simulated_step
from shardwright.plan.runnable import not_runnable_reasons
from shardwright.plan.schedule import why_not
from shardwright.plan.sensitivity import fitting, sensitivities
from shardwright.plan.stage_ledger import memory_terms, stage_account, term_sources
from shardwright.plan.step import StepTime, mfu, step_time, tokens_per_second_per_device
from shardwright.plan.table import LayoutTable, table_of
from shardwright.planfile import Plan, Prediction
from shardwright.units import significant

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose block is Llama's, for which an eager SwiGLU is compared."""


def plan_of(model: ModelSpec, job: Job, cluster: Cluster, layout: Layout) -> Plan:
    """The plan of a layout, with its prediction."""
    return Plan(
        written_by=f"shardwright {shardwright.__version__}",
        model=model,
        job=job,
        cluster=cluster,
        layout=layout,
        prediction=predict(model, job, cluster, layout),
    )


def predict(model: ModelSpec, job: Job, cluster: Cluster, layout: Layout) -> Prediction:
    """Memory of the heaviest rank and time of a step, its bubble simulated.

    Raises: LayoutError: the pipeline has no such order.
    """
    if layout.pp > 1:
        reason = why_not(layout.schedule, layout.pp, layout.chunks, layout.microbatches)
        if reason:
            raise LayoutError(f"layout: {reason}")
    table = table_of([layout], model.layers)
    ledger = memory_ledger(model, job, cluster.device, table)
    return _prediction(model, job, cluster, simulated_step(model, job, cluster, [layout]), ledger)


def _prediction(model: ModelSpec, job: Job, cluster: Cluster, step: StepTime, ledger: Ledger) -> Prediction:
    """Of one layout, from its step and the ledger of its heaviest rank."""
    time = step.time
    return Prediction(
        step_time=significant(time[0]),
        tokens_per_s_per_gpu=significant(tokens_per_second_per_device(job, cluster, time)[0]),
        mfu=significant(mfu(model, job, cluster, time)[0]),
        peak_moment=ledger.moments[int(ledger.moment[0])],
        memory=memory_terms(ledger, 0),
    )


def explanation(plan: Plan) -> dict[str, Any]:
    """All there is to say about a plan, as one JSON document: its accounts, a picture of the step, what one
    change would do, and how far it is from fitting."""
    document = accounts(plan)
    step = document["step"]
    heaviest = max(document["stages"], key=lambda stage: float(stage["total"]))
    changes = sensitivities(plan)
    return document | {
        "timeline_text": _timeline_text(plan, step),
        "sensitivities": changes,
        "fitting": fitting(plan, heaviest, changes),
    }


def accounts(plan: Plan) -> dict[str, Any]:
    """Memory by stage, traffic by axis and link, and the time of a step."""
    table = table_of([plan.layout], plan.model.layers)
    ranks = ledgers(plan.model, plan.job, plan.cluster.device, table)
    ledger = max(ranks, key=lambda each: float(each.device[0]))
    step = simulated_step(plan.model, plan.job, plan.cluster, [plan.layout])
    exposed = {axis: float(np.ravel(values)[0]) for axis, values in step.exposed.items()}
    flows = traffic_rows(plan, table, exposed)
    time = float(step.time[0])
    reasons = not_runnable_reasons(plan.model, plan.job, plan.layout)
    return {
        "layout": plan.layout.model_dump(mode="json"),
        "runnable": not reasons,
        "not_runnable_reasons": reasons,
        "assumed": [*plan.model.assumed, *plan.cluster.assumed, *links_words(plan.cluster)],
        "stored_prediction_agrees": plan.prediction
        == _prediction(plan.model, plan.job, plan.cluster, step, ledger),
        "stages": [stage_account(plan, table, each) for each in ranks],
        "heaviest_stage": int(ledger.stage.rank[0]),
        "sources": term_sources(plan.cluster.device),
        "peak_moment": ledger.moments[int(ledger.moment[0])],
        "timeline": _timeline(plan, table, ledger),
        "activations": _activations(plan, ledger),
        "units": _units(plan.model),
        "traffic": flows,
        "budget": budget_rows(plan, table, flows, exposed, time),
        "step": _step(plan, table, step, flows, exposed),
        "device": {"name": plan.cluster.device.name, "memory": plan.cluster.device.memory},
    }


def _step(
    plan: Plan,
    table: LayoutTable,
    step: StepTime,
    flows: Sequence[Mapping[str, Any]],
    exposed: Mapping[str, float],
) -> dict[str, Any]:
    """The step's time and its parts, which add up; ``bubble`` is simulated, ``bubble_closed_form`` what the
    search ranks by."""
    time, bubble = float(step.time[0]), float(np.ravel(step.bubble)[0])
    by_axis: dict[str, float] = {}
    for flow in flows:
        by_axis[flow["axis"]] = by_axis.get(flow["axis"], 0.0) + flow["exposed_time"]
    by_axis |= {HOST: exposed[HOST]}
    forward, backward = (
        float(np.ravel(step.microbatches * step.busiest.sum(name))[0]) for name in ("forward", "backward")
    )
    closed = step_time(plan.model, plan.job, plan.cluster, table).bubble
    return {
        "time": time,
        "compute": float(np.ravel(step.compute)[0]),
        "forward": forward,
        "backward": backward,
        "copies": float(np.ravel(step.copies)[0]),
        "bubble": bubble,
        "bubble_closed_form": float(np.ravel(closed)[0]),
        "bubble_fraction": bubble / time,
        "exposed": sum(exposed.values()),
        "exposed_by_axis": {axis: waited for axis, waited in by_axis.items() if waited > 0},
        "optimizer": float(np.ravel(step.optimizer)[0]),
        "mfu": float(mfu(plan.model, plan.job, plan.cluster, step.time)[0]),
        "tokens_per_s_per_gpu": float(tokens_per_second_per_device(plan.job, plan.cluster, step.time)[0]),
    }


def _timeline_text(plan: Plan, step: Mapping[str, Any]) -> str:
    """A picture of the step: of a pipeline's ranks, else of its parts."""
    if plan.layout.pp > 1:
        return pipeline_text(plan)
    names = ("forward", "backward", "copies", "exposed", "optimizer")
    return parts_text({name: float(step[name]) for name in names})


def _timeline(plan: Plan, table: LayoutTable, ledger: Ledger) -> list[dict[str, Any]]:
    """The highest moment of each part of a step, in order."""
    state = float(ledger.parameters[0] + ledger.optimizer[0])
    highest: dict[str, dict[str, Any]] = {}
    for name, valid, held in timeline(plan.model, plan.job, table, ledger.stage):
        if not valid[0]:
            continue
        part = name.split(",")[0]
        allocated = state + float(held.total[0])
        if part not in highest or allocated > highest[part]["allocated"]:
            terms = {kind: float(values[0]) for kind, values in held._asdict().items()}
            highest[part] = {"moment": name, "allocated": allocated, **terms}
    return list(highest.values())


def _activations(plan: Plan, ledger: Ledger) -> dict[str, Any]:
    """What one block keeps for the backward pass, by tensor, for one microbatch, on the heaviest rank; of
    a model with experts, a block that has some."""
    layout = plan.layout
    tokens = layout.micro_batch * plan.job.seq / layout.cp
    split = Split(layout.tp, layout.sp, layout.cp, layout.cp_kind, layout.ep, layout.etp)
    kind = plan.model.block_kinds[-1]
    block = block_activations(plan.model, plan.job, layout.recompute, split, kind)
    none = block_activations(plan.model, plan.job, "none", split, kind)
    return {
        "recompute": layout.recompute,
        "recompute_every": layout.recompute_every,
        "kind": kind,
        "kept_operations": list(layout.kept),
        "saved_by_block": {name: round(float(size) * tokens) for name, size in block.saved.items()},
        "saved_by_block_without_recompute": round(none.saved_bytes * tokens),
        "saved_by_block_eager_swiglu": round(llama_block_saved_bytes(plan.model, plan.job.seq) * tokens)
        if plan.job.precision == "bf16" and plan.model.model_type in LLAMA_LIKE
        else None,
        "blocks": int(ledger.stage.blocks[0]),
        "microbatches_in_flight": float(ledger.stage.in_flight[0]),
    }


def _units(model: ModelSpec) -> list[dict[str, Any]]:
    """FSDP units: what is gathered at once."""
    table = parameter_table(model)
    return [
        {
            "kind": unit.kind,
            "copies": unit.copies,
            "parameters": unit.numel,
            "share": unit.numel / table.parameters,
        }
        for unit in table.units
    ]
