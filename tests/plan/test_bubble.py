"""Closed forms against the simulation, where they say they are exact, and published numbers."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.plan.bubble import (
    FORMS,
    RankTimes,
    bubble_fraction,
    bubble_overhead,
    fused_saving,
    in_flight_chunks,
    is_exact,
    least_bubble,
    makespan_bubble,
    span_bubble,
    uneven_makespan_bounds,
)
from shardwright.plan.schedule import SCHEDULES, build_order, why_not
from shardwright.plan.simulate import StageTimes, build_graph, in_flight, simulate

RANKS, CHUNKS = range(1, 9), range(1, 5)
MICROBATCHES = (*range(1, 9), 10, 12, 15, 16, 21, 24, 32)

quick = settings(deadline=None, max_examples=100)


def random_times(count=24):
    """Times of every kind of ratio, ties among them, each without hops and with short or long ones."""
    source = np.random.default_rng(7)
    times = np.concatenate(
        [source.uniform(0.1, 3.0, (count // 2, 3)), source.integers(1, 4, (count // 2, 3))]
    )
    tau = times.min(axis=1) * source.choice([1e-3, 0.02, 0.1, 0.2, 5.0], count)
    return RankTimes(*np.concatenate([times, times]).T, np.concatenate([np.zeros(count), tau]))


TIMES = random_times()
STILL = RankTimes(*(column[TIMES.hop == 0] for column in TIMES))
"""Those without hops."""


@cache
def graph_of(name, p, v, m):
    """More of them than ``schedule_graph`` remembers."""
    return build_graph(build_order(name, p, v, m))


def simulated(name, p, v, m, times, fused=None):
    """The simulation of ranks and chunks of equal times; a case for each row of ``times``."""
    graph = graph_of(name, p, v, m)
    columns = [np.asarray(t)[:, None] / v * np.ones(graph.order.model_stages) for t in times[:3]]
    if fused is not None:
        fused = fused[:, None] * np.ones(graph.order.model_stages)
    return simulate(graph, StageTimes(*columns, fused=fused), np.asarray(times.hop)[:, None])


def settings_of(name):
    """What the schedule accepts of p <= 8, v <= 4 and many m <= 32."""
    return [(p, v, m) for p in RANKS for v in CHUNKS for m in MICROBATCHES if why_not(name, p, v, m) is None]


def exact_rows(name, p, v, m):
    """Whether the form is exact, of each row of ``TIMES``."""
    return np.broadcast_to(is_exact(name, p, v, m, TIMES), TIMES.hop.shape)


def span_is_known(name, p, m, times):
    """Rows whose span bubble has a closed form, by ``span_bubble``'s docstring."""
    f, i, w, tau = times
    if name == "ZB-H2":
        return (tau == 0) & (w <= np.minimum(f, i)) & (m >= 2 * p - 1)
    if name == "ZBVZeroBubble":
        return (tau == 0) & (w <= f) & (f <= i) & (m >= 2 * p - 1)
    if name in ("ZB-H1", "InterleavedZeroBubble"):
        return (tau == 0) & (w <= np.minimum(f, i))
    return tau == 0


# Closed forms and the simulation


@pytest.mark.parametrize("name", FORMS)
def test_bubble_equals_the_simulation_where_exact(name):
    counted = np.zeros(4, dtype=int)
    for p, v, m in settings_of(name):
        line = simulated(name, p, v, m, TIMES)
        bubble, exact = makespan_bubble(name, p, v, m, TIMES), exact_rows(name, p, v, m)
        close = np.isclose(line.makespan_bubble, bubble[:, None], rtol=1e-9, atol=1e-9).all(axis=1)
        assert close[exact].all(), (p, v, m)
        if FORMS[name].otherwise == "lower bound":
            assert (bubble[:, None] <= line.makespan_bubble + 1e-9).all(), (p, v, m)
        known = span_is_known(name, p, m, TIMES)
        span = span_bubble(name, p, TIMES) if name in ("ZB-H2", "ZBVZeroBubble") else bubble
        same = np.isclose(line.span_bubble, span[:, None], rtol=1e-9, atol=1e-9).all(axis=1)
        assert same[known & (exact | (m >= 2 * p - 1))].all(), (p, v, m)
        counted += [exact[TIMES.hop == 0].sum(), exact[TIMES.hop > 0].sum(), known.sum(), p > 1]
    assert (counted[[0, 2, 3]] > 20).all()
    assert counted[1] > 20 or FORMS[name].exact.startswith("without hops")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("p", [12, 32])
def test_forms_hold_on_more_ranks(name, p):
    v = SCHEDULES[name].chunks or 3
    for m in (p, 2 * p, 2 * p + 2, 3 * p):
        if why_not(name, p, v, m) is None:
            exact = exact_rows(name, p, v, m)
            found = simulated(name, p, v, m, TIMES).makespan_bubble[exact, 0]
            np.testing.assert_allclose(
                found, makespan_bubble(name, p, v, m, TIMES)[exact], rtol=1e-9, atol=1e-9
            )
            held = in_flight(graph_of(name, p, v, m).order).rank
            assert (in_flight_chunks(name, p, v, m, np.arange(p)) == held).all()


def test_every_schedule_has_a_form():
    assert FORMS.keys() == SCHEDULES.keys()
    for form in FORMS.values():
        assert form.otherwise in ("estimate", "lower bound")


@pytest.mark.parametrize("name", FORMS)
def test_without_hops_a_form_is_exact_once_microbatches_fill_the_pipeline(name):
    for p, v, m in settings_of(name):
        assert m < 2 * p or is_exact(name, p, v, m, STILL).all()


@pytest.mark.parametrize("name", FORMS)
def test_estimates_are_near(name):
    """W <= F <= I and hops of W/40: within 8 % of the makespan where m >= 2p."""
    least, middle, most = np.sort(np.stack(STILL[:3]), axis=0)
    times = RankTimes(middle, most, least, least / 40)
    for p, v, m in settings_of(name):
        if p in (2, 4, 7, 8) and m >= 2 * p and v <= 2:
            line = simulated(name, p, v, m, times)
            found = makespan_bubble(name, p, v, m, times) + line.busy[:, 0]
            assert (np.abs(np.log(found / line.makespan)) < 0.08).all(), (p, v, m)


def test_span_of_zb_h2_is_exact_for_short_weight_gradients_only():
    """FORMULAE 6 asks that F + I - 2W be positive; that is not enough: F 0.22, I 2.05, W 0.37."""
    line = simulated("ZB-H2", 2, 1, 8, RankTimes(*np.array([[0.22], [2.05], [0.37], [0.0]])))
    assert line.span_bubble[0].tolist() == pytest.approx([0.22 + 2.05 - 2 * 0.22] * 2)


# Published numbers


def test_published_bubbles():
    """FORMULAE fixtures 22 to 24, and 6: F=I=W=1."""
    ones = RankTimes(1, 1, 1)
    assert makespan_bubble("1F1B", 4, 1, 8, ones) == makespan_bubble("GPipe", 4, 1, 8, ones) == 9
    assert makespan_bubble("Interleaved1F1B", 4, 2, 8, ones) == 4.5
    assert makespan_bubble("1F1B", 8, 1, 24, ones) == 21
    assert makespan_bubble("ZB-H1", 8, 1, 24, ones) == 7
    assert makespan_bubble("DualPipe", 8, 1, 20, ones) == 6
    assert makespan_bubble("DualPipeV", 4, 2, 20, RankTimes(2, 2, 2)) == 6
    assert (makespan_bubble("ZB-H2", 8, 1, 24, ones), span_bubble("ZB-H2", 8, ones)) == (7, 0)
    assert (makespan_bubble("ZBVZeroBubble", 8, 2, 24, ones), span_bubble("ZBVZeroBubble", 8, ones)) == (
        3.5,
        0,
    )


@quick
@given(st.integers(1, 8), st.integers(2, 4), *[st.floats(0.1, 3)] * 3)
def test_the_formulas_of_formulae_6(half, v, f, i, w):
    """The table of FORMULAE 6, for a weight gradient no longer than the others; DualPipe for equal times, of
    one stage, with F&B = F + B and PP stages on PP ranks, or on PP/2 with DualPipeV."""
    p, w = 2 * half, min(f, i, w)
    b, times, m = i + w, RankTimes(f, i, w), 4 * p
    bubble = {name: float(makespan_bubble(name, p, 1, m, times)) for name in ("GPipe", "1F1B", "ZB-H1")}
    assert bubble["GPipe"] == bubble["1F1B"] == pytest.approx((p - 1) * (f + b))
    assert bubble["ZB-H1"] == pytest.approx((p - 1) * (f + i - w)) == pytest.approx((p - 1) * (f + b - 2 * w))
    assert makespan_bubble("Interleaved1F1B", p, v, m, times) == pytest.approx((p - 1) * (f + b) / v)
    assert span_bubble("ZB-H2", p, times) == pytest.approx((p - 1) * (f + i - 2 * w))
    assert span_bubble("ZBVZeroBubble", p, RankTimes(f, f, f)) == 0
    expected = (p / 2 - 1) * ((f + 2 * f) + 2 * f - 3 * f)
    assert makespan_bubble("DualPipe", p, 1, m, RankTimes(f, f, f)) == pytest.approx(expected)
    ranks = RankTimes(*[2 * f] * 3)  # of a rank, which has two stages
    assert makespan_bubble("DualPipeV", half, 2, m, ranks) == pytest.approx(expected)


def test_published_ratios():
    """Issue 3: 8 stages and 64 microbatches; cases.md G1: p=8 m=8, m=16, p=4 m=8; FORMULAE fixture 22."""
    assert float(bubble_overhead(8, 64)) == pytest.approx(0.109, abs=5e-4)
    assert float(bubble_fraction(8, 64)) == pytest.approx(0.099, abs=5e-4)
    found = bubble_fraction(np.array([8, 8, 4]), np.array([8, 16, 8]))
    np.testing.assert_allclose(found, [0.467, 0.304, 0.273], atol=5e-4)
    assert bubble_fraction(4, 8) == 3 / 11
    assert bubble_overhead(4, 8, 2) == 3 / 16
    assert bubble_fraction(4, 8, 2) == 3 / 19


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"])
def test_ratios_are_those_of_the_bubble(name):
    useful_of_one = sum(STILL[:3])
    for p, v, m in settings_of(name):
        if m >= p:
            idle, useful = makespan_bubble(name, p, v, m, STILL), m * useful_of_one
            np.testing.assert_allclose(idle / useful, bubble_overhead(p, m, v))
            np.testing.assert_allclose(idle / (idle + useful), bubble_fraction(p, m, v))


def test_hops_of_1f1b_and_interleaved():
    """FORMULAE 6: 2(p-1)/p m + 2(p-2) for m a multiple of p, and 2(pv-1) once."""
    for p in range(2, 9):
        for m in range(p, 33, p):
            per_hop = makespan_bubble("1F1B", p, 1, m, RankTimes(0, 0, 0, 1))
            assert per_hop == pytest.approx(2 * (p - 1) / p * m + 2 * (p - 2))
            assert makespan_bubble("Interleaved1F1B", p, 3, m, RankTimes(0, 0, 0, 1)) == 2 * (3 * p - 1)


# Unequal stages


def test_a_heavier_last_stage():
    """FORMULAE 6: p=8, m=64, F+B=3, the last 0.25 more: 229.0."""
    forward = np.ones(8)
    forward[-1] += 0.25
    assert uneven_makespan_bounds(forward, 2, 64) == (229.0, 229.0)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 24), st.booleans())
def test_unequal_stages_lie_between_the_bounds(seed, p, m, heavy_last):
    forward, input_grad, weight_grad = np.random.default_rng(seed).uniform(0.1, 3.0, (3, p))
    if heavy_last:
        forward[-1] += 9
    least, greatest = uneven_makespan_bounds(forward, input_grad + weight_grad, m)
    times = StageTimes(forward, input_grad, weight_grad)
    if m >= p:
        makespan = simulate(graph_of("1F1B", p, 1, m), times).makespan
        assert least - 1e-9 <= makespan <= greatest + 1e-9
        assert not heavy_last or least == pytest.approx(greatest)
    assert simulate(graph_of("GPipe", p, 1, m), times).makespan >= least - 1e-9


@quick
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(FORMS)), st.integers(1, 4), st.integers(1, 2))
def test_the_slowest_stage_everywhere_is_an_upper_bound(seed, name, p, rounds):
    p, v = 2 * p, SCHEDULES[name].chunks or 2
    m = 2 * p * rounds
    graph = graph_of(name, p, v, m)
    times = np.random.default_rng(seed).uniform(0.1, 3.0, (3, graph.order.model_stages))
    slowest = RankTimes(*(times.max(axis=1) * v))
    bound = makespan_bubble(name, p, v, m, slowest) + m * sum(slowest[:3])
    assert simulate(graph, StageTimes(*times)).makespan <= bound + 1e-9


# Fused pairs


@pytest.mark.parametrize(("name", "pipelines"), [("DualPipeV", 1), ("DualPipe", 2)])
def test_fusing_saves_at_most(name, pipelines):
    f = STILL.forward
    for equal, times in ((True, RankTimes(f, f, f, STILL.hop)), (False, STILL)):
        forward, backward = times.forward, times.input_grad + times.weight_grad
        for p, v, m in settings_of(name):
            saved = np.linspace(0, 1, len(f)) * forward  # a pair takes no less than its backward
            line = simulated(name, p, v, m, times, fused=(forward + backward - saved) / v)
            unfused = m * (forward + backward) + makespan_bubble(name, p, v, m, times)
            expected = unfused - fused_saving(name, p, m, saved / v)
            assert (line.makespan >= expected - 1e-9).all()
            if equal:
                np.testing.assert_allclose(line.makespan, expected, rtol=1e-9)


# Memory


@pytest.mark.parametrize("name", FORMS)
def test_in_flight_equals_the_order(name):
    for p, v, m in settings_of(name):
        order = graph_of(name, p, v, m).order
        for kept in (1.0, 0.25, 0.0):
            found = in_flight_chunks(name, p, v, m, np.arange(p), kept)
            assert (found == in_flight(order, kept_for_weight=kept).rank).all(), (p, v, m, kept)


def test_published_in_flight():
    """FORMULAE fixtures 21, 22, 24 and 2.6."""
    penalty = in_flight_chunks("Interleaved1F1B", [8, 35], 3, [16, 70], 0) / 3 / [8, 35]
    np.testing.assert_allclose(penalty, [1.2917, 1.3238], atol=5e-5)
    assert in_flight_chunks("Interleaved1F1B", 8, 2, 16, 0) / 2 == 11.5
    assert in_flight_chunks("Interleaved1F1B", 4, 2, 8, np.arange(4)).tolist() == [11, 9, 7, 5]
    assert in_flight_chunks("DualPipe", 8, 1, 20, 0) == in_flight_chunks("DualPipeV", 4, 2, 20, 0) == 9
    assert in_flight_chunks("1F1B", 8, 1, 20, np.arange(8)).tolist() == [8, 7, 6, 5, 4, 3, 2, 1]
    assert in_flight_chunks("ZB-H2", 8, 1, 20, np.arange(8)).tolist() == [15] * 8
    assert in_flight_chunks("ZBVZeroBubble", 8, 2, 20, np.arange(8)).tolist() == [16] * 8


# Tables


def test_a_table_is_its_rows():
    p, v, m = (a.ravel() for a in np.meshgrid([2, 4, 8], [1, 2], [8, 12, 16], indexing="ij"))
    times = RankTimes(*np.random.default_rng(1).uniform(0.1, 2, (3, len(p))), 0.01)
    for name in FORMS:
        table, exact = makespan_bubble(name, p, v, m, times), is_exact(name, p, v, m, times)
        assert table.dtype == np.float64
        for row in range(len(p)):
            case = (name, p[row], v[row], m[row], RankTimes(*(t[row] for t in times[:3]), 0.01))
            assert makespan_bubble(*case) == table[row]
            assert is_exact(*case) == np.broadcast_to(exact, len(p))[row]


@pytest.mark.parametrize("name", ["none", *FORMS])
def test_a_grid_is_its_rows_and_no_larger_than_what_it_depends_on(name):
    """Columns along their own axes: chunks, microbatches, times; the second axis is none of theirs."""
    v, m = np.array([1, 2, 3]).reshape(-1, 1, 1), np.array([8, 16, 32, 64]).reshape(-1, 1)
    times = RankTimes(np.linspace(1, 2, 5), 1.0, np.array(0.5), np.full((1, 1, 1), 0.01))
    grid, exact = (function(name, 4, v, m, times) for function in (makespan_bubble, is_exact))
    held = in_flight_chunks(name, 4, v, m, np.arange(4).reshape(4, 1, 1, 1))
    whole = np.broadcast_to(grid, (3, 4, 5))
    for i, j, k in np.ndindex(3, 4, 5):
        case = (name, 4, v[i, 0, 0], m[j, 0], RankTimes(times.forward[k], 1.0, 0.5, 0.01))
        assert makespan_bubble(*case) == whole[i, j, k]
        assert is_exact(*case) == np.broadcast_to(exact, whole.shape)[i, j, k]
        for rank in range(4):
            found = in_flight_chunks(*case[:4], rank)
            assert found == np.broadcast_to(held, (4, 3, 4, 1))[rank, i, j, 0]
    shapes = {"none": (), "GPipe": (1, 1, 5), "DualPipe": (1, 4, 5), "LoopedBFS": (3, 4, 5)}
    assert grid.shape == shapes.get(name, grid.shape)
    assert name not in ("DualPipe", "DualPipeV", "none") or held.shape == ()


@quick
@given(st.sampled_from(sorted(FORMS)), st.integers(1, 4), st.integers(1, 3), *[st.floats(0.1, 3)] * 3)
def test_no_bubble_on_one_rank_or_below_zero(name, half, chunks, f, i, w):
    v = SCHEDULES[name].chunks or chunks
    for p, m in ((2 * half, 8 * half), (1, 4)):
        bubble = makespan_bubble(name, p, v, m, RankTimes(f, i, w, 0.1))
        assert bubble >= 0
        assert p > 1 or name == "DualPipe" or bubble == 0


@given(
    st.sampled_from(sorted(FORMS)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 40),
    *[st.floats(0, 3)] * 4,
)
def test_no_bubble_is_less_than_the_least(name, half, chunks, m, f, i, w, hop):
    """It knows nothing of times and hops; without hops it is all there is in schedules that fill no gaps."""
    p = 2 * half
    least = least_bubble(name, p, chunks, m) * (f + i + w)
    assert makespan_bubble(name, p, chunks, m, RankTimes(f, i, w, hop)) >= least * (1 - 1e-12)
    if name in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"):
        v = chunks if name in ("LoopedBFS", "Interleaved1F1B") else 1
        least = least_bubble(name, p, v, m) * (f + i + w)
        assert makespan_bubble(name, p, v, m, RankTimes(f, i, w)) == pytest.approx(float(least), abs=1e-9)
