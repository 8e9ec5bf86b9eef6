"""Angles of rotary embeddings: every family's frequencies, and the ways to stretch them to longer sequences.

B batch, S positions, H heads, D numbers of a head that are rotated.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.model import Llama3Rope, ModelSpec, Yarn
from shardwright.run.kernels import rotate


class Places(NamedTuple):
    """Where this rank's tokens stand: tables of the rotary embedding, S x D/2 each, None where the model has
    none; and the document of each token, B x S, None where a sequence is one document."""

    cos_SD: Tensor | None
    sin_SD: Tensor | None
    document_BS: Tensor | None

    def rotate(self, x_BSHD: Tensor, first: int = 0, *, interleaved: bool = False) -> Tensor:
        """Heads with the numbers from ``first`` on turned; see ``kernels.rotate``."""
        assert self.cos_SD is not None, "a model with rotary embedding"
        assert self.sin_SD is not None
        return rotate(x_BSHD, self.cos_SD, self.sin_SD, first, interleaved=interleaved)


def rotated_size(spec: ModelSpec) -> int:
    """Numbers of a head that are rotated."""
    return spec.mla.rope_size if spec.mla is not None else int(spec.head_size * spec.rotary_share)


def rotary_tables(spec: ModelSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each of ``positions`` (S) and every frequency, S x D/2 each; YaRN scales both."""
    size = rotated_size(spec)
    exponent = torch.arange(0, size, 2, device=positions.device, dtype=dtype) / size
    frequency = 1.0 / spec.rope_theta**exponent
    if spec.rope_scaling is not None:
        frequency = _llama3_frequency(frequency, spec.rope_scaling)
    if spec.linear_rope is not None:
        frequency = frequency / spec.linear_rope
    if spec.yarn is not None:
        frequency = _yarn_frequency(frequency, spec.yarn, spec.rope_theta)
    angle_SD = torch.outer(positions.to(dtype), frequency)
    if spec.yarn is None:
        return angle_SD.cos(), angle_SD.sin()
    return angle_SD.cos() * spec.yarn.attention_factor, angle_SD.sin() * spec.yarn.attention_factor


def _llama3_frequency(frequency: Tensor, rope: Llama3Rope) -> Tensor:
    """Low frequencies divided by the factor, high ones kept, those between blended.

    Source: transformers modeling_rope_utils.py, ``_compute_llama3_parameters``.
    """
    turns = rope.original_positions * frequency / (2 * math.pi)
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequency * (blend + (1 - blend) / rope.factor)


def _yarn_frequency(frequency: Tensor, yarn: Yarn, theta: float) -> Tensor:
    """Frequencies of fewer than ``beta_slow`` turns divided by the factor, of more than ``beta_fast`` kept.

    Between them the blend is linear in the number of the frequency.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.2; transformers ``_compute_yarn_parameters``.
    """
    size = 2 * len(frequency)

    def number_of(turns: float) -> float:
        ratio = math.log(yarn.original_positions / (turns * 2 * math.pi))
        return size * ratio / (2 * math.log(theta))

    low, high = number_of(yarn.beta_fast), number_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 * (low == high)  # no division by zero
    number = torch.arange(len(frequency), device=frequency.device, dtype=frequency.dtype)
    stretched = ((number - low) / (high - low)).clamp(0, 1)
    return frequency * (1 - stretched) + frequency / yarn.factor * stretched
