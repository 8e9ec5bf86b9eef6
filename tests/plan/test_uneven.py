"""Ranks whose stages are unlike: columns of an order count what its actions, one by one, say."""

import numpy as np
import pytest

from shardwright.layout import SCHEDULE_NAMES
from shardwright.plan import uneven
from shardwright.plan.schedule import FORWARD, FULL, INPUT, SCHEDULES, WEIGHT, build_order, why_not
from shardwright.plan.stages import TWO_WAY, ranks_stages

SHAPES = [
    (p, chunks, m) for p in (2, 3, 4) for chunks in (1, 2, 3) for m in (1, 3, 4, 6, 8, 12)
]  # ranks, stages of each and microbatches


def walked(schedule, p, v, m, rank):
    """Point, kind and chunk of each pass that may be a rank's fullest moment, with what is in flight of each
    chunk and what only waits for gradients of weights; and where the first chunk is through."""
    order = build_order(schedule, p, v, m)
    mine = ranks_stages(schedule, p, v, rank)
    rows = slice(int(order.starts[rank]), int(order.starts[rank + 1]))
    in_flight, pending, left = [0] * v, [0] * v, [m] * v
    made, added, found, through = set(), set(), [], None
    for kind, stage in zip(order.kind[rows].tolist(), order.stage[rows].tolist(), strict=True):
        chunk = mine.index(stage)
        if kind == FORWARD:
            in_flight[chunk] += 1
        if kind == FORWARD or (kind == INPUT and stage == 0):
            continue
        kind = FULL if stage == 0 else kind
        point = {0: 0, 1: 1, v: 2}.get(len(made))
        adds = kind == INPUT and chunk in made and chunk not in added
        added |= {chunk} if adds else set()
        if point is not None and kind != WEIGHT and not (adds and point == 2):
            found.append((point, kind, chunk, *in_flight, *pending))
        if kind == INPUT:
            pending[chunk] += 1
            continue
        pending[chunk] -= kind == WEIGHT
        made.add(chunk)
        in_flight[chunk] -= 1
        left[chunk] -= 1
        if left[chunk] == 0 and through is None:
            through = (3, kind, chunk, *in_flight, *pending)
    return [*found, through]


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - TWO_WAY))
def test_moments_by_columns_are_those_of_the_actions(schedule):
    tried = 0
    for p, v, m in SHAPES:
        if SCHEDULES[schedule].chunks not in (0, v) or why_not(schedule, p, v, m):
            continue
        for rank in range(p):
            moments = uneven._moments(schedule, p, v, m, rank)
            columns = np.column_stack([part.reshape(len(moments.point), -1) for part in moments])
            assert columns.tolist() == [list(row) for row in walked(schedule, p, v, m, rank)], (p, v, m, rank)
            tried += 1
    assert tried > 4


def test_the_fullest_moment_counts_what_is_recomputed_a_tenth():
    """1F1B with interleaving on two ranks: of two layers a rank every second is recomputed, so that one of
    its stages keeps a whole block for each microbatch and the other a recomputed one."""
    code = SCHEDULE_NAMES.index("Interleaved1F1B")
    found = uneven._counted((False,) * 4, code, 2, 2, 0, 4, 3, 0)
    assert found is not None
    flights = [row[3:5] for row in walked("Interleaved1F1B", 2, 2, 4, 0) if row[0] == 0]
    held = [(plain, recomputed) for recomputed, plain in flights]  # layers 0 and 2: the first is recomputed
    fullest = max(held, key=lambda each: each[0] + uneven.RECOMPUTED * each[1])
    head = uneven.PLACES.index("head")
    assert tuple(found[0, head, :2]) == fullest
