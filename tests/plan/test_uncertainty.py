"""Intervals and ties of predicted step times."""

from math import exp

import pytest

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.plan.uncertainty import BETWEEN_NODES, interval_of, settled_by, tied, within_job
from shardwright.program import known_program

JOB = Job(seq=4096, global_batch=64)


def test_interval_is_of_the_nearest_kind_of_run():
    job = JOB.model_copy(update={"program": known_program("megatron-core").program()})
    near = interval_of(job, cluster_of("h100-sxm", 64, 8))
    assert near.kind == "megatron-core on h100-sxm-80gb"
    assert near.low < 1 < near.high
    other = interval_of(job, cluster_of("mi300x", 64, 8))
    assert other.kind == "megatron-core"
    assert other.rows > near.rows


def test_own_runtime_stands_near_torchtitan():
    found = interval_of(JOB, cluster_of("h100-sxm-96gb-hbm2e-500w", 64, 8))
    assert found.kind == "torchtitan on h100-sxm-96gb-hbm2e-500w"


def test_a_program_that_nobody_published_has_the_interval_of_all():
    job = JOB.model_copy(update={"program": JOB.program.model_copy(update={"name": "new"})})
    assert interval_of(job, cluster_of("h100-sxm", 64, 8)).kind == "all published runs"


def test_layouts_closer_than_errors_of_one_job_are_tied():
    edge = exp(within_job())
    assert tied([1.0, 0.999 * edge, 1.001 * edge]) == 2
    assert tied([1.0]) == 1


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"compute": 2.0, "tp": 0.1}, {"compute": 1.0, "tp": 0.2}, "matrix products"),
        ({"compute": 1.0, "tp": 0.9}, {"compute": 1.0}, "links inside a node"),
        ({"dp_shard": 1.0}, {}, BETWEEN_NODES),
    ],
)
def test_what_settles_a_tie_is_where_the_layouts_differ_most(one, other, words):
    assert words in settled_by(one, other)
