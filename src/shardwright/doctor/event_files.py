"""TensorBoard's event files as steps, read by tensorboard's own reader."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.doctor.evidence import Step
from shardwright.doctor.finding import Source
from shardwright.doctor.step_log import NAMES
from shardwright.errors import EvidenceError, MissingExtraError
from shardwright.units import GiB

LARGEST = 128 << 20
"""Bytes of an event file that is read: one of scalars alone is of a million steps then."""

TAGS: Mapping[str, tuple[str, float]] = {
    "loss_metrics/global_avg_loss": ("loss", 1),
    "throughput(tps)": ("tokens_per_s_per_gpu", 1),
    "tflops": ("flops_per_s", 1e12),
    "mfu(%)": ("mfu", 0.01),
    "time_metrics/end_to_end(s)": ("step_time", 1),
    "time_metrics/data_loading(s)": ("data_time", 1),
    "memory/max_reserved(gib)": ("memory", GiB),
    "memory/max_reserved(%)": ("memory_share", 0.01),
    "memory/num_alloc_retries": ("alloc_retries", 1),
    "grad-norm": ("grad_norm", 1),
    "iteration-time": ("step_time", 1),
    "batch-size": ("global_batch", 1),
    "train_step_timing in s": ("step_time", 1),
    "train/samples/train_loss": ("loss", 1),
}
"""Tags of torchtitan, Megatron-LM, NeMo and DeepSpeed, in lower case, by our names, with what makes them SI.
Sources: torchtitan/components/metrics.py, megatron/training/training.py, deepspeed/runtime/engine.py."""


def is_events_head(head: bytes) -> bool:
    """Whether a file begins as an event file: a record of a time and of its version."""
    return head[12:13] == b"\x09" and b"brain.Event:" in head[:64]


def read_events(name: str) -> Iterator[Step]:
    """Its scalars of known tags, one step for each step; an event file that is cut off is read up to there.

    Raises: MissingExtraError: tensorboard is not installed. EvidenceError: the file is no file on disk, or is
    damaged.
    """
    path = Path(name)
    if not path.is_file():
        raise EvidenceError(
            "is an event file in an archive or a pipe, and is read from disk alone: unpack it"
        )
    if path.stat().st_size > LARGEST:
        raise EvidenceError(
            f"is an event file of {path.stat().st_size >> 20} MiB, more than {LARGEST >> 20}: images or "
            "histograms fill it; give the scalars as CSV or the log"
        )
    steps: dict[int, dict[str, float]] = {}
    for event in _events(name):
        for value in event.summary.value:
            found = _named(value.tag)
            if found is None or (number := _number(value)) is None:
                continue
            key, scale = found
            steps.setdefault(event.step, {})[key] = number * scale
    for step, values in sorted(steps.items()):
        text = ", ".join(f"{key} {value:.6g}" for key, value in values.items())
        yield Step(Source(name, None, f"step {step}: {text}"), None, step, values)


def _named(tag: str) -> tuple[str, float] | None:
    plain = tag.strip().lower()
    if plain in TAGS:
        return TAGS[plain]
    key = NAMES.get(plain)
    return None if key is None else (key, 1)


def _number(value: Any) -> float | None:
    """A scalar, in the older form or in the newer one."""
    from tensorboard.util import tensor_util

    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
        return None  # a shape alone may ask for all memory
    found = tensor_util.make_ndarray(value.tensor)
    return float(found.item()) if found.dtype.kind in "fiu" else None


def _events(name: str) -> Iterator[Any]:
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    except ImportError:
        raise MissingExtraError("train", f"reading the event file {name}") from None
    try:
        yield from LegacyEventFileLoader(name).Load()
    except DecodeError:
        raise EvidenceError("is a damaged event file") from None
