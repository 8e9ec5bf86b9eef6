"""Names by which drivers and people call a device, as presets of ours."""

import re

from shardwright.cluster import Device, device
from shardwright.units import GB

_KNOWN = (
    *("GB300", "GB200", "GB10", "B300", "B200", "H200", "H100", "H800", "H20", "A100", "A800", "A40", "A10"),
    *("V100", "L40S", "L40", "L4", "T4", "P100", "RTX A6000", "RTX 6000 Ada", "5090", "4090", "3090"),
    *("2080 ?Ti", "MI355X", "MI325X", "MI300X", "MI300A", "MI250X", "MI250", "MI210", "MI100"),
)
_DEVICE = re.compile(
    r"(?:(?:NVIDIA|AMD|Instinct|Tesla|GeForce|RTX)[ -]+)*(?<![A-Za-z0-9])(?:"
    + "|".join(_KNOWN)
    + r")(?:[ -]+(?:SXM\d?|PCI[eE]|NVL|HBM\w+|NVSwitch|HGX|DGX|\d+ ?GB(?!/|ps)))*(?![A-Za-z0-9])"
)
_MEMORY = re.compile(r"(?<![\w.])(\d+) ?GB(?!/|ps)")

SAME_MEMORY = 0.1
"""What a card is sold with and what its file has differ by less: units, and what is kept from processes."""

_PRESETS = (
    ("GB300", "gb300"), ("GB200", "gb200"), ("B300", "b300-sxm-288gb"), ("B200", "b200"),
    ("H200(?!.*NVL(?!ink|INK))", "h200"), ("H100.*96 ?GB HBM2e", "h100-96gb"),
    ("H100.*PCI", "h100-pcie"), ("H100.*NVL(?!ink|INK)", "h100-nvl"), ("H100", "h100"), ("H800", "h800"),
    ("H20(?!0)", "h20"), ("A100.*PCI", "a100-pcie"), ("A100.*40 ?GB", "a100-40"), ("A100", "a100"),
    ("A800", "a800"), ("V100(?!.*PCI).*32", "v100-sxm-32gb"), ("V100(?!.*PCI)", "v100-sxm-16gb"),
    ("L40S", "l40s"), ("4090(?! D| Laptop)", "rtx4090"), ("MI355X", "mi355x-288gb"),
    ("MI325X", "mi325x-256gb"), ("MI300X", "mi300x"), ("MI250X", "mi250x-128gb"),
)  # fmt: skip


def device_words(text: str) -> str:
    """The part of ``text`` that names a device, with its form; empty if it names none."""
    found = _DEVICE.search(text)
    return found[0].strip() if found else ""


def preset_of(words: str) -> Device | None:
    """The shipped device that ``words`` name, with what published runs say of it; None: none of them, also
    if one is like it but for its memory, or if they name a part of one (MIG)."""
    if re.search(r"\bMIG\b", words):
        return None
    for pattern, name in _PRESETS:
        if re.search(rf"(?<![A-Za-z0-9]){pattern}", words):
            known = device(name, fitted=True)
            sizes = [int(size) * GB for size in _MEMORY.findall(words)]
            return known if all(abs(size / known.memory - 1) < SAME_MEMORY for size in sizes) else None
    return None
