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
