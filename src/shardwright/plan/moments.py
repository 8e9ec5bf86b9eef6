"""Every moment of a step that can be the peak of memory, and what the heaviest rank holds then, by kind.

check/ compares every number with an executed step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.job import Job
from shardwright.layout import SCHEDULE_NAMES
from shardwright.model import ModelSpec
from shardwright.plan.activations import Kind
from shardwright.plan.amounts import Amounts, unit_amounts
from shardwright.plan.apart import (
    Weights,
    beside_two_passes,
    ends_a_turn,
    moments_apart,
    moments_of_tail,
)
from shardwright.plan.block_kinds import BlockKinds, block_kinds
from shardwright.plan.flight_points import TWO_PASSES
from shardwright.plan.flights import Flight, fullest
from shardwright.plan.holdings import (
    Held,
    HeldParts,
    RankStep,
    Role,
    merges_at_once,
    pooled_gradients,
    rank_step,
    roles_of,
)
from shardwright.plan.inside import (
    Inside,
    each_inside,
    each_weights,
    in_passes_apart,
    variants_of,
    worst_inside,
    worst_weights,
)
from shardwright.plan.rank_moments import (
    block_gathered,
    block_reduced,
    embedding_backward,
    first_block_copied_out,
    head_backward,
    head_gathered,
    head_reduced,
    inside_block,
    last_reduced,
    schedule_through,
)
from shardwright.plan.stages import Stage
from shardwright.plan.table import Floats, LayoutTable, Number, added
from shardwright.plan.uneven import more_in_flight

RUNNING_LOSS_BYTES = 8
"""The loss of earlier microbatches, fp64."""


def timeline(
    model: ModelSpec, job: Job, table: LayoutTable, stage: Stage, *, every_flight: bool = False
) -> Iterator[tuple[str, NDArray[np.bool_], Held]]:
    """Every moment of a step that can be the peak of a pipeline rank: its name, the rows that have it, and
    what is held. Of a pipeline with the fullest of the flights of plan/flights.py, or with each.
    """
    kinds, units = model_blocks(model, job, table), unit_amounts(model, job, table)
    variants, means = variants_of(table, kinds, stage)
    more = more_in_flight(model, table, stage, kinds, means)
    step, apart_ones = (
        rank_step(model, job, table, units, means, stage, more),
        in_passes_apart(variants, more),
    )
    every = [
        _Flights(at_head, in_block, apart, apart)
        for in_block, at_head, apart in zip(step.flights, step.head_flights, step.apart_flights, strict=True)
    ]
    insides = _Insides(
        lambda role: each_inside(merges_at_once(step, role), variants),
        lambda merges: each_weights(np.full((1,) * table.pp.ndim, merges), apart_ones),
        each=True,
    )
    for apart in (False, True)[: 1 + in_two_passes(table).all()]:
        flights = every if every_flight else [_fullest(step, apart=apart)]
        moments = _moments(step, _present_roles(table), insides, flights, apart=apart)
        yield from ((name, valid, parts.held) for name, valid, parts in moments)


def in_two_passes(table: LayoutTable) -> NDArray[np.bool_]:
    """Rows whose schedule makes the gradients of inputs and of weights apart, some of them or all."""
    return np.isin(table.schedule, [SCHEDULE_NAMES.index(name) for name in TWO_PASSES])


class PeakTerm(NamedTuple):
    """One moment in two parts: bytes that follow from how state is split, and those of a microbatch. The
    peak is the largest sum; a row that has not the moment has minus infinity."""

    state: Floats
    activations: Floats


def peak_terms(
    model: ModelSpec,
    job: Job,
    table: LayoutTable,
    stage: Stage,
    kinds: Mapping[Kind, BlockKinds],
    units: Mapping[str, Amounts],
    resting: Floats,
    *,
    pools: bool,
    apart: bool = False,
) -> Iterator[PeakTerm]:
    """The moments of ``timeline`` without their names, the moments inside a block as one; for large tables.
    Of several ranks at once, those of each.

    ``resting``: parameters and optimizer state of the rank, which every moment has besides. ``pools``:
    reduced gradients have their memory at every moment, see ``pooled_gradients``. ``apart``: the moments of
    rows ``in_two_passes`` alone, which are left out otherwise.
    """
    variants, means = variants_of(table, kinds, stage)
    more = more_in_flight(model, table, stage, kinds, means)
    step, apart_ones = (
        rank_step(model, job, table, units, means, stage, more),
        in_passes_apart(variants, more),
    )
    plain = worst_inside(step, np.zeros_like(table.micro_batch, dtype=bool), variants)

    def worst(role: Role) -> list[Inside]:
        merges = merges_at_once(step, role)
        return [worst_inside(step, merges, variants) if merges.any() else plain]

    @cache
    def weights(merges: bool) -> list[Inside]:
        return [worst_weights(step, np.full((1,) * table.pp.ndim, merges), apart_ones)]

    insides = _Insides(worst, weights, each=False)
    present = _present_roles(table)
    pool = pooled_gradients(step)
    for name, valid, held in _moments(step, present, insides, [_fullest(step, apart=apart)], apart=apart):
        there = valid & stage.valid
        if name.endswith("head backward"):
            there = there & (stage.head > 0)  # elsewhere it is in the last layer's moment as well
        gradients = pool if pools else held.gradients
        state = added(resting, gradients, held.gathered)
        activations = added(held.activations, held.logits, held.waiting)
        if stage.valid.ndim == table.pp.ndim:
            yield from _present(there, state, activations)
        for rank in range(len(stage.valid) if stage.valid.ndim > table.pp.ndim else 0):
            held_there = (_of_rank(part, rank, table) for part in (state, activations))
            yield from _present(_of_rank(there, rank, table), *held_there)


def _present_roles(table: LayoutTable) -> list[Role]:
    return [role for role in roles_of(table) if role.valid.any()]


def _of_rank(part: NDArray[Number], rank: int, table: LayoutTable) -> NDArray[Number]:
    """One of several ranks, which lie along an axis before those of the table."""
    return part[rank if len(part) > 1 else 0] if part.ndim > table.pp.ndim else part


def _present(there: NDArray[np.bool_], state: Floats, activations: Floats) -> Iterator[PeakTerm]:
    """A moment, unless no row has it."""
    if there.all():
        yield PeakTerm(state, activations)
    elif there.any():
        yield PeakTerm(state, activations + np.where(there, 0.0, -np.inf))


def model_blocks(model: ModelSpec, job: Job, table: LayoutTable) -> dict[Kind, BlockKinds]:
    """Activations of the kinds of blocks that a model has."""
    return {kind: block_kinds(model, job, table, kind) for kind in model.block_kinds}


class _Insides(NamedTuple):
    """Moments inside a block: of a backward pass, and of one for weights."""

    backward: Callable[[Role], Iterable[Inside]]
    weights: Weights
    each: bool  # of a pass apart, its first and its last layer


class _Flights(NamedTuple):
    """The flight with most at a head's backward pass, inside a block, and where a turn of passes apart ends
    or begins."""

    at_head: Flight
    in_block: Flight
    ending: Flight
    beginning: Flight


def _fullest(step: RankStep, *, apart: bool) -> _Flights:
    """``apart``: the last two are asked for, else the first two."""
    if len(step.flights) == len(step.head_flights) == len(step.apart_flights) == 1:
        (in_block,), (at_head,), (turn,) = step.flights, step.head_flights, step.apart_flights
        return _Flights(at_head, in_block, turn, turn)
    gradients = step.layers * step.mean.whole
    if not apart:
        in_block = fullest(step.flights, gradients)
        return _Flights(fullest(step.head_flights, gradients, step.head.whole), in_block, in_block, in_block)
    left = 0.0 if step.merges else step.layers * step.mean.fresh + step.head.fresh
    beginning = fullest(step.apart_flights, gradients, left)
    ending = fullest([_at_end(step, flight) for flight in step.apart_flights], gradients, left)
    return _Flights(beginning, beginning, ending, beginning)


def _at_end(step: RankStep, flight: Flight) -> Flight:
    """The flight where it may end a turn, else nothing."""
    ends = ends_a_turn(replace(step, flight=flight))
    return flight if ends.all() else flight._replace(others=np.where(ends, flight.others, -np.inf))


def _moments(
    whole: RankStep,
    roles: Iterable[Role],
    insides: _Insides,
    flights: Sequence[_Flights],
    *,
    apart: bool = False,
) -> Iterator[tuple[str, NDArray[np.bool_], HeldParts]]:
    piped = bool((whole.table.pp > 1).all())
    for role in roles:
        totals = np.where(role.older, RUNNING_LOSS_BYTES, 0)
        forward = replace(whole, ids=whole.ids + totals)
        step = replace(forward, ids=forward.ids + 2 * whole.wide)  # the loss and the gradient it starts from
        parts = (
            (_in_two_passes if apart else _in_a_pipeline)(step, role, insides, flights)
            if piped
            else _alone(forward, step, role, insides.backward(role))
        )
        yield from ((f"{role.name}: {name}", role.valid & rows, held) for name, rows, held in parts)


def _in_a_pipeline(
    whole: RankStep, role: Role, insides: _Insides, flights: Sequence[_Flights]
) -> Iterator[tuple[str, NDArray[np.bool_], HeldParts]]:
    """Parameters and gradients are whole all the time, so that the highest moment is where a microbatch has
    most: at the head, or in the last block; or where the reductions begin. Past a block nothing is reduced:
    less is held than in it."""
    every = np.ones_like(whole.table.pp, dtype=bool)
    at_once, ends = whole.apart == 0, whole.opens & (whole.stages > 1)
    for at_head, flight, *_ in flights:
        step, role = replace(whole, flight=at_head), role._replace(older=at_head.past > 0)
        yield f"{at_head.name}, head backward", at_once, _with_logits(step, head_backward(step, role))
        step, role = replace(whole, flight=flight), role._replace(older=flight.past > 0)
        for moment in insides.backward(role):
            held = beside_two_passes(step, ends, inside_block(step, role, step.layers - 1, moment))
            name, rows = f"{flight.name}, last layer, {moment.name}", moment.valid & (at_once | ends)
            yield name, rows, _with_logits(step, held)
    yield "first gradients reduced", every, schedule_through(whole, role)


def _in_two_passes(
    whole: RankStep, role: Role, insides: _Insides, flights: Sequence[_Flights]
) -> Iterator[tuple[str, NDArray[np.bool_], HeldParts]]:
    """What schedules have besides that make gradients of inputs and of weights apart."""
    every = np.ones_like(whole.table.pp, dtype=bool)
    for _, _, ending, beginning in flights:
        for point, begins in ((ending, False), (beginning, True)):
            step, role = replace(whole, flight=point), role._replace(older=point.past > 0)
            found = moments_apart(step, role, insides.weights, begins=begins, each=insides.each)
            yield from ((f"{point.name}, {name}", rows, held) for name, rows, held in found)
    for tail in whole.tails:
        step, role = replace(whole, flight=tail.flight), role._replace(older=every)
        found = moments_of_tail(step, role, insides.weights, tail, each=insides.each)
        yield from ((f"{tail.flight.name}, {name}", rows, held) for name, rows, held in found)


def _with_logits(step: RankStep, held: HeldParts) -> HeldParts:
    """And what other microbatches in flight have of logits."""
    return held._replace(logits=held.logits + step.flight.logits)


def _alone(
    forward: RankStep, step: RankStep, role: Role, inside: Iterable[Inside]
) -> Iterator[tuple[str, NDArray[np.bool_], HeldParts]]:
    """The moments of a rank that holds all layers, ``forward`` before there is a loss."""
    every, stage3 = np.ones_like(step.table.pp, dtype=bool), step.table.zero_stage == 3
    top, bottom = step.layers - 1, np.zeros_like(step.layers)
    places = ("last layer", "layer before the last", "layer 1", "first layer")
    layers = np.stack([top, np.maximum(top - 1, 0), np.minimum(top, 1), bottom])
    in_block = [(moment, inside_block(step, role, layers, moment)) for moment in inside]
    reduced = block_reduced(step, role, layers)
    gathers = (role.first | stage3) & (step.table.shard > 1)
    yield "first layer gathered", gathers, block_gathered(forward, role, bottom)
    yield "last layer gathered", gathers, block_gathered(forward, role, top)
    yield "head gathered", gathers, head_gathered(forward, role)
    yield "head backward", every, head_backward(step, role)
    if not step.tied:  # a tied head is reduced at the very end
        yield "head gradients reduced", every, head_reduced(step, role)
    for number, place in enumerate(places):
        for moment, held in in_block:
            yield f"{place}, {moment.name}", moment.valid, _at_place(step, held, number)
        yield f"{place}, gradients reduced", every, _at_place(step, reduced, number)
    yield "first layer, parameters copied out", stage3, first_block_copied_out(step, role)
    yield "embedding backward", every, embedding_backward(step, role)
    yield "last gradients reduced", every, last_reduced(step, role)


def _at_place(step: RankStep, held: HeldParts, number: int) -> HeldParts:
    """What is held at one of several layers, which lie along an axis before those of the rank."""
    return HeldParts(*(part[number] if part.ndim > step.layers.ndim else part for part in held))
