"""`map --device`: a model's operations measured on this device, and the device's constants from them."""

import platform
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from shardwright.bandwidth_map import DevicePoint, MapRecord, Unmeasured
from shardwright.cluster import Cluster, Device, cluster_of, device, host_memory, usable_cores
from shardwright.errors import ClusterError
from shardwright.measure.call_time import timing
from shardwright.measure.device_fit import fitted_device, predicted_time, with_predictions
from shardwright.measure.device_names import preset_of
from shardwright.measure.device_points import measured_points, sizes_of
from shardwright.model import ModelSpec
from shardwright.run.dp import PRECISION_DTYPE

LIKE_UNKNOWN = "rtx4090"
"""Whose links, margins and efficiencies a GPU takes that no device file describes: a card on PCIe."""

PEAKS = {"fp32": torch.float32, "fp64": torch.float64}

PEAK_EDGE = 4096
"""Of the square products that stand for the peaks of a GPU without a file."""


def measure_device(model: ModelSpec, seq: int, base: Cluster | None, say: Callable[[str], None]) -> Cluster:
    """``base``, or one device, with constants measured on this machine at the shapes of ``model``.

    Its map holds every operation beside what the step-time model says of it. About 30 s on two CPU cores.

    Raises: ClusterError: ``base`` is of another kind of device than this machine has.
    """
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = (
        torch.device("cpu")
        if here is None
        else torch.device(here.type, torch.accelerator.current_device_index())
    )
    cluster, assumed = _cluster_here(here, base, say)
    known = cluster.device
    precision = "bf16" if here.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    points, left_out = _measure(model, seq, precision, here, cluster, say)
    found = fitted_device(known, model, points)
    what = f"rates measured here in {precision} with torch {torch.__version__} at the shapes of {model.name}"
    found = found.model_copy(update={"source": f"{what}. Launch: of a small kernel, without FSDP's hooks. "
                                     f"All else: {known.source}"})  # fmt: skip
    points = list(with_predictions(points, found, model))
    tests = [point for point in points if point.tests_the_fit]
    times = [point.time for point in tests]
    before = _error(times, [predicted_time(point, known, model) for point in tests])
    after = _error(times, [point.predicted for point in tests])
    say(f"the step-time model is within {after:.1%} of what was measured at the median, before {before:.1%}")
    record = (cluster.map or MapRecord()).model_copy(
        update={
            "date": datetime.now(UTC).date().isoformat(),
            "source": f"{what}, {_name_of(here)}",
            "device_points": tuple(points),
            "unmeasured": (*(cluster.map.unmeasured if cluster.map else ()), *left_out),
        }
    )
    lines = (*cluster.assumed, *assumed, f"efficiencies measured on this {known.name} in {precision}")
    return cluster.model_copy(update={"device": found, "map": record, "assumed": lines})


def _measure(
    model: ModelSpec,
    seq: int,
    precision: str,
    here: torch.device,
    cluster: Cluster,
    say: Callable[[str], None],
) -> tuple[list[DevicePoint], list[Unmeasured]]:
    """All operations; on a CPU with the threads that one rank of ``cluster`` has."""
    threads = torch.get_num_threads()
    free = torch.cuda.mem_get_info(here)[0] * 4 // 5 if here.type == "cuda" else host_memory() // 3
    if here.type == "cpu":
        torch.set_num_threads(max(usable_cores() // min(cluster.ranks, cluster.gpus_per_node), 1))
    points: list[DevicePoint] = []
    left_out: list[Unmeasured] = []
    try:
        dtype = PRECISION_DTYPE[precision]
        sizes = sizes_of(free, here.type != "cpu")
        for each in measured_points(model, seq, precision, dtype, here, sizes):
            if isinstance(each, DevicePoint):
                points.append(each)
                say(_words(each))
            else:
                left_out.append(each)
                say(f"{each.what}: left out, {each.reason}")
    finally:
        torch.set_num_threads(threads)
    return points, left_out


def _words(point: DevicePoint) -> str:
    """One line of progress."""
    shape = " x ".join(str(n) for n in point.shape)
    unit = "GB/s" if point.what in ("copy", "optimizer") else "GFLOP/s"
    rate = f", {point.rate / 1e9:,.1f} {unit}" if point.rate else ""
    return f"{point.name} {shape}: {1e3 * point.time:,.3f} ms{rate} (spread {point.spread:.0%})"


def _error(times: list[float], predicted: list[float]) -> float:
    """Median of |predicted / measured - 1|."""
    errors = sorted(abs(p / t - 1) for p, t in zip(predicted, times, strict=True))
    return errors[len(errors) // 2]


# What this machine has


def _cluster_here(
    here: torch.device, base: Cluster | None, say: Callable[[str], None]
) -> tuple[Cluster, tuple[str, ...]]:
    """``base`` if it is of this machine's kind, or a cluster of one of its devices; and what is assumed."""
    if base is not None:
        if (base.device.kind == "cpu") != (here.type == "cpu"):
            raise ClusterError(
                f"device {base.device.name} of --cluster is no {_name_of(here)}, which is here: "
                "measure where such a device is, or leave --cluster out"
            )
        return base, ()
    if here.type == "cpu":
        return cluster_of("cpu", 1), ()
    known = preset_of(torch.cuda.get_device_name(here))
    if known is not None:
        return cluster_of(known.name, 1, 1, fitted=True), ()
    found = _unknown_device(here, say)
    line = f"no device file describes {found.name}: links and margins of {LIKE_UNKNOWN}, peaks as measured"
    return Cluster(ranks=1, gpus_per_node=1, device=found), (line,)


def _unknown_device(here: torch.device, say: Callable[[str], None]) -> Device:
    """A GPU without a file: capacities from its driver, peaks from large products, all else like a card on
    PCIe."""
    about: Any = torch.cuda.get_device_properties(here)
    say(f"{about.name} is no known device: measuring its peaks")
    peaks = {}
    for precision, dtype in ({"bf16": torch.bfloat16} | PEAKS).items():
        edge = PEAK_EDGE // (4 if precision == "fp64" else 1)
        a, b = (torch.randn(edge, edge, device=here).to(dtype) for _ in range(2))
        peaks[precision] = 2 * edge**3 / timing(partial(torch.mm, a, b), here).time
    like = device(LIKE_UNKNOWN)
    values = {
        **peaks,
        "name": about.name.lower().replace(" ", "-"),
        "aliases": (),
        "memory": about.total_memory,
        "sms": about.multi_processor_count,
        "fp8": 0.0,
        "fit": None,
        "source": f"peaks measured as square products of {PEAK_EDGE}; links and margins: {like.name}",
    }
    return like.model_copy(update=values)


def _name_of(here: torch.device) -> str:
    return torch.cuda.get_device_name(here) if here.type == "cuda" else f"CPU ({platform.machine()})"
