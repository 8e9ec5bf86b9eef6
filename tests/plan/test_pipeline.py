"""A plan's pipeline simulated, against the closed forms of the table."""

import numpy as np
import pytest

from shardwright.cluster import cluster_of
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.parts import hop_time
from shardwright.plan.pipeline import (
    pipeline_timeline,
    simulated_bubble,
    simulated_bubbles,
    simulated_step,
    simulated_steps,
    simulated_times,
)
from shardwright.plan.placement import routes_of
from shardwright.plan.schedule import SCHEDULES
from shardwright.plan.splits import stage_layers
from shardwright.plan.step import step_time
from shardwright.plan.table import table_of

_FOUR = cluster_of("h100-sxm", 4)
CLUSTER = _FOUR.model_copy(update={"device": _FOUR.device.model_copy(update={"launch": 0.0})})
"""Without launches, of which even a small head has some."""
JOB = Job(seq=4096, global_batch=16)


def model_of(vocab: int) -> ModelSpec:
    """A model whose head costs much or nearly nothing."""
    return ModelSpec(
        name="m", model_type="llama", layers=16, hidden=2048, ffn=8192, heads=16, kv_heads=8, head_size=128,
        vocab=vocab,
    )  # fmt: skip


def layout_of(schedule: str, ends: int = 0) -> Layout:
    chunks = SCHEDULES[schedule].chunks or 2
    return Layout(
        pp=4,
        schedule=schedule,
        chunks=chunks,
        stage_layers=stage_layers(16, 4 * chunks, ends),
        micro_batch=1,
        microbatches=16,
    )


def closed_form(model: ModelSpec, layout: Layout, job: Job = JOB) -> float:
    return float(step_time(model, job, CLUSTER, table_of([layout], model.layers)).bubble[0])


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZB-H1"])
def test_with_nearly_equal_stages_it_is_the_closed_form(schedule):
    model, layout = model_of(vocab=2), layout_of(schedule)
    assert simulated_bubble(model, JOB, CLUSTER, layout) == pytest.approx(
        closed_form(model, layout), rel=0.02
    )


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_the_closed_form_is_an_upper_bound(schedule):
    """A heavy head makes the last rank the slowest; the others do not wait as long as if all were."""
    model, layout = model_of(vocab=128_000), layout_of(schedule)
    simulated, bound = simulated_bubble(model, JOB, CLUSTER, layout), closed_form(model, layout)
    assert 0 < simulated < bound
    assert simulated < 0.95 * bound


def test_every_rank_does_its_own_stages_work():
    model, layout = model_of(vocab=128_000), layout_of("1F1B")
    busy = np.ravel(pipeline_timeline(model, JOB, CLUSTER, layout).busy)
    assert busy[1] == pytest.approx(busy[2])
    assert busy[3] > 1.2 * busy[1]  # the head
    table = table_of([layout], model.layers)
    step = step_time(model, JOB, CLUSTER, table)
    inside = np.ravel(step.inside)[0]
    assert busy.max() == pytest.approx(inside)


def test_lighter_ends_take_the_heads_share():
    model = model_of(vocab=128_000)
    even, light = (pipeline_timeline(model, JOB, CLUSTER, layout_of("1F1B", ends)) for ends in (0, 1))
    assert float(light.makespan) < float(even.makespan)


def test_many_at_once_are_each_alone():
    """Of every schedule, some twice with other ends, and one without a pipeline between them."""
    model = model_of(vocab=128_000)
    layouts = [layout_of(name, ends) for name in SCHEDULES for ends in (0, 1) if layout_of(name).chunks == 1]
    layouts += [layout_of(name) for name in SCHEDULES]
    layouts.insert(3, Layout(microbatches=16))
    found = simulated_bubbles(model, JOB, CLUSTER, layouts)
    for layout, idle in zip(layouts, found, strict=True):
        expected = 0.0
        if layout.pp > 1:
            line = pipeline_timeline(model, JOB, CLUSTER, layout)
            expected = float(line.makespan - line.busy.max())
        assert idle == pytest.approx(expected, rel=1e-9)
        assert idle == pytest.approx(simulated_bubble(model, JOB, CLUSTER, layout), rel=1e-9)
    steps = [step_time(model, JOB, CLUSTER, table_of([layout], model.layers)) for layout in layouts]
    times = [float(step.time[0] - step.bubble[0]) for step in steps] + found
    np.testing.assert_allclose(simulated_times(model, JOB, CLUSTER, layouts), times)
    assert simulated_times(model, JOB, CLUSTER, []).tolist() == []


def test_any_split_of_the_layers_has_its_own_bubble():
    """All that the layers allow is priced; a heavier stage makes the others wait: 16 layers once, and
    15 times its own."""
    model = model_of(vocab=2)
    even, uneven = (
        layout_of("1F1B").model_copy(update={"stage_layers": split}) for split in ((4, 4, 4, 4), (3, 6, 5, 2))
    )
    found = simulated_times(model, JOB, CLUSTER, [even, uneven])
    assert found[1] == pytest.approx(found[0] * (16 + 15 * 6) / (16 + 15 * 4), rel=0.05)


def test_no_pipeline_no_bubble():
    assert simulated_bubble(model_of(2), JOB, CLUSTER, Layout(microbatches=16)) == 0


def test_an_order_that_is_not_there():
    layout = layout_of("1F1B").model_copy(update={"microbatches": 2})
    with pytest.raises(LayoutError, match="microbatches=2 of 1F1B on 4 ranks"):
        pipeline_timeline(model_of(2), JOB, CLUSTER, layout)


def with_program(**fields) -> Job:
    return JOB.model_copy(update={"program": JOB.program.model_copy(update=fields)})


def test_jobs_together_are_each_alone():
    """Other models, programs and clusters, with pipelines of one order among them."""
    jobs = [
        (model_of(vocab=2), JOB, CLUSTER, [layout_of("1F1B"), layout_of("GPipe")]),
        (model_of(vocab=128_000), JOB, CLUSTER, [layout_of("1F1B"), layout_of("1F1B", 1)]),
        (model_of(vocab=2), with_program(waits=False), _FOUR, [layout_of("ZB-H2"), layout_of("1F1B")]),
        (model_of(vocab=2), JOB, _FOUR, [Layout(dp_shard=4, zero_stage=3, microbatches=4)]),
    ]
    for job, together in zip(jobs, simulated_steps(jobs), strict=True):
        alone = simulated_step(*job)
        assert np.asarray(together.time).tolist() == np.asarray(alone.time).tolist()
        assert np.asarray(together.bubble).tolist() == np.asarray(alone.bubble).tolist()


def test_the_ends_may_have_no_layer():
    """18 stages' worth on 16 layers: as long as 18 layers would take, less what the two ends have not."""
    model = model_of(vocab=2)
    layout = Layout(
        pp=2, schedule="Interleaved1F1B", chunks=9, stage_layers=(0, *[1] * 16, 0), microbatches=16
    )
    full = layout.model_copy(update={"stage_layers": (1,) * 18})
    larger = model.model_copy(update={"layers": 18})
    shorter, longer = (
        float(simulated_times(each, JOB, CLUSTER, [one])[0])
        for each, one in ((model, layout), (larger, full))
    )
    assert shorter / longer == pytest.approx(8 / 9, rel=0.04)
    with pytest.raises(LayoutError, match="leave a stage between the ends without a layer"):
        Layout.checked(layout.model_dump() | {"stage_layers": (1, 0, *[1] * 14, 1, 1)})


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "none"])
def test_each_chunk_of_a_microbatch_waits_for_its_exchange(schedule, fills):
    """For each of 16 microbatches, and at most once more for each rank, as schedules fill and drain;
    nothing fills a wait."""
    model, layout, wait = model_of(vocab=2), layout_of(schedule), 1e-3
    plain, waiting = (
        simulated_bubble(model, with_program(chunk_wait=each, fills=fills), CLUSTER, layout)
        for each in (0.0, wait)
    )
    assert waiting >= 16 * layout.chunks * wait - 1e-9
    assert waiting - plain <= (16 + layout.pp) * layout.chunks * wait
    if not fills:
        assert waiting - plain >= 16 * layout.chunks * wait - 1e-9
        closed = [closed_form(model, layout, job) for job in (JOB, with_program(chunk_wait=wait))]
        assert closed[1] - closed[0] == pytest.approx(waiting - plain, rel=0.02)


def test_layouts_without_a_pipeline_wait_for_none_beside_one_that_does():
    model = model_of(vocab=2)
    layouts = [
        layout_of("Interleaved1F1B"), layout_of("1F1B"), Layout(tp=4, micro_batch=1, microbatches=16),
    ]  # fmt: skip
    table = table_of(layouts, model.layers)
    plain, slow = (
        step_time(model, job, CLUSTER, table).bubble for job in (JOB, with_program(chunk_wait=1e-3))
    )
    assert (slow > plain).tolist() == [True, True, False]


def test_ranks_of_tp_send_a_part_each():
    """Between nodes a part of eight, inside one a gather: arXiv:2104.04473, section 4.1."""
    model, cluster = model_of(vocab=2), cluster_of("a100-sxm", 16)
    layout = Layout(pp=2, tp=8, schedule="1F1B", stage_layers=(8, 8), micro_batch=4, microbatches=4)
    table = table_of([layout], model.layers)
    whole, parts = (
        float(hop_time(model, job, table, routes_of(cluster, table))[0])
        for job in (JOB, with_program(hops_split=True))
    )
    assert whole / 4 < parts < whole / 2


def test_weight_gradients_that_fill_leave_nothing_idle():
    """arXiv:2401.10241: with as many in flight as ZB-2p has, an automatic schedule is idle 0 to 2 % of a step
    where 1F1B is 16 %."""
    model, layout = model_of(vocab=2), layout_of("ZB-H2")
    filled = simulated_bubble(model, with_program(fills=True, waits=False), CLUSTER, layout)
    placed = simulated_bubble(model, with_program(waits=False), CLUSTER, layout)
    assert 0 <= filled <= placed
    assert filled < 0.02 * float(simulated_times(model, JOB, CLUSTER, [layout])[0])
