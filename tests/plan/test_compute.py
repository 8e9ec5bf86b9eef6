"""FLOPs and times of a step's parts: published counts, and the sums they must add up to, for every family."""

import numpy as np
import pytest
from blocks import A100, CPU, H100, IDEAL, JOB, LLAMA, MODELS, kinds, on, work
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import device
from shardwright.families import FAMILIES
from shardwright.job import Job
from shardwright.model import ModelSpec, preset, preset_names
from shardwright.plan.attention import BACKWARD_ATTENTION, attended_lengths, head_sizes
from shardwright.plan.compute import (
    BlockTimes,
    Work,
    block_times,
    embedding_times,
    head_times,
    model_flops_per_token,
    needed_flops_per_token,
    optimizer_time_per_parameter,
)
from shardwright.plan.counts import active_parameters
from shardwright.plan.params import BLOCK, parameter_table
from shardwright.program import Program


def tokens_per_second(tflops_per_s, model, seq, convention):
    return tflops_per_s * 1e12 / model_flops_per_token(model, seq, convention=convention)


# FLOPs


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


def test_megatron_counts_matrices_and_half_of_attention():
    """Megatron-LM training.py: 6 for each parameter of a matrix and of the head, 6 L a d s."""
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    expected = 6 * (32 * layer + 4096 * 128256) + 6 * 32 * 4096 * 8192
    assert model_flops_per_token(LLAMA, 8192, convention="megatron") == expected


def gpt(layers, hidden, heads, vocab=51200):
    return ModelSpec(
        name="gpt", model_type="gpt2", layers=layers, hidden=hidden, ffn=4 * hidden, heads=heads,
        kv_heads=heads, head_size=hidden // heads, vocab=vocab, tied_embeddings=True, qkv_bias=True,
        out_bias=True, mlp_bias=True, activation="gelu", gated_mlp=False, norm="layer", norm_bias=True,
        positions="learned",
    )  # fmt: skip


GPT = {"22B": (48, 6144, 64), "175B": (96, 12288, 96), "530B": (105, 20480, 128), "1T": (128, 25600, 160)}


@pytest.mark.parametrize("name", GPT)
def test_closed_forms_of_gpt(name):
    """Korthikanti et al. 2022 and Narayanan et al. 2021, per token: 72 L h^2 (1 + s/(3h) + V/(12hL)) and
    96 L h^2 (1 + s/(6h) + V/(16hL))."""
    layers, h, heads = GPT[name]
    s, V = 2048, 51200
    model = gpt(layers, h, heads)
    selective = 72 * layers * h**2 * (1 + s / (3 * h) + V / (12 * h * layers))
    full = 96 * layers * h**2 * (1 + s / (6 * h) + V / (16 * h * layers))
    assert model_flops_per_token(model, s, convention="korthikanti") == pytest.approx(selective, rel=1e-12)
    assert model_flops_per_token(model, s, convention="narayanan") == pytest.approx(full, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "devices", "batch", "seconds", "mfu", "hfu"),
    [
        ("22B", 8, 4, 1.10, 41.5, 43.7),
        ("175B", 64, 64, 13.75, 51.4, 52.8),
        ("530B", 280, 280, 37.83, 56.0, 57.0),
        ("1T", 512, 512, 71.49, 56.3, 57.0),
    ],
)
def test_utilisation_of_korthikanti(name, devices, batch, seconds, mfu, hfu):
    """Table 5 of arXiv:2205.05198, sequence parallelism and selective recomputation on A100: model and
    hardware FLOPs utilisation [%] (FORMULAE fixture 20)."""
    model, tokens = gpt(*GPT[name]), batch * 2048
    peak = seconds * devices * A100.bf16
    model_flops = model_flops_per_token(model, 2048) * tokens
    hardware = model_flops_per_token(model, 2048, convention="korthikanti") * tokens
    assert 100 * model_flops / peak == pytest.approx(mfu, abs=0.25)
    assert 100 * hardware / peak == pytest.approx(hfu, abs=0.15)


def test_published_training_runs():
    """FORMULAE fixtures 28 to 31: shares of the peak, days, hours and FLOPs."""
    assert 502e15 / 3072 / A100.bf16 == pytest.approx(0.52, abs=0.005)
    for layers, hidden, heads, tokens, devices, rate, days in (
        (96, 12288, 96, 300e9, 1024, 140, 33.9), (128, 25600, 160, 450e9, 3072, 163, 83.2),
    ):  # fmt: skip
        speed = tokens_per_second(devices * rate, gpt(layers, hidden, heads), 2048, "narayanan")
        assert tokens / speed / 86400 == pytest.approx(days, rel=0.04)  # 8 T P there, without attention
    llama = preset("llama-3.1-405b")
    products = model_flops_per_token(llama, 1) + 6 * llama.vocab * llama.hidden
    assert products * 15.6e12 == pytest.approx(3.80e25, rel=1e-3)
    deepseek = model_flops_per_token(preset("deepseek-v3"), 4096, convention="megatron")
    hours = 2.664e6 / 14.8
    assert hours == pytest.approx(180e3, rel=0.001)
    assert 0.3 < deepseek * 1e12 / (hours * 3600) / device("h800").bf16 < 0.45


@pytest.mark.parametrize(("name", "peak"), [("h100-sxm", 989.43), ("a100-sxm", 311.87)])
def test_peaks_by_clock(name, peak):
    """FORMULAE fixture 27: clock x FMA of a tensor core x tensor cores, four of which are in each of sms."""
    clock, per_core = (1830e6, 512) if name == "h100-sxm" else (1410e6, 256)
    assert clock * per_core * 2 * 4 * device(name).sms == pytest.approx(peak * 1e12, rel=1e-4)
    assert device(name).bf16 == pytest.approx(peak * 1e12, rel=1e-3)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"])
def test_of_the_experts_those_count_that_a_token_meets(name):
    model = preset(name)
    looked_up = 0 if model.tied_embeddings else model.vocab * model.hidden
    scores = 6 * model.layers * model.heads * sum(head_sizes(model)) * 4096
    assert model_flops_per_token(model, 4096) == 6 * (active_parameters(model) - looked_up) + scores


def test_windows_shorten_attention():
    """Gemma 2: every other layer sees 4096 keys. Llama 4: three layers of four see a chunk of 8192."""
    gemma, llama4 = preset("gemma-2-9b"), preset("llama-4-scout")
    seq = 32768
    open_ = {"sliding_window": None, "full_attention_layers": ()}
    for model, window, kept in ((gemma, 4096, 1 / 2), (llama4, 8192, 1 / 4)):
        whole = model.model_copy(update=open_)
        saved = model_flops_per_token(whole, seq) - model_flops_per_token(model, seq)
        width = 12 * model.layers * model.heads * model.head_size
        assert saved == pytest.approx(width * (1 - kept) * (seq - window), rel=1e-9)


# Blocks


def test_all_families_are_here():
    assert {model.model_type for model in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", MODELS)
def test_the_ideal_device_takes_the_models_flops_over_its_peak(name):
    """At the peak, forward and backward of all parts are the causal count: of every family."""
    model, job, ideal = MODELS[name], Job(seq=2000, global_batch=1), on(H100, **IDEAL)
    tokens = 2000.0
    blocks = [
        (copies, block_times(model, job, ideal, work(tokens), kind)) for kind, copies in kinds(model).items()
    ]
    took = sum(copies * (times.forward + times.backward) for copies, times in blocks)
    took = took + sum(head_times(model, job, ideal, work(tokens)))
    if model.embedding_projection:
        took = took + sum(embedding_times(model, job, ideal, work(tokens)))
    pair = 2 * model.heads * sum(head_sizes(model))
    counted = 3 * pair * sum(layers * keys for layers, keys in attended_lengths(model, 2000, diagonal=0))
    spent = (1 + BACKWARD_ATTENTION) * pair
    spent *= sum(layers * keys for layers, keys in attended_lengths(model, 2000))
    expected = model_flops_per_token(model, 2000, convention="megatron") - counted + spent
    assert took * ideal.bf16 / tokens == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp32", "fp64"])
@pytest.mark.parametrize("chosen", [H100, CPU], ids=["h100", "cpu"])
@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-2-9b", "command-r", "deepseek-v2-lite", "gpt-oss-20b"])
def test_parts_of_a_block(name, precision, chosen):
    job, model = JOB.model_copy(update={"precision": precision}), preset(name)
    for kind in kinds(model):
        found = block_times(model, job, chosen, work(), kind)
        assert 0 < found.recompute_selective < found.recompute_full <= found.forward < found.backward
        assert 0 < found.attention < found.forward
        assert found.attention_backward + found.weight_gradients < found.backward
        assert (found.experts > 0) == (kind == "experts")
        assert found.experts < found.forward


def test_full_recomputation_leaves_out_the_last_product_where_nothing_reads_it():
    found = block_times(LLAMA, JOB, on(H100, **IDEAL), work())
    assert found.forward - found.recompute_full == pytest.approx(8192 * 2 * 4096 * 14336 / H100.bf16)
    for name in ("gemma-2-9b", "olmo-2-7b"):  # a norm behind it
        found = block_times(preset(name), JOB, H100, work())
        assert found.forward == found.recompute_full


def test_products_dominate_an_8b_block_and_are_where_expected():
    matrices = 8192 * (parameter_table(LLAMA).unit(BLOCK).numel - 2 * 4096)
    forward = block_times(LLAMA, JOB, H100, work()).forward
    assert 2 * matrices / H100.bf16 < forward < 2 * 2 * matrices / H100.bf16


def test_memory_bound_parts_follow_the_memory():
    still = on(H100, launch=0.0)
    faster = on(still, memory_bandwidth=2 * H100.memory_bandwidth)
    for time in (
        lambda d: block_times(LLAMA, JOB, d, work()).recompute_selective,
        lambda d: sum(embedding_times(LLAMA, JOB, d, work())),
        lambda d: optimizer_time_per_parameter(JOB, d),
    ):
        assert time(still) == pytest.approx(2 * time(faster))


def test_kernels_of_a_block():
    """A Llama block launches 22 kernels forward and 48 backward on the CPU, as its device file counts."""
    quick = on(CPU, memory_bandwidth=1e30, fp32=1e30)
    found = block_times(LLAMA, JOB.model_copy(update={"precision": "fp32"}), quick, work())
    assert found.forward / CPU.launch == pytest.approx(22)
    assert found.backward / CPU.launch == pytest.approx(48)


def test_a_block_with_experts_takes_what_launching_it_takes_the_host():
    """Where the device has less to do: so many times what it adds, 128 experts of a rank among it."""
    model = preset("qwen3-30b-a3b")

    def times(tokens: float, factor: float, each: float = 3.0) -> BlockTimes:
        program = Program(expert_launches=each, host_factor=factor)
        job = JOB.model_copy(update={"program": program})
        return block_times(model, job, H100, work(tokens), "experts")

    plain, twice, fourfold = (times(8.0, factor) for factor in (1.0, 2.0, 4.0))
    assert fourfold.forward == pytest.approx(2 * twice.forward)
    assert fourfold.backward == pytest.approx(2 * twice.backward)
    one_more = times(8.0, 2.0, 4.0)
    assert one_more.forward - twice.forward == pytest.approx(2 * 128 * H100.launch)
    assert one_more.backward - twice.backward == pytest.approx(2 * 2 * 128 * H100.launch)
    late = twice.forward - plain.forward
    assert late > 0
    assert twice.experts - plain.experts == pytest.approx(late)
    assert twice.recompute_full - plain.recompute_full == pytest.approx(late)
    assert times(65536.0, 2.0) == times(65536.0, 1.0)


# Layouts


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from(sorted(MODELS)),
    tokens=st.integers(64, 40000),
    more=st.integers(1, 20000),
    chosen=st.sampled_from([H100, A100, CPU]),
)
def test_more_tokens_are_never_quicker_and_tp_never_slower(name, tokens, more, chosen):
    model = MODELS[name]
    for kind in kinds(model):
        few = block_times(model, JOB, chosen, work(float(tokens)), kind)
        many = block_times(model, JOB, chosen, work(float(tokens + more)), kind)
        split = block_times(model, JOB, chosen, work(float(tokens), tp=2, by_sequence=2), kind)
        for part in ("forward", "backward", "attention"):
            assert getattr(many, part) >= getattr(few, part) * (1 - 1e-12)
            assert getattr(few, part) / 2 <= getattr(split, part) * (1 + 1e-9)
            assert getattr(split, part) <= getattr(few, part) * (1 + 1e-9)


def test_broadcast_equals_scalar():
    """A grid of columns of different shapes is what each entry alone is, and terms keep their own shapes."""
    model = preset("deepseek-v2-lite")
    tokens, tp = np.array([512.0, 8192.0]).reshape(2, 1, 1, 1, 1), np.array([1, 2, 4]).reshape(1, 3, 1, 1, 1)
    sp = np.array([0, 1]).reshape(1, 1, 2, 1, 1)
    kind, ep = np.array([0, 1, 3]).reshape(1, 1, 1, 3, 1), np.array([1, 8])
    cp = np.where(kind > 0, 2, 1)
    grid = Work(tokens, tp, np.where(sp, tp, 1), cp, kind, ep, np.asarray(1))
    found = block_times(model, JOB, H100, grid, "experts")
    assert found.forward.shape == (2, 3, 2, 3, 2)
    assert found.attention.shape == (2, 3, 1, 3, 1)
    assert found.experts.shape == (2, 3, 1, 1, 2)
    columns = np.broadcast_arrays(*grid)
    head, embedding = head_times(model, JOB, H100, grid), embedding_times(model, JOB, H100, grid)
    for index in np.ndindex(2, 3, 2, 3, 2):
        alone = Work(*(np.asarray(column[index]) for column in columns))
        times = block_times(model, JOB, H100, alone, "experts")
        for part, value in zip(found, times, strict=True):
            assert np.broadcast_to(part, (2, 3, 2, 3, 2))[index] == value
        ends = (*head_times(model, JOB, H100, alone), *embedding_times(model, JOB, H100, alone))
        for part, value in zip((*head, *embedding), ends, strict=True):
            assert np.broadcast_to(part, (2, 3, 2, 3, 2))[index] == value


# Ends and optimizer


def test_the_head_of_a_large_vocabulary_is_two_blocks_of_an_8b():
    """128k tokens of vocabulary: 525 M parameters against 218 M."""
    head = sum(head_times(LLAMA, JOB, H100, work()))
    block = block_times(LLAMA, JOB, H100, work())
    assert 1.7 < head / (block.forward + block.backward) < 2.6
    assert sum(head_times(LLAMA, JOB, H100, work(tp=8))) < head / 6


def test_an_optimizer_step_moves_32_bytes_a_parameter_and_twice_that_in_fp64():
    seconds = optimizer_time_per_parameter(JOB, H100)
    moved = H100.memory_bandwidth * H100.memory_efficiency
    assert seconds * moved == pytest.approx(8 * 4)
    wide = optimizer_time_per_parameter(JOB.model_copy(update={"precision": "fp64"}), H100)
    assert wide == pytest.approx(2 * seconds)
    by_kind = [
        optimizer_time_per_parameter(JOB.model_copy(update={"optimizer": kind}), H100) * moved
        for kind in ("sgd", "sgd_momentum", "adamw_8bit", "adafactor", "muon")
    ]
    assert by_kind == pytest.approx([16, 24, 20, 20, 24])


def test_every_preset_has_times():
    for name in preset_names():
        model = preset(name)
        for kind in kinds(model):
            assert all(np.isfinite(part) for part in block_times(model, JOB, H100, work(), kind))
        assert min(*head_times(model, JOB, H100, work()), *embedding_times(model, JOB, H100, work())) > 0


def test_a_frozen_base_needs_no_weight_gradients():
    """Two of the six FLOPs of a parameter of a matrix are its weight gradient's."""
    model = preset("llama-3.1-8b")
    whole = Job(seq=8192, global_batch=8)
    lora = whole.model_copy(update={"lora_rank": 16, "lora_targets": ("query",)})
    matrices = parameter_table(model).parameters - 65 * model.hidden - model.vocab * model.hidden
    assert needed_flops_per_token(model, whole) == model_flops_per_token(model, 8192)
    assert needed_flops_per_token(model, whole) - needed_flops_per_token(model, lora) == 2 * matrices
