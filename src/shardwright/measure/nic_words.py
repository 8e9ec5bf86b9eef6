"""What a text around a table says of network cards: how many a node has, how fast, how reached."""

import re
from dataclasses import dataclass

from shardwright.units import GB

_USING = re.compile(r"NET/IB : Using")
_CARD = re.compile(r"\[\d+\](\S+?):\d+/(IB|RoCE)")
_VIA = re.compile(r"\bvia NET/\S+")
_GRAPH = re.compile(r"\bNET/\d+ \([^()]*/(\d+\.\d+)\)")
_RATE = re.compile(r"\b[Rr]ate:\s+(\d+)(?:\s+Gb/sec|\s*$)")
_TIMES = re.compile(r"(?<![\w.])(\d{1,2})\s?x\s?(25|40|50|100|200|400|800)\s?G(?!i?B)")
_NAMED = re.compile(r"(?:(?<![\w.])(\d{1,2}|one|a single)\s?x?\s)?\b(FDR|EDR|HDR100|HDR|NDR200|NDR|XDR)\b")
_GENERATIONS = {"FDR": 56, "EDR": 100, "HDR100": 100, "HDR": 200, "NDR200": 200, "NDR": 400, "XDR": 800}
"""Gb/s of InfiniBand's generations, four lanes (HDR100 and NDR200: two)."""


@dataclass
class Nics:
    """``count``: of a node; ``rate``: of one [B/s]; ``direct``: whether devices reach it without host memory.

    None where nothing says so; ``names``: those that NCCL uses.
    """

    count: int | None = None
    rate: float | None = None
    direct: bool | None = None
    ethernet: bool = False
    names: tuple[str, ...] = ()

    @property
    def ceiling(self) -> float | None:
        """All of a node's together [B/s]."""
        return None if self.count is None or self.rate is None else self.count * self.rate

    def feed(self, text: str) -> None:
        """Take in one line: NCCL's INFO, ibstat, or what a person writes."""
        self.ethernet = self.ethernet or "RoCE" in text
        if _USING.search(text):
            self.names = tuple(dict.fromkeys((*self.names, *(name for name, _ in _CARD.findall(text)))))
            self.count = len(self.names) or self.count
        if _VIA.search(text):
            self.direct = bool(self.direct) or "GDRDMA" in text
        if (graph := _GRAPH.search(text)) is not None:
            self.rate = float(graph[1]) * GB
        elif (rate := _RATE.search(text)) is not None:
            self.rate = int(rate[1]) / 8 * GB
        elif "NCCL INFO" not in text:
            self._words(text)

    def _words(self, text: str) -> None:
        if (times := _TIMES.search(text)) is not None:
            self.count, self.rate = self.count or int(times[1]), int(times[2]) / 8 * GB
        elif (named := _NAMED.search(text)) is not None:
            self.rate = _GENERATIONS[named[2]] / 8 * GB
            if named[1] and not self.names:
                self.count = int(named[1]) if named[1].isdigit() else 1
