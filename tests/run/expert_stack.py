"""A small stack of layers with experts on real ranks, and the same on one: what tests of experts share."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from gloo import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwright.job import Job
from shardwright.model import ModelSpec, Moe
from shardwright.plan.block_ops import Rank
from shardwright.plan.feed_forward_steps import expert_steps
from shardwright.run.ep import apply_ep, expert_placement
from shardwright.run.expert_load import apply_balance, expert_load, routers, update_router_bias
from shardwright.run.experts import MoE
from shardwright.run.mesh import expert_meshes

LAYERS, BATCH, SEQ = 2, 8, 8
AUX = 1e4
"""Weight of the balancing loss that gives its gradient the size of the loss's."""
AXES = ("dp_replicate", "dp_shard", "cp", "tp")

BASE = ModelSpec(
    name="experts", model_type="mixtral", layers=LAYERS, hidden=16, ffn=12, heads=4, kv_heads=2, head_size=4,
    vocab=32, moe=Moe(experts=8, top_k=2, ffn=12),
)  # fmt: skip
LATENT = {
    "head_size": 12, "kv_heads": 4, "model_type": "deepseek_v3",
    "mla": {"q_rank": 8, "kv_rank": 8, "nope_size": 8, "rope_size": 4, "value_size": 8},
}  # fmt: skip


def with_moe(model_type, base=None, **moe):
    """BASE as another family, with other experts."""
    values = BASE.model_dump() | {"model_type": model_type} | (base or {})
    return ModelSpec.model_validate(values | {"moe": {**BASE.moe.model_dump(), **moe}})


SPECS = {
    "mixtral": BASE,
    "qwen2_moe": with_moe("qwen2_moe", top_k=3, shared_ffn=12, shared_gate=True, normalise=False),
    "deepseek_v3": with_moe(
        "deepseek_v3", LATENT, top_k=3, shared_ffn=12, score="sigmoid", scale=2.5, groups=4, top_groups=2,
        correction_bias=True,
    ),
    "one_of_many": with_moe("mixtral", experts=32, top_k=1, normalise=False),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Degrees, and what else may not change the result."""

    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    microbatches: int = 1
    reshard: bool = True
    recompute: bool = False
    aux: float = 0.0
    to_one: bool = False

    def __str__(self):
        changed = [
            (f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return "-".join(name if value is True else f"{name}={value}" for name, value in changed)

    @property
    def ranks(self):
        return self.replicate * self.shard * self.cp * self.tp


@dataclass(frozen=True)
class Found:
    """Of one step: the loss, every gradient, every expert's copies, the balancing loss, the biases after."""

    loss: float
    gradients: dict
    counts: np.ndarray
    balance: float
    biases: list


class Layer(nn.Module):
    """x + MoE(x), recomputed or not."""

    def __init__(self, spec, recompute):
        super().__init__()
        self.mlp, self.recompute = MoE(spec), recompute

    def forward(self, x):
        if self.recompute:
            return checkpoint(self.body, x, use_reentrant=False, determinism_check="none")
        return self.body(x)

    def body(self, x):
        return x + self.mlp(x)


class Stack(nn.Module):
    """Layer upon layer, with weights and biases that depend on nothing but the model."""

    def __init__(self, spec, recompute, to_one):
        super().__init__()
        self.layers = nn.ModuleList(Layer(spec, recompute) for _ in range(LAYERS))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.4, generator=generator)
        for router in routers(self):
            if router.bias is not None:
                router.bias.normal_(0, 0.2, generator=generator)
            if to_one:  # every token's sum is positive, so that all of them prefer the first experts
                router.weight.data[:] = -torch.arange(len(router.weight))[:, None] * 0.1

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def samples(to_one):
    """All sequences and what their outputs are compared with."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH, SEQ, BASE.hidden, dtype=torch.float64, generator=generator)
    return x.abs() if to_one else x, torch.randn(x.shape, dtype=torch.float64, generator=generator)


def backward(model, x, target, parts):
    """Loss of the given sequences over the global count; leaves the gradients."""
    total = 0.0
    for i, (x_part, target_part) in enumerate(zip(x.chunk(parts), target.chunk(parts), strict=True)):
        if hasattr(model, "set_is_last_backward"):
            model.set_requires_all_reduce(i == parts - 1)
        loss = (model(x_part.detach().requires_grad_()) - target_part).square().sum() / (BATCH * SEQ)
        loss.backward()
        total += loss.item()
    return total


def kept_bytes(moe, x):
    """Bytes of the storages, but those of parameters, that a forward pass keeps for the backward pass."""
    kept = {}
    own = {
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).untyped_storage().data_ptr()
        for parameter in moe.parameters()
    }

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = moe(x.detach().requires_grad_())
    assert out.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def planned_bytes(spec, precision, split):
    """What plan/feed_forward_steps.py keeps of a token, on a rank with no more copies than the mean."""
    rank = Rank(spec, Job(seq=SEQ, global_batch=BATCH, precision=precision, expert_imbalance=1.0), split)
    ops = [op for step in expert_steps(rank, spec.moe, "read")[0] for op in step]
    sizes = {"read": rank.residual} | {name: size for op in ops for name, size in op.makes.items()}
    return sum(sizes[name] for name in {name for op in ops for name in op.keeps})


def found(model, loss, groups):
    load = expert_load(model, groups)
    update_router_bias(model, load.counts, 0.01)
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    biases = [router.bias.numpy().copy() for router in routers(model) if router.bias is not None]
    return Found(loss, gradients, load.counts.numpy().copy(), load.loss.item(), biases)


def one_rank(spec, case):
    """``Found`` of one rank with all sequences in one microbatch, nothing split."""
    model = Stack(spec, False, case.to_one).double()
    apply_balance(model, case.aux, BATCH)
    return found(model, backward(model, *samples(case.to_one), 1), ())


def parallel_stack(spec, case):
    """The split stack, its mesh, and the groups of ranks whose counts are summed."""
    root = init_device_mesh("cpu", (case.replicate, case.shard, case.cp, case.tp), mesh_dim_names=AXES)
    model = Stack(spec, case.recompute, case.to_one).double()
    meshes = expert_meshes(root, case.ep, case.etp)
    apply_ep(model, meshes)
    spread = [axis for axis in ("cp", "tp") if root[axis].size() > 1 and (axis == "cp" or case.etp == 1)]
    apply_balance(model, case.aux, BATCH, [root.get_group(axis) for axis in spread])
    data = root["dp_shard", "cp"]._flatten("data")
    if case.replicate > 1:
        data = type(root)._concatenate([root["dp_replicate"], data])
    place = expert_placement(model, meshes.data)
    for layer in model.layers:
        fully_shard(layer, mesh=data, reshard_after_forward=case.reshard, shard_placement_fn=place)
    fully_shard(model, mesh=data)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model, root, [root.get_group(axis) for axis in ("dp_replicate", "dp_shard", *spread)]


def own_samples(root, case):
    """This rank's sequences, and of them its tokens."""
    rank = root.get_local_rank("dp_replicate") * case.shard + root.get_local_rank("dp_shard")
    parts = []
    for tensor in samples(case.to_one):
        part = tensor.chunk(case.replicate * case.shard)[rank]
        part = part.chunk(case.cp, dim=1)[root.get_local_rank("cp")]
        parts.append(part.chunk(case.tp, dim=1)[root.get_local_rank("tp")] if case.sp else part)
    return parts


def many_ranks(spec, case):
    """``Found`` on each rank; runs under ``run_ranks``."""
    model, root, groups = parallel_stack(spec, case)
    loss = torch.tensor(backward(model, *own_samples(root, case), case.microbatches), dtype=torch.float64)
    for axis in ("dp_replicate", "dp_shard", "cp", *(("tp",) if case.sp else ())):
        torch.distributed.all_reduce(loss, group=root.get_group(axis))
    return found(model, loss.item(), groups)
