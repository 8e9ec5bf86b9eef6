"""The picture of a step: letters in proportion to times, short enough for a terminal."""

import re
from typing import get_args

import pytest
from test_explain import CLUSTER, DENSE, JOB, ONE

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout, ScheduleName
from shardwright.plan.explain import explanation, plan_of
from shardwright.plan.gantt import WIDTH, parts_text, pipeline_text
from shardwright.plan.schedule import SCHEDULES
from shardwright.plan.splits import stage_layers

NO_LAUNCH = CLUSTER.model_copy(update={"device": CLUSTER.device.model_copy(update={"launch": 0.0})})


def plan(schedule="1F1B", pp=4, microbatches=4, chunks=None, layers=16, cluster=NO_LAUNCH):
    v = chunks or SCHEDULES[schedule].chunks or 2
    model = DENSE.model_copy(update={"layers": layers, "vocab": 2, "hidden": 2048, "ffn": 8192})
    layout = Layout(
        pp=pp, dp_shard=8 // pp if pp < 8 else 1, zero_stage=1 if pp < 8 else 0, schedule=schedule, chunks=v,
        stage_layers=stage_layers(layers, pp * v), microbatches=microbatches,
    )  # fmt: skip
    job = Job(seq=1024, global_batch=layout.dp * microbatches)
    return plan_of(model, job, cluster, layout)


def rank_lines(text):
    return [re.sub(r"^rank \d+ +", "", line) for line in text.splitlines() if line.startswith("rank ")]


def test_gpipe_by_hand():
    """4 stages, 4 microbatches, a backward of 2 forwards: 21 units of a forward, 7 forwards long till the
    first backward; the last rank is never idle in the middle."""
    lines = rank_lines(pipeline_text(plan("GPipe")))
    assert [len(line.rstrip(".")) == WIDTH for line in lines] == [True, False, False, False]
    first, last = lines[0], lines[3]
    assert re.fullmatch(r"F+\.+B+", first)
    assert re.fullmatch(r"\.+F+B+\.+", last)
    assert first.count("F") == pytest.approx(WIDTH * 4 / 21, abs=2)
    assert first.count("B") == pytest.approx(WIDTH * 8 / 21, abs=2)
    assert last.index("F") == pytest.approx(WIDTH * 3 / 21, abs=2)


def test_a_long_step_shows_its_ends_and_one_period():
    text = pipeline_text(plan(microbatches=64))
    windows = [line.split("  ~  ") for line in rank_lines(text)]
    assert {len(parts) for parts in windows} == {3}
    assert re.fullmatch(r"F+\.+B+", windows[0][0])
    assert all({"F", "B"} <= set(parts[1]) for parts in windows)
    assert "the rest of 64 microbatches" in text


def test_letters_of_schedules():
    assert set("FfBb") <= set("".join(rank_lines(pipeline_text(plan("Interleaved1F1B", microbatches=8)))))
    assert "W weight gradients" in pipeline_text(plan("ZB-H1"))
    fused = pipeline_text(plan("DualPipeV", microbatches=8))
    assert "X" in "".join(rank_lines(fused))
    assert "a forward and a backward as one" in " ".join(fused.split())


@pytest.mark.parametrize("schedule", get_args(ScheduleName)[1:])
@pytest.mark.parametrize("microbatches", [8, 40])
def test_every_picture_fits_a_terminal(schedule, microbatches):
    text = pipeline_text(plan(schedule, microbatches=microbatches))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(rank_lines(text)) == 4


def test_of_many_ranks_the_first_and_the_last_are_drawn():
    text = pipeline_text(plan(pp=32, microbatches=64, layers=32, cluster=cluster_of("h100-sxm", 32)))
    names = [line.split()[1] for line in text.splitlines() if line.startswith("rank ")]
    assert names == [str(rank) for rank in [*range(8), *range(24, 32)]]
    assert "..." in text.splitlines()[8]


def test_without_a_pipeline_the_parts_make_a_bar():
    text = parts_text({"forward": 1.0, "backward": 2.0, "exposed": 0.5, "optimizer": 0.0})
    bar, legend = text.splitlines()
    assert bar == "step  " + "F" * 20 + "B" * 40 + "E" * 10
    assert legend == "F forward 28.6%, B backward 57.1%, E exposed 14.3%"


def test_the_document_holds_the_picture():
    alone = explanation(plan_of(DENSE, JOB, CLUSTER, ONE))
    assert len(alone["timeline_text"].splitlines()[0]) == WIDTH + len("step  ")
    piped = plan()
    assert explanation(piped)["timeline_text"] == pipeline_text(piped)
