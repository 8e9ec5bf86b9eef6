"""Frozen matrices with adapters: what a real block keeps, its gradients and its peak."""

import pytest
import torch
from test_block_steps import saved_bytes
from test_tape import BATCH, JOB, SEQ, TINY, inputs_of, peak_of, predicted_peak
from torch import nn

from shardwright.job import LORA_TARGETS
from shardwright.model import preset
from shardwright.plan.activations import Split, block_activations
from shardwright.run.model import Block

RANK = 3


class Adapted(nn.Module):
    """A frozen matrix with an adapter."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        self.base = base
        outputs, inputs = base.weight.shape
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0


MODULES = dict(
    zip(
        LORA_TARGETS,
        (*(f"self_attn.{letter}_proj" for letter in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        strict=True,
    )
)


def adapted(targets, ffn: int):
    """The runtime's block with adapters, its model and the job."""
    spec = TINY.model_copy(update={"ffn": ffn})
    block = Block(spec).requires_grad_(False)
    for target in targets:
        path, _, name = MODULES[target].rpartition(".")
        parent = block.get_submodule(path)
        setattr(parent, name, Adapted(getattr(parent, name), RANK))
    job = JOB.model_copy(update={"lora_rank": RANK, "lora_targets": tuple(targets)})
    return block, spec, job


TARGETS = [("query", "value"), ("down",), ("out", "gate"), LORA_TARGETS]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_saved_tensors_and_gradients_with_adapters(targets):
    """What autograd keeps of frozen matrices with adapters, and the gradients of these alone."""
    block, spec, job = adapted(targets, ffn=96)
    places, x = inputs_of(block, spec, spec.head_size)
    measured = saved_bytes(nn.ParameterList([*block.parameters(), *places[:2]]), lambda: block(x, places))
    activations = block_activations(spec, job, "none")
    assert measured == BATCH * SEQ * activations.saved_bytes
    trained = sum(parameter.numel() for parameter in block.parameters() if parameter.requires_grad)
    assert max(moment.gradient_bytes for moment in activations.moments) == 4 * trained


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("ffn", [96, 8])
@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_peak_with_adapters(targets, ffn, recompute, request):
    """To the byte, or one rank-wide vector more: autograd frees the first of an adapter's gradients before it
    makes the last."""
    if "out" in targets and (ffn, recompute) == (8, "full"):
        pytest.xfail("the output's adapter is made again whole, which is not modelled; LoRA is not trained")
    if "down" in targets and ffn == 96:
        reason = "the adapter's gradient comes before its base's and lets go of the input: a vector less"
        request.applymarker(pytest.mark.xfail(strict=True, reason=f"{reason}; LoRA is not trained"))
    block, spec, job = adapted(targets, ffn)
    measured = peak_of(block, *inputs_of(block, spec, spec.head_size), recompute)
    predicted, _ = predicted_peak(spec, job, recompute)
    assert predicted - measured in (0, 4 * BATCH * SEQ * RANK)


def test_a_fused_matrix_has_one_adapter():
    """Phi-3: queries, keys and values come of one matrix, gate and up of another."""
    model = preset("phi-3-mini")
    saved = {
        targets: set(
            block_activations(
                model, JOB.model_copy(update={"lora_rank": 8, "lora_targets": targets}), "none"
            ).saved
        )
        for targets in (("query",), ("query", "key", "value"), ("up",))
    }
    assert saved[("query",)] == saved[("query", "key", "value")] >= {"query_key_value_lora", "norm1"}
    assert saved[("up",)] >= {"gate_and_up_lora", "norm2"}
    assert "norm1" not in saved[("up",)]


def test_adapters_of_a_split_matrix_are_split_with_it():
    """Rows of the outer factor for a matrix split by outputs, columns of the inner one by inputs."""
    job = JOB.model_copy(update={"lora_rank": RANK, "lora_targets": ("up", "down")})
    made = {
        tp: max(m.gradient_bytes for m in block_activations(TINY, job, "none", Split(tp)).moments)
        for tp in (1, 2)
    }
    assert made[1] == 4 * RANK * 2 * (TINY.hidden + TINY.ffn)
    assert made[2] == 4 * RANK * 2 * (TINY.hidden + TINY.ffn / 2)
