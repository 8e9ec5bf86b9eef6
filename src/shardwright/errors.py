"""The one tree of errors that a caller may catch.

    ShardwrightError              exit status 2: the input is malformed
      ModelError                  a model's configuration
      JobError                    a job: sequence, batch, optimizer
      ClusterError                a cluster or device description
      LayoutError                 a layout that contradicts itself, its model or its job
      PlanFileError               a plan.toml: missing, of another schema version, edited by half
      DataError                   training data: absent, empty, out of vocabulary
      EvidenceError               what the doctor is given: absent, refused, unreadable
      MissingExtraError           an optional part of shardwright is not installed
      AnswerIsNo                  exit status 1: the question is well put, the answer is no
        NothingFitsError          no layout fits or reaches the global batch
        RunFailedError            a rank failed while training

A message names the subject with its value, the rule with its value, and the way out.
"""

from collections.abc import Mapping
from typing import Any


class ShardwrightError(Exception):
    """Base of all errors raised on purpose; ``str()`` of one is fit for a user."""

    exit_status = 2


class ModelError(ShardwrightError):
    """A model configuration that cannot be read, or contradicts itself."""


class JobError(ShardwrightError):
    """A job that contradicts itself."""


class ClusterError(ShardwrightError):
    """A cluster or device that is unknown or contradicts itself."""


class LayoutError(ShardwrightError):
    """A layout that contradicts itself, its model, its job or its cluster."""


class PlanFileError(ShardwrightError):
    """A plan.toml that cannot be read."""


class DataError(ShardwrightError):
    """Training data that cannot be used."""


class EvidenceError(ShardwrightError):
    """A log, dump or other file that cannot be read."""


class MissingExtraError(ShardwrightError):
    """A part of shardwright that an extra installs is absent."""

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs the extra [{extra}]: pip install 'shardwright[{extra}]'")


class AnswerIsNo(ShardwrightError):  # noqa: N818  (an answer, not a fault of the input)
    """The question was well put and the answer is no."""

    exit_status = 1


class NothingFitsError(AnswerIsNo):
    """No layout fits the devices or reaches the global batch; ``document`` may say by how much."""

    def __init__(self, message: str, document: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.document = dict(document or {})


class RunFailedError(AnswerIsNo):
    """A rank failed while training; the message starts with the earliest rank's own error."""
