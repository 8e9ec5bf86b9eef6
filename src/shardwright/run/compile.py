"""``torch.compile`` of every block by itself: one compilation for all blocks, and FSDP's hooks stay outside.

An option of a run and not of its layout: neither what is computed nor what is sent changes.
"""

import torch
import torch._functorch.config

from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.run.attend import CausalAttention
from shardwright.run.experts import MoE
from shardwright.run.model import Block, Transformer

BACKEND = "inductor"
"""What ``torch.compile`` uses of its own accord; it needs a C++ compiler, or Triton on a GPU."""


def check_compile(layout: Layout) -> None:
    """Raises: LayoutError: the layout has something inside blocks that a compiled block cannot have."""
    if layout.recompute == "selective":
        raise LayoutError(
            "--compile does not go with recompute='selective': a compiled block chooses itself what it "
            "keeps; train without --compile, or plan with --recompute none or full"
        )


def apply_compile(model: Transformer, backend: str = BACKEND, *, passes: int = 1) -> None:
    """Have every block run compiled, in place. Call after tp and recomputation, before FSDP.

    What trades with other ranks by counts that only a run knows stays outside: attention split over cp, and
    experts. ``passes``: of backward through a block, 2 in a zero-bubble schedule: then compiled code may not
    reuse the memory of what it saved, for the second pass reads it again.
    """
    if passes > 1:
        torch._functorch.config.donated_buffer = False  # torch has no such option for one function
    for layer in model.decoder.layers.values():
        _leave_out(layer)
        layer.body = torch.compile(layer.body, backend=backend, dynamic=False)  # type: ignore[method-assign]


def _leave_out(layer: Block) -> None:
    if not isinstance(layer.self_attn.attend, CausalAttention):
        layer.self_attn.attend = torch.compiler.disable(layer.self_attn.attend)
    if isinstance(layer.mlp, MoE):
        layer.mlp.forward = torch.compiler.disable(layer.mlp.forward)  # type: ignore[method-assign]
