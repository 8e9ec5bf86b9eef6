"""Times that the map takes against torch.distributed timed by a loop written out, turn about in one run."""

import statistics
import time

import pytest
import torch
import torch.distributed as dist

from shardwright.measure.link_calls import call_of
from shardwright.measure.link_group import LinkGroup
from shardwright.measure.timing import block_times, slowest
from shardwright.run.launch import run_ranks

RANKS = 4
ROUNDS = 20


def by_hand(size, repeats):
    """Mean time of an all-reduce of ``size`` B."""
    tensor = torch.zeros(size // 4)
    dist.all_reduce(tensor)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / repeats


def turn_about(size, repeats, folder):
    rank = dist.get_rank()
    store = dist.FileStore(f"{folder}/store-{size}", RANKS)
    ours = LinkGroup(store, "ours", tuple(range(RANKS)), rank, torch.device("cpu"), time.monotonic() + 60)
    ours.group = dist.group.WORLD  # the same sockets and threads: what differs is how time is taken
    call = call_of("all_reduce", ours, size)
    times = []
    for _ in range(ROUNDS):
        hand = by_hand(size, repeats)
        blocks = block_times(call.once, ours.finish, ours.agree, 0.06)
        times.append((hand, blocks.means))
    return times


@pytest.mark.parametrize(("size", "repeats"), [(2**14, 10), (2**20, 8), (2**22, 4)])
def test_all_reduce_is_as_long_as_timed_by_hand(size, repeats, tmp_path):
    found = run_ranks(turn_about, RANKS, size, repeats, str(tmp_path))
    hand = statistics.median(max(rank[i][0] for rank in found) for i in range(ROUNDS))
    map_ = statistics.median(
        statistics.median(slowest([rank[i][1] for rank in found])) for i in range(ROUNDS)
    )
    assert map_ == pytest.approx(hand, rel=0.1)
