"""Peak memory of published runs, as each was measured: allocated, reserved, or all that the device holds."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwright.check.runs_model import Row
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.fsdp_memory import fsdp_peak
from shardwright.plan.megatron_memory import Peak, megatron_peak
from shardwright.program import KnownProgram
from shardwright.units import GiB, MiB

UNIT_BYTES = {"GB": 1e9, "GiB": GiB, "MiB": MiB}
"""Of the units that tables state."""

KINDS = (
    ("allocated", "allocated"), ("reserved", "reserved"), ("nvidia-smi", "nvidia-smi"),
    ("max over stages", "zero-bubble"),
)  # fmt: skip
"""Words by which tables tell what was measured, and how it is called here; anything else is unstated."""

PEAKS: dict[str, Callable[[ModelSpec, Job, Sequence[Layout], float, Sequence[str]], Peak]] = {
    "fsdp": fsdp_peak, "megatron": megatron_peak, "deepspeed": megatron_peak,
}  # fmt: skip


class Memory(NamedTuple):
    """Bytes of the heaviest rank, by how they are measured."""

    allocated: float
    reserved: float
    device: float

    def of_kind(self, kind: str) -> float:
        """As ``kind`` measures; what is not stated is taken for the device's."""
        shown = {"allocated": self.allocated, "zero-bubble": self.allocated, "reserved": self.reserved}
        return shown.get(kind, self.device)


def memory_of(
    model: ModelSpec,
    job: Job,
    layout: Layout,
    known: KnownProgram,
    options: str,
    modules: tuple[str, ...] = (),
) -> Memory:
    """Memory of a layout that a program runs with ``options``, and recomputation of ``modules``."""
    family = "fsdp" if layout.zero_stage == 3 else known.family
    allocated = _allocated(model, job, layout, family, known.logit_bytes, modules)
    reserved = allocated * known.memory_margin(options)
    return Memory(allocated, reserved, reserved + known.beside_allocator(options))


@lru_cache(maxsize=4096)
def _allocated(
    model: ModelSpec, job: Job, layout: Layout, family: str, logit_bytes: float, modules: tuple[str, ...]
) -> float:
    """At the peak; many rows of a table repeat a configuration."""
    return float(PEAKS[family](model, job, [layout], logit_bytes, modules).allocated[0])


def measured_memory(row: Row) -> tuple[str, float] | None:
    """How a row measured its peak, and bytes; None: it did not."""
    if not row["peak_mem"] or row["peak_mem_unit"] not in UNIT_BYTES:
        return None
    stated = row["peak_mem_kind"].lower()
    kind = next((kind for word, kind in KINDS if word in stated), "unstated")
    return kind, float(row["peak_mem"]) * UNIT_BYTES[row["peak_mem_unit"]]


def recomputed_modules(row: Row) -> tuple[str, ...]:
    """Modules that a row or the hint in its note says are computed again: "selective (mla_up_proj, mlp)"."""
    found = re.search(r"selective \(([a-z_, ]+)\)", f"{row['recompute']} {row['note']}")
    return tuple(found[1].replace(" ", "").split(",")) if found else ()
