"""Fixtures of the command line's tests."""

import json
import sys

import pytest
from command import CONFIG, SPEC, Outcome

from shardwright import cli
from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.plan import explain
from shardwright.planfile import save_plan


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Commands write where the test can look, and at a width that breaks no message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def run(monkeypatch, capfd):
    """Run a command in this process."""

    def run_command(*argv):
        monkeypatch.setattr(sys, "argv", ["shardwright", *map(str, argv)])
        status = 0
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code or 0
        found = capfd.readouterr()
        return Outcome(status, found.out, found.err)

    return run_command


@pytest.fixture
def model(tmp_path):
    """A small model as its config.json."""
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def plan_file(tmp_path):
    """A plan of two CPU ranks."""
    job = Job(seq=32, global_batch=4, steps=5, precision="fp32")
    layout = Layout(dp_shard=2, zero_stage=3, microbatches=2)
    return save_plan(explain.plan_of(SPEC, job, cluster_of("cpu", 2), layout), tmp_path / "plan.toml")
