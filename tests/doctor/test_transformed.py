"""Field reports as other collectors keep them: the doctor says the same of each."""

import io
import tarfile
from pathlib import Path

import pytest
from casebook import cases, expected, files_of, verdict

from shardwright.derive.spec import model_of
from shardwright.doctor.diagnose import diagnose

CASES = list(cases())
LOGS = (".log",)
NOISE = "INFO 2026-01-01 loading shard 3 of 40 from /data/x, tokens so far 1234567, ok\n"


def each_line(change):
    def changed(name, text):
        return "".join(map(change, text.splitlines(keepends=True))) if Path(name).suffix in LOGS else text

    return changed


def on_windows(name, text):
    """A mark, colours in the middle of words, and its ends of lines."""
    if Path(name).suffix in (".log", ".txt", ".jsonl"):
        text = "".join(f"\x1b[32m{line[:3]}\x1b[0m{line[3:]}" for line in text.splitlines(keepends=True))
    return "\ufeff" + text.replace("\n", "\r\n")


FORMS = {
    "with a collector's clock": each_line(lambda line: f"2026-01-05T10:11:12.123456789Z {line}"),
    "of a worker of ray": each_line(lambda line: f"(TrainWorker pid=4242, ip=10.0.0.1) {line}"),
    "another process between": each_line(lambda line: line + NOISE if line.strip() else line),
    "on Windows": on_windows,
}


def diagnosed(case, paths):
    model = case.entry.get("model")
    return diagnose(
        [str(path) for path in paths],
        model=None if model is None else model_of(model),
        given=case.entry.get("given", ""),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.book}-{case.name}")
def test_case_in_another_form(case, form, tmp_path):
    (tmp_path / "in").mkdir()
    paths = []
    for number, path in enumerate(map(Path, files_of(case, tmp_path / "in"))):
        own = path.relative_to(tmp_path / "in") if path.is_relative_to(tmp_path / "in") else Path(path.name)
        paths.append(tmp_path / "out" / own)
        paths[number].parent.mkdir(parents=True, exist_ok=True)
        text = FORMS[form](path.name, path.read_text(encoding="utf-8"))
        paths[number].write_text(text, encoding="utf-8", newline="")
    found, why = verdict(case, diagnosed(case, paths))
    assert found == expected(case), why


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.book}-{case.name}")
def test_case_in_an_archive(case, tmp_path):
    path = tmp_path / "job.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for each in map(Path, files_of(case, tmp_path)):
            own = each.relative_to(tmp_path) if each.is_relative_to(tmp_path) else each.name
            info, data = tarfile.TarInfo(f"job/{own}"), each.read_bytes()
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    found, why = verdict(case, diagnosed(case, [path]))
    assert found == expected(case), why
