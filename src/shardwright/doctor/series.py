"""Steps as series: which run each belongs to, and numbers of two runs at the same steps."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.doctor.evidence import Evidence, Step
from shardwright.doctor.finding import Source
from shardwright.doctor.setting import Setting


@dataclass
class Series:
    """The steps of one run, in order, and its setting if one is known."""

    name: str
    steps: list[Step] = field(default_factory=list)
    setting: Setting | None = None

    def values(self, key: str) -> dict[int, float]:
        """A quantity by step; steps without a number are counted from 1."""
        found: dict[int, float] = {}
        for index, step in enumerate(self.steps, start=1):
            if key in step.values:
                found.setdefault(step.step if step.step is not None else index, step.values[key])
        return found

    def source(self, step: int) -> Source:
        """The line of a step."""
        for index, each in enumerate(self.steps, start=1):
            if (each.step if each.step is not None else index) == step:
                return each.source
        return self.steps[0].source

    def first(self, key: str) -> float | None:
        """The first value of a quantity."""
        return next((step.values[key] for step in self.steps if key in step.values), None)

    def median(self, key: str, skip: int = 0) -> float | None:
        """Median of a quantity, the first steps left out where there are more."""
        found = [step.values[key] for step in self.steps if key in step.values]
        finite = [value for value in found[skip:] or found if math.isfinite(value)]
        return statistics.median(finite) if finite else None

    @property
    def global_batch(self) -> float | None:
        """Sequences of a step, as the log says or the setting."""
        own = self.first("global_batch")
        if own is not None:
            return own
        return float(self.setting.global_batch) if self.setting and self.setting.global_batch else None

    @property
    def seq(self) -> float | None:
        """Tokens of a sequence."""
        own = self.first("seq")
        return (
            own
            if own is not None
            else (float(self.setting.seq) if self.setting and self.setting.seq else None)
        )

    @property
    def tokens(self) -> float | None:
        """Tokens of a step, as the log says, or by batch and sequence."""
        own = self.first("tokens")
        if own is not None:
            return own
        return self.global_batch * self.seq if self.global_batch and self.seq else None


EVENTS = "events.out.tfevents"
"""How names of TensorBoard's files begin."""

SAME_DIGITS = 1e-3
"""By how much a number of an event file may differ from the same one in a log, which is rounded."""


def series_of(evidence: Evidence) -> list[Series]:
    """One series a file, of the first rank that prints in it; an event file goes on with the one before it in
    its folder, and tells nothing new of a run that is there as a log too."""
    files: dict[str, list[Step]] = {}
    for step in evidence.of(Step):
        files.setdefault(step.source.file, []).append(step)
    found = []
    for name, steps in files.items():
        first = next((step.rank for step in steps if step.rank is not None), None)
        kept = [step for step in steps if step.rank in (None, first)]
        found.append(Series(name, kept))
    found = _without_events_of_logs(_joined_events(found))
    _give_settings(found, evidence)
    return found


def _is_events(series: Series) -> bool:
    return series.name.rpartition("/")[2].startswith(EVENTS)


def _joined_events(found: Sequence[Series]) -> list[Series]:
    """Event files of one folder as one run, where each begins behind the end of the one before."""
    joined: list[Series] = []
    for series in found:
        before = joined[-1] if joined and _is_events(series) and _is_events(joined[-1]) else None
        same = before is not None and _folder(before.name) == _folder(series.name)
        if before is not None and same and (series.steps[0].step or 0) > (before.steps[-1].step or 0):
            before.steps += series.steps
        else:
            joined.append(series)
    return joined


def _without_events_of_logs(found: Sequence[Series]) -> list[Series]:
    logs = [series for series in found if not _is_events(series)]
    return [series for series in found if not _is_events(series) or not any(_same(series, o) for o in logs)]


def _same(events: Series, log: Series) -> bool:
    """Whether two files hold the same numbers of one run."""
    for key in ("loss", "grad_norm", "step_time", "tokens_per_s_per_gpu"):
        a, b = events.values(key), log.values(key)
        common = set(a) & set(b)
        if common:
            return all(math.isclose(a[step], b[step], rel_tol=SAME_DIGITS) for step in common)
    return False


def _give_settings(found: Sequence[Series], evidence: Evidence) -> None:
    """Settings by file, by folder, by name; else in their order, if there are as many as runs."""
    stated = [setting for setting in evidence.stated if setting.framework != "given"]
    for series in found:
        own = [s for s in stated if s.source.file == series.name]
        own = own or [s for s in stated if _folder(s.source.file) == _folder(series.name) != ""]
        own = own or [s for s in stated if _stem(s.source.file) == _stem(series.name)]
        if len(own) == 1 or (own and own[0].source.file == series.name):
            series.setting = own[0]
    if len(stated) == len(found) and all(series.setting is None for series in found):
        for series, setting in zip(found, stated, strict=True):
            series.setting = setting
    for series in found:
        if series.setting is None and len(stated) <= 1:
            series.setting = stated[0] if stated else evidence.given


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]


def is_resumed(one: Series, other: Series) -> bool:
    """Whether one run begins in the middle of the other."""
    starts = [min(series.values("loss"), default=0) for series in (one, other)]
    common = set(one.values("loss")) & set(other.values("loss"))
    return bool(common) and starts[0] != starts[1] and max(starts) > 2


@dataclass(frozen=True)
class Ratio:
    """Of a quantity of two runs at the steps that both have: median, spread, and how many."""

    median: float
    low: float
    high: float
    first: float
    count: int

    @property
    def constant(self) -> bool:
        """Whether it is the same at all of them."""
        return self.high - self.low <= 0.04 * abs(self.median)

    def near(self, value: float, tolerance: float) -> bool:
        """Whether the ratio is about ``value``."""
        return abs(self.median - value) <= tolerance * abs(value)


MOST_COMPARED = 8
"""First steps that are compared: later ones differ because weights do."""


def ratio_of(one: Series, other: Series, key: str) -> Ratio | None:
    """The other's over the one's, at the first steps that both have."""
    a, b = one.values(key), other.values(key)
    steps = sorted(set(a) & set(b))[:MOST_COMPARED]
    found = [
        b[step] / a[step] for step in steps if a[step] and math.isfinite(a[step]) and math.isfinite(b[step])
    ]
    if not found:
        return None
    return Ratio(statistics.median(found), min(found), max(found), found[0], len(found))
