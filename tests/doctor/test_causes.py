"""The list of causes and the document: every cause explained and used, every key of the contract there."""

import re
from pathlib import Path

import pytest
from evidence_files import causes as causes_of
from evidence_files import found, watchdog

import shardwright.doctor
from shardwright.doctor.finding import CERTAINTIES, KINDS, Finding, causes

SOURCES = "\n".join(
    path.read_text(encoding="utf-8") for path in Path(shardwright.doctor.__file__).parent.glob("*.py")
)

NAMED_BY_PARTS = {"operation_mismatch", "size_mismatch", "dtype_mismatch"}
"""Made of what differs and the word mismatch."""


@pytest.mark.parametrize("name", causes())
def test_every_cause_is_explained_and_some_finding_has_it(name):
    cause = causes()[name]
    assert cause.kind in KINDS
    assert cause.explanation.endswith(".")
    assert re.search(rf'"{name}"', SOURCES) or name in NAMED_BY_PARTS


def test_every_cause_that_the_code_names_is_listed():
    named = set(re.findall(r'Finding\(\s*"(\w+)"', SOURCES))
    assert named
    assert named <= set(causes())


def test_a_finding_has_the_keys_of_the_contract(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(watchdog(0, 9, "ALLREDUCE", 4) + watchdog(1, 9, "ALLREDUCE", 8))
    (finding,) = found(path)
    assert {"kind", "cause", "certainty", "ranks", "evidence", "actions", "collect"} <= set(finding)
    assert finding["certainty"] in CERTAINTIES
    assert [(seen["file"], seen["line"]) for seen in finding["evidence"]] == [(str(path), 1), (str(path), 2)]
    assert finding["evidence"][0]["text"].startswith("[rank0]:[E810")


def test_what_is_not_certain_says_what_to_collect_and_what_is_certain_does_not_ask():
    assert Finding("one_rank_visible", "cannot_tell", "").document()["collect"]
    assert not Finding("size_mismatch", "certain", "").document()["collect"]


def test_nothing_is_found_in_a_healthy_log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(
        "".join(
            f"[rank0]:[titan] 2025-03-20 08:19:11,539 - root - INFO - step: {step:2}  loss:  "
            f"{9 - step / 50:.4f}  "
            "memory: 49.58GiB(52.20%)  tps: 5,966  tflops: 345.53  mfu: 34.94%\n"
            for step in range(1, 100)
        )
    )
    assert causes_of(path) == []
