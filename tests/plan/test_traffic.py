"""Traffic of the data axes: volumes of the ZeRO paper, launches, padding, and properties of every table."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.axes import joined_axis
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, RECOMPUTE_KINDS, Layout
from shardwright.model import ModelSpec, preset
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD, parameter_table
from shardwright.plan.table import table_of
from shardwright.plan.traffic import RING_SHARE, SCALAR_BYTES, merged, traffic

SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=3, hidden=64, ffn=96, heads=8, kv_heads=4, head_size=8, vocab=256
)
"""Dim 0 of every tensor divides by 8: nothing is padding."""

TIED = SPEC.model_copy(update={"tied_embeddings": True})
UNEVEN = SPEC.model_copy(update={"vocab": 257, "ffn": 97, "hidden": 33, "mlp_bias": True})
BOTH = joined_axis(("dp_replicate", "dp_shard"))

PSI = parameter_table(SPEC).parameters
BLOCKS = 3 * parameter_table(SPEC).unit(BLOCK).numel
UNITS = 5
SHARD_SCALARS = 3 * SCALAR_BYTES  # token count, loss, squared norm
REPLICA_SCALARS = 2 * SCALAR_BYTES


def layout_of(shard=1, stage=None, replicate=1, microbatches=1, recompute="none"):
    return Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        zero_stage=(0 if shard == 1 else 3) if stage is None else stage,
        microbatches=microbatches,
        recompute=recompute,
        kept=KEPT_BY_SELECTIVE if recompute == "selective" else (),
    )


def flows_of(model, *layouts, precision="bf16"):
    """Flows of a step by axis and collective."""
    flows = merged(traffic(model, Job(seq=16, global_batch=1, precision=precision), table_of(layouts, model.layers)))
    return {(flow.axis, flow.collective): flow for flow in flows}


def sent(model, *layouts, precision="bf16"):
    """What a rank sends in a ring [B], of the first layout."""
    flows = flows_of(model, *layouts, precision=precision)
    return {key: float(flow.sent_bytes[0]) for key, flow in flows.items()}


def launches(model, *layouts):
    return {key: int(flow.launches[0]) for key, flow in flows_of(model, *layouts).items()}


def u(degree, volume):
    """What one of ``degree`` ranks sends of a volume in a ring."""
    return volume * (degree - 1) / degree


few = settings(deadline=None, max_examples=50)
accumulation = pytest.mark.parametrize("m", [1, 4])


# Volumes: arXiv:1910.02054, section 7, with gradients reduced in fp32 and parameters gathered in bf16


@accumulation
def test_replicas_sum_gradients_once(m):
    found = sent(SPEC, layout_of(replicate=8, microbatches=m))
    assert found == {("dp_replicate", "all_reduce"): 2 * u(8, 4 * PSI + REPLICA_SCALARS)}


@accumulation
def test_stage_1_gathers_and_reduces_once(m):
    assert sent(SPEC, layout_of(8, 1, microbatches=m)) == {
        ("dp_shard", "all_gather"): u(8, 2 * PSI),
        ("dp_shard", "reduce_scatter"): u(8, 4 * PSI),
        ("dp_shard", "all_reduce"): 2 * u(8, SHARD_SCALARS),
    }


@accumulation
def test_stage_2_reduces_every_microbatch(m):
    assert sent(SPEC, layout_of(8, 2, microbatches=m)) == {
        ("dp_shard", "all_gather"): u(8, 2 * PSI),
        ("dp_shard", "reduce_scatter"): m * u(8, 4 * PSI),
        ("dp_shard", "all_reduce"): 2 * u(8, SHARD_SCALARS),
    }


@accumulation
def test_stage_3_gathers_blocks_twice_and_the_ends_once_a_microbatch(m):
    """The paper's 3 volumes to 2, less a second gather of embedding and head."""
    found = sent(SPEC, layout_of(8, 3, microbatches=m))
    assert found == {
        ("dp_shard", "all_gather"): m * u(8, 2 * (2 * BLOCKS + (PSI - BLOCKS))),
        ("dp_shard", "reduce_scatter"): m * u(8, 4 * PSI),
        ("dp_shard", "all_reduce"): 2 * u(8, SHARD_SCALARS),
    }
    assert found["dp_shard", "all_gather"] < m * 2 * u(8, 2 * PSI)


@accumulation
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_of_shards_sum_what_one_shard_holds(stage, m):
    """HSDP: dp_shard as without replicas, then one all-reduce of the shard a step."""
    alone, found = (sent(SPEC, layout_of(4, stage, r, m)) for r in (1, 2))
    for collective in ("all_gather", "reduce_scatter"):
        assert found["dp_shard", collective] == alone["dp_shard", collective]
    assert found["dp_replicate", "all_reduce"] == 2 * u(2, 4 * PSI / 4)
    assert found["dp_shard", "all_reduce"] == 2 * u(4, SCALAR_BYTES)  # the squared norm: replicas agree on it
    assert found[BOTH, "all_reduce"] == 2 * u(8, 2 * SCALAR_BYTES)  # token count and loss


@pytest.mark.parametrize(("precision", "gather", "reduce"), [("bf16", 2, 4), ("fp32", 4, 4), ("fp64", 8, 8)])
def test_bytes_of_a_parameter_by_precision(precision, gather, reduce):
    found = sent(SPEC, layout_of(8, 1), precision=precision)
    assert found["dp_shard", "all_gather"] == u(8, gather * PSI)
    assert found["dp_shard", "reduce_scatter"] == u(8, reduce * PSI)


def test_llama_3_1_8b_on_64_ranks():
    """A step of one microbatch in stage 3: 30 GB gathered, 32 GB reduced."""
    model = preset("llama-3.1-8b")
    table = parameter_table(model)
    psi, blocks = 8_030_261_248, 32 * 218_112_000
    assert (table.parameters, 32 * table.unit(BLOCK).numel) == (psi, blocks)
    found = flows_of(model, layout_of(64, 3))
    assert found["dp_shard", "all_gather"].payload_bytes.tolist() == [2 * (psi + blocks)]
    assert found["dp_shard", "reduce_scatter"].payload_bytes.tolist() == [4 * psi]


# Launches


@accumulation
@pytest.mark.parametrize(
    ("stage", "gathers", "reductions"),
    [(1, lambda m: UNITS, lambda m: UNITS), (2, lambda m: UNITS, lambda m: m * UNITS),
     (3, lambda m: m * (2 * 3 + 2), lambda m: m * UNITS)],
)  # fmt: skip
def test_launches_by_stage(stage, gathers, reductions, m):
    assert launches(SPEC, layout_of(8, stage, microbatches=m)) == {
        ("dp_shard", "all_gather"): gathers(m),
        ("dp_shard", "reduce_scatter"): reductions(m),
        ("dp_shard", "all_reduce"): 3,
    }


def test_launches_of_replicas():
    assert launches(SPEC, layout_of(replicate=4, microbatches=3)) == {
        ("dp_replicate", "all_reduce"): UNITS + 2
    }
    assert launches(SPEC, layout_of(4, 3, 2))["dp_replicate", "all_reduce"] == UNITS


def test_tied_embeddings_are_one_unit_with_the_head():
    found = launches(TIED, layout_of(8, 3, microbatches=2))
    assert found["dp_shard", "all_gather"] == 2 * (2 * 3 + 1)
    assert found["dp_shard", "reduce_scatter"] == 2 * 4
    psi = parameter_table(TIED).parameters
    assert sent(TIED, layout_of(8, 1))["dp_shard", "reduce_scatter"] == u(8, 4 * psi)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_recomputation_sends_nothing_more(stage):
    """It happens inside the FSDP unit, whose parameters its backward pass has gathered."""
    rows = [layout_of(8, stage, recompute=kind) for kind in RECOMPUTE_KINDS]
    for flow in flows_of(SPEC, *rows).values():
        assert len(set(flow.payload_bytes)) == len(set(flow.launches)) == 1


# Padding


@few
@given(shard=st.integers(2, 70), stage=st.integers(1, 3), m=st.integers(1, 3))
def test_payload_is_the_padded_size(shard, stage, m):
    """Each tensor's rows are rounded up to a multiple of the shards, and a replica sums one rank's part."""
    padded = dict.fromkeys((EMBEDDING, BLOCK, HEAD), 0)
    table = parameter_table(UNEVEN)
    for unit in table.units:
        for tensor in unit.tensors:
            rows, width = tensor.shape[0], math.prod(tensor.shape[1:])
            padded[unit.kind] += unit.copies * math.ceil(rows / shard) * shard * width
    whole = sum(padded.values())
    assert whole >= table.parameters
    found = {
        key: int(flow.payload_bytes[0])
        for key, flow in flows_of(UNEVEN, layout_of(shard, stage, 2, m)).items()
    }
    gathered = m * (whole + padded[BLOCK]) if stage == 3 else whole
    assert found["dp_shard", "all_gather"] == 2 * gathered
    assert found["dp_shard", "reduce_scatter"] == 4 * whole * (m if stage >= 2 else 1)
    assert found["dp_replicate", "all_reduce"] == 4 * whole // shard


# Properties


models = st.sampled_from([SPEC, TIED, UNEVEN])
layouts = st.builds(
    lambda shard, stage, replicate, m: layout_of(shard, stage if shard > 1 else 0, replicate, m),
    st.integers(1, 70),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
)


@few
@given(models, st.integers(1, 4), st.sampled_from(RECOMPUTE_KINDS))
def test_one_rank_sends_nothing(model, m, recompute):
    assert flows_of(model, layout_of(microbatches=m, recompute=recompute)) == {}


@few
@given(models, layouts)
def test_an_axis_of_degree_1_sends_nothing(model, layout):
    degrees = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard}
    degrees[BOTH] = layout.dp if min(degrees.values()) > 1 else 1
    found = flows_of(model, layout)
    assert {axis for axis, _ in found} == {axis for axis, degree in degrees.items() if degree > 1}
    for (axis, collective), flow in found.items():
        assert flow.degree.tolist() == [degrees[axis]]
        assert 0 < flow.sent_bytes[0] < RING_SHARE[collective] * flow.payload_bytes[0]


@few
@given(models, st.lists(layouts, min_size=2, max_size=8))
def test_a_layout_alone_is_its_row_of_a_table(model, rows):
    table = flows_of(model, *rows)
    for row, layout in enumerate(rows):
        alone = flows_of(model, layout)
        for key, flow in table.items():
            if flow.launches[row]:
                assert [column[row] for column in flow[2:]] == [column[0] for column in alone.pop(key)[2:]]
            else:
                assert flow.payload_bytes[row] == 0
        assert alone == {}


@few
@given(models, layouts)
def test_traffic_never_falls_with_more_microbatches(model, layout):
    rows = [layout.model_copy(update={"microbatches": m}) for m in range(1, 5)]
    for flow in flows_of(model, *rows).values():
        assert (np.diff(flow.payload_bytes) >= 0).all()
        assert (np.diff(flow.launches) >= 0).all()
