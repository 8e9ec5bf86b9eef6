"""Which tensor has so many bytes: what a model and a setting would allocate at once, largest names first."""

from collections.abc import Iterator
from typing import NamedTuple

from shardwright.doctor.setting import Setting
from shardwright.model import ModelSpec
from shardwright.plan.params import BLOCK, parameter_table
from shardwright.units import MiB

ROUNDED_UP = 2 * MiB
"""torch's allocator asks for multiples of this above 10 MiB, and prints what it asks for."""


class Candidate(NamedTuple):
    """A tensor that may have been asked for: its bytes, the cause it stands for, and its sum."""

    size: int
    cause: str
    text: str


def candidates(model: ModelSpec, setting: Setting | None) -> Iterator[Candidate]:
    """What is allocated in one piece, by the model alone, then by microbatch and sequence."""
    tp = (setting.tp if setting else None) or 1
    yield from _weights(model, tp)
    if setting is None or setting.tokens is None or setting.seq is None:
        return
    yield from _activations(model, setting, setting.tokens, tp)


def _weights(model: ModelSpec, tp: int) -> Iterator[Candidate]:
    h, vocab = model.hidden, model.vocab
    for split in dict.fromkeys((1, tp)):
        of = f" / tp {split}" if split > 1 else ""
        for wide, kind in ((2, "16 bits"), (4, "fp32")):
            size = vocab * h * wide // split
            text = f"embedding or head gathered whole: {vocab:,} x {h:,} x {wide} B{of} ({kind})"
            yield Candidate(size, "vocabulary_gather", text)
    if model.moe is not None:
        experts = sum(t.numel for u in parameter_table(model).blocks for t in u.tensors if t.role == "expert")
        blocks = [u for u in parameter_table(model).blocks if any(t.role == "expert" for t in u.tensors)]
        per_layer = experts // max(len(blocks), 1)
        for wide in (2, 4):
            text = f"all {model.moe.experts} experts of a layer gathered: {per_layer:,} x {wide} B"
            yield Candidate(per_layer * wide, "expert_gather", text)
    for unit in parameter_table(model).units:
        name = "a block" if unit.kind == BLOCK else f"the unit of the {unit.kind}"
        for wide in (2, 4):
            cause = "vocabulary_gather" if unit.kind != BLOCK else "gathered_unit"
            yield Candidate(unit.numel * wide, cause, f"{name} gathered: {unit.numel:,} x {wide} B")
    total = parameter_table(model).parameters
    for wide in (2, 4):
        yield Candidate(total * wide, "root_only_unit", f"the whole model in one piece: {total:,} x {wide} B")


def _activations(model: ModelSpec, setting: Setting, tokens: int, tp: int) -> Iterator[Candidate]:
    seq, micro = setting.seq or 0, setting.micro_batch or 1
    for split in dict.fromkeys((1, tp)):
        of = f" / tp {split}" if split > 1 else ""
        for wide in (2, 4):
            size = tokens * model.vocab * wide // split
            text = f"logits: {tokens:,} tokens x {model.vocab:,} x {wide} B{of}"
            yield Candidate(size, "logits", text)
        heads = model.heads // split or 1
        for wide in (2, 4, 1):
            size = micro * heads * seq * seq * wide
            text = f"attention scores: {micro} x {heads} heads x {seq:,} x {seq:,} x {wide} B"
            yield Candidate(size, "attention_scores", text)
        for width, name in (
            (model.ffn, "feed-forward"),
            (2 * model.ffn, "gate and up"),
            (model.hidden, "hidden"),
        ):
            for wide in (2, 4):
                text = f"{name} activations: {tokens:,} tokens x {width:,} x {wide} B{of}"
                yield Candidate(tokens * width * wide // split, "activations", text)


def matching(
    requested: int, slack: int, found: Iterator[Candidate], within: int = ROUNDED_UP
) -> list[Candidate]:
    """Candidates that an allocator would print as ``requested``, each size once, the first name first."""
    kept: dict[int, Candidate] = {}
    for candidate in found:
        if candidate.size >= 1 << 20 and -slack <= requested - candidate.size <= slack + within:
            kept.setdefault(candidate.size, candidate)
    return list(kept.values())


def implied_tokens(model: ModelSpec, requested: int, tp: int = 1) -> dict[int, float]:
    """Tokens whose logits would take ``requested`` bytes, by bytes of a number."""
    return {wide: requested / (model.vocab * wide / tp) for wide in (4, 2)}
