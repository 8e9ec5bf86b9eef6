"""Tensor parallelism: every matrix by heads, feed-forward width or vocabulary, over the ranks of tp.

Which dim of which tensor is split is read off the parameter table (plan/params.py). Between a matrix split by
its outputs and the next one split by its inputs a rank has its own heads or columns; ranks meet before the
first (``enter``) and behind the second (``join``). With sequence parallelism the stream between is split by
sequence: ranks gather it on entering and scatter the sum on joining, and norms work on a part of the tokens.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.model import ModelSpec
from shardwright.plan.params import parameter_table
from shardwright.run.ep import split_parameter
from shardwright.run.experts import MoE
from shardwright.run.gpt2 import GPT2Attention
from shardwright.run.init import HEAD_WEIGHT, table_name
from shardwright.run.linear import Linear, local, same
from shardwright.run.meeting import Meeting
from shardwright.run.model import Shares, Transformer
from shardwright.run.vocabulary_loss import VocabularyLoss

TP_PARTS = ("tp_heads", "tp_copies")
"""Axes of tp's ranks where key/value heads are fewer: by head, and over the copies of each."""


def apply_tp(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool, split_experts: bool) -> None:
    """Split the model's parameters over ``mesh`` and have its modules meet, in place. Call before FSDP.

    ``model`` is on the meta device. Tensors without a dim to split stay whole on every rank; ``model.shares``
    says whose gradients ``sum_shares`` has to add up. Routed experts are left to run/ep.py; ``split_experts``
    says that it splits them over tp, so that they need the tokens of all its ranks.
    """
    if mesh.size() == 1:
        return
    meeting = Meeting(mesh.get_group().group_name, mesh.size(), sequence_parallel)
    for layer in model.decoder.layers.values():
        layer.self_attn.enter, layer.self_attn.o_proj.join = meeting.enter, meeting.join
        if isinstance(layer.mlp, MoE):
            layer.mlp.meet(meeting, split_experts=split_experts)
        else:
            layer.mlp.enter, layer.mlp.down_proj.join = meeting.enter, meeting.join
        if isinstance(layer.self_attn, GPT2Attention):
            layer.self_attn.c_attn.own = functools.partial(_own_thirds, mesh)
    if model.decoder.embed_tokens is not None:
        model.decoder.embed_tokens.first_row = first_row(model.spec.vocab, mesh)
        model.decoder.embed_tokens.join = meeting.join
    if sequence_parallel:
        model.own = lambda position_S: position_S.chunk(mesh.size())[mesh.get_local_rank()]
    if model.lm_head is not None:
        model.lm_head.enter = meeting.enter
        model.lm_head.cross_entropy = VocabularyLoss(first_row(model.spec.vocab, mesh), mesh.get_group())
    model.shares = _split_parameters(model, mesh, sequence_parallel)


def first_row(rows: int, mesh: DeviceMesh) -> int:
    """First of a table's rows that this rank has."""
    return min(-(-rows // mesh.size()) * mesh.get_local_rank(), rows)


def _own_thirds(mesh: DeviceMesh, bias: Tensor) -> Tensor:
    """Of a bias of queries, keys and values side by side, what this rank's heads have of each."""
    return bias.view(3, mesh.size(), -1)[:, mesh.get_local_rank()].flatten()


def sum_shares(model: Transformer) -> None:
    """Add up the gradients of parameters that ranks hold whole but find a share of each. Once a step.

    One all-reduce a group, of this rank's shards.
    """
    parameters = dict(model.named_parameters())
    for names, group in model.shares:
        grads = [local(parameters[name].grad) for name in names]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_([grad.view(-1) for grad in grads], flat.split([grad.numel() for grad in grads]))


def _split_parameters(model: Transformer, mesh: DeviceMesh, sequence_parallel: bool) -> list[Shares]:
    """Make DTensors of what tp splits; returns what stays whole and is found in shares.

    Behind ``enter`` every rank works with its own heads or columns, so that whatever is whole there gets a
    share of its gradient on each; a bias added behind ``join`` and the norms of the stream do so only where
    the stream is split by sequence.
    """
    tensors = {tensor.name: tensor for tensor in parameter_table(model.spec).tensors()}
    splits = {name: tensor.splits.get("tp") for name, tensor in tensors.items() if "ep" not in tensor.splits}
    splits.setdefault(
        HEAD_WEIGHT, splits[table_name(HEAD_WEIGHT, model.spec)]
    )  # tied: the table names it once
    keys, copies = _key_mesh(model.spec, mesh)
    found: dict[str, list[str]] = {"all": [], "copies": []}
    for path, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{path}.{name}"
            if full not in splits:
                continue  # a routed expert's
            dim = splits[full]
            if dim is not None and isinstance(module, Linear) and path.endswith(".c_attn"):
                thirds = _StridedShard(dim, split_factor=3)
                module.register_parameter(name, split_parameter(parameter, mesh, (thirds,)))
            elif dim is not None:
                few = copies is not None and path.endswith(("k_proj", "v_proj"))
                placements = [Shard(dim), Replicate()] if few else [Shard(dim)]
                split = distribute_tensor(parameter, keys if few else mesh, placements, src_data_rank=None)
                module.register_parameter(name, nn.Parameter(split))
                if few:
                    found["copies"].append(full)
            elif sequence_parallel or _is_inside(module, name, path):
                found["all"].append(full)
    model.tie()
    groups = {"all": mesh.get_group(), "copies": None if copies is None else copies.get_group()}
    return [Shares(tuple(names), groups[kind]) for kind, names in found.items() if names]


def _is_inside(module: nn.Module, name: str, path: str) -> bool:
    """Whether a parameter is used between ``enter`` and ``join``."""
    behind = isinstance(module, Linear) and name == "bias" and module.join is not same
    return any(branch in path for branch in (".self_attn.", ".attn.", ".mlp.")) and not behind


def _key_mesh(spec: ModelSpec, mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Mesh over which keys and values are split: with more ranks than heads, heads by copies of each."""
    if mesh.size() <= spec.kv_heads:
        return mesh, None
    both = mesh._unflatten(0, (spec.kv_heads, mesh.size() // spec.kv_heads), TP_PARTS)
    return both, both[TP_PARTS[1]]
