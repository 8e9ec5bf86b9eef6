"""Exact makespans of pipelines of many microbatches, without running every one of them.

Once a pipeline is full, its order repeats itself, and so, sooner or later, do its times: every action starts
by the same time later than the same action q microbatches before. An action waits for actions of at most
``_reach`` microbatches before its own. So if all actions of that many microbatches in a row are that much
later, all that follow are, until the forwards run out: by induction over the actions, for each start is a
maximum of sums. Then a longer run is the shorter one with whole periods put in, and its makespan that much
longer. Where times do not repeat in a short run, a longer one is taken, at last the whole.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from shardwright.errors import LayoutError
from shardwright.plan.schedule import FORWARD, FULL, INPUT, SCHEDULES, WEIGHT, Order, stage_ranks, why_not
from shardwright.plan.simulate import StageTimes, Timeline, schedule_graph, simulate
from shardwright.plan.table import Floats

TOLERANCE = 1e-12
"""Of the makespan: differences of times below it are rounding."""


class _Period(NamedTuple):
    """Microbatches after which times repeat, and how much later [s]."""

    microbatches: int
    time: float


def makespans(
    schedule: str,
    ranks: int,
    chunks: int,
    microbatches: int,
    times: StageTimes,
    hop: Floats,
    *,
    waits: bool = True,
) -> Floats:
    """From the first start to the last end [s], (cases,); exact, as that of ``simulate``.

    If no rank ``waits`` for others before its next step, it is that of the rank with the longest.

    ``times`` have shape (cases, stages) and no time of their own for fused pairs; ``hop`` is the time
    of a transfer, (cases,) or (cases, stages of all pipelines - 1).

    Raises: LayoutError: the schedule has no such order.
    """
    fault = why_not(schedule, ranks, chunks, microbatches)
    if fault:
        raise LayoutError(fault)
    forward, input_grad, weight_grad = (np.asarray(each) for each in times[:3])
    hop = hop.reshape(len(hop), -1)
    backward = input_grad + weight_grad if times.backward is None else np.asarray(times.backward)
    if schedule in ("GPipe", "LoopedBFS"):
        return _all_forwards_first(ranks, chunks, microbatches, forward, backward, hop)
    found = np.empty(len(hop))
    waiting = {_first_run(schedule, ranks, microbatches): list(range(len(hop)))}
    while waiting:
        run = min(waiting)
        cases = waiting.pop(run)
        graph = schedule_graph(schedule, ranks, chunks, run)
        columns = StageTimes(*(each[cases] for each in (forward, input_grad, weight_grad, backward)))
        line = simulate(graph, columns, hop[cases])
        if run == microbatches:
            found[cases] = line.makespan if waits else line.span.max(axis=-1)
            continue
        for place, (case, period) in enumerate(zip(cases, _periods(line), strict=True)):
            left = microbatches - run
            each = period.microbatches * SCHEDULES[schedule].pipelines if period else ranks
            if period and left % each == 0:
                whole = line.makespan[place] if waits else line.span[place].max()
                found[case] = whole + left // each * period.time
            else:
                more = left % each if period else _whole_rounds(run // 2, ranks)
                waiting.setdefault(min(run + more, microbatches), []).append(case)
    return found


def _whole_rounds(least: int, ranks: int) -> int:
    return -(-least // ranks) * ranks


def _first_run(schedule: str, ranks: int, microbatches: int) -> int:
    """A run that is long enough to show most periods, and shorter by a multiple of ``ranks``; or all."""
    row = SCHEDULES[schedule]
    if row.equal_rounds and microbatches % ranks:
        return microbatches  # rounds of another size, which a shorter run would not have
    rounds = 5 if schedule in ("1F1B", "ZB-H1", "DualPipe") else 8  # ``_reach`` is one round there, or two
    return min(microbatches % ranks + ranks * rounds * row.pipelines, microbatches)


def _reach(order: Order) -> int:
    """Most microbatches between an action and the one before it on its rank."""
    step = np.abs(np.diff(order.microbatch))
    step[order.starts[1:-1] - 1] = 0  # from one rank to the next
    return int(step.max(initial=0)) + 1


def _periods(line: Timeline) -> list[_Period | None]:
    """The period of the times of each case where the pipeline is full, if they have one there."""
    order = line.graph.order
    ends, reach = _by_microbatch(order, line.end), _reach(order)
    last = order.microbatches - reach  # from here on the forwards run out
    unit = order.ranks if SCHEDULES[order.schedule].equal_rounds else 1
    if last < 2 * reach + unit:
        return [None] * len(ends)
    tolerance = TOLERANCE * line.makespan
    return [_period(each[:, :last], reach, unit, most) for each, most in zip(ends, tolerance, strict=True)]


def _period(ends: Floats, reach: int, unit: int, tolerance: float) -> _Period | None:
    """The least period of ends, (actions, microbatches), over the last ``reach`` microbatches."""
    windows = sliding_window_view(ends[0, reach:], reach)[::-1]
    steady = np.ptp(windows[0] - windows, axis=1) <= tolerance
    steady[0] = False
    for shift in unit * np.flatnonzero(steady[::unit]):
        later = ends[:, -reach:] - ends[:, -reach - shift : -shift]
        if np.ptp(later) <= tolerance:
            return _Period(int(shift), float(later.mean()))
    return None


def _by_microbatch(order: Order, end: Floats) -> Floats:
    """Ends of F, of B or I, and of B or W of each stage, (cases, actions, microbatches)."""
    ends = np.empty((len(end), 3, order.stages, order.microbatches))
    for slot, kinds in enumerate(((FORWARD,), (FULL, INPUT), (FULL, WEIGHT))):
        rows = np.flatnonzero(np.isin(order.kind, kinds))
        ends[:, slot, order.stage[rows], order.microbatch[rows]] = end[:, rows]
    return ends.reshape(len(end), -1, order.microbatches)


# All forwards before all backwards


def _all_forwards_first(
    ranks: int, chunks: int, microbatches: int, forward: Floats, backward: Floats, hop: Floats
) -> Floats:
    """GPipe and LoopedBFS: stages run all their microbatches in a row, so that a stage is one operation."""
    free = np.zeros((ranks, len(hop), 1))
    stages = list(range(ranks * chunks))
    rank = stage_ranks("LoopedBFS", ranks, chunks)
    ready: Floats = np.zeros((len(hop), microbatches))
    before = np.arange(microbatches)
    way = [(stage, forward) for stage in stages] + [(stage, backward) for stage in reversed(stages)]
    hop = np.broadcast_to(hop, (len(hop), max(len(stages) - 1, 1)))
    for (stage, times), (following, _) in pairwise([*way, way[-1]]):
        each = times[:, stage, None]
        waited = np.maximum.accumulate(ready - before * each, axis=1)
        ready = (before + 1) * each + np.maximum(waited, free[rank[stage]])
        free[rank[stage]] = ready[:, -1:]
        if rank[stage] != rank[following]:
            ready = ready + hop[:, min(stage, following), None]
    return np.asarray(free.max(axis=(0, 2)))
