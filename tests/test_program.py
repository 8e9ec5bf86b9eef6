"""Programs: files, options, and what they change in a step."""

import numpy as np
import pytest

from shardwright.cluster import cluster_of, device
from shardwright.errors import JobError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.step import step_time
from shardwright.plan.table import table_of
from shardwright.program import Program, known_program, known_programs

MODEL, CLUSTER = preset("llama-3.1-8b"), cluster_of("h100-sxm", 16, 8)
LAYOUT = Layout(dp_shard=8, tp=2, sp=True, zero_stage=1, micro_batch=1, microbatches=4)


def time(**changes):
    job = Job(seq=4096, global_batch=32, program=Program(**changes))
    return float(np.ravel(step_time(MODEL, job, CLUSTER, table_of([LAYOUT], MODEL.layers)).time)[0])


@pytest.mark.parametrize("known", known_programs(), ids=lambda known: known.name)
def test_every_file_makes_programs(known):
    assert known.program().name == known.program(fitted=False).name == known.name
    for word in known.variants:
        changed = known.program(word, fitted=False)
        assert all(getattr(changed, name) == value for name, value in known.variants[word].items())
    assert set(known.fitted_variants) <= set(known.variants)


def test_an_unknown_program_names_the_nearest():
    with pytest.raises(JobError, match=r"program 'megatron' is unknown \(did you mean 'megatron-"):
        known_program("megatron")


@pytest.mark.parametrize(
    "faster",
    [
        {"attention_rate": 2.0},
        {"light_traffic": 0.5},
        {"launches": 0.0},
        {"tp_exposed": 0.2},
        {"copies": False},
    ],
)
def test_each_difference_makes_a_step_faster(faster):
    assert time(**faster) < time()


@pytest.mark.parametrize(
    "slower",
    [
        {"attention": "scores"},
        {"newer_rate": 0.5},
        {"light_traffic": 2.0},
        {"data_hidden": 0.0},
        {"data_bandwidth": 0.1},
    ],
)
def test_each_difference_makes_a_step_slower(slower):
    assert time(**slower) > time()


def test_a_fit_replaces_constants_and_scales_links_once():
    plain, fitted = device("h100-sxm"), device("h100-sxm", fitted=True)
    assert plain.fit is not None
    assert fitted.matmul_efficiency == plain.fit.matmul_efficiency
    assert fitted.intra_link.bandwidth == pytest.approx(plain.intra_link.bandwidth * plain.fit.intra)
    assert fitted.fitted == fitted


def test_programs_of_earlier_plans_are_read():
    """They said whether hops block."""
    values = Program().model_dump() | {"hops_block": False}
    assert Program.checked(values) == Program()
    with pytest.raises(JobError, match="hops_blocked"):
        Program.checked({"hops_blocked": True})
