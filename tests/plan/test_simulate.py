"""Simulated times against published numbers, a plainer simulation, and what must hold of any order."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.plan.schedule import SCHEDULES, Action, build_order, order_of, why_not
from shardwright.plan.simulate import (
    DeadlockError,
    StageTimes,
    build_graph,
    in_flight,
    schedule_graph,
    simulate,
)

few = settings(deadline=None, max_examples=80)


def run(name, p, v, m, forward, input_grad, weight_grad, hop=0.0, **options):
    """A schedule with one time a rank, its chunks an equal part of it."""
    graph = schedule_graph(name, p, v, m)
    each = np.ones(graph.order.model_stages) / v
    times = StageTimes(*(np.asarray(t)[..., None] * each for t in (forward, input_grad, weight_grad)))
    return simulate(graph, times, hop, **options)


# Published numbers


def test_1f1b_and_interleaved():
    """FORMULAE fixture 22: p=4, m=8, F=1, B=2."""
    line = run("1F1B", 4, 1, 8, 1, 1, 1)
    assert line.makespan_bubble.tolist() == [9] * 4
    assert line.makespan == 33
    assert line.makespan_bubble[0] / line.makespan == 3 / 11
    interleaved = run("Interleaved1F1B", 4, 2, 8, 1, 1, 1)
    assert interleaved.makespan_bubble.tolist() == [4.5] * 4
    assert in_flight(interleaved.graph.order).rank.tolist() == [11, 9, 7, 5]


def test_interleaving_keeps_more():
    """FORMULAE fixture 21: p=8, v=3 keeps 1.2917 of 1F1B's activations, p=35, v=3 1.3238, p=8, v=2 11.5."""
    for p, v, stages in ((8, 3, 1.2917 * 8), (35, 3, 1.3238 * 35), (8, 2, 11.5)):
        order = build_order("Interleaved1F1B", p, v, 2 * p)
        assert in_flight(order).rank[0] / v == pytest.approx(stages, rel=1e-4)


def test_zb_h1_has_a_third_of_the_bubble():
    """FORMULAE fixture 23: p=8, F=I=W=1: 7, of 21 with 1F1B."""
    assert run("ZB-H1", 8, 1, 24, 1, 1, 1).makespan_bubble.tolist() == [7] * 8
    assert run("1F1B", 8, 1, 24, 1, 1, 1).makespan_bubble.tolist() == [21] * 8


@pytest.mark.parametrize(("name", "p", "v", "each"), [("DualPipe", 8, 1, 1), ("DualPipeV", 4, 2, 2)])
def test_dualpipe(name, p, v, each):
    """FORMULAE fixture 24: 8 stages, m=20, F=I=W=1 of a stage, a fused pair 3: bubble 6, 9 stages kept."""
    line = run(name, p, v, 20, each, each, each)
    assert line.makespan_bubble.tolist() == [6] * p
    assert in_flight(line.graph.order).rank.tolist() == [9] * p


@pytest.mark.parametrize(
    ("name", "v", "makespan", "span"), [("ZB-H1", 1, 7, 7), ("ZB-H2", 1, 7, 0), ("ZBVZeroBubble", 2, 3.5, 0)]
)
def test_two_bubbles(name, v, makespan, span):
    """FORMULAE 6: p=8, F=I=W=1, makespan and span."""
    line = run(name, 8, v, 24, 1, 1, 1)
    assert line.makespan_bubble.tolist() == [makespan] * 8
    assert line.span_bubble.tolist() == [span] * 8


def test_unequal_times_of_zero_bubble():
    """FORMULAE 6: ZB-V with F 1, I 1.2, W 0.8 has 2.8; ZB-H1 with F 0.8, I 1, W 1 has 7.0, not 5.6."""
    assert run("ZBVZeroBubble", 8, 2, 24, 1, 1.2, 0.8).span_bubble[0] == pytest.approx(2.8)
    assert run("ZB-H1", 8, 1, 24, 0.8, 1, 1).makespan_bubble[0] == pytest.approx(7.0)


def test_a_heavier_last_stage():
    """FORMULAE 6: p=8, m=64, F+B=3, the last stage 0.25 more: 229.0."""
    forward = np.ones(8)
    forward[-1] += 0.25
    line = simulate(schedule_graph("1F1B", 8, 1, 64), StageTimes(forward, 1, 1))
    assert line.makespan == 229.0


def test_eight_stages_and_64_microbatches():
    """7/64 = 10.9 % more than useful, 7/71 = 9.9 % of the step."""
    line = run("1F1B", 8, 1, 64, 1, 1, 1)
    assert line.makespan_bubble[0] / line.busy[0] == pytest.approx(0.109, abs=5e-4)
    assert line.makespan_bubble[0] / line.makespan == pytest.approx(0.099, abs=5e-4)


# A second simulation, written straight from the rules


def need(order, action):
    """Stage, kind and microbatch of what an action needs, and the boundary of stages between, if any."""
    stage, kind, n = action[:3]
    place = stage % order.model_stages
    if kind == "W":
        return (stage, "I", n), None
    if kind == "F":
        return ((stage - 1, "F", n), stage - 1) if place > 0 else (None, None)
    return ((stage + 1, "B", n), stage) if place < order.model_stages - 1 else ((stage, "F", n), None)


def plain(order, times, hop, blocking):
    """Start and end of every row: each rank goes on while it can, round and round."""
    forward, input_grad, weight_grad = (np.broadcast_to(t, order.model_stages) for t in times[:3])
    duration = {"F": forward, "B": input_grad + weight_grad, "I": input_grad, "W": weight_grad}
    row_of = {order.row_action(row): row for row in range(len(order.kind))}
    found, ends = np.full((2, len(order.kind)), np.nan), {}
    queues, free = [order.actions(rank) for rank in range(order.ranks)], [0.0] * order.ranks
    for rank in itertools.cycle(range(order.ranks)):
        if not any(queues):
            return found
        while queues[rank]:
            parts = [
                part for part in (queues[rank][0]._replace(partner=None), queues[rank][0].partner) if part
            ]
            needs = [need(order, part) for part in parts]
            if not all(key is None or key in ends for key, _ in needs):
                break
            far = [at is not None and order.stage_rank[at] != order.stage_rank[at + 1] for _, at in needs]
            delays = [hop[at] if crosses else 0.0 for crosses, (_, at) in zip(far, needs, strict=True)]
            there = [ends.get(key, 0.0) for key, _ in needs]
            if not blocking:
                there = [end + delay for end, delay in zip(there, delays, strict=True)]
            start = max(free[rank], *there)
            free[rank] = start + sum(duration[part.kind][part.stage % order.model_stages] for part in parts)
            free[rank] += sum(delays) if blocking else 0.0
            for part in parts:
                ends[part[:3]] = free[rank]
                if part.kind == "I":
                    ends[part.stage, "B", part.microbatch] = free[rank]
                found[:, row_of[part]] = start, free[rank]
            queues[rank].pop(0)
    return found


@st.composite
def cases(draw, largest=6, most=14):
    """An order, and times and hops of it from a small grid: ties are the rule, not the exception."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    p = draw(st.integers(1, largest))
    v = SCHEDULES[name].chunks or draw(st.integers(1, 3))
    m = draw(st.integers(1, most))
    if why_not(name, p, v, m):  # nearest that it takes
        p, m = p + p % 2 if name == "DualPipe" else p, 2 * p * (m // (2 * p) + 2)
    graph = schedule_graph(name, p, v, m)
    order = graph.order
    seconds = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0])
    times = [
        np.array(draw(st.lists(seconds, min_size=order.model_stages, max_size=order.model_stages)))
        for _ in range(3)
    ]
    hops = st.sampled_from([0.0, 0.125, 0.5, 2.0])
    hop = np.array(draw(st.lists(hops, min_size=order.stages - 1, max_size=order.stages - 1)))
    return graph, StageTimes(*times), hop


@few
@given(cases(), st.booleans())
def test_times_equal_the_plain_simulation(case, blocking):
    graph, times, hop = case
    line = simulate(graph, times, hop, blocking)
    start, end = plain(graph.order, times, hop, blocking)
    np.testing.assert_allclose(line.start, start, rtol=0, atol=1e-12)
    np.testing.assert_allclose(line.end, end, rtol=0, atol=1e-12)


# What must hold of any order


@few
@given(cases(largest=10, most=40))
def test_makespan_is_bounded_by_work_and_by_one_microbatch(case):
    graph, times, hop = case
    line = simulate(graph, times, hop)
    assert line.makespan >= line.busy.max() - 1e-9
    assert (line.makespan_bubble >= -1e-9).all()
    assert (line.span_bubble >= -1e-9).all()
    assert (line.span <= line.makespan + 1e-9).all()
    depth = graph.order.model_stages
    crossed = np.diff(graph.order.stage_rank[:depth]) != 0
    way = times.forward.sum() + times.input_grad.sum() + 2 * hop[: depth - 1][crossed].sum()
    assert line.makespan >= way - 1e-9


@few
@given(cases(), st.integers(0, 3), st.floats(0.01, 2.0), st.data())
def test_makespan_grows_with_every_time(case, which, more, data):
    graph, times, hop = case
    columns = [*times[:3], hop]
    if len(columns[which]) == 0:
        return
    at = data.draw(st.integers(0, len(columns[which]) - 1))
    longer = [column.copy() for column in columns]
    longer[which][at] += more
    before = simulate(graph, times, hop)
    after = simulate(graph, StageTimes(*longer[:3]), longer[3])
    assert (after.end >= before.end - 1e-9).all()


@few
@given(cases())
def test_makespan_scales_with_time(case):
    graph, times, hop = case
    double = simulate(graph, StageTimes(*(2 * t for t in times[:3])), 2 * hop)
    np.testing.assert_allclose(double.end, 2 * simulate(graph, times, hop).end, rtol=1e-12)


@few
@given(cases())
def test_a_blocking_receive_is_work_of_its_rank(case):
    """FORMULAE 6: where receives block, a hop adds to the times of what is received, and to no latency."""
    graph, times, _ = case
    blocked = simulate(graph, times, 0.5, blocking=True)
    crossed = 0.5 * (np.diff(graph.order.stage_rank[: graph.order.model_stages]) != 0)
    full = np.asarray(times.input_grad + times.weight_grad) + np.append(crossed, 0)
    longer = StageTimes(
        times.forward + np.insert(crossed, 0, 0),
        times.input_grad + np.append(crossed, 0),
        times.weight_grad,
        full,
    )
    np.testing.assert_allclose(blocked.end, simulate(graph, longer).end, atol=1e-12)
    assert (blocked.busy <= simulate(graph, longer).busy + 1e-12).all()


@few
@given(cases(), st.integers(1, 4))
def test_cases_are_independent(case, count):
    """A row of a table is what it is alone."""
    graph, times, hop = case
    factors = np.arange(1, count + 1)[:, None]
    table = simulate(graph, StageTimes(*(t * factors for t in times[:3])), hop * factors[::-1])
    assert table.makespan.shape == (count,)
    for row in range(count):
        alone = simulate(graph, StageTimes(*(t * factors[row] for t in times[:3])), hop * factors[::-1][row])
        assert (table.end[row] == alone.end).all()
        assert (table.start[row] == alone.start).all()
        assert (table.span[row] == alone.span).all()
        np.testing.assert_allclose(table.busy[row], alone.busy)


def test_shapes_broadcast():
    graph = schedule_graph("1F1B", 4, 1, 6)
    line = simulate(graph, StageTimes(np.ones((3, 1, 4)), np.ones(4), 1.0), np.full((5, 1), 0.1))
    assert line.makespan.shape == (3, 5)
    assert line.busy.shape == line.makespan_bubble.shape == (3, 5, 4)
    assert line.start.shape == (3, 5, len(graph.order.kind))


# Full backwards and fused pairs of their own time


def test_a_full_backward_may_be_shorter_than_its_parts():
    split = run("1F1B", 4, 1, 8, 1, 1, 1)
    full = simulate(schedule_graph("1F1B", 4, 1, 8), StageTimes(np.ones(4), 1, 1, backward=1.5))
    assert (split.makespan, full.makespan) == (33, 27.5)


@pytest.mark.parametrize(("name", "p", "v"), [("DualPipe", 8, 1), ("DualPipeV", 4, 2)])
def test_a_fused_pair_is_one_action(name, p, v):
    graph = schedule_graph(name, p, v, 20)
    line = simulate(graph, StageTimes(np.ones(8), 1, 1, fused=2.5))
    rows = np.flatnonzero(graph.order.fused)
    assert len(rows) > 0
    assert (line.end[rows] == line.end[rows + 1]).all()
    assert (line.start[rows] == line.start[rows + 1]).all()
    assert (line.end[rows] - line.start[rows] == 2.5).all()
    pairs = [graph.order.fused[graph.order.starts[r] : graph.order.starts[r + 1]].sum() for r in range(p)]
    assert line.busy.tolist() == [20 * v * 3 - 0.5 * count for count in pairs]


def test_a_fused_pair_takes_its_own_stages():
    """Its default is the forward and the backward of the two stages that it joins."""
    graph = schedule_graph("DualPipeV", 3, 2, 6)
    stage = np.arange(6)
    line = simulate(graph, StageTimes(1 + stage, 10 + stage, 0.0))
    rows = np.flatnonzero(graph.order.fused)
    forward, backward = graph.order.stage[rows], graph.order.stage[rows + 1]
    np.testing.assert_allclose(line.end[rows] - line.start[rows], 11 + forward + backward)


# Deadlock


def actions(text):
    return [Action(int(word[0]), word[1], int(word[2:])) for word in text.split()]


def test_deadlock_names_where_each_rank_is_stuck():
    order = order_of("mine", [actions("0F0 0B0 0F1 0B1"), actions("1F1 1B1 1F0 1B0")])
    message = "mine on 2 ranks cannot run: rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1"
    with pytest.raises(DeadlockError, match=message):
        build_graph(order)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (["0F0 0I0"], None),
        (["0F0 0W0 0I0"], "rank 0 at 0W0 waits for 0I0"),
        (["0B0 0F0"], "rank 0 at 0B0 waits for 0F0"),
        (["0F0 0B0", "1F0"], "rank 0 at 0B0 waits for an action that no rank has"),
    ],
)
def test_orders_that_cannot_run(ranks, message):
    order = order_of("mine", [actions(text) for text in ranks])
    if message is None:
        build_graph(order)
    else:
        with pytest.raises(DeadlockError, match=message):
            build_graph(order)


def test_a_deadlock_inside_a_fused_pair():
    pair = Action(0, "F", 1, Action(3, "B", 1))
    ranks = [
        [*actions("0F0 3F0"), pair, *actions("3F1 3B0 0B0 0B1")],
        actions("1F0 2F0 1F1 2F1 2B1 1B1 2B0 1B0"),
    ]
    with pytest.raises(DeadlockError, match="rank 0 at 3B1 waits for 3F1"):
        build_graph(order_of("mine", ranks))


def test_no_order_deadlocks_on_more_ranks():
    """Wider than the orders compared with torch's; building a graph is running it."""
    for name, p, m in itertools.product(SCHEDULES, (10, 12, 16), (1, 2, 7, 16, 20, 31, 48, 64)):
        for v in (SCHEDULES[name].chunks,) if SCHEDULES[name].chunks else (1, 2, 5):
            if not why_not(name, p, v, m):
                assert simulate(schedule_graph(name, p, v, m), StageTimes(np.ones(p * v), 1, 1)).makespan > 0


# Memory


def test_in_flight_of_each_stage():
    order = build_order("1F1B", 4, 1, 8)
    assert in_flight(order).stage.tolist() == [4, 3, 2, 1]
    assert in_flight(order, np.array([[1.0, 2, 3, 4], [0, 0, 0, 5]])).rank.tolist() == [
        [4, 6, 6, 4],
        [0, 0, 0, 5],
    ]


def test_in_flight_counts_a_stage_on_its_rank_only_at_its_time():
    """A rank's most is not the sum of its stages' most."""
    order = build_order("Interleaved1F1B", 4, 2, 8)
    held = in_flight(order)
    by_rank = [held.stage[order.stage_rank == rank].sum() for rank in range(4)]
    assert (held.rank <= by_rank).all()
    assert held.rank.tolist() != by_rank


def test_what_weights_need_may_be_less():
    """ZB-H1: (p-i) whole, and i of which only the part for the weight gradient is left."""
    order = build_order("ZB-H1", 4, 1, 8)
    assert in_flight(order).rank.tolist() == [4, 4, 4, 4]
    assert in_flight(order, kept_for_weight=0.5).rank.tolist() == [4, 3.5, 3, 2.5]
    assert in_flight(order, kept_for_weight=0.0).rank.tolist() == [4, 3, 2, 1]


@few
@given(cases(), st.sampled_from([0.0, 0.25, 1.0]))
def test_in_flight_is_what_the_timeline_holds(case, kept):
    """Counted over time instead of over the order: forwards begun, less backwards ended."""
    graph, times, hop = case
    order, line = graph.order, simulate(graph, times, hop)
    held = in_flight(order, kept_for_weight=kept)
    share = {0: 1.0, 1: 1.0, 2: 1 - kept, 3: kept}
    for rank in range(order.ranks):
        rows = range(order.starts[rank], order.starts[rank + 1])
        events = [(line.start[r], 1, 1.0) for r in rows if order.kind[r] == 0]
        events += [(line.end[r], 0, -share[int(order.kind[r])]) for r in rows if order.kind[r] > 0]
        most = max(itertools.accumulate(change for *_, change in sorted(events)))
        assert math.isclose(held.rank[rank], most, abs_tol=1e-9)
