"""Files that describe a cluster, taken for what their content says they are, as one cluster."""

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.bandwidth_map import MapRecord
from shardwright.cluster import Cluster, Device, device
from shardwright.errors import EvidenceError, ShardwrightError
from shardwright.measure.nccl_table import Table
from shardwright.measure.nccl_tests import is_nccl_table, read_tables
from shardwright.measure.pair_table import PairList, is_pair_list, read_pair_list
from shardwright.measure.table_curves import UNKNOWN_DEVICE, tables_cluster
from shardwright.measure.topology import Topology, has_matrix, read_topologies
from shardwright.measure.topology_cluster import cluster_of_topologies
from shardwright.measure.topology_xml import is_topology_xml, read_topology_xml

LARGEST = 64 << 20
"""Bytes of a file that is read."""

_COLOUR = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip


@dataclass
class Parts:
    """What was found in the files."""

    topologies: list[Topology] = field(default_factory=list)
    clusters: list[Cluster] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pairs: list[PairList] = field(default_factory=list)


def _add_topologies(text: str, name: str, parts: Parts) -> None:
    parts.topologies += read_topologies(text, name)


def _add_xml(text: str, name: str, parts: Parts) -> None:
    parts.topologies += read_topology_xml(text, name)


def _add_cluster(text: str, name: str, parts: Parts) -> None:
    parts.clusters.append(Cluster.from_toml(text, name))


def _add_tables(text: str, name: str, parts: Parts) -> None:
    parts.tables += read_tables(text, name)


def _add_pairs(text: str, name: str, parts: Parts) -> None:
    parts.pairs.append(read_pair_list(text, name))


def _is_cluster(text: str) -> bool:
    return "gpus_per_node" in text and "[device]" in text


READERS: tuple[tuple[Callable[[str], bool], Callable[[str, str, Parts], None]], ...] = (
    (is_topology_xml, _add_xml),
    (_is_cluster, _add_cluster),
    (has_matrix, _add_topologies),
    (is_nccl_table, _add_tables),
    (is_pair_list, _add_pairs),
)
"""Kinds of content, and who reads them: a file may be of several."""


def read_cluster(
    paths: Sequence[str], kind: Device | None, nodes: int | None, base: Cluster | None
) -> tuple[Cluster, list[dict[str, Any]]]:
    """A cluster as ``paths`` describe it, and what was refused of them, ``{"file", "reason"}``.

    ``kind``: of the devices, where the files do not name it; ``nodes``: how many are like those in the files;
    ``base``: a cluster whose other numbers are kept.

    Raises: EvidenceError: nothing of the files can be used. ClusterError: they contradict one another.
    """
    parts, refused = Parts(), []
    for path in paths:
        try:
            _read(path, parts)
        except ShardwrightError as fault:
            refused.append({"file": path, "reason": str(fault)})
    if not (parts.topologies or parts.clusters or parts.tables or parts.pairs):
        reasons = "; ".join(each["reason"] for each in refused)
        raise EvidenceError(
            reasons or "map --from needs files: give printouts of nvidia-smi topo -m or tables of nccl-tests"
        )
    cluster = base or next(iter(parts.clusters), None)
    if parts.topologies:
        cluster = cluster_of_topologies(parts.topologies, kind, nodes, cluster)
    if parts.tables:
        cluster = _with_tables(parts.tables, kind, cluster)
    return cluster or _of_pairs(parts.pairs, kind), refused


def _with_tables(tables: Sequence[Table], kind: Device | None, known: Cluster | None) -> Cluster:
    """``known`` with what was measured, or a cluster of that alone."""
    measured = tables_cluster(tables, kind, known)
    if known is None or known.map is None or measured.map is None:
        return measured
    sources = f"{known.map.source}; {measured.map.source}"
    record = known.map.model_copy(update={"source": sources, "hosts": measured.map.hosts})
    return measured.model_copy(update={"map": record, "assumed": (*known.assumed, *measured.assumed)})


def _of_pairs(lists: Sequence[PairList], kind: Device | None) -> Cluster:
    """A node for each name: lists of pairs say who is slow, and of what a cluster is made nothing."""
    names = sorted({name for pairs in lists for pair in pairs.values for name in pair})
    known = kind or device(UNKNOWN_DEVICE, fitted=True)
    each = known.gpus_per_node
    assumed = [f"gpus_per_node={each}"]
    if kind is None:
        assumed.append(f"device={known.name}: lists of pairs name none; name one with --kind")
    record = MapRecord(
        source=f"pairs: {', '.join(Path(pairs.name).name for pairs in lists)}",
        hosts=tuple(name for name in names for _ in range(each)),
    )
    return Cluster(
        ranks=each * len(names), gpus_per_node=each, device=known, assumed=tuple(assumed), map=record
    )


def _read(path: str, parts: Parts) -> None:
    """One file, by all readers whose kind of content it has."""
    text = text_of(path)
    readers = [read for matches, read in READERS if matches(text)]
    if not readers:
        raise EvidenceError(
            f"{path} is no kind that is read here: give nvidia-smi topo -m, a table of nccl-tests, a list of "
            "pairs, NCCL's topology as XML or a map"
        )
    for read in readers:
        read(text, path, parts)


def text_of(path: str) -> str:
    """Text of a file in any Unicode; bytes that are none are replaced.

    Raises: EvidenceError: it cannot be read, or is too large.
    """
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(LARGEST + 1)
    except OSError as fault:
        raise EvidenceError(f"cannot read {path}: {fault.strerror}") from None
    if len(data) > LARGEST:
        raise EvidenceError(f"{path} has more than {LARGEST >> 20} MiB: cut out the printout")
    return decoded(data)


def decoded(data: bytes) -> str:
    """Bytes as text without a terminal's colours, by the mark of their Unicode if they have one."""
    coding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8-sig")
    text = data.decode(coding, errors="replace")
    return _COLOUR.sub("", text) if "\x1b" in text else text
