"""A recording played back: by hand, against the meter that made it, and as torch's viewer reads it."""

import dataclasses
import functools
import pickle
import pickletools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch.cuda._memory_viz as viz

import shardwright
from shardwright.check.compare import chosen_stages
from shardwright.check.dryrun import dry_run
from shardwright.check.history import History, Tensors
from shardwright.check.memory import memory_document, output_kind, step_histories
from shardwright.check.snapshot import save_snapshot, snapshot
from shardwright.cluster import cluster_of
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.explain import plan_of
from shardwright.run.recorder import Event, Life, Origin, Recorder, Recording

SPEC = ModelSpec(
    name="base", model_type="llama", layers=2, hidden=128, ffn=320, heads=4, kv_heads=2, head_size=32,
    vocab=512,
)  # fmt: skip
SHARDED = Layout(dp_shard=2, zero_stage=3, micro_batch=2, microbatches=2)
PIPELINE = Layout(
    pp=2, schedule="1F1B", stage_layers=(1, 1), zero_stage=0, micro_batch=2,
    microbatches=4,
)  # fmt: skip
RECOMPUTED = Layout(tp=2, sp=True, zero_stage=0, micro_batch=2, microbatches=2, recompute="full")

READ_BY_VIEWER = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "SHORT_BINUNICODE", "BINUNICODE"),
}
"""Opcodes of pickle that the viewer's own reader knows. Source: torch/utils/viz/MemoryViz.js, unpickle."""


def job_of(layout):
    return Job(seq=64, global_batch=layout.dp * layout.micro_batch * layout.microbatches, precision="bf16")


@functools.cache
def recorded(layout, rank=0):
    recorder = Recorder()
    execution = dry_run(SPEC, job_of(layout), layout, rank, recorder=recorder)
    return execution, History(recorder.recording)


# By hand


def by_hand():
    """A parameter; an activation that turns out to be a gradient; a buffer that is emptied and filled."""
    weight, late, buffer = (Origin(f"layers.{i}.mlp", f"run/a.py:{i}") for i in range(3))
    return Recording(
        lives=[
            Life(weight, [(0, "parameters")], [(0, 100)]),
            Life(late, [(1, "activations"), (3, "gradients")], [(1, 40)], death=6),
            Life(buffer, [(2, "gathered")], [(2, 30), (4, 0), (5, 70)]),
        ],
        events=[
            Event(0, 100, "start"),
            Event(1, 40, "forward"),
            Event(2, 30, "forward"),
            Event(1, 0, "backward"),
            Event(2, -30, "backward"),
            Event(2, 70, "backward"),
            Event(1, -40, "between"),
            Event(None, 0, "optimizer"),
        ],
    )


def test_a_history_by_hand():
    history = History(by_hand())
    assert history.held.sum(1).tolist() == [100, 140, 170, 170, 140, 210, 170, 170]
    assert (history.peak, history.peak_event) == (210, 5)
    assert history.moment(5) == "backward of layers.2.mlp (run/a.py:2)"
    assert history.moment(7) == "optimizer"
    assert history.tensors(5) == [
        Tensors("parameters", "layers.N.mlp", "run/a.py:0", 1, 100),
        Tensors("gathered", "layers.N.mlp", "run/a.py:2", 1, 70),
        Tensors("gradients", "layers.N.mlp", "run/a.py:1", 1, 40),
    ]
    assert history.sample(1).held["gradients"] == 40  # it was one from birth
    assert [(sample.event, sample.phase) for sample in history.samples(3)] == [
        (1, "forward"),
        (2, "forward"),
        (5, "optimizer"),
    ]


@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_a_short_timeline_keeps_the_peak(most):
    samples = History(by_hand()).samples(most)
    assert len(samples) == min(most, 8)
    assert max(sum(sample.held.values()) for sample in samples) == 210


# Against the meter


@pytest.mark.parametrize("layout", [SHARDED, PIPELINE, RECOMPUTED], ids=lambda layout: layout.label)
def test_a_history_is_what_the_meter_saw(layout):
    """Peak and kinds by two counts."""
    for rank in range(layout.pp):
        execution, history = recorded(layout, rank)
        top = history.sample(history.peak_event)
        assert (history.peak, top.held) == (execution.peak, execution.at_peak)
        groups = history.tensors(history.peak_event)
        sums = Counter()
        for group in groups:
            sums[group.kind] += group.bytes
        assert sums == {kind: size for kind, size in top.held.items() if size}


def test_a_recorder_changes_nothing():
    execution, _ = recorded(SHARDED)
    plain = dry_run(SPEC, job_of(SHARDED), SHARDED)
    assert dataclasses.replace(plain, time=0.0) == dataclasses.replace(execution, time=0.0)


def source_of(file, text):
    """``file:line`` of the only line of the package's file that has ``text``."""
    lines = Path(shardwright.__file__).parent.joinpath(file).read_text().splitlines(keepends=True)
    (found,) = [number for number, line in enumerate(lines, 1) if text in line]
    return f"{file}:{found}"


def test_who_made_what():
    """Counts from the model: 2 microbatches of 2 x 64 tokens, of the first all is gone but its gradients."""
    _, history = recorded(SHARDED)
    groups = {(group.kind, group.module): group for group in history.tensors(history.peak_event)}
    tokens, layers = 2 * 64, SPEC.layers
    gate = groups["activations", "model.layers.N.mlp.gate_proj"]
    assert gate.source == source_of("run/linear.py", "return self.join(self.product(x, weight, None))\n")
    assert (gate.count, gate.bytes) == (layers, layers * tokens * SPEC.ffn * 2)
    weight = groups["parameters", "model.layers.N.mlp.gate_proj.weight"]
    assert weight.source == source_of("run/linear.py", "self.weight = nn.Parameter(torch.empty(shape))")
    assert (weight.count, weight.bytes) == (layers, layers * SPEC.hidden * SPEC.ffn * 4 // 2)
    moment = groups["optimizer", "model.layers.N.mlp.gate_proj.weight exp_avg"]
    assert moment.source == source_of("run/local_adamw.py", "class LocalAdamW")
    assert (moment.count, moment.bytes) == (weight.count, weight.bytes)
    assert all(re.fullmatch(r"[\w/]+\.py:\d+", group.source) for group in groups.values())
    assert not any("meter" in group.source or "recorder" in group.source for group in groups.values())


def test_backward_is_the_forward_operations():
    """The gradient of a product's input is made by torch's own kernel: it goes by the product's line."""
    _, history = recorded(PIPELINE)
    made_in_backward = {
        (life.origin.module, life.origin.source)
        for life in history.lives
        if history.events[life.sizes[0][0]].phase == "backward"
    }
    sources = {source for module, source in made_in_backward if module.endswith("gate_proj")}
    assert any(source.startswith("run/linear.py:") for source in sources)
    assert any(module == "model.layers.0.mlp" for module, _ in made_in_backward)


# As torch's viewer has it


@functools.cache
def histories():
    return step_histories(plan())


def plan():
    return plan_of(SPEC, job_of(PIPELINE), cluster_of("cpu", 2), PIPELINE)


def test_torch_reads_the_snapshot(tmp_path):
    found = histories()
    path = save_snapshot([each.history for each in found], tmp_path / "step.pickle")
    data = pickle.loads(path.read_bytes())
    assert {code.name for code, _, _ in pickletools.genops(path.read_bytes())} <= READ_BY_VIEWER
    assert len(data["device_traces"]) == len(data["segments"]) == 2
    for each, trace, segment in zip(found, data["device_traces"], data["segments"], strict=True):
        held, peak, alive = 0, 0, {}
        start, end = segment["address"], segment["address"] + segment["total_size"]
        for event in trace[1:]:
            if event["action"] == "alloc":
                assert start <= event["addr"]
                assert event["addr"] + event["size"] <= end
                alive[event["addr"]] = event["size"]
                held += event["size"]
            elif event["action"] == "free_completed":
                assert alive.pop(event["addr"]) == event["size"]
                held -= event["size"]
            peak = max(peak, held)
        assert peak == each.history.peak
        blocks = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert {block["address"]: block["size"] for block in blocks} == alive
        assert end < 2**53  # numbers of JavaScript
    assert "unknown" in {event["category"] for trace in data["device_traces"] for event in trace}
    assert "Active Memory Timeline" in viz.trace_plot(data)
    assert "Allocator State History" in viz.segment_plot(data)
    assert "= cudaMalloc(" in viz.trace(data)
    left = sum(int(each.history.held[-1].sum()) for each in found)
    assert f"total_allocated: {viz.Bytes(left)}" in viz.segsum(data)
    flames = viz.memory(data, format_flamegraph=lambda lines: lines).splitlines()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in flames) >= left
    assert any("parameters model.layers.0.mlp.gate_proj.weight" in line for line in flames)


def test_storages_that_live_together_do_not_overlap():
    _, history = recorded(SHARDED)
    alive = {}
    for event in snapshot([history])["device_traces"][0][1:]:
        if event["action"] == "alloc":
            for address, size in alive.items():
                assert event["addr"] + event["size"] <= address or address + size <= event["addr"]
            alive[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            del alive[event["addr"]]


# What the command answers


def test_a_document_of_one_rank_of_each_stage():
    document = memory_document(plan(), histories())
    assert [(stage["stage"], stage["rank"]) for stage in document["stages"]] == [(0, 0), (1, 1)]
    for stage in document["stages"]:
        totals = [sum(sample["held"].values()) for sample in stage["timeline"]]
        assert max(totals) == stage["peak"] == sum(group["bytes"] for group in stage["tensors"])
        assert len(totals) <= 480
        phases = {sample["phase"] for sample in stage["timeline"]}
        assert {"forward", "backward", "optimizer"} <= phases


def test_a_rank_or_a_stage_is_chosen():
    (one,) = step_histories(plan(), rank=1)
    (_, other) = histories()
    assert (one.stage, one.rank, one.history.peak) == (other.stage, other.rank, other.history.peak)
    assert chosen_stages(plan(), [1]) == [1]
    with pytest.raises(LayoutError, match=r"stage 2: the plan has pp=2, choose from 0 to 1"):
        step_histories(plan(), stages=[2])
    with pytest.raises(LayoutError, match=r"rank 5: the plan has 2 ranks, choose from 0 to 1"):
        step_histories(plan(), rank=5)


def test_files_by_their_ending():
    kinds = [output_kind(Path(name)) for name in ("a.html", "a.svg", "a.pickle")]
    assert kinds == ["picture", "picture", "snapshot"]
    with pytest.raises(LayoutError, match=r"output a.png ends in '.png': use .html or .svg for a picture"):
        output_kind(Path("a.png"))
