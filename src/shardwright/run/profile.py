"""A trace of some steps on every rank, for Perfetto or chrome://tracing."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from shardwright.errors import JobError


def parse_steps(text: str, first: int, last: int) -> range:
    """Steps of ``A..B``, both counted, among those the run will make.

    Raises: JobError
    """
    found = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if found is None:
        raise JobError(f"--profile {text!r} is no range of steps: write 5..7 for steps 5, 6 and 7")
    start, end = int(found[1]), int(found[2])
    if not first <= start <= end <= last:
        raise JobError(
            f"--profile {text} is not within the steps of the run, {first}..{last}: give a first step and a "
            "last one among them"
        )
    return range(start, end + 1)


class StepTrace:
    """Traces the steps of ``steps`` into ``trace-rank<n>.json``; at most one trace a run."""

    def __init__(self, steps: range, folder: Path, device: torch.device) -> None:
        self.steps = steps
        self.path = folder / f"trace-rank{dist.get_rank()}.json"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities) if steps else None
        self._running = False

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Trace ``step``, counted from 1, if it is one of them."""
        if self._profile is None or step not in self.steps:
            yield
            return
        if not self._running:
            self._profile.start()
            self._running = True
        with record_function(f"step {step}"):
            yield
        if step == self.steps[-1]:
            self.finish()

    def finish(self) -> None:
        """Write what was traced, where a run ends before the last step that was asked for."""
        if self._profile is not None and self._running:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))
            self._running = False
