"""What both sides of the throughput comparison share: job, data, and answers to scripts/bench_peer.py.

Imported by either side in its own environment, so it needs torch and the standard library alone.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch

SHAPE = {"layers": 6, "hidden": 256, "ffn": 768, "heads": 16, "vocab": 2048, "rope_theta": 500000.0}
SEQ, SEQUENCES = 256, 8
TOKENS_PER_STEP = SEQ * SEQUENCES

KNOWN_TOKENS = 256
"""Ids that occur in the data: fewer than the vocabulary has, so that the loss has something to learn."""

LEARNING_RATE, WARMUP_STEPS, STEPS = 8e-4, 2, 1000


def global_batch(step: int) -> torch.Tensor:
    """Ids of a step's sequences and the token after each, SEQUENCES x (SEQ + 1): the same on both sides."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, KNOWN_TOKENS, (SEQUENCES, SEQ + 1), generator=generator)


def question() -> dict[str, Any]:
    """What to run: degrees of the axes and the kind of recomputation."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    return asked


def serve(step: Callable[[bool], float | None], parameters: int, answers: Any) -> None:
    """Answer until the input ends. A line of it is a number of steps to time, or 0: one step, for its loss.

    ``step`` is told whether its loss is asked for. CPU time [s] is that of all threads of this process.
    """
    print(json.dumps({"parameters": parameters, "torch": torch.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        count = int(line)
        if count:
            start = _cpu_time()
            for _ in range(count):
                step(False)
            answer = {"cpu_time": _cpu_time() - start}
        else:
            answer = {"loss": step(True)}
        print(json.dumps(answer), file=answers, flush=True)


def own_output() -> Any:
    """A file for the answers; whatever else is printed from here on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _cpu_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
