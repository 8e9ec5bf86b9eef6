"""Ledger beside execution, term by term: is what the plan predicts what the program holds and sends?"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.axes import joined_axis
from shardwright.check.dryrun import Execution, dry_run
from shardwright.errors import LayoutError
from shardwright.plan.explain import plan_of
from shardwright.plan.memory import Ledger, memory_ledger
from shardwright.plan.moments import timeline
from shardwright.plan.runnable import check_trainable
from shardwright.plan.table import LayoutTable, table_of
from shardwright.plan.traffic import merged, traffic
from shardwright.planfile import Plan

MEMORY_TOLERANCE = 0.02
"""Largest difference of a term at the peak, as a share of it. The resting state and traffic have none."""

EXPERT_TOLERANCE = 0.04
"""The same of models with experts."""


@dataclass(frozen=True)
class Term:
    """A kind of memory: at rest (the state at the end of backward) or at the peak [B]."""

    stage: int
    term: str
    moment: str  # "rest" or "peak"
    predicted: int
    executed: int
    difference: int
    ok: bool


@dataclass(frozen=True)
class Flow:
    """A collective on an axis in one step."""

    axis: str
    collective: str
    predicted_payload_bytes: int
    executed_payload_bytes: int
    predicted_launches: int
    executed_launches: int
    ok: bool


@dataclass(frozen=True)
class Comparison:
    """The verdict with all its rows."""

    ok: bool
    terms: tuple[Term, ...]
    traffic: tuple[Flow, ...]
    peak_moment: str
    tolerance: Mapping[str, float]
    microbatches: int
    microbatches_executed: int  # the others repeat the second
    time: float  # of the dry run [s]
    host_memory: int | None  # peak of this process [B]

    def document(self) -> dict[str, Any]:
        """As one JSON document."""
        return asdict(self)


def check_plan(plan: Plan, memory_tolerance: float | None = None) -> Comparison:
    """Dry-run one rank of ``plan`` and compare, experts under balanced routing.

    Raises: LayoutError: the runtime does not execute the plan, or it is a pipeline, which is not compared.
    """
    check_trainable(plan.model, plan.job, plan.cluster, plan.layout)
    if plan.layout.pp > 1:
        raise LayoutError(f"layout has pp={plan.layout.pp}: pipelines are not compared yet, train runs them")
    job = plan.job.model_copy(update={"expert_imbalance": 1.0})
    balanced = plan_of(plan.model, job, plan.cluster, plan.layout)
    tolerance = MEMORY_TOLERANCE if plan.model.moe is None else EXPERT_TOLERANCE
    found = dry_run(plan.model, job, plan.layout)
    return compare(balanced, found, tolerance if memory_tolerance is None else memory_tolerance)


def compare(plan: Plan, execution: Execution, memory_tolerance: float = MEMORY_TOLERANCE) -> Comparison:
    """Compare the ledger of ``plan`` with an executed step."""
    table = table_of([plan.layout], plan.model.layers)
    ledger = memory_ledger(plan.model, plan.job, plan.cluster.device, table)
    moment, peak = _peak_terms(plan, ledger, table, execution, memory_tolerance)
    rest = {
        "parameters": float(ledger.parameters[0]),
        "gradients": float(ledger.gradients[0]),
        "optimizer": float(ledger.optimizer[0]),
    }
    allowed = memory_tolerance * execution.peak
    terms = [_term(name, "rest", rest[name], execution.at_rest[name], 0.0) for name in rest]
    terms += [_term(name, "peak", peak[name], execution.at_peak[name], allowed) for name in peak]
    terms.append(_term("total", "peak", float(ledger.allocated[0]), execution.peak, allowed))
    flows = _flows(plan, table, execution)
    return Comparison(
        ok=all(term.ok for term in terms) and all(flow.ok for flow in flows),
        terms=tuple(terms),
        traffic=tuple(flows),
        peak_moment=moment,
        tolerance={"memory": memory_tolerance, "traffic": 0.0},
        microbatches=plan.layout.microbatches,
        microbatches_executed=execution.microbatches,
        time=execution.time,
        host_memory=peak_host_memory(),
    )


def peak_host_memory() -> int | None:
    """Largest resident size this process has had [B]; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _term(name: str, moment: str, predicted: float, executed: float, allowed: float) -> Term:
    difference = round(predicted) - round(executed)
    return Term(0, name, moment, round(predicted), round(executed), difference, abs(difference) <= allowed)


def _peak_terms(
    plan: Plan, ledger: Ledger, table: LayoutTable, execution: Execution, tolerance: float
) -> tuple[str, dict[str, float]]:
    """Predicted terms at the moment that the execution peaked at.

    Moments may tie within the tolerance; of those, the one most like the execution is compared. The total is
    judged apart, against the highest.
    """
    state = {"parameters": float(ledger.parameters[0]), "optimizer": float(ledger.optimizer[0])}
    highest = float(ledger.allocated[0])
    candidates = []
    for name, valid, held in timeline(plan.model, plan.job, table, ledger.stage):
        terms = state | {kind: float(values[0]) for kind, values in held._asdict().items()}
        if valid[0] and sum(terms.values()) >= (1 - tolerance) * highest:
            distance = sum(abs(terms[kind] - execution.at_peak[kind]) for kind in terms)
            candidates.append((distance, name, terms))
    _, name, terms = min(candidates, key=lambda candidate: candidate[0])
    return name, terms


def _group_of(plan: Plan, axis: str) -> str:
    """Name of the ranks that an axis joins: those of its axes that have more than one; of the experts' axes
    that of the ranks they are cut out of, where they are all of them."""
    layout = plan.layout
    cut = ("dp_shard", "cp", *(("tp",) if layout.etp == 1 else ()))
    wide = joined_axis(tuple(name for name in cut if getattr(layout, name) > 1))
    if axis == "ep" and layout.expert_shard == 1 and wide in ("dp_shard", "cp", "tp", "dp_shard+cp"):
        return wide
    if axis == "expert_shard" and layout.ep == 1:
        return wide
    if "+" not in axis:
        return axis
    return joined_axis(tuple(name for name in axis.split("+") if getattr(layout, name) > 1))


def _flows(plan: Plan, table: LayoutTable, execution: Execution) -> list[Flow]:
    predicted: dict[tuple[str, str], tuple[int, int]] = {}
    for flow in merged(traffic(plan.model, plan.job, table)):
        if flow.launches[0]:
            key = (_group_of(plan, flow.axis), flow.collective)
            launches, payload = predicted.get(key, (0, 0))
            predicted[key] = launches + int(flow.launches[0]), payload + int(flow.payload_bytes[0])
    executed: dict[tuple[str, str], tuple[int, int]] = {}
    for kind, sent in execution.traffic.items():
        key = (_group_of(plan, kind.axis), kind.name)
        launches, payload = executed.get(key, (0, 0))
        executed[key] = launches + sent.launches, payload + sent.payload_bytes
    rows = []
    for axis, collective in sorted(predicted.keys() | executed.keys()):
        launches, payload = predicted.get((axis, collective), (0, 0))
        real_launches, real_payload = executed.get((axis, collective), (0, 0))
        ok = (launches, payload) == (real_launches, real_payload)
        rows.append(Flow(axis, collective, payload, real_payload, launches, real_launches, ok))
    return rows
