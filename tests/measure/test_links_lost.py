"""What goes wrong while links are measured: said by name, in time, and without losing the rest."""

import multiprocessing
import os
import signal
import threading
import time

import psutil
import pytest
import torch

from shardwright.errors import RunFailedError
from shardwright.measure import link_calls, link_rank
from shardwright.measure.document import map_document
from shardwright.measure.links import measure_links

SMALL = 2**16


def ranks_of_this_process():
    return sorted(psutil.Process().children(), key=lambda process: process.create_time())


def at(text, do):
    """``say`` that calls ``do`` in a thread when a line with ``text`` comes."""

    def say(line):
        if text in line:
            threading.Thread(target=do).start()

    return say


def signal_rank(rank, number, after):
    def do():
        time.sleep(after)
        os.kill(ranks_of_this_process()[rank].pid, number)

    return do


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "ended by SIGKILL"), (signal.SIGSTOP, "stopped answering")],
    ids=["killed", "stopped"],
)
def test_a_lost_rank_is_named_and_the_others_go_on(number, words):
    start = time.monotonic()
    say = at("collectives", signal_rank(2, number, 0.3))
    cluster = measure_links(4, 9.0, SMALL, None, None, say)
    assert time.monotonic() - start < 9.5
    (fault, *more) = [each for each in cluster.map.unmeasured if each.failed]
    assert (fault.ranks, more) == ((2,), [])
    assert words in fault.reason
    assert len(cluster.map.pairs) == 12
    assert map_document(cluster, [])["fault"]
    print(fault)
    print(cluster.map.unmeasured)


@pytest.mark.usefixtures("no_orphans")
def test_a_rank_that_stops_while_pairs_are_measured():
    start = time.monotonic()
    cluster = measure_links(4, 9.0, SMALL, None, None, at("pairs", signal_rank(1, signal.SIGSTOP, 0.0)))
    print(time.monotonic() - start)
    print([(p.source,p.target) for p in cluster.map.pairs], cluster.map.unmeasured)
    print([(c.collective, c.members, c.sizes) for c in cluster.curves])
    assert time.monotonic() - start < 9.5


def wrong_on_rank_1(monkeypatch):
    """Rank 1 sends other numbers than all think in pairs, and spoils one number that an all-gather brings it."""
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
    wrong_on_rank_1(monkeypatch)
    cluster = measure_links(2, 4.0, 2**12, None, None, lambda line: None)
    for u in cluster.map.unmeasured: print(u)


@pytest.mark.usefixtures("no_orphans")
def test_ctrl_c_keeps_what_there_is(tmp_path):
    say = at("collectives", lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGINT)))
    start = time.monotonic()
    cluster = measure_links(2, 60.0, SMALL, None, tmp_path / "cluster.toml", say)
    print(time.monotonic() - start)
    assert time.monotonic() - start < 20
    for u in cluster.map.unmeasured: print(u)
    print(len(cluster.map.pairs), len(cluster.curves))
