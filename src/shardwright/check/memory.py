"""The memory of one step over time: dry runs of ranks of a plan, played back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.check.compare import chosen_stages, global_rank, stage_of
from shardwright.check.dryrun import dry_run
from shardwright.check.history import History
from shardwright.errors import LayoutError
from shardwright.plan.runnable import check_trainable
from shardwright.planfile import Plan
from shardwright.run.recorder import Recorder

MOMENTS = 480
"""Of a timeline at most: of more events in a row the highest stands for the others."""


OUTPUTS = {".html": "picture", ".svg": "picture", ".pickle": "snapshot"}
"""What a file is, by the ending of its name."""


class RankHistory(NamedTuple):
    """A rank of a stage, and what was played back."""

    stage: int
    rank: int
    microbatches: int  # executed
    history: History


def output_kind(path: Path) -> str:
    """Whether a file is to be a picture or a snapshot.

    Raises: LayoutError: its name ends otherwise.
    """
    if path.suffix not in OUTPUTS:
        raise LayoutError(
            f"output {path} ends in {path.suffix!r}: use .html or .svg for a picture, .pickle for "
            "pytorch.org/memory_viz"
        )
    return OUTPUTS[path.suffix]


def step_histories(
    plan: Plan, stages: Sequence[int] | None = None, rank: int | None = None
) -> list[RankHistory]:
    """Dry-run a step of one rank of each distinct stage, or of the ``stages`` or the ``rank`` asked for.

    Experts are under balanced routing.

    Raises: LayoutError: the runtime does not execute the plan, or it has no such stage or rank.
    """
    check_trainable(plan.model, plan.job, plan.cluster, plan.layout)
    job = plan.job.model_copy(update={"expert_imbalance": 1.0})
    if rank is not None and not 0 <= rank < plan.layout.ranks:
        raise LayoutError(
            f"rank {rank}: the plan has {plan.layout.ranks} ranks, choose from 0 to {plan.layout.ranks - 1}"
        )
    found = []
    if rank is not None:
        wanted = [rank]
    else:
        wanted = [global_rank(plan.layout, stage) for stage in chosen_stages(plan, stages)]
    for each in wanted:
        recorder = Recorder()
        execution = dry_run(plan.model, job, plan.layout, each, recorder=recorder)
        stage = stage_of(plan.layout, each)
        found.append(RankHistory(stage, each, execution.microbatches, History(recorder.recording)))
    return found


def memory_document(plan: Plan, found: Sequence[RankHistory]) -> dict[str, Any]:
    """As one JSON document: per rank the peak, what it is made of, and the timeline [B]."""
    return {
        "model": plan.model.name,
        "layout": plan.layout.label,
        "microbatches": plan.layout.microbatches,
        "stages": [_stage(each) for each in found],
    }


def _stage(found: RankHistory) -> dict[str, Any]:
    history = found.history
    top = history.sample(history.peak_event)
    return {
        "stage": found.stage,
        "rank": found.rank,
        "microbatches_executed": found.microbatches,
        "events": len(history.events),
        "peak": history.peak,
        "peak_event": history.peak_event,
        "peak_moment": history.moment(history.peak_event),
        "peak_held": top.held,
        "tensors": [group.document() for group in history.tensors(history.peak_event)],
        "timeline": [sample._asdict() for sample in history.samples(MOMENTS)],
    }
