"""Links with a known shape: network namespaces joined by cables that `tc` limits."""

import os
import socket
import statistics
import time

import pytest

from conftest import measured

FAST, SLOW = 2000, 250
"""Megabits per second inside a namespace and between two."""


def by_hand(network, seconds=0.5):
    """Bandwidth of a plain TCP connection from rank 0 to rank 1 and to rank 2 [B/s]."""
    rank = int(os.environ["RANK"])
    if rank:
        with socket.create_server(("", 29600 + rank)) as server:
            connection = server.accept()[0]
            count, begin = 0, 0.0
            while data := connection.recv(2**16):
                begin = begin or time.perf_counter()
                count += len(data)
            rate = count / (time.perf_counter() - begin)
            connection.sendall(repr(rate).encode())
            connection.close()
        return None
    return [_send_to(network.address(place), 29600 + rank, seconds) for place, rank in ((0, 1), (1, 2))]


def _send_to(address, port, seconds):
    end = time.monotonic() + 5
    while True:
        try:
            connection = socket.create_connection((address, port))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.02)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(b"x" * 2**16)
    connection.shutdown(socket.SHUT_WR)
    return float(connection.recv(100))


def test_two_nodes_are_found_and_the_plan_follows(network, tmp_path):
    two = network(2)
    two.shape_inside(FAST)
    two.shape(0, 1, SLOW)
    hand = two.ranks([0, 0, 1], by_hand, two)
    start = time.monotonic()
    cluster = two.ranks([0, 0, 1, 1], measured, 8.0, 2**22, tmp_path / "cluster.toml")
    print(time.monotonic() - start)
    print(hand)
    intra = statistics.median(p.bandwidth for p in cluster.map.pairs if p.source // 2 == p.target // 2)
    inter = statistics.median(p.bandwidth for p in cluster.map.pairs if p.source // 2 != p.target // 2)
    print(intra, inter, intra/inter)
    print(cluster.to_toml())
    open("/tmp/w/two.toml","w").write(cluster.to_toml())
