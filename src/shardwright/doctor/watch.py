"""Watching a run folder: diagnosed again and again until something is found or the run has ended."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULT = "result.json"


def watched(
    diagnose: Callable[[], dict[str, Any]],
    folders: Sequence[str],
    every_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """The first diagnosis that finds something, or the one after every run in ``folders`` has its result."""
    while True:
        ended = all((Path(folder) / RESULT).exists() for folder in folders)
        document = diagnose()
        if ended or document["findings"]:
            return document
        sleep(every_s)
