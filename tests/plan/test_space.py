"""The space of a job: every layout that keeps the rules, once, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import CONTEXT_KINDS, SCHEDULE_NAMES, faults, model_faults
from shardwright.model import ModelSpec, preset
from shardwright.plan.space import divisors, search_space

SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=5, hidden=64, ffn=96, heads=4, kv_heads=2, head_size=16, vocab=259
)
WHOLE = SPEC.model_copy(update={"heads": 1, "kv_heads": 1, "head_size": 64, "layers": 1})
"""With sequences of odd length, a model that only its data can split."""


@given(number=st.integers(1, 5000))
def test_divisors(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_the_table_has_every_stage_microbatch_and_recomputation():
    table = search_space(WHOLE, Job(seq=61, global_batch=16), 4)
    # dp_shard 1 with stage 0, dp_shard 2 and 4 with three stages; microbatches of 1, 2, 4; three kinds
    assert table.rows == (1 + 3 + 3) * 3 * 3
    assert (table.dp == 4).all()
    assert (table.dp * table.micro_batch * table.microbatches == 16).all()


@settings(deadline=None, max_examples=15)
@given(
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    batch=st.sampled_from([4, 6, 12]),
    layers=st.integers(1, 9),
    tied=st.booleans(),
)
def test_every_row_keeps_the_rules_and_stands_once(ranks, batch, layers, tied):
    model = SPEC.model_copy(update={"layers": layers, "tied_embeddings": tied})
    job, cluster = Job(seq=64, global_batch=batch), cluster_of("h100-sxm", ranks)
    table = search_space(model, job, ranks)
    found = [table.layout(row, layers) for row in range(table.rows)]
    assert len(set(found)) == table.rows
    for layout in found:
        broken = {fault.code for fault in faults(layout, job, cluster) + model_faults(layout, model, job)}
        assert broken <= {"global_batch", "fewer_samples_than_ranks"}
        assert ranks % layout.ranks == 0


def test_narrow_columns_are_widened_for_formulas():
    table = search_space(SPEC, Job(seq=64, global_batch=8), 4)
    assert {column.dtype for column in table.wide()} == {np.dtype(np.int64)}
    assert all((a == b).all() for a, b in zip(table, table.wide(), strict=True))


def test_each_axis_schedule_and_kind_is_there():
    """DualPipe holds each parameter twice, DualPipeV does the same on half the ranks: it is left out."""
    table = search_space(preset("llama-3.1-70b"), Job(seq=8192, global_batch=1024), 64)
    assert set(np.unique(table.tp).tolist()) == {1, 2, 4, 8, 16, 32, 64}
    assert set(np.unique(table.cp).tolist()) == {1, 2, 4, 8, 16, 32, 64}
    assert set(np.unique(table.pp).tolist()) == {1, 2, 4, 8, 16, 32, 64}
    assert {SCHEDULE_NAMES[code] for code in np.unique(table.schedule)} == set(SCHEDULE_NAMES) - {"DualPipe"}
    assert {CONTEXT_KINDS[code] for code in np.unique(table.cp_kind)} == set(CONTEXT_KINDS)
    assert set(np.unique(table.ends).tolist()) == {0, 1}
    assert (table.zero_stage[table.pp > 1] <= 1).all()


@pytest.mark.parametrize(("heads", "kv_heads", "degrees"), [(28, 4, {1, 2, 4, 28}), (4, 2, {1, 2, 4})])
def test_degrees_of_tp_follow_the_heads(heads, kv_heads, degrees):
    model = SPEC.model_copy(update={"heads": heads, "kv_heads": kv_heads, "ffn": 28 * 64})
    table = search_space(model, Job(seq=64, global_batch=56), 56)
    assert set(np.unique(table.tp).tolist()) == degrees


def test_the_405b_on_16384_ranks_has_more_than_a_million_layouts():
    table = search_space(preset("llama-3.1-405b"), Job(seq=8192, global_batch=2048), 16_384)
    assert table.rows >= 1_000_000
