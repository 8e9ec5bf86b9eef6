"""Cluster: how many devices of what kind, and the links between them."""

import os
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from shardwright.bandwidth_map import Curve, MapRecord
from shardwright.description import Bandwidth, Bytes, Description, FlopsPerSecond, Seconds, nearest
from shardwright.errors import ClusterError, ShardwrightError

DEVICES = Path(__file__).parent / "data" / "devices"


class Link(Description):
    """A kind of link as one rank sees it: one direction, after protocol efficiency."""

    error: ClassVar[type[ShardwrightError]] = ClusterError
    noun: ClassVar[str] = "link"

    bandwidth: Bandwidth
    latency: Seconds = Field(ge=0, description="of a hop of a large message, at full bandwidth")
    small_latency: Seconds = Field(
        default_factory=lambda values: values.get("latency", 0.0),
        ge=0,
        description="of a hop of a small message, at part of the bandwidth; if not given, latency",
    )
    ll128_latency: Seconds = Field(
        default=0.0,
        ge=0,
        description="of a hop of a ring by NCCL's LL128, at 0.92 of the bandwidth; 0: it has none",
    )
    start: Seconds = Field(default=0.0, ge=0, description="of a collective, whatever its size")
    ramp: Seconds = Field(
        default=0.0,
        ge=0,
        description="what filling its channels adds to an all-reduce of 1 MiB; grows with the root of size",
    )
    switch_bandwidth: Bandwidth = Field(
        default=0.0, ge=0, description="at which its switches add up an all-reduce (NVLS); 0: they cannot"
    )

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if self.bandwidth <= 0:
            raise ValueError(f"bandwidth={self.bandwidth} must be above 0")
        return self


class Level(Description):
    """A level of the links of a cluster: domains of ``ranks`` consecutive ranks, joined by ``link``.

    The link joins members of a domain that are in no smaller one together. Each rank has its own (an NVLink
    port, one NIC a GPU), or, ``shared``, each smaller domain has one (a PCIe switch's uplink, QPI between
    NUMA domains, an oversubscribed rack), whose ranks divide its bandwidth and reach it by their own link of
    the level below.
    """

    error: ClassVar[type[ShardwrightError]] = ClusterError
    noun: ClassVar[str] = "level"

    name: str
    ranks: PositiveInt
    link: Link
    shared: bool = False


FITTED = (
    *("matmul_efficiency", "gemm_fill", "fp8_factor", "attention_efficiency", "attention_backward"),
    *("memory_efficiency", "launch", "overlap"),
)
"""Fields of a device that a fit may change; besides its links."""


class Fit(Description):
    """Constants of a device fitted to published runs (scripts/fit_devices.py), with what they leave.

    ``intra`` and ``inter`` scale the bandwidth of its links; the others replace its fields. ``median`` and
    ``p90`` are of absolute errors ln(predicted / measured) over its ``rows``.
    """

    error: ClassVar[type[ShardwrightError]] = ClusterError
    noun: ClassVar[str] = "fit"

    date: str
    rows: NonNegativeInt
    median: NonNegativeFloat
    p90: NonNegativeFloat
    matmul_efficiency: float = Field(gt=0, le=1)
    gemm_fill: float = Field(ge=0)
    fp8_factor: float | None = Field(default=None, gt=0)
    attention_efficiency: float = Field(gt=0, le=1)
    attention_backward: float = Field(gt=0, le=2)
    memory_efficiency: float = Field(gt=0, le=1)
    launch: Seconds = Field(ge=0)
    overlap: float = Field(ge=0, le=1)
    intra: float = Field(gt=0, description="of the bandwidth between devices of one node")
    inter: float = Field(gt=0, description="of the bandwidth between nodes")


class Device(Description):
    """One device: capacities from its data sheet, efficiencies and overheads from measurements.

    ``source`` says where each number comes from.
    """

    error: ClassVar[type[ShardwrightError]] = ClusterError
    noun: ClassVar[str] = "device"

    name: str
    aliases: tuple[str, ...] = ()
    kind: Literal["cuda", "rocm", "cpu"]
    memory: Bytes = Field(gt=0, description="what a process can allocate")
    memory_bandwidth: Bandwidth = Field(gt=0)
    bf16: FlopsPerSecond = Field(gt=0, description="dense peak")
    fp8: FlopsPerSecond = Field(default=0.0, ge=0, description="dense peak; 0: the device has no such units")
    fp32: FlopsPerSecond = Field(gt=0)
    fp64: FlopsPerSecond = Field(gt=0)
    matmul_efficiency: float = Field(gt=0, le=1, description="share of the peak of large products")
    fp8_factor: float = Field(default=0.89, gt=0, description="matmul_efficiency in fp8 over that in bf16")
    sms: NonNegativeInt = Field(
        default=0, description="multiprocessors that share out a product's tiles; 0: it runs at one rate"
    )
    gemm_fill: NonNegativeFloat = Field(
        default=128, description="steps of the inner dimension that filling a tile's pipeline costs"
    )
    attention_efficiency: float = Field(gt=0, le=1, description="of a causal sequence of 8192")
    attention_backward: float = Field(
        default=1.0, gt=0, le=2, description="rate of attention's backward pass over that of forward"
    )
    memory_efficiency: float = Field(gt=0, le=1)
    launch: Seconds = Field(default=5e-6, ge=0, description="of one kernel, where it does not hide")
    context: Bytes = Field(ge=0, description="held by driver, kernels and libraries in every process")
    communicator: Bytes = Field(ge=0, description="buffers of one communicator")
    allocator_margin: float = Field(ge=0, lt=1, description="share of allocated lost to fragmentation")
    host_bandwidth: Bandwidth = Field(
        default=25e9,
        gt=0,
        description="to host memory, one direction; 25 GB/s: PCIe 4, as measured by copies",
    )
    host_memory: Bytes = Field(
        default=128 * 10**9, ge=0, description="of the host, a device's share; 1 TB for 8: an assumption"
    )
    host_memory_bandwidth: Bandwidth = Field(
        default=20e9, gt=0, description="of host memory, a device's share; an assumption"
    )
    overlap: float = Field(
        default=1.0, ge=0, le=1, description="share of communication that may run beside computation"
    )
    fit: "Fit | None" = Field(default=None, description="what published runs say of it; else a priori")
    gpus_per_node: PositiveInt = 8
    intra_link: Link = Field(description="between devices of one node")
    inter_link: Link = Field(description="between nodes, per device")
    source: str

    @property
    def fitted(self) -> "Device":
        """With the constants of its ``fit``, if it has one."""
        if self.fit is None:
            return self
        changes: dict[str, Any] = {
            name: value
            for name, value in self.fit.model_dump(exclude_none=True).items()
            if name in FITTED and name in Device.model_fields
        }
        for link, scale in (("intra_link", self.fit.intra), ("inter_link", self.fit.inter)):
            known = getattr(self, link)
            rates = {"bandwidth": known.bandwidth, "switch_bandwidth": known.switch_bandwidth}
            changes[link] = known.model_copy(update={name: rate * scale for name, rate in rates.items()})
        return self.model_copy(update=changes | {"fit": None})

    def peak(self, precision: str) -> float:
        """Dense peak of ``precision`` [FLOP/s]."""
        return {"bf16": self.bf16, "fp8": self.fp8 or self.bf16, "fp32": self.fp32, "fp64": self.fp64}[
            precision
        ]


class Cluster(Description):
    """``ranks`` devices of one kind, ``gpus_per_node`` in each node, joined by levels of links.

    ``levels`` is given, innermost first, where links are other than the device's own: NVLink pairs on a PCIe
    switch, racks with few uplinks. Without it there are nodes and a network: ``domains`` says what holds.
    """

    error: ClassVar[type[ShardwrightError]] = ClusterError
    noun: ClassVar[str] = "cluster"

    ranks: PositiveInt
    gpus_per_node: PositiveInt
    device: Device
    levels: tuple[Level, ...] = Field(default=(), description="of links, if not the device's own")
    price_per_device_hour: NonNegativeFloat = 0.0
    assumed: tuple[str, ...] = Field(default=(), description="what was not given, and the value taken")
    curves: tuple[Curve, ...] = Field(default=(), description="measured times of collectives, by size")
    map: MapRecord | None = Field(default=None, description="what else was measured; no plan holds it")

    @model_validator(mode="after")
    def _levels_nest(self) -> Self:
        found = list(self._level_faults()) if self.levels else []
        found += [
            f"curve of {curve.collective} has members={list(curve.members)}, the cluster has levels "
            f"{[level.name for level in self.domains]}: give one number a level"
            for curve in self.curves
            if len(curve.members) != len(self.domains)
        ]
        if found:
            raise ValueError("; ".join(found))
        return self

    def _level_faults(self) -> Iterator[str]:
        names, sizes = [level.name for level in self.levels], [level.ranks for level in self.levels]
        if len(set(names)) < len(names):
            yield f"levels are named {names}: give each a name of its own"
        for inner, outer in pairwise(self.levels):
            if outer.ranks <= inner.ranks or outer.ranks % inner.ranks:
                yield (
                    f"level {outer.name!r} of {outer.ranks} ranks is not made of whole domains of "
                    f"{inner.name!r} of {inner.ranks}: list levels from the innermost, each a multiple of "
                    "the one before"
                )
        if sizes[-1] < self.ranks:
            yield (
                f"level {names[-1]!r} joins {sizes[-1]} ranks, the cluster has {self.ranks}: add a level of "
                f"at least {self.ranks}"
            )
        if self.gpus_per_node not in sizes:
            yield f"gpus_per_node={self.gpus_per_node} is the size of no level: use one of {sizes}"

    @property
    def domains(self) -> tuple[Level, ...]:
        """Levels of links, innermost first: those given, or nodes and the network between them."""
        if self.levels:
            return self.levels
        node = Level(name="node", ranks=self.gpus_per_node, link=self.device.intra_link)
        if self.nodes == 1:
            return (node,)
        ranks = self.nodes * self.gpus_per_node
        return node, Level(name="network", ranks=ranks, link=self.device.inter_link)

    @property
    def intra_link(self) -> Link:
        """Link between ranks of one node, of its outermost level."""
        links = [level.link for level in self.levels if level.ranks == self.gpus_per_node]
        return links[0] if links else self.device.intra_link

    @property
    def inter_link(self) -> Link:
        """Link between nodes, for each rank, of the innermost level."""
        links = [level.link for level in self.levels if level.ranks > self.gpus_per_node]
        return links[0] if links else self.device.inter_link

    @property
    def nodes(self) -> int:
        """Nodes that hold the ranks, the last perhaps not full."""
        return -(-self.ranks // self.gpus_per_node)


def device_names() -> list[str]:
    """Names and aliases of the devices shipped with the package."""
    names = [name for device in _devices() for name in (device.name, *device.aliases)]
    return sorted(names)


def device(name: str, *, fitted: bool = False) -> Device:
    """A device shipped with the package, by name or alias, in any case; with what published runs say of it,
    or a priori.

    Raises: ClusterError: unknown; the message names the nearest.
    """
    wanted = name.lower()
    for candidate in _devices():
        if wanted in (candidate.name, *candidate.aliases):
            own = {"memory": host_memory()} if candidate.kind == "cpu" else {}
            known = candidate.model_copy(update=own)
            return known.fitted if fitted else known
    raise ClusterError(f"device {name!r} is unknown{nearest(wanted, device_names())}")


def cluster_of(
    device_name: str, ranks: int, gpus_per_node: int | None = None, *, fitted: bool = False
) -> Cluster:
    """A cluster of ``ranks`` devices, what is not given taken from the device and listed as assumed;
    ``fitted``: with what published runs say of the device.

    Raises: ClusterError: unknown device, or a count below 1.
    """
    kind = device(device_name, fitted=fitted)
    assumed = []
    per_node = gpus_per_node
    if per_node is None:
        per_node = ranks if kind.kind == "cpu" else kind.gpus_per_node
        assumed.append(f"gpus_per_node={per_node}")
    if kind.kind == "cpu":
        kind = share_of_host(kind, max(ranks, 1))
    if ranks > per_node:
        gigabits = kind.inter_link.bandwidth * 8 / 1e9
        nic = "gloo over loopback" if kind.kind == "cpu" else "one 400 Gb/s NIC each"
        assumed.append(f"inter-node link {gigabits:.0f} Gb/s usable per device ({nic})")
    values = {
        "ranks": ranks,
        "gpus_per_node": per_node,
        "device": kind,
        "assumed": tuple(assumed),
    }
    return Cluster.checked(values)


def share_of_host(cpu: Device, ranks: int) -> Device:
    """What one of ``ranks`` processes on this machine gets of its memory, bandwidth and cores."""
    cores_per_rank = usable_cores() / ranks
    return cpu.model_copy(
        update={
            "memory": cpu.memory // ranks,
            "memory_bandwidth": cpu.memory_bandwidth / ranks,
            "bf16": cpu.bf16 * cores_per_rank,
            "fp32": cpu.fp32 * cores_per_rank,
            "fp64": cpu.fp64 * cores_per_rank,
        }
    )


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory() -> int:
    """Physical memory of this machine [B]; 8 GiB where the system does not tell."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 8 * 2**30


@cache
def _devices() -> tuple[Device, ...]:
    return tuple(Device.from_file(path) for path in sorted(DEVICES.glob("*.toml")))
