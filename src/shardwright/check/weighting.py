"""Losses that are divided by a part's own tokens: by how much each sequence then counts in the gradients.

The found gradients are a sum of the sequences' own, each with a weight that is 1 where the loss is divided by
the tokens of the global batch. The weights tell who divided by what.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping

import numpy as np
from numpy.typing import NDArray

from shardwright.check.evidence import Evidence, SequenceWeights, relative
from shardwright.check.verdict import Cause

Array = NDArray[np.float64]

DIVIDED_BY: Mapping[str, tuple[str, Callable[[SequenceWeights, int], Hashable]]] = {
    "sequence": ("each sequence by its own tokens", lambda s, i: i),
    "microbatch": ("each microbatch of a rank by its own tokens", lambda s, i: (s.rank[i], s.microbatch[i])),
    "rank": ("each rank's step by its own tokens", lambda s, i: s.rank[i]),
    "accumulation": ("each microbatch by its tokens on all ranks", lambda s, i: s.microbatch[i]),
}
"""Parts of the batch whose token count a loss may be divided by instead of the whole's."""


def sequence_weights(
    found: Mapping[str, Array], sequences: Mapping[str, Array], match: float
) -> tuple[float, ...] | None:
    """Weights of sequences that make the found sketches; None if no weights do, or they are not unique.

    ``found``: a sketch of each parameter; ``sequences``: of each sequence, B x width. A sequence without a
    gradient counts 1.
    """
    rows, right = [], []
    for name, sketches in sequences.items():
        scale = float(np.abs(sketches.sum(0)).max())
        if scale > 0:
            rows.append(sketches.T / scale)
            right.append(found[name] / scale)
    matrix, target = np.concatenate(rows), np.concatenate(right)
    present = np.abs(matrix).max(0) > 0
    solved, _, rank, _ = np.linalg.lstsq(matrix[:, present], target, rcond=None)
    left = np.linalg.norm(matrix[:, present] @ solved - target)
    if rank < present.sum() or not left <= match * np.linalg.norm(target):
        return None
    weights = np.ones(len(present))
    weights[present] = solved
    return tuple(float(weight) for weight in weights)


def weighting_cause(evidence: Evidence) -> Cause | None:
    """The division, or the dropping, that the weights of the sequences show."""
    sequences = evidence.sequences
    if sequences is None or not evidence.off:
        return None
    counted = [i for i, tokens in enumerate(sequences.tokens) if tokens]
    for part, (words, key) in DIVIDED_BY.items():
        weights = _weights_if_divided(sequences, key)
        scale = sequences.weights[counted[0]] / weights[counted[0]]
        if all(relative(sequences.weights[i], scale * weights[i]) <= evidence.match for i in counted):
            light, heavy = min(counted, key=weights.__getitem__), max(counted, key=weights.__getitem__)
            text = (
                f"the loss divides {words}, not by those of the global batch: a token of sequence {heavy} "
                f"({sequences.tokens[heavy]} tokens) counts {weights[heavy] / weights[light]:.3g} times one "
                f"of sequence {light} ({sequences.tokens[light]})"
            )
            if relative(scale, 1.0) > evidence.match:
                text += f"; and parts are added up where a mean belongs: all x {scale:.4g}"
            return Cause(f"loss_per_{part}", "certain", text)
    return _dropped(sequences, counted, evidence.match)


def _weights_if_divided(
    sequences: SequenceWeights, key: Callable[[SequenceWeights, int], Hashable]
) -> list[float]:
    """Of the mean of the parts' means, over those that count."""
    tokens: dict[Hashable, int] = defaultdict(int)
    for i, count in enumerate(sequences.tokens):
        tokens[key(sequences, i)] += count
    total, parts = sum(sequences.tokens), len(tokens)
    return [total / (parts * max(tokens[key(sequences, i)], 1)) for i in range(len(sequences.tokens))]


def _dropped(sequences: SequenceWeights, counted: list[int], match: float) -> Cause | None:
    """Some sequences do not count, or count twice; the others do as they should."""
    wrong = [i for i in counted if abs(sequences.weights[i] - 1) > match]
    if not wrong or len({round(sequences.weights[i], 6) for i in wrong}) > 1:
        return None
    weight = sequences.weights[wrong[0]]
    right = [i for i in counted if i not in wrong]
    counts = "do not count" if abs(weight) <= match else f"count {weight:.4g} times"
    for what, of in (("microbatch", sequences.microbatch), ("rank", sequences.rank)):
        values = {of[i] for i in wrong}
        if values.isdisjoint({of[i] for i in right}):
            listed = ", ".join(map(str, sorted(values)))
            name = "microbatches" if what == "microbatch" else "data ranks"
            key = f"{what}_dropped" if abs(weight) <= match else f"{what}_weighted"
            return Cause(key, "certain", f"the sequences of {name} {listed} {counts} in the gradients")
    listed = ", ".join(map(str, wrong[:8]))
    return Cause("sequences_weighted", "certain", f"sequences {listed} {counts} in the gradients")
