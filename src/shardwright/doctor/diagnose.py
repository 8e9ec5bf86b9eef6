"""The doctor: evidence to findings, all kinds together, as one document."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from shardwright.doctor.bandwidth import bandwidth_findings
from shardwright.doctor.checkpoint import checkpoint_findings
from shardwright.doctor.evidence import Evidence, Timeout
from shardwright.doctor.finding import Finding, Source, causes, in_order
from shardwright.doctor.hang import hang_findings
from shardwright.doctor.inputs import gather
from shardwright.doctor.layout import layout_findings
from shardwright.doctor.links import map_findings
from shardwright.doctor.nccl_graph import graph_findings
from shardwright.doctor.numbers import numbers_findings
from shardwright.doctor.oom import oom_findings
from shardwright.doctor.setting import Setting, parse_given
from shardwright.doctor.slow import slow_findings
from shardwright.doctor.topology import topology_findings
from shardwright.model import ModelSpec

KINDS: tuple[Callable[[Evidence], list[Finding]], ...] = (
    hang_findings,
    oom_findings,
    layout_findings,
    numbers_findings,
    slow_findings,
    checkpoint_findings,
    topology_findings,
    graph_findings,
    bandwidth_findings,
    map_findings,
)


def findings_of(evidence: Evidence) -> list[Finding]:
    """Findings of all kinds, the surest first."""
    found = [finding for diagnose in KINDS for finding in diagnose(evidence)]
    if not evidence.of(Timeout):
        found = [finding for finding in found if not _explained(finding, found)]
    return in_order(found)


def _explained(finding: Finding, found: Sequence[Finding]) -> bool:
    """Whether an error of a rank is one that another kind has a name for; a bare exit code says less than any
    of its own kind."""
    if finding.cause != "rank_failed":
        return False
    bare = ": exit code" in finding.summary
    files = {source.file for source in finding.evidence}
    return any(
        (other.kind in ("oom", "layout", "checkpoint") or (bare and other.cause != "rank_failed"))
        and other.certainty != "cannot_tell"
        and files & {source.file for source in other.evidence}
        for other in found
    )


def diagnose(
    paths: Sequence[str],
    stdin: BinaryIO | None = None,
    *,
    model: ModelSpec | None = None,
    given: str = "",
) -> dict[str, Any]:
    """Read files and say what happened, as ``doctor --json`` prints it.

    ``model`` and ``given`` are what a person says beside the files: the model, and degrees, batch and
    sequence as ``setting.parse_given`` reads them.

    Raises: EvidenceError: a file does not exist, none of them could be read, or ``given`` is malformed.
    """
    setting = parse_given(given) if given else None
    evidence = gather(paths, stdin)
    if model is not None:
        evidence.models.insert(0, ("--model", model))
        setting = replace(setting or Setting(Source("--model", None, model.name), "given"), model=model)
    if setting is not None:
        evidence.given = setting
    return document_of(evidence)


def document_of(evidence: Evidence) -> dict[str, Any]:
    """Findings, whether one of them is a fault (a cause without remedy is good news), and what was read."""
    found = findings_of(evidence)
    return {
        "fault": any(causes()[finding.cause].remedy for finding in found),
        "findings": [finding.document() for finding in found],
        "inputs": [{"file": file, "kind": kind} for file, kind in evidence.inputs],
        "refused": [{"file": file, "reason": reason} for file, reason in evidence.notes],
    }
