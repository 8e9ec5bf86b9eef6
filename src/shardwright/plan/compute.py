"""Computation: FLOPs of a model, and the time of each part of a step on one device.

A part takes the time of its matrix products, its attention and its memory-bound operations, one after the
other, each at the device's measured share of its peak.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cluster import Device
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.params import BLOCK, EMBEDDING, parameter_table
from shardwright.plan.table import Floats

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
    """Seconds for each token of a rank, in one block. All broadcast over tp."""

    forward: Floats
    backward: Floats
    attention: Floats  # of forward: what a ring of keys and values can hide under
    weight_gradients: Floats  # of backward: what a zero-bubble schedule can put off
    recompute_full: Floats
    recompute_selective: Floats


def block_times(
    model: ModelSpec, job: Job, device: Device, tp: ArrayLike = 1, by_sequence: ArrayLike = 1
) -> BlockTimes:
    """Times of one block [s for each token of a rank].

    Memory-bound traffic in elements per token: norms 2h forward and 3h backward each, residuals 3h each,
    rotary embedding 2(a+kv)d, SwiGLU 3f forward and 5f backward. ``by_sequence``: ranks that share the tokens
    of norms and residuals (tp with sp, else 1). With context ranks a token still meets half the sequence.

    Source: shared FORMULAE 5.1, 5.4 and 5.5.
    """
    tp, by_sequence = np.asarray(tp, dtype=np.float64), np.asarray(by_sequence, dtype=np.float64)
    unit = parameter_table(model).unit(BLOCK)
    matrices = sum(tensor.numel for tensor in unit.tensors if len(tensor.shape) == 2)
    down = model.hidden * model.ffn
    peak = device.peak(job.precision)
    product = 2 * matrices / (peak * device.matmul_efficiency) / tp
    attention = 2 * model.heads * model.head_size * job.seq / (peak * device.attention_efficiency) / tp
    element = ELEMENT_BYTES[job.precision] / (device.memory_bandwidth * device.memory_efficiency)
    rotary = 2 * (model.heads + model.kv_heads) * model.head_size
    light = element * ((2 * 2 + 2 * 3) * model.hidden / by_sequence + (rotary + 3 * model.ffn) / tp)
    light_backward = element * ((2 * 3 + 3) * model.hidden / by_sequence + (rotary + 5 * model.ffn) / tp)
    forward = product + attention + light
    return BlockTimes(
        forward=forward,
        backward=2 * product + BACKWARD_ATTENTION * attention + light_backward,
        attention=attention,
        weight_gradients=product,
        recompute_full=forward - 2 * down / (peak * device.matmul_efficiency) / tp,
        recompute_selective=light,
    )


BLOCK_LAUNCHES = (22, 48)
"""Kernels of a block's forward and backward pass as the runtime launches them: seven products, attention, two
norms, two rotations, SwiGLU, two residuals, and as many small ones; backward about twice that."""


class BlockFloor(NamedTuple):
    """Seconds of one block of one microbatch that do not shrink with its tokens."""

    weights: Floats  # reading its matrices once
    forward_launches: float
    backward_launches: float


def block_floor(model: ModelSpec, job: Job, device: Device, tp: ArrayLike = 1) -> BlockFloor:
    """What a block costs however few tokens a rank has [s]: a product takes at least as long as its weights
    take to be read, and every kernel a launch.

    Source: shared FORMULAE 5.3.
    """
    unit = parameter_table(model).unit(BLOCK)
    matrices = sum(tensor.numel for tensor in unit.tensors if len(tensor.shape) == 2)
    read = ELEMENT_BYTES[job.precision] * matrices / (device.memory_bandwidth * device.memory_efficiency)
    forward, backward = BLOCK_LAUNCHES
    return BlockFloor(
        read / np.asarray(tp, dtype=np.float64), forward * device.launch, backward * device.launch
    )


def head_times(model: ModelSpec, job: Job, device: Device, tp: ArrayLike = 1) -> tuple[Floats, Floats]:
    """Forward and backward of final norm, head and loss [s for each token of a rank].

    The logits are written once and read twice forward, read and written backward, and read by two products;
    tp splits the vocabulary.
    """
    tp = np.asarray(tp, dtype=np.float64)
    product = 2 * model.hidden * model.vocab / (device.peak(job.precision) * device.matmul_efficiency) / tp
    element = ELEMENT_BYTES[job.precision] / (device.memory_bandwidth * device.memory_efficiency)
    logits, norm = element * model.vocab / tp, element * model.hidden
    return product + 3 * logits + 2 * norm, 2 * product + 4 * logits + 3 * norm


def embedding_times(model: ModelSpec, job: Job, device: Device) -> tuple[float, float]:
    """Look-up of a token, and adding its gradient [s for each token]."""
    element = ELEMENT_BYTES[job.precision] / (device.memory_bandwidth * device.memory_efficiency)
    return 2 * model.hidden * element, 3 * model.hidden * element


def optimizer_time_per_parameter(job: Job, device: Device) -> float:
    """Update and gradient norm of one resting parameter [s]. Memory-bound."""
    touches = OPTIMIZER_TOUCHES + 1
    return touches * WIDE_BYTES[job.precision] / (device.memory_bandwidth * device.memory_efficiency)
