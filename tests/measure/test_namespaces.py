"""Links with a known shape: network namespaces joined by cables that `tc` limits."""

import json
import socket
import statistics
import subprocess
import sys
import time

import pytest

from conftest import measured

MEGABITS = 400
RATE = MEGABITS * 1e6 / 8


def by_hand(network, namespace, address, count):
    """Bandwidth of a plain TCP connection from here to a namespace [B/s]."""


def test_two_nodes_are_found_and_the_plan_follows(network, tmp_path):
    two = network(2)
    two.shape(0, 1, MEGABITS)
    start = time.monotonic()
    cluster = two.ranks([0, 0, 1, 1], measured, 8.0, 2**22, tmp_path / "cluster.toml")
    print(time.monotonic() - start)
    print(cluster.to_toml())


def test_a_pair_that_hangs_is_named(network):
    four = network(4)
    four.cut(2, 3)
    start = time.monotonic()
    cluster = four.ranks([0, 1, 2, 3], measured, 12.0, 2**16)
    print(time.monotonic() - start)
    for u in cluster.map.unmeasured: print(u)
    print([(p.source,p.target, p.bandwidth) for p in cluster.map.pairs])


def test_a_slow_pair_shows(network):
    four = network(4)
    for a, b in ((0,1),(0,2),(0,3),(1,2),(2,3)): four.shape(a, b, 800)
    four.shape(1, 3, 100)
    start = time.monotonic()
    cluster = four.ranks([0, 1, 2, 3], measured, 8.0, 2**20)
    print(time.monotonic() - start)
    for u in cluster.map.unmeasured: print(u)
    print([(p.source,p.target, p.bandwidth) for p in cluster.map.pairs], cluster.assumed)
