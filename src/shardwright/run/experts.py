"""Mixture of experts: a router, routed experts, and experts that every token goes to.

B batch, S sequence, H hidden, N tokens (B*S), E experts, F ffn of one.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.model import ModelSpec
from shardwright.plan.names import naming
from shardwright.run.dispatch import combine, dispatch, plan_paths, to_experts
from shardwright.run.grouped import grouped_product, weighted_swiglu
from shardwright.run.kernels import swiglu
from shardwright.run.linear import Join, Linear, local, same
from shardwright.run.meeting import Meeting
from shardwright.run.router import Routed, Router
from shardwright.run.routing import Routing


class Experts(nn.Module):
    """The routed experts of a layer, stacked: dim 0 is the expert, and gate stands above up.

    Where ``group`` is set each of its ranks has a part of the experts; run/ep.py:apply_ep sets it.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.moe is not None, "a model with experts"
        experts, ffn = spec.moe.experts, spec.moe.ffn
        self.top_k = spec.moe.top_k
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * ffn, spec.hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, spec.hidden, ffn))
        self.group: dist.ProcessGroup | None = None

    def forward(self, x_NH: Tensor, routed: Routed, routing: Routing) -> Tensor:
        paths = plan_paths(routed, self.top_k, routing, self.group)
        both = grouped_product(dispatch(x_NH, paths), local(self.gate_up_proj), paths.counts)
        made = weighted_swiglu(both, to_experts(routed.weights, paths))
        del both  # the activation keeps it where there is a backward pass
        return combine(grouped_product(made, local(self.down_proj), paths.counts), paths)


class SharedExperts(nn.Module):
    """One SwiGLU network for all tokens, as wide as all shared experts together."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.moe is not None, "a model with experts"
        width = spec.moe.shared_ffn
        self.gate_proj = Linear(spec.hidden, width, bias=False)
        self.up_proj = Linear(spec.hidden, width, bias=False)
        self.down_proj = Linear(width, spec.hidden, bias=False)
        self.enter: Join = same

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = self.enter(x_BSH)
        return self.down_proj(swiglu(self.gate_proj(x_BSH), self.up_proj(x_BSH)))


class OutputGate(nn.Module):
    """One number for each token, between 0 and 1, that the shared experts' output is multiplied by."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, spec.hidden))

    def forward(self, x_BSH: Tensor) -> Tensor:
        return torch.sigmoid(nn.functional.linear(x_BSH, local(self.weight)))


class MoE(nn.Module):
    """The feed-forward part of a layer with experts, modules named as Hugging Face names them.

    No token is dropped. Reads and makes this rank's tokens, B x S x H. ``enter`` and ``join`` are where
    ranks of tp meet if every expert is split over them: all their tokens are gathered first.

    Raises: ModelError: the experts are no SwiGLU networks, or are biased.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.moe is not None, "a model with experts"
        biased = spec.moe.expert_bias or spec.moe.router_bias or (spec.mlp_bias and spec.moe.shared_ffn > 0)
        if spec.activation != "silu" or not spec.gated_mlp or biased:
            raise ModelError(
                f"model {spec.name}: experts with activation={spec.activation!r}, gated_mlp={spec.gated_mlp} "
                f"and biases={bool(biased)} are not built: train one whose experts are SwiGLU networks "
                "without biases"
            )
        self.enter: Join = same
        self.join: Join = same
        self.shared = naming(spec).shared if spec.moe.shared_ffn else ""
        self.gated = spec.moe.shared_gate
        builders = {
            "experts": lambda: ("experts", Experts(spec)),
            "router": lambda: ("gate", Router(spec)),
            "shared": lambda: (self.shared, SharedExperts(spec)),
            "shared_gate": lambda: (f"{self.shared}_gate", OutputGate(spec)),
        }
        for part in naming(spec).moe_order:
            if (part != "shared" or self.shared) and (part != "shared_gate" or self.gated):
                self.add_module(*builders[part]())

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = self.enter(x_BSH)
        shared_BSH = self._shared(x_BSH) if self.shared else None
        routed_NH = self.experts(x_BSH.flatten(0, 1), self.gate(x_BSH), self.gate.routing)
        out_BSH = routed_NH.view(x_BSH.shape)
        if shared_BSH is not None:
            out_BSH = shared_BSH + out_BSH
        return self.join(out_BSH)

    def meet(self, meeting: Meeting, *, split_experts: bool) -> None:
        """Have ranks of tp meet: around everything if experts are split over them, which then route the same
        tokens, else around the shared experts alone."""
        if split_experts:
            self.enter, self.join = meeting.enter, meeting.join
            self.gate.repeats = meeting.ranks
        elif self.shared:
            shared = self.get_submodule(self.shared)
            shared.enter, shared.down_proj.join = meeting.enter, meeting.join

    def _shared(self, x_BSH: Tensor) -> Tensor:
        out_BSH = self.get_submodule(self.shared)(x_BSH)
        return self.get_submodule(f"{self.shared}_gate")(x_BSH) * out_BSH if self.gated else out_BSH
