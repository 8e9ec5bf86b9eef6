"""Ledger and dry run of tp, cp and ep: state and traffic to the byte, the peak within what is promised."""

import pytest
from gloo import MODELS

from shardwright.check.compare import check_plan
from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.plan.explain import plan_of

WIDER = {"hidden": 256, "ffn": 704, "heads": 8, "kv_heads": 4, "head_size": 32, "vocab": 2048}
TP, SP = {"tp": 2}, {"tp": 2, "sp": True}
RING = {"cp": 2, "cp_kind": "ring"}
SHARD = {"dp_shard": 2}

CASES = [
    *(
        ("base", axes)
        for axes in (TP, SP, SP | SHARD, SP | {"dp_replicate": 2}, {"tp": 8, "sp": True} | SHARD)
    ),
    *(("base", SP | {"recompute": kind}) for kind in ("selective", "full")),
    *(("base", TP | {"recompute": kind}) for kind in ("selective", "full")),
    ("base", TP | {"loss_chunks": 2}),
    *((name, TP) for name in ("qk_norm", "bias", "gpt2")),
    *((name, SP) for name in ("tied", "bias")),
    *(("base", {"cp": 2, "cp_kind": kind}) for kind in ("ring", "all_gather", "ulysses")),
    *(("base", {"cp": 2, "cp_kind": kind} | SHARD) for kind in ("ring", "all_gather", "ulysses")),
    *(("base", RING | {"recompute": kind}) for kind in ("selective", "full")),
    *(("base", {"cp": 2, "cp_kind": "ulysses", "recompute": kind}) for kind in ("selective", "full")),
    ("base", {"cp": 4, "cp_kind": "ring"} | SP),
    *(("experts", axes) for axes in (SHARD, SHARD | {"dp_replicate": 2}, {"ep": 2, "dp_shard": 4})),
    *(("experts", {"ep": 2, "dp_shard": 4, "recompute": kind}) for kind in ("selective", "full")),
    *(("experts", {"ep": 2, "recompute": kind} | SP) for kind in ("none", "selective", "full")),
    *(("experts", {"ep": 2} | axes) for axes in (SHARD, RING, RING | SHARD)),
    ("experts", {"ep": 4, "dp_shard": 4} | SP),
    *(("shared_experts", {"ep": 2, "recompute": kind} | SP) for kind in ("none", "selective", "full")),
    *(("shared_experts", {"etp": 2, "recompute": kind} | SP) for kind in ("none", "selective", "full")),
    ("shared_experts", {"etp": 2} | TP),
    ("experts", {"etp": 2} | SP | SHARD),
    ("experts", {"ep": 2, "etp": 2} | SP | SHARD),
    ("experts", {"ep": 4, "dp_shard": 16}),  # fewer experts than shards
    ("experts", {"ep": 4, "dp_shard": 4} | RING | SP),
]


def model_of(name):
    """A model of the parity matrix, wide enough for its terms to tell."""
    spec = MODELS[name]
    if name == "gpt2":
        return spec
    moe = None if spec.moe is None else spec.moe.model_copy(update={"ffn": 128})
    if moe is not None and moe.shared_ffn:
        moe = moe.model_copy(update={"shared_ffn": 128})
    return spec.model_copy(update=WIDER | {"moe": moe})


def layout_of(fields):
    shard = fields.get("dp_shard", 1) * fields.get("cp", 1)
    kept = KEPT_BY_SELECTIVE if fields.get("recompute") == "selective" else ()
    values = {"micro_batch": 2, "microbatches": 2, "zero_stage": 0 if shard == 1 else 3, "kept": kept}
    return Layout(**values | fields)


@pytest.mark.parametrize(
    ("name", "fields"), CASES, ids=[f"{name} {layout_of(fields).label}" for name, fields in CASES]
)
def test_the_ledger_is_what_the_program_does(name, fields):
    layout = layout_of(fields)
    job = Job(seq=32 if name == "gpt2" else 128, global_batch=4 * layout.dp, precision="bf16")
    found = check_plan(plan_of(model_of(name), job, cluster_of("cpu", layout.ranks), layout))
    assert [flow for flow in found.traffic if not flow.ok] == []
    assert [term for term in found.terms if not term.ok] == []
    assert found.ok


def test_experts_split_one_by_one():
    """FSDP copies them once more on their way out of the gathered buffer: a moment of its own, no higher."""
    layout = layout_of({"dp_shard": 16})
    job = Job(seq=128, global_batch=64, precision="bf16")
    found = check_plan(plan_of(model_of("experts"), job, cluster_of("cpu", 16), layout))
    assert [flow for flow in found.traffic if not flow.ok] == []
    assert [
        term for term in found.terms if not term.ok and (term.moment == "rest" or term.term == "total")
    ] == []


def test_packed_documents_are_in_the_ledger():
    layout = layout_of(SHARD)
    job = Job(seq=128, global_batch=8, precision="bf16", packing="documents")
    assert check_plan(plan_of(model_of("base"), job, cluster_of("cpu", 2), layout)).ok
