"""Context parallelism: causal work shared out evenly, and what is sent, as planned and in a dry run."""

import pytest
import torch
import torch.distributed as dist
from attention import CASES, KINDS, SEQ, Case, Recorder, attention_of_rank, tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.model import Mla, ModelSpec
from shardwright.plan.table import table_of
from shardwright.plan.traffic import merged, traffic
from shardwright.run.cp import build_attend, positions, slice_sequence
from shardwright.run.launch import run_ranks

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
    wanted = [(spec, torch.bfloat16) for spec in SENDING.values()]
    wanted += [(SPEC, torch.float32), (SPEC, torch.float64)]
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
