"""What goes wrong while links are measured: said by name, in time, and without losing the rest."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from shardwright.cluster import Cluster
from shardwright.errors import RunFailedError
from shardwright.measure import link_calls, link_rank
from shardwright.measure.document import map_document
from shardwright.measure.links import measure_links

pytestmark = pytest.mark.live

SMALL = 2**14


def at(text, do):
    """A ``say`` that has a thread call ``do`` when a line with ``text`` comes."""

    def say(line):
        if text in line:
            threading.Thread(target=do).start()

    return say


def send(number, rank, after):
    """Signals the ``rank``-th process that this one started."""

    def do():
        time.sleep(after)
        processes = sorted(psutil.Process().children(), key=lambda process: process.pid)
        processes[rank].send_signal(number)

    return do


def faults(cluster):
    return [each for each in cluster.map.unmeasured if each.failed]


@pytest.mark.usefixtures("no_orphans")
def test_a_rank_that_dies_is_named_and_the_others_go_on():
    start = time.monotonic()
    cluster = measure_links(4, 6.0, SMALL, None, None, at("collectives", send(signal.SIGKILL, 2, 0.3)))
    assert time.monotonic() - start < 6.5
    (fault,) = faults(cluster)
    assert (fault.what, fault.ranks) == ("rank 2", (2,))
    assert "its process was ended by SIGKILL while measuring" in fault.reason
    assert len(cluster.map.pairs) == 12  # measured before
    halves = {curve.collective for curve in cluster.curves if curve.members == (2,)}  # ranks 0 and 1 alone
    assert halves == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
    assert map_document(cluster, [])["fault"]


@pytest.mark.usefixtures("no_orphans")
def test_a_rank_that_stops_is_named_and_the_others_go_on():
    start = time.monotonic()
    cluster = measure_links(4, 8.0, SMALL, None, None, at("pairs", send(signal.SIGSTOP, 1, 0.0)))
    assert time.monotonic() - start < 8.5
    (fault,) = faults(cluster)
    assert (fault.what, fault.ranks) == ("rank 1", (1,))
    assert "its process has given no sign for" in fault.reason
    assert "between ranks 0 and 1" in fault.reason
    assert {(0, 2), (2, 3), (3, 0)} <= {(pair.source, pair.target) for pair in cluster.map.pairs}


def wrong_from_rank_1(monkeypatch):
    """Rank 1 sends other numbers than it should between two, and loses one of those that it gathers."""
    serve, start, pattern = link_rank.serve, link_calls._start, link_rank.pattern

    class Spoilt:
        def __init__(self, work, target):
            self.work, self.target = work, target

        def wait(self, patience):
            self.work.wait(patience)
            self.target[3] += 1

    def spoil(collective, group, target, source):
        work = start(collective, group, target, source)
        return Spoilt(work, target) if collective == "all_gather" else work

    def on_rank(host, port, rank, device, beat_s):
        if rank == 1:
            link_calls._start = spoil
            link_rank.pattern = lambda count, sender: pattern(count, sender) + (sender == 1)
        serve(host, port, rank, device, beat_s)

    monkeypatch.setattr(link_rank, "serve", on_rank)


@pytest.mark.usefixtures("no_orphans")
def test_a_payload_that_arrives_wrong_is_noticed(monkeypatch):
    wrong_from_rank_1(monkeypatch)
    cluster = measure_links(2, 3.0, 2**12, None, None, lambda line: None)
    pair, *gathers = faults(cluster)
    assert (pair.ranks, pair.reason) == ((0, 1), "on rank 0 what rank 1 sent arrived wrong")
    assert gathers
    for fault in gathers:
        assert fault.what.startswith("payload of all_gather")
        assert "on rank 1 what rank 0 sent arrived wrong in 1 of" in fault.reason
        assert fault.reason.endswith("the first is number 3, 4 instead of 3")


@pytest.mark.usefixtures("no_orphans")
def test_ctrl_c_keeps_what_there_is(tmp_path):
    interrupt = at("collectives", lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        start = time.monotonic()
        cluster = measure_links(2, 60.0, SMALL, None, tmp_path / "cluster.toml", interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 20
    assert len(cluster.map.pairs) == 2
    assert cluster.map.unmeasured[-1].reason == "interrupted"
    assert not map_document(cluster, [])["fault"]  # it was wanted


@pytest.mark.usefixtures("no_orphans")
def test_where_no_rank_answers_there_is_no_map():
    with pytest.raises(RunFailedError, match=r"no pair of ranks could be measured: rank 0 .*SIGKILL"):
        measure_links(2, 6.0, SMALL, None, None, at("starting", send(signal.SIGKILL, 0, 0.0)))


KILLED = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from shardwright.measure.links import measure_links
measure_links(2, 60.0, 2**14, None, Path(sys.argv[1]), lambda line: print(line, flush=True))
"""


def test_killed_half_way_it_leaves_a_file_and_no_process(tmp_path):
    file = tmp_path / "cluster.toml"
    with subprocess.Popen([sys.executable, "-c", KILLED, file], stdout=subprocess.PIPE, text=True) as run:
        assert any("collectives" in line for line in run.stdout)
        ranks = psutil.Process(run.pid).children(recursive=True)
        run.kill()
    gone, alive = psutil.wait_procs(ranks, timeout=5)
    assert (len(gone), alive) == (2, [])
    assert len(Cluster.from_file(file).map.pairs) == 2
