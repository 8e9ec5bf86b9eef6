"""Computation: FLOPs of a model, and the time of each part of a step on one device.

A part takes the time of its matrix products, its attention and its memory-bound operations, one after the
other, and a launch for each kernel.
"""

from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from shardwright.cluster import Device
from shardwright.job import Job, Optimizer
from shardwright.model import ModelSpec
from shardwright.plan.activations import ELEMENT_BYTES, WIDE_BYTES
from shardwright.plan.attention import BACKWARD_ATTENTION as BACKWARD_ATTENTION
from shardwright.plan.attention import attended_lengths, attention_times, head_sizes
from shardwright.plan.counts import active_parameters
from shardwright.plan.gemm import gemm_time, memory_rate
from shardwright.plan.names import block_norms
from shardwright.plan.params import EMBEDDING, parameter_table
from shardwright.plan.products import (
    Kind,
    block_matrices,
    expert_factor,
    expert_products,
    head_products,
    split_products,
    whole_products,
)
from shardwright.plan.table import Floats, Ints

Convention = Literal["palm", "megatron", "korthikanti", "narayanan"]

WIDE_TOUCHES: Mapping[Optimizer, int] = {
    "adamw": 7, "sgd": 3, "sgd_momentum": 5, "adamw_8bit": 3, "adafactor": 4, "muon": 5,
}  # fmt: skip
"""Reads and writes of a parameter-wide array in one optimizer step: parameter twice, gradient once, each
state twice; Adafactor reads the gradient again for its factors. The products by which Muon makes a matrix
orthogonal are left out: 6 n FLOPs for each parameter of a matrix with n rows and each of five rounds."""

BYTE_TOUCHES: Mapping[Optimizer, int] = {"adamw_8bit": 4}
"""Reads and writes of an array of one byte for each parameter: the two states of 8-bit Adam."""


# FLOPs


def model_flops_per_token(
    model: ModelSpec, seq: int, *, causal: bool = False, convention: Convention = "palm"
) -> float:
    """FLOPs of training one token.

    Attention counts the keys of the layer's window and queries, keys and values by their own sizes; of the
    routed experts the top k count. Conventions:

    - ``palm``: 6 for each parameter but looked-up ones, and attention without regard to the causal mask. MFU
      is stated with it.
    - ``megatron``: 6 for each parameter of a matrix, and half of attention.
    - ``korthikanti``: what the hardware does where the attention core is recomputed: as palm with matrices
      alone, and twice its attention.
    - ``narayanan``: what it does where blocks are recomputed: 8 for their matrices, and 4/3 of attention.

    ``causal`` leaves out the masked half of attention in every convention.

    Source: PaLM, arXiv:2204.02311, appendix B; pytorch/torchtitan torchtitan/models/utils.py;
    NVIDIA/Megatron-LM megatron/training/training.py, num_floating_point_operations; Korthikanti et al. 2022,
    arXiv:2205.05198, appendix A; Narayanan et al. 2021, arXiv:2104.04473, equation 3.
    """
    halved = causal or convention == "megatron"
    lengths = attended_lengths(model, seq, diagonal=0)
    window = min(model.sliding_window or seq, seq)
    if not halved:
        full = model.layers if model.sliding_window is None else len(model.full_attention_layers)
        lengths = ((full, float(seq)), (model.layers - full, float(window)))
    scores = 2 * sum(head_sizes(model)) * model.heads * sum(layers * keys for layers, keys in lengths)
    if convention == "palm":
        first = parameter_table(model).unit(EMBEDDING).tensors
        looked_up = sum(t.numel for t in first if t.role == "position" or "tp" in t.splits)
        return 6 * (active_parameters(model) - looked_up) + 3 * scores
    blocks, ends = _active_matrices(model)
    if convention == "narayanan":
        return 8 * blocks + 6 * ends + 4 * scores
    return 6 * (blocks + ends) + (6 if convention == "korthikanti" else 3) * scores


def needed_flops_per_token(model: ModelSpec, job: Job) -> float:
    """FLOPs that a job needs for one token: ``palm``, less the weight gradients of a frozen base. Those of
    adapters, a thousandth, are left out."""
    flops = model_flops_per_token(model, job.seq)
    return flops - 2 * sum(_active_matrices(model)) if job.lora_rank else flops


def _active_matrices(model: ModelSpec) -> tuple[int, int]:
    """Parameters of matrices that a token meets: in all blocks, and in the head."""
    blocks = 0
    for unit in parameter_table(model).blocks:
        covered = model.moe is not None and model.moe.covers(unit.layers[0])
        for matrix in block_matrices(model, "experts" if covered else "dense"):
            met = model.moe.top_k if model.moe is not None and matrix.role == "expert" else 1
            blocks += unit.copies * met * matrix.outputs * matrix.inputs
    width = model.embedding_projection
    return blocks, model.vocab * (width or model.hidden) + 2 * width * model.hidden


# Times of a block


class Work(NamedTuple):
    """What one rank computes on in one microbatch. All broadcast.

    ``tokens``: of the rank's own part of its sequences; ``by_sequence``: ranks that share norms and residuals
    (tp with sp, else 1); ``cp_kind`` indexes ``layout.CONTEXT_KINDS``.
    """

    tokens: Floats
    tp: Ints
    by_sequence: Ints
    cp: Ints
    cp_kind: Ints
    ep: Ints
    etp: Ints


class BlockTimes(NamedTuple):
    """Seconds of one block of one microbatch. All broadcast."""

    forward: Floats
    backward: Floats  # without recomputation
    attention: Floats  # of forward: what a ring of keys and values can hide under
    attention_backward: Floats  # of backward
    weight_gradients: Floats  # of backward: what a zero-bubble schedule can put off
    recompute_selective: Floats
    recompute_full: Floats
    experts: Floats  # of forward: the routed experts, and what the host is late


class _Light(NamedTuple):
    """Memory-bound operations of a block: elements moved for each token, forward and backward, and kernels.

    ``shared``: by the ranks that share norms and residuals; ``split``: over tp; ``routed``: for each token
    that a rank sends off, whole; ``hidden``: of these the experts' width, split over etp.
    """

    shared: tuple[float, float]
    split: tuple[float, float]
    routed: tuple[float, float]
    hidden: tuple[float, float]
    kernels: tuple[int, int]


EVERY_SECOND = 0.4
"""Of a block's products, those that selective recomputation of every second one repeats: keys, output and
up of a Llama block. Source: pytorch/torchtitan torchtitan/distributed/activation_checkpoint.py."""

SMALL_KERNELS = 7
"""Of a block's forward pass, besides products, attention, norms, rotations, activation and residuals: views
that copy, and casts. The runtime's Llama block launches 22 kernels forward and 48 backward in all."""

ROUTING_KERNELS = 12
"""Scores, top k, sorting, counts, permuting and back, scaling; an assumption."""

ROUTER_TOUCHES = 4
"""Reads and writes of the fp32 scores of all experts: softmax or sigmoid, and top k; an assumption."""


@cache
def _light(model: ModelSpec, precision: str, kind: Kind) -> _Light:
    """Elements for each token of fused kernels: a norm moves 2h forward and 3h backward, RMS or with a mean;
    a residual 3h; rotations 2(a+kv)d; a gated activation 3f and 5f, a plain one 2f and 3f; permuting to
    experts and back 4kh.

    Source: shared FORMULAE 5.5.
    """
    h, mla, moe = model.hidden, model.mla, model.moe if kind == "experts" else None
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    norms, qk = len(block_norms(model)), queries + keys
    rotated = 1 - len(model.no_rope_layers) / model.layers if model.positions == "rope" else 0.0
    rotary, latent = 2 * qk * rotated, 0
    if mla is not None:  # the narrow vectors' norms; rotated parts, then query and key put together
        latent = mla.q_rank + mla.kv_rank
        rotary = 2 * (model.heads + 1) * mla.rope_size + 2 * qk
    ahead, back = (3, 5) if model.gated_mlp else (2, 3)
    width = model.ffn if moe is None else moe.shared_ffn
    shared: list[float] = [norms * 2 * h + 2 * 3 * h + 2 * latent, norms * 3 * h + 2 * 3 * h + 3 * latent]
    split = [rotary + ahead * width, rotary + back * width]
    if model.qk_norm:
        split = [split[0] + 2 * qk, split[1] + 3 * qk]
    kernels = 1 + norms + 2 * model.qk_norm + 2 * (rotated > 0) + 1 + 2 + SMALL_KERNELS
    kernels += 4 * (mla is not None) + ROUTING_KERNELS * (moe is not None)
    routed, hidden = (0.0, 0.0), (0.0, 0.0)
    if moe is not None:
        scores = ROUTER_TOUCHES * moe.experts * WIDE_BYTES[precision] / ELEMENT_BYTES[precision]
        added = 3 * h * (moe.shared_ffn > 0) + 3 * h * moe.shared_gate
        shared = [each + scores + added for each in shared]
        routed = (4.0 * moe.top_k * h, 4.0 * moe.top_k * h)
        hidden = (float(ahead * moe.top_k * moe.ffn), float(back * moe.top_k * moe.ffn))
    return _Light((shared[0], shared[1]), (split[0], split[1]), routed, hidden, (kernels, 2 * kernels + 4))


def block_times(model: ModelSpec, job: Job, device: Device, work: Work, kind: Kind = "dense") -> BlockTimes:
    """Times of one block with or without experts, for one microbatch [s].

    Matrices that tp does not split work on the tokens that share norms. Experts: with etp = 1 each rank of tp
    sends off its own part of the tokens, else all together. Selective recomputation repeats what is
    memory-bound; full recomputation all but the down projection, which is repeated too where its output is
    read again: by a norm behind it, or by the experts' weights. A block with experts takes at least what its
    launches take the host.

    Source: shared FORMULAE 5.
    """
    light, launch = _light(model, job.precision, kind), device.launch * job.program.launches
    if job.program.launches > 1:  # products wait as long
        device = device.model_copy(update={"launch": launch})
    per_element = ELEMENT_BYTES[job.precision] / memory_rate(device) * job.program.light_traffic
    split = split_products(model, job, device, kind, work.tokens, work.tp)
    whole = whole_products(model, job, device, kind, work.tokens / work.by_sequence)
    attention = attention_times(
        model, job.seq, job.precision, device, job.program, work.tokens, work.tp, work.cp, work.cp_kind
    )
    launched: list[Floats | float] = [kernels * launch for kernels in light.kernels]
    moved: list[Floats] = [
        per_element * work.tokens * (light.shared[way] / work.by_sequence + light.split[way] / work.tp)
        for way in (0, 1)
    ]
    forward, back = split.forward + whole.forward, split.input_gradients + whole.input_gradients
    weights, experts = split.weight_gradients + whole.weight_gradients, np.asarray(0.0)
    if model.moe is not None and kind == "experts":
        sent = work.tokens / np.where(work.etp == 1, work.tp, 1)
        routed = expert_products(model, job, device, sent, work.ep, work.etp)
        copied = per_element * sent * expert_factor(job, work.ep)
        permuted = [copied * (light.routed[way] + light.hidden[way] / work.etp) for way in (0, 1)]
        experts = routed.forward + permuted[0]
        of_one = launch * job.program.expert_launches * (2 if job.precision == "fp8" else 1)
        apart = of_one * model.moe.experts / work.ep
        launched = [launched[0] + apart, launched[1] + 2 * apart]
        moved = [moved[0] + permuted[0], moved[1] + permuted[1]]
        forward, back = forward + routed.forward, back + routed.input_gradients
        weights = weights + routed.weight_gradients
    moved = [moved[0] + launched[0], moved[1] + launched[1]]
    forward = forward + attention.forward + moved[0]
    backward = back + weights + attention.backward + moved[1]
    if kind == "experts" and job.program.host_factor > 1:  # the host launches meanwhile
        late = np.maximum(job.program.host_factor * launched[0] - forward, 0.0)
        forward, experts = forward + late, experts + late
        backward = np.maximum(backward, job.program.host_factor * launched[1])
    repeated = {
        "light": moved[0],
        "attention": attention.forward,
        "products": moved[0] + EVERY_SECOND * split.forward,
    }[job.program.selective]
    ends_in_product = kind == "dense" and model.norm_placement == "pre"
    return BlockTimes(
        forward=forward,
        backward=backward,
        attention=attention.forward,
        attention_backward=attention.backward,
        weight_gradients=weights,
        recompute_selective=repeated,
        recompute_full=forward - split.last if ends_in_product else forward,
        experts=experts,
    )


# Ends


def head_times(model: ModelSpec, job: Job, device: Device, work: Work) -> tuple[Floats, Floats]:
    """Forward and backward of final norm, head and loss, of one microbatch [s].

    The logits are written once and read twice forward, read and written backward, and read by two products;
    tp splits the vocabulary.

    Source: shared FORMULAE 5.5.
    """
    products = head_products(model, job, device, work.tokens, work.tp)
    element = ELEMENT_BYTES[job.precision] / memory_rate(device)
    vocab = model.vocab / work.tp
    capped = 2 if model.logit_softcap else 0
    norm = model.hidden * model.final_norm / work.by_sequence
    launches = HEAD_KERNELS * device.launch
    return (
        products.forward + work.tokens * (element * ((3 + capped) * vocab + 2 * norm)) + launches,
        products.input_gradients
        + products.weight_gradients
        + work.tokens * (element * ((4 + capped) * vocab + 3 * norm))
        + 2 * launches,
    )


def logits_again(model: ModelSpec, job: Job, device: Device, work: Work) -> Floats:
    """What a loss in parts adds to the backward pass of one part [s]: its logits are made once more, and the
    gradient of the head's matrix is read to be added to. run/chunked_loss.py does so."""
    products = head_products(model, job, device, work.tokens, work.tp)
    element = ELEMENT_BYTES[job.precision] / memory_rate(device)
    vocab = model.vocab / work.tp
    trained = 0.0 if job.lora_rank else vocab * model.hidden
    return np.asarray(products.forward + element * (work.tokens * vocab + trained) + 2 * device.launch)


HEAD_KERNELS = 5
"""Of the final norm, and of the loss: largest logit, sum, target, mean; an assumption."""


def embedding_times(model: ModelSpec, job: Job, device: Device, work: Work) -> tuple[Floats, Floats]:
    """Look-up of the tokens, learned positions added, and adding up the gradient, of one microbatch [s].

    The gradient is as large as the weight, written whole. Under LoRA there is none.
    """
    precision = "bf16" if job.precision == "fp8" else job.precision
    width, element = (
        model.embedding_projection or model.hidden,
        ELEMENT_BYTES[precision] / memory_rate(device),
    )
    ahead = work.tokens * (2 * width * element) + device.launch
    back = work.tokens * (3 * width * element) + model.vocab * width * element / work.tp + 2 * device.launch
    if model.positions == "learned":
        ahead = ahead + work.tokens * (3 * model.hidden * element) + 2 * device.launch
        back = back + work.tokens * (2 * model.hidden * element) + device.launch
    if model.embedding_projection:
        between = gemm_time(work.tokens, model.hidden, width, device, precision)
        ahead, back = ahead + between, back + 2 * between
    return (ahead, np.zeros(np.shape(ahead))) if job.lora_rank else (ahead, back)


def optimizer_time_per_parameter(job: Job, device: Device) -> float:
    """Update and gradient norm of one resting parameter [s]. Memory-bound."""
    wide, narrow = WIDE_TOUCHES[job.optimizer] + 1, BYTE_TOUCHES.get(job.optimizer, 0)
    return (wide * WIDE_BYTES[job.precision] + narrow) / memory_rate(device)
