"""The program of a published run: which of those known it ran, and with what options."""

import re

from shardwright.check.runs_layout import trades_hide
from shardwright.check.runs_model import Row
from shardwright.model import ModelSpec
from shardwright.program import KnownProgram, known_programs

LATER = ("Core", "Bridge", "NeMo", "TE ", "SWIFT")
"""Words by which tables tell a Megatron with Transformer Engine or FlashAttention from the first ones."""

LAST_WITH_SCORES = 2023
"""Year of the last Megatron-LM whose attention kept its scores unless told otherwise."""

OLD_DEVICES = ("A100", "V100")

FUSED_CLAMP = "26.06"
"""Release of Megatron-Bridge from which on gpt-oss's clamped activation is one kernel, as its step times
suggest: before, each token took longer by as much at any length of sequence."""


TP_UNDER_GRADIENTS = 2022
"""Year from which on Megatron-LM reduces gradients over tp under the product for those of weights, as does
what was rebased on it since; tables without a date are taken for later. BigScience's fork is of 2021."""


def program_of_row(row: Row) -> tuple[KnownProgram, tuple[str, ...]]:
    """Which program ran, and what had to be assumed."""
    framework = row["framework"]
    found = {known.name: known for known in known_programs()}
    if any(word in framework for word in found["megatron-2021"].words) and _is_early(row):
        return found["megatron-2021"], ()
    for name in ("composer", "torchtitan", "jax", "megatron-core", "deepspeed"):
        if any(word in framework for word in found[name].words):
            return found[name], ()
    name = "torchtitan" if "fsdp" in row["dp_mode"] else "megatron-core"
    return found[name], (f"framework: as {name}",)


def _is_early(row: Row) -> bool:
    """Whether a Megatron is from before FlashAttention: by its year, or else by name and device."""
    year = re.match(r"(20[0-9]{2})", row["release_or_date"])
    if year:
        return int(year[1]) <= LAST_WITH_SCORES and not any(word in row["framework"] for word in LATER)
    return row["gpu"].startswith(OLD_DEVICES) and not any(word in row["framework"] for word in LATER)


def options_of_row(row: Row, model: ModelSpec) -> str:
    """A row's words on kernels, options, scaling recipe and network."""
    stated = ("compile_or_attn", "precision", "note", "framework", "schedule", "interconnect")
    words = [row[column] for column in stated]
    release = re.match(r"2[0-9]\.[0-9]{2}", row["release_or_date"])
    if model.attention_sinks and release and release[0] < FUSED_CLAMP:
        words.append("unfused clamp")
    year = re.match(r"(20[0-9]{2})", row["release_or_date"])
    plain = "Megatron-LM" in row["framework"]
    if (plain and year and int(year[1]) >= TP_UNDER_GRADIENTS) or not row["release_or_date"]:
        words.append("tp under gradients")
    if plain and ("PTD-P" in row["framework"] or "tp under gradients" in words):
        words.append("scatters")
    if trades_hide(row):
        words.append("trades hide")
    return " ".join(words)
