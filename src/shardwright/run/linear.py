"""Matrix products whose parameters tensor parallelism may have split: a rank computes with what it holds.

A parameter that is split is a DTensor, so that FSDP, initialisation, checkpoints and norms know which part of
the whole a rank has. Arithmetic goes on local tensors: every operation is a plain kernel, and the collectives
are those of run/tp.py alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Inputs (... x inputs), weight (outputs x inputs) and perhaps a bias to ``x @ weight.T + bias``."""

Join = Callable[[Tensor], Tensor]
"""What tensor parallelism does to activations where its ranks meet; ``same`` without it."""


def same(x: Tensor) -> Tensor:
    """No ranks to meet."""
    return x


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter. Its gradient is this rank's part too, or its share of the sum where
    the parameter is whole on every rank; run/tp.py adds those shares up."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Linear(nn.Module):
    """``join(x @ weight.T) + bias``; ``join`` adds up the parts of a product that is split by its inputs.

    ``transposed``: the weight's rows are its inputs, as GPT-2 has them. run/fp8.py replaces ``product``;
    ``own`` picks this rank's part of a bias that is whole where the matrix is split.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, *, transposed: bool = False) -> None:
        super().__init__()
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.transposed = transposed
        self.product: Product = nn.functional.linear
        self.join: Join = same
        self.own: Join = same

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight).t() if self.transposed else local(self.weight)
        if self.bias is None:
            return self.join(self.product(x, weight, None))
        bias = self.own(local(self.bias))
        if self.join is same:
            return self.product(x, weight, bias)
        return self.join(self.product(x, weight, None)) + bias
