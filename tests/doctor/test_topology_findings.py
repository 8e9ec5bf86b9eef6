"""Topologies among the doctor's evidence: in logs, refused, and with a plan's degree of tp."""

from pathlib import Path

import pytest
from evidence_files import causes, found, watchdog

from shardwright.doctor.diagnose import diagnose
from shardwright.errors import EvidenceError

TOPO = Path(__file__).parent.parent / "measure" / "data" / "topo"
XML = TOPO.parent / "nccl_xml"
FILES = sorted([*TOPO.glob("*.txt"), *XML.glob("*.xml")])
BROKEN = TOPO / "t29_bad_matrix_hand_edited_missing_columns.txt"
PAIRS = TOPO / "t24_8xa100_pcie_4pairs.txt"
WHOLE = TOPO / "t21_h20_8nic_one_pix_each.txt"


@pytest.mark.parametrize("given", ["", "gpus=8 tp=8", "gpus=64 tp=8 pp=4 device=h100-sxm"])
@pytest.mark.parametrize("path", [path for path in FILES if path != BROKEN], ids=lambda path: path.name[:12])
def test_every_artefact_is_read_and_names_no_rank(path, given):
    document = diagnose([str(path)], given=given)
    assert document["findings"]
    assert document["refused"] == []
    assert all(finding["ranks"] == [] for finding in document["findings"] if finding["kind"] != "layout")


@pytest.mark.parametrize("name", ["t03", "t14", "t15", "t16", "t19", "t20", "t21", "t24", "t06"])
def test_a_machine_with_nothing_wrong_is_no_fault(name):
    (path,) = TOPO.glob(f"{name}_*.txt")
    assert not diagnose([str(path)])["fault"]


def test_a_broken_matrix_alone_is_malformed_and_beside_others_a_note():
    with pytest.raises(EvidenceError, match=f"^{BROKEN}:4:10: row GPU1"):
        diagnose([str(BROKEN)])
    document = diagnose([str(BROKEN), str(WHOLE)])
    assert [each["file"] for each in document["refused"]] == [str(BROKEN)]


def test_a_printout_inside_a_log_is_read_with_the_rest_of_it(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(watchdog(0, 9, "ALLREDUCE", 4) + PAIRS.read_text() + "\n" + watchdog(1, 9, "ALLREDUCE", 8))
    assert ("size_mismatch", "certain", [0, 1]) in causes(log)
    assert ("nvlink_carries_tp", "certain", []) in causes(log)


def test_a_broken_printout_inside_a_log_does_not_hide_the_log(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(watchdog(0, 9, "ALLREDUCE", 4) + BROKEN.read_text() + watchdog(1, 9, "ALLREDUCE", 8))
    document = diagnose([str(log)])
    assert "size_mismatch" in [finding["cause"] for finding in document["findings"]]
    assert "row GPU1 has X" in document["refused"][0]["reason"]


def test_tp_inside_an_island_is_no_fault_and_beyond_it_is():
    assert not diagnose([str(PAIRS)], given="gpus=8 tp=2")["fault"]
    (beyond,) = [f for f in found(PAIRS, given="gpus=8 tp=4") if f["cause"] == "tp_beyond_nvlink"]
    assert beyond["actions"][0] == "use tp of at most 2, in groups (0,1)(2,3)(4,5)(6,7)"
    assert "2 of 2 groups" in beyond["summary"]
    assert diagnose([str(PAIRS)], given="gpus=8 tp=4")["fault"]


def test_evidence_quotes_the_rows_of_the_devices():
    (finding,) = [f for f in found(PAIRS) if f["cause"] == "nvlink_carries_tp"]
    assert [(seen["line"], seen["text"][:4]) for seen in finding["evidence"]] == [
        (2 + at, f"GPU{at}") for at in range(8)
    ]


def test_a_cube_mesh_carries_tp_of_all_in_a_ring():
    (path,) = TOPO.glob("t04_*.txt")
    assert "tp_beyond_nvlink" not in [f["cause"] for f in found(path, given="gpus=8 tp=8")]


def test_rates_of_a_kind_that_was_given_are_not_called_a_guess():
    assert "taken for" in found(PAIRS)[0]["summary"]
    assert "taken for" not in found(PAIRS, given="device=a100-pcie")[0]["summary"]
