"""The parity matrix: layouts whose training must equal one process in plain PyTorch, every gradient of it.

``ROWS`` is the table; tests/run/test_parity.py runs it, and ``make parity`` prints it.
"""

from typing import Any, NamedTuple

import numpy as np
from gloo import (
    MODELS,
    Found,
    RaggedBatches,
    gradient_difference,
    job_of,
    parallel_steps,
    plain_steps,
    relative,
)

from shardwright.axes import MESH_ORDERS
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.run.launch import run_ranks

LOSS, NORM, GRADIENT, PARAMETER = 1e-9, 1e-8, 1e-9, 1e-8
"""Largest differences in fp64, relative to the largest entry."""

AUX = 1.0
"""Weight of the balancing loss of experts, large enough for its gradient to show."""

RANK_TIMEOUT_S = 120


class Row(NamedTuple):
    """One layout of the table, and what is trained with it."""

    layout: Layout
    model: str
    optimizer: str
    empty: tuple[int, ...]  # sequences of the global batch without an unmasked token
    packed: bool  # several documents in a sequence
    compiled: bool

    @property
    def label(self) -> str:
        """Name of the test."""
        parts = [self.layout.label.replace(" ", "-"), self.model, self.optimizer]
        parts += ["empty" + "".join(map(str, self.empty))] * bool(self.empty)
        parts += ["packed"] * self.packed + ["compiled"] * self.compiled
        return "-".join(parts)


class Differences(NamedTuple):
    """Worst of three steps (gradients: of the first), relative to the largest entry."""

    loss: float
    norm: float
    gradient: float
    name: str  # of the parameter with the worst gradient
    parameter: float

    @property
    def ok(self) -> bool:
        """Whether all are within their tolerance."""
        inside = self.loss < LOSS and self.norm < NORM and self.gradient < GRADIENT
        return inside and self.parameter < PARAMETER


def row(
    model: str = "base",
    optimizer: str = "adamw",
    empty: tuple[int, ...] = (),
    packed: bool = False,
    compiled: bool = False,
    **fields: Any,
) -> Row:
    """A row with what follows from its fields filled in: the ZeRO stage, and the layers of each stage."""
    shard = fields.get("dp_shard", 1) * fields.get("cp", 1)
    pp, chunks = fields.get("pp", 1), fields.get("chunks", 1)
    values: dict[str, Any] = {"micro_batch": 2, "microbatches": 2}
    values["zero_stage"] = 0 if shard == 1 else 1 if pp > 1 else 3
    if pp > 1:
        layers, stages = MODELS[model].layers, pp * chunks
        values["stage_layers"] = tuple(len(part) for part in np.array_split(np.arange(layers), stages))
        values["microbatches"] = 2 * pp
    if fields.get("recompute") == "selective":
        values["kept"] = KEPT_BY_SELECTIVE
    return Row(Layout(**values | fields), model, optimizer, empty, packed, compiled)


def plan_of(row: Row, precision: str = "fp64"):
    """Model, job and batches of a row."""
    spec, layout = MODELS[row.model], row.layout
    balance = {"router_aux_weight": AUX, "router_bias_rate": 1e-3} if spec.moe is not None else {}
    job = job_of(layout.dp * layout.micro_batch * layout.microbatches, precision, row.optimizer, **balance)
    return spec, job, RaggedBatches(spec.vocab, job.seq, row.empty, row.packed)


def found_by_ranks(row: Row, precision: str = "fp64") -> Found:
    """What the ranks of a row find together; all must find the same losses and norms."""
    spec, job, batches = plan_of(row, precision)
    every = run_ranks(
        parallel_steps, row.layout.ranks, spec, job, row.layout, batches, 1.0,
        "aot_eager" if row.compiled else None, timeout_s=RANK_TIMEOUT_S,
    )  # fmt: skip
    for other in every:
        assert other.losses == every[0].losses, "ranks differ in their losses"
        assert other.norms == every[0].norms, "ranks differ in their norms"
    return joined(every)


def joined(every: list[Found]) -> Found:
    """The stages of a pipeline as one model. A parameter that several ranks have must be the same on all."""
    gradients: dict[str, np.ndarray] = {}
    parameters: dict[str, np.ndarray] = {}
    for found in every:
        for mine, theirs in ((gradients, found.gradients), (parameters, found.parameters)):
            for name, value in theirs.items():
                assert (mine.setdefault(name, value) == value).all(), f"ranks differ in {name}"
    return every[0]._replace(gradients=gradients, parameters=parameters)


def differences(found: Found, expected: Found) -> Differences:
    """How far the ranks of a row are from one process."""
    gradient, name = gradient_difference(found, expected)
    return Differences(
        relative(found.losses, expected.losses),
        relative(found.norms, expected.norms),
        gradient,
        name,
        max(relative(found.parameters[name], value) for name, value in expected.parameters.items()),
    )


def compared(row: Row, precision: str = "fp64") -> Differences:
    """Run a row and one process, and compare."""
    spec, job, batches = plan_of(row, precision)
    reference = job.model_copy(update={"precision": "fp32"}) if precision == "bf16" else job
    return differences(found_by_ranks(row, precision), plain_steps(spec, reference, batches))


DATA = [
    {"dp_replicate": 2},
    {"dp_replicate": 4},
    *({"dp_shard": n, "zero_stage": stage} for n in (2, 4) for stage in (1, 2, 3)),
    *({"dp_replicate": 2, "dp_shard": 2, "zero_stage": stage} for stage in (1, 2, 3)),
]
"""DDP, ZeRO-1 to 3 and HSDP."""

ONE, SHARD, HSDP = {"dp_shard": 2, "zero_stage": 1}, {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}
EMPTY = {"microbatches": 2, "empty": (6, 7)}  # every sequence of rank 1's second microbatch is masked

DATA_ROWS = [
    row(microbatches=3),
    *(row(**data, microbatches=m) for data in DATA for m in (1, 3)),
    *(row(**data, **EMPTY) for data in ({"dp_replicate": 2}, {"dp_shard": 2, "zero_stage": 2}, SHARD)),
    row(**SHARD, microbatches=1, empty=(2, 3)),  # every sequence of rank 1
    *(row(**data, recompute=kind) for data in (ONE, SHARD) for kind in ("selective", "full")),
    row(**HSDP, recompute="full"),
    row(dp_replicate=2, recompute="selective"),
    *(row(name, **SHARD) for name in MODELS if MODELS[name].layers < 4 and name != "base"),
    *(row(name, **HSDP, zero_stage=2, recompute="selective") for name in ("tied", "qk_norm", "bias")),
    *(row("rows_below_shards", dp_shard=4, zero_stage=stage) for stage in (1, 3)),
    row("uneven_vocab", dp_shard=4),
    row("tied", dp_replicate=2),
    *(
        row(optimizer=name, **data)
        for data in ({"dp_replicate": 2}, SHARD)
        for name in ("sgd", "sgd_momentum")
    ),
    row(optimizer="sgd", **HSDP),
    row(dp_shard=2, zero_stage=2, microbatches=3, micro_batch=1),
]

CHUNKED_ROWS = [  # the loss in parts, whose logits are made twice
    row(loss_chunks=3, microbatches=3),
    *(row(loss_chunks=3, **data) for data in (ONE, SHARD, {"dp_replicate": 2})),
    row("tied", loss_chunks=4, **HSDP),
    *(row("uneven_vocab", loss_chunks=3, tp=2, sp=sp) for sp in (False, True)),
    row(loss_chunks=3, cp=2, cp_kind="ring", recompute="full"),
]

TP_MODELS = ("base", "tied", "qk_norm", "bias", "uneven_vocab", "llama3_rope")
TP_ROWS = [
    *(row(name, tp=2, sp=sp) for name in TP_MODELS for sp in (False, True)),
    *(row(tp=4, sp=sp) for sp in (False, True)),  # more ranks than key/value heads
    row(tp=2, micro_batch=1, microbatches=3, sp=True),
    *(row(tp=2, sp=True, recompute=kind) for kind in ("selective", "full")),
    row("tied", tp=2, sp=False, recompute="full", **SHARD),
    *(row(tp=2, sp=sp, **data) for sp, data in ((True, SHARD), (False, ONE), (True, {"dp_replicate": 2}))),
    row("qk_norm", tp=2, sp=True, recompute="selective", **HSDP, zero_stage=2),
    row("uneven_vocab", tp=4, sp=True, **SHARD),
    row(optimizer="sgd_momentum", tp=2, sp=True, **SHARD),
]

LOOPED = {"chunks": 2}
SCHEDULES = [
    {"schedule": "1F1B"},
    {"schedule": "GPipe"},
    *({"schedule": name} | LOOPED for name in ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")),
    *({"schedule": name} | LOOPED for name in ("ZBVZeroBubble", "DualPipeV")),
]
MANY = [{"schedule": name} for name in ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")]
"""Schedules that torch would free parameters in, of ranks with four stages and more."""

ONE_BY_ONE, ZB, ZBV, DUAL = SCHEDULES[0], SCHEDULES[4], SCHEDULES[5], SCHEDULES[6]

PP_ROWS = [
    *(row("deep", pp=2, **schedule) for schedule in SCHEDULES),
    *(row("deep", pp=2, **schedule, **ONE) for schedule in SCHEDULES),
    *(
        row("deep", pp=2, **schedule, recompute="full")
        for schedule in (ONE_BY_ONE, SCHEDULES[3], ZB, ZBV, DUAL)
    ),
    *(row("deep_tied", pp=2, **schedule) for schedule in (ONE_BY_ONE, SCHEDULES[3], ZBV, DUAL)),
    row("deep", pp=2, **ONE_BY_ONE, stage_layers=(3, 1), microbatches=5),
    row("deep_tied", pp=2, schedule="Interleaved1F1B", chunks=3, stage_layers=(0, 1, 1, 1, 1, 0)),
    *(row("deeper", pp=2, **schedule, chunks=4, **ONE) for schedule in MANY),
    row("deeper", pp=2, **MANY[2], chunks=4, **ONE, recompute="full"),
    row("deep", pp=4, **ONE_BY_ONE),
    row("deep", pp=2, **ONE_BY_ONE, dp_replicate=2),
    row("deep", pp=2, **ONE_BY_ONE, **HSDP),
    *(row("deep", pp=2, **schedule, recompute="selective") for schedule in (ONE_BY_ONE, ZB, ZBV, DUAL)),
    row("deep", pp=2, **ZBV, recompute="full", recompute_every=2),
    *(row("deep", pp=2, **schedule, loss_chunks=5) for schedule in (ONE_BY_ONE, ZBV)),
    row("deep_tied", pp=2, **DUAL, tp=2, sp=True, loss_chunks=3),
    *(row("deep", pp=2, **schedule, tp=2, sp=sp) for schedule, sp in ((ONE_BY_ONE, False), (ZBV, True))),
    row("deep_tied", pp=4, **ONE_BY_ONE, tp=2, sp=True),
    row("deep", pp=2, **ZBV, tp=2, sp=True, **ONE),
    row("deep", pp=2, **DUAL, tp=2, sp=True, **ONE, recompute="full"),
    row("deep", pp=2, **ONE_BY_ONE, order=MESH_ORDERS[2], **ONE, tp=2, sp=True),
]

KINDS = ("ring", "all_gather", "ulysses")
RING = {"cp": 2, "cp_kind": "ring"}
CONTEXT_ROWS = [
    *(row(cp=2, cp_kind=kind) for kind in KINDS),
    *(row(cp=2, cp_kind=kind, zero_stage=stage) for kind, stage in zip(KINDS, (1, 2, 2), strict=True)),
    *(row(cp=4, cp_kind=kind) for kind in KINDS),  # for Ulysses more ranks than key/value heads
    *(row(cp=2, cp_kind=kind, packed=True) for kind in KINDS),
    row(packed=True, **SHARD),
    row("windowed", cp=2, cp_kind="all_gather"),
    *(row(cp=2, cp_kind=kind, **SHARD) for kind in KINDS),
    row(**RING, dp_replicate=2, microbatches=3),
    row(**RING, **HSDP, packed=True),
    *(row(cp=2, cp_kind=kind, recompute="full") for kind in KINDS),
    *(row(cp=2, cp_kind=kind, tp=2, sp=True) for kind in KINDS),
    row("tied", **RING, tp=2, **SHARD),
    row("deep", **RING, pp=2, **ONE_BY_ONE),
    row("deep", cp=2, cp_kind="all_gather", pp=2, **ZBV, packed=True),
    row("deep", cp=2, cp_kind="ulysses", pp=2, **DUAL),
    row("deep", **RING, pp=2, **ZB),
    row("deep", **RING, pp=2, **ONE_BY_ONE, tp=2, sp=True, packed=True),
    row("deep", **RING, pp=2, **ZBV, tp=2, sp=True, recompute="full"),
    row("deep", cp=2, cp_kind="ulysses", pp=2, **SCHEDULES[3], **ONE),
]

EXPERT_ROWS = [
    row("experts", **RING, ep=2),
    row("experts", **RING, ep=4, tp=2, sp=True),
    row("deep_experts", pp=2, **ONE_BY_ONE, tp=2, sp=True, **RING, ep=4),
    row("deep_experts", pp=2, **ZBV, tp=2, sp=True, **RING, ep=2, recompute="full"),
    row("shared_experts", dp_replicate=2),
    *(row(name, ep=2, **SHARD) for name in ("experts", "shared_experts")),
    row("experts", ep=4, dp_shard=4),
    row("experts", ep=2, dp_shard=4, zero_stage=2),
    row("experts", ep=2, **HSDP, recompute="full"),
    *(row(name, ep=2, tp=2, sp=True, recompute="selective") for name in ("experts", "shared_experts")),
    row("shared_experts", etp=2, tp=2, sp=True, recompute="selective"),
    row("deep_experts", pp=2, **ZBV, ep=2, tp=2, sp=True, recompute="selective"),
    row("idle_experts", ep=4, dp_shard=4),  # experts without tokens
    *(row(name, ep=2, tp=2, sp=True) for name in ("experts", "shared_experts")),
    *(row("shared_experts", etp=2, tp=2, sp=sp) for sp in (False, True)),
    row("experts", ep=4, tp=2, sp=True, **SHARD),
    row("shared_experts", ep=2, etp=2, tp=2, sp=True, **SHARD),
    *(row("deep_experts", pp=2, **schedule, ep=2, **ONE) for schedule in (ONE_BY_ONE, ZBV, DUAL)),
    row("deep_experts", pp=2, **ZBV, ep=2, tp=2, sp=True),
    row("one_expert", ep=4, dp_shard=4),  # all tokens to one of them
    row("one_expert", ep=2, dp_shard=8),  # experts fewer than the ranks that split them
    row("one_expert", ep=4, etp=2, tp=2, sp=True, dp_shard=4),
    row("one_expert", dp_shard=8, zero_stage=2),
    row("one_expert", ep=2, tp=2, sp=True),
    row("deep_experts", pp=2, **ZB, ep=2, **ONE),
    *(row("deep_dense_first", pp=2, **schedule, ep=2, **ONE, recompute="full") for schedule in (ZB, DUAL)),
    row("deep_experts", pp=2, **ONE_BY_ONE, ep=2, tp=2, sp=True, recompute="full", **ONE),
]

COMPILED_ROWS = [  # traced and differentiated by torch.compile, run as eager operations
    *(row(compiled=True, **data) for data in (SHARD, {"tp": 2}, {"tp": 2, "sp": True} | SHARD)),
    row("deep", pp=2, **ONE_BY_ONE, compiled=True),
    row("experts", ep=2, **SHARD, compiled=True),
    row(**RING, recompute="full", compiled=True),
]

OFFLOAD_ROWS = [
    row(**SHARD, offload="optimizer"),
    row(tp=2, sp=True, offload="optimizer+activations"),
    row(**RING, offload="activations"),
    row("deep", pp=2, **ONE_BY_ONE, offload="optimizer+activations"),
    row("deep", pp=2, **ZBV, offload="optimizer"),
    row("experts", ep=2, **SHARD, offload="optimizer+activations"),
]

FAMILY_ROWS = [
    row("latent", **SHARD),
    row("latent_dense", **HSDP, recompute="full"),
    *(row("latent", tp=2, etp=2, sp=sp) for sp in (False, True)),
    row("latent_dense", tp=4, etp=4, sp=True, recompute="selective"),
    row("latent", ep=2, tp=2, sp=True, **SHARD),
    row("latent", ep=4, dp_shard=4),
    *(row("latent_dense", cp=2, cp_kind=kind) for kind in KINDS),
    row("latent_dense", **RING, tp=2, etp=2, sp=True, packed=True),
    row("latent", pp=2, **ONE_BY_ONE),
    row("latent", pp=2, **ZBV, tp=2, etp=2, sp=True, **ONE),
    row("latent", pp=2, **ZBV, **RING, ep=2, recompute="selective"),
    *(row("gpt2", **data) for data in (HSDP, {"dp_replicate": 2})),
    *(row("gpt2", tp=2, sp=sp) for sp in (False, True)),
    row("gpt2_untied", tp=2, sp=True, recompute="selective", **SHARD),
    row("gpt2", tp=4, recompute="full"),
    row("gpt2", **RING, tp=2, sp=True, **SHARD),
    *(row("deep_gpt2", pp=2, **schedule) for schedule in (ONE_BY_ONE, ZBV)),
    row("deep_gpt2", pp=2, **ONE_BY_ONE, tp=2, sp=True, **ONE),
    *(row("starcoder2", tp=2, sp=sp, recompute="selective") for sp in (False, True)),
    row("starcoder2", tp=4, **SHARD),
    row("yarn", **RING, **SHARD),
]

ALL_DENSE_AXES = row("deep", pp=2, **ONE_BY_ONE, tp=2, sp=True, **RING, **ONE)
"""On 16 ranks."""

ROWS = [
    *DATA_ROWS,
    *CHUNKED_ROWS,
    *TP_ROWS,
    *PP_ROWS,
    *CONTEXT_ROWS,
    *EXPERT_ROWS,
    *FAMILY_ROWS,
    *COMPILED_ROWS,
    *OFFLOAD_ROWS,
    ALL_DENSE_AXES,
]
