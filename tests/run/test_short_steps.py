"""A dry run without the layers and microbatches that repeat others: to the byte as if all had been executed.

Where that cannot be known, all are.
"""

from typing import NamedTuple

import pytest
from gloo import MODELS

from shardwright.check import shorter
from shardwright.check.dryrun import dry_run
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, Layout


class Case(NamedTuple):
    """A layout, the rank that is executed, layers of each stage (of the model without a pipeline)."""

    model: str
    layers: int
    microbatches: int
    axes: dict
    rank: int = 0
    optimizer: str = "adamw"

    @property
    def layout(self):
        stages = self.axes.get("pp", 1) * self.axes.get("chunks", 1)
        kept = KEPT_BY_SELECTIVE if self.axes.get("recompute") == "selective" else ()
        fields = {"stage_layers": (self.layers,) * stages if stages > 1 else (), "kept": kept} | self.axes
        return Layout(microbatches=self.microbatches, **fields)

    @property
    def spec(self):
        return MODELS[self.model].model_copy(
            update={"layers": self.layers * max(len(self.layout.stage_layers), 1)}
        )

    def run(self, whole):
        layout = self.layout
        job = Job(seq=32, global_batch=layout.dp * self.microbatches, optimizer=self.optimizer)
        return dry_run(self.spec, job, layout, self.rank, whole=whole)


def pipeline(schedule, ranks, chunks=1, **axes):
    return {"pp": ranks, "schedule": schedule, "chunks": chunks} | axes


SHARD = {"dp_shard": 2, "zero_stage": 1}

CASES = {
    "zero 3, full": Case("base", 5, 6, {"dp_shard": 4, "zero_stage": 3, "recompute": "full"}),
    "zero 2, every second": Case(
        "tied", 14, 1, {"dp_shard": 4, "zero_stage": 2, "recompute": "full", "recompute_every": 2}
    ),
    "experts": Case(
        "shared_experts", 8, 1, {"ep": 2, "dp_shard": 4, "zero_stage": 3, "recompute": "selective"}
    ),
    "1F1B, tp x cp": Case(
        "base", 4, 8, pipeline("1F1B", 4, tp=2, sp=True, cp=2, cp_kind="ring", zero_stage=1), rank=4
    ),
    "ZBVZeroBubble": Case("tied", 1, 14, pipeline("ZBVZeroBubble", 3, 2, **SHARD)),
    "InterleavedZeroBubble": Case("base", 1, 24, pipeline("InterleavedZeroBubble", 3, 2, **SHARD), rank=2),
}


@pytest.mark.parametrize("name", CASES)
def test_as_if_all_had_been_executed(name):
    case = CASES[name]
    found, whole = case.run(whole=False), case.run(whole=True)
    assert (whole.layers, whole.microbatches) == (whole.rank_layers, case.microbatches)
    assert found.layers < found.rank_layers or found.microbatches < case.microbatches
    for field in ("at_rest", "at_peak", "peak", "traffic", "rank_layers"):
        assert getattr(found, field) == getattr(whole, field), field


def test_layers_wrongly_taken_for_alike_are_all_executed(monkeypatch):
    monkeypatch.setattr(shorter, "_kind", lambda *_: ())
    case = Case("base", 7, 1, {"recompute": "full", "recompute_every": 5})
    found = case.run(whole=False)
    assert found.layers == found.rank_layers == 7
    assert found.peak == case.run(whole=True).peak


def test_what_is_short_is_executed_whole():
    case = CASES["zero 3, full"]
    program = shorter.program_of(case.spec, case.layout, 0)
    pair = shorter.shorter(case.spec, program)
    assert pair is not None
    assert shorter.shorter(case.spec, pair.first) is None
