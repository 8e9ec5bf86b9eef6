"""What a person may ask of a run beside its plan. Needs no torch, so that the command line can name it."""

from typing import Literal, NamedTuple

COLLECTIVE_TIMEOUT_S = 600.0
"""Longest wait in a collective before the run counts as hung; torch's own default for NCCL."""

OnNan = Literal["stop", "skip"]
OnSpike = Literal["ignore", "stop", "skip"]


class RunOptions(NamedTuple):
    """How a run is kept, watched and recorded. None of it changes a run in which all goes well."""

    tensorboard: bool = False
    checkpoint_every: int = 0  # steps; 0 writes none, not even at the end
    keep: int = 2  # newest checkpoints that are kept, at least 1
    resume: bool = False  # go on from the newest checkpoint of the run folder
    on_nan: OnNan = "stop"
    on_spike: OnSpike = "ignore"
    profile: range = range(0)  # steps that are traced, counted from 1
    timeout: float = COLLECTIVE_TIMEOUT_S
