"""A node's topology: the record that readers of printouts make, and the reader of `nvidia-smi topo -m`.

A printout is read strictly. A cell is known by the names of its row and its column, never by counting from
one side alone, and a matrix that contradicts itself is refused with file, line and column.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwright.bandwidth_map import UNREACHED, MapRecord, Nic
from shardwright.errors import EvidenceError
from shardwright.measure.topology_cells import (
    STATUS,
    CellFault,
    Header,
    Row,
    Text,
    header_of,
    is_row,
    lines_of,
    row_of,
)

SAME = "X"
"""Class of a device's link to itself."""

AMONG_NICS = "links between these NICs are not known"

MOST_WRAPPED = 4
"""Lines over which a terminal may have broken one."""

_LEGEND = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*$")
_ROW = re.compile(r"GPU\d+[ \t]+(?:X|NV\d|PIX|PXB|PHB|NODE|SYS|SOC)")
_FIRST = re.compile(r"\s*(?=\S*\d)[A-Za-z]\S*(?:\s.*)?$")
_P2P = re.compile(r"topo\s+(?:-p2p|--p2pstatus)\s+(\S+)")


class Peers(NamedTuple):
    """A table of `nvidia-smi topo -p2p`: ``what`` was asked (r, w, n, ...) and the status of every pair of
    devices, a row each: OK, NS (not supported), CNS, GNS, TNS (by chipset, GPU, topology), DR, U. ``text``:
    of its first row, at ``line``."""

    line: int
    text: str
    what: str
    status: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Topology:
    """One node as a file describes it.

    ``classes``: link class of every pair of devices and NICs, the devices first, a row each, as `nvidia-smi
    topo -m` names them; ``-`` where the file does not say. ``missing`` says what that is. ``rows``: line and
    text of each device, to quote. ``nic_speeds`` and ``pcie`` (a device's own link, as signalled) in B/s, 0:
    not said. ``capability``: compute capability as NCCL writes it (90), 0: not said; ``pci_device``: of the
    devices, 0x2330.
    """

    file: str
    line: int
    devices: tuple[str, ...]
    nics: tuple[str, ...]
    nic_devices: tuple[str, ...]
    classes: tuple[tuple[str, ...], ...]
    affinity: tuple[str, ...]
    numa: tuple[str, ...]
    gpu_numa: tuple[str, ...]
    rows: tuple[tuple[int, str], ...]
    host: str = ""
    peers: tuple[Peers, ...] = ()
    missing: tuple[str, ...] = ()
    nic_speeds: tuple[float, ...] = ()
    pcie: float = 0.0
    capability: int = 0
    pci_device: str = ""

    @property
    def device_classes(self) -> tuple[tuple[str, ...], ...]:
        """Of every pair of devices."""
        n = len(self.devices)
        return tuple(row[:n] for row in self.classes[:n])

    @property
    def nic_classes(self) -> tuple[tuple[str, ...], ...]:
        """Of every NIC to every device, a row a NIC."""
        n = len(self.devices)
        return tuple(row[:n] for row in self.classes[n:])

    def record(self, source: str) -> MapRecord:
        """The topology as part of a bandwidth map."""
        speeds = self.nic_speeds or (0.0,) * len(self.nics)
        nics = tuple(
            Nic(name=name, device=device, classes=classes, bandwidth=speed)
            for name, device, classes, speed in zip(
                self.nics, self.nic_devices, self.nic_classes, speeds, strict=True
            )
        )
        return MapRecord(
            source=source,
            classes=self.device_classes,
            affinity=self.affinity,
            numa=self.numa,
            nics=nics,
        )


REFUSED = frozenset(("NS", "CNS", "GNS", "TNS", "DR"))
"""Of `topo -p2p`: no peer-to-peer access."""


def refused_peers(topology: Topology) -> dict[tuple[int, int], str]:
    """Pairs of devices, the larger number first, that have no peer-to-peer access, and why."""
    pairs = [(a, b) for a in range(len(topology.devices)) for b in range(a)]
    found: dict[tuple[int, int], str] = {}
    for peers in topology.peers:
        status = {(a, b): peers.status[a][b] for a, b in pairs}
        found = {pair: text for pair, text in status.items() if text in REFUSED} | found
    return found


def has_matrix(text: str) -> bool:
    """Whether ``text`` may hold a printout: a row of classes stands in it."""
    return _ROW.search(text) is not None and any(is_row(line.text) for line in lines_of(text))


def read_topologies(text: str, file: str) -> list[Topology]:
    """All printouts in ``text``, each of a node; `topo -p2p` tables are put to the printout before them.

    Lines may have colours, the label of a launcher in front, and be broken by a terminal. Rows may be missing
    (cut off): what follows from symmetry is filled in, ``missing`` says the rest.

    Raises: EvidenceError: a matrix contradicts itself, with file, line and column.
    """
    hosts: dict[str, list[Text]] = {}
    for line in lines_of(text):
        hosts.setdefault(line.label, []).append(line)
    found: list[Topology] = []
    for label, own in hosts.items():
        try:
            found += _of_host(own, file, label)
        except CellFault as fault:
            raise EvidenceError(f"{file}:{fault.line}:{fault.column}: {fault}") from None
    return sorted(found, key=lambda topology: topology.line)


def _of_host(lines: Sequence[Text], file: str, host: str) -> Iterator[Topology]:
    last: Topology | None = None
    at = 0
    while at < len(lines):
        header, used = _header_at(lines, at)
        if header is None:
            if is_row(lines[at].text):
                raise CellFault(
                    lines[at].number, 1, "a row of links stands under no header that names columns"
                )
            at += 1
            continue
        rows, after = _rows_at(lines, at + used, header)
        if not rows:
            if header.tail:
                raise CellFault(header.line, 1, "a header of a topology is followed by no row")
            at += used
            continue
        if all(cell.text in STATUS for row in rows for cell in row.cells):
            if last is not None:
                last = _with_peers(last, _peers(header, rows, lines[max(at - 3, 0) : at]))
        else:
            if last is not None:
                yield last
            last = _topology(header, rows, file, host, _legend(lines[after:]))
        at = after
    if last is not None:
        yield last


def _header_at(lines: Sequence[Text], at: int) -> tuple[Header | None, int]:
    """The header that starts at a line, and over how many lines it goes."""
    if not _FIRST.match(lines[at].text) or is_row(lines[at].text):
        return None, 1
    for more in range(MOST_WRAPPED, -1, -1):
        pieces = lines[at : at + 1 + more]
        if len(pieces) == 1 + more and all(p.text.strip() and not is_row(p.text) for p in pieces[1:]):
            header = header_of(pieces)
            if header is not None:
                return header, 1 + more
    return None, 1


def _rows_at(lines: Sequence[Text], at: int, header: Header) -> tuple[list[Row], int]:
    """Rows from a line on, and the line after them."""
    rows: list[Row] = []
    while at < len(lines):
        text = lines[at].text
        if text.lstrip().startswith("#"):
            if _P2P.search(text):
                break
            at += 1
            continue
        if not text.strip():
            # rows may be a blank line apart, or have a broken one of nothing but spaces behind them
            next_row = next((n for n in range(at, len(lines)) if lines[n].text.strip()), len(lines))
            if next_row == len(lines) or not is_row(lines[next_row].text, header):
                break
            at = next_row
            continue
        if not is_row(text, header):
            break
        row, used = _row_at(lines, at, header)
        rows.append(row)
        at += used
    return rows, at


def _row_at(lines: Sequence[Text], at: int, header: Header) -> tuple[Row, int]:
    for more in range(MOST_WRAPPED, 0, -1):
        pieces = lines[at : at + 1 + more]
        if len(pieces) == 1 + more and all(p.text.strip() and not is_row(p.text, header) for p in pieces[1:]):
            try:
                return row_of(pieces, header), 1 + more
            except CellFault:
                continue
    return row_of(lines[at : at + 1], header), 1


def _peers(header: Header, rows: Sequence[Row], before: Sequence[Text]) -> Peers:
    cells = {(row.name, name): cell.text for row in rows for name, cell in row.by_name(header).items()}
    names = sorted(header.names, key=_number)
    asked = [match[1] for line in before if (match := _P2P.search(line.text))]
    status = tuple(tuple(cells.get((a, b), UNREACHED) for b in names) for a in names)
    return Peers(rows[0].line, rows[0].text, asked[-1] if asked else "", status)


def _with_peers(topology: Topology, peers: Peers) -> Topology:
    if len(peers.status) != len(topology.devices):
        words = f"line {peers.line}: a p2p table of {len(peers.status)} devices is not used"
        return replace(topology, missing=(*topology.missing, words))
    return replace(topology, peers=(*topology.peers, peers))


def _legend(lines: Sequence[Text]) -> dict[str, str]:
    """What the "NIC Legend" that follows calls each NIC."""
    found: dict[str, str] = {}
    inside = False
    for line in lines:
        if line.text.strip().startswith("NIC Legend"):
            inside = True
        elif inside and (match := _LEGEND.match(line.text)):
            found[match[1]] = match[2]
        elif is_row(line.text) or (inside and found and line.text.strip()):
            break
    return found


def _topology(
    header: Header, rows: Sequence[Row], file: str, host: str, legend: Mapping[str, str]
) -> Topology:
    devices = sorted((name for name in header.names if name.startswith("GPU")), key=_number)
    nics = [name for name in header.names if not name.startswith("GPU")]
    by_name = _checked(header, rows)
    names = [*devices, *nics]
    classes = tuple(tuple(_class(by_name, header, a, b) for b in names) for a in names)
    missing = [*_missing(by_name, devices, nics)]
    missing += [f"the NIC legend names {name}, the matrix does not" for name in legend if name not in nics]
    tails = [by_name[name].tail if name in by_name else {} for name in devices]
    affinity, numa, gpu_numa = (
        tuple(tail.get(column, "") for tail in tails)
        for column in ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
    )
    return Topology(
        file=file,
        line=header.line,
        devices=tuple(devices),
        nics=tuple(nics),
        nic_devices=tuple(legend.get(name, "" if name.startswith("NIC") else name) for name in nics),
        classes=classes,
        affinity=affinity,
        numa=numa,
        gpu_numa=gpu_numa,
        rows=tuple(
            (by_name[name].line, by_name[name].text) if name in by_name else (header.line, header.text)
            for name in devices
        ),
        host=host,
        missing=tuple(missing),
    )


def _checked(header: Header, rows: Sequence[Row]) -> dict[str, Row]:
    """Rows by name, once all are found to agree with one another.

    Raises: CellFault: at the first cell that does not.
    """
    found: dict[str, Row] = {}
    for row in rows:
        if row.name not in header.names:
            names = ", ".join(header.names)
            raise CellFault(row.line, row.column, f"row {row.name} has no column of its own: {names}")
        if row.name in found:
            raise CellFault(
                row.line, row.column, f"row {row.name} stands twice (line {found[row.name].line})"
            )
        for name, cell in row.by_name(header).items():
            if (cell.text == SAME) != (name == row.name):
                raise CellFault(
                    cell.line,
                    cell.column,
                    f"row {row.name} has {cell.text} in column {name}: X stands where a device meets itself "
                    "and nowhere else; cells are missing or moved",
                )
            other = found[name].by_name(header)[row.name] if name in found else cell
            if other.text != cell.text:
                raise CellFault(
                    cell.line,
                    cell.column,
                    f"row {row.name} has {cell.text} in column {name}, row {name} (line {other.line}) has "
                    f"{other.text} in column {row.name}: a link is the same from both ends",
                )
        found[row.name] = row
    return found


def _class(rows: Mapping[str, Row], header: Header, a: str, b: str) -> str:
    if a in rows:
        return rows[a].by_name(header)[b].text
    if a == b:
        return SAME
    return rows[b].by_name(header)[a].text if b in rows else UNREACHED


def _missing(rows: Mapping[str, Row], devices: Sequence[str], nics: Sequence[str]) -> Iterator[str]:
    """What rows that were cut off would have said."""
    lost = [name for name in devices if name not in rows]
    lost_nics = [name for name in nics if name not in rows]
    for name in lost:
        unknown = [other for other in (*lost, *lost_nics) if other != name]
        words = f"its links to {', '.join(unknown)} and its" if unknown else "its"
        yield (
            f"row {name} is missing: {words} CPU and NUMA affinity are not known, its other links are taken "
            "from the rows of those at their other ends"
        )
    if len(lost_nics) > 1:
        yield f"rows {', '.join(lost_nics)} are missing: {AMONG_NICS}"


def _number(name: str) -> tuple[int, str]:
    digits = re.search(r"\d+", name)
    return (int(digits[0]) if digits else -1, name)
