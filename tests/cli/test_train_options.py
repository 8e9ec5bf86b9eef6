"""train: a run that goes on, and what it is refused."""

import json
from pathlib import Path

import pytest
from command import refused


def test_a_run_is_continued_only_when_asked_and_as_it_began(run, plan_file):
    options = ("train", plan_file, "--run-dir=r", "--json")
    losses = run(*options, "--steps=4", "--checkpoint-every=3").document["losses"]
    text = plan_file.read_text()

    refused(run(*options), "run folder r already holds a run", "or continue it with --resume")
    plan_file.write_text(text.replace("seed = 0", "seed = 1"))
    refused(
        run(*options, "--resume"), "seed=1 was 0 when the run began: a run goes on with its model, job and"
    )
    Path("other.txt").write_text("other text " * 500)
    plan_file.write_text(text)
    refused(run(*options, "--resume", "--data=other.txt"), "data='", "when the run began")
    refused(run(*options, "--resume", "--steps=4"), "run r has made all of its 4 steps: ask for more")
    refused(
        run(*options, "--resume", "--profile=2..3"), "--profile 2..3 is not within the steps of the run, 5..5"
    )

    outcome = run(*options, "--resume", "--steps=6")
    assert "continuing run r after step 4 of 6, from r/checkpoints/step-000004\n" in outcome.err
    assert (outcome.document["steps"], len(Path("r/metrics.jsonl").read_text().splitlines())) == (6, 6)
    assert outcome.document["losses"][:4] == losses
    ranks = json.loads(Path("r/ranks.json").read_text())["ranks"]
    assert ranks[1]["predicted"]["peak"] == outcome.document["predicted"]["memory"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "--resume does not say which run: give its folder with --run-dir"),
        (["--resume", "--run-dir=r"], "run folder r has no complete checkpoint to resume from"),
        (["--profile=5"], "--profile '5' is no range of steps: write 5..7 for steps 5, 6 and 7"),
        (["--profile=4..9"], "--profile 4..9 is not within the steps of the run, 1..5"),
        (["--keep=0"], "'--keep'"),
        (["--on-nan=wait"], "'--on-nan'"),
    ],
)
def test_options_that_cannot_be_met_leave_no_folder(run, plan_file, options, message):
    refused(run("train", plan_file, *options), message)
    assert not Path("runs").exists()
    assert not Path("r").exists()
