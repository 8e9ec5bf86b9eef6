"""Products of a block: its matrices, and what tp, experts, fp8 and LoRA make of them."""

import pytest
from blocks import A100, H100, IDEAL, JOB, LLAMA, MODELS, kinds, on, rate, work

from shardwright.job import LORA_TARGETS, Job
from shardwright.model import preset
from shardwright.plan.compute import (
    block_times,
    embedding_times,
    head_times,
)
from shardwright.plan.params import BLOCK, parameter_table
from shardwright.plan.products import block_matrices, block_unit

SMALL = preset("qwen1.5-moe-a2.7b"), preset("deepseek-v2-lite"), preset("gpt-oss-20b")


@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_the_tables(name):
    """All but norms, biases, sinks and ends: outputs times inputs, and as many experts."""
    model = MODELS[name]
    for kind in kinds(model):
        tensors = block_unit(model, kind).tensors
        expected = sum(
            t.numel for t in tensors if t.role != "norm" and len(t.shape) > 1 and "bias" not in t.name
        )
        experts = model.moe.experts if model.moe else 1
        found = block_matrices(model, kind)
        assert sum(m.outputs * m.inputs * (experts if m.role == "expert" else 1) for m in found) == expected
        for matrix in found:
            if matrix.kind in ("down", "out", "mla_out"):
                assert (matrix.split, matrix.outputs) == ("inputs", model.hidden)
            elif matrix.split == "outputs":
                assert matrix.inputs in (
                    model.hidden,
                    *((model.mla.q_rank, model.mla.kv_rank) if model.mla else ()),
                )
            else:
                assert matrix.role in ("router", "shared_expert") or matrix.kind in ("query_down", "key_down")


def test_tiles_make_tp_less_efficient():
    """A Llama-3-8B block of 8192 tokens on H100: at tp 8 each FLOP takes longer, with or without sp, and by
    its products alone."""
    whole = block_times(LLAMA, JOB, H100, work())
    for by_sequence in (1, 8):
        split = block_times(LLAMA, JOB, H100, work(tp=8, by_sequence=by_sequence))
        assert 0.5 < rate(split, 1 / 8) / rate(whole, 1) < 0.95
    assert split.weight_gradients > 1.05 * whole.weight_gradients / 8


def test_key_heads_repeat_beyond_their_number():
    """8 key heads: at tp 16 a rank has one, as at tp 8."""
    ideal = on(H100, **IDEAL)
    eight, sixteen = (block_times(LLAMA, JOB, ideal, work(tp=tp)).weight_gradients for tp in (8, 16))
    key = 2 * 2 * 8192 * 4096 * 128 / H100.bf16
    assert sixteen == pytest.approx((eight - key) / 2 + key)


@pytest.mark.parametrize("model", SMALL, ids=lambda model: model.name)
def test_experts_take_the_fullest_ranks_tokens(model):
    """Imbalance counts where ranks share the experts out; a capacity wherever it is set."""
    job = Job(seq=4096, global_batch=1, expert_imbalance=1.5)
    ideal = on(H100, **IDEAL)
    one, shared = (block_times(model, job, ideal, work(4096.0, ep=ep), "experts").experts for ep in (1, 4))
    assert shared == pytest.approx(1.5 * one)
    capped = job.model_copy(update={"expert_capacity": 1.25})
    assert block_times(model, capped, ideal, work(4096.0), "experts").experts == pytest.approx(1.25 * one)


@pytest.mark.parametrize("etp", [1, 4])
def test_etp_shares_an_expert_and_tp_its_tokens(etp):
    """A quarter of the work on each of 4 ranks, either way."""
    model, ideal = preset("mixtral-8x7b"), on(H100, **IDEAL)
    one = block_times(model, JOB, ideal, work(), "experts").experts
    split = block_times(model, JOB, ideal, work(tp=4, by_sequence=4, etp=etp), "experts").experts
    assert split == pytest.approx(one / 4)


def test_many_small_experts_waste_tiles():
    """A few tokens for each of 256 experts fill a small part of a tile."""
    model = preset("deepseek-v3")
    few, many = (block_times(model, JOB, H100, work(t), "experts").experts / t for t in (512.0, 65536.0))
    assert few > 2 * many


def test_fp8_quickens_products_where_there_are_such_units():
    fp8 = JOB.model_copy(update={"precision": "fp8"})
    wide, narrow = (block_times(LLAMA, job, H100, work()) for job in (JOB, fp8))
    assert 0.5 < narrow.forward / wide.forward < 0.85
    assert narrow.attention == wide.attention
    assert narrow.weight_gradients < 0.65 * wide.weight_gradients
    assert head_times(LLAMA, fp8, H100, work()) == head_times(LLAMA, JOB, H100, work())
    for name in ("llama-3-8b", "deepseek-v2-lite"):
        model = preset(name)
        kind = next(iter(kinds(model)))
        bf16, fallen = (block_times(model, job, A100, work(), kind) for job in (JOB, fp8))
        assert fallen == bf16


def test_lora_trains_adapters_alone():
    lora = JOB.model_copy(update={"lora_rank": 16, "lora_targets": LORA_TARGETS})
    ideal = on(H100, **IDEAL)
    full, adapted = (block_times(LLAMA, job, ideal, work()) for job in (JOB, lora))
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 3]
    adapters = 2 * 8192 * 16 * sum(map(sum, shapes)) / H100.bf16
    assert adapted.weight_gradients == pytest.approx(adapters)
    assert adapted.forward - full.forward == pytest.approx(adapters)
    assert adapted.backward == pytest.approx(full.backward - full.weight_gradients + 2 * adapters)
    some = lora.model_copy(update={"lora_targets": ("query", "value")})
    few = block_times(LLAMA, some, ideal, work()).weight_gradients
    assert few == pytest.approx(2 * 8192 * 16 * (4096 + 4096 + 1024 + 4096) / H100.bf16)
    assert head_times(LLAMA, lora, H100, work())[1] < head_times(LLAMA, JOB, H100, work())[1]
    assert embedding_times(LLAMA, lora, H100, work())[1] == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_a_base_in_few_bits_is_unpacked_in_every_pass(bits):
    lora = JOB.model_copy(update={"lora_rank": 16, "lora_targets": ("query",)})
    packed = lora.model_copy(update={"base_bits": bits})
    plain, found = (block_times(LLAMA, job, H100, work(tp=2)) for job in (lora, packed))
    matrices = parameter_table(LLAMA).unit(BLOCK).numel - 2 * 4096
    bytes_ = (bits / 8 + 2) * matrices / 2
    each = bytes_ / (H100.memory_bandwidth * H100.memory_efficiency)
    assert found.forward - plain.forward == pytest.approx(each, rel=1e-6)
    assert found.backward - plain.backward == pytest.approx(each, rel=1e-6)


def test_adapters_of_fused_and_latent_matrices():
    for name, kind in (("phi-3-mini", "dense"), ("deepseek-v3", "experts"), ("gpt2-xl", "dense")):
        model = preset(name)
        targets = [(t,) for t in ("query", "value", "out", "down")]
        jobs = [JOB.model_copy(update={"lora_rank": 8, "lora_targets": t}) for t in targets]
        assert all(block_times(model, job, H100, work(), kind).weight_gradients > 0 for job in jobs)
