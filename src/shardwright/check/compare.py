"""Ledger beside execution, term by term: is what the plan predicts what the program holds and sends?"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import numpy as np

from shardwright.axes import joined_axis
from shardwright.check.dryrun import Execution, dry_run
from shardwright.check.history import History
from shardwright.check.real import check_small, real_run
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.plan.explain import plan_of
from shardwright.plan.memory import Ledger, stage_ledger
from shardwright.plan.moments import timeline
from shardwright.plan.runnable import check_trainable
from shardwright.plan.stages import Stage, every_stage
from shardwright.plan.table import LayoutTable, table_of
from shardwright.plan.traffic import merged, traffic
from shardwright.planfile import Plan
from shardwright.run.recorder import Recorder

MEMORY_TOLERANCE = 0.02
"""Largest difference of a term at the peak, as a share of it. The resting state and traffic have none."""

EXPERT_TOLERANCE = 0.04
"""The same of models with experts."""


REAL_TOLERANCE = 0.01
"""Largest difference of a term between a real step and a dry run, as a share of the peak."""


@dataclass(frozen=True)
class Term:
    """A kind of memory of a pipeline rank: at rest (the state at the end of backward) or at the peak [B]."""

    stage: int
    term: str
    moment: str  # "rest" or "peak"
    predicted: int
    executed: int
    difference: int
    ok: bool
    real: int | None = None  # in a real step, where there was one


@dataclass(frozen=True)
class Flow:
    """A collective on an axis in one step of a pipeline rank."""

    stage: int
    axis: str
    collective: str
    predicted_payload_bytes: int
    executed_payload_bytes: int
    predicted_launches: int
    executed_launches: int
    ok: bool
    real_payload_bytes: int | None = None
    real_launches: int | None = None


@dataclass(frozen=True)
class StageTensors:
    """Storages alike at the executed peak of a pipeline rank: made by the same line, in modules of one name
    but for their numbers."""

    stage: int
    kind: str
    module: str
    source: str  # file of this package, or of torch, and line
    count: int
    bytes: int


@dataclass(frozen=True)
class StageRun:
    """What was executed of one pipeline rank. ``stands_for``: ranks that hold the same, it included.

    Layers and microbatches that were not executed repeat others, and are in the numbers.
    """

    stage: int
    rank: int  # of all ranks
    stands_for: tuple[int, ...]
    peak_moment: str
    microbatches_executed: int
    layers: int  # of its stages
    layers_executed: int
    time: float  # of the dry run [s]


@dataclass(frozen=True)
class Comparison:
    """The verdict with all its rows; ``peak_moment``: of the pipeline rank that holds most.

    ``tensors``: what terms that differ, or all if asked for, are made of at the executed peak.
    """

    ok: bool
    stages: tuple[StageRun, ...]
    terms: tuple[Term, ...]
    traffic: tuple[Flow, ...]
    peak_moment: str
    tolerance: Mapping[str, float]
    microbatches: int
    microbatches_executed: int  # the others repeat these
    time: float  # of all dry runs [s]
    host_memory: int | None  # peak of this process [B]
    tensors: tuple[StageTensors, ...] = ()

    def document(self) -> dict[str, Any]:
        """As one JSON document."""
        return asdict(self)


def check_plan(
    plan: Plan,
    memory_tolerance: float | None = None,
    stages: Sequence[int] | None = None,
    *,
    tensors: bool = False,
    real: bool = False,
    whole: bool = False,
) -> Comparison:
    """Dry-run one rank of each distinct stage of ``plan`` and compare, experts under balanced routing.

    Args: ``stages``: pipeline ranks to execute instead. ``tensors``: say what every term is made of, not only
    those that differ. ``real``: run a step for real too, on CPU ranks. ``whole``: execute every layer and
    microbatch, as the other two do.

    Raises: LayoutError: the runtime does not execute the plan, it has no such stage, or it is too large for a
    real step. RunFailedError: the real step failed.
    """
    check_trainable(plan.model, plan.job, plan.cluster, plan.layout)
    job = plan.job.model_copy(update={"expert_imbalance": 1.0})
    balanced = plan_of(plan.model, job, plan.cluster, plan.layout)
    tolerance = MEMORY_TOLERANCE if plan.model.moe is None else EXPERT_TOLERANCE
    allowed = tolerance if memory_tolerance is None else memory_tolerance
    alike, found = _alike(balanced), []
    chosen = chosen_stages(balanced, stages)
    for stage in chosen:
        rank = global_rank(plan.layout, stage)
        recorder = Recorder() if tensors else None
        execution = dry_run(plan.model, job, plan.layout, rank, whole=whole, as_gloo=real, recorder=recorder)
        stands_for = next(ranks for ranks in alike if stage in ranks)
        each = compare(balanced, execution, allowed, stage, stands_for)
        differing = {term.term for term in each.terms if not term.ok}
        if differing and recorder is None and execution.is_whole(plan.layout):
            recorder = Recorder()
            dry_run(plan.model, job, plan.layout, rank, as_gloo=real, recorder=recorder)
        if recorder is not None:
            each = replace(each, tensors=_tensors(stage, recorder, None if tensors else differing))
        found.append(each)
    if real:
        check_small(plan.layout, max(term.executed for each in found for term in each.terms))
        steps = real_run(plan.model, job, plan.layout)
        found = [with_real(plan, each, steps[each.stages[0].rank].execution) for each in found]
    return joined(found)


def chosen_stages(plan: Plan, stages: Sequence[int] | None = None) -> list[int]:
    """The pipeline ranks asked for, else the fullest of each that hold the same.

    Raises: LayoutError: there is no such stage.
    """
    if stages is None:
        return [_fullest(plan, ranks) for ranks in _alike(plan)]
    if unknown := [stage for stage in stages if not 0 <= stage < plan.layout.pp]:
        raise LayoutError(
            f"stage {unknown[0]}: the plan has pp={plan.layout.pp}, choose from 0 to {plan.layout.pp - 1}"
        )
    return list(stages)


def _tensors(stage: int, recorder: Recorder, terms: set[str] | None) -> tuple[StageTensors, ...]:
    """What terms are made of at the recorded peak; all of them if the total is among them."""
    history = History(recorder.recording)
    groups = history.tensors(history.peak_event)
    every = terms is None or "total" in terms
    return tuple(
        StageTensors(stage, **group.document()) for group in groups if every or group.kind in (terms or ())
    )


def with_real(plan: Plan, found: Comparison, step: Execution) -> Comparison:
    """One stage's comparison with the third column, which has to agree with the second."""
    terms = []
    for term in found.terms:
        held = step.at_rest if term.moment == "rest" else step.at_peak | {"total": step.peak}
        allowed = 0.0 if term.moment == "rest" else REAL_TOLERANCE * step.peak
        ok = term.ok and abs(held[term.term] - term.executed) <= allowed
        terms.append(replace(term, real=held[term.term], ok=ok))
    sent = _by_group(plan, step)
    flows = []
    for flow in found.traffic:
        launches, payload = sent.pop((flow.axis, flow.collective), (0, 0))
        ok = flow.ok and (launches, payload) == (flow.executed_launches, flow.executed_payload_bytes)
        flows.append(replace(flow, real_launches=launches, real_payload_bytes=payload, ok=ok))
    stage = found.stages[0].stage
    flows += [
        Flow(stage, *key, 0, 0, 0, 0, ok=False, real_payload_bytes=payload, real_launches=launches)
        for key, (launches, payload) in sorted(sent.items())
    ]
    ok = all(term.ok for term in terms) and all(flow.ok for flow in flows)
    return replace(found, terms=tuple(terms), traffic=tuple(flows), ok=ok)


def joined(found: Sequence[Comparison]) -> Comparison:
    """Comparisons of several stages as one."""
    heaviest = max(found, key=lambda each: max(term.predicted for term in each.terms))
    return replace(
        heaviest,
        ok=all(each.ok for each in found),
        stages=tuple(stage for each in found for stage in each.stages),
        terms=tuple(term for each in found for term in each.terms),
        traffic=tuple(flow for each in found for flow in each.traffic),
        tensors=tuple(group for each in found for group in each.tensors),
        time=sum(each.time for each in found),
        host_memory=peak_host_memory(),
    )


def global_rank(layout: Layout, stage: int) -> int:
    """The first rank of a pipeline rank."""
    return stage * _ranks_inside(layout)


def stage_of(layout: Layout, rank: int) -> int:
    """The pipeline rank of a rank."""
    return rank // _ranks_inside(layout) % layout.pp


def _ranks_inside(layout: Layout) -> int:
    inside = layout.order[layout.order.index("pp") + 1 :]
    return prod(int(getattr(layout, axis)) for axis in inside)


def compare(
    plan: Plan,
    execution: Execution,
    memory_tolerance: float = MEMORY_TOLERANCE,
    stage: int = 0,
    stands_for: tuple[int, ...] = (0,),
) -> Comparison:
    """Compare the ledger of one pipeline rank of ``plan`` with its executed step."""
    table = table_of([plan.layout], plan.model.layers)
    held = every_stage(table, plan.model)[stage]
    ledger = stage_ledger(plan.model, plan.job, plan.cluster.device, table, held)
    moment, peak = _peak_terms(plan, ledger, table, execution, memory_tolerance)
    rest = {
        "parameters": float(ledger.parameters[0]),
        "gradients": float(ledger.gradients[0]),
        "optimizer": float(ledger.optimizer[0]),
    }
    allowed = memory_tolerance * execution.peak
    terms = [_term(stage, name, "rest", rest[name], execution.at_rest[name], 0.0) for name in rest]
    terms += [_term(stage, name, "peak", peak[name], execution.at_peak[name], allowed) for name in peak]
    terms.append(_term(stage, "total", "peak", float(ledger.allocated[0]), execution.peak, allowed))
    flows = _flows(plan, table, held, execution)
    rank = global_rank(plan.layout, stage)
    return Comparison(
        ok=all(term.ok for term in terms) and all(flow.ok for flow in flows),
        stages=(_run_of(stage, rank, stands_for, moment, execution),),
        terms=tuple(terms),
        traffic=tuple(flows),
        peak_moment=moment,
        tolerance={"memory": memory_tolerance, "traffic": 0.0},
        microbatches=plan.layout.microbatches,
        microbatches_executed=execution.microbatches,
        time=execution.time,
        host_memory=peak_host_memory(),
    )


def _run_of(
    stage: int, rank: int, stands_for: tuple[int, ...], moment: str, execution: Execution
) -> StageRun:
    return StageRun(
        stage,
        rank,
        stands_for,
        moment,
        microbatches_executed=execution.microbatches,
        layers=execution.rank_layers,
        layers_executed=execution.layers,
        time=execution.time,
    )


def _alike(plan: Plan) -> list[tuple[int, ...]]:
    """Pipeline ranks by what they hold of the model."""
    found: dict[tuple[float, ...], list[int]] = {}
    for rank, stage in enumerate(every_stage(table_of([plan.layout], plan.model.layers), plan.model)):
        held = (stage.blocks, stage.expert_blocks, stage.embedding, stage.head)
        found.setdefault(tuple(float(np.ravel(part)[0]) for part in held), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _fullest(plan: Plan, ranks: Sequence[int]) -> int:
    """Of pipeline ranks that hold the same, the one with the highest peak by the ledger."""
    if len(ranks) == 1:
        return ranks[0]
    table = table_of([plan.layout], plan.model.layers)
    every = every_stage(table, plan.model)

    def allocated(rank: int) -> float:
        ledger = stage_ledger(plan.model, plan.job, plan.cluster.device, table, every[rank])
        return float(ledger.allocated[0])

    return max(ranks, key=allocated)


def peak_host_memory() -> int | None:
    """Largest resident size this process has had [B]; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _term(stage: int, name: str, moment: str, predicted: float, executed: float, allowed: float) -> Term:
    difference = round(predicted) - round(executed)
    return Term(
        stage, name, moment, round(predicted), round(executed), difference, abs(difference) <= allowed
    )


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
    for name, valid, held in timeline(plan.model, plan.job, table, ledger.stage, every_flight=True):
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


def _by_group(plan: Plan, execution: Execution) -> dict[tuple[str, str], tuple[int, int]]:
    """Launches and payload [B] by axis and collective."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for kind, sent in execution.traffic.items():
        key = (_group_of(plan, kind.axis), kind.name)
        launches, payload = found.get(key, (0, 0))
        found[key] = launches + sent.launches, payload + sent.payload_bytes
    return found


def _flows(plan: Plan, table: LayoutTable, stage: Stage, execution: Execution) -> list[Flow]:
    predicted: dict[tuple[str, str], tuple[int, int]] = {}
    for flow in merged(traffic(plan.model, plan.job, table, stage)):
        if flow.launches[0]:
            key = (_group_of(plan, flow.axis), flow.collective)
            launches, payload = predicted.get(key, (0, 0))
            predicted[key] = launches + int(flow.launches[0]), payload + int(flow.payload_bytes[0])
    executed = _by_group(plan, execution)
    rows = []
    for axis, collective in sorted(predicted.keys() | executed.keys()):
        launches, payload = predicted.get((axis, collective), (0, 0))
        real_launches, real_payload = executed.get((axis, collective), (0, 0))
        ok = (launches, payload) == (real_launches, real_payload)
        number = int(np.ravel(stage.rank)[0])
        rows.append(Flow(number, axis, collective, payload, real_payload, launches, real_launches, ok))
    return rows
