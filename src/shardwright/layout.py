"""Layout: how a job is split over ranks, and the rules it must keep.

``faults`` lists what is wrong with one layout; ``plan/search.py`` masks rows of a table by the same codes.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from shardwright.axes import EXPERT_AXES, MESH_ORDER, MESH_ORDERS
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


ScheduleName = Literal[
    "none", "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV", "ZB-H1", "ZB-H2", "DualPipe",
]  # fmt: skip
"""Pipeline schedules by torch's class names and the papers'; none without a pipeline."""

SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)

ContextKind = Literal["none", "ring", "all_gather", "ulysses"]
CONTEXT_KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
"""How attention sees the keys of other context ranks: passed round, gathered, or traded for heads."""


Dispatch = Literal["all_to_all", "by_node"]
DISPATCH_KINDS: tuple[Dispatch, ...] = get_args(Dispatch)
"""How tokens reach their experts: each copy by itself, or one copy to a node that holds several of a token's
experts, passed on inside it (DeepEP, deepseek-ai/DeepEP README)."""

Offload = Literal["none", "optimizer", "activations", "optimizer+activations"]
OFFLOAD_KINDS: tuple[Offload, ...] = get_args(Offload)
"""What rests in host memory and is copied over PCIe when it is needed."""

HOST_OPTIMIZERS = ("adamw", "sgd", "sgd_momentum")
"""Optimizers whose update the runtime can make on the host: element by element, without other ranks."""


EMPTY_ENDS = "Interleaved1F1B"
"""The schedule whose first and last stage may be without layers: the ledger holds for it."""


class Layout(Description):
    """Degrees of every axis, the ZeRO stage, the pipeline's schedule, the microbatch and what is recomputed.

    ``zero_stage`` is a resharding schedule of one mechanism: 0 nothing is split; 1 parameters rest split and
    are gathered once a step, gradients are reduced once a step; 2 the same with gradients reduced every
    microbatch; 3 parameters are gathered for each block, forward and backward. They are split over dp_shard
    and cp together. In a pipeline a stage's parameters and gradients are whole through the step: stages 0 and
    1 only. ``ep`` and ``etp`` split routed experts over ranks of dp_shard x cp x tp; ``order`` names the axes
    of the mesh, outermost first.
    """

    error: ClassVar[type[ShardwrightError]] = LayoutError
    noun: ClassVar[str] = "layout"

    pp: PositiveInt = 1
    dp_replicate: PositiveInt = 1
    dp_shard: PositiveInt = 1
    cp: PositiveInt = 1
    tp: PositiveInt = 1
    ep: PositiveInt = Field(default=1, description="ranks that share out the routed experts")
    etp: PositiveInt = Field(default=1, description="ranks that split the matrices of an expert: 1 or tp")
    dispatch: Dispatch = "all_to_all"
    order: tuple[str, ...] = Field(default=MESH_ORDER, description="of the mesh, outermost first")
    sp: bool = Field(default=False, description="norms and residuals split by sequence over tp")
    cp_kind: ContextKind = "none"
    schedule: ScheduleName = "none"
    chunks: PositiveInt = Field(default=1, description="stages of each pipeline rank")
    stage_layers: tuple[NonNegativeInt, ...] = Field(
        default=(), description="layers of each stage, in order; the ends may have only embedding or head"
    )
    zero_stage: int = Field(default=0, ge=0, le=3)
    micro_batch: PositiveInt = Field(default=1, description="sequences of a microbatch on one rank")
    microbatches: PositiveInt = Field(default=1, description="microbatches of a step on one rank")
    recompute: Recompute = "none"
    recompute_every: PositiveInt = Field(default=1, description="full recomputation of every k-th layer")
    kept: tuple[str, ...] = Field(default=(), description="operations kept by selective recomputation")
    loss_chunks: PositiveInt = Field(default=1, description="parts of a microbatch's tokens for the loss")
    offload: Offload = "none"

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        faults = [*self._zero_faults(), *self._axis_faults(), *self._expert_faults()]
        expected = KEPT_BY_SELECTIVE if self.recompute == "selective" else ()
        if self.kept != expected:
            faults.append(
                f"kept={list(self.kept)} does not go with recompute={self.recompute!r}: use {list(expected)}"
            )
        if self.recompute_every > 1 and self.recompute != "full":
            faults.append(
                f"recompute_every={self.recompute_every} does not go with recompute={self.recompute!r}: "
                "use 1, or recompute='full'"
            )
        if self.order not in MESH_ORDERS:
            known = " or ".join(str(list(order)) for order in MESH_ORDERS)
            faults.append(f"order={list(self.order)} is not modelled: use {known}")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _zero_faults(self) -> Iterator[str]:
        if (self.zero_stage == 0) != (self.shard == 1):
            split = f"dp_shard={self.dp_shard}" + (f" x cp={self.cp}" if self.cp > 1 else "")
            yield (
                f"zero_stage={self.zero_stage} does not go with {split}: stage 0 means dp_shard=1 and cp=1, "
                "stages 1 to 3 split over two ranks and more"
            )
        if self.pp > 1 and self.zero_stage > 1:
            yield (
                f"zero_stage={self.zero_stage} does not go with pp={self.pp}: a pipeline holds a stage's "
                "parameters and gradients whole through the step, use zero_stage 0 or 1"
            )

    def _axis_faults(self) -> Iterator[str]:
        if (self.pp == 1) != (self.schedule == "none"):
            known = ", ".join(SCHEDULE_NAMES[1:])
            way = f"one of {known}" if self.pp > 1 else "'none'"
            yield f"schedule={self.schedule!r} does not go with pp={self.pp}: use {way}"
        stages = self.pp * self.chunks
        if len(self.stage_layers) != (stages if stages > 1 else 0):
            yield (
                f"stage_layers={list(self.stage_layers)} does not go with pp={self.pp} x "
                f"chunks={self.chunks}: give the layers of {stages if stages > 1 else 'no'} stages"
            )
        if not all(self.stage_layers[1:-1]):
            yield (
                f"stage_layers={list(self.stage_layers)} leave a stage between the ends without a layer: "
                "only the first and the last may have none, which hold embedding and head"
            )
        if self.pp == 1 and self.chunks > 1:
            yield f"chunks={self.chunks} does not go with pp=1: a single rank is not interleaved, use 1"
        if (self.cp == 1) != (self.cp_kind == "none"):
            way = "'ring', 'all_gather' or 'ulysses'" if self.cp > 1 else "'none'"
            yield f"cp_kind={self.cp_kind!r} does not go with cp={self.cp}: use {way}"
        if self.sp and self.tp == 1:
            yield "sp=true does not go with tp=1: sequence parallelism splits over tp"

    def _expert_faults(self) -> Iterator[str]:
        if self.etp not in (1, self.tp):
            yield f"etp={self.etp} does not go with tp={self.tp}: use 1 or {self.tp}"
        if self.dispatch != "all_to_all" and self.ep == 1:
            yield f"dispatch={self.dispatch!r} does not go with ep=1: use 'all_to_all'"
        if self.ep > 1 and self.tp > 1 and not self.sp:
            yield (
                f"ep={self.ep} with tp={self.tp} needs sp: without it every rank of tp dispatches the "
                "same tokens"
            )
        if self.shard * self.tp % (self.ep * self.etp):
            yield (
                f"ep={self.ep} x etp={self.etp} does not divide dp_shard={self.dp_shard} x cp={self.cp} x "
                f"tp={self.tp}, the ranks it is cut out of"
            )

    @property
    def expert_shard(self) -> int:
        """Ranks over which the parameters of one expert are split."""
        return self.shard * self.tp // (self.ep * self.etp)

    @property
    def shard(self) -> int:
        """Ranks over which parameters, gradients and optimizer state are split."""
        return self.dp_shard * self.cp

    @property
    def dp(self) -> int:
        """Ranks that hold different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        """Ranks of the mesh."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def label(self) -> str:
        """Short name for tables: ``pp=4 dp_shard=8 tp=8 sp 1F1B zero=1 b=1 m=16``."""
        parts = [f"{axis}={getattr(self, axis)}" for axis in MESH_ORDER if getattr(self, axis) > 1]
        parts += [f"{axis}={getattr(self, axis)}" for axis in EXPERT_AXES if getattr(self, axis) > 1]
        if self.dispatch != "all_to_all":
            parts.append(f"dispatch={self.dispatch}")
        if self.order != MESH_ORDER:
            parts.append("order=" + "/".join(self.order))
        if self.sp:
            parts.append("sp")
        if self.cp > 1:
            parts.append(self.cp_kind)
        if self.pp > 1:
            parts.append(self.schedule + (f" v={self.chunks}" if self.chunks > 1 else ""))
        parts += [f"zero={self.zero_stage}", f"b={self.micro_batch}", f"m={self.microbatches}"]
        if self.recompute != "none":
            every = f"/{self.recompute_every}" if self.recompute_every > 1 else ""
            parts.append(f"recompute={self.recompute}{every}")
        if self.loss_chunks > 1:
            parts.append(f"loss_chunks={self.loss_chunks}")
        if self.offload != "none":
            parts.append(f"offload={self.offload}")
        return " ".join(parts)


class Fault(NamedTuple):
    """A broken rule: a code to group by, and the sentence for people."""

    code: str
    message: str


def empty_stage_fault(stage_layers: Sequence[int], schedule: str, chunks: int) -> str | None:
    """Why ends without layers cannot be run; None: there are none, or the first stage has the embedding
    alone, the last the head alone, and their ranks have other stages with layers.

    Source: Llama 3, arXiv:2407.21783, section 3.3.2, whose pipeline ends so.
    """
    if min(stage_layers, default=1) > 0 or (schedule == EMPTY_ENDS and chunks > 1):
        return None
    return (
        f"stage_layers={list(stage_layers)} leaves a rank without layers at chunks={chunks} of "
        f"schedule={schedule!r}: give the ends layers, or use {EMPTY_ENDS} with chunks of 2 and more"
    )


def batches_that_work(dp: int, micro_batch: int, wanted: int) -> list[int]:
    """Global batches nearest to ``wanted`` that ``dp`` ranks reach in microbatches of ``micro_batch``."""
    unit = dp * micro_batch
    below = wanted // unit * unit
    return [batch for batch in (below, below + unit) if batch > 0]


def faults(layout: Layout, job: Job, cluster: Cluster) -> list[Fault]:
    """Every rule that ``layout`` breaks against ``job`` and ``cluster``."""
    found = []
    if layout.ranks != cluster.ranks:
        product = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in MESH_ORDER)
        found.append(
            Fault(
                "ranks",
                f"layout has {layout.ranks} ranks ({product}), the cluster {cluster.ranks}: "
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


def model_faults(layout: Layout, model: ModelSpec, job: Job) -> list[Fault]:
    """Every rule that ``layout`` breaks against the shape of ``model`` and the sequence of ``job``."""
    rules = {**model_rules(layout, model, job), **expert_rules(layout, model)}
    return [Fault(code, message) for code, (kept, message) in rules.items() if not kept]


def model_rules(layout: Layout, model: ModelSpec, job: Job) -> dict[str, tuple[bool, str]]:
    """What a layout asks of heads, widths, layers and the sequence: whether it is kept, and the sentence."""
    return {
        "tp_heads": (
            model.heads % layout.tp == 0,
            f"tp={layout.tp} does not divide heads={model.heads} (model {model.name})",
        ),
        "tp_kv_heads": (
            model.kv_heads % layout.tp == 0 or layout.tp % model.kv_heads == 0,
            f"tp={layout.tp} neither divides kv_heads={model.kv_heads} nor is a multiple of it "
            f"(model {model.name})",
        ),
        "tp_ffn": (
            model.ffn % layout.tp == 0,
            f"tp={layout.tp} does not divide ffn={model.ffn} (model {model.name})",
        ),
        "cp_sequence": (
            layout.cp == 1 or job.seq % (2 * layout.cp) == 0,
            f"cp={layout.cp} does not divide seq={job.seq} into two equal parts a rank, which balance "
            "causal work",
        ),
        "sp_sequence": (
            not layout.sp or job.seq % (layout.cp * layout.tp) == 0,
            f"tp={layout.tp} with sp does not divide seq={job.seq} / cp={layout.cp}",
        ),
        "ulysses_heads": (
            layout.cp_kind != "ulysses" or layout.cp in ulysses_degrees(model, layout.tp),
            f"cp={layout.cp} does not trade heads={model.heads} and kv_heads={model.kv_heads} at "
            f"tp={layout.tp}: use cp in {ulysses_degrees(model, layout.tp)}",
        ),
        "stage_layers": (
            layout.pp == 1 or sum(layout.stage_layers) == model.layers,
            f"stage_layers add up to {sum(layout.stage_layers)}, the model has layers={model.layers}",
        ),
    }


def expert_rules(layout: Layout, model: ModelSpec) -> dict[str, tuple[bool, str]]:
    """What ep and etp ask of the model's experts: whether it is kept, and the sentence."""
    return {
        "experts": (
            layout.ep == 1 or (model.moe is not None and model.moe.experts % layout.ep == 0),
            f"ep={layout.ep} does not divide experts={model.moe.experts if model.moe else 0} (model "
            f"{model.name})",
        ),
        "experts_over_tp": (
            model.moe is None or layout.etp == layout.tp or layout.ep % layout.tp == 0,
            f"tp={layout.tp} splits no expert at etp={layout.etp} and shares none out at ep={layout.ep}: use "
            f"etp={layout.tp}, or an ep that is a multiple of {layout.tp}",
        ),
        "tp_shared_experts": (
            model.moe is None or model.moe.shared_ffn % layout.tp == 0,
            f"tp={layout.tp} does not divide shared_ffn={model.moe.shared_ffn if model.moe else 0} (model "
            f"{model.name})",
        ),
        "etp_ffn": (
            model.moe is None or model.moe.ffn % layout.etp == 0,
            f"etp={layout.etp} does not divide the experts' ffn={model.moe.ffn if model.moe else 0} (model "
            f"{model.name})",
        ),
    }


def ulysses_degrees(model: ModelSpec, tp: int = 1) -> list[int]:
    """Context degrees that Ulysses can take: they share out a rank's key/value heads evenly, or all its query
    heads one by one, the key/value heads repeated."""
    heads, kv_heads = model.heads // tp, max(model.kv_heads // tp, 1)
    return [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n == heads)]


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
