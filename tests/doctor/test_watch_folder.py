"""A run folder that is watched, and one that has gone silent."""

import json
import os
import time

from evidence_files import found

from shardwright.doctor.watch import watched


def step(number):
    return json.dumps({"step": number, "loss": 2.0, "gradient_norm": 1.0, "step_time": 0.5}) + "\n"


def test_a_folder_is_looked_at_until_something_is_found(tmp_path):
    answers = iter([{"findings": []}, {"findings": []}, {"findings": ["something"]}])
    pauses = []
    assert watched(lambda: next(answers), [str(tmp_path)], 3.0, pauses.append)["findings"] == ["something"]
    assert pauses == [3.0, 3.0]


def test_and_no_longer_than_the_run_goes_on(tmp_path):
    def end(_):
        (tmp_path / "result.json").write_text("{}")

    assert watched(lambda: {"findings": []}, [str(tmp_path)], 3.0, end) == {"findings": []}


def test_a_run_without_a_word_of_its_end(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(step(1) + step(2) + step(3))
    assert found(tmp_path) == []
    long_ago = time.time() - 600
    os.utime(metrics, (long_ago, long_ago))
    (finding,) = found(tmp_path)
    assert (finding["cause"], finding["certainty"], finding["numbers"]["step"]) == (
        "run_stopped",
        "cannot_tell",
        3,
    )
    (tmp_path / "result.json").write_text(json.dumps({"losses": [], "layout": {}, "steps": 3}))
    assert found(tmp_path) == []
