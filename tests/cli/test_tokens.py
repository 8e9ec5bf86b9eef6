"""tokenize, and training on what it writes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import refused

TEXT = "What is split must be paid for in communication. "


@pytest.fixture
def corpus(run, tmp_path):
    """A token file of three documents of bytes."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text(TEXT * 20)
    assert run("tokenize", folder, "-o", "corpus.tokens").status == 0
    return tmp_path / "corpus.tokens"


def test_tokenize_document(run, corpus):
    outcome = run("tokenize", "texts", "-o", "again.tokens", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    document = outcome.document
    assert document["time"] > 0
    assert document["digest"] != ""
    assert document | {"digest": "", "time": 0} == {
        "output": "again.tokens",
        "bytes": corpus.stat().st_size,
        "tokenizer": "bytes",
        "vocab": 257,
        "separator": 256,
        "dtype": "uint16",
        "files": 3,
        "documents": 3,
        "tokens": 3 * (20 * len(TEXT) + 1),
        "text_bytes": 3 * 20 * len(TEXT),
        "skipped": 0,
        "first_skipped": [],
        "digest": "",
        "time": 0,
    }


def test_tokenize_report(run, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": TEXT}) + "\nbad\n")
    outcome = run("tokenize", "a.jsonl", "-o", "c.tokens", "--text-field", "body", "--skip-bad")
    assert (outcome.status, outcome.err) == (0, "")
    parts = (
        "c.tokens: 50 tokens of 1 documents",
        "tokenizer bytes: vocabulary 257, separator 256, 1.00 B of text a token",
        "left out 1 records, the first of them:\n  a.jsonl:2 is not JSON",
        "train on it: shardwright train PLAN --data c.tokens",
    )
    assert all(part in outcome.out for part in parts), outcome.out


def test_tokenize_refusals(run, tmp_path):
    (tmp_path / "a.jsonl").write_text("bad\n")
    refused(run("tokenize", "-o", "c"), "Missing argument 'INPUT...'")
    refused(run("tokenize", "a.jsonl"), "Missing option", "--output")
    refused(
        run("tokenize", "absent", "-o", "c"), "input absent does not exist: give files or folders of text"
    )
    refused(run("tokenize", "a.jsonl", "-o", "c"), "a.jsonl:1 is not JSON", "leave such out with --skip-bad")
    refused(run("tokenize", "a.jsonl", "-o", "c", "--skip-bad"), "input holds no text")
    refused(run("tokenize", "a.jsonl", "-o", tmp_path), f"output {tmp_path} is a folder")
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_tokenizing_loads_no_torch(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    code = (
        "import sys; sys.argv = ['shardwright', 'tokenize', 'a.txt', '-o', 'c.tokens']\n"
        "from shardwright.cli import app\napp(standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, timeout=120)


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_leaves_no_half_file(tmp_path):
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "x" * 70}) + "\n") * 600_000)
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.argv = ['shardwright', 'tokenize', 'a.jsonl', '-o', 'out/c.tokens']\n"
        "from shardwright.cli import main\nmain()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (partial := Path("out/c.tokens.partial")).exists() or partial.stat().st_size < 10**6:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in err
    assert not list(Path("out").iterdir())


def test_training_on_a_token_file(run, plan_file, corpus):
    found = [
        run("train", plan_file, "--data", data, "--steps=3", "--run-dir", f"run-{i}", "--json").document
        for i, data in enumerate(("corpus.tokens", "texts"))
    ]
    assert found[0]["losses"] == found[1]["losses"]  # the same tokens
    assert found[0]["data_digest"] != found[1]["data_digest"]


def test_training_on_a_damaged_token_file_is_refused_before_it_starts(run, plan_file, corpus):
    content = corpus.read_bytes()
    corpus.write_bytes(content[:-100])
    refused(run("train", plan_file, "--data", corpus), "it is cut off, copy it again, or make it anew with")
    corpus.write_bytes(content[:900] + b"\0" + content[901:])
    refused(run("train", plan_file, "--data", corpus), "is damaged in 1 of its 1 blocks")
    assert not Path("runs").exists()


def test_packing_of_documents_is_planned_and_trained(run, model, corpus, tmp_path):
    options = ("--gpus=2", "--seq=32", "--global-batch=4", "--packing=documents", "-o", "p.toml")
    assert run("plan", model, *options).status == 0
    assert 'packing = "documents"' in (tmp_path / "p.toml").read_text()
    outcome = run("train", "p.toml", "--data", corpus, "--steps=2", "--json")
    assert (outcome.status, outcome.document["steps"]) == (0, 2)
