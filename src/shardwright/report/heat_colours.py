"""Colours of a heat map, which people who cannot tell red from green read as well as others.

From dark (slow) to light (fast), like viridis of matplotlib, whose lightness grows all the way.
"""

import math

STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Viridis at 0, 1/4, 1/2, 3/4 and 1: red, green, blue. Source: matplotlib, _cm_listed.py."""


def place_of(value: float, low: float, high: float) -> float:
    """Where ``value`` is between ``low`` and ``high`` on a logarithmic scale, 0 to 1."""
    if high <= low or value <= 0:
        return 1.0
    return min(max(math.log(value / low) / math.log(high / low), 0.0), 1.0)


def colour_at(place: float) -> str:
    """``#rrggbb`` at 0 (slow) to 1 (fast)."""
    at = min(max(place, 0.0), 1.0) * (len(STOPS) - 1)
    below = min(int(at), len(STOPS) - 2)
    mixed = (round(a + (b - a) * (at - below)) for a, b in zip(STOPS[below], STOPS[below + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink_on(place: float) -> str:
    """Black or white, whichever is read on the colour at ``place``."""
    return "#ffffff" if place < 0.6 else "#000000"
