"""Times that the map takes against torch.distributed timed by a loop written out, turn about in one run."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwright.measure.link_calls import call_of
from shardwright.measure.link_group import LinkGroup
from shardwright.measure.timing import block_times, slowest
from shardwright.run.launch import run_ranks

pytestmark = pytest.mark.live

RANKS = 2
"""As many as there are cores where this usually runs: times of more are those of the scheduler."""

ROUNDS = 60
"""By turns, so that what else runs on the machine meets both; compared is the lower quartile, which it moves
least."""

TRIES = 2
"""A wrong way to take time would be off in each."""


def by_hand(tensor, repeats):
    """Mean time of an all-reduce."""
    dist.barrier()
    dist.all_reduce(tensor)
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / repeats


def turn_about(size, folder):
    store = dist.FileStore(f"{folder}/store", RANKS)
    device, end = torch.device("cpu"), time.monotonic() + 60
    ours = LinkGroup(store, "ours", tuple(range(RANKS)), dist.get_rank(), device, end)
    ours.group = dist.group.WORLD  # the same sockets and threads: what differs is how time is taken
    call = call_of("all_reduce", ours, size)
    tensor = torch.zeros(size // 4)
    hand, mapped = [], []
    for _ in range(ROUNDS):
        blocks = block_times(call.once, ours.finish, ours.agree, 0.015)
        mapped += blocks.means
        hand += [by_hand(tensor, blocks.repeats) for _ in blocks.means]
    return hand, mapped


@pytest.mark.parametrize("size", [2**14, 2**20, 2**22])
def test_all_reduce_is_as_long_as_timed_by_hand(size, tmp_path):
    ratios = []
    for place in range(TRIES):
        folder = tmp_path / str(place)
        folder.mkdir()
        found = run_ranks(turn_about, RANKS, size, str(folder))
        hand, mapped = (np.quantile(slowest([rank[i] for rank in found]), 0.25) for i in (0, 1))
        ratios.append(float(mapped / hand))
        if abs(ratios[-1] - 1) < 0.1:
            return
    pytest.fail(f"measured over timed by hand: {ratios}")
