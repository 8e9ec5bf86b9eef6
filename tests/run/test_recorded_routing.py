"""A real routing, recorded on real ranks and replayed in a dry run: the meter sees the same, the ledger what
the fullest rank holds."""

import numpy as np
import pytest
import torch
from gloo import MODELS

from shardwright.check import dryrun
from shardwright.check.dryrun import dry_run, made_up_microbatches
from shardwright.cluster import device
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.plan.memory import memory_ledger
from shardwright.plan.table import table_of
from shardwright.run.expert_load import set_routing
from shardwright.run.init import initialise
from shardwright.run.launch import run_ranks
from shardwright.run.mesh import build_mesh
from shardwright.run.meter import MemoryMeter
from shardwright.run.model import Microbatch
from shardwright.run.routing import BalancedRouting, Routing
from shardwright.run.step import Stepper, parallel_model

LAYOUT = Layout(ep=2, dp_shard=4, zero_stage=3, micro_batch=2, microbatches=2)
SPEC = MODELS["experts"].model_copy(
    update={
        "hidden": 256, "ffn": 704, "heads": 8, "kv_heads": 4, "head_size": 32, "vocab": 2048,
        "moe": MODELS["experts"].moe.model_copy(update={"ffn": 128}),
    }
)  # fmt: skip
JOB = Job(seq=128, global_batch=LAYOUT.dp * 4, precision="fp32")


class Recording(Routing):
    """The real one, which keeps what it said."""

    def __init__(self):
        self.said = []

    def splits(self, *args):
        self.said.append(super().splits(*args))
        return self.said[-1]


class Replayed(BalancedRouting):
    """Says again what was recorded, call by call."""

    def __init__(self, said):
        super().__init__()
        self.said = iter(said)

    def splits(self, *args):
        return next(self.said)


def tokens(rank):
    """Random ones, other on every rank."""
    generator = torch.Generator().manual_seed(rank)
    shape = (LAYOUT.micro_batch, JOB.seq)
    return [
        Microbatch(*(torch.randint(SPEC.vocab, shape, generator=generator) for _ in range(2)))
        for _ in made_up_microbatches(JOB, LAYOUT, LAYOUT.microbatches)
    ]


def real_rank():
    mesh = build_mesh(LAYOUT, "cpu")
    network = parallel_model(SPEC, JOB, LAYOUT, mesh)
    routing = Recording()
    set_routing(network, routing)
    initialise(network, JOB.seed, torch.device("cpu"))
    stepper = Stepper(network, JOB, LAYOUT, mesh)
    batch = tokens(torch.distributed.get_rank())
    stepper.step(0, batch)
    del batch
    meter = MemoryMeter(network, stepper.optimizer, mesh)
    with meter:
        stepper.step(1, tokens(torch.distributed.get_rank()))
    return routing.said, meter.peak, meter.traffic


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(real_rank, LAYOUT.ranks)


def fullness(said):
    """Copies that a rank's experts get over the mean, in each call of the second step."""
    calls = said[len(said) // 2 :]
    mean = SPEC.moe.top_k * LAYOUT.micro_batch * JOB.seq
    return [np.sum(call.received) / mean for call in calls]


def test_what_was_recorded_is_a_real_routing(ranks):
    every = [fullness(said) for said, *_ in ranks]
    assert {len(each) for each in every} == {SPEC.layers * LAYOUT.microbatches}
    assert max(map(max, every)) > 1.02  # uneven
    for group in ((0, 1), (2, 3)):  # the ranks of ep share out what they have
        assert np.sum([every[rank] for rank in group], axis=0) == pytest.approx(len(group))


def test_a_dry_run_with_it_holds_and_sends_the_same(ranks, monkeypatch):
    for rank, (said, peak, traffic) in enumerate(ranks):
        replayed = said[: SPEC.layers] + said[len(said) // 2 :]  # a dry run's first step has one microbatch
        monkeypatch.setattr(dryrun, "BalancedRouting", lambda _, said=replayed: Replayed(said))
        dry = dry_run(SPEC, JOB, LAYOUT, rank, whole=True)
        assert dry.peak == pytest.approx(peak, rel=0.01)
        assert dry.traffic == traffic


def test_the_ledger_at_its_imbalance_is_the_fullest_rank(ranks):
    """The peak lies in the last microbatch, of whose layers the mean is what the ledger asks for; the worst
    layer's everywhere is a bound."""
    last = [np.mean(fullness(said)[-SPEC.layers :]) for said, *_ in ranks]
    rank = int(np.argmax(last))
    peak = ranks[rank][1]
    mean, worst = (
        memory_ledger(
            SPEC,
            JOB.model_copy(update={"expert_imbalance": float(imbalance)}),
            device("cpu"),
            table_of([LAYOUT], SPEC.layers),
        ).allocated[0]
        for imbalance in (last[rank], max(max(fullness(said)) for said, *_ in ranks))
    )
    assert last[rank] > 1.02
    assert mean == pytest.approx(peak, rel=0.04)
    assert worst > max(peak for _, peak, _ in ranks)
