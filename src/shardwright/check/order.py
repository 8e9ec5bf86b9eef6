"""What a pipeline rank does, action by action, and which of its actions are alike.

Alike actions change memory alike: the same kind of work of the same stage, first, last or between. So a short
pipeline, whose rank does all that a long one's does, tells what the long one holds.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from shardwright.layout import ScheduleName
from shardwright.plan.schedule import build_order, stage_ranks, why_not
from shardwright.run.pp import all_stages_gathered

REDUCE = "REDUCE_GRAD"

PASSES_BACK = ("B", "I", "W", REDUCE)
"""Kinds of action that make or move gradients."""

PASSES = ("F", *PASSES_BACK)
"""Kinds of action that may do something else the first or the last time."""

MOST_RANKS = 8
"""Ranks of the longest pipeline that is tried for a short one."""


class Action(NamedTuple):
    """A kind of work (F, B, I, W and what torch adds: SEND_F, UNSHARD, ...) of one of the rank's stages."""

    kind: str
    chunk: int
    microbatch: int | None


Work = tuple[str, int]
"""Kind and chunk of an action."""


class Likeness(NamedTuple):
    """What an action has in common with those that are like it.

    ``turn``: first, last or between, where it may matter. ``gradients``: what passes before have left of the
    stage's gradients, see ``_Gradients``. torch's schedules of one stage a rank fuse what they send and
    receive with the action behind, so there the neighbours count. The others run each action as one function;
    what they send was made by the one before.
    """

    work: Work
    turn: str
    gradients: tuple[bool, bool]
    before: Work | None = None
    behind: Work | None = None


class _Gradients:
    """State of a stage's gradients: ``fresh`` from a pass for weights, or ``summed`` up, or both.

    FSDP looks for fresh ones when a backward pass reaches the stage's start, and adds them to the others.
    """

    def __init__(self) -> None:
        self.fresh, self.summed = False, False

    def after(self, kind: str) -> None:
        """Another action is through."""
        if kind in ("B", "I"):
            self.summed |= self.fresh or kind == "B"
            self.fresh = False
        if kind == "W":
            self.fresh = True


def chunks_of(schedule: ScheduleName, ranks: int, chunks: int, rank: int) -> dict[int, int]:
    """Place of each of a rank's stages among them, by its number."""
    placed = stage_ranks(schedule, ranks, chunks).tolist()
    return {stage: place for place, stage in enumerate(s for s, at in enumerate(placed) if at == rank)}


def actions_of(schedule: ScheduleName, ranks: int, chunks: int, microbatches: int, rank: int) -> list[Action]:
    """What torch's schedule has a rank do in a step, sends and gathers of parameters included where the
    schedule lists them."""
    if schedule == "none":
        return [Action(kind, 0, n) for n in range(microbatches) for kind in ("F", "B")]
    kind = get_schedule_class(schedule)
    if issubclass(kind, PipelineScheduleSingle):
        order = build_order(schedule, ranks, chunks, microbatches).actions(rank)
        return [*(Action(each.kind, 0, each.microbatch) for each in order), Action(REDUCE, 0, None)]
    chunk_of = chunks_of(schedule, ranks, chunks, rank)
    return [
        Action(each.computation_type.value, chunk_of[each.stage_index], each.microbatch_index)
        for action in _with_communication(schedule, ranks, chunks, microbatches)[rank]
        for each in action.sub_actions or (action,)
    ]


@lru_cache(maxsize=64)
def _with_communication(
    schedule: ScheduleName, ranks: int, chunks: int, microbatches: int
) -> dict[int, list[Any]]:
    """torch's actions of every rank."""
    stage = SimpleNamespace(
        num_stages=ranks * chunks, group_size=ranks, group_rank=0, stage_index=0, submod=None
    )
    with all_stages_gathered(chunks):
        made: Any = get_schedule_class(schedule)([stage] * chunks, microbatches, loss_fn=max)
    orders: dict[int, list[Any]] = made.pipeline_order_with_comms
    return orders


def likenesses(schedule: ScheduleName, actions: Sequence[Action]) -> list[Likeness]:
    """Of each action in its place."""
    works = [(action.kind, action.chunk) for action in actions]
    count, done = Counter(works), Counter[Work]()
    gradients: dict[int, _Gradients] = defaultdict(_Gradients)
    found = []
    for kind, chunk in works:
        done[kind, chunk] += 1
        nth, state = done[kind, chunk], gradients[chunk]
        turn = "first" if nth == 1 else "last" if nth == count[kind, chunk] else "between"
        known = (state.fresh, state.summed and kind != "W") if kind in PASSES_BACK else (False, False)
        found.append(Likeness((kind, chunk), turn if kind in PASSES else "", known))
        state.after(kind)
    if schedule == "none" or not issubclass(get_schedule_class(schedule), PipelineScheduleSingle):
        return [
            each._replace(before=before) if each.work[0].startswith("SEND") else each
            for each, before in zip(found, [None, *works[:-1]], strict=True)
        ]
    neighbours = zip([None, *works[:-1]], [*works[1:], None], strict=True)
    return [
        each._replace(before=before, behind=behind)
        for each, (before, behind) in zip(found, neighbours, strict=True)
    ]


class Short(NamedTuple):
    """A pipeline whose rank does all that a longer one's does, less often."""

    ranks: int
    rank: int
    microbatches: int
    more: int  # the next number of microbatches that does so too


def short_pipeline(
    schedule: ScheduleName, ranks: int, chunks: int, microbatches: int, rank: int
) -> Short | None:
    """The least pipeline in which a rank at the same end, or in the middle, has an action like each of this
    rank's; None if none is shorter."""
    needed = set(likenesses(schedule, actions_of(schedule, ranks, chunks, microbatches, rank)))

    def does_all(fewer: int, count: int, place: int) -> bool:
        actions = actions_of(schedule, fewer, chunks, count, place)
        return needed <= set(likenesses(schedule, actions))

    for fewer in range(2, min(ranks, MOST_RANKS) + 1):
        counts = [
            n for n in range(3, min(microbatches, 4 * fewer + 1)) if not why_not(schedule, fewer, chunks, n)
        ]
        for place in _places(rank, ranks, fewer):
            enough = [count for count in counts if does_all(fewer, count, place)]
            for count, more in itertools.pairwise(enough):
                if (microbatches - count) % (more - count) == 0:
                    return Short(fewer, place, count, more)
    return None


def _places(rank: int, ranks: int, fewer: int) -> Sequence[int]:
    if rank == 0:
        return (0,)
    return (fewer - 1,) if rank == ranks - 1 else range(1, fewer - 1)
