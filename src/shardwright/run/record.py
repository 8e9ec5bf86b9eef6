"""The record of a run: its folder, its files, and the line of progress.

metrics.jsonl   one line a step, written as it ends
ranks.json      what each rank holds
checkpoints/    where asked: run/checkpoint.py
events/         for TensorBoard, where asked
trace-rank0.json, ...   where asked: run/profile.py
result.json     when all steps are done, a person stops the run, or the loss is no number any more:
                what was reached, what was predicted, what it ran on
"""

import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from shardwright.errors import PlanFileError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.units import format_bytes, format_duration

PLAN, METRICS, RESULT = "plan.toml", "metrics.jsonl", "result.json"
EVENTS, CHECKPOINTS = "events", "checkpoints"

METERED_STEP = 1
"""Index of the step whose memory is measured: the second, because the first also creates optimizer state."""

LIVE_INTERVAL_S = 0.1
PLAIN_INTERVAL_S = 5.0
"""Shortest time between two lines of progress, on a terminal and elsewhere."""


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl. ``step`` counts from 1."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int  # unmasked, of the global batch
    step_time: float  # s
    tokens_per_s: float  # all tokens of the global batch, masked ones too
    mfu: float | None
    memory: int | None  # peak on rank 0 so far, B
    eval_loss: float | None
    skipped: bool = False  # the update was left out
    # of a model with experts, the worst layer: copies of its fullest and emptiest expert over the mean
    fullest_expert: float | None = None
    emptiest_expert: float | None = None
    balance_loss: float | None = None  # of all layers, with its weight


def check_unused(folder: Path) -> None:
    """Raises: PlanFileError: ``folder`` already holds a run."""
    if any((folder / name).exists() for name in (METRICS, RESULT, CHECKPOINTS)):
        raise PlanFileError(
            f"run folder {folder} already holds a run: give another --run-dir, or continue it with --resume"
        )


def prepare_run_folder(folder: Path) -> None:
    """Make ``folder``.

    Raises: PlanFileError: it already holds a run, or cannot be made.
    """
    check_unused(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise PlanFileError(
            f"cannot make run folder {folder}: {fault.strerror}: give another --run-dir"
        ) from None


def read_lines(folder: Path, steps: int) -> list[StepRecord]:
    """The first ``steps`` steps of a run that was recorded in ``folder``.

    Raises: PlanFileError: they are not all there.
    """
    lines = []
    with contextlib.suppress(OSError, ValueError, TypeError):  # the last line may be half of one
        for text in (folder / METRICS).read_text(encoding="utf-8").splitlines()[:steps]:
            values = json.loads(text)
            values |= {name: math.nan for name in ("loss", "gradient_norm") if values[name] is None}
            lines.append(StepRecord(**values))
    if [line.step for line in lines] != list(range(1, steps + 1)):
        raise PlanFileError(
            f"{folder / METRICS} does not hold the {steps} steps before the checkpoint: put it back, or "
            "start another run with another --run-dir"
        )
    return lines


class Record:
    """What rank 0 writes and shows of a run."""

    def __init__(
        self,
        folder: Path,
        job: Job,
        layout: Layout,
        plan_text: str,
        tensorboard: bool,
        lines: Sequence[StepRecord] = (),
    ) -> None:
        """``lines``: steps of a run that goes on; what its files have beyond them is dropped."""
        self.folder, self.job, self.layout = folder, job, layout
        self.lines = list(lines)
        _write_whole(folder / PLAN, plan_text)
        _write_whole(folder / METRICS, "".join(map(_metrics_line, lines)))
        (folder / RESULT).unlink(missing_ok=True)  # of the steps before; it is written again at the end
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")
        self._events = _summary_writer(folder, len(self.lines)) if tensorboard else None
        self._progress = Progress(job.steps)

    def __enter__(self) -> "Record":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._metrics.close()
        if self._events is not None:
            self._events.close()

    def add(self, line: StepRecord) -> None:
        """Put one step on disk and on the screen."""
        self.lines.append(line)
        self._metrics.write(_metrics_line(line))
        self._metrics.flush()
        if self._events is not None:
            for name, value in asdict(line).items():
                if name != "step" and value is not None:
                    self._events.add_scalar(name, value, line.step)
        self._progress.show(line, steady_step_time(self.lines))

    def finish(self, ending: Mapping[str, Any]) -> dict[str, Any]:
        """Write result.json, whole or not at all, and return its content."""
        step_time = steady_step_time(self.lines)
        result = {
            "steps": len(self.lines),
            "losses": [line.loss for line in self.lines],
            "gradient_norms": [line.gradient_norm for line in self.lines],
            "eval_losses": [
                {"step": line.step, "loss": line.eval_loss}
                for line in self.lines
                if line.eval_loss is not None
            ],
            "skipped_steps": [line.step for line in self.lines if line.skipped],
            "step_time": step_time,
            "tokens_per_s": None if step_time is None else self.job.tokens_per_step / step_time,
            "mfu": _median([line.mfu for line in self.lines[METERED_STEP + 1 :] if line.mfu is not None]),
            **ending,
            "run_directory": str(self.folder),
            "layout": self.layout.model_dump(mode="json"),
            "seed": self.job.seed,
        }
        result = _finite(result)
        _write_whole(self.folder / RESULT, json.dumps(result, indent=2) + "\n")
        return result


class Progress:
    """One line that changes on a terminal; a line every few seconds elsewhere. On stderr."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.console = Console(file=sys.stderr, highlight=False)
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self._interval = LIVE_INTERVAL_S if self._live else PLAIN_INTERVAL_S
        self._shown = -math.inf

    def start(self) -> None:
        """Take the line of the terminal."""
        if self._live is not None:
            self._live.start()

    def stop(self) -> None:
        """Give it back, the last line left standing."""
        if self._live is not None:
            self._live.stop()

    def show(self, line: StepRecord, step_time: float | None) -> None:
        """Show a step, unless one was shown just before; the last one always."""
        now = time.monotonic()
        if now - self._shown < self._interval and line.step < self.steps:
            return
        self._shown = now
        text = progress_line(line, self.steps, step_time)
        if self._live is not None:
            self._live.update(text, refresh=True)
        else:
            self.console.print(text, soft_wrap=True, markup=False)


def progress_line(line: StepRecord, steps: int, step_time: float | None) -> str:
    """Step, loss, gradient norm, tokens/s, MFU and memory where known, time left."""
    parts = [
        f"step {line.step:>{len(str(steps))}}/{steps}",
        f"loss {line.loss:.4f}",
        f"gradient norm {line.gradient_norm:.3f}",
        f"{line.tokens_per_s:,.0f} tokens/s",
    ]
    if line.eval_loss is not None:
        parts.insert(2, f"held out {line.eval_loss:.4f}")
    if line.skipped:
        parts.insert(1, "update left out")
    if line.fullest_expert is not None:
        parts.append(f"fullest expert {line.fullest_expert:.1f} x mean")
    if line.mfu is not None:
        parts.append(f"MFU {line.mfu:.1%}")
    if line.memory is not None:
        parts.append(f"memory {format_bytes(line.memory)}")
    left = (steps - line.step) * (step_time or line.step_time)
    return "  ".join([*parts, f"{format_duration(left)} left"])


def steady_step_time(lines: list[StepRecord]) -> float | None:
    """Median time of the steps after the first and the metered one [s]; of all while there are no others."""
    return _median([line.step_time for line in lines[METERED_STEP + 1 :] or lines])


def _summary_writer(folder: Path, steps: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=str(folder / EVENTS), purge_step=steps + 1 if steps else None)


def _metrics_line(line: StepRecord) -> str:
    return json.dumps(_finite(asdict(line))) + "\n"


def _write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _finite(value: Any) -> Any:
    """The same with None for what JSON cannot say (nan and infinities)."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
