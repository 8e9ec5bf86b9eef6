"""The command ``doctor``: one document, exit status, a pipe, refusals."""

import json

from command import fresh, refused

LINE = (
    "[rank{0}]:[E616 13:41:10.909 ProcessGroupNCCL.cpp:565] [Rank {0}] Watchdog caught collective "
    "operation timeout: "
    "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn={1}, NumelOut={1}, Timeout(ms)=600000) ran for "
    "600007 milliseconds "
    "before timing out.\n"
)
LOG = LINE.format(0, 4) + LINE.format(1, 8)


def test_a_finding_is_status_1_and_one_document(run, tmp_path):
    (tmp_path / "train.log").write_text(LOG)
    outcome = run("doctor", "train.log", "--json")
    (finding,) = outcome.document["findings"]
    assert outcome.status == 1
    assert (finding["kind"], finding["cause"], finding["ranks"]) == ("hang", "size_mismatch", [0, 1])
    assert finding["evidence"][0]["file"] == "train.log"
    assert outcome.document["inputs"] == [{"file": "train.log", "kind": "text"}]


def test_nothing_found_is_status_0(run, tmp_path):
    (tmp_path / "train.log").write_text("all is well\n")
    outcome = run("doctor", "train.log")
    assert (outcome.status, outcome.out.strip()) == (0, "nothing wrong found in 1 file")


def test_the_report_says_what_how_sure_why_and_what_to_do(run, tmp_path):
    (tmp_path / "train.log").write_text(LOG)
    text = " ".join(run("doctor", "train.log").out.split())
    for part in ("hang: size mismatch (certain)", "call #9", "> train.log:1:", "do: make shapes equal"):
        assert part in text


def test_a_model_and_what_is_given(run, model, tmp_path):
    (tmp_path / "train.log").write_text("nothing\n")
    outcome = run("doctor", "train.log", "--model", model, "--given", "tp=3", "--json")
    assert outcome.document["findings"][0]["cause"] == "heads_do_not_divide"


def test_refusals(run, tmp_path):
    refused(run("doctor", "none.log"), "file none.log does not exist")
    (tmp_path / "train.log").write_text("x\n")
    refused(run("doctor", "train.log", "--given", "tpp=8"), "did you mean 'tp'?")


def test_a_pipe(tmp_path):
    code = f"import io, sys; sys.stdin = io.TextIOWrapper(io.BytesIO({LOG.encode()!r}))"
    outcome = fresh("doctor", "-", "--json", code=code)
    assert outcome.err == ""
    assert json.loads(outcome.out)["findings"][0]["cause"] == "size_mismatch"
    assert outcome.status == 1


def test_a_plan_is_read_and_found_sound(run, plan_file):
    assert run("doctor", plan_file).status == 0


def test_good_news_is_status_0(run, tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(
            "".join(f'{{"step": {i}, "loss": {9 - i}, "grad_norm": 1.5}}\n' for i in range(1, 4))
        )
    outcome = run("doctor", "a.jsonl", "b.jsonl", "--json")
    assert [finding["cause"] for finding in outcome.document["findings"]] == ["runs_equal"]
    assert outcome.status == 0
