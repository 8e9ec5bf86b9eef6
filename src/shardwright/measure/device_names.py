"""Names by which drivers and people call a device, as presets of ours."""

import re

from shardwright.cluster import Device, device

_KNOWN = (
    *("GB300", "GB200", "GB10", "B300", "B200", "H200", "H100", "H800", "H20", "A100", "A800", "A40", "A10"),
    *("V100", "L40S", "L40", "L4", "T4", "P100", "RTX A6000", "RTX 6000 Ada", "5090", "4090", "3090"),
    *("2080 ?Ti", "MI355X", "MI325X", "MI300X", "MI300A", "MI250X", "MI250", "MI210", "MI100"),
)
_DEVICE = re.compile(
    r"(?:(?:NVIDIA|AMD|Instinct|Tesla|GeForce|RTX)[ -]+)*(?<![A-Za-z0-9])(?:"
    + "|".join(_KNOWN)
    + r")(?:[ -]+(?:SXM\d?|PCI[eE]|NVL|HBM\w+|NVSwitch|HGX|DGX|\d+ ?GB))*(?![A-Za-z0-9])"
)

_PRESETS = (
    ("GB300", "gb300"), ("GB200", "gb200"), ("B300", "b300-sxm-288gb"), ("B200", "b200"), ("H200", "h200"),
    ("H100.*PCI", "h100-pcie"), ("H100.*NVL(?!ink|INK)", "h100-nvl"), ("H100", "h100"), ("H800", "h800"),
    ("H20(?!0)", "h20"), ("A100.*PCI", "a100-pcie"), ("A100.*40 ?GB", "a100-40"), ("A100", "a100"),
    ("A800", "a800"), ("V100.*32", "v100-sxm-32gb"), ("V100", "v100-sxm-16gb"), ("L40S", "l40s"),
    ("4090", "rtx4090"), ("MI355X", "mi355x-288gb"), ("MI325X", "mi325x-256gb"), ("MI300X", "mi300x"),
    ("MI250X", "mi250x-128gb"),
)  # fmt: skip


def device_words(text: str) -> str:
    """The part of ``text`` that names a device, with its form; empty if it names none."""
    found = _DEVICE.search(text)
    return found[0].strip() if found else ""


def preset_of(words: str) -> Device | None:
    """The shipped device that ``words`` name, with what published runs say of it; None: none of them."""
    for pattern, name in _PRESETS:
        if re.search(rf"(?<![A-Za-z0-9]){pattern}", words):
            return device(name, fitted=True)
    return None
