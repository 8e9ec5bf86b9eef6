"""Commands run by tests, and what every refusal must look like."""

import json
import os
import subprocess
import sys

from shardwright.model import ModelSpec

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
}
JOB = ("--seq=32", "--global-batch=4")
H100 = ("--device=h100-sxm", "--gpus=8")
SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_size=16, vocab=257
)


class Outcome:
    """How a command ended."""

    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err

    @property
    def document(self):
        """The one JSON document on stdout."""
        return json.loads(self.out)


def fresh(*argv, code="", **environment):
    """Run a command in a process of its own, after ``code``."""
    start = f"{code}\nfrom shardwright.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", start, *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def refused(outcome, *parts, status=2):
    """One message on stderr, nothing on stdout."""
    assert (outcome.status, outcome.out) == (status, ""), outcome.err
    text = " ".join(outcome.err.replace("│", " ").split())
    for part in parts:
        assert part in text
    assert "Traceback" not in outcome.err
    if outcome.err.startswith("shardwright: "):
        assert outcome.err.count("\n") == 1
