"""Global gradient norm: one number in every layout, each tensor counted once, and how it is summed."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sharded import WAYS, plain_module, set_gradients, sharded_module, values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.run.launch import run_ranks
from shardwright.run.norm import clip_gradients, gradient_norm

WHOLE = float(np.sqrt(sum(float(value.square().sum()) for value in values(1).values())))


class AllReduces(TorchDispatchMode):
    """Numbers in each all-reduce, and the ranks of its group."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is torch.ops.c10d.allreduce_.default:
            self.seen.append((args[0][0].numel(), dist.ProcessGroup.unbox(args[1]).size()))
        return func(*args, **(kwargs or {}))


def norm_of(way, without):
    """The norm, and the all-reduces it took; ranks in ``without`` have no gradient of the norm's weight."""
    module, _, part = sharded_module(way)
    set_gradients(module, 0, part)
    if dist.get_rank() in without:
        module.norm.grad = None
    with AllReduces() as mode:
        norm = float(gradient_norm(module.parameters()))
    return norm, mode.seen


@pytest.mark.parametrize("way", WAYS)
def test_every_layout_finds_one_number(way):
    found = run_ranks(norm_of, torch.Size(WAYS[way].degrees).numel(), WAYS[way], (), timeout_s=60)
    assert len({norm for norm, _ in found}) == 1
    assert abs(found[0][0] / WHOLE - 1) < 1e-12


def test_one_sum_of_one_number_for_each_group_that_splits():
    """Tensors that tp splits are added up over tp, then all of them over the shard axis."""
    ranks = {way: run_ranks(norm_of, 4, WAYS[way], (), timeout_s=60) for way in ("fsdp4", "hsdp", "fsdp-tp")}
    assert ranks["fsdp4"][0][1] == [(1, 4)]
    assert ranks["hsdp"][0][1] == [(1, 2)]
    assert ranks["fsdp-tp"][0][1] == [(1, 2), (1, 2)]


def test_a_rank_without_a_gradient_joins_the_sums():
    found = run_ranks(norm_of, 4, WAYS["fsdp-tp"], (0, 1), timeout_s=60)
    assert len({norm for norm, _ in found}) == 1
    assert 0 < found[0][0] < WHOLE


def partial_norm():
    """tp without FSDP leaves a norm's gradient in parts on all ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()], src_data_rank=None))
    weight.grad = DTensor.from_local(torch.full((3,), 1.0 + dist.get_rank()), mesh, [Partial()])
    norm = float(gradient_norm([weight]))
    return norm, weight.grad.to_local().tolist()


def test_partial_gradients_are_summed_first():
    assert run_ranks(partial_norm, 2, timeout_s=60) == [(pytest.approx(27**0.5), [3.0, 3.0, 3.0])] * 2


def norm_of_stages():
    """Two stages with different parameters, and a tied one on both: rank 1 does not count it."""
    own, tied = (torch.nn.Parameter(torch.ones(n)) for n in (2 + dist.get_rank(), 4))
    own.grad, tied.grad = torch.ones_like(own), torch.full_like(tied, 2.0)
    first = dist.get_rank() == 0
    return float(gradient_norm([own, tied], [dist.group.WORLD], lambda p: first or p is not tied))


def test_stages_add_up_and_a_tied_parameter_counts_once():
    assert run_ranks(norm_of_stages, 2, timeout_s=60) == [pytest.approx((2 + 3 + 16) ** 0.5)] * 2


def test_clipping_scales_every_gradient():
    module = plain_module()
    set_gradients(module, 0)
    before = module.up.grad.clone()
    clip_gradients(module.parameters(), WHOLE, 0.5)
    assert float(gradient_norm(module.parameters())) == pytest.approx(0.5, rel=1e-12)
    assert torch.allclose(module.up.grad, before * 0.5 / WHOLE)
    clip_gradients(module.parameters(), 0.5, 0.0)
    clip_gradients(module.parameters(), 0.5, 1.0)
    assert float(gradient_norm(module.parameters())) == pytest.approx(0.5, rel=1e-12)


def test_no_parameters_have_no_norm():
    with pytest.raises(ValueError, match="no parameters"):
        gradient_norm([])
