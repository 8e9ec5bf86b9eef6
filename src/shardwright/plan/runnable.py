"""What the runtime refuses of what the planner can price: one table of rules for a layout and for a search.

A layout that breaks a rule of layout.py or rules.py cannot be right for its model and job anywhere; what
stands here is right, and only modelled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Cluster
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import DISPATCH_KINDS, HOST_OPTIMIZERS, SCHEDULE_NAMES, Dispatch, Layout
from shardwright.model import ModelSpec, unbuilt_reasons
from shardwright.plan.rules import broken_rules
from shardwright.plan.schedule import SCHEDULES
from shardwright.plan.table import LayoutTable, table_of

Mask = NDArray[np.bool_]

MODELLED_SCHEDULES = tuple(name for name, row in SCHEDULES.items() if not row.runnable)
"""Schedules of papers that torch.distributed.pipelining has not."""

MODELLED_DISPATCH: tuple[Dispatch, ...] = ("by_node",)

RUNNABLE_COLUMNS: Mapping[str, Sequence[int]] = {
    "schedule": [n for n, name in enumerate(SCHEDULE_NAMES) if name not in MODELLED_SCHEDULES],
    "dispatch": [n for n, name in enumerate(DISPATCH_KINDS) if name not in MODELLED_DISPATCH],
}
"""Values that the runtime executes of the columns of a table that decide it by themselves."""

OPTIMIZER, ACTIVATIONS = 1, 2  # bits of the column offload

TWO_PASSES = [SCHEDULE_NAMES.index(name) for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")]
"""Schedules that run whose backward is in two passes."""


class Refusal(NamedTuple):
    """One rule: the rows of a table that break it, and the sentence for one layout that does."""

    rows: Callable[[LayoutTable, Job], Mask]
    message: Callable[[Layout, Job], str]


REFUSALS: Mapping[str, Refusal] = {
    "schedule": Refusal(
        lambda table, _: _outside("schedule", table.schedule),
        lambda layout, _: (
            f"schedule={layout.schedule!r} is only modelled: train with one of "
            + ", ".join(name for name in SCHEDULE_NAMES[1:] if name not in MODELLED_SCHEDULES)
        ),
    ),
    "dispatch": Refusal(
        lambda table, _: _outside("dispatch", table.dispatch),
        lambda layout, _: f"dispatch={layout.dispatch!r} is only modelled: train with 'all_to_all'",
    ),
    "offloaded_optimizer": Refusal(
        lambda table, job: (table.offload & OPTIMIZER > 0) & (job.optimizer not in HOST_OPTIMIZERS),
        lambda layout, job: (
            f"optimizer={job.optimizer!r} has no element-wise update to run on the host: "
            f"use an offload without 'optimizer', or one of {', '.join(HOST_OPTIMIZERS)}"
        ),
    ),
    "offload_or_recompute": Refusal(
        lambda table, _: (table.offload & ACTIVATIONS > 0) & (table.recompute > 0),
        lambda layout, _: (
            f"offload={layout.offload!r} with recompute={layout.recompute!r} is only modelled: "
            "use 'none' for one of them"
        ),
    ),
    "offload_in_two_passes": Refusal(
        lambda table, _: (table.offload & ACTIVATIONS > 0) & np.isin(table.schedule, TWO_PASSES),
        lambda layout, _: (
            f"offload={layout.offload!r} with schedule={layout.schedule!r} is only modelled: what a pass for "
            "gradients of inputs has brought up would stay until the pass for those of weights; "
            "offload the optimizer alone, or use 1F1B or Interleaved1F1B"
        ),
    ),
}
"""What the runtime has not, by what it hangs on in a layout."""


def _outside(column: str, values: NDArray[np.int64]) -> Mask:
    return ~np.isin(values, RUNNABLE_COLUMNS[column])


def runnable_rows(table: LayoutTable, job: Job) -> Mask:
    """Rows that the runtime executes, as far as the layout decides it; of a grid, columns that broadcast."""
    return np.broadcast_to(~_refused(table, job), table.shape)


def some_run(table: LayoutTable, job: Job) -> bool:
    """Whether the runtime executes any row."""
    return not _refused(table, job).all()


def _refused(table: LayoutTable, job: Job) -> Mask:
    refused = np.zeros((1,) * table.pp.ndim, dtype=np.bool_)
    for refusal in REFUSALS.values():
        rows = refusal.rows(table, job)
        if rows.any():
            refused = refused | rows
    return refused


def job_refusals(model: ModelSpec, job: Job) -> Iterator[str]:
    """Why the runtime executes no layout at all for this model and job."""
    yield from unbuilt_reasons(model)
    if model.positions == "learned" and model.max_positions < job.seq:
        yield (
            f"seq={job.seq} is beyond the {model.max_positions} learned positions of model {model.name}: "
            "train shorter sequences"
        )
    if job.accounting != "fsdp2":
        yield f"accounting={job.accounting!r} is of another runtime: train with 'fsdp2'"
    if job.lora_rank:
        yield f"lora_rank={job.lora_rank} is only modelled: train all parameters"
    if job.expert_capacity:
        yield f"expert_capacity={job.expert_capacity:g} is only modelled: train without, which drops no token"


def not_runnable_reasons(model: ModelSpec, job: Job, layout: Layout) -> list[str]:
    """Why the runtime refuses what the planner can still price; empty if it runs."""
    row = table_of([layout], model.layers)
    broken = [refusal for refusal in REFUSALS.values() if refusal.rows(row, job).all()]
    return [*job_refusals(model, job), *(refusal.message(layout, job) for refusal in broken)]


def check_runnable(model: ModelSpec, job: Job, layout: Layout) -> None:
    """Raises: LayoutError: the runtime cannot execute this plan, with every reason."""
    reasons = not_runnable_reasons(model, job, layout)
    if reasons:
        raise LayoutError("plan is not runnable: " + "; ".join(reasons))


def check_trainable(model: ModelSpec, job: Job, cluster: Cluster, layout: Layout) -> None:
    """Everything that rules a training run out, before any process exists.

    Raises: LayoutError: the layout breaks a rule, or the runtime cannot execute it; with every reason.
    """
    broken = [fault.message for fault in broken_rules(layout.model_dump(), model, job, cluster)]
    if broken:
        raise LayoutError("layout: " + "; ".join(broken))
    check_runnable(model, job, layout)
