"""How a pipeline's stages split the layers, and the integer that stands for a split in a table's ``ends``.

Codes 0 to 3 take so many layers off both the first and the last stage, which hold embedding and head; the
codes after them take unequal numbers off the two, see ``ENDS``. Codes from ``GIVEN`` on stand for splits
that a user gave in full: they are numbered as they come, within a process.
"""

from itertools import product

from shardwright.errors import LayoutError
from shardwright.layout import Layout

MOST_LESS = 3
"""Layers that an end can have less at most, in the splits that have a code of their own."""

ENDS = (
    *((less, less) for less in range(MOST_LESS + 1)),
    *(pair for pair in product(range(MOST_LESS + 1), repeat=2) if pair[0] != pair[1]),
)
"""Layers that the first and the last stage have less than the even split gives, by code."""

GIVEN = len(ENDS)

_given: list[tuple[int, ...]] = []  # splits in full, by code less GIVEN


def stage_layers(layers: int, stages: int, ends: int = 0) -> tuple[int, ...]:
    """Layers of each stage: as even as can be, the first and the last stage less by ``ENDS``.

    What does not divide goes to the stages before the last, from the second and then the first, none is
    dropped.
    """
    if ends >= GIVEN:
        return _given[ends - GIVEN]
    short = [0] * stages
    short[0], short[-1] = ENDS[ends]
    base, rest = divmod(layers + sum(short), stages)
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 2 else list(range(stages))
    more = set(order[:rest])
    return tuple(base + (stage in more) - short[stage] for stage in range(stages))


def ends_of(layout: Layout, layers: int) -> int:
    """The ``ends`` column of a layout.

    Raises: LayoutError: its stages have not ``layers`` layers.
    """
    split = layout.stage_layers
    if not split:
        return 0
    if sum(split) != layers:
        raise LayoutError(
            f"stage_layers={list(split)} add up to {sum(split)}, the model has layers={layers}: use "
            f"{list(stage_layers(layers, len(split)))}"
        )
    for ends in range(GIVEN):
        if split == stage_layers(layers, len(split), ends):
            return ends
    if split not in _given:
        _given.append(split)
    return GIVEN + _given.index(split)


def ends_code(first: int, last: int) -> int | None:
    """The code of so many layers less on the first and the last stage; None: there is none."""
    return ENDS.index((first, last)) if (first, last) in ENDS else None
