"""How commands print: one document as JSON or as a report, and messages beside it."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import RenderableType

from shardwright.errors import MissingExtraError
from shardwright.report import terminal


def print_report(
    document: Mapping[str, Any], as_json: bool, report: Callable[[Mapping[str, Any]], RenderableType]
) -> None:
    """On stdout and nothing else."""
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        terminal.show(report(document))


def say(message: str) -> None:
    """On stderr."""
    print(message, file=sys.stderr)


def need_torch(purpose: str) -> None:
    """Raises: MissingExtraError: there is no torch."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtraError("train", purpose) from None
