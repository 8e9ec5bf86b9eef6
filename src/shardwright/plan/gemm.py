"""Time of a matrix product: waves of tiles over multiprocessors, filling a pipeline, memory, launch."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cluster import Device
from shardwright.plan.activations import ELEMENT_BYTES
from shardwright.plan.table import Floats

TILES = (
    (128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (256, 64, 0.9), (64, 256, 0.9), (128, 64, 0.85),
    (64, 128, 0.85), (64, 64, 0.7),
)  # fmt: skip
"""Rows and columns of an output tile, and its rate over that of the largest. Source: shared FORMULAE 5.3."""

_TILE_COLUMNS = np.array(TILES).T

SPLIT_TILE = (128, 0.95)
"""Edge and rate of the tile by which the inner dimension is shared out, where tiles are few."""

INPUT_BYTES: Mapping[str, int] = {**ELEMENT_BYTES, "fp8": 1}
"""Bytes of an element that a product reads; it writes what ``ELEMENT_BYTES`` says."""

PARTIAL_BYTES = 8
"""A partial sum in fp32, written and read."""


def product_rate(device: Device, precision: str) -> float:
    """What a large product reaches [FLOP/s]; fp8 on a device without such units is bf16."""
    eights = precision == "fp8" and device.fp8 > 0
    return device.peak(precision) * device.matmul_efficiency * (device.fp8_factor if eights else 1.0)


def product_precision(device: Device, precision: str) -> str:
    """The arithmetic that ``device`` does a product of ``precision`` in."""
    return "bf16" if precision == "fp8" and not device.fp8 else precision


def gemm_time(
    m: ArrayLike, n: ArrayLike, k: ArrayLike, device: Device, precision: str, groups: ArrayLike = 1
) -> Floats:
    """Time of ``groups`` equal products of m x k with k x n in one kernel [s]. All broadcast.

    The best of a few tiles; each wave of them takes as long as a full one, and every tile ``gemm_fill`` steps
    of k before it works. Where a tile has two multiprocessors and more, they share out k and add the parts.
    No faster than reading the inputs and writing the output. On a device without multiprocessors (CPU) a
    product runs at one rate.

    Source: shared FORMULAE 5.3; NVIDIA, Matrix Multiplication Background User's Guide, 3.1 and 3.2.
    """
    m, n, k, groups = (np.asarray(x, dtype=np.float64) for x in (m, n, k, groups))
    rate = product_rate(device, precision)
    outputs = groups * m * n
    precision = product_precision(device, precision)
    moved = INPUT_BYTES[precision] * groups * k * (m + n) + ELEMENT_BYTES[precision] * outputs
    memory = moved / memory_rate(device)
    if device.sms:
        work = _padded_outputs(m, n, groups, device.sms) * (k + device.gemm_fill)
        work = np.minimum(work, _split_work(m, n, k, groups, device, rate))
    else:
        work = outputs * k
    return np.asarray(np.maximum(2 / rate * work, memory) + device.launch)


def memory_rate(device: Device) -> float:
    """What a memory-bound operation moves [B/s]."""
    return device.memory_bandwidth * device.memory_efficiency


def _padded_outputs(m: Floats, n: Floats, groups: Floats, sms: int) -> Floats:
    """Outputs that would take as long at the full rate: those of whole waves of the best tile."""
    axes = (1,) * max(m.ndim, n.ndim, groups.ndim)
    heights, widths, speeds = (column.reshape(-1, *axes) for column in _TILE_COLUMNS)
    tiles = np.ceil(m / heights) * groups / sms * np.ceil(n / widths)
    waves = np.ceil(tiles - 1e-9)  # a whole number of waves may round up
    return np.asarray((waves * (heights * widths * sms / speeds)).min(axis=0))


def _split_work(m: Floats, n: Floats, k: Floats, groups: Floats, device: Device, rate: float) -> Floats:
    """Multiply-adds at the full rate if k is cut into as many parts as there are multiprocessors for a tile;
    infinite where there are not two."""
    edge, speed = SPLIT_TILE
    parts = np.floor(device.sms / (np.ceil(m / edge) * np.ceil(n / edge) * groups))
    work = (k / np.maximum(parts, 1.0) + device.gemm_fill) * (edge * edge * device.sms / speed)
    sums = groups * m * n * parts * (PARTIAL_BYTES / memory_rate(device) * rate / 2)
    return np.asarray(np.where(parts > 1, work + sums, np.inf))
