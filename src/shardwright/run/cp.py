"""Context parallelism: ranks of ``cp`` hold parts of the same sequences, and attention spans the parts.

S tokens of a whole sequence, B batch.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.layout import ContextKind
from shardwright.run.attend import Attend, CausalAttention
from shardwright.run.gather_attention import AllGatherAttention
from shardwright.run.ring import RingAttention
from shardwright.run.sequence import runs
from shardwright.run.ulysses import UlyssesAttention


def positions(seq: int, degree: int, rank: int, kind: ContextKind) -> Tensor:
    """int64 positions in the sequence of the seq / degree tokens that ``rank`` holds, in their order."""
    return torch.cat([torch.arange(run.start, run.stop) for run in runs(seq, degree, rank, kind)])


def slice_sequence(x_BS: Tensor, position_S: Tensor) -> Tensor:
    """The tokens (or targets, or ids of documents) of whole sequences at some positions."""
    return x_BS.index_select(1, position_S)


def build_attend(kind: ContextKind, group: dist.ProcessGroup | None) -> Attend:
    """Attention of this rank among those of ``group``; with kind "none" it has whole sequences."""
    if kind == "none":
        return CausalAttention()
    assert group is not None, f"cp_kind={kind} without a group of ranks"
    if kind == "ring":
        return RingAttention(group)
    return AllGatherAttention(group) if kind == "all_gather" else UlyssesAttention(group)


def apply_cp(model: torch.nn.Module, mesh: DeviceMesh, kind: ContextKind) -> None:
    """Have every attention of ``model`` (each module that holds an ``attend``) span the ranks of ``mesh``.

    The model must then be given the tokens at this rank's ``positions`` alone. Per block and microbatch: ring
    degree - 1 sends of keys and values forward, as many backward, and degree of their gradients; all-gather,
    one all-gather forward, one more and a reduce-scatter backward; Ulysses, four all-to-alls each way;
    plan/context_traffic.py predicts these. Ids of documents are gathered once a microbatch besides.
    """
    attend = build_attend(kind, mesh.get_group())
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = attend
