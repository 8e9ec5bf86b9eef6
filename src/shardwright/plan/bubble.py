"""Closed forms of a pipeline's idle time and of what it holds, for the table of layouts; all broadcast.

They take ranks and chunks of equal times. For unequal stages the slowest stage's times give an upper bound,
``uneven_makespan_bounds`` gives two for one chunk, and plan/simulate.py gives the exact answer for any.

Where ``FORMS`` says exact, tests hold a form equal to the simulation (p <= 8, v <= 4, m <= 32). Some are not
in the papers: a makespan is the longest way through the actions, so the largest of some sums of times, and
these sums were solved for from simulated makespans. Those tests are their only proof.

Symbols: p ranks, v chunks, m microbatches; f, i, w what a rank spends on the forward, the input gradient and
the weight gradient of one microbatch in all its chunks, b = i + w; tau one hop. A fused pair is as long as
its parts, see ``fused_saving``.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.plan.schedule import SCHEDULES, round_size
from shardwright.plan.table import Floats

Bools = NDArray[np.bool_]


class RankTimes(NamedTuple):
    """Seconds a rank spends on one microbatch, in all its chunks, and of one hop to another rank."""

    forward: ArrayLike
    input_grad: ArrayLike
    weight_grad: ArrayLike
    hop: ArrayLike = 0.0


class _Case(NamedTuple):
    """Columns of a question, which broadcast; ``least`` is min(f, i, w), and tau is 0 on one rank."""

    p: Floats
    v: Floats
    m: Floats
    f: Floats
    i: Floats
    w: Floats
    tau: Floats
    b: Floats
    least: Floats


class Form(NamedTuple):
    """Closed form of the idle time of a rank, makespan-based: ``otherwise`` is what it is where not exact."""

    value: Callable[[_Case], Floats]
    is_exact: Callable[[_Case], Bools]
    formula: str
    exact: str = "always"
    otherwise: str = "estimate"


def _gpipe(c: _Case) -> Floats:
    return (c.p - 1) * (c.f + c.b + 2 * c.tau)


def _one_forward_one_backward(c: _Case) -> Floats:
    return (c.p - 1) * (c.f + c.b) + 2 * (2 * c.p - 3 + c.m - c.p - (c.m - 2) // c.p) * c.tau


def _breadth_first(c: _Case) -> Floats:
    """A chunk's turn is the longer of its microbatches' time and of one microbatch's way round the ranks."""
    waits = sum(np.maximum(0.0, c.p * (each / c.v + c.tau) - c.m * each / c.v) for each in (c.f, c.b))
    return np.asarray((c.p - 1) * ((c.f + c.b) / c.v + 2 * c.tau) + (c.v - 1) * waits)


def _interleaved(c: _Case) -> Floats:
    steps = c.p - 1 + (c.v - 1) * np.maximum(0.0, c.p - c.m)
    return np.asarray(steps * (c.f + c.b) / c.v + 2 * (c.p * c.v - 1) * c.tau)


def _zero_bubble(c: _Case) -> Floats:
    filled = (np.minimum(c.m, c.p) - 1) * c.least
    return ((c.p - 1) * (c.f + c.i) - filled) / c.v + (4 * (c.p - 1) + (c.v - 1) * c.p) * c.tau


def _zb_h2(c: _Case) -> Floats:
    return np.asarray((c.p - 1) * (c.f + np.maximum(0.0, c.i - 2 * c.least) + c.tau))


def _zb_v(c: _Case) -> Floats:
    q, least = c.p - 1, np.minimum(c.i / 2, c.w)
    longest = np.maximum(q * (c.i - least), (np.maximum(c.f, c.i) + (q - 1) * c.w) / 2)
    longest = np.maximum(longest, q * (c.f - least) + np.maximum(c.i - c.f, -c.w) / 2)
    return np.where(q > 0, longest + (5 * c.p - 7) * c.tau, 0.0)


def _two_ways(half: Floats, f: Floats, i: Floats, w: Floats) -> Floats:
    q = half - 1
    longest = np.maximum(2 * q * f, (q - 1) * f + q * i)
    return np.where(q > 0, longest + q * np.maximum(0.0, i - w), 0.0)


def _dualpipe_v(c: _Case) -> Floats:
    hops = 2 * (c.p - 1) / c.p * c.m + 2 * (c.p - 2)
    return _two_ways(c.p, c.f / 2, c.i / 2, c.w / 2) + hops * c.tau


def _dualpipe(c: _Case) -> Floats:
    hops = (c.p - 1) / c.p * c.m + 3 * (c.p / 2 - 1)
    return _two_ways(c.p / 2, c.f, c.i, c.w) + hops * c.tau


def _always(c: _Case) -> Bools:
    return np.asarray(True)


def _without_hops(c: _Case) -> Bools:
    return np.asarray(c.tau == 0)


def _interleaved_exact(c: _Case) -> Bools:
    rounds = (c.m % c.p == 0) | (c.m < c.p)
    return np.asarray((c.tau == 0) | (rounds & (c.tau <= np.minimum(c.f, c.b) / c.v)))


def _zero_bubble_exact(c: _Case) -> Bools:
    rounds = (c.m >= 2 * c.p) & ((c.m % c.p == 0) | (c.v == 1))
    with_hops = rounds & (c.w <= np.minimum(c.f, c.i)) & (c.tau <= c.w / (2 * c.v))
    return np.asarray(np.where(c.tau == 0, (c.m >= c.p) | (c.v == 1), with_hops))


def _enough_to_fill(c: _Case) -> Bools:
    return np.asarray((c.tau == 0) & (c.m >= 2 * c.p - 1))


FORMS = {
    "GPipe": Form(_gpipe, _always, "(p-1)(f+b + 2 tau)"),
    "1F1B": Form(_one_forward_one_backward, _always, "(p-1)(f+b) + 2(2p-3 + m-p - floor((m-2)/p)) tau"),
    "LoopedBFS": Form(
        _breadth_first,
        _always,
        "(p-1)((f+b)/v + 2 tau) + (v-1)(max(0, p(f/v + tau) - m f/v) + max(0, p(b/v + tau) - m b/v))",
    ),
    "Interleaved1F1B": Form(
        _interleaved,
        _interleaved_exact,
        "(p-1 + (v-1) max(0, p-m))(f+b)/v + 2(pv-1) tau",
        "without hops; with tau <= min(f, b)/v if m is below p or a multiple of it",
    ),
    "InterleavedZeroBubble": Form(
        _zero_bubble,
        _zero_bubble_exact,
        "((p-1)(f+i) - (min(m,p)-1) min(f,i,w))/v + (4(p-1) + (v-1)p) tau",
        "without hops if m >= p; with tau <= w/(2v) if w <= min(f, i) and m is 2p, 3p, ...",
    ),
    "ZBVZeroBubble": Form(
        _zb_v,
        _enough_to_fill,
        "max((p-1)(i-n), (max(f, i) + (p-2)w)/2, (p-1)(f-n) + max(i-f, -w)/2) + (5p-7) tau, n = min(i/2, w)",
        "without hops if m >= 2p-1",
    ),
    "DualPipeV": Form(
        _dualpipe_v,
        _without_hops,
        "max((p-1)f, ((p-2)f + (p-1)i)/2) + (p-1) max(0, i-w)/2 + 2((p-1)m/p + p-2) tau",
        "without hops",
    ),
    "ZB-H1": Form(
        _zero_bubble,
        _zero_bubble_exact,
        "(p-1)(f+i) - (min(m,p)-1) min(f,i,w) + 4(p-1) tau",
        "without hops; with tau <= w/2 if w <= min(f, i) and m >= 2p",
    ),
    "ZB-H2": Form(
        _zb_h2,
        _enough_to_fill,
        "(p-1)(f + max(0, i - 2 min(f,i,w)) + tau)",
        "without hops if m >= 2p-1",
        "lower bound",
    ),
    "DualPipe": Form(
        _dualpipe,
        _without_hops,
        "max((p-2)f, (p/2-2)f + (p/2-1)i) + (p/2-1) max(0, i-w) + ((p-1)m/p + 3(p/2-1)) tau",
        "without hops",
    ),
}
"""Source: shared FORMULAE 6; from simulation min, max, few microbatches, and hops that FORMULAE has not."""


def _case(ranks: ArrayLike, chunks: ArrayLike, microbatches: ArrayLike, times: RankTimes) -> _Case:
    columns = (ranks, chunks, microbatches, *times)
    p, v, m, f, i, w, tau = (np.asarray(column, dtype=np.float64) for column in columns)
    return _Case(p, v, m, f, i, w, np.where(p > 1, tau, 0.0), i + w, np.minimum(np.minimum(f, i), w))


def makespan_bubble(
    schedule: str, ranks: ArrayLike, chunks: ArrayLike, microbatches: ArrayLike, times: RankTimes
) -> Floats:
    """Idle time of a rank in a step that all ranks begin and end together [s].

    Assumes equal ranks and chunks, and that a hop blocks no rank. Exact where ``is_exact`` says so, elsewhere
    what ``FORMS`` calls it. Schedule none has no bubble.
    """
    if schedule == "none":
        return np.asarray(0.0)
    return np.asarray(FORMS[schedule].value(_case(ranks, chunks, microbatches, times)))


def least_bubble(schedule: str, ranks: ArrayLike, chunks: ArrayLike, microbatches: ArrayLike) -> Floats:
    """Idle time of a rank over what it spends on one microbatch, at least, whatever its times and hops; 0 of
    schedules that fill gaps with gradients of weights."""
    p, v, m = (np.asarray(column, dtype=np.float64) for column in (ranks, chunks, microbatches))
    if schedule not in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"):
        return 0.0 * (p * v * m)
    return np.asarray((p - 1 + (v - 1) * np.maximum(0.0, p - m)) / v)


def is_exact(
    schedule: str, ranks: ArrayLike, chunks: ArrayLike, microbatches: ArrayLike, times: RankTimes
) -> Bools:
    """Whether ``makespan_bubble`` equals the simulated one."""
    if schedule == "none":
        return np.asarray(True)
    return FORMS[schedule].is_exact(_case(ranks, chunks, microbatches, times))


def span_bubble(schedule: str, ranks: ArrayLike, times: RankTimes) -> Floats:
    """Idle time of a rank between its own first and last action, where steps may overlap [s].

    ZB-H2: (p-1)(f + i - 2w), exact for m >= 2p-1, w <= min(f, i) and no hop. ZBVZeroBubble: (p-1)(i - w),
    exact for m >= 2p-1, w <= f <= i and no hop. Elsewhere estimates. In the other schedules some rank works
    from the first start to the last end, so their span bubble is the makespan bubble; in ZB-H1 and
    InterleavedZeroBubble if w <= min(f, i).

    Source: shared FORMULAE 6; ZB-V from simulation.
    """
    p, f, i, w = (np.asarray(each, dtype=np.float64) for each in (ranks, *times[:3]))
    idle = {"ZB-H2": f + i - 2 * w, "ZBVZeroBubble": i - w}[schedule]
    return np.asarray((p - 1) * np.maximum(0.0, idle))


def fused_saving(schedule: str, ranks: ArrayLike, microbatches: ArrayLike, saved: ArrayLike) -> Floats:
    """What fusing takes off the makespan of DualPipe or DualPipeV [s], at most.

    ``saved`` is by how much a fused pair is shorter than its parts. Exact for f = i = w as long as a pair
    takes no less than its backward.

    Source: simulation.
    """
    pipelines = SCHEDULES[schedule].pipelines
    half, each = np.asarray(ranks) / pipelines, np.asarray(microbatches) / pipelines
    return np.asarray((2 * each - half - 2) * np.asarray(saved))


def bubble_overhead(ranks: ArrayLike, microbatches: ArrayLike, chunks: ArrayLike = 1) -> Floats:
    """Idle over useful time, (p-1)/(v m): exact for equal stages of GPipe, 1F1B, Interleaved1F1B with m >= p.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    return np.asarray((np.asarray(ranks) - 1) / (np.asarray(chunks) * np.asarray(microbatches)))


def bubble_fraction(ranks: ArrayLike, microbatches: ArrayLike, chunks: ArrayLike = 1) -> Floats:
    """Idle over total time, (p-1)/(v m + p-1): exact where ``bubble_overhead`` is."""
    idle = np.asarray(ranks) - 1
    return np.asarray(idle / (np.asarray(chunks) * np.asarray(microbatches) + idle))


def uneven_makespan_bounds(
    forward: ArrayLike, backward: ArrayLike, microbatches: ArrayLike
) -> tuple[Floats, Floats]:
    """Least and greatest makespan of 1F1B with unequal stages, shapes (..., stages), and no hop [s].

    They meet where the last stage is the slowest. Least: a rank waits for the forward of the stages before
    it, works, and the backward of those stages follows; that holds for GPipe too.

    Source: shared FORMULAE 6 for the greatest, which none of its 400 random cases exceeds.
    """
    both = np.asarray(forward, dtype=np.float64) + np.asarray(backward, dtype=np.float64)
    more = np.asarray(microbatches)[..., None] - 1
    least = (np.cumsum(both, axis=-1) + more * both).max(axis=-1)
    return np.asarray(least), np.asarray(both.sum(axis=-1) + (more * both).max(axis=-1))


def in_flight_chunks(
    schedule: str,
    ranks: ArrayLike,
    chunks: ArrayLike,
    microbatches: ArrayLike,
    rank: ArrayLike,
    kept_for_weight: float = 1.0,
) -> Floats:
    """Most activations a rank holds, in those of one microbatch in one of its equal chunks. Exact.

    ``kept_for_weight`` is the part of them held between the gradients of input and weights. Schedule none
    holds one.

    Source: shared FORMULAE 2.6; for ZB-V with few microbatches, simulation.
    """
    p, v, m, r = (np.asarray(column) for column in (ranks, chunks, microbatches, rank))
    if schedule == "none":
        return np.asarray(1.0)
    if schedule in ("GPipe", "LoopedBFS"):
        held = m * v
    elif schedule == "1F1B":
        held = np.minimum(m, p - r)
    elif schedule == "Interleaved1F1B":
        held = np.minimum(m * v, (v - 1) * round_size(p, m) + 2 * (p - 1 - r) + 1)
    elif schedule == "ZBVZeroBubble":
        held = np.minimum(np.minimum(2 * m, m + 1 + r), 2 * p)
    elif schedule in ("DualPipe", "DualPipeV"):
        held = 2 * p // SCHEDULES[schedule].pipelines + 1
    else:
        twice = 2 if schedule == "ZB-H2" else 1
        held = np.minimum(m * v, (v - 1) * round_size(p, m) + twice * (p - 1 - r) + 1)
        late = np.minimum(m * v - held, twice * r)  # input gradients whose weight gradient is to come
        held = held + kept_for_weight * late
    return np.asarray(held, dtype=np.float64)
