"""How far a measurement is: a bar on a terminal, a line a stage elsewhere; on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@dataclass
class TimeBar:
    """What is being done, and how much of ``seconds`` is gone."""

    say: Callable[[str], None]
    seconds: float
    begun: float
    bar: Progress | None = None
    task: TaskID | None = None

    def stage(self, what: str) -> None:
        """Something new begins."""
        if self.bar is None:
            self.say(what)
        self.now(what)

    def now(self, what: str) -> None:
        """A part of a stage begins."""
        if self.bar is not None and self.task is not None:
            done = min(time.monotonic() - self.begun, self.seconds)
            self.bar.update(self.task, completed=done, description=what)


@contextmanager
def time_bar(say: Callable[[str], None], seconds: float) -> Iterator[TimeBar]:
    """A bar if stderr is a terminal; else ``say`` gets a line for each stage."""
    begun = time.monotonic()
    if not sys.stderr.isatty():
        yield TimeBar(say, seconds, begun)
        return
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield TimeBar(say, seconds, begun, bar, bar.add_task("", total=seconds))
