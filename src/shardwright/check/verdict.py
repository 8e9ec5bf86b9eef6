"""A cause as a finding: what it is called, how sure it is, and the sentence for people."""

from typing import Literal, NamedTuple

Certainty = Literal["certain", "likely", "cannot_tell"]


class Cause(NamedTuple):
    """Why two runs differ. ``candidates``: degrees that explain a factor, several where it cannot be told."""

    key: str
    certainty: Certainty
    text: str
    candidates: tuple[str, ...] = ()
