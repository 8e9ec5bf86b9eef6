"""Links of known shape, measured: nodes, their ratio, a slow pair, one that hangs, and a plan of it."""

import json
import os
import socket
import statistics
import time

import pytest
from namespaces import measured

from shardwright.cli import main

pytestmark = pytest.mark.live

FAST, SLOW = 2000, 250
"""Megabits per second inside a namespace and between two."""

PORT = 29600


def by_hand(network):
    """Bandwidth of a plain TCP connection from rank 0 to rank 1, beside it, and to rank 2 [B/s]."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        return [_sent(network.address(place), PORT + other) for place, other in ((0, 1), (1, 2))]
    with socket.create_server(("", PORT + rank)) as server, server.accept()[0] as connection:
        begin, count = time.perf_counter(), 0
        while data := connection.recv(2**16):
            count += len(data)
        connection.sendall(repr(count / (time.perf_counter() - begin)).encode())
    return None


def _sent(address, port):
    """What the receiver of half a second of data says that it came with."""
    for _ in range(200):
        try:
            connection = socket.create_connection((address, port))
            break
        except ConnectionRefusedError:  # it is not there yet
            time.sleep(0.02)
    with connection:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            connection.sendall(b"x" * 2**16)
        connection.shutdown(socket.SHUT_WR)
        return float(connection.recv(100))


def bandwidth(cluster, pairs):
    """Median of both directions of ``pairs``."""
    wanted = {frozenset(pair) for pair in pairs}
    return statistics.median(
        pair.bandwidth for pair in cluster.map.pairs if {pair.source, pair.target} in wanted
    )


@pytest.mark.usefixtures("no_orphans")
def test_two_nodes_are_found_and_a_plan_keeps_tp_inside(network, tmp_path, capsys, monkeypatch):
    two = network(2)
    two.shape_inside(FAST)
    two.shape(0, 1, SLOW)
    inside, between = two.ranks([0, 0, 1], by_hand, two)
    file = tmp_path / "cluster.toml"

    start = time.monotonic()
    cluster = two.ranks([0, 0, 1, 1], measured, 8.0, 2**22, file)

    assert time.monotonic() - start < 9
    assert len(set(cluster.map.hosts)) == 1  # names of hosts say nothing here
    assert cluster.gpus_per_node == 2
    assert "gpus_per_node=2 by bandwidths of pairs" in cluster.assumed[0]
    assert not any(each.failed for each in cluster.map.unmeasured)
    ratio = bandwidth(cluster, [(0, 1), (2, 3)]) / bandwidth(cluster, [(0, 2), (0, 3), (1, 2), (1, 3)])
    assert ratio == pytest.approx(inside / between, rel=0.15)
    assert ratio == pytest.approx(FAST / SLOW, rel=0.15)
    assert {("all_reduce", (2, 2)), ("all_reduce", (1, 2)), ("all_reduce", (2, 4))} <= {
        (curve.collective, curve.members) for curve in cluster.curves
    }

    job = ["gpt2", "--seq=1024", "--global-batch=2", "--cp=1", "--runnable", "--json"]
    monkeypatch.setattr("sys.argv", ["shardwright", "plan", *job, f"--cluster={file}"])
    with pytest.raises(SystemExit, match="0"):
        main()
    layout = json.loads(capsys.readouterr().out)["best"][0]["layout"]
    assert (layout["tp"], layout["order"][-1]) == (2, "tp")  # ranks of tp are neighbours: in one node
    assert layout["pp"] * layout["dp_replicate"] * layout["dp_shard"] == 2


@pytest.mark.usefixtures("no_orphans")
def test_one_slow_pair_of_four_nodes_shows(network):
    four = network(4)
    for a in range(4):
        for b in range(a):
            four.shape(a, b, 100 if {a, b} == {1, 3} else 800)

    cluster = four.ranks([0, 1, 2, 3], measured, 8.0, 2**20)

    slow = [pair for pair in cluster.map.pairs if {pair.source, pair.target} == {1, 3}]
    others = [pair for pair in cluster.map.pairs if {pair.source, pair.target} != {1, 3}]
    assert (len(slow), len(others)) == (2, 10)
    assert statistics.median(pair.bandwidth for pair in slow) == pytest.approx(100e6 / 8, rel=0.25)
    assert max(pair.bandwidth for pair in slow) < 0.3 * min(pair.bandwidth for pair in others)
    assert cluster.gpus_per_node == 4  # one bad cable makes no nodes


@pytest.mark.usefixtures("no_orphans")
def test_a_pair_that_hangs_is_named_and_the_rest_is_measured(network):
    four = network(4)
    four.cut(2, 3)

    start = time.monotonic()
    cluster = four.ranks([0, 1, 2, 3], measured, 12.0, 2**12)

    assert time.monotonic() - start < 13
    (fault,) = [each for each in cluster.map.unmeasured if each.failed]
    assert (fault.what, fault.ranks) == ("pair 2-3", (2, 3))
    assert "connecting ranks [2, 3]" in fault.reason
    assert {(pair.source, pair.target) for pair in cluster.map.pairs} == {
        (a, b) for a in range(4) for b in range(4) if a != b and {a, b} != {2, 3}
    }
    assert ("all_reduce", (2,)) in {(curve.collective, curve.members) for curve in cluster.curves}
