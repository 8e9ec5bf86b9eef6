"""Evidence: what the readers found in the files, as plain records. Findings are functions of this alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from shardwright.cluster import Cluster
from shardwright.doctor.finding import Source
from shardwright.doctor.setting import Setting
from shardwright.measure.nccl_table import Table
from shardwright.measure.pair_table import PairList
from shardwright.measure.topology import Topology
from shardwright.model import ModelSpec
from shardwright.planfile import Plan

R = TypeVar("R")

UNKNOWN = ""
"""Process group of a line that names none."""


class Operation(NamedTuple):
    """A collective as a log or dump describes it; None where it does not say."""

    name: str  # ALLREDUCE, _ALLGATHER_BASE, nccl:all_reduce, ...
    numel_in: int | None = None
    numel_out: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str = ""

    @property
    def short(self) -> str:
        """The operation without backend, underscores and case: ALLREDUCE."""
        return plain_name(self.name)

    @property
    def text(self) -> str:
        """For people."""
        size = (
            ""
            if self.numel_in is None
            else f" of {self.numel_in:,} element{'s' if self.numel_in != 1 else ''}"
        )
        if self.numel_in is None and self.shape is not None:
            size = f" of shape {list(self.shape)}"
        if self.numel_out not in (None, self.numel_in):
            size += f" into {self.numel_out:,}"
        return f"{self.short}{size}"


def plain_name(name: str) -> str:
    """``nccl:_all_gather_base`` as ALLGATHER: all names of one collective as one."""
    bare = name.rpartition(":")[2].partition(" ")[0].replace("_", "").upper()
    for suffix in ("BASE", "INTOTENSOR", "TENSOR", "COALESCED", "SINGLE"):
        bare = bare.removesuffix(suffix) or bare
    return {"ALLREDUCEBARRIER": "BARRIER"}.get(bare, bare)


class Timeout(NamedTuple):
    """A rank waited too long in a collective."""

    source: Source
    rank: int | None
    group: str
    seq: int | None
    operation: Operation
    timeout: float | None  # s
    waited: float | None  # s
    time: float | None  # s since the start of the year, where the line has a clock


class Progress(NamedTuple):
    """How far a rank says it has come in a process group."""

    source: Source
    rank: int | None
    group: str
    failed: int | None
    enqueued: int | None
    started: int | None
    completed: int | None
    time: float | None
    name: str = ""


class DumpSignal(NamedTuple):
    """A rank was told of a timeout; ``origin`` is the rank that had it, None if it is this one or not
    said."""

    source: Source
    rank: int | None
    group: str
    origin: int | None
    own: bool
    time: float | None


class WatchdogStuck(NamedTuple):
    """The watchdog thread itself made no progress."""

    source: Source
    rank: int | None
    waited: float | None
    pending: int | None
    time: float | None


class Desync(NamedTuple):
    """A desync report or an analyser's: which ranks are behind, and where."""

    source: Source
    ranks: tuple[int, ...]
    state: str  # never_joined, not_finished, not_joined, missing, started
    seq: int | None
    operation: str = ""
    expected: tuple[int, ...] = ()
    frames: tuple[str, ...] = ()
    size: int | None = None


class Mismatch(NamedTuple):
    """Two ranks called different collectives, as torch itself found."""

    source: Source
    ranks: tuple[int, int]
    operations: tuple[str, str]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    seqs: tuple[int | None, int | None]
    dtypes: tuple[str, str] = ("", "")


class OpCount(NamedTuple):
    """An NCCL call as NCCL_DEBUG=INFO prints it."""

    source: Source
    process: str  # host:pid [device]
    comm: str
    rank: int | None
    ranks: int | None
    op: str
    number: int  # of the call
    numel: int
    datatype: int
    time: float | None


class CommInit(NamedTuple):
    """An NCCL communicator was made: which rank of how many a process is in it."""

    source: Source
    process: str
    comm: str
    rank: int
    ranks: int
    complete: bool
    name: str  # the same on all its ranks, where NCCL prints it


class Failure(NamedTuple):
    """Something broke: ``what`` is a key of crash_log.FAILURES."""

    source: Source
    rank: int | None
    what: str
    detail: str
    time: float | None
    host: str = ""
    ranks: tuple[int, ...] = ()  # others that the line names
    frames: tuple[str, ...] = ()


class Blamed(NamedTuple):
    """The rank that a launcher calls the root cause, which is only the first that it saw end."""

    source: Source
    rank: int
    exit_code: int | None


class Stack(NamedTuple):
    """Python frames of a rank's stuck collective, innermost first."""

    source: Source
    rank: int | None
    frames: tuple[str, ...]


class OutOfMemory(NamedTuple):
    """An allocator's refusal [B]; None where the message does not say."""

    source: Source
    rank: int | None
    device: int | None
    requested: int | None
    slack: int  # by which the printed request is rounded
    capacity: int | None
    free: int | None
    in_use: int | None  # by this process, all of it
    allocated: int | None
    reserved: int | None
    processes: tuple[tuple[int, int], ...]  # (pid, bytes) where the message lists them
    where: str  # cuda, cpu, nccl, host
    frames: tuple[str, ...]
    time: float | None


class MemoryReport(NamedTuple):
    """What some tool says of memory [B] at some moment."""

    source: Source
    rank: int | None
    moment: str
    allocated: int | None = None
    peak: int | None = None
    reserved: int | None = None
    device: int | None = None  # all of it in use, as nvidia-smi sees
    capacity: int | None = None


class Step(NamedTuple):
    """One line of a training log or metrics file; what it does not say is None. SI units."""

    source: Source
    rank: int | None
    step: int | None
    values: Mapping[str, float]
    time: float | None = None


class Message(NamedTuple):
    """A message of some program that names its own trouble; ``what`` is a key of message_log.MESSAGES."""

    source: Source
    rank: int | None
    what: str
    numbers: Mapping[str, Any]
    frames: tuple[str, ...] = ()


class State(NamedTuple):
    """What a rank of ours left when its run failed: its groups, and where it was, innermost frame first."""

    source: Source
    rank: int
    groups: Mapping[str, tuple[str, tuple[int, ...]]]  # name: description, ranks
    in_collective: bool
    error: str
    stack: tuple[str, ...]


class Silence(NamedTuple):
    """A run folder whose run has not ended by its own account, and how long its metrics have not grown
    [s]."""

    source: Source
    folder: str
    seconds: float


class World(NamedTuple):
    """Somebody says how many ranks there are."""

    source: Source
    size: int


@dataclass(frozen=True)
class Entry:
    """One collective of a flight recorder."""

    group: str
    seq: int | None
    p2p_seq: int | None
    is_p2p: bool
    operation: Operation
    state: str  # scheduled, started, completed
    created: float | None  # s
    frames: tuple[str, ...]
    sizes_in: tuple[tuple[int, ...], ...] = ()
    sizes_out: tuple[tuple[int, ...], ...] = ()
    number: int | None = None  # record_id
    timeout: float | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.state == "completed"


@dataclass(frozen=True)
class Dump:
    """A rank's flight recorder: members of its process groups, what they did last, and its entries."""

    source: Source
    rank: int | None
    version: str
    groups: Mapping[str, tuple[str, tuple[int, ...]]]  # name: description, ranks
    status: Mapping[str, tuple[int | None, int | None, int | None]]  # enqueued, started, completed
    entries: Sequence[Entry]


@dataclass(frozen=True)
class Run:
    """What a run folder of ours says."""

    folder: str
    world: int | None
    steps: int | None
    planned_steps: int | None
    finished: bool
    fault: str | None


@dataclass
class Evidence:
    """Everything the files say. ``notes``: files that could not be read, and why."""

    records: list[Any] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    plans: list[tuple[str, Plan]] = field(default_factory=list)
    models: list[tuple[str, ModelSpec]] = field(default_factory=list)
    clusters: list[tuple[str, Cluster]] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    given: Setting | None = None
    traces: list[Any] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    topologies: list[Topology] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pair_lists: list[PairList] = field(default_factory=list)
    listing: list[str] = field(default_factory=list)  # names of files in folders that were given
    notes: list[tuple[str, str]] = field(default_factory=list)
    inputs: list[tuple[str, str]] = field(default_factory=list)

    def of(self, kind: type[R]) -> list[R]:
        """Records of one kind, in the order of files and lines."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def model(self) -> ModelSpec | None:
        """The one model that is known, from a plan or a configuration."""
        for _, plan in self.plans:
            return plan.model
        for _, model in self.models:
            return model
        for setting in self.stated:
            if setting.model is not None:
                return setting.model
        return None

    @property
    def stated(self) -> list[Setting]:
        """Settings of the files, each filled with what a person has given, or that alone."""
        if self.given is None:
            return list(self.settings)
        return [setting.filled(self.given) for setting in self.settings] or [self.given]

    @property
    def setting(self) -> Setting | None:
        """All that is stated of the run as one; what an earlier file says stands."""
        found = None
        for setting in self.stated:
            found = setting if found is None else found.filled(setting)
        if found is not None and found.model is None and self.models:
            found = replace(found, model=self.models[0][1])
        return found

    @property
    def worlds(self) -> set[int]:
        """Numbers of ranks that the evidence states."""
        sizes = {record.size for record in self.of(World)}
        sizes |= {plan.layout.ranks for _, plan in self.plans}
        sizes |= {run.world for run in self.runs if run.world}
        sizes |= {setting.world for setting in self.stated if setting.world}
        for dump in self.dumps:
            sizes |= {len(ranks) for name, (_, ranks) in dump.groups.items() if name == "0" and ranks}
        return sizes
