"""Activations of one block: what is saved for the backward pass and what is in use at its worst moments.

plan/block_steps.py writes the block's operations, plan/tape.py plays them.
"""

from functools import cache

from shardwright.job import Job
from shardwright.layout import Recompute
from shardwright.model import ModelSpec
from shardwright.plan.block_ops import ELEMENT_BYTES, WIDE_BYTES, Rank, Split
from shardwright.plan.block_steps import Kind, block_steps
from shardwright.plan.tape import BlockActivations, Moment, played

__all__ = [
    "ELEMENT_BYTES", "WHOLE", "WIDE_BYTES", "BlockActivations", "Kind", "Moment", "Split",
    "block_activations", "rotary_table_bytes",
]  # fmt: skip

WHOLE = Split()


@cache
def block_activations(
    model: ModelSpec, job: Job, recompute: Recompute, split: Split = WHOLE, kind: Kind = "dense"
) -> BlockActivations:
    """Saved tensors and moments of one block, for each token of a rank (it has micro_batch * seq / cp).

    The four families that the runtime builds are counted as it executes them (check/ compares), the others
    as they would be with its kernels. The residual stream's input counts as saved by the block that reads it.
    In families whose layers differ in window or rotation only, every layer keeps the same.
    """
    assert kind == "dense" or model.moe, f"model {model.name} has no experts"
    if split != _that_matters(split, kind):
        return block_activations(model, job, recompute, _that_matters(split, kind), kind)
    rank = Rank(model, job, split)
    return played(block_steps(rank, kind), {"input": rank.residual}, recompute)


def _that_matters(split: Split, kind: Kind) -> Split:
    """The split without degrees that change nothing, so that a search plays each block once."""
    cp = split.cp if split.cp_kind in ("all_gather", "ulysses") else 1
    return split._replace(cp=cp) if kind == "experts" else split._replace(cp=cp, ep=1, etp=1)


def rotary_table_bytes(model: ModelSpec, seq: int, precision: str) -> float:
    """Cosine and sine tables, made once a forward pass and shared by all blocks [B].

    A family with another frequency in its windowed layers has a second pair.
    """
    if model.positions != "rope":
        return 0.0
    turned = model.mla.rope_size if model.mla else model.head_size * model.rotary_share
    pairs = 1 if model.local_rope_theta is None else 2
    return WIDE_BYTES[precision] * seq * turned * pairs
