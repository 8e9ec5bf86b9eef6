"""The memory ledger: properties of every table, and published numbers of real models."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import device
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, RECOMPUTE_KINDS, Layout
from shardwright.model import ModelSpec, preset
from shardwright.plan.accounting import ACCOUNTINGS, state_bytes_per_parameter
from shardwright.plan.activations import ELEMENT_BYTES, block_activations
from shardwright.plan.memory import device_memory, ledgers, memory_ledger
from shardwright.plan.moments import timeline
from shardwright.plan.params import BLOCK, ROOT, parameter_table, root_only_table
from shardwright.plan.splits import stage_layers
from shardwright.plan.table import table_of
from shardwright.units import GiB

H100 = device("h100-sxm")
SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=3, hidden=64, ffn=96, heads=8, kv_heads=4, head_size=8, vocab=256
)
ADAM = 2  # moments


def layout_of(shard=1, stage=None, replicate=1, micro_batch=1, microbatches=1, recompute="none"):
    return Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        zero_stage=(0 if shard == 1 else 3) if stage is None else stage,
        micro_batch=micro_batch,
        microbatches=microbatches,
        recompute=recompute,
        kept=KEPT_BY_SELECTIVE if recompute == "selective" else (),
    )


def job_of(seq=128, **others):
    return Job(seq=seq, global_batch=1, **others)


def ledger_of(model, job, *layouts):
    return memory_ledger(model, job, H100, table_of(layouts, model.layers))


def columns(ledger):
    """Every column of a ledger, by name."""
    values = {field.name: getattr(ledger, field.name) for field in dataclasses.fields(ledger)}
    held = values.pop("at_peak")
    values |= {f"at_peak.{name}": column for name, column in held._asdict().items()}
    values |= {name: getattr(ledger, name) for name in ("allocated", "reserved", "device")}
    return {name: column for name, column in values.items() if isinstance(column, np.ndarray)}


def state(ledger):
    return ledger.parameters + ledger.gradients + ledger.optimizer


shards = st.sampled_from([1, 2, 3, 4, 8, 64])
models = st.builds(
    lambda layers, vocab, switches: SPEC.model_copy(
        update={
            "layers": layers,
            "vocab": vocab,
            **dict(zip(("tied_embeddings", "qk_norm", "qkv_bias", "mlp_bias"), switches, strict=True)),
        }
    ),
    st.integers(1, 5),
    st.sampled_from([100, 255, 256, 4096]),
    st.tuples(*[st.booleans()] * 4),
)
jobs = st.builds(
    job_of,
    seq=st.sampled_from([16, 64, 250]),
    precision=st.sampled_from(["bf16", "fp32", "fp64"]),
    optimizer=st.sampled_from(["adamw", "sgd", "sgd_momentum"]),
)
layouts = st.builds(
    lambda shard, stage, *others: layout_of(shard, stage if shard > 1 else 0, *others),
    shards,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(RECOMPUTE_KINDS),
)
few = settings(deadline=None, max_examples=10)


# Properties


@few
@given(models, jobs, st.lists(layouts, min_size=2, max_size=6))
def test_a_layout_alone_is_its_row_of_a_table(model, job, rows):
    def found(*some):
        ledger = ledger_of(model, job, *some)
        names = np.array(ledger.moments)[ledger.moment]  # the list has the moments of its own rows alone
        return columns(ledger) | {"moment": names}

    table = found(*rows)
    for row, layout in enumerate(rows):
        for name, column in found(layout).items():
            assert column.tolist() == [table[name][row]], name


@few
@given(models, jobs, layouts)
def test_the_peak_holds_the_state_and_is_a_moment_of_the_timeline(model, job, layout):
    ledger = ledger_of(model, job, layout)
    moments = timeline(model, job, table_of([layout], model.layers), ledger.stage)
    held = {name: held.total for name, valid, held in moments if valid[0]}
    assert held[ledger.moments[ledger.moment[0]]] == ledger.at_peak.total == max(held.values())
    assert min(column.min() for column in columns(ledger).values()) >= 0


@few
@given(models, jobs, layouts)
def test_more_tokens_take_more_memory(model, job, layout):
    more = layout.model_copy(update={"micro_batch": layout.micro_batch + 1})
    one, wider = ledger_of(model, job, layout, more).allocated
    (longer,) = ledger_of(model, job.model_copy(update={"seq": job.seq + 1}), layout).allocated
    assert one < min(wider, longer)


def test_recomputation_takes_less():
    rows = [layout_of(8, recompute=kind) for kind in RECOMPUTE_KINDS]
    none, selective, full = ledger_of(preset("llama-3.1-8b"), job_of(seq=8192), *rows).allocated
    assert none > selective > full


@few
@given(models, jobs, st.integers(1, 3))
def test_state_never_grows_with_dp_shard(model, job, stage):
    rows = [layout_of(shard, stage if shard > 1 else 0) for shard in range(1, 33)]
    ledger = ledger_of(model, job, *rows)
    for column in (ledger.parameters, ledger.gradients, ledger.optimizer):
        assert (np.diff(column) <= 0).all()


@few
@given(st.sampled_from([2, 4, 8]), st.integers(1, 3), jobs)
def test_shards_sum_to_the_whole(shard, stage, job):
    """Every dim 0 of the model divides by these shards, and so nothing is padding."""
    one, split = ledger_of(SPEC, job, layout_of(1), layout_of(shard, stage)).parameters
    assert shard * split == one == parameter_table(SPEC).parameters * (8 if job.precision == "fp64" else 4)
    for name in ("gradients", "optimizer"):
        one, split = getattr(ledger_of(SPEC, job, layout_of(1), layout_of(shard, stage)), name)
        assert shard * split == one


@few
@given(models, jobs, st.integers(1, 4), st.integers(1, 4))
def test_replicas_hold_what_one_holds(model, job, replicate, shard):
    """dp_replicate adds communicators and no tensor."""
    ledger = ledger_of(model, job, layout_of(shard), layout_of(shard, replicate=replicate))
    assert ledger.allocated[0] == ledger.allocated[1]
    axes = (shard > 1) + (replicate > 1)
    assert ledger.communicators[1] == H100.communicator * (axes + (axes == 2))


def test_one_rank_holds_no_communicator():
    ledger = ledger_of(SPEC, job_of(), layout_of())
    assert ledger.communicators.tolist() == [0]
    assert_reserved(ledger)
    assert ledger.device == ledger.reserved + H100.context


def assert_reserved(ledger):
    """Fragments of what is allocated, and at most all reduced gradients in a pool of their own."""
    scale, close = 1 + H100.allocator_margin, 1e-9
    assert ledger.reserved >= ledger.allocated * scale * (1 - close)
    assert ledger.reserved <= (ledger.allocated + ledger.gradients) * scale * (1 + close)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reduced_gradients_have_memory_of_their_own_on_a_gpu(stage):
    """Where the peak comes before the first reduction, all of them, by what fragments; not on a CPU."""
    model, job = preset("llama-3.1-8b"), job_of(seq=8192)
    table = table_of([layout_of(8, stage) if stage else layout_of()], model.layers)
    ledger, cpu = (memory_ledger(model, job, each, table) for each in (H100, device("cpu")))
    assert ledger.at_peak.gradients == 0
    scale = 1 + H100.allocator_margin
    assert ledger.reserved == pytest.approx((ledger.allocated + ledger.gradients) * scale)
    assert cpu.reserved == pytest.approx(cpu.allocated * (1 + device("cpu").allocator_margin))


# Published numbers


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("accounting", ["zero", "megatron", "pure_bf16"])
def test_llama_2_7b_on_8_ranks_by_stage(accounting, stage):
    """Every row of this model divides by 8: the ledger is the papers' formula times the parameters, exactly.

    A stage-0 layout keeps all on every rank, as dp_replicate.
    """
    model = preset("llama-2-7b")
    layout = layout_of(8, stage) if stage else layout_of(replicate=8)
    (found,) = state(ledger_of(model, job_of(accounting=accounting), layout))
    each = state_bytes_per_parameter(ACCOUNTINGS[accounting], ADAM, stage, 8)
    assert found == each * 6_738_415_616


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("llama-2-7b", 14), ("llama-2-13b", 26), ("llama-2-70b", 140)]
)
def test_7_13_and_70_billion_in_stage_3(name, gigabytes):
    """16 B a parameter over 8 ranks: 14, 26, 140 GB for round numbers of parameters."""
    (found,) = state(ledger_of(preset(name), job_of(accounting="zero"), layout_of(8)))
    assert found == pytest.approx(gigabytes * 1e9, rel=0.04)
    assert found == 2 * parameter_table(preset(name)).parameters


def test_7_billion_never_go_below_28_gigabytes_in_stage_1():
    """Weights and gradients are whole: 4 of 16 B stay at any world size."""
    rows = [layout_of(2**exponent, 1) for exponent in range(1, 14)]
    model = preset("llama-2-7b")
    found = state(ledger_of(model, job_of(accounting="zero"), *rows))
    assert found.min() > 4 * parameter_table(model).parameters > 26.9e9


@pytest.mark.parametrize(("optimizer", "each"), [("sgd_momentum", 12), ("sgd", 8), ("adamw", 16)])
def test_bytes_a_parameter_of_the_runtime(optimizer, each):
    """Parameter and gradient in fp32, then what the optimizer adds."""
    (found,) = state(ledger_of(SPEC, job_of(optimizer=optimizer), layout_of()))
    assert found == each * parameter_table(SPEC).parameters


def test_state_of_llama_3_1_8b_drops_14_gib_from_8_to_128_ranks():
    """pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md reports a drop of 15.0 to 15.4 GiB of
    reserved memory from 8 to 128 GPUs; the state alone, 16 B a parameter, accounts for 14.0."""
    rows = [layout_of(shard, micro_batch=2, recompute="selective") for shard in (8, 128)]
    ledger = ledger_of(preset("llama-3.1-8b"), job_of(seq=8192), *rows)
    few, many = state(ledger) / GiB
    assert (round(few, 2), round(many, 2)) == (14.96, 0.93)
    assert round(few - many, 1) == 14.0
    assert ledger.at_peak.activations[0] == ledger.at_peak.activations[1]


def test_wrapping_the_root_only_gathers_15_gib_at_once():
    """What the runtime refuses: one unit of 100 % of the parameters, against one block or the head."""
    table = parameter_table(preset("llama-3.1-8b"))
    root = root_only_table(table)
    (unit,) = root.units
    assert (unit.kind, unit.copies, unit.numel) == (ROOT, 1, table.parameters)
    assert root.parameters == table.parameters
    at_once = ELEMENT_BYTES["bf16"] * unit.numel
    largest = ELEMENT_BYTES["bf16"] * max(unit.numel for unit in table.units)
    assert round(at_once / GiB, 2) == 14.96
    assert round(largest / GiB, 2) == 0.98  # the head; a block has 0.41
    assert round(ELEMENT_BYTES["bf16"] * table.unit(BLOCK).numel / GiB, 2) == 0.41


# Pipelines, tp and context


def split_layout(model, **fields):
    """A layout of some axes, with what goes with them."""
    recompute, stages = fields.get("recompute", "none"), fields.get("pp", 1) * fields.get("chunks", 1)
    ends = fields.pop("ends", 0)
    values = {
        "schedule": "1F1B" if stages > 1 else "none",
        "stage_layers": stage_layers(model.layers, stages, ends) if stages > 1 else (),
        "zero_stage": (1 if stages > 1 else 3) if fields.get("cp", 1) * fields.get("dp_shard", 1) > 1 else 0,
        "kept": KEPT_BY_SELECTIVE if recompute == "selective" else (),
    }
    return Layout.checked(values | fields)


def ranks_of(model, job, **fields):
    """Ledgers of one layout by pipeline rank."""
    table = table_of([split_layout(model, **fields)], model.layers)
    return {ledger.stage.name: ledger for ledger in ledgers(model, job, H100, table)}


LLAMA_70B, LONG = preset("llama-3.1-70b"), job_of(seq=8192)
HALVES = {"tp": [1, 2, 4, 8], "cp": [1, 2, 4, 8]}


@pytest.mark.parametrize("recompute", RECOMPUTE_KINDS)
@pytest.mark.parametrize("axis", HALVES)
def test_more_tp_or_cp_never_takes_more_activations_or_state(axis, recompute):
    """Of any moment; at the peak itself one kind may grow, where it moves to another moment. What full
    recomputation keeps, the residuals, tp alone does not split, nor the norms around the head."""
    rows = [
        split_layout(LLAMA_70B, **{axis: n}, cp_kind="ring" if axis == "cp" and n > 1 else "none",
                     recompute=recompute)
        for n in HALVES[axis]
    ]  # fmt: skip
    ledger = ledger_of(LLAMA_70B, LONG, *rows)
    table = table_of(rows, LLAMA_70B.layers)
    held = [held for _, _, held in timeline(LLAMA_70B, LONG, table, ledger.stage)]
    activations, logits = (
        np.max([getattr(h, kind) for h in held], axis=0) for kind in ("activations", "logits")
    )
    for column in (activations, logits, state(ledger), ledger.allocated):
        assert (np.diff(column) <= 0).all()
        assert column[-1] < column[0] or (axis, recompute, column is activations) == ("tp", "full", True)


@few
@given(
    models,
    jobs,
    st.sampled_from([{"tp": 2}, {"tp": 4}, {"cp": 2, "cp_kind": "ring"}, {"cp": 2, "cp_kind": "ulysses"},
                     {"pp": 2, "microbatches": 4}, {"pp": 4, "microbatches": 4, "schedule": "GPipe"}]),
)  # fmt: skip
def test_every_rank_of_every_axis_adds_up(model, job, fields):
    """Peak, margin, communicators and context of each rank that can be the heaviest; and the table's sum."""
    layers = max(model.layers, fields.get("pp", 1))
    model = model.model_copy(update={"layers": layers, "tied_embeddings": "pp" not in fields})
    found = ranks_of(model, job, **fields)
    expected = {1: {"only"}, 2: {"first", "last"}, 4: {"first", "second", "last"}}
    assert set(found) == expected[fields.get("pp", 1)]
    for ledger in found.values():
        held = ledger.parameters + ledger.optimizer + ledger.at_peak.total
        assert ledger.allocated == held
        assert_reserved(ledger)
        assert ledger.device == ledger.reserved + ledger.communicators + H100.context
    table = table_of([split_layout(model, **fields)], model.layers)
    heaviest = max(float(ledger.device[0]) for ledger in found.values())
    assert device_memory(model, job, H100, table)[0] == pytest.approx(heaviest, rel=1e-12)


def test_stages_hold_the_layers_and_ends_they_run():
    """Parameters of all ranks of a pipeline add up to the model's."""
    found = ranks_of(LLAMA_70B, LONG, pp=8, microbatches=8)
    unit = {unit.kind: unit.numel for unit in parameter_table(LLAMA_70B).units}
    assert found["first"].parameters == 4 * (10 * unit[BLOCK] + unit["embedding"])
    assert found["second"].parameters == 4 * 10 * unit[BLOCK]
    assert found["last"].parameters == 4 * (10 * unit[BLOCK] + unit["head"])
    whole = found["first"].parameters + 6 * found["second"].parameters + found["last"].parameters
    assert whole == 4 * parameter_table(LLAMA_70B).parameters


def test_the_first_stage_of_a_70b_is_the_heaviest():
    """It has the embedding and as many microbatches in flight as there are stages; the last has one."""
    found = ranks_of(LLAMA_70B, LONG, pp=8, tp=8, microbatches=64)
    first, second, last = (float(found[name].device[0]) for name in ("first", "second", "last"))
    assert first > second > last
    assert [found[name].stage.in_flight.tolist() for name in found] == [[8], [7], [1]]
    table = table_of([split_layout(LLAMA_70B, pp=8, tp=8, microbatches=64)], 80)
    assert memory_ledger(LLAMA_70B, LONG, H100, table).stage.name == "first"


def test_lighter_ends_relieve_the_first_stage():
    even, lighter = (
        ranks_of(LLAMA_70B, LONG, pp=8, tp=8, microbatches=64, ends=ends)["first"].allocated
        for ends in (0, 1)
    )
    assert lighter < even


@pytest.mark.parametrize("m", [1, 4, 8, 32])
def test_a_pipeline_holds_min_of_microbatches_and_stages(m):
    """1F1B, shared FORMULAE 2.6: each further microbatch in flight is what a stage saves, and its output.
    Where there are no more microbatches than that, a step peaks one later, when the first has left gradients.
    """
    found = ranks_of(LLAMA_70B, LONG, pp=8, microbatches=m)["first"]
    one = ranks_of(LLAMA_70B, LONG, pp=8, microbatches=1)["first"]
    saved = block_activations(LLAMA_70B, LONG, "none").saved_bytes
    at_peak = min(m, 8) - (1 < m <= 8)
    more = (at_peak - 1) * 8192 * (10 * saved + 2 * LLAMA_70B.hidden)
    ids = (m - 1) * 16 * 8192  # and the ids of every microbatch
    running_loss = 16 if m > 1 else 0
    grown = found.at_peak.activations - one.at_peak.activations
    assert abs(grown - more - ids) <= running_loss + 8192 * 10 * saved  # the peak may move by a moment
    assert found.stage.in_flight == min(m, 8)


def test_interleaving_holds_more_than_one_chunk_a_rank():
    one, three = (
        ranks_of(LLAMA_70B, LONG, pp=8, microbatches=64, **more)["first"]
        for more in ({}, {"chunks": 2, "schedule": "Interleaved1F1B"})
    )
    assert three.stage.in_flight == 8 * (1 + 7 / 16)
    assert three.at_peak.activations > 1.4 * one.at_peak.activations


def test_gpipe_holds_every_microbatch():
    """All at first; at the peak all but one, whose gradients weigh more than its activations."""
    few, many = (ranks_of(LLAMA_70B, LONG, pp=8, schedule="GPipe", microbatches=m)["last"] for m in (8, 64))
    assert (few.stage.in_flight, many.stage.in_flight) == (8, 64)
    assert many.at_peak.activations == pytest.approx(63 / 7 * few.at_peak.activations, rel=0.01)
    assert many.at_peak.logits == 63 / 7 * few.at_peak.logits


def test_sp_splits_residuals_and_keeps_norm_outputs_whole():
    """Of a layer at rest: 4h of residuals to tp, 4h of norm outputs stay; shared FORMULAE 2.2, DTensor."""
    whole, split = (
        ranks_of(LLAMA_70B, LONG, tp=8, sp=sp)["only"].at_peak.activations[0] for sp in (False, True)
    )
    saved = 80 * 8192 * (4 * LLAMA_70B.hidden + 8) * 7 / 8
    assert whole - split == pytest.approx(saved, rel=0.02)


def test_context_ranks_share_the_sequence():
    job = job_of(seq=131072)
    layouts = [
        split_layout(LLAMA_70B, recompute="full", cp=n, cp_kind=kind)
        for n, kind in ((1, "none"), (8, "ring"))
    ]
    table = table_of(layouts, LLAMA_70B.layers)
    stage = ledger_of(LLAMA_70B, job, *layouts).stage
    held = [held for _, _, held in timeline(LLAMA_70B, job, table, stage)]
    one, eight = np.max([h.activations for h in held], axis=0)
    assert eight == pytest.approx(one / 8, rel=0.05)
    one, eight = np.max([h.logits for h in held], axis=0)
    assert eight == one / 8


def test_tp_leaves_norms_whole_in_the_state():
    one, eight = (ranks_of(LLAMA_70B, LONG, tp=tp)["only"].parameters[0] / 4 for tp in (1, 8))
    norms = (80 * 2 + 1) * LLAMA_70B.hidden
    assert eight - norms == (one - norms) / 8


def test_each_axis_of_several_ranks_has_a_communicator():
    fields = {
        "pp": 2,
        "dp_replicate": 2,
        "dp_shard": 2,
        "cp": 2,
        "cp_kind": "ring",
        "tp": 2,
        "microbatches": 2,
    }
    ledger = ranks_of(LLAMA_70B, LONG, **fields)["first"]
    assert ledger.communicators == 6 * H100.communicator  # and the data axes joined


@pytest.mark.parametrize(
    ("layers", "h", "p", "gigabytes"),
    [
        (48, 6144, 1, 45.5625),
        (96, 12288, 8, 45.5625),
        (105, 20480, 35, 31.640625),
        (128, 25600, 64, 32.958984375),
    ],
)
def test_parameters_and_optimizer_of_four_gpts(layers, h, p, gigabytes):
    """18 B of Megatron's accounting on 12 L h^2 / (tp 8 x pp); arXiv:2205.05198, figure 1, as
    calculon-ai/calculon validation.py prints them for 22B, 175B, 530B and 1T."""
    each = state_bytes_per_parameter(ACCOUNTINGS["megatron"], ADAM, 0, 1)
    assert each == 18
    assert each * 12 * layers * h**2 / (8 * p) == gigabytes * GiB
