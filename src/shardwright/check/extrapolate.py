"""A long step from two shorter ones: what it holds when, and what it sends, exactly.

The second program has one period of layers more, and some microbatches more. What an action does in a stage
with more layers is what it does in the first, with the second's insertion repeated; a step with more
microbatches is its own order of actions, each like one that was executed. Where the two tapes do not differ
by an insertion, the change from start to end is linear still, and the height between is bounded; if the bound
might be the peak, there is no answer, and all has to be executed.
"""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from shardwright.check.marks import OF_MICROBATCHES, SETTLED
from shardwright.check.order import Action, Likeness, actions_of, likenesses
from shardwright.check.shorter import Pair, Program
from shardwright.check.stretch import (
    NOTHING,
    Rise,
    Stretch,
    plus,
    scaled,
    sent_plus,
    sent_times,
    stretch_of,
    then,
    times,
)
from shardwright.check.tape import INITIAL, Event, Segment


class Step(NamedTuple):
    """A whole step: held at rest (when the gradients are complete), and what it comes to."""

    at_rest: tuple[int, ...]
    whole: Stretch


class _Part(NamedTuple):
    """A part of a step: exact, or exact but for its rise, which is ``ceiling`` at most [B]."""

    stretch: Stretch
    ceiling: int | None = None


def executed_step(segments: Iterable[Segment]) -> Step:
    """A step of which everything was executed."""
    step = _joined((segment.label, _Part(stretch_of(segment.events, segment.sent))) for segment in segments)
    assert step is not None
    return step


def extrapolated_step(
    program: Program, pair: Pair, first: Sequence[Segment], second: Sequence[Segment]
) -> Step | None:
    """The step of ``program`` from the tapes of ``pair``; None if they do not tell."""
    few, more = _alike(pair.first, first), _alike(pair.second, second)
    if few is None or more is None:
        return None
    around = [(a.label, _around(a, b, pair)) for a, b in zip(_pieces(first), _pieces(second), strict=True)]
    actions = []
    found: dict[Likeness, _Part] = {}
    for likeness in _likenesses(program):
        if likeness not in found:
            found[likeness] = _between(few[likeness], more[likeness], pair.periods)
        actions.append((likeness, found[likeness]))
    return _joined([*around[:2], *actions, *around[2:]])


def _likenesses(program: Program) -> list[Likeness]:
    layout = program.layout
    return likenesses(
        layout.schedule,
        actions_of(layout.schedule, layout.pp, layout.chunks, layout.microbatches, program.pp_rank),
    )


def _alike(program: Program, segments: Sequence[Segment]) -> dict[Likeness, Segment] | None:
    """One segment for each kind of action; None if two that should be alike are not."""
    done = [segment for segment in segments if isinstance(segment.label, Action)]
    found: dict[Likeness, Segment] = {}
    for likeness, segment in zip(_likenesses(program), done, strict=True):
        known = found.setdefault(likeness, segment)
        if (known.events, known.sent) != (segment.events, segment.sent):
            return None
    return found


def _pieces(segments: Sequence[Segment]) -> list[Segment]:
    return [segment for segment in segments if not isinstance(segment.label, Action)]


def _around(first: Segment, second: Segment, pair: Pair) -> _Part:
    """A piece of the step that is no action."""
    count = pair.lacking if first.label in OF_MICROBATCHES else pair.periods
    if first.label == INITIAL:
        stretch = _linear(first, second, count)
        return _Part(stretch._replace(rise=Rise(stretch.net)))
    return _between(first, second, count)


def _between(first: Segment, second: Segment, count: int) -> _Part:
    """A part of the step, the first's with ``count`` times what the second has more."""
    inserted = insertions(first.events, second.events)
    if inserted is not None:
        stretch, behind = NOTHING, 0
        for place, events in inserted:
            stretch = then(stretch, stretch_of(first.events[behind:place]))
            stretch = then(stretch, times(stretch_of(events), count))
            behind = place
        stretch = then(stretch, stretch_of(first.events[behind:]))
        return _Part(stretch._replace(sent=_linear(first, second, count).sent))
    stretch = _linear(first, second, count)
    grown = sum(n for _, n in second.events if n > 0) - sum(n for _, n in first.events if n > 0)
    rise = stretch_of(first.events).rise
    return _Part(stretch, (0 if rise is None else rise.total) + count * max(grown, 0))


Insertion = tuple[int, Sequence[Event]]
"""Place in the first tape, and what stands there in the second."""


def insertions(first: Sequence[Event], second: Sequence[Event]) -> list[Insertion] | None:
    """What the second has more, in order; None if they differ by more than that.

    One insertion is sure, whichever of its rotations is found. Several must each stand beside their like, or
    they might not be what a further period adds.
    """
    shorter = min(len(first), len(second))
    start = next((i for i in range(shorter) if first[i] != second[i]), shorter)
    more = len(second) - len(first)
    if more < 0:
        return None
    if first[start:] == second[start + more :]:
        return [(start, second[start : start + more])] if more else []
    a, b = ([tuple(event) for event in events] for events in (first, second))
    found: list[Insertion] = []
    for tag, i, _, j, end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        inserted = b[j:end]
        if tag == "insert" and inserted in (a[i : i + end - j], a[max(i - (end - j), 0) : i]):
            found.append((i, second[j:end]))
        elif tag != "equal":
            return None
    return found


def _linear(first: Segment, second: Segment, count: int) -> Stretch:
    """Change and traffic of a part, without its rise."""
    a, b = (stretch_of(segment.events, segment.sent) for segment in (first, second))
    net = plus(a.net, scaled(plus(b.net, scaled(a.net, -1)), count))
    more = sent_plus(b.sent, sent_times(a.sent, -1))
    return Stretch(net, None, sent_plus(a.sent, sent_times(more, count)))


def _joined(parts: Iterable[tuple[object, _Part]]) -> Step | None:
    """The parts one behind the other; None if a bounded one might be the highest."""
    whole, at_rest, highest = NOTHING, NOTHING.net, 0
    for label, part in parts:
        if label == SETTLED:
            at_rest = whole.net
        if part.ceiling is not None:
            highest = max(highest, sum(whole.net) + part.ceiling)
        whole = then(whole, part.stretch)
    if whole.rise is None or whole.rise.total < highest:
        return None
    return Step(at_rest, whole)
