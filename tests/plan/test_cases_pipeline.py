"""Reported pipelines: what their authors measured or were told, and what the planner says of them.

Names are those of the collection of cases; each test names the public thread.
"""

import numpy as np
import pytest

from shardwright.cluster import cluster_of
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.bubble import RankTimes, bubble_fraction, in_flight_chunks, makespan_bubble
from shardwright.plan.layer_notation import noted_layers
from shardwright.plan.pipeline import simulated_bubble
from shardwright.plan.schedule import FORWARD, build_order, why_not
from shardwright.plan.simulate import StageTimes, schedule_graph, simulate
from shardwright.plan.splits import GIVEN, ends_of, stage_layers
from shardwright.plan.stages import slowest_blocks, stages
from shardwright.plan.table import table_of

INTERLEAVED = (("Interleaved1F1B", 2), ("Interleaved1F1B", 4))

# Bubbles


@pytest.mark.parametrize(("p", "m", "percent"), [(8, 8, 47), (8, 16, 30), (4, 8, 27)])
def test_g1_bubbles_of_a_6b_model_on_eight_gpus(p, m, percent):
    """marin-community/marin#6532: 47, 30 and 27 % of the step, by formula and by running the order."""
    assert round(100 * float(bubble_fraction(p, m))) == percent
    line = simulate(schedule_graph("1F1B", p, 1, m), StageTimes(np.ones(p), 1, 1))
    assert round(100 * float(line.makespan_bubble[0] / line.makespan)) == percent


def test_g1_throughput_that_stays_when_the_bubble_falls_is_not_bound_by_it():
    """marin#6532: 8,077 tok/s at m=8, 7,987 at m=16. Bound by the bubble alone, it would be 1.30 times as
    fast; and pp=4 gave 1.50 times where its bubble explains 1.36."""
    busy = 1 - bubble_fraction(np.array([8, 8, 4]), np.array([8, 16, 8]))
    assert busy[1] / busy[0] == pytest.approx(1.304, abs=1e-3)
    assert 7_987 / 8_077 < 1 < busy[1] / busy[0]
    assert busy[2] / busy[0] == pytest.approx(1.364, abs=1e-3)
    assert busy[2] / busy[0] < 12_150 / 8_077


def test_g5_interleaving_lowers_the_bubble():
    """torchtitan's benchmarks, pp 8 and 32 microbatches: 1F1B 100 tok/s, Interleaved1F1B 128; 1F1B idles
    for 17.9 % of its step. The bubble alone explains a part of the gain, never a loss."""
    assert float(bubble_fraction(8, 32)) == pytest.approx(0.179, abs=5e-4)
    times = RankTimes(1, 1, 1)
    step = [3 * 32 + float(makespan_bubble(name, 8, v, 32, times)) for name, v in (("1F1B", 1), *INTERLEAVED)]
    assert step == sorted(step, reverse=True)
    assert all(1 < step[0] / other < 1.28 for other in step[1:])


# Orders


@pytest.mark.parametrize("m", [1, 7])
def test_d15_g11_fewer_microbatches_than_ranks_hang_1f1b(m):
    """pytorch/torchtitan#775, pytorch/pytorch#144702: pp 8 and one microbatch hangs 1F1B; GPipe works."""
    message = f"microbatches={m} of 1F1B on 8 ranks is below 8: use that many, or GPipe"
    assert why_not("1F1B", 8, 1, m) == message
    with pytest.raises(LayoutError, match=message):
        build_order("1F1B", 8, 1, m)
    assert why_not("GPipe", 8, 1, m) is None
    assert why_not("1F1B", 8, 1, 8) is None


def test_g13_forwards_before_the_first_backward_when_interleaved():
    """NVIDIA/Megatron-LM#169: (p - r - 1) 2 + (chunks - 1) p, and one of the steady state; at most all."""
    for p, v, m in ((4, 2, 8), (8, 3, 32), (2, 4, 2), (8, 2, 8)):
        order = build_order("Interleaved1F1B", p, v, m)
        for rank in range(p):
            kinds = order.kind[order.starts[rank] : order.starts[rank + 1]]
            ahead = (p - rank - 1) * 2 + (v - 1) * p
            assert np.argmax(kinds != FORWARD) == min(ahead + 1, m * v), (p, v, m, rank)


# Splits of the layers


def test_g9_an_explicit_layout_of_a_70b_model():
    """NVIDIA-NeMo/Megatron-Bridge#5391: pp 8, five chunks a rank, 80 layers. The last chunk has the loss and
    one layer; rank 3 has the layer that is left over."""
    layers = noted_layers("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL")
    assert (len(layers), sum(layers)) == (40, 80)
    layout = Layout(
        pp=8, tp=8, sp=True, schedule="Interleaved1F1B", chunks=5, stage_layers=layers, microbatches=32
    )
    model, job = preset("llama-3-70b"), Job(seq=8192, global_batch=32)
    table = table_of([layout], model.layers)
    assert table.layout(0, model.layers).stage_layers == layers
    held = {stage.name: float(stage.blocks[0]) for stage in stages(table, model)}
    assert held == {"first": 10, "second": 10, "last": 9, "middle 1": 11}
    assert slowest_blocks(table, model).tolist() == [11]
    even = layout.model_copy(update={"stage_layers": stage_layers(80, 40)})
    cluster = cluster_of("h100-sxm", 64)
    assert simulated_bubble(model, job, cluster, layout) != simulated_bubble(model, job, cluster, even)


# What is kept


def test_g3_memory_falls_from_stage_to_stage():
    """NVIDIA-NeMo/Speech#12930: DeepSeek-R1 on 80 A100, tp 8, pp 10, layers 7 and then 6 a stage. With 1F1B
    stage i keeps p - i microbatches, so what it keeps falls with every stage."""
    split = (7, *[6] * 9)
    layout = Layout(pp=10, tp=8, sp=True, schedule="1F1B", stage_layers=split, microbatches=16)
    assert ends_of(layout, 61) >= GIVEN
    held = in_flight_chunks("1F1B", 10, 1, 16, np.arange(10))
    assert held.tolist() == list(range(10, 0, -1))
    assert (np.diff(held * split) < 0).all()
    found = list(stages(table_of([layout], 61), preset("deepseek-v3")))
    kept = {stage.name: float(stage.in_flight[0] * stage.blocks[0]) for stage in found}
    assert kept == {"first": 70, "second": 54, "last": 6}
