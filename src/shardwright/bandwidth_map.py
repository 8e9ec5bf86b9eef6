"""What was measured of a cluster: curves that the planner uses, pairs of ranks that people look at."""

from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from shardwright.description import Bandwidth, Bytes, Description, Seconds
from shardwright.errors import ClusterError, ShardwrightError

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]

UNREACHED = "-"
"""Class of a pair of which nothing is known."""


class Curve(Description):
    """Measured times of one collective over groups of one kind, by size.

    ``members`` of a group share a domain of each level of the cluster, innermost first: of two nodes, (4, 4)
    is a group of four inside a node, (4, 8) one of eight with four on each, (1, 2) one rank on each (a rail).
    ``sizes`` are payloads as plan/collectives.py counts them: the whole tensor; of an all-to-all what a rank
    gives, its own part too; of a send what goes to the neighbour.
    """

    error: ClassVar[type[ShardwrightError]] = ClusterError
    noun: ClassVar[str] = "curve"

    collective: Collective
    members: tuple[PositiveInt, ...] = Field(min_length=1)
    sizes: tuple[Bytes, ...] = Field(min_length=1)
    times: tuple[Seconds, ...] = Field(description="median of one call at each size")
    spread: tuple[float, ...] = Field(default=(), description="of those times, (90 % - 10 %) / median")
    source: str = Field(default="", description="how it was measured, or the file it was read from")

    @property
    def ranks(self) -> int:
        """Ranks of a group."""
        return self.members[-1]

    @model_validator(mode="after")
    def _points_match(self) -> Self:
        faults = [
            f"{name} has {len(values)} values, sizes {len(self.sizes)}: give one a size"
            for name, values in (("times", self.times), ("spread", self.spread or self.times))
            if len(values) != len(self.sizes)
        ]
        if any(after <= before for before, after in zip(self.sizes, self.sizes[1:], strict=False)):
            faults.append("sizes do not grow: list points from the smallest to the largest, each once")
        if any(time <= 0 for time in self.times):
            faults.append("times must be above 0")
        if any(after % before for before, after in zip(self.members, self.members[1:], strict=False)):
            faults.append(f"members={list(self.members)} are no whole groups inside one another")
        if faults:
            raise ValueError("; ".join(faults))
        return self


class Pair(NamedTuple):
    """One direction between two ranks: large messages [B/s], and the time of a small one [s]."""

    source: NonNegativeInt
    target: NonNegativeInt
    bandwidth: float
    latency: float


class Nic(Description):
    """A network card of a node, and the class of its link to each of the node's devices."""

    error: ClassVar[type[ShardwrightError]] = ClusterError
    noun: ClassVar[str] = "nic"

    name: str
    device: str = Field(default="", description="as the driver calls it: mlx5_0")
    classes: tuple[str, ...] = Field(description="to each device of the node, in their order; - : not known")
    bandwidth: Bandwidth = Field(default=0.0, ge=0, description="one direction; 0: not known")


class Unmeasured(Description):
    """Something that was to be measured and was not: ``reason`` says why, ``failed`` that it was a fault."""

    error: ClassVar[type[ShardwrightError]] = ClusterError
    noun: ClassVar[str] = "unmeasured"

    what: str
    ranks: tuple[NonNegativeInt, ...] = ()
    reason: str
    failed: bool = False


class DevicePoint(Description):
    """One operation measured on a device, beside what the step-time model says of it.

    ``shape``: of a product rows, columns, inner dim; of attention query heads, key heads, sequence, head
    size; of a copy its bytes; of the optimizer parameters; of a launch nothing. ``rate`` in FLOP/s or B/s; of
    a launch 0.
    """

    error: ClassVar[type[ShardwrightError]] = ClusterError
    noun: ClassVar[str] = "device_point"

    what: Literal["product", "attention_forward", "attention_backward", "copy", "optimizer", "launch"]
    name: str
    shape: tuple[PositiveInt, ...] = ()
    precision: str = ""
    time: Seconds = Field(gt=0, description="median of one call")
    spread: float = Field(default=0.0, ge=0, description="(90 % - 10 %) / median")
    rate: float = Field(default=0.0, ge=0)
    predicted: Seconds = Field(default=0.0, ge=0, description="with the constants fitted here")

    @property
    def tests_the_fit(self) -> bool:
        """Whether several operations share its constant: one that has its own is always met."""
        return self.what in ("product", "copy", "optimizer")


class MapRecord(Description):
    """How a bandwidth map came about, with everything in it that no plan needs.

    ``classes``: link class of every pair of one node's devices, as `nvidia-smi topo -m` names them (X, NV#,
    PIX, PXB, PHB, NODE, SYS), a row a device; empty where no topology was read.
    """

    error: ClassVar[type[ShardwrightError]] = ClusterError
    noun: ClassVar[str] = "map"

    date: str = ""
    source: str = Field(default="", description="gloo or nccl with versions, or the files read")
    hosts: tuple[str, ...] = Field(default=(), description="of each rank")
    pairs: tuple[Pair, ...] = ()
    classes: tuple[tuple[str, ...], ...] = ()
    affinity: tuple[str, ...] = Field(default=(), description="CPU affinity of each device of the node")
    numa: tuple[str, ...] = Field(default=(), description="NUMA affinity of each device of the node")
    nics: tuple[Nic, ...] = ()
    unmeasured: tuple[Unmeasured, ...] = ()
    device_points: tuple[DevicePoint, ...] = ()
