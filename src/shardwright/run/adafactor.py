"""Adafactor on sharded parameters: the same numbers in every layout.

torch's own fails on sharded tensors: it squares them in place where their placement would change.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.run.shards import Group, local, split_groups, sum_over_groups, zeros_without_dim

Sum = tuple[Tensor, Sequence[Group]]
"""A part of a sum on this rank, and the groups whose parts it adds up."""


class Adafactor(torch.optim.Optimizer):
    """Adafactor with update clipping and decoupled weight decay, without momentum and relative step size.

    A matrix keeps a mean of squares for each row and each column, a vector one for each element; stacked
    experts are matrices of their own. The step is ``lr`` times an update whose root mean square is at most
    ``clip_threshold``: the rate of an AdamW serves. Row means rest split as the rows are, column means as the
    columns are. Two all-reduces a step over each different group that splits parameters: of row or column
    sums, then of two numbers a matrix; plan/optimizer_traffic.py predicts them.

    Source: Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5; 1 - t^-0.8 is of section 7.2.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        decay: float = 0.8,
        epsilon: float = 1e-30,
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr, "decay": decay, "epsilon": epsilon, "clip_threshold": clip_threshold,
            "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        held = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        sums = [list(_square_sums(parameter, group["epsilon"])) for parameter, group in held]
        _sum(sums)
        for (parameter, group), own in zip(held, sums, strict=True):
            self._average(parameter, group, [total for total, _ in own])
        numbers = [list(self._magnitudes(parameter)) for parameter, _ in held]
        _sum(numbers)
        for (parameter, group), own in zip(held, numbers, strict=True):
            self._update(parameter, group, [total for total, _ in own])

    def _average(self, parameter: Tensor, group: dict[str, Any], sums: Sequence[Tensor]) -> None:
        """Bring the running means up to date with this step's sums of squares."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=local(parameter).device)
            if is_factored(parameter):
                state["row"] = zeros_without_dim(parameter, -1)
                state["column"] = zeros_without_dim(parameter, -2)
            else:
                state["square"] = torch.zeros_like(parameter)
        state["step"] += 1
        # a tensor: nothing waits for the device; in fp64, for the step is kept in fp32
        fresh = state["step"].double().pow(-group["decay"]).to(parameter.dtype)
        if is_factored(parameter):
            local(state["row"]).lerp_(sums[0] / parameter.shape[-1], fresh)
            local(state["column"]).lerp_(sums[1] / parameter.shape[-2], fresh)
        else:
            local(state["square"]).lerp_(_squares(parameter, group["epsilon"]), fresh)

    def _direction(self, parameter: Tensor) -> Tensor:
        """The update of this rank's part before clipping; of a matrix without its scale, the root of the mean
        of its row means, which is a sum over ranks."""
        grad, state = local(parameter.grad), self.state[parameter]
        if not is_factored(parameter):
            return grad * local(state["square"]).rsqrt()
        scaled = grad * local(state["row"]).rsqrt()[..., None]
        return scaled.mul_(local(state["column"]).rsqrt()[..., None, :])

    def _magnitudes(self, parameter: Tensor) -> Iterator[Sum]:
        """Squares of the update before clipping, and row means of a matrix: one number each, in fp64."""
        direction = self._direction(parameter)
        dims = (-2, -1) if is_factored(parameter) else (-1,)
        yield direction.square_().sum(dims, dtype=torch.float64), split_groups(parameter, dims)
        if is_factored(parameter):
            yield (
                local(self.state[parameter]["row"]).sum(-1, dtype=torch.float64),
                split_groups(parameter, (-2,)),
            )

    def _update(self, parameter: Tensor, group: dict[str, Any], numbers: Sequence[Tensor]) -> None:
        """Clip the update and apply it; ``numbers`` are those of ``_magnitudes``, summed."""
        squares, part = numbers[0], local(parameter)
        if is_factored(parameter):
            scale = numbers[1] / parameter.shape[-2]
            mean_square = squares * scale / (parameter.shape[-2] * parameter.shape[-1])
        else:
            scale, mean_square = torch.ones_like(squares), squares / parameter.numel()
        clipped = scale.sqrt() / (mean_square.sqrt() / group["clip_threshold"]).clamp(min=1.0)
        clipped = clipped.to(part.dtype)
        update = self._direction(parameter).mul_(clipped[..., None, None] if part.ndim > 1 else clipped)
        part.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


def is_factored(parameter: Tensor) -> bool:
    """Whether a mean for each row and column stands for one of each element."""
    return parameter.ndim > 1


def _squares(parameter: Tensor, epsilon: float) -> Tensor:
    return local(parameter.grad).square().add_(epsilon)


def _square_sums(parameter: Tensor, epsilon: float) -> Iterator[Sum]:
    """Sums of squares over each row and each column of a matrix; nothing of a vector."""
    if is_factored(parameter):
        squares = _squares(parameter, epsilon)
        yield squares.sum(-1), split_groups(parameter, (-1,))
        yield squares.sum(-2), split_groups(parameter, (-2,))


def _sum(sums: Sequence[Sequence[Sum]]) -> None:
    flat = [pair for own in sums for pair in own]
    sum_over_groups([total for total, _ in flat], [groups for _, groups in flat])
