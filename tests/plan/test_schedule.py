"""Orders equal torch's, action by action, and rules its constructors'; every order runs each action once."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.plan.schedule import (
    FAULTS,
    KINDS,
    SCHEDULES,
    Action,
    build_order,
    order_fault,
    order_of,
    stage_gathers,
    why_not,
)

SINGLE = {"GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B"}
MULTI = {
    name: f"Schedule{name}"
    for name in (
        "LoopedBFS",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    )
}
RANKS, CHUNKS, MICROBATCHES = range(1, 9), range(1, 5), range(1, 33)

quick = settings(deadline=None, max_examples=60)


@pytest.fixture(scope="module")
def torch_schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is not installed")


def stages_of(ranks, chunks):
    """Stages as far as the constructors of schedules look at them."""
    stage = SimpleNamespace(
        num_stages=ranks * chunks, group_size=ranks, group_rank=0, stage_index=0, submod=None
    )
    return [stage] * chunks


def torch_rows(actions):
    """Stage, kind, microbatch and whether it runs as one with the next, of every F, B, I and W."""
    rows = []
    for action in actions:
        if action is None or action.computation_type.value == "REDUCE_GRAD":
            continue
        parts = action.sub_actions or (action,)
        for each in parts:
            fused = len(parts) == 2 and each is parts[0]
            rows.append((each.stage_index, each.computation_type.value, each.microbatch_index, fused))
    return rows


def our_rows(order, rank):
    part = slice(order.starts[rank], order.starts[rank + 1])
    kinds = [KINDS[kind] for kind in order.kind[part]]
    columns = (order.stage[part].tolist(), kinds, order.microbatch[part].tolist(), order.fused[part].tolist())
    return list(zip(*columns, strict=True))


# Equality with torch


@pytest.mark.parametrize("name", MULTI)
def test_order_and_rules_equal_torch(name, torch_schedules, monkeypatch):
    """All of p <= 8, v <= 4, m <= 32: the same order, or refused by both."""
    make = getattr(torch_schedules, MULTI[name])
    monkeypatch.setattr(
        torch_schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda *_: None
    )
    accepted = 0
    for p in RANKS:
        for v in CHUNKS:
            for m in MICROBATCHES:
                try:
                    theirs = make(stages_of(p, v), m)
                except ValueError:
                    assert why_not(name, p, v, m), (p, v, m)
                    continue
                ours = build_order(name, p, v, m)
                assert dict(enumerate(ours.stage_rank.tolist())) == theirs.stage_index_to_group_rank
                for rank in range(p):
                    assert our_rows(ours, rank) == torch_rows(theirs.pipeline_order[rank]), (p, v, m, rank)
                accepted += 1
    assert (
        accepted
        == {
            "LoopedBFS": 1024,
            "Interleaved1F1B": 652,
            "InterleavedZeroBubble": 652,
            "ZBVZeroBubble": 256,
            "DualPipeV": 192,
        }[name]
    )


@pytest.mark.parametrize("name", SINGLE)
def test_order_and_rules_of_one_stage_a_rank_equal_torch(name, torch_schedules):
    """``pipeline_order`` of torch 2.13 names forwards of 1F1B's last rank 1 to m, not 0 to m-1: it runs the
    latter, see ``test_order_equals_what_torch_runs``."""
    make = getattr(torch_schedules, SINGLE[name])
    for p in RANKS:
        for m in MICROBATCHES:
            try:
                theirs = make(stages_of(p, 1)[0], m).pipeline_order
            except ValueError:
                assert why_not(name, p, 1, m), (p, m)
                continue
            ours = build_order(name, p, 1, m)
            for rank in range(p):
                rows = torch_rows(theirs[rank])
                if name == "1F1B" and rank == p - 1:
                    rows = [(s, kind, n - (kind == "F"), fused) for s, kind, n, fused in rows]
                assert our_rows(ours, rank) == rows, (p, m, rank)


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (3, 3), (4, 9), (8, 8), (8, 32)])
def test_order_equals_what_torch_runs(name, p, m, torch_schedules):
    for rank in range(p):
        ran = []
        stage = SimpleNamespace(
            num_stages=p,
            stage_index=rank,
            is_last=False,
            forward_one_chunk=lambda n, *_, ran=ran, **__: ran.append(("F", n)),
            backward_one_chunk=lambda n, ran=ran, **_: ran.append(("B", n)),
            perform_reduce_grad=lambda *_: None,
            **{f"get_{way}_{what}_ops": lambda _: [] for way in ("fwd", "bwd") for what in ("send", "recv")},
        )
        schedule = getattr(torch_schedules, SINGLE[name])(stage, m)
        schedule._initialize_stage = lambda *_: None
        schedule._step_microbatches()
        assert [(a.kind, a.microbatch) for a in build_order(name, p, 1, m).actions(rank)] == ran


@pytest.mark.parametrize("name", MULTI)
def test_gathers_equal_torch(name, torch_schedules, monkeypatch):
    """Stages evicted and gathered again when a rank has more than three of them."""
    make = getattr(torch_schedules, MULTI[name])
    monkeypatch.setattr(
        torch_schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda *_: None
    )
    for p in (1, 2, 5, 8):
        for v in range(1, 7):
            for m in (1, 3, 8, 16, 30):
                if why_not(name, p, v, m):
                    continue
                counts = {"UNSHARD": Counter(), "RESHARD": Counter()}
                for actions in make(stages_of(p, v), m).pipeline_order.values():
                    for action in torch_schedules._add_unshard_reshard(actions):
                        if action.computation_type.value in counts:
                            counts[action.computation_type.value][action.stage_index] += 1
                ours = dict(enumerate(stage_gathers(build_order(name, p, v, m)).tolist()))
                assert ours == counts["UNSHARD"] == counts["RESHARD"], (p, v, m)


def test_gathers_of_more_than_three_stages_a_rank():
    """On rank 0 as TORCH.md has it: Interleaved1F1B p 2, v 4, m 8 gives 15 gathers, v <= 3 gives v."""
    for chunks, gathers in ((2, [2, 2]), (3, [3, 3]), (4, [15, 13])):
        order = build_order("Interleaved1F1B", 2, chunks, 8)
        found = stage_gathers(order)
        assert [int(found[order.stage_rank == rank].sum()) for rank in range(2)] == gathers


# Orders of the papers


def text(name, p, v, m):
    order = build_order(name, p, v, m)
    return [" ".join(str(action) for action in order.actions(rank)) for rank in range(p)]


def test_zb_h1_runs_weights_late_by_the_rank():
    """arXiv:2401.10241, figure 3."""
    assert text("ZB-H1", 2, 1, 3) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_zb_h2_runs_twice_as_far_ahead():
    """arXiv:2401.10241, figure 3: 2(p-i)-1 forwards first, weights 2i late."""
    assert text("ZB-H2", 2, 1, 4) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


def test_dualpipe_is_dualpipe_v_from_both_ends():
    """On ranks 0 to p/2-1 DualPipe is DualPipeV of p/2 ranks; the other ranks mirror them."""
    whole, half = build_order("DualPipe", 8, 1, 20), build_order("DualPipeV", 4, 2, 10)
    for rank in range(4):
        near, far = our_rows(whole, rank), our_rows(whole, 7 - rank)
        assert [row[1:] for row in near] == [row[1:] for row in our_rows(half, rank)]
        assert [((s + 8) % 16, *rest) for s, *rest in near] == [tuple(row) for row in far]
    assert whole.model_stages == 8
    assert whole.stage_rank.tolist() == [*range(8), *reversed(range(8))]


# Rules


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (("1F1B", 8, 1, 7), "microbatches=7 of 1F1B on 8 ranks is below 8: use that many, or GPipe"),
        (("GPipe", 2, 2, 4), "chunks=2 of GPipe on 2 ranks: use 1"),
        (("LoopedBFS", 2, 0, 4), "chunks=0 of LoopedBFS on 2 ranks: use 1 or more"),
        (("ZBVZeroBubble", 4, 3, 8), "chunks=3 of ZBVZeroBubble on 4 ranks: use 2"),
        (("DualPipeV", 4, 2, 7), "microbatches=7 of DualPipeV on 4 ranks is below 8"),
        (
            ("Interleaved1F1B", 4, 2, 23),
            "microbatches=23 of Interleaved1F1B on 4 ranks does not divide into 5 equal rounds: use 20 or 24",
        ),
        (("DualPipe", 3, 1, 6), "ranks=3 of DualPipe is odd: use an even number"),
        (("DualPipe", 4, 1, 9), "microbatches=9 of DualPipe is odd: use an even number"),
        (("ZB-H2", 4, 1, 0), "microbatches=0 of ZB-H2 on 4 ranks is below 1"),
    ],
)
def test_refused_with_the_rule_and_the_way_out(case, message):
    with pytest.raises(LayoutError, match=message):
        build_order(*case)


@quick
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 12), st.integers(1, 60))
def test_nearest_microbatches_named_are_accepted(name, p, m):
    if FAULTS[int(order_fault(name, p, 1, m))] == "unequal_rounds":
        down, up = why_not(name, p, 1, m).rpartition("use ")[2].split(" or ")
        assert int(down) < m < int(up)
        between = np.arange(int(down), int(up) + 1)
        fine = order_fault(name, p, 1, between) == 0
        assert fine[0]
        assert fine[-1]
        assert not fine[1:-1].any()


def test_faults_of_a_table_are_those_of_its_rows():
    p, v, m = np.meshgrid(np.arange(1, 7), np.arange(4), np.arange(14), indexing="ij")
    for name in SCHEDULES:
        faults = order_fault(name, p, v, m)
        for row in np.ndindex(faults.shape):
            assert (faults[row] > 0) == bool(why_not(name, int(p[row]), int(v[row]), int(m[row])))


def test_runnable_schedules_are_those_of_torch():
    assert {name for name, row in SCHEDULES.items() if row.runnable} == {*SINGLE, *MULTI}


# Properties


@st.composite
def orders(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    p = draw(st.integers(1, 10))
    v = SCHEDULES[name].chunks or draw(st.integers(1, 5))
    m = draw(st.integers(1, 40))
    if why_not(name, p, v, m):  # nearest that it takes
        p, m = p + p % 2 if name == "DualPipe" else p, 2 * p * (m // (2 * p) + 2)
    return build_order(name, p, v, m)


@quick
@given(orders())
def test_every_stage_runs_every_microbatch_once(order):
    seen = Counter(zip(order.stage.tolist(), order.kind.tolist(), order.microbatch.tolist(), strict=True))
    assert set(seen.values()) == {1}
    for stage in range(order.stages):
        for n in range(order.microbatches):
            forward, full, input_grad, weight = (seen[stage, kind, n] for kind in range(len(KINDS)))
            assert forward == 1
            assert (full, input_grad, weight) in ((1, 0, 0), (0, 1, 1))


@quick
@given(orders())
def test_a_stage_runs_on_its_rank_and_in_turn(order):
    for rank in range(order.ranks):
        place = {row[:3]: at for at, row in enumerate(our_rows(order, rank))}
        for (stage, kind, n), at in place.items():
            assert order.stage_rank[stage] == rank
            before = {"F": None, "B": "F", "I": "F", "W": "I"}[kind]
            assert before is None or place[stage, before, n] < at


@quick
@given(orders())
def test_actions_make_the_order_they_come_from(order):
    if order.pipelines == 2:
        return
    again = order_of(order.schedule, [order.actions(rank) for rank in range(order.ranks)])
    for column in ("stage_rank", "starts", "kind", "stage", "microbatch", "fused"):
        assert getattr(again, column).tolist() == getattr(order, column).tolist()


def test_an_action_reads_as_in_torch():
    assert str(Action(0, "F", 3, Action(7, "B", 1))) == "(0F3;7B1)"
    assert str(Action(2, "W", 0)) == "2W0"


def test_orders_are_shared_and_cannot_be_changed():
    order = build_order("1F1B", 2, 1, 2)
    assert order is build_order("1F1B", 2, 1, 2)
    with pytest.raises(ValueError, match="read-only"):
        order.stage[0] = 1
