"""FLOPs and times of a step's parts: published counts, and the sums they must add up to."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import device
from shardwright.job import Job
from shardwright.model import ModelSpec, preset
from shardwright.plan.compute import (
    BACKWARD_ATTENTION,
    block_times,
    embedding_times,
    head_times,
    model_flops_per_token,
    optimizer_time_per_parameter,
)
from shardwright.plan.params import BLOCK, parameter_table

LLAMA = preset("llama-3-8b")
H100 = device("h100-sxm")
JOB = Job(seq=8192, global_batch=8)
IDEAL = H100.model_copy(
    update={
        "matmul_efficiency": 1.0,
        "attention_efficiency": 1.0,
        "memory_efficiency": 1.0,
        "memory_bandwidth": 1e30,
    }
)
"""Memory takes no time, and products run at the peak."""


def test_flops_of_llama_3_8b():
    # torchtitan docs/performance.md: 33.7 % and 39.0 % of 989 TFLOP/s at 5,762 and 6,667 tokens/s
    per_token = model_flops_per_token(LLAMA, 8192)
    assert per_token == 57_914_449_920
    assert 5762 * per_token / 989e12 == pytest.approx(0.337, abs=5e-4)
    assert 6667 * per_token / 989e12 == pytest.approx(0.390, abs=5e-4)


def test_causal_count_halves_attention_alone():
    full, causal = (model_flops_per_token(LLAMA, 8192, causal=causal) for causal in (False, True))
    assert causal == pytest.approx(51.47e9, rel=1e-4)
    assert full - causal == 6 * 32 * 4096 * 8192


def test_tied_embeddings_are_counted_once_as_the_head():
    tied = LLAMA.model_copy(update={"tied_embeddings": True})
    assert model_flops_per_token(tied, 8192) == model_flops_per_token(LLAMA, 8192)


@settings(deadline=None, max_examples=30)
@given(
    layers=st.integers(1, 8),
    heads=st.integers(1, 8),
    shared=st.integers(1, 4),
    ffn=st.integers(1, 512),
    seq=st.integers(1, 4096),
    tied=st.booleans(),
)
def test_the_ideal_device_takes_the_models_flops_over_its_peak(layers, heads, shared, ffn, seq, tied):
    """At the peak, forward and backward of all parts are the causal count."""
    model = ModelSpec(
        name="x",
        model_type="llama",
        layers=layers,
        hidden=32,
        ffn=ffn,
        heads=heads * shared,
        kv_heads=heads,
        head_size=16,
        vocab=512,
        tied_embeddings=tied,
    )
    job = Job(seq=seq, global_batch=1)
    block, head = block_times(model, job, IDEAL), head_times(model, job, IDEAL)
    took = (layers * (block.forward + block.backward) + sum(head)) * IDEAL.bf16
    norms = parameter_table(model).parameters - sum(
        unit.copies * tensor.numel
        for unit in parameter_table(model).units
        for tensor in unit.tensors
        if len(tensor.shape) == 2
    )
    attention = 2 * layers * model.heads * model.head_size * seq  # forward, the masked half left out
    expected = model_flops_per_token(model, seq, causal=True) - 6 * norms
    assert took == pytest.approx(expected + (BACKWARD_ATTENTION - 2) * attention, rel=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("name", ["h100-sxm", "cpu"])
def test_parts_of_a_block(name, precision):
    job = JOB.model_copy(update={"precision": precision})
    found = block_times(LLAMA, job, device(name))
    assert 0 < found.recompute_selective < found.recompute_full < found.forward < found.backward


def test_full_recomputation_leaves_out_the_last_product():
    found = block_times(LLAMA, JOB, H100)
    down = 2 * 4096 * 14336 / (H100.bf16 * H100.matmul_efficiency)
    assert found.forward - found.recompute_full == pytest.approx(down)


def test_products_dominate_an_8b_block_and_are_where_expected():
    matrices = parameter_table(LLAMA).unit(BLOCK).numel - 2 * 4096
    assert 2 * matrices / H100.bf16 < block_times(LLAMA, JOB, H100).forward < 2 * 2 * matrices / H100.bf16


def test_memory_bound_parts_follow_the_memory():
    faster = H100.model_copy(update={"memory_bandwidth": 2 * H100.memory_bandwidth})
    for time in (
        lambda d: block_times(LLAMA, JOB, d).recompute_selective,
        lambda d: sum(embedding_times(LLAMA, JOB, d)),
        lambda d: optimizer_time_per_parameter(JOB, d),
    ):
        assert time(H100) == pytest.approx(2 * time(faster))


def test_an_optimizer_step_moves_32_bytes_a_parameter_and_twice_that_in_fp64():
    seconds = optimizer_time_per_parameter(JOB, H100)
    assert seconds * H100.memory_bandwidth * H100.memory_efficiency == pytest.approx(8 * 4)
    wide = optimizer_time_per_parameter(JOB.model_copy(update={"precision": "fp64"}), H100)
    assert wide == pytest.approx(2 * seconds)
