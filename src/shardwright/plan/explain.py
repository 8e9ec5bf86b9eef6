"""One layout explained: its prediction, ledger by stage, traffic by axis and link, and step time."""

from collections.abc import Mapping
from typing import Any

import shardwright
from shardwright.cluster import Cluster
from shardwright.errors import LayoutError, ModelError
from shardwright.job import Job
from shardwright.layout import Layout, not_runnable_reasons
from shardwright.model import BUILT_TYPES, ModelSpec
from shardwright.plan.activations import Split, block_activations, llama_block_saved_bytes
from shardwright.plan.memory import Ledger, ledgers, memory_ledger
from shardwright.plan.moments import timeline
from shardwright.plan.params import parameter_table
from shardwright.plan.pipeline import simulated_bubble
from shardwright.plan.schedule import why_not
from shardwright.plan.step import flow_time, mfu, placements, step_time, tokens_per_second_per_device
from shardwright.plan.table import LayoutTable, table_of
from shardwright.plan.traffic import merged, traffic
from shardwright.planfile import MemoryTerms, Plan, Prediction
from shardwright.units import significant


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


def check_modelled(model: ModelSpec) -> None:
    """Raises: ModelError: memory and time of the model's family are not modelled."""
    if model.model_type not in BUILT_TYPES:
        raise ModelError(
            f"model {model.name}: parameters are known, memory and time of model_type={model.model_type!r} "
            f"are not modelled yet: `shardwright params` counts it, plan one of {', '.join(BUILT_TYPES)}"
        )


def predict(model: ModelSpec, job: Job, cluster: Cluster, layout: Layout) -> Prediction:
    """Memory of the heaviest rank and time of a step.

    Raises: ModelError: the model's family is not modelled. LayoutError: the pipeline has no such order.
    """
    check_modelled(model)
    if layout.pp > 1:
        reason = why_not(layout.schedule, layout.pp, layout.chunks, layout.microbatches)
        if reason:
            raise LayoutError(f"layout: {reason}")
    table = table_of([layout], model.layers)
    ledger = memory_ledger(model, job, cluster.device, table)
    time = step_time(model, job, cluster, table).time
    return Prediction(
        step_time=significant(time[0]),
        tokens_per_s_per_gpu=significant(tokens_per_second_per_device(job, cluster, time)[0]),
        mfu=significant(mfu(model, job, cluster, time)[0]),
        peak_moment=ledger.moments[int(ledger.moment[0])],
        memory=memory_terms(ledger, 0),
    )


def memory_terms(ledger: Ledger, row: int) -> MemoryTerms:
    """One row of a ledger, at its peak."""
    return MemoryTerms(
        parameters=round(float(ledger.parameters[row])),
        gradients=round(float(ledger.at_peak.gradients[row])),
        optimizer=round(float(ledger.optimizer[row])),
        activations=round(float(ledger.at_peak.activations[row])),
        logits=round(float(ledger.at_peak.logits[row])),
        gathered=round(float(ledger.at_peak.gathered[row])),
        communicators=round(float(ledger.communicators[row])),
        context=round(ledger.context),
        margin=round(float(ledger.margin[row])),
    )


def explanation(plan: Plan) -> dict[str, Any]:
    """All there is to say about a plan, as one JSON document."""
    table = table_of([plan.layout], plan.model.layers)
    ranks = ledgers(plan.model, plan.job, plan.cluster.device, table)
    ledger = max(ranks, key=lambda each: float(each.device[0]))
    step = step_time(plan.model, plan.job, plan.cluster, table)
    reasons = not_runnable_reasons(plan.model, plan.job, plan.layout)
    exposed = {axis: float(values[0]) for axis, values in step.exposed.items()}
    return {
        "layout": plan.layout.model_dump(mode="json"),
        "runnable": not reasons,
        "not_runnable_reasons": reasons,
        "assumed": list(plan.cluster.assumed),
        "stored_prediction_agrees": predict(plan.model, plan.job, plan.cluster, plan.layout)
        == plan.prediction,
        "stages": [_stage(plan.layout, each) for each in ranks],
        "peak_moment": ledger.moments[int(ledger.moment[0])],
        "timeline": _timeline(plan, table, ledger),
        "activations": _activations(plan, ledger),
        "units": _units(plan.model),
        "traffic": _traffic(plan, table, exposed),
        "step": {
            "time": float(step.time[0]),
            "compute": float(step.compute[0]),
            "bubble": float(step.bubble[0]),
            "bubble_simulated": simulated_bubble(plan.model, plan.job, plan.cluster, plan.layout),
            "bubble_fraction": float(step.bubble[0] / step.time[0]),
            "exposed": sum(exposed.values()),
            "exposed_by_axis": {axis: time for axis, time in exposed.items() if time > 0},
            "optimizer": float(step.optimizer[0]),
            "mfu": float(mfu(plan.model, plan.job, plan.cluster, step.time)[0]),
            "tokens_per_s_per_gpu": float(tokens_per_second_per_device(plan.job, plan.cluster, step.time)[0]),
        },
        "device": {"name": plan.cluster.device.name, "memory": plan.cluster.device.memory},
    }


def _stage(layout: Layout, ledger: Ledger) -> dict[str, Any]:
    """One pipeline rank: the first, the second and the last stand for all."""
    terms = memory_terms(ledger, 0)
    return {
        "stage": {"second": 1, "last": layout.pp - 1}.get(ledger.stage.name, 0),
        "layers": int(ledger.stage.blocks[0]),
        "microbatches_in_flight": float(ledger.stage.in_flight[0]),
        **terms.model_dump(mode="json"),
        "total": terms.total,
        "allocated": terms.allocated,
        "reserved": terms.reserved,
        "at_rest": {
            "parameters": round(float(ledger.parameters[0])),
            "gradients": round(float(ledger.gradients[0])),
            "optimizer": round(float(ledger.optimizer[0])),
        },
    }


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
    """What one block keeps for the backward pass, by tensor, for one microbatch, on the heaviest rank."""
    layout = plan.layout
    tokens = layout.micro_batch * plan.job.seq / layout.cp
    split = Split(layout.tp, layout.sp, layout.cp, layout.cp_kind)
    block = block_activations(plan.model, plan.job.precision, layout.recompute, split)
    none = block_activations(plan.model, plan.job.precision, "none", split)
    return {
        "recompute": layout.recompute,
        "kept_operations": list(layout.kept),
        "saved_by_block": {name: round(size * tokens) for name, size in block.saved.items()},
        "saved_by_block_without_recompute": round(none.saved_bytes * tokens),
        "saved_by_block_eager_swiglu": round(llama_block_saved_bytes(plan.model, plan.job.seq) * tokens)
        if plan.job.precision == "bf16"
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


def _traffic(plan: Plan, table: LayoutTable, exposed: Mapping[str, float]) -> list[dict[str, Any]]:
    """Flows of a step; an axis's exposed time is shared out by how long each of its flows is busy.

    What waiting for another stage costs is in the bubble.
    """
    flows = [flow for flow in merged(traffic(plan.model, plan.job, table)) if flow.launches[0]]
    places = placements(table)
    routes = {axis: place.route(plan.cluster) for axis, place in places.items()}
    busy = [float(flow_time(flow, routes[flow.axis])[0]) for flow in flows]
    shares = [
        0.0 if (f.axis, f.collective) == ("pp", "send") else t for f, t in zip(flows, busy, strict=True)
    ]
    rows = []
    for flow, time, share in zip(flows, busy, shares, strict=True):
        of_axis = sum(other for f, other in zip(flows, shares, strict=True) if f.axis == flow.axis)
        rows.append(
            {
                "axis": flow.axis,
                "collective": flow.collective,
                "degree": int(flow.degree[0]),
                "payload_bytes": int(flow.payload_bytes[0]),
                "bytes": float(flow.sent_bytes[0]),
                "launches": int(flow.launches[0]),
                "link": places[flow.axis].link(plan.cluster)[0],
                "busy_time": time,
                "exposed_time": exposed.get(flow.axis, 0.0) * share / of_axis,
            }
        )
    return rows
