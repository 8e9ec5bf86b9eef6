"""Files of any kind as evidence: each is taken for what its first bytes say it is, not what it is called.

Nothing of a file is executed, and none is read whole unless its size is bounded. What cannot be read is a
note.
"""

import io
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import yaml  # type: ignore[import-untyped]

from shardwright.cluster import Cluster
from shardwright.doctor import (
    crash_log,
    fingerprints,
    memory_log,
    message_log,
    moments,
    nccl_graph,
    nccl_log,
    plain_steps,
    step_log,
)
from shardwright.doctor.documents import DOCUMENTS, add_plan
from shardwright.doctor.event_files import is_events_head, read_events
from shardwright.doctor.evidence import Evidence
from shardwright.doctor.finding import Source
from shardwright.doctor.flight import is_dump, read_dump
from shardwright.doctor.lines import merged, rank_of_name, read_lines
from shardwright.doctor.megatron import flags_of, is_megatron, setting_of_megatron
from shardwright.doctor.packed import (
    FAULTS,
    MOST_FILES,
    PACKINGS,
    Member,
    is_tar,
    tar_members,
    unpacked,
    zip_members,
)
from shardwright.doctor.pickles import RefusedPickleError, read_pickle
from shardwright.doctor.run_folder import (
    silence_of,
)
from shardwright.doctor.step_log import step_of_mapping
from shardwright.doctor.streams import BUFFER, AgainStream, Allowance, buffered
from shardwright.doctor.tables import is_table, read_table
from shardwright.doctor.trace import is_trace_head, read_trace
from shardwright.doctor.trainer import is_trainer, setting_of_trainer
from shardwright.errors import EvidenceError, ShardwrightError
from shardwright.measure.files import decoded
from shardwright.measure.nccl_tests import is_nccl_table, read_tables
from shardwright.measure.pair_table import is_pair_list, read_pair_list
from shardwright.measure.topology import has_matrix, read_topologies
from shardwright.measure.topology_xml import is_topology_xml, read_topology_xml
from shardwright.model import ModelSpec

HEAD = 8192
LARGEST_DOCUMENT = 256 << 20
"""Bytes of a JSON or TOML document that is read whole."""

STDIN = "-"

CONTAINERS = (*PACKINGS, "zip", "tar")
"""Kinds of files that are only what they hold."""

TEXT_HEAD = 1 << 20
"""Bytes of a text in which a table's header or a configuration is looked for."""

LINE_READERS = merged(
    [
        nccl_log.READERS,
        nccl_graph.READERS,
        fingerprints.READERS,
        crash_log.READERS,
        memory_log.READERS,
        message_log.READERS,
        moments.READERS,
        step_log.READERS,
        plain_steps.READERS,
    ]
)
"""What is looked for in text."""


def gather(paths: Sequence[str], stdin: BinaryIO | None = None) -> Evidence:
    """Everything that the files say. A folder is read with all it holds; ``-`` is standard input.

    Raises: EvidenceError: a file does not exist, or none of them could be read.
    """
    evidence = Evidence()
    for path in paths:
        if path == STDIN:
            if stdin is not None:
                _read_stream(evidence, STDIN, cast(BinaryIO, AgainStream(b"", stdin)), Allowance(0))
            continue
        if not Path(path).exists():
            raise EvidenceError(f"file {path} does not exist: give logs, dumps, plans or a run folder")
        if Path(path).is_dir():
            if (silence := silence_of(Path(path))) is not None:
                evidence.records.append(silence)
            evidence.listing += [str(file) for file in Path(path).rglob("*") if file.is_file()]
        for file in _files(Path(path)):
            _read_file(evidence, file)
    if not evidence.inputs and evidence.notes:
        raise EvidenceError(
            "; ".join(note if note.startswith(file) else f"{file}: {note}" for file, note in evidence.notes)
        )
    return evidence


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    found = sorted(file for file in path.rglob("*") if file.is_file())
    skipped = {".safetensors", ".distcp", ".pt", ".bin", ".pyc"}
    yield from (file for file in found[:MOST_FILES] if file.suffix not in skipped)


def _read_file(evidence: Evidence, path: Path) -> None:
    try:
        with path.open("rb", buffering=BUFFER) as stream:
            _read_stream(evidence, str(path), stream, Allowance(path.stat().st_size))
    except OSError as fault:
        evidence.notes.append((str(path), f"cannot be read: {fault.strerror}"))


def _read_stream(evidence: Evidence, name: str, stream: BinaryIO, allowance: Allowance) -> None:
    """One file, by what its first bytes say. Faults become notes."""
    reader = buffered(stream)
    try:
        head = reader.peek(HEAD)[:HEAD]
        kind = _kind(head, name)
        _KINDS[kind](evidence, name, reader, allowance)
        if kind not in CONTAINERS:
            evidence.inputs.append((name, kind))
    except (
        ShardwrightError,
        RefusedPickleError,
        OSError,
        ValueError,
        RecursionError,
        *FAULTS,
    ) as fault:
        words = str(fault) or type(fault).__name__
        evidence.notes.append((name, words.removeprefix(f"{name} ")))


def _kind(head: bytes, name: str) -> str:
    for kind, packing in PACKINGS.items():
        if head.startswith(packing.starts):
            return kind
    if is_tar(head):
        return "tar"
    if is_events_head(head):
        return "events"
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    if head.startswith((b"\x7fELF", b"\x89PNG", b"MZ\x90")):
        return "binary"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] == b"{" or (start[:1] == b"[" and start[1:].lstrip()[:1] in (b"{", b"]")):
        return "json"
    if name.endswith(".toml"):
        return "toml"
    if (
        head[:2] in (b"(d", b"(l", b"c_", b"cp", b"cb", b"cn", b"co")
        and b"\n" in head[:200]
        and name.endswith((".pkl", ".pickle"))
    ):
        return "pickle"  # of the text protocol
    return "text"


def _read_packed(kind: str) -> Callable[[Evidence, str, BinaryIO, Allowance], None]:
    def read(evidence: Evidence, name: str, stream: BinaryIO, allowance: Allowance) -> None:
        with allowance.inside(name):
            _read_stream(evidence, *unpacked(kind, name, stream, allowance), allowance)

    return read


def _read_archive(
    members: Callable[[str, BinaryIO, Allowance], Iterator[Member]],
) -> Callable[[Evidence, str, BinaryIO, Allowance], None]:
    def read(evidence: Evidence, name: str, stream: BinaryIO, allowance: Allowance) -> None:
        with allowance.inside(name):
            for member in members(name, stream, allowance):
                if member.stream is None:
                    evidence.notes.append((member.name, member.reason))
                else:
                    _read_stream(evidence, member.name, member.stream, allowance)

    return read


def _read_events(evidence: Evidence, name: str, stream: BinaryIO, _: Allowance) -> None:
    evidence.records += read_events(name)


def _read_pickled(evidence: Evidence, name: str, stream: BinaryIO, _: Allowance) -> None:
    document = read_pickle(stream)
    if not is_dump(document):
        raise EvidenceError("is a pickle, but no flight recorder dump")
    evidence.dumps.append(read_dump(name, document))


def _read_json(evidence: Evidence, name: str, stream: BinaryIO, allowance: Allowance) -> None:
    head = stream.peek(HEAD)[:HEAD] if isinstance(stream, io.BufferedReader) else b""
    if is_trace_head(head):
        evidence.traces.append(read_trace(name, stream))
        return
    data = stream.read(LARGEST_DOCUMENT + 1)
    try:
        document = json.loads(data) if len(data) <= LARGEST_DOCUMENT else None
    except ValueError:
        document = None  # JSON lines, or a log that begins with a brace
    if document is None:
        before = len(evidence.records)
        _read_text(evidence, name, cast(BinaryIO, AgainStream(data, stream)), allowance)
        if len(evidence.records) == before:
            evidence.notes.append(
                (name, "begins as JSON and is cut off or malformed: nothing in it was recognised")
            )
        return
    for matches, read in DOCUMENTS:
        if matches(document):
            read(evidence, name, document)
            return
    source = Source(name, 1, data[:400].decode("utf-8", errors="replace"))
    step = step_of_mapping(source, document, rank_of_name(name))
    if step is not None:
        evidence.records.append(step)
        return
    _read_text(evidence, name, io.BytesIO(data), allowance)


def _read_toml(evidence: Evidence, name: str, stream: BinaryIO, allowance: Allowance) -> None:
    data = stream.read(LARGEST_DOCUMENT)
    try:
        text = data.decode("utf-8-sig")
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise EvidenceError(f"is no TOML: {fault}") from None
    if "schema_version" in document:
        add_plan(evidence, name, text)
        return
    if "model_type" in document and "hidden" in document:
        evidence.models.append((name, ModelSpec.from_toml(text, name)))
        return
    if "gpus_per_node" in document and "device" in document:
        evidence.clusters.append((name, Cluster.from_toml(text, name)))
        return
    for matches, read in DOCUMENTS:
        if matches(document):
            read(evidence, name, document)
            return
    raise EvidenceError(
        "is TOML of no kind that is known here: give a plan, a cluster or a torchtitan configuration"
    )


def _read_text(evidence: Evidence, name: str, stream: BinaryIO, _: Allowance) -> None:
    """A log, a table, a script or YAML: what its beginning says it is, and a log in any case."""
    reader = buffered(stream)
    head = decoded(reader.peek(TEXT_HEAD)[:TEXT_HEAD])
    if is_table(head):
        evidence.records += read_table(name, decoded(reader.read(LARGEST_DOCUMENT)))
        return
    if is_topology_xml(head):
        text = decoded(reader.read(LARGEST_DOCUMENT))
        evidence.topologies += read_topology_xml(text, name)
        return
    if is_nccl_table(head):
        evidence.tables += read_tables(decoded(reader.read(LARGEST_DOCUMENT)), name)
        return
    if is_pair_list(head):
        evidence.pair_lists.append(read_pair_list(decoded(reader.read(LARGEST_DOCUMENT)), name))
        return
    _read_setting(evidence, name, head)
    fault = _read_topologies(evidence, name, head)
    before = len(evidence.records)
    evidence.records += read_lines(reader, name, LINE_READERS, rank_of_name(name))
    if fault is not None:
        if len(evidence.records) == before:
            raise fault
        evidence.notes.append((name, str(fault)))


def _read_topologies(evidence: Evidence, name: str, head: str) -> EvidenceError | None:
    """Printouts of `nvidia-smi topo -m` in a text; a fault of one does not keep the rest from being read."""
    if has_matrix(head):
        try:
            evidence.topologies += read_topologies(head, name)
        except EvidenceError as fault:
            return fault
    return None


def _read_setting(evidence: Evidence, name: str, head: str) -> None:
    """A configuration that a text is, or begins with."""
    if name.endswith((".yaml", ".yml")) or head.lstrip().startswith(
        ("compute_environment:", "distributed_type:")
    ):
        try:
            document = yaml.safe_load(head)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise EvidenceError("is no YAML that can be read") from None
        for matches, read in DOCUMENTS:
            if matches(document):
                read(evidence, name, document)
                return
    flags = flags_of(head)
    if is_megatron(flags):
        evidence.settings.append(setting_of_megatron(name, flags))
    elif is_trainer(flags):
        evidence.settings.append(setting_of_trainer(name, flags))


def _refuse(why: str) -> Callable[[Evidence, str, BinaryIO, Allowance], None]:
    def read(evidence: Evidence, name: str, stream: BinaryIO, allowance: Allowance) -> None:
        raise EvidenceError(why)

    return read


_KINDS: Mapping[str, Callable[[Evidence, str, BinaryIO, Allowance], None]] = {
    **{kind: _read_packed(kind) for kind in PACKINGS},
    "zip": _read_archive(zip_members),
    "tar": _read_archive(tar_members),
    "events": _read_events,
    "pickle": _read_pickled,
    "json": _read_json,
    "toml": _read_toml,
    "text": _read_text,
    "binary": _refuse("is a program or picture, not a log"),
}
