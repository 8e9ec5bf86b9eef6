"""Lines of training logs, one a step: torchtitan, Megatron, transformers, DeepSpeed, NeMo, metrics files."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.doctor.clock import time_of
from shardwright.doctor.evidence import Step
from shardwright.doctor.finding import Source
from shardwright.doctor.lines import Line, Reader
from shardwright.units import GiB

NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf|NaN|Inf))"
_TITAN = {
    "loss": re.compile(r"\bloss: +" + NUMBER),
    "grad_norm": re.compile(r"\bgrad_norm: +" + NUMBER),
    "memory": re.compile(r"\bmemory: +" + NUMBER + "GiB"),
    "memory_share": re.compile(r"\bmemory: +[\d.]+GiB\(" + NUMBER + "%"),
    "tokens_per_s_per_gpu": re.compile(r"\b(?:tps|wps): +" + NUMBER),
    "tflops": re.compile(r"\btflops: +" + NUMBER),
    "mfu": re.compile(r"\bmfu: +" + NUMBER + "%"),
}
TITAN_STEP = re.compile(r"\bstep: +(\d+)")
_MEGATRON_STEP = re.compile(r"\biteration +(\d+)/ *\d+ \|")
_MEGATRON = {
    "loss": re.compile(r"(?:lm loss|reduced_train_loss|loss): +" + NUMBER),
    "grad_norm": re.compile(r"grad norm: +" + NUMBER),
    "step_time": re.compile(r"elapsed time per iteration \(ms\): +" + NUMBER),
    "global_batch": re.compile(r"global batch size: +" + NUMBER),
    "tflops": re.compile(r"throughput per GPU \(TFLOP/s/GPU\): +" + NUMBER),
    "tokens_per_s_per_gpu": re.compile(r"tokens per gpu per second \(tgs\): +" + NUMBER),
    "skipped": re.compile(r"number of skipped iterations: +" + NUMBER),
    "nan": re.compile(r"number of nan iterations: +" + NUMBER),
    "samples": re.compile(r"consumed samples: +" + NUMBER),
    "learning_rate": re.compile(r"learning rate: +" + NUMBER),
}
_DICT = re.compile(r"\{['\"](?:\w[\w/ .-]*)['\"]\s*:.*?\}")
NAMES: Mapping[str, str] = {
    "loss": "loss",
    "train_loss": "loss",
    "train/loss": "loss",
    "lm loss": "loss",
    "reduced_train_loss": "loss",
    "actor/pg_loss": "loss",
    "policy_loss": "loss",
    "pg_loss": "loss",
    "global_avg_loss": "loss",
    "grad_norm": "grad_norm",
    "train/grad_norm": "grad_norm",
    "actor/grad_norm": "grad_norm",
    "gradient_norm": "grad_norm",
    "gradnorm": "grad_norm",
    "grad norm": "grad_norm",
    "gn": "grad_norm",
    "step_time": "step_time",
    "iteration_time": "step_time",
    "step_timing": "step_time",
    "train_step_timing": "step_time",
    "time": "step_time",
    "sec_per_step": "step_time",
    "learning_rate": "learning_rate",
    "lr": "learning_rate",
    "tokens_per_s": "tokens_per_s",
    "tokens_per_second": "tokens_per_s",
    "tok_per_s": "tokens_per_s",
    "tokens_per_s_per_gpu": "tokens_per_s_per_gpu",
    "tokens_per_second_per_gpu": "tokens_per_s_per_gpu",
    "tps": "tokens_per_s_per_gpu",
    "mfu": "mfu",
    "memory": "memory",
    "peak_memory": "memory",
    "tokens": "tokens",
    "num_tokens": "tokens",
    "num_input_tokens_seen": "tokens_seen",
    "data_time": "data_time",
    "num_alloc_retries": "alloc_retries",
    "alloc_retries": "alloc_retries",
    "global_batch": "global_batch",
    "global_batch_size": "global_batch",
    "seq": "seq",
    "gpus": "gpus",
    "world_size": "gpus",
    "samples_per_second": "samples_per_s",
    "train_samples_per_second": "samples_per_s",
    "bubble": "bubble",
    "microbatches": "microbatches",
    "pp": "pp",
    "microbatch": "part",
    "part": "part",
    "peak_flops": "peak_flops",
    "compute_time": "compute_time",
    "forward_time": "compute_time",
    "stage_time": "compute_time",
    "stage": "stage",
    "pp_rank": "stage",
    "expert_grad_norm": "expert_grad_norm",
    "fullest_expert": "fullest_expert",
    "max_expert_load": "fullest_expert",
}
"""Names that programs use, by ours."""

STEP_NAMES = (
    "step",
    "global_step",
    "current_steps",
    "iteration",
    "iter",
    "train/global_step",
    "_step",
    "trainer/global_step",
)


def number(text: Any) -> float | None:
    """A number as logs print it."""
    if isinstance(text, bool) or text is None:
        return None
    try:
        return float(str(text).replace(",", "").rstrip("%"))
    except ValueError:
        return None


def _found(patterns: Mapping[str, re.Pattern[str]], text: str) -> dict[str, float]:
    values = {}
    for name, pattern in patterns.items():
        if (found := pattern.search(text)) is not None and (value := number(found[1])) is not None:
            values[name] = value
    return values


def read_titan(line: Line) -> Iterator[Step]:
    """``step: 30  loss:  7.7158  memory: 49.58GiB(52.20%)  tps: 5,966  tflops: 345.53  mfu: 34.94%``."""
    step, values = TITAN_STEP.search(line.text), _found(_TITAN, line.text)
    if step is None or not values:
        return
    for name, scale in (("memory", GiB), ("memory_share", 0.01), ("mfu", 0.01), ("tflops", 1e12)):
        if name in values:
            values[name] *= scale
    if "tflops" in values:
        values["flops_per_s"] = values.pop("tflops")
    yield Step(line.source, line.rank, int(step[1]), values, time_of(line.text))


def read_megatron(line: Line) -> Iterator[Step]:
    """``iteration 10/ 100 | consumed samples: ... | elapsed time per iteration (ms): 5245.2 | ...``."""
    step, values = _MEGATRON_STEP.search(line.text), _found(_MEGATRON, line.text)
    if step is None or not values:
        return
    if "step_time" in values:
        values["step_time"] /= 1e3
    if "tflops" in values:
        values["flops_per_s"] = values.pop("tflops") * 1e12
    yield Step(line.source, line.rank, int(step[1]), values, time_of(line.text))


def read_mapping(line: Line) -> Iterator[Step]:
    """A dictionary or a line of JSON with known names in it."""
    found = _DICT.search(line.text)
    if found is None:
        return
    try:
        values = json.loads(found[0])
    except ValueError:
        try:
            values = ast.literal_eval(re.sub(r"(?<=[:\s,\[])-?(?:nan|inf)\b", "None", found[0]))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return
    if isinstance(values, Mapping):
        step = step_of_mapping(line.source, values, line.rank)
        if step is not None:
            yield step._replace(time=time_of(line.text))


def step_of_mapping(source: Source, values: Any, rank: int | None = None) -> Step | None:
    """A step from names and values; None if nothing of it is known."""
    if not isinstance(values, Mapping):
        return None
    kept: dict[str, float] = {}
    for name, value in values.items():
        key = NAMES.get(str(name).strip().lower())
        if key is not None and (read := number(value)) is not None:
            kept[key] = read
        elif key in ("loss", "grad_norm") and value is None:
            kept[key] = float("nan")
    where = next((number(values[name]) for name in STEP_NAMES if name in values), None)
    own = number(values.get("rank"))
    rank = rank if own is None else int(own)
    if not kept:
        return None
    return Step(source, rank, None if where is None else int(where), kept)


READERS: dict[bytes, Reader[Any]] = {
    b" memory: ": read_titan,
    b"grad_norm: ": read_titan,
    b"tflops: ": read_titan,
    b"elapsed time per iteration": read_megatron,
    b'"step":': read_mapping,
    b"'step':": read_mapping,
    b'"iteration"': read_mapping,
    b'"global_step"': read_mapping,
    b"'global_step'": read_mapping,
    b"'loss':": read_mapping,
    b"'grad_norm'": read_mapping,
    b'"loss":': read_mapping,
    b'"grad_norm"': read_mapping,
    b'"step_time"': read_mapping,
    b'"gradient_norm"': read_mapping,
    b'"tokens_per_s': read_mapping,
    b"'train_runtime'": read_mapping,
    b'"current_steps"': read_mapping,
    b'"tokens":': read_mapping,
    b'"memory":': read_mapping,
}
