"""The case book: field reports with known causes as files, and whether the doctor says what is known."""

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.derive.spec import model_of
from shardwright.doctor.diagnose import diagnose

HERE = Path(__file__).parent
DATA, BOOKS = HERE / "data", HERE / "cases"
MEASURED = HERE.parent / "measure" / "data"
"""Artefacts that tests of measure/ read too."""

SURE = ("certain", "likely")


class Case(NamedTuple):
    """One report: where it stands, and what is expected of it."""

    name: str
    book: str
    entry: Mapping[str, Any]

    @property
    def group(self) -> str:
        """Its letter in the collection, or the name of its book."""
        return self.name[0] if self.name[0].isupper() and self.name[1:2].isdigit() else self.book

    @property
    def origin(self) -> str:
        """``artefact`` if the file is a real one, unedited; ``built`` from a report's numbers."""
        return str(self.entry["origin"])


def cases() -> Iterator[Case]:
    """All cases of all books."""
    for book in sorted(BOOKS.glob("*.toml")):
        for name, entry in tomllib.loads(book.read_text(encoding="utf-8")).items():
            yield Case(name, book.stem, entry)


def files_of(case: Case, folder: Path) -> list[str]:
    """The case's files, written into ``folder`` where they are built."""
    artefact = case.entry.get("artefact")
    if artefact is not None:
        lines = case.entry.get("lines")
        source = DATA / artefact if (DATA / artefact).exists() else MEASURED / artefact
        if lines is None:
            return [str(source)]
        text = source.read_text(encoding="utf-8").splitlines(keepends=True)
        path = folder / Path(artefact).name
        path.write_text("".join(text[lines[0] - 1 : lines[1]]), encoding="utf-8")
        return [str(path)]
    found = []
    for name, text in case.entry["files"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"), encoding="utf-8")
        found.append(str(path))
    return found


def diagnosis(case: Case, folder: Path) -> dict[str, Any]:
    """What the doctor says of a case."""
    model = case.entry.get("model")
    return diagnose(
        files_of(case, folder),
        model=None if model is None else model_of(model),
        given=case.entry.get("given", ""),
    )


def verdict(case: Case, document: Mapping[str, Any]) -> tuple[str, str]:
    """``right``, ``wrong`` or ``cannot tell``, and why."""
    entry = case.entry
    ignored = entry.get("skip_causes", [])
    findings = [finding for finding in document["findings"] if finding["cause"] not in ignored]
    wanted = entry["cause"] if isinstance(entry["cause"], list) else [entry["cause"]]
    sure = [finding for finding in findings if finding["certainty"] in SURE]
    if wanted == ["none"]:
        return ("wrong", f"found {sure[0]['cause']}") if sure else ("right", "nothing found")
    others = [f for f in sure if f["cause"] not in wanted and f["cause"] not in entry.get("also", [])]
    own = [finding for finding in findings if finding["cause"] in wanted]
    if others:
        return "wrong", f"also says {others[0]['cause']}: {others[0]['summary']}"
    if not own:
        return "wrong", "says nothing of it"
    finding = own[0]
    if "ranks" in entry and finding["ranks"] != entry["ranks"]:
        return "wrong", f"names ranks {finding['ranks']}"
    for name, value in entry.get("numbers", {}).items():
        if not _agrees(finding["numbers"].get(name), value):
            return "wrong", f"{name} is {finding['numbers'].get(name)}, not {value}"
    if "action" in entry and not any(each.startswith(entry["action"]) for each in finding["actions"]):
        return "wrong", f"says to do {finding['actions']}"
    if finding["certainty"] == "cannot_tell":
        told = entry.get("certainty") == "cannot_tell" and bool(finding["collect"])
        return ("cannot tell" if told else "wrong"), finding["summary"]
    return ("wrong" if entry.get("certainty") == "cannot_tell" else "right"), finding["summary"]


def expected(case: Case) -> str:
    """The verdict that a case must have."""
    return "cannot tell" if case.entry.get("certainty") == "cannot_tell" else "right"


def _agrees(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_agrees, found, wanted))
    if isinstance(wanted, float) and isinstance(found, int | float):
        return math.isclose(found, wanted, rel_tol=2e-3)
    return found == wanted
