"""What stands around a table of nccl-tests: which program, how many ranks on which hosts, which devices."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardwright.measure.device_names import device_words
from shardwright.measure.nic_words import Nics

PROGRAMS: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "hypercube": "hypercube",
}
"""Names of nccl-tests' programs and of people, and ours of the collective."""

_NAMES = "|".join(sorted(PROGRAMS, key=len, reverse=True))
_PROGRAM = re.compile(rf"(?<![a-z])({_NAMES})_perf", re.IGNORECASE)
_WORD = re.compile(
    r"(?<!\w)(all[-_ ]?reduce|all[-_ ]?gather|reduce[-_ ]?scatter|all[-_ ]?to[-_ ]?all|sendrecv)(?!\w)",
    re.IGNORECASE,
)
_RANK = re.compile(
    r"Rank\s+(?P<rank>\d+)\s+(?:Group\s+(?P<group>\d+)\s+)?(?:Pid\s+\d+\s+)?on\s+(?P<host>\S+)\s+device\s+\d+"
    r"\s+\[[0-9a-fA-FxX:.]+\]\s*(?P<device>.*)"
)
_ANALOGOUS = re.compile(r"ranks?\s+([\d\s,and-]*\d)\s+(?:are\s+)?(?:analogous|alike|the same|likewise)")
_INFO = re.compile(r"\brank \d+ n[Rr]anks (\d+)")
_NODES_TIMES = re.compile(r"(\d+)\s*(?:nodes?|hosts?)\s*[x*]\s*(\d+)", re.IGNORECASE)
_TIMES = re.compile(r"(?<![\w.])(\d+)\s*x\s*(\d+)\s*(?:ranks|gpus?|gcds|x?\s?[A-Z]+\d)", re.IGNORECASE)
_NODES = re.compile(r"(?<![\w.])(\d+)[\s-]+(?:nodes?|hosts?)\b", re.IGNORECASE)
_RANKS = re.compile(r"(?<![\w.])(\d+)\s+(?:ranks?|gpus?|gcds?|processes)\b", re.IGNORECASE)
_NRANKS = re.compile(r"\bnranks\s*[=:]?\s*(\d+)", re.IGNORECASE)
_LAUNCHED = re.compile(r"(?:mpirun|mpiexec|srun)\b.*?\s(?:-np|-n|--np|--ntasks)[\s=]+(\d+)")
_ON_NODES = re.compile(r"srun\b.*?\s(?:-N|--nodes)[\s=]+(\d+)")
_PER_PROCESS = re.compile(r"_perf(?:_mpi)?\b.*?\s-([gt])\s+(\d+)(?:.*?\s-([gt])\s+(\d+))?")
_SETTING = re.compile(r"\b((?:NCCL|RCCL|UCX|HSA)_[A-Z0-9_]+)(?:=| set by environment to )\"?([^\s\"';]+)")

SAME = re.compile(r"\bsame (?:nodes|hosts|machines?|system|ranks|job)\b", re.IGNORECASE)
"""Words by which a comment says that what stood around the table before holds again."""


@dataclass(frozen=True)
class Around:
    """What a text says of the run whose table follows; None, empty: nothing.

    ``listed``: ``ranks`` is from a whole list of them; ``nics``: cards of a node;
    ``settings``: environment variables of the library.
    """

    collective: str = ""
    ranks: int | None = None
    listed: bool = False
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    device: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    nics: Nics = field(default_factory=Nics)


@dataclass
class Gatherer:
    """Lines before a table, one after the other."""

    collective: str = ""
    hosts: dict[int, str] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    analogous: int = -1
    stated: int | None = None
    nodes: int | None = None
    per_node: int | None = None
    device: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    nics: Nics = field(default_factory=Nics)
    same: bool = False

    def feed(self, text: str) -> None:
        """Take one line in."""
        self.settings.update(_SETTING.findall(text))
        self.nics.feed(text)
        if (found := _PROGRAM.search(text)) is not None:
            self.collective = PROGRAMS[found[1].lower()]
        if (rank := _RANK.search(text)) is not None:
            number = int(rank["rank"])
            self.hosts[number] = rank["host"]
            self.groups[number] = int(rank["group"] or 0)
            self.device = self.device or device_words(rank["device"]) or rank["device"].strip()
            return
        if (info := _INFO.search(text)) is not None:
            self.stated = max(int(info[1]), self.stated or 0)
        elif "NCCL INFO" not in text:
            self._words(text)

    def _words(self, text: str) -> None:
        """What people write in comments and on command lines."""
        self.same = self.same or SAME.search(text) is not None
        if (found := _ANALOGOUS.search(text)) is not None:
            self.analogous = max(self.analogous, *(int(n) for n in re.findall(r"\d+", found[1])))
            return
        if not self.collective and (word := _WORD.search(text)) is not None:
            self.collective = PROGRAMS[re.sub(r"[-_ ]", "", word[1].lower())]
        self.device = self.device or device_words(text)
        if (product := _NODES_TIMES.search(text) or _TIMES.search(text)) is not None:
            self.nodes, self.per_node = int(product[1]), int(product[2])
            self.stated = self.nodes * self.per_node
            return
        for number in _numbers(text, _ON_NODES, _NODES):
            self.nodes = number
        for number in _numbers(text, _LAUNCHED, _NRANKS, _RANKS):
            self.stated = number * _per_process(text)
            break
        else:
            self._of_devices(text)

    def _of_devices(self, text: str) -> None:
        """``8x H100``: of one node, unless nodes were counted; -g 8 of a command without a launcher."""
        found = re.search(r"(?<![\w.])(\d{1,2})\s?x\s?(?=[A-Z0-9]*[A-Z])", text)
        if found is not None and device_words(text[found.end() :]):
            self.per_node = int(found[1])
            self.stated = self.per_node * (self.nodes or 1)
        elif self.stated is None and "mpirun" not in text and "srun" not in text:
            alone = _per_process(text)
            self.stated = alone if alone > 1 else None

    def result(self, before: Around) -> Around:
        """All of it; ``before``: what stood around the table before, which "same nodes" repeats."""
        ranks, listed = self.stated, False
        if self.hosts:
            of_first = [rank for rank, group in self.groups.items() if group == self.groups[min(self.groups)]]
            several = len(set(self.groups.values())) > 1
            ranks = len(of_first) if several else max(self.analogous, *self.hosts) + 1
            listed = several or ranks == len(self.hosts) or self.analogous >= 0
        hosts = tuple(self.hosts[rank] for rank in sorted(self.hosts))
        nodes = len(set(hosts)) or self.nodes
        if not self.same:
            return Around(self.collective, ranks, listed, nodes, hosts, self.device, self.settings, self.nics)
        return Around(
            self.collective or before.collective,
            ranks or before.ranks,
            listed or (ranks is None and before.listed),
            nodes or before.nodes,
            hosts or before.hosts,
            self.device or before.device,
            {**before.settings, **self.settings},
            self.nics if self.nics.rate or self.nics.names else before.nics,
        )


def program_of(text: str) -> str:
    """The collective of a line or file name with a program's name in it, else empty."""
    found = _PROGRAM.search(text)
    return PROGRAMS[found[1].lower()] if found else ""


def _numbers(text: str, *patterns: re.Pattern[str]) -> Iterator[int]:
    yield from (int(found[1]) for found in (pattern.search(text) for pattern in patterns) if found)


def _per_process(text: str) -> int:
    """Ranks of one process of a command: its threads (-t) by devices of each (-g)."""
    found = _PER_PROCESS.search(text)
    return 1 if found is None else int(found[2]) * int(found[4] or 1)
