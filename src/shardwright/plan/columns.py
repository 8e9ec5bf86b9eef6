"""Columns of the table that stand for names, and how people write their values."""

from collections.abc import Mapping, Sequence

from shardwright.axes import MESH_ORDERS
from shardwright.description import nearest
from shardwright.errors import LayoutError
from shardwright.layout import (
    CONTEXT_KINDS,
    DISPATCH_KINDS,
    OFFLOAD_KINDS,
    RECOMPUTE_KINDS,
    SCHEDULE_NAMES,
)

NAMED_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "schedule": SCHEDULE_NAMES,
    "cp_kind": CONTEXT_KINDS,
    "recompute": RECOMPUTE_KINDS,
    "dispatch": DISPATCH_KINDS,
    "offload": OFFLOAD_KINDS,
    "order": tuple("/".join(order) for order in MESH_ORDERS),
}
"""Columns of the table that hold an index of these names."""


def column_code(column: str, name: str, subject: str) -> int:
    """What stands in a column of the table for a name; capitals and hyphens do not matter.

    Raises: LayoutError: no such name.
    """
    known = NAMED_COLUMNS[column]
    folded = {each.casefold().replace("-", "_"): code for code, each in enumerate(known)}
    code = folded.get(name.casefold().replace("-", "_"))
    if code is None:
        raise LayoutError(f"{subject}={name!r} is unknown{nearest(name, known)}")
    return code


def choices(column: str, values: Sequence[int]) -> str:
    """Values of a column as people write them: "1F1B or GPipe"."""
    names = NAMED_COLUMNS.get(column)
    return " or ".join(names[value] if names else str(value) for value in values)
