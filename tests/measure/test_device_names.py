"""Names that drivers and people give devices, as the devices that are shipped."""

import pytest

from shardwright.measure.device_names import device_words, preset_of


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA B200", "b200-sxm-180gb"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm-288gb"),
        ("NVIDIA GB200", "gb200-186gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-sxm-80gb"),
        ("NVIDIA H20", "h20-96gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("Tesla V100-SXM3-32GB", "v100-sxm-32gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("8x H100 with 50 GB/s each", "h100-sxm-80gb"),
    ],
)
def test_a_name_means_a_device(said, known):
    found = preset_of(said)
    assert found is not None
    assert found.name == known


@pytest.mark.parametrize(
    "said",
    [
        "NVIDIA A100-PCIE-40GB",  # the file is of the card with 80 GB
        "A100-SXM-64GB",
        "NVIDIA H100 96GB HBM3",
        "NVIDIA H200 NVL",
        "Tesla V100-PCIE-16GB",
        "NVIDIA L40",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3060",
        "Tesla K80",
    ],
)
def test_what_is_like_a_device_is_not_taken_for_it(said):
    assert preset_of(said) is None


def test_words_that_name_a_device_are_found_in_a_sentence():
    assert device_words("two nodes of H100 80GB HBM3 over 400 Gb/s") == "H100 80GB HBM3"
    assert device_words("each H100 50 GB/s") == "H100"
    assert device_words("nothing here") == ""
