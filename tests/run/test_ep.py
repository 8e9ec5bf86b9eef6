"""Experts on many ranks train as on one: fp64, every gradient, counts, balancing loss and biases."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from expert_stack import (
    AUX,
    BASE,
    BATCH,
    LAYERS,
    SEQ,
    SPECS,
    Case,
    Stack,
    backward,
    kept_bytes,
    many_ranks,
    one_rank,
    own_samples,
    parallel_stack,
    planned_bytes,
    with_moe,
)
from gloo import relative
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.plan.activations import Split
from shardwright.plan.table import table_of
from shardwright.plan.traffic import traffic
from shardwright.run.ep import apply_ep
from shardwright.run.expert_load import apply_balance, expert_load, set_routing
from shardwright.run.experts import MoE
from shardwright.run.launch import run_ranks
from shardwright.run.mesh import expert_meshes
from shardwright.run.routing import BalancedRouting

GRADIENT = 1e-9

CASES = [
    Case(shard=2, ep=2),
    Case(shard=4, ep=4),
    Case(shard=4, ep=2, microbatches=2),  # expert_shard=2
    Case(shard=4, ep=2, reshard=False, recompute=True),
    Case(replicate=2, shard=2, ep=2, microbatches=2),
    Case(replicate=2, shard=4, ep=2),  # HSDP of experts: dp_replicate x expert_shard
    Case(cp=2, ep=2),  # a sequence on two ranks
    Case(shard=2, cp=2, ep=4, recompute=True),
]
ODD = [Case(shard=4, ep=4), Case(shard=4, ep=2, microbatches=2)]


def compare(spec, case):
    """All ranks' findings against one rank's."""
    expected = one_rank(spec, case)
    for rank in run_ranks(many_ranks, case.ranks, spec, case, timeout_s=60):
        assert relative(rank.loss, expected.loss) < 1e-12
        assert rank.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            assert relative(rank.gradients[name], gradient) < GRADIENT, name
        np.testing.assert_array_equal(rank.counts, expected.counts)
        assert rank.balance == pytest.approx(expected.balance, rel=1e-12)
        assert all(map(np.array_equal, rank.biases, expected.biases))
    return expected


class TestAsOnOneRank:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_every_split(self, case):
        """Those over tp are rows of the parity matrix."""
        expected = compare(SPECS["deepseek_v3"], replace(case, aux=AUX))
        assert expected.balance > 0
        assert all(np.abs(gradient).max() > 0 for gradient in expected.gradients.values())

    @pytest.mark.parametrize("case", ODD, ids=str)
    def test_experts_without_tokens(self, case):
        expected = compare(SPECS["one_of_many"], case)
        assert (expected.counts == 0).any()

    @pytest.mark.parametrize("case", ODD, ids=str)
    def test_all_tokens_to_the_experts_of_one_rank(self, case):
        expected = compare(BASE, replace(case, to_one=True, aux=AUX))
        assert expected.counts[0, :2].sum() == BATCH * SEQ * 2

    def test_the_balancing_loss_changes_gradients_and_not_the_loss(self):
        without, with_it = (one_rank(BASE, Case(aux=aux)) for aux in (0.0, AUX))
        assert without.loss == with_it.loss
        name = "layers.0.mlp.gate.weight"
        assert relative(with_it.gradients[name], without.gradients[name]) > 0.01


# What is sent


class Exchanges(TorchDispatchMode):
    """All-to-alls by width of a row, of counts as 0: launches and elements given."""

    def __init__(self):
        super().__init__()
        self.found = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        if "alltoall" in func.__name__:
            sent = args[1]
            width = 0 if sent.dtype == torch.int64 else sent[0].numel() if len(sent) else 1
            self.found[width][0] += 1
            self.found[width][1] += sent.numel()
        return func(*args, **(kwargs or {}))


def exchanges(spec, case):
    """What a rank gives to all-to-alls in one step with balanced routing; runs under ``run_ranks``."""
    model, root, _ = parallel_stack(spec, case)
    set_routing(model, BalancedRouting())
    with Exchanges() as mode:
        backward(model, *own_samples(root, case), case.microbatches)
    return dict(mode.found)


SENT = [
    Case(shard=2, ep=2, microbatches=2),
    Case(shard=4, ep=4, recompute=True),
    Case(shard=2, cp=2, ep=4),
    Case(shard=2, tp=2, ep=4, sp=True),
]


@pytest.mark.parametrize("case", SENT, ids=str)
def test_vectors_sent_equal_the_plan(case):
    """And what the plan leaves out: a weight of every copy, forward and backward, and E counts forward."""
    job = Job(seq=SEQ, global_batch=BATCH, precision="fp64")
    layout = Layout(
        dp_shard=case.shard, cp=case.cp, tp=case.tp, ep=case.ep, sp=case.sp, zero_stage=3,
        cp_kind="ring" if case.cp > 1 else "none", micro_batch=BATCH // case.shard // case.microbatches,
        microbatches=case.microbatches, recompute="full" if case.recompute else "none",
    )  # fmt: skip
    table = table_of([layout], LAYERS)
    planned = next(flow for flow in traffic(BASE, job, table) if flow.axis == "ep")
    forward = LAYERS * case.microbatches * (2 if case.recompute else 1)
    copies = BASE.moe.top_k * BATCH * SEQ // case.ranks // case.microbatches
    for sent in run_ranks(exchanges, case.ranks, BASE, case, timeout_s=60):
        assert sent[BASE.hidden] == [int(planned.launches[0]), int(planned.payload_bytes[0]) // 8]
        weights = forward + LAYERS * case.microbatches
        assert sent[1] == [weights, weights * copies]
        assert sent[0] == [forward, forward * BASE.moe.experts]
        assert set(sent) == {0, 1, BASE.hidden}


# What is kept


def kept(spec, case):
    """What a layer of this rank keeps with balanced routing; runs under ``run_ranks``."""
    root = init_device_mesh("cpu", (case.shard, case.tp), mesh_dim_names=("dp_shard", "tp"))
    moe = Stack(spec, False, False).double().layers[0].mlp
    apply_ep(moe, expert_meshes(root, case.ep, case.etp))
    set_routing(moe, BalancedRouting())
    return kept_bytes(moe, torch.randn(2, SEQ // case.tp, spec.hidden, dtype=torch.float64))


@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("deepseek_v3", Case(shard=2, ep=2)),
        ("qwen2_moe", Case(shard=4, ep=4)),
        ("mixtral", Case(tp=2, ep=2, sp=True)),
    ],
    ids=str,
)
def test_kept_for_backward_equals_the_plan(model, case):
    spec = SPECS[model]
    planned = planned_bytes(spec, "fp64", Split(tp=case.tp, sp=case.sp, ep=case.ep)) * 2 * SEQ
    for rank in run_ranks(kept, case.ranks, spec, case, timeout_s=60):
        assert rank == planned + 8 * spec.moe.experts


# Without numbers


@pytest.fixture
def fake_world():
    """A process group of 64 ranks that sends nothing."""
    dist.init_process_group("fake", rank=5, world_size=64, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("experts", "ep", "fullness"), [(8, 4, 1.0), (256, 64, 1.0), (256, 64, 1.25)])
def test_a_dry_run_needs_no_numbers(fake_world, experts, ep, fullness):
    spec = with_moe("mixtral", experts=experts, top_k=8)
    root = init_device_mesh("cpu", (64, 1), mesh_dim_names=("dp_shard", "cp"))
    with torch.device("meta"):
        moe = MoE(spec)
    apply_ep(moe, expert_meshes(root, ep, 1))
    set_routing(moe, BalancedRouting(fullness))
    apply_balance(moe, 0.1, 64, [root.get_group("cp")])
    assert moe.experts.gate_up_proj.to_local().shape == (experts // ep, 24, 16)
    received = []
    moe.experts.register_forward_hook(lambda module, inputs, out: received.append(out.shape))
    with FakeTensorMode(allow_non_fake_inputs=True), Exchanges() as mode:
        moe.to_empty(device="cpu")
        x = torch.zeros(1, 1024, BASE.hidden, requires_grad=True)
        moe(x).sum().backward()
    copies = 1024 * 8
    assert received == [(1024, BASE.hidden)]
    assert mode.found[BASE.hidden] == [4, 2 * round(copies * (1 + fullness)) * BASE.hidden]
    assert moe.experts.down_proj.grad.to_local().shape == (experts // ep, 16, 12)
    assert moe.gate.weight.grad.shape == (experts, 16)
    assert expert_load(moe).counts.shape == (1, experts)


def test_parts_are_split_out_of_the_whole():
    """ep innermost, the rest expert_shard; experts split over tp hold parts of gate and of up."""

    def ranks_of(shard, cp, tp, ep, etp):
        root = init_device_mesh("cpu", (shard, cp, tp), mesh_dim_names=("dp_shard", "cp", "tp"))
        meshes = expert_meshes(root, ep, etp)
        stack = Stack(BASE, False, False)
        whole = stack.layers[0].mlp.experts.gate_up_proj.detach().clone()
        apply_ep(stack, meshes)
        part = stack.layers[0].mlp.experts.gate_up_proj.to_local()
        place = meshes.held.get_local_rank(0), meshes.held.get_local_rank(1) if etp > 1 else 0
        local = whole.chunk(ep)[place[0]].unflatten(1, (2, etp, -1))[:, :, place[1]].flatten(1, 2)
        return meshes.ep.mesh.tolist(), meshes.data.mesh.tolist(), torch.equal(part, local)

    found = run_ranks(ranks_of, 4, 2, 1, 2, 2, 1, timeout_s=60)
    assert [line[0] for line in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [line[1] for line in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    split = run_ranks(ranks_of, 4, 2, 1, 2, 2, 2, timeout_s=60)
    assert [line[0] for line in split] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [line[1] for line in split] == [[0], [1], [2], [3]]
    assert all(line[2] for line in (*found, *split))
