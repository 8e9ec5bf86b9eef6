"""Files that mean harm or are broken: nothing runs, nothing grows without bound, and each is named."""

import gzip
import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile

import pytest
from evidence_files import causes, found, watchdog, write_dump

from shardwright.doctor.diagnose import diagnose
from shardwright.errors import EvidenceError

LOG = watchdog(0, 9, "_ALLGATHER_BASE", 40960) + watchdog(1, 9, "_ALLGATHER_BASE", 262711296)
MISMATCH = [("size_mismatch", "certain", [0, 1])]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_would_run_code_is_refused_by_the_name_of_what_it_wants(tmp_path, protocol):
    mark, path = tmp_path / "was-here", tmp_path / "rank0.pickle"
    path.write_bytes(pickle.dumps({"version": "2.5", "entries": [Evil(mark)]}, protocol=protocol))
    with pytest.raises(EvidenceError, match=r"it would run code: instruction \w+ of (posix|nt).system"):
        diagnose([str(path)])
    assert not mark.exists()


def test_beside_a_refused_pickle_the_other_files_are_read(tmp_path):
    bad, log = tmp_path / "rank0", tmp_path / "train.log"
    bad.write_bytes(pickle.dumps({"entries": [Evil("x")]}))
    log.write_text(LOG)
    document = diagnose([str(bad), str(log)])
    assert [finding["cause"] for finding in document["findings"]] == ["size_mismatch"]
    assert "it would run code" in document["refused"][0]["reason"]


@pytest.mark.parametrize("size", [10, 100, 400])
def test_a_dump_that_is_cut_off_is_refused(tmp_path, size):
    write_dump(tmp_path, 0, [], {"0": (1, 1)})
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(path.read_bytes()[:size] if size < 400 else path.read_bytes()[:-1])
    with pytest.raises(EvidenceError, match="cut off or no pickle"):
        diagnose([str(path)])


def test_bombs_are_not_unpacked(tmp_path):
    with gzip.open(tmp_path / "a.gz", "wb") as file:
        for _ in range(70):
            file.write(bytes(1 << 20))
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.log", b"a" * (70 << 20))
    (tmp_path / "ok.log").write_text("nothing\n")
    document = diagnose([str(tmp_path / name) for name in ("a.gz", "b.zip", "ok.log")])
    assert ["unpacks to more than" in refused["reason"] for refused in document["refused"]] == [True, True]


def test_packed_logs_are_read(tmp_path):
    with gzip.open(tmp_path / "train.log.gz", "wb") as file:
        file.write(LOG.encode())
    with zipfile.ZipFile(tmp_path / "logs.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.log", LOG)
    assert causes(tmp_path / "train.log.gz") == MISMATCH
    assert causes(tmp_path / "logs.zip") == MISMATCH


def wrapped(width):
    return (
        "\n".join(line[i : i + width] for line in LOG.splitlines() for i in range(0, len(line), width)) + "\n"
    )


FORMS = {
    "utf-16": LOG.encode("utf-16"),
    "latin-1": b"caf\xe9 \xff\n" + LOG.encode(),
    "binary": bytes(range(256)) * 40 + b"\n" + LOG.encode() + bytes(range(256)),
    "colours": LOG.replace("WorkNCCL", "\x1b[31mWork\x1b[0mNCCL").encode(),
    "wrapped at 80": wrapped(80).encode(),
    "wrapped at 120": wrapped(120).encode(),
    "run together": (
        LOG.splitlines()[0][:40] + LOG.splitlines()[1] + LOG.splitlines()[0][40:] + "\n"
    ).encode(),
    "one line": b"x" * 100_000 + LOG.replace("\n", " ").encode(),
    "windows": LOG.replace("\n", "\r\n").encode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_log_in_any_form_says_the_same(tmp_path, form):
    path = tmp_path / "train.log"
    path.write_bytes(FORMS[form])
    assert causes(path) == MISMATCH


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("deep.json", b'{"entries":' * 50_000, "recursion|cut off or malformed"),
        ("half.json", b'{"version": "2.5", "entries": [{"record_id":', "cut off or malformed"),
        ("bad.toml", b"a = [1,", "is no TOML"),
        ("bad.yaml", b"a: [1,\n: :", "is no YAML"),
        ("a.zip", b"PK\x03\x04garbage", "not a zip file"),
        ("prog", b"\x7fELF" + bytes(100), "is a program or picture"),
        ("list.pkl", pickle.dumps([1, 2]), "no flight recorder dump"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_reason(tmp_path, name, data, reason):
    path, other = tmp_path / name, tmp_path / "ok.log"
    path.write_bytes(data)
    other.write_text("nothing\n")
    (refused,) = diagnose([str(path), str(other)])["refused"]
    assert refused["file"] == str(path)
    assert re.search(reason, refused["reason"])


@pytest.mark.parametrize(
    "document",
    [
        {
            "version": 5,
            "entries": [{"process_group": 7, "input_sizes": "x", "frames": [1]}],
            "pg_config": [1],
        },
        {"version": "2.5", "entries": [1, "a", None, {}], "pg_status": {"0": 5}, "pg_config": {"0": None}},
        {"rank": 0, "groups": {"0": 1}, "stack": [1], "in_collective": 1},
    ],
    ids=["entry", "status", "state"],
)
def test_documents_of_wrong_types_break_nothing(tmp_path, document):
    path = tmp_path / "dump_rank0.json"
    path.write_text(json.dumps(document))
    assert found(path) == []


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(EvidenceError, match="does not exist"):
        diagnose([str(tmp_path / "none.log")])


def test_a_large_log_is_streamed(tmp_path):
    """48 MiB in less than 24 MiB above what a short log takes."""
    code = (
        "import resource, sys; from shardwright.doctor.diagnose import diagnose\n"
        "d = diagnose([sys.argv[1]]); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // "
        "1024, len(d['findings']))"
    )
    step = (
        b"[rank0]:[titan] 2025-03-20 08:19:11,539 - root - INFO - step: 30  loss:  7.71  memory: "
        b"49.58GiB(52.20%)  tps: 5,966\n"
    )
    sizes = {}
    for count in (1, (48 << 20) // len(step)):
        path = tmp_path / f"{count}.log"
        with path.open("wb") as file:
            for _ in range(count // 10_000 + 1):
                file.write(step * min(count, 10_000))
            file.write(LOG.encode())
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120
        )
        sizes[count], findings = map(int, done.stdout.split())
        assert findings == 1
    small, large = sizes.values()
    assert large - small < 24


def test_a_pipe_is_read():
    document = diagnose(["-"], io.BytesIO(LOG.encode()))
    assert [(f["cause"], f["evidence"][0]["file"]) for f in document["findings"]] == [("size_mismatch", "-")]
