"""Dry run against ledger: state and traffic to the byte, the peak and what it is made of.

Then the ledger is broken, and then the runtime, and the comparison must name the term.
"""

import dataclasses
import functools
import resource
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwright.check.compare import compare
from shardwright.check.dryrun import dry_run
from shardwright.cluster import cluster_of, device
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.model import Mla, ModelSpec, Moe, preset
from shardwright.plan import block_kinds, holdings, memory, rank_moments, traffic
from shardwright.plan.activations import BlockWays, activations_of
from shardwright.plan.explain import plan_of
from shardwright.plan.held_units import held_units
from shardwright.plan.params import EMBEDDING, HEAD
from shardwright.plan.shards import UnitElements, weighted_elements
from shardwright.plan.stages import every_stage
from shardwright.plan.table import table_of
from shardwright.plan.tapes import Alike
from shardwright.run import dp, model, step
from shardwright.units import GiB, KiB

PEAK = 0.005
"""Largest relative difference of the peak: a quarter of what is promised."""

KINDS = 0.02
"""Largest relative difference of each kind's bytes at the peak."""

CPU = device("cpu")
BASE = ModelSpec(
    name="base",
    model_type="llama",
    layers=2,
    hidden=256,
    ffn=704,
    heads=8,
    kv_heads=4,
    head_size=32,
    vocab=2048,
)


class Plan(NamedTuple):
    """A plan to execute: changes of the model, the layout, and the job."""

    model: tuple[tuple[str, object], ...] = ()
    replicate: int = 1
    shard: int = 4
    stage: int = 3
    m: int = 2
    micro_batch: int = 2
    recompute: str = "none"
    precision: str = "bf16"
    optimizer: str = "adamw"
    seq: int = 128
    every: int = 1
    parts: int = 1

    @property
    def spec(self):
        return BASE.model_copy(update=dict(self.model))

    @property
    def layout(self):
        kept = KEPT_BY_SELECTIVE if self.recompute == "selective" else ()
        return Layout(
            dp_replicate=self.replicate, dp_shard=self.shard, zero_stage=self.stage, microbatches=self.m,
            micro_batch=self.micro_batch, recompute=self.recompute, kept=kept,
            recompute_every=self.every, loss_chunks=self.parts,
        )  # fmt: skip

    @property
    def job(self):
        batch = self.layout.dp * self.micro_batch * self.m
        return Job(seq=self.seq, global_batch=batch, precision=self.precision, optimizer=self.optimizer)

    @property
    def label(self):
        parts = [*(f"{key}={value}" for key, value in self.model), self.layout.label.replace(" ", "-")]
        return "-".join([*parts, self.precision, self.optimizer])


def changed(**model):
    return tuple(model.items())


TIED, NORMED = changed(tied_embeddings=True), changed(qk_norm=True)
BIASES = changed(qkv_bias=True, out_bias=True, mlp_bias=True)
FEW_ROWS = changed(hidden=48, ffn=60, heads=2, kv_heads=1, head_size=16, qk_norm=True, qkv_bias=True)

GELU_NORMED = changed(
    norm="layer", norm_bias=True, gated_mlp=False, activation="gelu_tanh", qkv_bias=True, out_bias=True,
    mlp_bias=True, tied_embeddings=True,
)  # fmt: skip
GPT2 = GELU_NORMED + changed(model_type="gpt2", kv_heads=8, positions="learned", max_positions=512)
STARCODER2 = GELU_NORMED + changed(model_type="starcoder2")
RELU = changed(activation="relu", tied_embeddings=False)
LATENT = changed(
    model_type="deepseek_v3", layers=3, kv_heads=8, head_size=48,
    mla=Mla(q_rank=96, kv_rank=64, nope_size=32, rope_size=16, value_size=32),
    moe=Moe(experts=8, top_k=2, ffn=128, shared_ffn=128, score="sigmoid", first_dense_layers=3),
)  # fmt: skip
WIDE_QUERIES = changed(mla=Mla(q_rank=0, kv_rank=64, nope_size=32, rope_size=16, value_size=32))

PLANS = [
    *(Plan(stage=stage, m=m) for stage in (1, 2, 3) for m in (1, 2, 3)),
    Plan(m=4),
    *(Plan(replicate=4, shard=1, stage=0, m=m) for m in (1, 2)),
    *(Plan(replicate=2, shard=2, stage=stage, m=m) for stage, m in [(1, 1), (1, 2), (2, 2), (3, 1), (3, 2)]),
    *(Plan(shard=1, stage=0, m=m) for m in (1, 2)),
    *(Plan(stage=stage, recompute=kind) for stage in (1, 3) for kind in ("selective", "full")),
    *(Plan(shard=1, stage=0, m=1, recompute=kind) for kind in ("selective", "full")),
    Plan(changed(layers=4), stage=1, recompute="full", every=2),
    *(Plan(stage=stage, parts=4, m=m) for stage in (1, 3) for m in (1, 2)),
    Plan(changed(vocab=32000), m=1, parts=3),
    Plan(TIED, m=1, parts=4),
    *(Plan(TIED, stage=stage) for stage in (1, 2, 3)),
    Plan(TIED, m=1, recompute="full"),
    Plan(NORMED, recompute="selective", m=1),
    Plan(BIASES, recompute="full", m=1),
    Plan(NORMED + BIASES, stage=2),
    *(Plan(changed(vocab=1003), shard=shard, m=1) for shard in (3, 64)),
    *(Plan(FEW_ROWS, shard=64, stage=stage, m=1) for stage in (1, 3)),
    *(
        Plan(changed(layers=2), precision=precision, stage=s)
        for precision in ("fp32", "fp64")
        for s in (1, 3)
    ),
    *(Plan(optimizer=name, m=1, micro_batch=1, seq=16) for name in ("sgd", "sgd_momentum", "adamw")),
    *(
        Plan(model, replicate, shard, stage, m=1, precision=precision, optimizer=name, seq=512)
        for name in ("adafactor", "muon")
        for model, replicate, shard, stage, precision in [
            ((), 1, 4, 3, "bf16"),
            (BIASES, 2, 2, 1, "fp32"),
            (FEW_ROWS, 1, 64, 3, "fp64"),
            ((), 4, 1, 0, "bf16"),
        ]
    ),
    *(Plan(changed(layers=layers), stage=stage) for layers in (1, 4) for stage in (1, 3)),
    Plan(changed(layers=1) + TIED, m=1),
    *(Plan(model, stage=stage) for model in (GPT2, STARCODER2) for stage in (1, 3)),
    *(
        Plan(model, m=1, recompute=kind)
        for model in (GPT2, GPT2 + RELU, STARCODER2, LATENT)
        for kind in ("none", "selective", "full")
    ),
    *(Plan(LATENT + WIDE_QUERIES, stage=stage) for stage in (1, 3)),
]


# Dry run against ledger


execution = functools.cache(lambda plan: dry_run(plan.spec, plan.job, plan.layout))


def apart(found, expected, tolerance):
    return abs(found - expected) > tolerance * expected


def differences(plan, executed):
    """Terms in which ledger and execution do not agree."""
    table = table_of([plan.layout], plan.spec.layers)
    ledger = memory.memory_ledger(plan.spec, plan.job, CPU, table)
    found = [name for name, held in executed.at_rest.items() if getattr(ledger, name)[0] != held]
    stage = every_stage(table, plan.spec)[0]
    flows = traffic.merged(traffic.traffic(plan.spec, plan.job, table, stage))
    ours = {(x.axis, x.collective): (int(x.launches[0]), int(x.payload_bytes[0])) for x in flows}
    theirs = {tuple(call): tuple(sent) for call, sent in executed.traffic.items()}
    found += [" ".join(call) for call in ours.keys() | theirs.keys() if ours.get(call) != theirs.get(call)]
    if apart(ledger.allocated[0], executed.peak, PEAK):
        found.append("peak")
    for kind, held in ledger.at_peak._asdict().items():
        if apart(held[0], executed.at_peak[kind], KINDS):
            found.append(f"{kind} at peak")
    return set(found)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
def test_ledger_is_what_a_dry_run_holds_and_sends(plan):
    assert differences(plan, execution(plan)) == set()


@pytest.mark.parametrize(("replicate", "shard"), [(1, 64), (8, 8)], ids=["zero3", "hsdp"])
def test_llama_3_1_8b(replicate, shard):
    """The real model on 64 ranks, seq 8192; no tensor of its 32 GB of parameters is allocated."""
    plan = Plan(replicate=replicate, shard=shard, m=1, micro_batch=1, recompute="full", seq=8192)
    model = preset("llama-3.1-8b")
    plan = plan._replace(model=tuple((name, getattr(model, name)) for name in ModelSpec.model_fields))
    assert plan.spec == model
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    executed = dry_run(plan.spec, plan.job, plan.layout)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * KiB
    assert differences(plan, executed) == set()
    assert grown < GiB
    assert 0 < executed.time < 300


def test_the_last_rank_holds_no_more_than_the_first():
    """FSDP pads the shards that have fewer rows; what is not a multiple lies on no rank twice."""
    plan = Plan(changed(vocab=1003), shard=3, m=1)
    last = dry_run(plan.spec, plan.job, plan.layout, rank=2)
    first = execution(plan)
    assert last.traffic == first.traffic
    assert all(last.at_rest[name] <= held for name, held in first.at_rest.items())
    assert last.peak <= first.peak


@pytest.mark.parametrize(
    ("replicate", "shard", "stage"), [(1, 4, 1), (1, 4, 2), (1, 4, 3), (2, 2, 3), (4, 1, 0)]
)
def test_microbatches_left_out_are_the_second_again(replicate, shard, stage):
    plan = Plan(changed(layers=1), replicate, shard, stage, m=8)
    short = execution(plan)
    every = dry_run(plan.spec, plan.job, plan.layout, whole=True)
    assert (short.microbatches, every.microbatches) == (4, 8)
    assert differences(plan, every) == differences(plan, short) == set()
    for name in ("at_rest", "at_peak", "peak", "traffic"):
        assert getattr(short, name) == getattr(every, name)


def test_the_peak_is_the_sum_of_its_kinds():
    executed = execution(PLANS[0])
    assert sum(executed.at_peak.values()) == executed.peak
    assert min(executed.at_peak.values()) >= 0


def test_no_process_group_is_left(monkeypatch):
    monkeypatch.setattr(step.Stepper, "backward", lambda *_: 1 / 0)
    plan, hook = PLANS[0], sys.excepthook
    with pytest.raises(ZeroDivisionError):
        dry_run(plan.spec, plan.job, plan.layout)
    assert not dist.is_initialized()
    assert sys.excepthook is hook


# A broken ledger


def none_of(kind):
    """Elements of units, those of one kind left out."""

    def elements(*args):
        found = weighted_elements(*args)
        nothing = found[0][kind].whole * 0
        return [{**each, kind: UnitElements(nothing, nothing, nothing, 0.0)} for each in found]

    return elements


def sent_without(kind):
    """The same for one weight."""
    return lambda model, table, weight, adapters: none_of(kind)(model, table, [weight], adapters)[0]


def head_twice(table, stage):
    """Copies of units, those of the head counted twice."""
    copies = held_units(table, stage)
    return copies | {HEAD: 2 * copies[HEAD]}


def saved_twice(name):
    """Blocks that keep one tensor twice."""

    def again(block):
        return dataclasses.replace(block, saved={**block.saved, "again": block.saved[name]})

    def activations(*args):
        splits = [
            split._replace(alike=Alike({kind: again(block) for kind, block in split.alike.ways.items()}))
            for split in activations_of(*args).splits
        ]
        return BlockWays(splits)

    return activations


def nothing(state, *_):
    return np.zeros(state.table.rows)


GATHER, REDUCE = "dp_shard all_gather", "dp_shard reduce_scatter"
STATE = {"parameters", "gradients", "optimizer"}
NARROW = {"bf16": 2, "fp32": 4, "fp64": 8}

BROKEN_LEDGERS = {
    "tensor saved twice": (Plan(m=1), block_kinds, "activations_of", saved_twice("input"), {"peak"}),
    "embedding has no state": (Plan(m=1), memory, "weighted_elements", none_of(EMBEDDING), STATE | {"peak"}),
    "embedding is not sent": (Plan(m=1), traffic, "unit_elements", sent_without(EMBEDDING), {GATHER, REDUCE}),
    "head gathered twice": (Plan(m=1), traffic, "held_units", head_twice, {GATHER}),
    "replicas not summed": (
        Plan(replicate=2, shard=2, m=1), traffic, "WIDE_BYTES", dict.fromkeys(NARROW, 0),
        {REDUCE, "dp_replicate all_reduce"},
    ),
    "scalars not summed": (Plan(m=1), traffic, "scalar_flows", lambda _: [], {"dp_shard all_reduce"}),
    "gradients reduced in bf16": (Plan(m=1), traffic, "WIDE_BYTES", NARROW, {REDUCE}),
    "one moment": (
        Plan(m=1), memory, "optimizer_elements", lambda *args: args[1].numel, {"optimizer", "peak"},
    ),
    "no gradient waits": (
        Plan(stage=1), rank_moments, "waiting_gradients", nothing, {"gathered at peak", "peak"},
    ),
    "nothing stays gathered": (
        Plan(stage=2, m=3), holdings, "resident", nothing, {"gathered at peak", "peak"},
    ),
    "no reduction buffers": (
        Plan(replicate=4, shard=1, stage=0), rank_moments, "reduction_buffers", nothing,
        {"gathered at peak", "peak"},
    ),
    "no reduced gradients": (
        Plan(stage=3), rank_moments, "reduced_shards", nothing, {"gradients at peak", "peak"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN_LEDGERS)
def test_a_broken_ledger_is_found(fault, monkeypatch):
    plan, module, name, replacement, terms = BROKEN_LEDGERS[fault]
    executed = execution(plan)
    assert differences(plan, executed) == set()
    monkeypatch.setattr(module, name, replacement)
    assert differences(plan, executed) >= terms
    whole = plan_of(plan.spec, plan.job, cluster_of("cpu", plan.layout.ranks), plan.layout)
    assert not compare(whole, executed, PEAK).ok


# A broken runtime


def unscheduled(model, *, zero_stage, last):
    """Gradients reduced in every microbatch, whatever the stage."""
    dp.set_microbatch_schedule(model, zero_stage=2, last=last)


def third_moment(parameters, spec, job, **others):
    return torch.optim.AdamW([parameter for _, parameter in parameters], fused=True, amsgrad=True)


def local_norm(parameters, *_):
    """The norm of this rank's shard alone."""
    return torch.stack([dp_grad(p).double().square().sum() for p in parameters]).sum().sqrt()


def dp_grad(parameter):
    return parameter.grad.to_local()


def upcast_loss(logits, target, tokens):
    """The usual loss: fp32 logits and their log-softmax."""
    flat = logits.flatten(0, -2).float()
    return torch.nn.functional.cross_entropy(flat, target.flatten(), reduction="sum")[None] / tokens


BROKEN_RUNTIMES = {
    "head resharded": (Plan(m=1), dp, "HEAD", "no such unit", {GATHER}),
    "embedding gathered in backward": (Plan(m=1), dp, "EMBEDDING", "no such unit", {GATHER}),
    "stage 1 reduces every time": (Plan(stage=1), step, "set_microbatch_schedule", unscheduled, {REDUCE}),
    "gradients reduced in bf16": (
        Plan(m=1), dp, "MixedPrecisionPolicy",
        lambda **policy: MixedPrecisionPolicy(**policy | {"reduce_dtype": torch.bfloat16}), {REDUCE},
    ),
    "nothing recomputed": (
        Plan(recompute="full"), step, "apply_recompute", lambda *_, **__: None,
        {"activations at peak", "peak"},
    ),
    "norm of one shard": (Plan(m=1), step, "gradient_norm", local_norm, {"dp_shard all_reduce"}),
    "three moments": (Plan(m=1), step, "build_optimizer", third_moment, {"optimizer", "peak"}),
    "parameters rest in bf16": (
        Plan(m=1), step, "parameter_dtype", lambda _: torch.bfloat16, STATE | {"peak"},
    ),
    "loss in fp32": (Plan(changed(vocab=32000), m=1), model, "cross_entropy", upcast_loss, {"peak"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN_RUNTIMES)
def test_a_broken_runtime_is_found(fault, monkeypatch):
    plan, module, name, replacement, terms = BROKEN_RUNTIMES[fault]
    monkeypatch.setattr(module, name, replacement)
    assert differences(plan, dry_run(plan.spec, plan.job, plan.layout)) >= terms
