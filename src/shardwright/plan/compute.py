"""Computation: FLOPs of a model, and the time of each part of a step on one device.

A part takes the time of its matrix products, its attention and its memory-bound operations, one after the
other, each at the device's measured share of its peak.
"""

from typing import NamedTuple

from shardwright.cluster import Device
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.params import BLOCK, EMBEDDING, parameter_table

BACKWARD_ATTENTION = 2.5
"""Flash attention's backward pass over its forward pass: five matrix products against two."""

OPTIMIZER_TOUCHES = 7
"""Reads and writes of a parameter-wide array in one Adam step: p, m, v, g read; p, m, v written."""


def model_flops_per_token(model: ModelSpec, seq: int, *, causal: bool = False) -> float:
    """FLOPs that training one token needs, forward and backward, without recomputation.

    6 for each parameter of a matrix (the input embedding, a look-up, left out) and 12 L a d s for attention;
    ``causal`` counts only the half of attention that is not masked. MFU is stated with the full count.

    Source: PaLM, arXiv:2204.02311, appendix B; pytorch/torchtitan torchtitan/models/utils.py.
    """
    table = parameter_table(model)
    parameters = table.parameters - (0 if model.tied_embeddings else table.unit(EMBEDDING).numel)
    attention = 12 * model.layers * model.heads * model.head_size * seq
    return 6 * parameters + attention * (0.5 if causal else 1.0)


class BlockTimes(NamedTuple):
    """Seconds for each token of a microbatch, in one block or the head."""

    forward: float
    backward: float
    light: float  # of forward: norms, rotary embedding, SwiGLU product, residuals
    recompute_full: float
    recompute_selective: float


def block_times(model: ModelSpec, job: Job, device: Device) -> BlockTimes:
    """Times of one block [s for each token].

    Memory-bound traffic in elements per token: norms 2h forward and 3h backward each, residuals 3h each,
    rotary embedding 2(a+kv)d, SwiGLU 3f forward and 5f backward.

    Source: shared FORMULAE 5.1, 5.4 and 5.5.
    """
    unit = parameter_table(model).unit(BLOCK)
    matrices = sum(tensor.numel for tensor in unit.tensors if len(tensor.shape) == 2)
    down = model.hidden * model.ffn
    peak = device.peak(job.precision)
    product = 2 * matrices / (peak * device.matmul_efficiency)
    attention = 2 * model.heads * model.head_size * job.seq / (peak * device.attention_efficiency)
    element = ELEMENT_BYTES[job.precision] / (device.memory_bandwidth * device.memory_efficiency)
    rotary = 2 * (model.heads + model.kv_heads) * model.head_size
    light = element * (2 * 2 * model.hidden + 2 * 3 * model.hidden + rotary + 3 * model.ffn)
    light_backward = element * (2 * 3 * model.hidden + 3 * model.hidden + rotary + 5 * model.ffn)
    forward = product + attention + light
    return BlockTimes(
        forward=forward,
        backward=2 * product + BACKWARD_ATTENTION * attention + light_backward,
        light=light,
        recompute_full=forward - 2 * down / (peak * device.matmul_efficiency),
        recompute_selective=light,
    )


def head_times(model: ModelSpec, job: Job, device: Device) -> tuple[float, float]:
    """Forward and backward of final norm, head and loss [s for each token].

    The logits are written once and read twice forward, read and written backward, and read by two products.
    """
    product = 2 * model.hidden * model.vocab / (device.peak(job.precision) * device.matmul_efficiency)
    element = ELEMENT_BYTES[job.precision] / (device.memory_bandwidth * device.memory_efficiency)
    logits, norm = element * model.vocab, element * model.hidden
    return product + 3 * logits + 2 * norm, 2 * product + 4 * logits + 3 * norm


def embedding_times(model: ModelSpec, job: Job, device: Device) -> tuple[float, float]:
    """Look-up of a token, and adding its gradient [s for each token]."""
    element = ELEMENT_BYTES[job.precision] / (device.memory_bandwidth * device.memory_efficiency)
    return 2 * model.hidden * element, 3 * model.hidden * element


def optimizer_time_per_parameter(job: Job, device: Device) -> float:
    """Update and gradient norm of one resting parameter [s]. Memory-bound."""
    touches = OPTIMIZER_TOUCHES + 1
    return touches * WIDE_BYTES[job.precision] / (device.memory_bandwidth * device.memory_efficiency)
