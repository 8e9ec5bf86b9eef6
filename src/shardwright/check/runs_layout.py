"""The layout of a published run: degrees, ZeRO stage, schedule, microbatches and recomputation of a row.

What a row leaves out follows the program's habits; each default is named in ``assumed``.
"""

import re
from typing import Any

from shardwright.check.runs_model import Row, whole
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.model import ModelSpec
from shardwright.plan.schedule import why_not
from shardwright.plan.splits import stage_layers
from shardwright.program import KnownProgram

SCHEDULES = (
    ("zb-2p", "ZB-H2"), ("zb-1p", "ZB-H1"), ("zb-v", "ZBVZeroBubble"), ("dualpipev", "DualPipeV"),
    ("dualpipe", "DualPipe"), ("gpipe", "GPipe"), ("interleaved", "Interleaved1F1B"), ("1f1b", "1F1B"),
)  # fmt: skip
"""Words of tables for schedules; the first that is found counts."""

RECOMPUTE_OPEN = "recompute: none"
"""What is assumed where nothing is stated; all blocks, where that does not fit (check/runs_case.py)."""

FLEX_DISPATCH = "26"
"""Releases of Megatron-Bridge whose recipes dispatch tokens by DeepEP or HybridEP
(moe_flex_dispatcher_backend)."""

NO_VOCABULARY = 1
"""Of ranks that hold neither embedding nor head: too small to matter."""

USUAL_MICRO_BATCH = 4
"""Sequences of a microbatch of the first Megatron, where nothing is stated and there is no pipeline."""

CONTEXT = (("a2a", "ulysses"), ("ulysses", "ulysses"), ("all", "all_gather"), ("ring", "ring"))


class NotPredictedError(Exception):
    """A row that its columns do not determine; the message is the reason, to count by."""


def layout_of_row(row: Row, model: ModelSpec, known: KnownProgram, assumed: list[str]) -> Layout:
    """The layout of a row of a table of runs; defaults are added to ``assumed``.

    Raises: NotPredictedError: the degrees do not share out ranks or batch. LayoutError: they contradict.
    """
    family = known.family
    ranks, batch = whole(row, "n_gpus", 1), int(float(row["gbs_seqs"]))
    tp, pp, cp, ep = (whole(row, axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    dp = whole(row, "dp", 0) or max(ranks // (tp * pp * cp), 1)
    if dp * tp * pp * cp != ranks:
        raise NotPredictedError("degrees do not multiply to n_gpus")
    zero, shard = _zero(row, family, dp, cp, pp, ep, assumed)
    etp = _expert_tp(row, model, dp * cp * tp, tp, ep, assumed)
    sp = _sequence(row, family, tp, ep, assumed)
    schedule, chunks = _schedule(row, model, family, pp, assumed)
    micro_batch, microbatches = _microbatches(row, known.name, batch / dp, pp * chunks, assumed)
    kind, every = _recompute(row, assumed)
    fault = why_not(schedule, pp, chunks, microbatches) if pp > 1 else ""
    if fault:
        raise NotPredictedError(f"no order of the schedule: {fault}")
    stages = pp * chunks
    fewer = "one layer fewer" in row["note"] and pp > 1
    ends = 1 if fewer or (model.layers + 2) % stages == 0 else 0  # embedding and head stand for a layer each
    split = stage_layers(model.layers, stages, ends)
    if "DeepSpeed" in row["framework"] and not ends:
        split = filled_stages(model.layers, stages)
    values: dict[str, Any] = {
        "pp": pp, "dp_replicate": dp // shard, "dp_shard": shard, "cp": cp, "tp": tp, "ep": ep, "etp": etp,
        "sp": sp, "cp_kind": _context(row, family, cp, assumed), "schedule": schedule, "chunks": chunks,
        "stage_layers": split if stages > 1 else (),
        "zero_stage": zero, "micro_batch": micro_batch, "microbatches": microbatches,
        "recompute": kind, "recompute_every": every,
        "kept": KEPT_BY_SELECTIVE if kind == "selective" else (),
        "offload": _offload(row),
        "dispatch": _dispatch(row, model, ep, assumed),
    }  # fmt: skip
    return Layout.checked(values)


def filled_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Stages filled one by one, as DeepSpeed shares out layers of equal weight: the last have what is left.
    Source: bigscience-workshop/bigscience train/tr11-176B-ml/chronicles-prequel.md, "Re-do"."""
    most = -(-layers // stages)
    return tuple(min(max(layers - most * stage, 0), most) for stage in range(stages))


def _microbatches(row: Row, program: str, of_rank: float, stages: int, assumed: list[str]) -> tuple[int, int]:
    """Sequences of a microbatch, and microbatches of ``of_rank`` sequences.

    Where neither is stated: torchtitan's pipelines cut a batch into as many microbatches as stages; others
    take one sequence, the first Megatron without a pipeline four.
    """
    if of_rank < 1:
        raise NotPredictedError("global batch is less than dp")
    micro = whole(row, "mbs_seqs", 0)
    if not micro:
        given = float(row["grad_accum"] or 0)
        if given:
            micro, way = round(of_rank / given), "from grad_accum"
        elif program == "torchtitan" and stages > 1:
            micro, way = round(of_rank / stages), "a microbatch a stage"
        else:
            usual = USUAL_MICRO_BATCH if program == "megatron-2021" and stages == 1 else 1
            micro = max(size for size in range(1, usual + 1) if of_rank % size == 0 or size == 1)
            way = str(micro)
        micro = max(micro, 1)
        assumed.append(f"mbs_seqs: {way}")
    return micro, max(round(of_rank / micro), 1)


def _zero(row: Row, family: str, dp: int, cp: int, pp: int, ep: int, assumed: list[str]) -> tuple[int, int]:
    """The ZeRO stage, and the ranks of dp over which it splits."""
    text = row["zero_stage"]
    if text:
        stage = int(float(text))
    else:
        old = family == "megatron" and row["gpu"].startswith(("A100", "V100"))
        stage = 3 if "fsdp" in row["dp_mode"] or family == "fsdp" else 3 if family == "deepspeed" else 1 - old
        if dp * cp > 1:
            assumed.append(f"zero_stage: {stage}")
    if ep > 1:
        stage = max(stage, 1)
    if pp > 1 and stage > 1:
        stage = 1
        assumed.append("zero_stage above 1 in a pipeline: 1")
    if stage and row["dp_shard_size"]:
        shard = max(int(float(row["dp_shard_size"])) // cp, 1)
        shard = shard if dp % shard == 0 else dp
    else:
        shard = dp if stage else 1
    if shard * cp == 1:
        return 0, shard
    return max(stage, 1), shard


def _expert_tp(row: Row, model: ModelSpec, ranks: int, tp: int, ep: int, assumed: list[str]) -> int:
    if model.moe is None:
        return 1
    if row["etp"]:
        return int(float(row["etp"]))
    if tp > 1:
        assumed.append("etp: that of tp" if ranks % (ep * tp) == 0 else "etp: 1")
    return tp if ranks % (ep * tp) == 0 else 1


def _sequence(row: Row, family: str, tp: int, ep: int, assumed: list[str]) -> bool:
    if tp == 1:
        return False
    if row["sp"] in ("yes", "no"):
        return row["sp"] == "yes" or ep > 1
    old = row["gpu"].startswith(("A100", "V100"))
    assumed.append(f"sp: {'no' if old else 'yes'}")
    return not old or ep > 1


def _context(row: Row, family: str, cp: int, assumed: list[str]) -> str:
    if cp == 1:
        return "none"
    text = row["cp_kind"].lower()
    for word, kind in CONTEXT:
        if word in text:
            return kind
    kind = "all_gather" if family == "fsdp" else "ulysses" if family == "deepspeed" else "ring"
    assumed.append(f"cp_kind: {kind}")
    return kind


def _schedule(row: Row, model: ModelSpec, family: str, pp: int, assumed: list[str]) -> tuple[str, int]:
    """Schedule and stages a rank."""
    if pp == 1:
        return "none", 1
    chunks = whole(row, "vpp", 0)
    text = row["schedule"].lower()
    name = next((name for word, name in SCHEDULES if word in text), "")
    most = -(-model.layers // pp)
    if not chunks:
        new = family == "megatron" and not row["gpu"].startswith(("A100", "V100"))
        chunks = 1
        if name == "Interleaved1F1B":
            chunks = 2 if family == "fsdp" else most
            assumed.append(f"vpp: {'2' if family == 'fsdp' else 'a layer a chunk'}")
        elif not name and new:
            chunks = most
            assumed.append("vpp: a layer a chunk")
        elif not name:
            assumed.append("vpp: 1")
    if pp * chunks != model.layers + 2:  # Megatron counts embedding and head as a layer each where told to
        chunks = max(min(chunks, model.layers // pp), 1)
    if not name or (name == "1F1B" and chunks > 1) or (name == "Interleaved1F1B" and chunks == 1):
        name = "Interleaved1F1B" if chunks > 1 else "1F1B"
    if name in ("ZBVZeroBubble", "DualPipeV"):
        chunks = 2
    return name, chunks


def with_all_chunks(row: Row, model: ModelSpec, layout: Layout) -> tuple[ModelSpec, Layout]:
    """A pipeline whose first and last chunk have no layer, for its memory: the ranks between hold most, so
    all are taken to be like them, with as many layers and neither embedding nor head."""
    if 0 not in layout.stage_layers:
        return model, layout
    stages = layout.pp * layout.chunks
    changes = {"stage_layers": (1,) * stages}
    return model.model_copy(update={"layers": stages, "vocab": NO_VOCABULARY}), layout.model_copy(
        update=changes
    )


def _recompute(row: Row, assumed: list[str]) -> tuple[str, int]:
    """Kind, and every how manyth layer; not stated, none, for now."""
    text = row["recompute"].lower()
    hint = re.search(r"hint:.*uses recompute (none|full|selective[^,;]*)", row["note"])
    if not text and hint:
        text = hint[1]
        assumed.append("recompute: as the note hints")
    if not text:
        assumed.append(RECOMPUTE_OPEN)
    if "per layer" in text:
        return "full", 2
    if "attention" in text or "per op" in text or text == "selective":
        return "selective", 1
    if "selective" in text:
        return "none", 1
    return ("full" if "full" in text else "none"), 1


def _dispatch(row: Row, model: ModelSpec, ep: int, assumed: list[str]) -> str:
    """One copy of a token a node, where the release has it and experts lie on several nodes; of recipes whose
    trades hide, those of node-limited routing alone."""
    if not _has_flex_dispatch(row) or not _leaves_a_node(row, ep):
        return "all_to_all"
    if trades_hide(row) and (model.moe is None or model.moe.groups == 1):
        return "all_to_all"
    assumed.append("dispatch: by_node")
    return "by_node"


def trades_hide(row: Row) -> bool:
    """Whether a recipe has the trades of experts run under another microbatch (moe_a2a_overlap): those that
    interleave a pipeline on nodes of a few devices, be the experts in one node or on several.

    Source: NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs, at its state of each release.
    """
    return _has_flex_dispatch(row) and whole(row, "vpp", 1) > 1 and bool(whole(row, "gpus_per_node", 0))


def _has_flex_dispatch(row: Row) -> bool:
    release = re.match(r"2[0-9]\.[0-9]{2}", row["release_or_date"])
    return "Bridge" in row["framework"] and release is not None and release[0] >= FLEX_DISPATCH


def _leaves_a_node(row: Row, ep: int) -> bool:
    per_node = whole(row, "gpus_per_node", 0)
    return bool(per_node) and ep > per_node


def _offload(row: Row) -> str:
    text = row["offload"].lower()
    if "activation" in text and "optimizer" in text:
        return "optimizer+activations"
    return "optimizer" if "optimizer" in text or "zero-3" in text else "none"
