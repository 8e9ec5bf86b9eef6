"""Optimizer state and its update in host memory.

On a CPU rank host and device are one memory; the code path is the same.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.run.shards import local

Groups = list[dict[str, Any]]
"""Parameters with the options that are theirs, as torch.optim takes them."""


class OffloadedOptimizer(torch.optim.Optimizer):
    """Steps an optimizer of element-wise updates on the host: gradients down, the update, parameters up.

    The host keeps a copy of this rank's parameters, their gradients and the state, the first two in pinned
    memory on CUDA; the device keeps neither state nor temporaries. The update waits for all gradients, as
    plan/step.py prices it. Stands for the optimizer it wraps: ``param_groups`` and ``state`` name the
    device's parameters, state rests on the host. A parameter that something else has written since the last
    step (a checkpoint) is copied down first.

    Source: ZeRO-Offload, arXiv:2101.06840, section 4, without its delayed update.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], build: Callable[[Groups], torch.optim.Optimizer]
    ) -> None:
        """``build`` makes the optimizer of the host's copies, given to it in groups like ``groups``."""
        groups = list(groups)
        copies = [[_host_copy(parameter) for parameter in group["params"]] for group in groups]
        self._inner = build([group | {"params": own} for group, own in zip(groups, copies, strict=True)])
        options = [inner | {"params": group["params"]}
                   for group, inner in zip(groups, self._inner.param_groups, strict=True)]  # fmt: skip
        super().__init__(options, {})
        self._copies: dict[nn.Parameter, nn.Parameter] = {
            parameter: copy
            for group, own in zip(groups, copies, strict=True)
            for parameter, copy in zip(group["params"], own, strict=True)
        }
        self._written = dict.fromkeys(self._copies, -1)  # version of the device's parameter that is copied

    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({option: value for option, value in group.items() if option != "params"})
        with torch.no_grad():
            for parameter, copy in self._copies.items():
                self._bring_down(parameter, copy)
            _finish_copies(self._copies)
            self._inner.step()
            for parameter, copy in self._copies.items():
                if copy.grad is not None:
                    local(parameter).copy_(local(copy), non_blocking=True)
                    self._written[parameter] = local(parameter)._version
                    self.state[parameter] = self._inner.state[copy]

    def _bring_down(self, parameter: nn.Parameter, copy: nn.Parameter) -> None:
        if local(parameter)._version != self._written[parameter]:
            local(copy).copy_(local(parameter), non_blocking=True)
        if parameter.grad is None:
            copy.grad = None
            return
        if copy.grad is None:
            copy.grad = _on_host(parameter)
        local(copy.grad).copy_(local(parameter.grad), non_blocking=True)


def _host_copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_on_host(parameter), requires_grad=parameter.requires_grad)


def _on_host(tensor: Tensor) -> Tensor:
    """Host memory for this rank's part, sharded as ``tensor`` is; pinned if that is on CUDA."""
    part = local(tensor).detach()
    room = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
    # from_local would move it to the mesh's device; FSDP's own offload makes such tensors likewise
    return DTensor(room, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else room


def _finish_copies(parameters: Iterable[nn.Parameter]) -> None:
    """Wait until what was copied down is there."""
    for device in {local(parameter).device for parameter in parameters if local(parameter).is_cuda}:
        torch.cuda.current_stream(device).synchronize()
