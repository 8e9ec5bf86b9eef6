"""Layout: how a job is split over ranks, and the rules it must keep.

``faults`` lists what is wrong with one layout; ``plan/search.py`` masks rows of a table by the same codes.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, PositiveInt, model_validator

from shardwright.cluster import Cluster
from shardwright.description import Description
from shardwright.errors import LayoutError, ShardwrightError
from shardwright.job import Job
from shardwright.model import ModelSpec

Recompute = Literal["none", "selective", "full"]
RECOMPUTE_KINDS: tuple[Recompute, ...] = ("none", "selective", "full")

KEPT_BY_SELECTIVE = ("q_proj", "k_proj", "v_proj", "attention", "o_proj", "gate_proj", "up_proj")
"""Operations of a block whose outputs selective recomputation keeps; norms, rotary embedding, the SwiGLU
product and residual additions are computed again."""


class Layout(Description):
    """Degrees of every axis, the ZeRO stage, the microbatch and what is recomputed.

    ``zero_stage`` is a resharding schedule of one mechanism: 0 nothing is split; 1 parameters rest split and
    are gathered once a step, gradients are reduced once a step; 2 the same with gradients reduced every
    microbatch; 3 parameters are gathered for each block, forward and backward.
    """

    error: ClassVar[type[ShardwrightError]] = LayoutError
    noun: ClassVar[str] = "layout"

    dp_replicate: PositiveInt = 1
    dp_shard: PositiveInt = 1
    zero_stage: int = Field(default=0, ge=0, le=3)
    micro_batch: PositiveInt = Field(default=1, description="sequences of a microbatch on one rank")
    microbatches: PositiveInt = Field(default=1, description="microbatches of a step on one rank")
    recompute: Recompute = "none"
    kept: tuple[str, ...] = Field(default=(), description="operations kept by selective recomputation")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        faults = []
        if (self.zero_stage == 0) != (self.dp_shard == 1):
            faults.append(
                f"zero_stage={self.zero_stage} does not go with dp_shard={self.dp_shard}: "
                "stage 0 means dp_shard=1, stages 1 to 3 split over dp_shard of 2 and more"
            )
        expected = KEPT_BY_SELECTIVE if self.recompute == "selective" else ()
        if self.kept != expected:
            faults.append(
                f"kept={list(self.kept)} does not go with recompute={self.recompute!r}: use {list(expected)}"
            )
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def dp(self) -> int:
        """Ranks that hold different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        """Ranks of the mesh."""
        return self.dp

    @property
    def label(self) -> str:
        """Short name for tables: ``dp_shard=8 zero=3 b=2 m=4 full``."""
        axes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}
        parts = [f"{axis}={degree}" for axis, degree in axes.items() if degree > 1]
        parts += [f"zero={self.zero_stage}", f"b={self.micro_batch}", f"m={self.microbatches}"]
        if self.recompute != "none":
            parts.append(f"recompute={self.recompute}")
        return " ".join(parts)


class Fault(NamedTuple):
    """A broken rule: a code to group by, and the sentence for people."""

    code: str
    message: str


def batches_that_work(dp: int, micro_batch: int, wanted: int) -> list[int]:
    """Global batches nearest to ``wanted`` that ``dp`` ranks reach in microbatches of ``micro_batch``."""
    unit = dp * micro_batch
    below = wanted // unit * unit
    return [batch for batch in (below, below + unit) if batch > 0]


def faults(layout: Layout, job: Job, cluster: Cluster) -> list[Fault]:
    """Every rule that ``layout`` breaks against ``job`` and ``cluster``."""
    found = []
    if layout.ranks != cluster.ranks:
        found.append(
            Fault(
                "ranks",
                f"layout has {layout.ranks} ranks (dp_replicate={layout.dp_replicate} x "
                f"dp_shard={layout.dp_shard}), the cluster {cluster.ranks}: "
                f"make their product {cluster.ranks}",
            )
        )
    if layout.dp > job.global_batch:
        found.append(
            Fault(
                "fewer_samples_than_ranks",
                f"dp={layout.dp} ranks each need a sequence but global_batch={job.global_batch}: "
                f"use at most {job.global_batch} ranks or a global batch of at least {layout.dp}",
            )
        )
    elif layout.dp * layout.micro_batch * layout.microbatches != job.global_batch:
        found.append(
            Fault(
                "global_batch",
                f"dp={layout.dp} x micro_batch={layout.micro_batch} x microbatches={layout.microbatches} "
                f"is not global_batch={job.global_batch}: {_way_to_the_batch(layout, job.global_batch)}",
            )
        )
    return found


def _way_to_the_batch(layout: Layout, wanted: int) -> str:
    unit = layout.dp * layout.micro_batch
    if wanted % unit == 0:
        return f"use microbatches={wanted // unit}"
    near = batches_that_work(layout.dp, layout.micro_batch, wanted)
    options = " or ".join(f"global_batch={batch} (microbatches={batch // unit})" for batch in near)
    return f"use {options}, or another micro_batch"


def check_layout(layout: Layout, job: Job, cluster: Cluster) -> None:
    """Raises: LayoutError: naming every rule that ``layout`` breaks."""
    found = faults(layout, job, cluster)
    if found:
        raise LayoutError("layout: " + "; ".join(fault.message for fault in found))


def not_runnable_reasons(model: ModelSpec, job: Job) -> list[str]:
    """Why the runtime refuses what the planner can still price; empty if it runs."""
    reasons = []
    if model.sliding_window is not None and job.seq > model.sliding_window:
        reasons.append(
            f"sliding_window={model.sliding_window} is shorter than seq={job.seq}: "
            "windowed attention is only modelled"
        )
    if job.optimizer in ("adamw_8bit", "adafactor", "muon"):
        reasons.append(f"optimizer={job.optimizer!r} is only modelled: train with adamw, sgd or sgd_momentum")
    if job.accounting != "fsdp2":
        reasons.append(f"accounting={job.accounting!r} is of another runtime: train with 'fsdp2'")
    return reasons


def check_runnable(model: ModelSpec, job: Job) -> None:
    """Raises: LayoutError: the runtime cannot execute this plan, with every reason."""
    reasons: Sequence[str] = not_runnable_reasons(model, job)
    if reasons:
        raise LayoutError("plan is not runnable: " + "; ".join(reasons))
