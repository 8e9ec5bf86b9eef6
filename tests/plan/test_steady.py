"""Makespans by period equal those of the whole simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.plan import steady
from shardwright.plan.schedule import SCHEDULES, build_order, why_not
from shardwright.plan.simulate import StageTimes, build_graph, schedule_graph, simulate
from shardwright.plan.steady import makespans

PERIODIC = sorted(SCHEDULES.keys() - {"GPipe", "LoopedBFS"})


def whole(name, p, v, m, times, hop):
    graph = build_graph(build_order(name, p, v, m))
    return simulate(graph, times, np.asarray(hop)[:, None]).makespan


@pytest.fixture
def runs(monkeypatch):
    """Microbatches of the runs that were simulated."""
    seen = []

    def noted(name, p, v, m):
        seen.append(m)
        return schedule_graph(name, p, v, m)

    monkeypatch.setattr(steady, "schedule_graph", noted)
    return seen


def kinds_of_times(stages, seed):
    """Equal stages, a heavier last one, lighter ends, stages of any time; without hops, with short and long
    ones; (3, cases, stages) and (cases,)."""
    source = np.random.default_rng(seed)
    times = np.ones((3, 6, stages)) * source.uniform(0.5, 2, (3, 1, 1))
    times[:, 1, -1] *= 1.4
    times[:, 2, [0, -1]] *= 0.875
    times[:, 3:] *= source.uniform(0.5, 1.5, (3, 3, stages))
    return StageTimes(*times), np.array([0.02, 0.0, 0.05, 0.0, 0.1, 4.0])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_equal_to_the_whole_simulation(name, runs):
    v, shorter = SCHEDULES[name].chunks or 3, 0
    for p in (1, 2, 3, 4, 6, 8):
        for m in (p, 7 * p, 8 * p + 1, 24 * p, 120):
            if why_not(name, p, v, m):
                continue
            runs.clear()
            times, hop = kinds_of_times(p * v, seed=m)
            np.testing.assert_allclose(
                makespans(name, p, v, m, times, hop), whole(name, p, v, m, times, hop), rtol=1e-11
            )
            shorter += bool(runs) and max(runs) < m
    assert shorter >= (4 if name in PERIODIC else 0)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PERIODIC), st.integers(1, 4), st.integers(0, 2**31), st.booleans(), st.integers(5, 20))
def test_equal_to_the_whole_simulation_for_any_times(name, half, seed, coarse, rounds):
    """Times of a coarse grid make ties, which give long periods and slow ends of the fill."""
    p, v = 2 * half, SCHEDULES[name].chunks or 2
    m, source = rounds * p, np.random.default_rng(seed)
    drawn = source.integers(1, 4, (3, 2, p * v)) if coarse else source.uniform(0.5, 1.5, (3, 2, p * v))
    times, hop = StageTimes(*drawn.astype(float)), source.choice([0.0, 0.5, 0.01], 2)
    np.testing.assert_allclose(
        makespans(name, p, v, m, times, hop), whole(name, p, v, m, times, hop), rtol=1e-11
    )


@pytest.mark.parametrize("name", PERIODIC)
def test_an_order_of_more_rounds_has_them_put_in(name):
    """What the induction takes for granted: an action has the same one before it on its rank in a longer
    order, until forwards run out, and the rest of the longer order is that of the shorter one, later."""
    for p, v in ((2, 2), (4, 3), (6, 2)):
        v = SCHEDULES[name].chunks or v
        m = 9 * p * SCHEDULES[name].pipelines
        if why_not(name, p, v, m) or why_not(name, p, v, m + 2 * p):
            continue
        short, longer = build_order(name, p, v, m), build_order(name, p, v, m + 2 * p)
        more, reach = longer.microbatches - short.microbatches, steady._reach(short)
        assert reach == steady._reach(longer)
        before, later = (befores(order) for order in (short, longer))
        for (stage, kind, n), (other, other_kind, k) in before.items():
            if n < short.microbatches - reach:
                assert later[stage, kind, n] == (other, other_kind, k)
            if n >= reach:
                assert later[stage, kind, n + more] == (other, other_kind, k + more)


def befores(order):
    """The action before each on its rank."""
    found = {}
    for rank in range(order.ranks):
        mine = [order.row_action(row)[:3] for row in range(order.starts[rank], order.starts[rank + 1])]
        found |= dict(zip(mine[1:], mine, strict=False))
    return found


def test_times_that_repeat_late_are_run_whole(runs):
    """The first two stages and the hops between them set the pace in the end, 3.455 s a microbatch; the last
    stage takes 3.45 s and is ahead for long."""
    times = StageTimes(*(np.array([[1.14, 1.13, 0.85, 1.15]]) for _ in range(3)))
    hop, m = np.array([0.05]), 160
    found = makespans("1F1B", 4, 1, m, times, hop)
    np.testing.assert_allclose(found, whole("1F1B", 4, 1, m, times, hop), rtol=1e-12)
    assert runs == [20, 32, 48, 72, 108, m]


def test_rounds_of_another_size_are_run_whole(runs):
    """255 microbatches on 16 ranks are 15 rounds of 17, which no shorter run of whole rounds of 16 has."""
    times, hop = kinds_of_times(32, seed=1)
    found = makespans("Interleaved1F1B", 16, 2, 255, times, hop)
    np.testing.assert_allclose(found, whole("Interleaved1F1B", 16, 2, 255, times, hop), rtol=1e-12)
    assert runs == [255]


@pytest.mark.parametrize("case", [("GPipe", 2, 2, 4), ("1F1B", 4, 1, 3), ("LoopedBFS", 2, 0, 4)])
def test_no_such_order(case):
    times, hop = kinds_of_times(4, seed=1)
    with pytest.raises(LayoutError, match=f"of {case[0]} on {case[1]} ranks"):
        makespans(*case, times, hop)


def test_a_period_is_found_where_the_closed_form_has_it(runs):
    """FORMULAE 6: 1F1B with hops has F + B + 2(p-1)/p tau for each microbatch."""
    ones = StageTimes(*np.ones((3, 1, 8)))
    for m in (1024, 4096):
        found = makespans("1F1B", 8, 1, m, ones, np.array([0.1]))[0]
        assert found == pytest.approx(3 * (m + 7) + 0.1 * (2 * 7 / 8 * m + 2 * 6))
    assert max(runs) < 100


@pytest.mark.parametrize(("name", "v"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_many_microbatches_cost_a_few_rounds(name, v, runs):
    """2,048 microbatches on 64 ranks: 8 rounds of the ranks, and a rest that aligns the period."""
    times, hop = kinds_of_times(64 * v, seed=3)
    makespans(name, 64, v, 2048, StageTimes(*(np.asarray(each)[:3] for each in times[:3])), hop[:3])
    assert max(runs) < 9 * 64
