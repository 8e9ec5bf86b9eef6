"""Maps of clusters made by tests: pairs at their level's bandwidth, with noise and faults of known place."""

import numpy as np

from shardwright.bandwidth_map import MapRecord, Pair
from shardwright.cluster import cluster_of

NVLINK, NETWORK = 367e9, 47e9
"""What an H100 and its NIC give a rank [B/s]: data/devices/h100-sxm-80gb.toml."""


def made(nodes, per_node=8, device="h100", fault=None, noise=0.05, seed=0, rails_only=False, **record):
    """A cluster; ``fault(a, b)`` is the share of its bandwidth that a direction has."""
    random = np.random.default_rng(seed)
    ranks = nodes * per_node
    pairs = []
    for a in range(ranks):
        for b in range(ranks):
            inside = a // per_node == b // per_node
            if a == b or (rails_only and not inside and a % per_node != b % per_node):
                continue
            usual = NVLINK if inside else NETWORK
            share = 1.0 if fault is None else fault(a, b)
            rate = usual * share * (1 + noise * random.standard_normal())
            pairs.append(Pair(a, b, max(rate, 1e6), 4e-6 if inside else 12e-6))
    record = MapRecord(date="2026-11-30", source="made", pairs=tuple(pairs), **record)
    return cluster_of(device, ranks, per_node).model_copy(update={"map": record})


def between(node, per_node=8, share=0.5):
    """A fault of all pairs of one node with others."""
    return lambda a, b: share if (a // per_node == node) != (b // per_node == node) else 1.0
