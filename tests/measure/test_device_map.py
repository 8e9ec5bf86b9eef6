"""A device measured on the CPU, and constants found again from operations that the model itself made."""

import time
from io import StringIO

import numpy as np
import pytest
import torch
from rich.console import Console

from shardwright.bandwidth_map import DevicePoint
from shardwright.cluster import Cluster, cluster_of, device
from shardwright.errors import ClusterError
from shardwright.measure.device_fit import fitted_device, predicted_time, with_predictions
from shardwright.measure.device_map import measure_device
from shardwright.measure.device_points import product_shapes
from shardwright.measure.document import map_document
from shardwright.model import ModelSpec, preset
from shardwright.report.map import map_report

TINY = ModelSpec(
    name="tiny", model_type="llama", layers=2, hidden=512, ffn=1024, vocab=2048,
    heads=8, kv_heads=4, head_size=64,
)  # fmt: skip
SEQ = 256


@pytest.fixture(scope="module")
def measured():
    said = []
    return measure_device(TINY, SEQ, None, said.append), said


def errors(points, kind):
    products = [p for p in points if p.what == "product"]
    return [abs(np.log(predicted_time(p, kind, TINY) / p.time)) for p in products]


@pytest.mark.live
def test_every_operation_is_measured_and_said(measured):
    cluster, said = measured
    points = cluster.map.device_points
    assert [p.what for p in points].count("product") == 3 * len(product_shapes(TINY)) == 3 * 5
    assert {p.what for p in points} == {
        *("product", "attention_forward", "attention_backward", "copy", "optimizer", "launch")
    }
    assert all(p.time > 0 and p.predicted > 0 and (p.rate > 0) == (p.what != "launch") for p in points)
    assert len(said) == len(points) + 1
    assert cluster.map.unmeasured == ()
    assert "measured here in fp32 with torch" in cluster.device.source
    assert cluster.assumed[-1] == "efficiencies measured on this cpu in fp32"
    assert Cluster.from_toml(cluster.to_toml()) == cluster


@pytest.mark.live
def test_a_product_takes_what_a_loop_by_hand_takes(measured):
    point = next(p for p in measured[0].map.device_points if p.name == "gate+up, forward")
    assert point.shape == (SEQ, 1024, 512)
    x, weight = torch.randn(SEQ, 512), torch.randn(1024, 512)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        torch.mm(x, weight.t())
        times.append(time.perf_counter() - start)
    assert 1 / 3 < point.time / float(np.median(times)) < 3  # of a machine that others use too
    assert point.rate == pytest.approx(2 * SEQ * 1024 * 512 / point.time)


@pytest.mark.live
def test_what_is_fitted_predicts_better_than_what_is_shipped(measured):
    cluster, _ = measured
    points = cluster.map.device_points
    assert sum(errors(points, cluster.device)) < sum(errors(points, cluster_of("cpu", 1).device))
    document = map_document(cluster, [])
    found = [
        abs(np.log(p["predicted"] / p["time"]))
        for p in document["device_points"]
        if p["what"] in ("product", "copy", "optimizer")
    ]  # the others have a constant each
    console = Console(width=120, record=True, file=StringIO())
    console.print(map_report(document))
    text = console.export_text()
    assert all(p.name in text for p in points)
    assert f"median {np.median(found):.3f}, largest {max(found):.3f}" in text
    assert document["device_residual"] == pytest.approx({"median": np.median(found), "largest": max(found)})


def test_constants_of_a_gpu_are_found_again_from_what_they_make():
    model, shipped = preset("llama-3.1-8b"), device("h100")
    truth = shipped.model_copy(
        update={"matmul_efficiency": 0.62, "gemm_fill": 256.0, "attention_efficiency": 0.5, "launch": 9e-6,
                "attention_backward": 0.7, "memory_efficiency": 0.8}
    )  # fmt: skip
    shapes = [
        ("product", shape)
        for n, k in product_shapes(model).values()
        for shape in ((4096, n, k), (4096, k, n), (n, k, 4096))
    ]
    shapes += [("launch", ()), ("copy", (2**30,)), ("optimizer", (2**27,))]
    shapes += [(f"attention_{way}", (32, 8, 4096, 128)) for way in ("forward", "backward")]
    points = [
        DevicePoint(what=what, name=what, shape=shape, precision="bf16", time=1.0) for what, shape in shapes
    ]
    points = [p.model_copy(update={"time": predicted_time(p, truth, model)}) for p in points]
    found = fitted_device(shipped, model, points)
    assert found.gemm_fill == 256
    for name in (
        "matmul_efficiency",
        "attention_efficiency",
        "attention_backward",
        "memory_efficiency",
        "launch",
    ):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.015), name
    assert found.bf16 == shipped.bf16
    for point in with_predictions(points, found, model):
        assert point.predicted == pytest.approx(point.time, rel=0.03)


def test_rates_above_a_peak_raise_it():
    slow = device("h100").model_copy(update={"bf16": 1e12, "memory_bandwidth": 1e11})
    points = [
        DevicePoint(what="product", name="p", shape=(4096,) * 3, precision="bf16", time=2 * 4096**3 / 6e14),
        DevicePoint(what="copy", name="c", shape=(2**30,), time=2 * 2**30 / 2e12),
    ]
    found = fitted_device(slow, TINY, points)
    assert found.bf16 == pytest.approx(6e14)
    assert 0.9 < found.matmul_efficiency <= 1
    assert (found.memory_bandwidth, found.memory_efficiency) == (pytest.approx(2e12), 1.0)


def test_a_base_keeps_its_links_and_must_be_of_this_kind():
    with pytest.raises(ClusterError, match=r"device h100-sxm-80gb of --cluster is no CPU"):
        measure_device(TINY, SEQ, cluster_of("h100", 8), print)
