"""A layout as people name it: read, and what they left out completed."""

import re
from collections.abc import Mapping
from typing import Any

from shardwright.axes import EXPERT_AXES, MESH_ORDER, MESH_ORDERS
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import (
    CONTEXT_KINDS,
    DISPATCH_KINDS,
    KEPT_BY_SELECTIVE,
    OFFLOAD_KINDS,
    RECOMPUTE_KINDS,
    SCHEDULE_NAMES,
)
from shardwright.model import ModelSpec
from shardwright.plan.columns import NAMED_COLUMNS, column_code
from shardwright.plan.schedule import SCHEDULES
from shardwright.plan.splits import MOST_LESS, ends_code, stage_layers

COLUMN_OF = {
    **{
        name: name
        for name in (
            *MESH_ORDER,
            *EXPERT_AXES,
            "dp",
            "sp",
            "schedule",
            "cp_kind",
            "chunks",
            "ends",
            "dispatch",
            "order",
            "recompute",
            "recompute_every",
            "loss_chunks",
            "offload",
        )
    },
    **dict.fromkeys(("zero", "zero_stage"), "zero_stage"),
    **dict.fromkeys(("b", "micro_batch"), "micro_batch"),
    **dict.fromkeys(("m", "microbatches"), "microbatches"),
    "v": "chunks",
}
"""Columns by the names that people give them, those of ``Layout.label`` among them; dp is all data ranks."""

MAY_BE_ZERO = ("sp", "ends", "zero_stage")

MOST = {"sp": 1, "zero_stage": 3}
"""Largest value of columns that have one."""

BARE: dict[str, tuple[str, int]] = {
    "sp": ("sp", 1),
    "no_sp": ("sp", 0),
    **{name.casefold().replace("-", "_"): ("schedule", i) for i, name in enumerate(SCHEDULE_NAMES) if i},
    **{name: ("cp_kind", i) for i, name in enumerate(CONTEXT_KINDS) if i},
}
"""Words that stand without a key, by their small letters."""


def parse_layout(text: str) -> dict[str, int]:
    """Columns of a layout as people write it and as ``Layout.label`` does: "tp=8 sp pp=4 1F1B b=1".

    Raises: LayoutError: an unknown word, a value that is none, one column twice.
    """
    found: dict[str, int] = {}
    for word in re.split(r"[\s,]+", text.strip()):
        for column, value in _word(word):
            if found.setdefault(column, value) != value:
                raise LayoutError(f"--why {text!r} gives {column} twice: leave one out")
    return found


def _word(word: str) -> list[tuple[str, int]]:
    """The columns of one word: two of ``recompute=full/2``, else one."""
    key, equals, value = word.partition("=")
    key = key.casefold().replace("-", "_")
    if not equals and key in BARE:
        return [BARE[key]]
    if not equals or key not in COLUMN_OF:
        names = ", ".join(name for name in SCHEDULE_NAMES if name != "none")
        raise LayoutError(
            f"--why: {word!r} is no part of a layout: give degrees as tp=8 ({', '.join(COLUMN_OF)}), sp, "
            f"a schedule ({names}) or a kind of cp ({', '.join(CONTEXT_KINDS[1:])})"
        )
    column = COLUMN_OF[key]
    kind, slash, every = value.partition("/")
    if column == "recompute" and slash:
        return [
            (column, column_code(column, kind, f"--why: {key}")),
            ("recompute_every", _number(word, key, "recompute_every", every)),
        ]
    if column in NAMED_COLUMNS:
        return [(column, column_code(column, value, f"--why: {key}"))]
    return [(column, _ends(word, value) if column == "ends" else _number(word, key, column, value))]


def _number(word: str, key: str, column: str, value: str) -> int:
    least, most = 0 if column in MAY_BE_ZERO else 1, MOST.get(column, 2**31)
    number = {"true": "1", "false": "0"}.get(value.casefold(), value)
    if not re.fullmatch(r"[0-9]{1,10}", number) or not least <= int(number) <= most:
        rule = f"from {least} to {most}" if column in MOST else f"of at least {least}"
        raise LayoutError(f"--why: {word!r}: {key} must be a whole number {rule}")
    return int(number)


def _ends(word: str, value: str) -> int:
    """The code of "1", an end of both, or of "0/1", of the first and of the last stage."""
    less = [int(part) if re.fullmatch(r"[0-9]{1,3}", part) else MOST_LESS + 1 for part in value.split("/")]
    code = ends_code(less[0], less[-1]) if len(less) <= 2 else None
    if code is None:
        raise LayoutError(
            f"--why: {word!r}: ends must be from 0 to {MOST_LESS}, layers less on both ends, or two "
            "numbers as 0/1, on the first and on the last stage"
        )
    return code


def completed(asked: Mapping[str, int], model: ModelSpec, job: Job, ranks: int) -> dict[str, int]:
    """All columns: ranks left over are data parallel, a microbatch is one sequence, a pipeline runs 1F1B, the
    sequence goes in a ring; ZeRO 3, in a pipeline 1; no recomputation, nothing on the host, and no sp unless
    experts need it, as in ``Layout.label``. Experts are cut by tp where ep shares none out over its ranks."""
    pp, cp, tp = (asked.get(axis, 1) for axis in ("pp", "cp", "tp"))
    rest = asked.get("dp", max(ranks // (pp * cp * tp), 1))
    replicate = asked.get("dp_replicate", max(rest // asked.get("dp_shard", rest), 1))
    shard = asked.get("dp_shard", max(rest // replicate, 1))
    schedule = asked.get("schedule", SCHEDULE_NAMES.index("1F1B" if pp > 1 else "none"))
    named = SCHEDULE_NAMES[schedule]
    fewest = 1 if named == "InterleavedZeroBubble" else 2
    chunks = (SCHEDULES[named].chunks or fewest) if named in SCHEDULES and pp > 1 else 1
    micro_batch = asked.get("micro_batch", 1)
    ep = asked.get("ep", 1)
    zero = 0 if shard * cp == 1 else 1 if pp > 1 else 3
    columns = {
        "pp": pp,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "cp": cp,
        "tp": tp,
        "ep": ep,
        "etp": tp if model.moe is not None and ep % tp else 1,
        "dispatch": DISPATCH_KINDS.index("all_to_all"),
        "order": 0,
        "sp": int(ep > 1 and tp > 1),
        "cp_kind": CONTEXT_KINDS.index("ring" if cp > 1 else "none"),
        "schedule": schedule,
        "chunks": chunks,
        "ends": 0,
        "zero_stage": zero,
        "micro_batch": micro_batch,
        "microbatches": max(job.global_batch // (replicate * shard * micro_batch), 1),
        "recompute": RECOMPUTE_KINDS.index("none"),
        "recompute_every": 1,
        "loss_chunks": 1,
        "offload": OFFLOAD_KINDS.index("none"),
    }
    return columns | {column: value for column, value in asked.items() if column != "dp"}


def layout_fields(columns: Mapping[str, int], model: ModelSpec) -> dict[str, Any]:
    """Fields of a Layout."""
    recompute, stages = RECOMPUTE_KINDS[columns["recompute"]], columns["pp"] * columns["chunks"]
    return {column: value for column, value in columns.items() if column != "ends"} | {
        "sp": bool(columns["sp"]),
        "dispatch": DISPATCH_KINDS[columns["dispatch"]],
        "order": MESH_ORDERS[columns["order"]],
        "offload": OFFLOAD_KINDS[columns["offload"]],
        "cp_kind": CONTEXT_KINDS[columns["cp_kind"]],
        "schedule": SCHEDULE_NAMES[columns["schedule"]],
        "recompute": recompute,
        "stage_layers": stage_layers(model.layers, stages, columns["ends"])
        if 1 < stages <= model.layers
        else (),
        "kept": KEPT_BY_SELECTIVE if recompute == "selective" else (),
    }
