"""Lines of training logs that name their numbers in words: torchtune, DeepSpeed, nanotron, verl, NeMo,
nanoGPT, fms-fsdp and what people write themselves."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.doctor.clock import time_of
from shardwright.doctor.evidence import Step
from shardwright.doctor.lines import Line, Reader
from shardwright.doctor.step_log import NAMES, NUMBER, TITAN_STEP, number

SCALED: Mapping[str, tuple[str, float]] = {
    "elapsed_time_per_iteration_ms": ("step_time", 1e-3),
    "iter time (s)": ("step_time", 1),
    "train_step_timing in s": ("step_time", 1),
    "timing_s/step": ("step_time", 1),
    "perf/time_per_step": ("step_time", 1),
    "current step time": ("step_time", 1),
    "samples/sec": ("samples_per_s", 1),
    "tokens_per_sec": ("tokens_per_s", 1),
    "tokens_per_sec_per_gpu": ("tokens_per_s_per_gpu", 1),
    "current token per gpu per sec": ("tokens_per_s_per_gpu", 1),
    "model_tflops_per_gpu": ("flops_per_s", 1e12),
    "lm_loss": ("loss", 1),
    "loss/train": ("loss", 1),
    "train loss": ("loss", 1),
    "actor/loss": ("loss", 1),
    "gradient norm": ("grad_norm", 1),
    "grad norm": ("grad_norm", 1),
    "wps": ("tokens_per_s_per_gpu", 1),
}
"""Names beside those of metrics files, with what makes them SI."""

KEPT = (
    *(
        "loss",
        "grad_norm",
        "step_time",
        "learning_rate",
        "tokens",
        "tokens_per_s",
        "tokens_per_s_per_gpu",
        "mfu",
    ),
    *("data_time", "samples_per_s", "global_batch", "flops_per_s", "memory", "alloc_retries"),
)
"""What a line of words is believed to say: not its ranks and degrees, which stand in prefixes."""

OF_TRAINING = (
    "train",
    "training",
    "total",
    "lm",
    "avg",
    "average",
    "mean",
    "current",
    "global",
    "info",
    "ce",
)
"""Words before a bare ``loss`` that leave it the training's."""

LETTERS: Mapping[str, float] = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""Of nanotron's short numbers."""

UNITS: Mapping[str, float] = {"ms": 1e-3, "s": 1, "%": 0.01}

_WORDS = sorted({*NAMES, *SCALED}, key=len, reverse=True)
_PAIR = re.compile(
    rf"(?<![\w/.])(?P<name>{'|'.join(map(re.escape, _WORDS))})(?:\s*[:=]\s*|\s+){NUMBER}"
    r"(?P<letter>(?-i:[KMBT]))?(?P<unit>ms|s|%)?(?![\w./])",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"(?:^|[\s|\[,(-])(?:global_|current_)?(?:steps?|iteration|iter)\s*[:=]?\s*(\d+)(?![\d.]*(?:it|s)/)",
    re.IGNORECASE,
)
_BAR = re.compile(r"\|\s*(\d+)/\d+ \[")
"""A progress bar's count, where the line has no other."""
_WORD_BEFORE = re.compile(r"([A-Za-z]+)[ \t]*$")
_ALONE = re.compile(r"^\s*(?:\[\w+\]:)?\s*(?P<name>[A-Za-z][A-Za-z ]+):\s*" + NUMBER + r"\s*$")

BLOCK_BEFORE, BLOCK_BEHIND = 6, 8
"""Lines of fms-fsdp's block of one step, before and behind its gradient norm."""


def read_plain(line: Line) -> Iterator[Step]:
    """``Step 5 | loss:0.79 lr:3e-4``, ``step:1 - actor/grad_norm:0.5``, ``iter 9: loss 3.1, time 12.5ms``."""
    if (TITAN_STEP.search(line.text) and "tps: " in line.text) or "| consumed samples:" in line.text:
        return
    if (block := _ALONE.match(line.text)) is not None:
        yield from _block(line, block["name"])
        return
    step, values = _STEP.search(line.text) or _BAR.search(line.text), values_of(line.text)
    if step is not None and {"loss", "grad_norm", "step_time"} & set(values):
        yield Step(line.source, line.rank, int(step[1]), values, time_of(line.text))


def values_of(text: str) -> dict[str, float]:
    """Numbers with known names in a line, in SI units; of several with one name the first."""
    values: dict[str, float] = {}
    for found in _PAIR.finditer(text):
        name = found["name"].lower()
        key, scale = SCALED.get(name) or (NAMES[name], 1.0)
        if key not in KEPT or (name == "time" and not found["unit"]):
            continue
        word = _WORD_BEFORE.search(text[: found.start()])
        if name == "loss" and word is not None and word[1].lower() not in OF_TRAINING:
            continue  # of validation, of balancing experts, ...
        value = number(next(group for group in found.groups()[1:] if group is not None))
        if value is not None:
            scale *= LETTERS[found["letter"] or ""] * UNITS.get(found["unit"] or "", 1)
            values.setdefault(key, value * scale)
    return values


def _block(line: Line, name: str) -> Iterator[Step]:
    """One number a line, the step's number above them."""
    if name.strip().lower() != "gradient norm":
        return
    values: dict[str, float] = {}
    step = None
    for text in [*line.before(BLOCK_BEFORE), line.text, *line.following(BLOCK_BEHIND)]:
        found = _ALONE.match(text)
        if found is None:
            continue
        if found["name"].strip().lower() == "step":
            if step is not None:
                break
            step = int(float(found[2]))
            values.clear()
        else:
            key, scale = SCALED.get(found["name"].strip().lower()) or (
                NAMES.get(found["name"].strip().lower(), ""), 1.0
            )  # fmt: skip
            if key in KEPT and (value := number(found[2])) is not None:
                values.setdefault(key, value * scale)
    if step is not None and values:
        yield Step(line.source, line.rank, step, values)


READERS: dict[bytes, Reader[Any]] = dict.fromkeys(
    (
        b"grad_norm=",
        b"grad_norm:",
        b"grad_norm ",
        b"gradient norm",
        b"train_loss",
        b"step_time=",
        b"step_timing",
        b" loss=",
        b" loss: ",
        b"| loss:",
        b"| loss ",
        b": loss ",
        b"train loss",
        b"pg_loss:",
        b"pg_loss=",
        b"lm_loss:",
        b"iter time (s)",
        b"tokens_per_second_per_gpu:",
    ),
    read_plain,
)
READERS = {needle: reader for needle, reader in READERS.items() if len(needle) >= 7}
"""Needles shorter than the prefilter's are left out."""
