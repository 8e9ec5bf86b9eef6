"""The tensor behind a request that failed: by its size, by the stack, or by the tokens it would hold."""

import re

from shardwright.doctor.evidence import OutOfMemory
from shardwright.doctor.finding import Certainty
from shardwright.doctor.setting import Setting
from shardwright.doctor.tensors import candidates, implied_tokens, matching
from shardwright.model import ModelSpec
from shardwright.units import GiB, format_bytes

LONGER = 1.03
"""Ratio of implied to configured tokens above which the difference is no rounding."""

WHOLE = 1e-3
"""By how much, as a share, a number of tokens may miss a multiple of the sequence and still be one."""

LOGITS_WORDS = re.compile(
    r"logits|cross_entropy|lm_head|log_softmax|nll_loss|loss_function|compute_loss", re.IGNORECASE
)

SCORES_WORDS = re.compile(
    r"baddbmm|softmax\(|attn_weights|attention_scores|eager_attention|causal_mask|attention_mask",
    re.IGNORECASE,
)

OPTIMIZER_WORDS = re.compile(r"/optim/|optimizer\.step|_foreach|exp_avg|\bstep at .*optim")
GATHER_WORDS = re.compile(
    r"_fsdp_collectives|foreach_all_gather|all_gather|_unshard|unshard "
    r"at|fetch_sub_module|partition_parameters"
)

REDUCE_WORDS = re.compile(r"foreach_reduce|reduce_scatter|post_backward")

Reading = tuple[str, Certainty, str, dict[str, object]]
"""Cause, how sure, in words, and numbers."""


def cause_by_place(refusal: OutOfMemory, words: str) -> str | None:
    """The cause that the innermost frames point to."""
    near = " ".join(refusal.frames[:8])
    if OPTIMIZER_WORDS.search(near):
        return "optimizer_step"
    if LOGITS_WORDS.search(near) or re.search(r"logits", words):
        return "logits"
    if SCORES_WORDS.search(near):
        return "attention_scores"
    if REDUCE_WORDS.search(near):
        return "reduction_buffers"
    return None


def reading_by_size(
    model: ModelSpec, refusal: OutOfMemory, setting: Setting | None, words: str
) -> Reading | None:
    """The cause, how sure, in words, and numbers, by the size that was asked for."""
    requested = refusal.requested or 0
    tp = (setting.tp if setting else None) or 1
    at_loss, at_scores = bool(LOGITS_WORDS.search(words)), bool(SCORES_WORDS.search(words))
    at_gather = bool(GATHER_WORDS.search(words))
    found = matching(requested, refusal.slack, candidates(model, setting))
    if at_loss and not at_gather:
        found = [each for each in found if each.cause == "logits"]
    if at_gather:
        found = [each for each in found if "gather" in each.text or each.cause == "root_only_unit"] or found
    if found:
        best = found[0]
        others = [each.text for each in found[1:3]]
        certain: Certainty = "certain" if len({each.cause for each in found}) == 1 else "likely"
        cause = best.cause if best.cause != "gathered_unit" else "activations"
        reading = best.text + (f" (or {'; or '.join(others)})" if others else "")
        return cause, certain, reading, {"tensor": best.text, "tensor_bytes": best.size}
    implied = _implied(model, requested, tp, setting, words) if not at_gather and not at_scores else None
    if implied is not None:
        return implied
    if at_scores and setting is not None and setting.micro_batch:
        heads = max(model.heads // tp, 1)
        length = (requested / (setting.micro_batch * heads * 2)) ** 0.5
        reading = f"if these are attention scores in 16 bits the sequence has {length:,.0f} tokens"
        longer = setting.seq is not None and length > LONGER * setting.seq
        cause = "longer_sequence_than_configured" if longer else "attention_scores"
        return cause, "likely", reading, {"implied_sequence": round(length)}
    if refusal.capacity and requested > refusal.capacity:
        return "larger_than_device", "certain", "one tensor larger than the device", {}
    return None


def _implied(
    model: ModelSpec, requested: int, tp: int, setting: Setting | None, words: str
) -> Reading | None:
    """Tokens whose logits were asked for: by the stack, or by being a whole multiple of the sequence."""
    tokens, seq = (setting.tokens, setting.seq) if setting else (None, None)
    at_loss = bool(LOGITS_WORDS.search(words))
    upcast = bool(re.search(r"float\(\)|float32|upcast", words))
    for wide in (4, 2) if upcast or requested > 8 * GiB else (2, 4):
        count = implied_tokens(model, requested, tp)[wide]
        whole = (
            seq is not None
            and count > 1.5 * seq
            and abs(count / seq - round(count / seq)) < WHOLE * count / seq
        )
        if not at_loss and not whole:
            continue
        numbers: dict[str, object] = {"implied_tokens": round(count), "configured_tokens": tokens}
        reading = f"if these are logits ({wide} B each) they are of {count:,.0f} tokens"
        if tokens is not None and count > LONGER * tokens:
            expected = tokens * model.vocab * wide / tp
            reading += (
                f", {count / tokens:.2f} times the {tokens:,} that are configured "
                f"({format_bytes(expected)} would be "
                "right for those)"
            )
            return "longer_sequence_than_configured", "likely", reading, numbers
        return "logits", "likely", reading, numbers
    return None
