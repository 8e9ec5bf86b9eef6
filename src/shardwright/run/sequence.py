"""Where a context rank's tokens stand in the sequence, and what all ranks know of documents.

B batch, S this rank's tokens, n ranks of the group.
"""

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.layout import ContextKind
from shardwright.run.pieces import Runs


def runs(seq: int, degree: int, rank: int, kind: ContextKind) -> Runs:
    """Ranges of positions that ``rank`` of ``degree`` holds, in the order of its tokens.

    Ring and all-gather cut the sequence in 2 x degree parts and give rank i the parts i and 2 x degree - 1
    - i (zig-zag), so that all see equally many keys; Ulysses gives it one part in a row.

    Source: Llama 3, arXiv:2407.21783, section 3.3.2.
    """
    if degree == 1:
        return (range(seq),)
    parts = degree if kind == "ulysses" else 2 * degree
    assert seq % parts == 0, f"seq={seq} in {parts} parts: layout.py refuses this"
    size = seq // parts
    places = (rank,) if kind == "ulysses" else (rank, parts - 1 - rank)
    return tuple(range(place * size, (place + 1) * size) for place in places)


class WholeDocuments:
    """Ids of documents of all ranks, gathered once for each tensor of them: a model's layers share one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.known = WeakIdKeyDictionary()

    def of(self, document_BS: Tensor) -> Tensor:
        """n x B x S: the ids of every rank."""
        if document_BS not in self.known:
            mine = document_BS.contiguous()
            whole = mine.new_empty((dist.get_world_size(self.group) * mine.shape[0], mine.shape[1]))
            dist.all_gather_single(whole, mine, group=self.group)
            self.known[document_BS] = whole.unflatten(0, (-1, mine.shape[0]))
        return self.known[document_BS]
