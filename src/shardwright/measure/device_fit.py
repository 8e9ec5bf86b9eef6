"""From measured operations to the constants of a device, through the step-time model's own formulas."""

from collections.abc import Iterator, Sequence

import numpy as np

from shardwright.bandwidth_map import DevicePoint
from shardwright.cluster import Device
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.attention import attention_times
from shardwright.plan.compute import optimizer_time_per_parameter
from shardwright.plan.gemm import gemm_time, memory_rate
from shardwright.program import Program

EFFICIENCIES = np.geomspace(0.02, 1.0, 160)
"""Shares of the peak that are tried: 2.5 % apart."""

AROUND = np.linspace(0.975, 1.025, 21)
"""Of the best of these, what is tried next."""

FILLS = (0.0, 32.0, 64.0, 98.0, 128.0, 192.0, 256.0, 384.0, 512.0)
"""Steps of the inner dim that are tried for filling a tile's pipeline."""

MOST_BACKWARD = 2.0
"""Of ``Device.attention_backward``."""


def fitted_device(device: Device, model: ModelSpec, points: Sequence[DevicePoint]) -> Device:
    """``device`` with the constants that fit ``points`` best. A rate above its peak raises the peak.

    Products: the least sum of |ln(predicted / measured)| over efficiency and ``gemm_fill``. Memory: the mean
    of the logarithms of copy and optimizer.
    """
    launches = [point.time for point in points if point.what == "launch"]
    if launches:
        device = device.model_copy(update={"launch": launches[0]})
    device = _with_memory(device, model, [p for p in points if p.what in ("copy", "optimizer")])
    device = _with_products(device, [p for p in points if p.what == "product"])  # they are no faster than it
    return _with_attention(device, model, points)


def with_predictions(
    points: Sequence[DevicePoint], device: Device, model: ModelSpec
) -> Iterator[DevicePoint]:
    """The points beside what the model says of each on ``device``."""
    for point in points:
        yield point.model_copy(update={"predicted": predicted_time(point, device, model)})


def predicted_time(point: DevicePoint, device: Device, model: ModelSpec) -> float:
    """What the step-time model says of a measured operation [s]."""
    shape = point.shape
    if point.what == "product":
        rows, columns, inner = shape
        return float(gemm_time(rows, columns, inner, device, point.precision))
    if point.what == "launch":
        return device.launch
    if point.what == "copy":
        return 2 * shape[0] / memory_rate(device)
    if point.what == "optimizer":
        job = Job.checked({"seq": 1, "global_batch": 1, "precision": point.precision})
        return shape[0] * optimizer_time_per_parameter(job, device)
    heads, kv_heads, seq, size = shape
    part = model.model_copy(
        update={"heads": heads, "kv_heads": kv_heads, "head_size": size, "mla": None, "sliding_window": None}
    )
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    times = attention_times(
        part, seq, point.precision, device, Program(), np.array([float(seq)]), one, one, none
    )
    return float((times.forward if point.what == "attention_forward" else times.backward)[0])


def _with_products(device: Device, points: Sequence[DevicePoint]) -> Device:
    if not points:
        return device
    precision = points[0].precision
    m, n, k = (np.array([point.shape[dim] for point in points], np.float64) for dim in range(3))
    times = np.array([point.time for point in points])
    fastest = float((2 * m * n * k / times).max())
    if fastest > device.peak(precision):
        device = device.model_copy(update={precision: fastest})

    def best_of(efficiencies: Sequence[float], fill: float) -> tuple[float, float, Device]:
        tried = (
            device.model_copy(update={"matmul_efficiency": share, "gemm_fill": fill})
            for share in efficiencies
        )
        found = (
            (float(np.abs(np.log(gemm_time(m, n, k, each, precision) / times)).sum()), each) for each in tried
        )
        error, least = min(found, key=lambda pair: pair[0])
        return error, fill, least

    fitted = []
    for fill in FILLS if device.sms else (device.gemm_fill,):
        _, _, near = best_of(EFFICIENCIES.tolist(), fill)
        fitted.append(best_of(np.minimum(near.matmul_efficiency * AROUND, 1.0).tolist(), fill))
    return min(fitted, key=lambda each: each[:2])[2]


def _with_memory(device: Device, model: ModelSpec, points: Sequence[DevicePoint]) -> Device:
    if not points:
        return device
    whole = device.model_copy(update={"memory_efficiency": 1.0})
    shares = [predicted_time(point, whole, model) / point.time for point in points]
    share = float(np.exp(np.mean(np.log(shares))))
    bandwidth = device.memory_bandwidth * max(share, 1.0)
    return device.model_copy(update={"memory_bandwidth": bandwidth, "memory_efficiency": min(share, 1.0)})


def _with_attention(device: Device, model: ModelSpec, points: Sequence[DevicePoint]) -> Device:
    found = {point.what: point for point in points}
    ahead, back = found.get("attention_forward"), found.get("attention_backward")
    if ahead is None or back is None:
        return device
    known = device.attention_efficiency * predicted_time(ahead, device, model) / ahead.time
    device = device.model_copy(update={"attention_efficiency": min(known, 1.0), "attention_backward": 1.0})
    rate = predicted_time(back, device, model) / back.time
    return device.model_copy(update={"attention_backward": min(rate, MOST_BACKWARD)})
