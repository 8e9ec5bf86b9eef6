"""Devices shared out into groups of which every two are joined."""

from collections.abc import Callable, Iterable


def cliques(n: int, joined: Callable[[int, int], bool]) -> tuple[tuple[int, ...], ...]:
    """Groups of the devices 0 to ``n`` - 1 in which every pair is ``joined``, the largest shared out first;
    each grown from one device by number. Not the fewest groups there can be: that is a search."""
    left, found = list(range(n)), []
    while left:
        group = max((_grown(joined, left, seed) for seed in left), key=len)
        left = [device for device in left if device not in group]
        found.append(group)
    return tuple(sorted(found))


def _grown(joined: Callable[[int, int], bool], left: Iterable[int], seed: int) -> tuple[int, ...]:
    group = [seed]
    for device in left:
        if device != seed and all(joined(device, other) for other in group):
            group.append(device)
    return tuple(sorted(group))
