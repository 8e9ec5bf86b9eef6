"""Data axes: parameters, gradients and optimizer state split over dp_shard, repeated over dp_replicate.

ZeRO stages are resharding schedules of one mechanism, torch's ``fully_shard``.
"""

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwright.errors import LayoutError
from shardwright.plan.params import EMBEDDING, HEAD
from shardwright.run.ep import expert_placement
from shardwright.run.mesh import RankMesh
from shardwright.run.model import Stages, Transformer

PRECISION_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def parameter_dtype(precision: str) -> torch.dtype:
    """Type of the resting parameters: fp64 for fp64, else fp32."""
    return torch.float64 if precision == "fp64" else torch.float32


def apply_dp(model: Transformer, mesh: RankMesh, *, zero_stage: int, precision: str) -> None:
    """Shard parameters, gradients and optimizer state over dp_shard, in place.

    One FSDP unit each for the embedding, every block, and the final norm with the head; then the root, which
    is left without parameters of its own. plan/traffic.py predicts what each unit sends. Call last: FSDP must
    wrap what recomputation has made.

    Raises: LayoutError: a unit would hold most of the model, so that gathering it gathers the model at once.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision in ("bf16", "fp8") else None,
        reduce_dtype=torch.float32 if precision in ("bf16", "fp8") else None,
        cast_forward_inputs=False,
    )
    own = None if mesh.experts is None else mesh.experts.data
    placement = expert_placement(model, mesh.shard if own is None else own, apart=own is not None)
    for kind, modules in model.units():
        reshard = zero_stage == 3 and kind != HEAD  # the head's backward follows its forward at once
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh.fsdp, mp_policy=policy,
                    reshard_after_forward=reshard, shard_placement_fn=placement)  # fmt: skip
        if kind == EMBEDDING:
            modules[0].set_unshard_in_backward(False)  # its gradient needs the tokens only
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    check_units(model)
    for module in sharded_modules(model):
        # the loss is a sum divided by a global count, so gradients are summed and never averaged; and gloo
        # has no pre-multiplied sum
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def check_units(model: Transformer) -> None:
    """Refuse a model whose root holds parameters that no inner unit took.

    Raises: LayoutError
    """
    groups = list(model._get_fsdp_state()._fsdp_param_groups)
    held = sum(parameter.sharded_param.numel() for group in groups for parameter in group.fsdp_params)
    if held:
        total = sum(parameter.numel() for parameter in model.parameters())
        raise LayoutError(
            f"FSDP on the root holds {held / total:.0%} of the parameters: gathering it would gather them "
            "all at once; wrap the embedding, each block and the head first"
        )


def sharded_modules(model: torch.nn.Module) -> Iterator[FSDPModule]:
    """Every module that is an FSDP unit, the root included."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def set_microbatch_schedule(model: Stages, *, zero_stage: int, last: bool) -> None:
    """Tell FSDP what to do in the backward pass of the coming microbatch.

    Stages 0 and 1 keep gathered parameters and whole gradients until the last microbatch of the step; stage 2
    keeps the parameters and reduces every time; stage 3 reshards and reduces every time. Replicas are always
    summed once, in the last.
    """
    for module in sharded_modules(model):
        module.set_requires_gradient_sync(last or zero_stage >= 2, recurse=False)
        module.set_requires_all_reduce(last, recurse=False)
        module.set_reshard_after_backward(last or zero_stage == 3, recurse=False)


def reshard(model: Stages) -> None:
    """Free every gathered parameter, after an evaluation for example."""
    for module in sharded_modules(model):
        module.reshard()
