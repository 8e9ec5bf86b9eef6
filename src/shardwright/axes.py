"""The axes of the mesh, outer to inner, and the legend of the symbols used in formulas.

An axis is one row of ``AXES``. Its rule is in ``layout.py``, its terms in ``plan/memory.py`` and
``plan/traffic.py``, its program in ``run/``.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh of ranks."""

    name: str  # field of Layout that holds its degree
    splits: str  # what each rank along it holds a part of


AXES = (
    Axis("pp", "the layers, in stages; a microbatch passes from stage to stage"),
    Axis("dp_replicate", "the batch; parameters, gradients and optimizer state are whole on each"),
    Axis("dp_shard", "the batch, and parameters, gradients and optimizer state as the ZeRO stage says"),
    Axis("cp", "the sequence, in attention too; parameters are split along with dp_shard"),
    Axis("tp", "every matrix by heads, feed-forward width or vocabulary"),
)

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes along which ranks hold different sequences."""

MESH_ORDER = tuple(axis.name for axis in AXES)
"""Default order of the mesh, outermost (largest rank stride) first."""

MESH_ORDERS = (
    MESH_ORDER,
    ("dp_replicate", "pp", "dp_shard", "cp", "tp"),
    ("dp_replicate", "dp_shard", "pp", "cp", "tp"),
)
"""Orders that are searched. Megatron and torchtitan put pp outermost, Llama 3 (arXiv:2407.21783, section
3.3.2) the data axes. tp and cp, which talk most, stay inside."""

EXPERT_AXES = ("ep", "etp")
"""Axes of the routed experts, cut out of the ranks of dp_shard x cp x tp: whole experts, and each expert's
matrices. Ranks left over, ``expert_shard``, split their parameters as the ZeRO stage says."""

SYMBOLS = {
    "s": "tokens of a sequence",
    "b": "sequences of a microbatch on one rank",
    "m": "microbatches of a step on one rank",
    "h": "hidden size",
    "f": "ffn size",
    "a": "query heads",
    "kv": "key/value heads",
    "d": "head size",
    "L": "layers",
    "V": "vocabulary",
    "E": "experts",
    "k": "experts of a token",
}
"""Short names that formulas may use; every public field has a full name instead."""


def joined_axis(names: tuple[str, ...]) -> str:
    """Name of the axis that flattens ``names``: ``dp_replicate+dp_shard``."""
    return "+".join(names)
