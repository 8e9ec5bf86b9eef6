"""Context parallelism: attention over ranks against a dense softmax, its balance, and what it sends."""

from collections import Counter
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo import relative
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, Layout, model_faults
from shardwright.model import Mla, ModelSpec
from shardwright.plan.table import table_of
from shardwright.plan.traffic import merged, traffic
from shardwright.run import blocks, pieces
from shardwright.run.attend import CausalAttention
from shardwright.run.cp import apply_cp, build_attend, positions, slice_sequence
from shardwright.run.launch import run_ranks

SEQ = 32
KINDS = ("ring", "all_gather", "ulysses")


class Case(NamedTuple):
    """Shapes of one attention. ``lengths``: of the documents, tiled over all sequences of the batch."""

    heads: int = 8
    kv_heads: int = 8
    size: int = 16
    value_size: int = 16
    lengths: tuple[int, ...] | None = None
    window: int | None = None
    scale: float | None = None
    batch: int = 2
    dtype: torch.dtype = torch.float64


CASES = {
    "mha": Case(),
    "gqa": Case(kv_heads=2, batch=1),
    "one_kv_head": Case(kv_heads=1, scale=0.3),
    "narrow_values": Case(size=24, value_size=16),
    "wide_values": Case(kv_heads=4, size=8, value_size=24),
    "documents": Case(kv_heads=2, lengths=(3, 9, 1, 13, 6)),
    "one_token_documents": Case(lengths=(1,) * SEQ),
    "window": Case(kv_heads=4, window=5),
    "window_over_parts": Case(window=19, batch=1),
    "window_of_one": Case(window=1),
    "window_beyond": Case(window=SEQ),
    "window_in_documents": Case(kv_heads=2, value_size=8, lengths=(11, 7, 14), window=6),
}


def tensors(case):
    """q, k, v, the output's gradient and the documents of whole sequences."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(case.heads, case.size), (case.kv_heads, case.size)]
    shapes += [(case.kv_heads, case.value_size), (case.heads, case.value_size)]
    made = [
        # as a model's projections lie in memory
        torch.randn(case.batch, SEQ, heads, size, dtype=torch.float64, generator=generator).transpose(1, 2)
        for heads, size in shapes
    ]
    document = None
    if case.lengths is not None:
        ids = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
        # sequences with other boundaries, and ids that come again
        document = torch.stack([ids.roll(3 * i) if i == 0 else ids.flip(0) for i in range(case.batch)])
    return [tensor.to(case.dtype) for tensor in made], document


def dense(case):
    """Output and gradients of q, k, v by a softmax over all scores, in fp64."""
    (q, k, v, grad), document = tensors(case)
    q, k, v = (tensor.double().requires_grad_() for tensor in (q, k, v))
    groups = case.heads // case.kv_heads
    at = torch.arange(SEQ)
    seen = (at <= at[:, None])[None]
    if case.window is not None:
        seen = seen & (at > at[:, None] - case.window)
    if document is not None:
        seen = seen & (document[:, :, None] == document[:, None])
    scale = case.size**-0.5 if case.scale is None else case.scale
    scores = q @ k.repeat_interleave(groups, 1).mT * scale
    out = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v.repeat_interleave(groups, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


FLASH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 4),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 2, 7),
}
"""Attention kernels, and which of their arguments are queries, keys and the causal flag."""

SENT = {
    "send": ("send", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
}
"""Collectives by torch's name: plan/traffic.py's, and which argument is its payload."""


class Recorder(TorchDispatchMode):
    """Pairs of query and key of every attention kernel, and launches and payload [B] of what is sent."""

    def __init__(self):
        super().__init__()
        self.pairs, self.launches, self.payload = [], Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in FLASH:
            query, key, causal = (args[place] if place < len(args) else False for place in FLASH[func])
            self.pairs.append(query.shape[2] * key.shape[2] / (2 if causal else 1))
        name = func.__name__.split(".")[0]
        if name in SENT:
            name, place = SENT[name]
            payload = args[place][0] if isinstance(args[place], list) else args[place]
            self.launches[name] += 1
            self.payload[name] += payload.nbytes
        return func(*args, **(kwargs or {}))


def save_kernels(context, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operation in FLASH else CheckpointPolicy.PREFER_RECOMPUTE


RECOMPUTE = {
    "none": lambda function, *args: function(*args),
    "full": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_kernels),
    ),
}


def attention_of_rank(attend, kind, case, recompute="none", group=None):
    """Positions of this rank, and its part of output and gradients."""
    (q, k, v, grad), document = tensors(case)
    at = positions(SEQ, dist.get_world_size(group), dist.get_rank(group), kind)
    q, k, v = (tensor[:, :, at].requires_grad_() for tensor in (q, k, v))
    document = None if document is None else slice_sequence(document, at)

    def attention(q, k, v):
        return attend(q, k, v, document, scale=case.scale, window=case.window)

    out = RECOMPUTE[recompute](attention, q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), grad[:, :, at])
    return at.numpy(), [tensor.detach().double().numpy() for tensor in (out, *grads)]


def cases_of_rank(kind, cases, recompute="none"):
    attend = build_attend(kind, dist.group.WORLD)
    return [attention_of_rank(attend, kind, case, recompute) for case in cases]


def worst_difference(parts, case):
    """Largest difference of output, dq, dk and dv on all ranks from the dense ones, as ``relative`` says."""
    found = []
    for i, expected in enumerate(dense(case)):
        whole = np.full(expected.shape, np.nan)
        for at, values in parts:
            whole[:, :, at] = values[i]
        assert not np.isnan(whole).any()
        found.append(relative(whole, expected.numpy()))
    return max(found)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_ranks_equals_a_dense_softmax(kind, degree):
    ranks = run_ranks(cases_of_rank, degree, kind, list(CASES.values()))
    for name, parts in zip(CASES, zip(*ranks, strict=True), strict=True):
        assert worst_difference(parts, CASES[name]) < 1e-13, name


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_attention_is_the_same(kind, recompute):
    chosen = [CASES["gqa"], CASES["documents"]]
    ranks = run_ranks(cases_of_rank, 4, kind, chosen, recompute)
    for case, parts in zip(chosen, zip(*ranks, strict=True), strict=True):
        assert worst_difference(parts, case) < 1e-13


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_types(kind, dtype, tolerance):
    chosen = [CASES[name]._replace(dtype=dtype) for name in ("gqa", "documents", "narrow_values", "window")]
    ranks = run_ranks(cases_of_rank, 4, kind, chosen)
    for case, parts in zip(chosen, zip(*ranks, strict=True), strict=True):
        assert worst_difference(parts, case) < tolerance


def strided_groups_of_rank(kind):
    """Ranks 0 and 2, and 1 and 3, are groups of two: a rank's place in its group is not its own number."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))["cp"]
    model = nn.ModuleDict({"plain": nn.Linear(1, 1), "attention": nn.Linear(1, 1)})
    model["attention"].attend = CausalAttention()
    apply_cp(model, mesh, kind)
    assert not hasattr(model["plain"], "attend")
    return attention_of_rank(model["attention"].attend, kind, CASES["gqa"], group=mesh.get_group())


@pytest.mark.parametrize("kind", KINDS)
def test_groups_within_the_world(kind):
    ranks = run_ranks(strided_groups_of_rank, 4, kind)
    for parts in (ranks[0::2], ranks[1::2]):
        assert worst_difference(parts, CASES["gqa"]) < 1e-13


# Who holds what


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_dealt_out_once(kind, degree):
    held = [positions(SEQ, degree, rank, kind) for rank in range(degree)]
    assert all(at.dtype == torch.int64 and len(at) == SEQ // degree for at in held)
    assert sorted(torch.cat(held).tolist()) == list(range(SEQ))
    assert all(bool((at.diff() > 0).all()) for at in held)


def test_positions_by_hand():
    assert positions(16, 4, 1, "ring").tolist() == [2, 3, 12, 13]
    assert positions(16, 4, 1, "all_gather").tolist() == [2, 3, 12, 13]
    assert positions(16, 4, 1, "ulysses").tolist() == [4, 5, 6, 7]
    assert positions(4, 1, 0, "none").tolist() == [0, 1, 2, 3]


def test_a_slice_has_the_tokens_at_its_positions():
    tokens = torch.arange(32).view(2, 16)
    assert slice_sequence(tokens, positions(16, 4, 0, "ring")).tolist() == [
        [0, 1, 14, 15],
        [16, 17, 30, 31],
    ]


def test_a_sequence_that_does_not_divide_is_refused():
    layout = Layout(cp=4, cp_kind="ring", zero_stage=1)
    (fault,) = model_faults(layout, SPEC, Job(seq=36, global_batch=1))
    assert fault.code == "cp_sequence"
    assert "cp=4 does not divide seq=36" in fault.message


# Balance


def pairs_of_rank(kind, case):
    attend = build_attend(kind, dist.group.WORLD)
    with Recorder() as recorder:
        attention_of_rank(attend, kind, case)
    return recorder.pairs


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_every_step_of_a_ring_is_the_same_work_for_every_rank(degree):
    tokens = SEQ // degree
    for pairs in run_ranks(pairs_of_rank, degree, "ring", CASES["gqa"]):
        assert pairs == [tokens**2 / 2] * (2 * degree)  # forward and backward


@pytest.mark.parametrize("kind", KINDS)
def test_causal_work_is_shared_out_evenly(kind):
    ranks = run_ranks(pairs_of_rank, 4, kind, CASES["mha"])
    heads = 4 if kind == "ulysses" else 1  # a rank has a quarter of them, and whole sequences
    assert {sum(pairs) for pairs in ranks} == {2 * SEQ**2 / 2 / 4 * heads}


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_keys_beyond_the_window_are_left_out(kind):
    """Of the 32 x 32 / 8 pairs that a rank of 4 has without a window, forward and backward."""
    ranks = run_ranks(pairs_of_rank, 4, kind, CASES["window_of_one"])
    assert all(sum(pairs) <= 2 * 2 * (SEQ / 8) ** 2 for pairs in ranks)


# Traffic

SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=1, hidden=64, ffn=96, heads=8, kv_heads=4, head_size=16, vocab=64
)
LATENT = SPEC.model_copy(
    update={
        "kv_heads": 8,
        "head_size": 24,
        "mla": Mla(q_rank=0, kv_rank=8, nope_size=16, rope_size=8, value_size=16),
    }
)
SENDING = {
    "mha": SPEC.model_copy(update={"kv_heads": 8}),
    "gqa": SPEC,
    "one_kv_head": SPEC.model_copy(update={"kv_heads": 1}),
    "latent": LATENT,
}
PRECISION = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}


def case_of(spec, dtype):
    value_size = spec.mla.value_size if spec.mla else spec.head_size
    return Case(spec.heads, spec.kv_heads, spec.head_size, value_size, dtype=dtype)


def sent_by_rank(kind, cases, recompute="none"):
    attend, found = build_attend(kind, dist.group.WORLD), []
    for case in cases:
        with Recorder() as recorder:
            attention_of_rank(attend, kind, case, recompute)
        found.append({name: (n, recorder.payload[name]) for name, n in recorder.launches.items()})
    return found


def planned(spec, kind, degree, dtype, recompute="none"):
    """What plan/traffic.py says one block sends over cp."""
    layout = Layout(
        cp=degree,
        cp_kind=kind,
        zero_stage=1,
        micro_batch=2,
        recompute=recompute,
        kept=KEPT_BY_SELECTIVE if recompute == "selective" else (),
    )
    job = Job(seq=SEQ, global_batch=2, precision=PRECISION[dtype])
    flows = merged(traffic(spec, job, table_of([layout], spec.layers)))
    return {
        flow.collective: (int(flow.launches[0]), int(flow.payload_bytes[0]))
        for flow in flows
        if flow.axis == "cp"
    }


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_is_what_the_plan_says_to_the_byte(kind, degree):
    wanted = [(spec, dtype) for spec in SENDING.values() for dtype in PRECISION]
    if kind == "ulysses":
        wanted = [(spec, dtype) for spec, dtype in wanted if spec.kv_heads % degree == 0 or degree == 8]
    for found in run_ranks(sent_by_rank, degree, kind, [case_of(*each) for each in wanted]):
        assert found == [planned(spec, kind, degree, dtype) for spec, dtype in wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_full_recomputation_sends_again_what_the_plan_says(kind):
    for (found,) in run_ranks(sent_by_rank, 4, kind, [case_of(SPEC, torch.bfloat16)], "full"):
        assert found == planned(SPEC, kind, 4, torch.bfloat16, "full")


def documents_of_layers(kind):
    """All-gathers of three layers that are given the same ids of documents, then of other ones."""
    case, attend = CASES["documents"], build_attend(kind, dist.group.WORLD)
    (q, k, v, _), document = tensors(case)
    at = positions(SEQ, dist.get_world_size(), dist.get_rank(), kind)
    q, k, v = (tensor[:, :, at] for tensor in (q, k, v))
    counts = []
    for mine in (slice_sequence(document, at), slice_sequence(document, at)):
        with Recorder() as recorder:
            for _ in range(3):
                attend(q, k, v, mine)
        counts.append(recorder.payload["all_gather"])
    return counts


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_documents_are_gathered_once_for_all_layers(kind):
    ids = 8 * 2 * SEQ
    assert run_ranks(documents_of_layers, 2, kind) == [[ids, ids]] * 2


DRY_RUNS = [(kind, name) for kind in KINDS for name in ("gqa", "documents", "window_in_documents")]


def recorded(recorder):
    return recorder.pairs, dict(recorder.launches), dict(recorder.payload)


def executed_of_rank():
    found = []
    for kind, name in DRY_RUNS:
        attend = build_attend(kind, dist.group.WORLD)
        with Recorder() as recorder:
            attention_of_rank(attend, kind, CASES[name])
        found.append(recorded(recorder))
    return found


def dry_run_of_rank(kind, case):
    """What is recorded without ranks or numbers."""
    (q, k, v, grad), document = tensors(case)
    at = positions(SEQ, dist.get_world_size(), dist.get_rank(), kind)
    attend, mode = build_attend(kind, dist.group.WORLD), FakeTensorMode()
    q, k, v, grad = (mode.from_tensor(tensor[:, :, at]) for tensor in (q, k, v, grad))
    document = None if document is None else mode.from_tensor(document[:, at])
    with mode, Recorder() as recorder:
        q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
        out = attend(q, k, v, document, window=case.window)
        grads = torch.autograd.grad(out, (q, k, v), grad)
    assert out.shape == grad.shape
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in (q, k, v)]
    return recorded(recorder)


def dry_runs(degree):
    """As each of ``degree`` ranks in turn, in a single process."""
    dist.destroy_process_group()
    found = []
    for rank in range(degree):
        dist.init_process_group("fake", rank=rank, world_size=degree, store=FakeStore())
        found.append([dry_run_of_rank(kind, CASES[name]) for kind, name in DRY_RUNS])
        if rank < degree - 1:
            dist.destroy_process_group()
    return found


def test_a_dry_run_computes_and_sends_the_same():
    (found,) = run_ranks(dry_runs, 1, 2)
    assert found == run_ranks(executed_of_rank, 2)


# One rank


@pytest.fixture(params=["whole_masks", "sliced_masks", "no_kernel"])
def _way(request, monkeypatch):
    """Masks of all rows and of few at once; scores written out, few rows at once."""
    if request.param != "whole_masks":
        monkeypatch.setattr(pieces, "MASK_ROWS", 5)
    if request.param == "no_kernel":
        monkeypatch.setattr(blocks, "_fused", lambda *_: False)
        monkeypatch.setattr(blocks, "SCORE_BYTES", 5000)


def whole_attention(case):
    (q, k, v, grad), document = tensors(case)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    out = CausalAttention()(q, k, v, document, scale=case.scale, window=case.window)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    return np.arange(SEQ), [tensor.detach().double().numpy() for tensor in (out, *grads)]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_a_dense_softmax(name):
    assert worst_difference([whole_attention(CASES[name])], CASES[name]) < 1e-13


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_ranks_agree_whichever_way_a_block_is_computed(kind):
    chosen = [CASES[name] for name in ("gqa", "documents", "narrow_values", "window_in_documents")]
    ranks = run_ranks(cases_of_rank, 2, kind, chosen)
    for case, parts in zip(chosen, zip(*ranks, strict=True), strict=True):
        assert worst_difference(parts, case) < 1e-13


def test_a_query_without_keys_weighs_nothing():
    """A flash kernel says 0 for the log-sum-exp of such a row, as if it had found one key of score 0."""
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    allowed = torch.ones(1, 4, 4, dtype=torch.bool)
    allowed[:, 2] = False
    out, lse = blocks.block_forward(q, k, v, 1.0, False, allowed)
    assert lse[:, :, 2].eq(-torch.inf).all()
    assert not out[:, :, 2].any()
    assert torch.isfinite(lse[:, :, [0, 1, 3]]).all()


@pytest.mark.parametrize("name", ["gqa", "narrow_values", "documents"])
def test_saved_for_backward(name):
    """q, k, v, the output and a log-sum-exp a row, at their own sizes: no mask, no padding."""
    case = CASES[name]
    (q, k, v, _), document = tensors(case)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):
        out = CausalAttention()(q, k, v, document)
    rows = case.batch * case.heads * SEQ
    expected = sum(tensor.nbytes for tensor in (q, k, v)) + rows * (case.value_size + 1) * 8
    expected += 0 if document is None else document.nbytes
    assert sum({tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in saved}.values()) == expected
    assert out.shape[-1] == case.value_size
