"""Plan: the one document of the product, ``plan.toml``. Complete, resolved, readable, with its prediction."""

import contextlib
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import NonNegativeFloat, model_validator

from shardwright.cluster import Cluster
from shardwright.description import Bytes, Description, Seconds, parse_toml, read_text
from shardwright.errors import PlanFileError, ShardwrightError
from shardwright.job import Job
from shardwright.layout import Layout, faults, model_faults
from shardwright.model import ModelSpec

SCHEMA_VERSION: Literal[1] = 1
"""Of plan.toml. A file of another version is refused with what to do."""

PLAN_FILE = "plan.toml"
"""Its name in a folder."""


class MemoryTerms(Description):
    """What the heaviest rank holds at its peak, by kind; the terms add up to ``total``."""

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    activations: Bytes
    logits: Bytes
    gathered: Bytes
    communicators: Bytes
    context: Bytes
    margin: Bytes

    @property
    def allocated(self) -> int:
        """Tensors alone."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.gathered
        )

    @property
    def reserved(self) -> int:
        """What the caching allocator takes."""
        return self.allocated + self.margin

    @property
    def total(self) -> int:
        """All that a process takes of its device."""
        return self.reserved + self.communicators + self.context


class Prediction(Description):
    """What the plan says a run will hold and take."""

    step_time: Seconds
    tokens_per_s_per_gpu: NonNegativeFloat
    mfu: NonNegativeFloat
    peak_moment: str
    memory: MemoryTerms


class Plan(Description):
    """A model, a job, a cluster and the layout that joins them, with the prediction for it."""

    error: ClassVar[type[ShardwrightError]] = PlanFileError
    noun: ClassVar[str] = "plan"

    schema_version: Literal[1] = SCHEMA_VERSION
    written_by: str = ""
    model: ModelSpec
    job: Job
    cluster: Cluster
    layout: Layout
    prediction: Prediction

    @model_validator(mode="after")
    def _layout_fits_job_and_cluster(self) -> Self:
        found = faults(self.layout, self.job, self.cluster) + model_faults(self.layout, self.model, self.job)
        if found:
            raise ValueError("; ".join(fault.message for fault in found))
        return self

    @classmethod
    def from_toml(cls, text: str, source: str = "") -> Self:
        """Read plan.toml.

        Raises: PlanFileError: another schema version (with what to do), or every fault of the file.
        """
        values = parse_toml(text, source, cls.error)
        _check_version(values.get("schema_version"), source)
        return cls.checked(values, source)


def load_plan(path: Path) -> Plan:
    """Read a plan file; a folder is taken for one that holds a plan.toml.

    Raises: PlanFileError
    """
    file = path / PLAN_FILE if path.is_dir() else path
    if not file.exists():
        where = f"folder {path} holds no {PLAN_FILE}" if path.is_dir() else f"plan file {path} does not exist"
        raise PlanFileError(f"{where}: make one with 'shardwright plan ... -o {file}'")
    return Plan.from_toml(read_text(file, PlanFileError), str(file))


def save_plan(plan: Plan, path: Path) -> Path:
    """Write a plan file, whole or not at all; a folder gets a plan.toml. Returns the file.

    Raises: PlanFileError
    """
    file = path / PLAN_FILE if path.is_dir() else path
    partial = file.with_name(file.name + ".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(plan.to_toml(), encoding="utf-8")
        partial.replace(file)
    except OSError as fault:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise PlanFileError(f"cannot write {file}: {fault.strerror}: give another path") from None
    return file


def _check_version(version: Any, source: str) -> None:
    if version == SCHEMA_VERSION and not isinstance(version, bool):
        return
    where = f" ({source})" if source else ""
    if version is None:
        raise PlanFileError(
            f"plan{where}: key 'schema_version' is missing: give a file that 'shardwright plan -o' wrote"
        )
    if not isinstance(version, int) or isinstance(version, bool):
        raise PlanFileError(f"plan{where}: schema_version={version!r} must be a whole number")
    older = version < SCHEMA_VERSION
    way = "plan again with 'shardwright plan'" if older else "upgrade shardwright, or plan again"
    raise PlanFileError(
        f"plan{where}: schema_version={version}, this shardwright reads {SCHEMA_VERSION}: {way}"
    )
