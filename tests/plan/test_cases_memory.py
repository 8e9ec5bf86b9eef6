"""Reported memory: what users measured or were told, and what the planner says of it.

Names are those of the collection of cases; each test names the public thread.
"""

import numpy as np
import pytest

from shardwright.cluster import device
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.model import ModelSpec, preset
from shardwright.plan.accounting import ACCOUNTINGS
from shardwright.plan.amounts import unit_amounts
from shardwright.plan.block_kinds import block_kinds
from shardwright.plan.memory import memory_ledger
from shardwright.plan.other_runtimes import (
    cross_entropy_bytes,
    deepspeed_zero3_bytes,
    gpt_block_activation_bytes,
    liger_loss_bytes,
    llama_block_saved_bytes,
    score_bytes,
    tokens_of_logits,
)
from shardwright.plan.params import EMBEDDING, HEAD, parameter_table, root_only_table
from shardwright.plan.splits import stage_layers
from shardwright.plan.table import table_of
from shardwright.units import GiB, MiB

H100 = device("h100-sxm")


def ledger_of(model, job, layout, on=H100):
    return memory_ledger(model, job, on, table_of([layout], model.layers))


def sharded(ranks, **fields):
    kept = KEPT_BY_SELECTIVE if fields.get("recompute") == "selective" else ()
    return Layout(dp_shard=ranks, zero_stage=3 if ranks > 1 else 0, kept=kept, **fields)


# State


def test_a1_llama_3_1_8b_from_8_to_128_gpus():
    """torchtitan benchmarks/llama3_h100_202412_torchtitan.md: reserved memory falls by 15.4, 15.0 and 15.0
    GiB (eager, compiled, with fp8), sequences of 8192, two a GPU, selective recomputation. 14.0 of it is
    state of 16 B a parameter: gradients count although the peak comes before them: no activation takes their
    pool."""
    model, job = preset("llama-3.1-8b"), Job(seq=8192, global_batch=16)
    few, many = (
        ledger_of(model, job, sharded(n, micro_batch=2, recompute="selective"), device("h100-96"))
        for n in (8, 128)
    )
    assert 14 < (few.reserved[0] - many.reserved[0]) / GiB < 15.5
    assert few.at_peak.activations == many.at_peak.activations
    assert few.at_peak.logits == many.at_peak.logits


@pytest.mark.parametrize(("offload", "gibibytes"), [("none", 29.01), ("optimizer", 3.66), ("all", 0.49)])
def test_a5_estimate_of_deepspeed(offload, gibibytes):
    """deepspeedai/DeepSpeed#4527: 6,805 M parameters, the largest layer 131 M, on 4 GPUs."""
    found = deepspeed_zero3_bytes(6_805_000_000, 131_000_000, 4, offload)
    assert found / GiB == pytest.approx(gibibytes, abs=0.01)


def test_a5_what_is_there_after_initialisation_is_a_whole_copy():
    """DeepSpeed#4527: 14,678 MiB after initialisation with all offloaded; 16-bit weights, whole, are 12,980,
    those of a quarter of the model 3,245: nothing was split."""
    whole = ACCOUNTINGS["zero"].weight * 6_805_000_000 / MiB
    assert whole == pytest.approx(12_980, abs=1)
    beside = 14_678 - whole
    assert H100.context / MiB < beside < 4 * H100.context / MiB
    assert 14_678 - whole / 4 > 20 * H100.context / MiB  # were they split, this much would have no name


@pytest.mark.parametrize(("gibibytes", "tokens"), [(18.55, 32_768), (49, 86_600)])
def test_a7_tokens_behind_logits_that_do_not_fit(gibibytes, tokens):
    """modelscope/ms-swift#6966: fp32 logits of Qwen3-30B-A3B wanted 49 GiB at a stated 32k: 86.6k tokens."""
    found = tokens_of_logits(gibibytes * GiB, preset("qwen3-30b-a3b").vocab)
    assert found == pytest.approx(tokens, rel=1e-3)


PACKED_70B = Layout(
    pp=8, dp_shard=4, zero_stage=1, schedule="1F1B", stage_layers=stage_layers(80, 8), micro_batch=4,
    microbatches=4,
)  # fmt: skip


def test_a9_the_tensor_of_1_96_gib_is_the_vocabulary_in_bf16():
    """NVIDIA-NeMo/Automodel#2673: Llama-3.3-70B, pp 8, dp 4; out of memory at 1.96 GiB."""
    model, job = preset("llama-3.3-70b"), Job(seq=1024, global_batch=64)
    units = unit_amounts(model, job, table_of([PACKED_70B], model.layers))
    gathered = {kind: round(float(np.max(unit.gathered)) / GiB, 2) for kind, unit in units.items()}
    assert {kind for kind, size in gathered.items() if size == 1.96} == {EMBEDDING, HEAD}


def test_a9_a_recipe_for_141_gb_does_not_fit_80():
    """Automodel#2673: some 52 GB of activations of four microbatches of 4 x 1024 tokens; smaller microbatches
    are the maintainers' way out."""
    model, job = preset("llama-3.3-70b"), Job(seq=1024, global_batch=64)
    ledger = ledger_of(model, job, PACKED_70B)
    assert ledger.device > H100.memory
    assert ledger.stage.in_flight == 4
    table = table_of([PACKED_70B], model.layers)
    kept = ledger.stage.blocks * block_kinds(model, job, table).saved_bytes * 4 * job.seq
    assert 4 * kept == pytest.approx(52e9, rel=0.2)
    # a step peaks at the second backward pass, with three of them and the gradients of the first
    assert ledger.at_peak.activations == pytest.approx(3 * kept, rel=0.05)
    fewer = PACKED_70B.model_copy(update={"micro_batch": 1})
    one = ledger_of(model, job.model_copy(update={"global_batch": 16}), fewer)
    assert one.at_peak.activations == pytest.approx(ledger.at_peak.activations / 4, rel=0.05)


def test_a9_the_recipe_fits_141():
    model, job = preset("llama-3.3-70b"), Job(seq=1024, global_batch=64)
    h200 = device("h200-sxm")
    assert ledger_of(model, job, PACKED_70B, h200).device <= h200.memory


def test_a15_gradients_that_are_kept_whole():
    """facebookresearch/fairscale#627: a model of 5,480 MB in fp32 on 2 GPUs has 11,190 after its backward
    pass, 5,478 expected: parameters and gradients, half each. The difference, 5.7 GB, is every unit's
    gradient before its reduction; one at a time is what the runtime keeps."""
    model = preset("gpt2-xl").model_copy(update={"layers": 42})
    job = Job(seq=1024, global_batch=2, precision="fp32", optimizer="sgd")
    table = table_of([sharded(2)], model.layers)
    ledger = memory_ledger(model, job, H100, table)
    assert ledger.parameters == pytest.approx(5480e6 / 2, rel=0.01)
    assert ledger.parameters + ledger.gradients == pytest.approx(5478e6, rel=0.01)
    units = unit_amounts(model, job, table)
    each = {kind: float(np.max(unit.reduce_input)) for kind, unit in units.items()}
    every = each["block"] * model.layers + each["embedding"] + each["head"]
    assert every == pytest.approx((11_190 - 5478) * 1e6, rel=0.05)
    assert max(each.values()) < 0.1 * every


def test_a17_one_unit_of_the_whole_model():
    """saforem2/ezpz#173: 2 B parameters, a vocabulary of 256k, one flat unit: out of memory with any loss or
    recomputation, until embedding, blocks and head were wrapped. The whole against the largest of them."""
    model = ModelSpec(
        name="2b", model_type="llama", layers=18, hidden=2048, ffn=5632, heads=16, kv_heads=16,
        head_size=128, vocab=256_000,
    )  # fmt: skip
    table = parameter_table(model)
    (root,) = root_only_table(table).units
    assert 1.9e9 < root.numel == table.parameters < 2.1e9
    largest = max(unit.numel for unit in table.units)
    assert root.numel / largest > 3.5
    assert largest < 0.28 * table.parameters


def test_a27_bf16_parameters_halve_the_state():
    """huggingface/accelerate#3979: parameters that were to be widened to fp32 stay bf16, and Adam's state
    with them: 8 B a parameter and not 16."""
    model = preset("llama-3.1-8b")
    wide, narrow = (
        ledger_of(model, Job(seq=4096, global_batch=8, accounting=name), sharded(8))
        for name in ("fsdp2", "pure_bf16")
    )
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(wide, part) == 2 * getattr(narrow, part)


# Activations


def test_a19_a_small_model_of_many_activations():
    """Lightning-AI/pytorch-lightning#15976, discuss.pytorch.org/t/167734: few parameters, 24 GB on one GPU
    and on two; recomputation gave 40 %."""
    model, job = preset("bytes-5m"), Job(seq=65_536, global_batch=8)
    one, two, again = (
        ledger_of(model, job, layout)
        for layout in (
            Layout(micro_batch=4), sharded(2, micro_batch=4), Layout(micro_batch=4, recompute="full")
        )
    )  # fmt: skip
    state = one.parameters + one.gradients + one.optimizer
    assert state < 0.05 * one.allocated
    assert two.allocated > 0.95 * one.allocated
    assert again.allocated < 0.6 * one.allocated


def test_a21_flash_attention_leaves_selective_recomputation_little():
    """NVIDIA/Megatron-LM#1225, #464: 25.52 to 24.94 GB where 5as/h of the paper promised 70 %: with flash
    attention there are no scores."""
    a, h, s, layers = 96, 12288, 2048, 96
    scores = layers * s * score_bytes(s, a, "dropout")
    unfused = layers * gpt_block_activation_bytes(s, 1, h, a)
    assert scores / unfused == pytest.approx(0.70, abs=0.005)
    assert score_bytes(s, a, "flash") == 0
    model = preset("llama-3.1-8b")
    flash, eager = (llama_block_saved_bytes(model, 8192, attention=kind) for kind in ("flash", "scores"))
    assert 8192 * model.layers * 4 * model.heads < 1e9  # all that attention itself keeps: log-sum-exp
    assert (eager - flash) / eager > 0.85


def loss_of_hugging_face(model, tokens):
    """What logits take in backward when the loss widens them, those in bf16 still held [B]."""
    return tokens * (cross_entropy_bytes(model.vocab, upcast=True).backward + 2 * model.vocab)


@pytest.mark.parametrize(("ranks", "seq", "fits"), [(8, 20_000, False), (16, 20_000, True)])
def test_a23_32b_needs_two_nodes(ranks, seq, fits):
    """simplescaling/s1#25, #13: Qwen2.5-32B on 8 H100 runs out of memory at 20k tokens, on 16 it does not: 16
    B a parameter are 61.1 and 30.5 GiB."""
    model, job = preset("qwen2.5-32b"), Job(seq=seq, global_batch=ranks)
    ledger = ledger_of(model, job, sharded(ranks, recompute="full"))
    state = (ledger.parameters + ledger.gradients + ledger.optimizer)[0] / GiB
    assert state == pytest.approx(16 * 32_763_876_352 / ranks / GiB, rel=1e-3)
    assert (ledger.device[0] <= H100.memory) == fits


def test_a23_32k_tokens_need_a_fused_loss():
    """s1#13: 32k on 16 H100 ran out of memory. Of the runtime's own loss it would fit; one that widens all
    logits takes 65 GiB more."""
    model, job = preset("qwen2.5-32b"), Job(seq=32_768, global_batch=16)
    ledger = ledger_of(model, job, sharded(16, recompute="full"))
    more = loss_of_hugging_face(model, 32_768) - ledger.at_peak.logits[0]
    assert ledger.device[0] <= H100.memory < ledger.device[0] + more
    assert more / GiB == pytest.approx(65.0, abs=0.1)


def test_a25_logits_of_a_loss_that_is_not_fused():
    """NVIDIA-NeMo/Automodel#3907: B x S x V x (2 + 4 + 4); a fused loss has a chunk of it."""
    model, tokens = preset("gpt-oss-20b"), 4 * 4096
    forward = tokens * cross_entropy_bytes(model.vocab, upcast=True).forward
    assert forward == tokens * model.vocab * (2 + 4 + 4)
    assert liger_loss_bytes(tokens, model.hidden, model.vocab) < 0.1 * forward
