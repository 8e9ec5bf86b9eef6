"""Packed logs of every form say what the log says; bombs and what cannot be unpacked are named."""

import bz2
import gzip
import io
import lzma
import subprocess
import sys
import tarfile
import zipfile
import zlib

import pytest
from evidence_files import causes, found, watchdog

from shardwright.doctor.diagnose import diagnose
from shardwright.errors import EvidenceError

LOG = (watchdog(0, 9, "_ALLGATHER_BASE", 40960) + watchdog(1, 9, "_ALLGATHER_BASE", 262711296)).encode()
MISMATCH = [("size_mismatch", "certain", [0, 1])]


def zstd(data):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.compress(data, codec="zstd", asbytes=True)


PACKED = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": zstd}


@pytest.mark.parametrize("suffix", PACKED)
def test_packed_logs_say_the_same(tmp_path, suffix):
    path = tmp_path / f"train.log.{suffix}"
    path.write_bytes(PACKED[suffix](LOG))
    assert causes(path) == MISMATCH
    assert found(path)[0]["evidence"][0]["file"] == str(tmp_path / "train.log")


@pytest.mark.parametrize("suffix", PACKED)
def test_bombs_of_every_form_are_not_unpacked(tmp_path, suffix):
    path = tmp_path / f"bomb.{suffix}"
    path.write_bytes(PACKED[suffix](bytes(70 << 20)))
    with pytest.raises(EvidenceError, match="unpacks to more than 64 MiB"):
        diagnose([str(path)])


@pytest.mark.parametrize("kind", ["zip", "tar of gz"])
def test_many_small_bombs_are_one(tmp_path, kind):
    """Each stays below what any file may come to; together they may not."""
    path, bomb = tmp_path / "logs", bytes(15 << 20)
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for number in range(8):
                archive.writestr(f"{number}.log", bomb)
    else:
        tar_of(path, "w:gz", **{f"{number}.gz": gzip.compress(bomb) for number in range(8)})
    refused = diagnose([str(path)])["refused"]
    assert 1 <= len(refused) <= 4
    assert all("unpacks to more than 64 MiB" in each["reason"] for each in refused)


def test_packed_again_and_again_is_read_so_deep_and_no_deeper(tmp_path):
    path, data = tmp_path / "train.log.gz", LOG
    for _ in range(3):
        data = gzip.compress(data)
    path.write_bytes(data)
    assert causes(path) == MISMATCH
    for _ in range(400):
        data = gzip.compress(data, 1)
    path.write_bytes(data)
    with pytest.raises(EvidenceError, match="lies in 16 packed files"):
        diagnose([str(path)])


@pytest.mark.parametrize("suffix", ["gz", "xz", "bz2"])
def test_parts_behind_each_other_are_one_log(tmp_path, suffix):
    path = tmp_path / f"train.log.{suffix}"
    half = LOG.index(b"\n") + 1
    path.write_bytes(PACKED[suffix](LOG[:half]) + PACKED[suffix](LOG[half:]))
    assert causes(path) == MISMATCH


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("damage", ["cut off", "flipped"])
def test_a_damaged_one_breaks_nothing(tmp_path, suffix, damage):
    path, other = tmp_path / f"train.log.{suffix}", tmp_path / "other.log"
    data = bytearray(PACKED[suffix](LOG * 50 + bytes(range(256)) * 9))
    if damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    other.write_bytes(LOG)
    assert MISMATCH[0] in causes(path, other)


def test_an_xz_file_that_asks_for_gigabytes_is_refused(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30, "preset": 0}]
    path = tmp_path / "train.log.xz"
    packer = lzma.LZMACompressor(filters=[filters[0] | {"dict_size": 1 << 20}])
    data = bytearray(packer.compress(LOG) + packer.flush())
    place = data.index(b"\x21\x01")  # LZMA2 and the size of its properties, which is that of the dictionary
    data[place + 2] = 36  # 1 GiB
    header = bytes(data[12 : 12 + (data[12] + 1) * 4 - 4])
    data[12 + len(header) : 16 + len(header)] = zlib.crc32(header).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(EvidenceError, match=r"[Mm]emory"):
        diagnose([str(path)])


def tar_of(path, mode, **files):
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("escape")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_an_archive_of_ranks_is_read_rank_by_rank(tmp_path, mode):
    bare = LOG.replace(b"[rank0]:", b"").replace(b"[rank1]:", b"").splitlines(keepends=True)
    path = tmp_path / ("logs.tar" + mode[1:].replace(":", "."))
    tar_of(path, mode, rank0=bare[0], rank1=bare[1])
    assert causes(path) == MISMATCH
    files = {source["file"].rpartition("/")[2] for source in found(path)[0]["evidence"]}
    assert files == {"rank0", "rank1"}


def test_a_sparse_file_of_an_archive_is_not_read(tmp_path):
    with (tmp_path / "hole.log").open("wb") as file:
        file.truncate(8 << 30)
    (tmp_path / "ok.log").write_bytes(LOG)
    subprocess.run(["tar", "-C", tmp_path, "-Scf", tmp_path / "a.tar", "hole.log", "ok.log"], check=True)
    document = diagnose([str(tmp_path / "a.tar")])
    assert [(f["cause"], f["certainty"], f["ranks"]) for f in document["findings"]] == MISMATCH
    assert [refused["reason"] for refused in document["refused"]] == ["is a sparse file: unpack it first"]


def test_zstd_without_pyarrow_says_what_to_do(tmp_path, monkeypatch):
    path = tmp_path / "train.log.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EvidenceError, match=r"zstd -dc .*train.log.zst \| shardwright doctor -"):
        diagnose([str(path)])
