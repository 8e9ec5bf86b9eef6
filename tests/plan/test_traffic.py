"""Traffic: volumes of the ZeRO paper and of tp, pp and cp by hand; launches, padding, tables."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.axes import joined_axis
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, RECOMPUTE_KINDS, Layout
from shardwright.model import Mla, ModelSpec, preset
from shardwright.plan.flow import RING_SHARE
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD, parameter_table
from shardwright.plan.splits import stage_layers
from shardwright.plan.table import table_of
from shardwright.plan.traffic import SCALAR_BYTES, merged, traffic

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
    flows = merged(
        traffic(model, Job(seq=16, global_batch=1, precision=precision), table_of(layouts, model.layers))
    )
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


# tp, cp and pp, by hand: shared FORMULAE 3.3 to 3.5, with s tokens, h hidden, bf16


S, B = 64, 2
FOUR = SPEC.model_copy(update={"layers": 4})


def split_layout(model=FOUR, **fields):
    """A layout of some axes, with what goes with them."""
    recompute, stages = fields.get("recompute", "none"), fields.get("pp", 1) * fields.get("chunks", 1)
    values = {
        "micro_batch": B,
        "schedule": "1F1B" if stages > 1 else "none",
        "stage_layers": stage_layers(model.layers, stages) if stages > 1 else (),
        "zero_stage": int(fields.get("cp", 1) * fields.get("dp_shard", 1) > 1),
        "kept": KEPT_BY_SELECTIVE if recompute == "selective" else (),
    }
    return Layout.checked(values | fields)


def payloads(model=FOUR, seq=S, **fields):
    """Payload of every flow, and launches, by axis and collective; scalars left out."""
    table = table_of([split_layout(model, **fields)], model.layers)
    flows = [f for f in traffic(model, Job(seq=seq, global_batch=1), table) if f.launches[0]]
    bulk = [f for f in flows if f.payload_bytes[0] > 3 * SCALAR_BYTES]
    return {(f.axis, f.collective): (int(f.payload_bytes[0]), int(f.launches[0])) for f in merged(bulk)}


X = 2 * S * B * 64  # one vector of the residual stream for every token
LOSS = (3 * 4 * S * B, 3)  # largest, sum and target of the logits, fp32
NORMS = 4 * 64 * (2 * 4 + 1)  # gradients of all norms, fp32, added up once a step where sp splits the stream


@accumulation
@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 0), ("full", 1)])
def test_tp_without_sp_reduces_four_times_a_layer(m, recompute, again):
    """8 u_t(X) a layer and microbatch, and one all-reduce more for full recomputation; one of the embedding,
    one of the head backward, three of the loss."""
    found = payloads(tp=4, microbatches=m, recompute=recompute)
    count = 4 * (4 + again) + 2
    assert found == {("tp", "all_reduce"): (m * (count * X + LOSS[0]), m * (count + LOSS[1]))}


@accumulation
@pytest.mark.parametrize(
    ("recompute", "gathers", "scatters"), [("none", 4, 4), ("selective", 6, 4), ("full", 6, 5)]
)
def test_sp_gathers_and_scatters(m, recompute, gathers, scatters):
    """The same 8 u_t(X) a layer: DTensor keeps what it gathered, and does not gather it again for the
    weights' gradients. Recomputation gathers both norm outputs again, in full the first scatter too."""
    found = payloads(tp=4, sp=True, microbatches=m, recompute=recompute)
    gathers, scatters = 4 * gathers + 2, 4 * scatters + 2
    assert found == {
        ("tp", "all_gather"): (m * gathers * X, m * gathers),
        ("tp", "reduce_scatter"): (m * scatters * X, m * scatters),
        ("tp", "all_reduce"): (m * LOSS[0] + NORMS, m * LOSS[1] + 1),
    }


def test_tp_of_a_7b_sends_seven_and_a_half_gigabytes_a_step():
    """s 4096, b 1, h 4096, 32 layers, tp 8: 7.516192768 GB inside the blocks."""
    model = preset("llama-2-7b")
    whole, half = (
        dict(payloads(model.model_copy(update={"layers": layers}), 4096, tp=8, micro_batch=1))
        for layers in (32, 16)
    )
    inside = 2 * (whole["tp", "all_reduce"][0] - half["tp", "all_reduce"][0])
    assert 2 * u(8, inside) == 7_516_192_768


@accumulation
@pytest.mark.parametrize(("chunks", "schedule"), [(1, "1F1B"), (2, "Interleaved1F1B"), (2, "ZBVZeroBubble")])
def test_a_stage_sends_each_microbatch_on_and_its_gradient_back(m, chunks, schedule):
    """Shared FORMULAE 3.4: 2 s b h forward and the same backward, times the stages of a rank."""
    found = payloads(pp=2, chunks=chunks, schedule=schedule, microbatches=4 * m)
    count = 4 * m * 2 * chunks
    assert found["pp", "send"] == (count * X, count)


def test_what_a_stage_sends_is_split_by_cp_and_by_sp():
    sizes = [
        payloads(pp=2, microbatches=2, **split)["pp", "send"][0]
        for split in ({}, {"tp": 2}, {"tp": 2, "sp": True}, {"cp": 4, "cp_kind": "ring"})
    ]
    assert sizes == [4 * X, 4 * X, 4 * X // 2, 4 * X // 4]


def z(cp, tp=1):
    """Keys and values of one context rank in one layer: 2 heads of size 8 or those of a tp rank."""
    return 2 * 2 * (S // cp) * B * max(4 // tp, 1) * 8


@accumulation
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_ring_passes_keys_and_values_and_their_gradients(cp, tp, m):
    """Shared FORMULAE 3.5, as zhuzilin/ring-flash-attention: (c-1) Z forward; backward (c-1) Z again and c
    times the gradients in fp32, 2 Z."""
    found = payloads(cp=cp, cp_kind="ring", tp=tp, microbatches=m)
    each = (cp - 1) * z(cp, tp) + (cp - 1) * z(cp, tp) + 2 * cp * z(cp, tp)
    assert found["cp", "send"] == (4 * m * each, 4 * m * (3 * cp - 2))


@pytest.mark.parametrize("cp", [2, 4])
def test_full_recomputation_sends_the_ring_round_once_more(cp):
    none, full = (payloads(cp=cp, cp_kind="ring", recompute=r)["cp", "send"] for r in ("none", "full"))
    assert full == (none[0] + 4 * (cp - 1) * z(cp), none[1] + 4 * (cp - 1))


@accumulation
@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 1)])
def test_keys_and_values_gathered(m, recompute, again):
    """(c-1) Z forward, again backward, and a reduce-scatter of the gradients as much: payload c Z each."""
    found = payloads(cp=4, cp_kind="all_gather", microbatches=m, recompute=recompute)
    assert found["cp", "all_gather"] == (4 * m * (2 + again) * 4 * z(4), 4 * m * (2 + again))
    assert found["cp", "reduce_scatter"] == (4 * m * 4 * z(4), 4 * m)
    table = table_of([split_layout(cp=4, cp_kind="all_gather")], 4)
    flow = next(f for f in traffic(FOUR, Job(seq=S, global_batch=1), table) if f.collective == "all_gather")
    assert flow.axis == "dp_shard+cp"  # parameters; the other flow has the keys


@accumulation
@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("full", 3)])
def test_ulysses_trades_queries_keys_values_and_the_output(m, recompute, passes):
    """u_c(2 (s/c) b (2a + 2k) d / t) in four all-to-alls, forward and backward."""
    found = payloads(cp=4, cp_kind="ulysses", tp=1, microbatches=m, recompute=recompute)
    each = 2 * (S // 4) * B * (2 * 8 + 2 * 4) * 8
    assert found["cp", "all_to_all"] == (4 * m * passes * each, 4 * m * passes * 4)
    table = table_of([split_layout(cp=4, cp_kind="ulysses")], 4)
    flow = next(f for f in traffic(FOUR, Job(seq=S, global_batch=1), table) if f.collective == "all_to_all")
    assert flow.sent_bytes[0] == u(4, 4 * 2 * each)


def test_ulysses_sends_less_than_tp_by_its_degree():
    """arXiv:2309.14509: 4 N h / P a link against 4 N h of sequence-parallel tp, for equal heads."""
    model = FOUR.model_copy(update={"kv_heads": 8})
    for degree in (2, 4, 8):
        traded = payloads(model, cp=degree, cp_kind="ulysses")["cp", "all_to_all"][0] / 4
        reduced = 8 * X
        assert traded == 2 * 4 * X / degree == reduced / degree


def test_ulysses_repeats_heads_of_keys_and_values_fewer_than_its_ranks():
    """8 ranks trade 8 heads each of queries, keys, values and output, whether the model has 8, 4 or 1."""
    models = [FOUR.model_copy(update={"kv_heads": heads}) for heads in (8, 4, 1)]
    eight, *fewer = (payloads(model, cp=8, cp_kind="ulysses")["cp", "all_to_all"] for model in models)
    assert fewer == [eight, eight]


@pytest.mark.parametrize("kind", ["ring", "all_gather", "ulysses"])
def test_narrow_values_of_latent_attention_send_less(kind):
    mla = Mla(q_rank=0, kv_rank=8, nope_size=16, rope_size=8, value_size=16)
    latent = FOUR.model_copy(update={"kv_heads": 8, "head_size": 24, "mla": mla})
    plain = FOUR.model_copy(update={"kv_heads": 8, "head_size": 24})
    narrow, wide = (payloads(model, cp=4, cp_kind=kind) for model in (latent, plain))
    assert narrow.keys() == wide.keys()
    for flow in narrow:
        if flow[0] == "cp":
            assert narrow[flow][0] * 48 == wide[flow][0] * 40


def test_parameters_are_split_over_cp_too():
    """Gathered and reduced over dp_shard and cp joined, as over dp_shard alone of the same size."""
    alone, joined = payloads(dp_shard=8), payloads(dp_shard=2, cp=4, cp_kind="ring")
    for collective in ("all_gather", "reduce_scatter"):
        assert joined["dp_shard+cp", collective] == alone["dp_shard", collective]


def test_tp_divides_what_the_data_axes_send():
    alone, split = payloads(dp_shard=2), payloads(dp_shard=2, tp=4)
    unsplit = 2 * 4 * 2 * 64 + 2 * 64  # two norms a layer and the last, gathered in bf16
    assert split["dp_shard", "all_gather"][0] - unsplit == (alone["dp_shard", "all_gather"][0] - unsplit) / 4


@few
@given(
    pp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["ring", "all_gather", "ulysses"]), sp=st.booleans(), shard=st.sampled_from([1, 2]),
)  # fmt: skip
def test_an_axis_is_in_the_traffic_exactly_if_its_degree_is_above_1(pp, cp, tp, kind, sp, shard):
    layout = split_layout(
        pp=pp,
        cp=cp,
        tp=tp,
        dp_shard=shard,
        sp=sp and tp > 1,
        cp_kind=kind if cp > 1 else "none",
        microbatches=4,
    )
    flows = merged(traffic(FOUR, Job(seq=S, global_batch=1), table_of([layout], 4)))
    found = {axis for axis, *_ in flows}
    shard_name = "dp_shard+cp" if cp > 1 else "dp_shard"
    degrees = {"pp": pp, "cp": cp, "tp": tp, shard_name: shard * cp}
    assert found == {axis for axis, degree in degrees.items() if degree > 1}
    for flow in flows:
        assert flow.degree.tolist() == [degrees[flow.axis]]
