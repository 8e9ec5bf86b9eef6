"""Megatron's notation of which layers each pipeline stage has: ``Et*2|(t*2|)*34,t*3|(t*2|)*3,tL``.

E embedding, t transformer layer, m layer of multi-token prediction, L loss; | ends a stage, x*n is n of x,
also of a group in parentheses, and commas are for the eye.

Source: NVIDIA/Megatron-LM, megatron/core/transformer/pipeline_parallel_layer_layout.py, parse_str_to_list.
"""

import re
from collections import Counter
from typing import NamedTuple

from shardwright.errors import LayoutError

MOST_LETTERS = 100_000
"""Letters and bars of a notation written out at most; a model has fewer layers."""

_GROUP = re.compile(r"\(([^()]+)\)\*([0-9]{1,5})")
_LETTER = re.compile(r"([EtmL|])\*([0-9]{1,5})")


class NotedStage(NamedTuple):
    """What one stage has, by number."""

    layers: int
    embedding: int
    loss: int
    mtp: int


def noted_stages(notation: str) -> tuple[NotedStage, ...]:
    """The stages of a notation, in order.

    Raises: LayoutError: a word that the notation has not, or an embedding, loss or layer out of place.
    """
    stages = []
    for letters in _written_out(notation).split("|"):
        count = Counter(letters)
        stages.append(NotedStage(count["t"], count["E"], count["L"], count["m"]))
    letters = _written_out(notation).replace("|", "")
    if not re.fullmatch(r"Et+m*L", letters):
        raise LayoutError(
            f"layout {notation!r} reads {_short(letters)!r}: give one E, then layers t, any m, and one L last"
        )
    return tuple(stages)


def noted_layers(notation: str) -> tuple[int, ...]:
    """Transformer layers of each stage.

    Raises: LayoutError: as ``noted_stages``; a stage without layers; multi-token prediction, which has no
    stage in the planner.
    """
    stages = noted_stages(notation)
    if any(stage.mtp for stage in stages):
        raise LayoutError(f"layout {notation!r} places m: multi-token prediction is not split into stages")
    empty = [place for place, stage in enumerate(stages) if stage.layers == 0]
    if empty:
        raise LayoutError(f"layout {notation!r} leaves stages {empty} without a layer: give each one t")
    return tuple(stage.layers for stage in stages)


def _written_out(notation: str) -> str:
    """Letters and bars alone: groups repeated from the innermost, then single letters."""
    text = re.sub(r"[,\s]", "", notation)
    while found := _GROUP.search(text):
        _check_length(notation, len(text) + len(found[1]) * int(found[2]))
        text = text[: found.start()] + found[1] * int(found[2]) + text[found.end() :]
    _check_length(notation, len(text) + sum(int(times) for _, times in _LETTER.findall(text)))
    text = _LETTER.sub(lambda found: found[1] * int(found[2]), text)
    unknown = re.search(r"[^EtmL|]", text)
    if unknown:
        raise LayoutError(
            f"layout {notation!r} has {unknown[0]!r} in {_short(text[unknown.start() :])!r}: use E, t, m, L, "
            "bars, and x*n or (x)*n to repeat"
        )
    return text


def _check_length(notation: str, length: int) -> None:
    if length > MOST_LETTERS:
        raise LayoutError(f"layout {_short(notation)!r} is over {MOST_LETTERS:,} letters: repeat less")


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
