"""The feed-forward network of a block: gated by SiLU, or plain.

B batch, S sequence, E hidden, F ffn.
"""

from collections.abc import Callable, Mapping

import torch.nn.functional as F  # noqa: N812  (torch's own custom)
from torch import Tensor, nn

from shardwright.model import ModelSpec
from shardwright.run.kernels import swiglu
from shardwright.run.linear import Join, Linear, same

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
"""Of networks without a gate; each keeps its input for the backward pass, ReLU its output."""


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias)
        self.up_proj = Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias)
        self.down_proj = Linear(spec.ffn, spec.hidden, bias=spec.mlp_bias)
        self.enter: Join = same

    def forward(self, x_BSE: Tensor) -> Tensor:
        x_BSE = self.enter(x_BSE)
        return self.down_proj(swiglu(self.gate_proj(x_BSE), self.up_proj(x_BSE)))


class PlainMLP(nn.Module):
    """Feed-forward without a gate, by the names of GPT-2, which turns its matrices, and StarCoder2."""

    def __init__(self, spec: ModelSpec, *, transposed: bool = False) -> None:
        super().__init__()
        self.c_fc = Linear(spec.hidden, spec.ffn, bias=spec.mlp_bias, transposed=transposed)
        self.c_proj = Linear(spec.ffn, spec.hidden, bias=spec.mlp_bias, transposed=transposed)
        self.activation = ACTIVATIONS[spec.activation]
        self.enter: Join = same

    @property
    def down_proj(self) -> Linear:
        """The matrix whose output is added to the stream, as the rest of the runtime calls it."""
        return self.c_proj

    def forward(self, x_BSE: Tensor) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(self.enter(x_BSE))))
