"""The part of a block between a gather of tokens over tp and the sum of what its ranks made of them."""

from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

SEQUENCE_DIM = 1


class TpRegion(NamedTuple):
    """Ranks of ``mesh`` hold parts of the matrices. Outside, tokens are split by sequence if ``sp``."""

    mesh: DeviceMesh
    sp: bool

    def enter(self, x_BSH: Tensor) -> Tensor:
        """All tokens, on every rank. With sp an all-gather, backward a reduce-scatter; else backward an
        all-reduce."""
        outside = Shard(SEQUENCE_DIM) if self.sp else Replicate()
        split = DTensor.from_local(x_BSH, self.mesh, [outside], run_check=False)
        return split.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def leave(self, part_BSH: Tensor) -> Tensor:
        """The sum of the ranks' parts. With sp a reduce-scatter, backward an all-gather; else an
        all-reduce."""
        outside = Shard(SEQUENCE_DIM) if self.sp else Replicate()
        parts = DTensor.from_local(part_BSH, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[outside]).to_local()
