"""What to do about a loss that is no number or jumps: stop, leave the update out, or go on.

Loss and norm are sums over all ranks, but each rank has its own copy, and ranks of tp work out the same loss
side by side: a device that fails may show on one of them alone. So all take the gravest of their decisions.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from shardwright.run.options import OnNan, OnSpike
from shardwright.run.record import METRICS, StepRecord

SPIKE_WINDOW = 128
"""Steps whose losses a spike is measured against, those left out not counted."""

SPIKE_DEVIATIONS = 6.0
"""Standard deviations above their mean at which a loss is a spike: beyond what batches differ by, and below
what a bad batch does. Source: window and factor are the defaults of OLMo-core's skip-step optimizers."""

LEAST_STEPS = SPIKE_WINDOW // 2
"""Steps before a spike is judged: early losses fall so fast that their spread says nothing."""

LEAST_SPREAD = 1e-3
"""Standard deviation, as a share of the mean, that is assumed at least: a loss that hardly moves any more has
no spikes of a fraction of a percent."""

MOST_SKIPS = 10
"""Updates left out in a row before the run stops: a bad batch passes, bad weights stay bad."""


def remembered(lines: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """The last of a run's steps that a watch has to know of: those of the window, and all left out since."""
    applied = [index for index, line in enumerate(lines) if not line.skipped]
    return tuple(lines[applied[-SPIKE_WINDOW] if len(applied) > SPIKE_WINDOW else 0 :])


SLOWER = "use a lower learning_rate, longer warmup_steps"


ACTIONS = ("apply", "skip", "stop")
"""What becomes of a step, the gravest last."""


class Watch:
    """Judges each step before its update; ``fault`` then says whether the run must end."""

    def __init__(
        self,
        on_nan: OnNan,
        on_spike: OnSpike,
        history: Iterable[StepRecord] = (),
        gravest: Callable[[int], int] = lambda action: action,
    ) -> None:
        """``history``: steps of the run so far. ``gravest``: the largest that any rank gives it."""
        self.on_nan, self.on_spike, self.gravest = on_nan, on_spike, gravest
        self.losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self.skips = 0
        self._reason: str | None = None
        self._advice = ""
        self._ends = False
        for line in history:
            self._note(line.loss, applied=not line.skipped)

    def admits(self, loss: float, gradient_norm: float) -> bool:
        """Whether this step's update may be applied."""
        self._reason, action = self._trouble(loss, gradient_norm), "apply"
        if self._reason is not None:
            action = self.on_nan
            self._advice = f"{SLOWER} or a clip_norm above 0"
        elif self.on_spike != "ignore" and (reason := self._spike(loss)) is not None:
            self._reason, action = reason, self.on_spike
            self._advice = f"{SLOWER}, or leave such updates out with --on-spike skip"
        agreed = ACTIONS[self.gravest(ACTIONS.index(action))]
        if agreed != action:
            self._reason, action = "only some ranks have a loss or gradient norm that is sound", agreed
            self._advice = "ranks of tp must find the same numbers: see whether a device is failing"
        self._note(loss, applied=action == "apply")
        self._ends = action == "stop" or self.skips > MOST_SKIPS
        return action == "apply"

    def fault(self, line: StepRecord) -> str | None:
        """What to tell the user if the step just judged ends the run."""
        if not self._ends:
            return None
        again = f", the {self.skips}th update in a row to be left out" if self.skips > MOST_SKIPS else ""
        where = f"step {line.step}: {self._reason} (learning rate {line.learning_rate:g}){again}"
        return f"{where}: {self._advice}; the steps before are in {METRICS}"

    def _note(self, loss: float, *, applied: bool) -> None:
        if applied:
            self.skips = 0
            self.losses.append(loss)
        else:
            self.skips += 1

    def _trouble(self, loss: float, gradient_norm: float) -> str | None:
        for name, value in (("loss", loss), ("gradient norm", gradient_norm)):
            if not math.isfinite(value):
                return f"the {name} is {value}"
        return None

    def _spike(self, loss: float) -> str | None:
        if len(self.losses) < LEAST_STEPS:
            return None
        mean = statistics.fmean(self.losses)
        spread = max(statistics.stdev(self.losses), LEAST_SPREAD * abs(mean))
        limit = mean + SPIKE_DEVIATIONS * spread
        if loss <= limit:
            return None
        return (
            f"the loss is {loss:.4f}, above {limit:.4f}: {SPIKE_DEVIATIONS:g} standard deviations over the "
            f"mean of {len(self.losses)} steps"
        )
