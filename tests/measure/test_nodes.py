"""Nodes found from bandwidths between pairs."""

from itertools import combinations

import pytest

from shardwright.measure.nodes import find_domains


def bandwidths(world, rate):
    return {pair: rate(*pair) for pair in combinations(range(world), 2)}


def two_nodes(size):
    return lambda a, b: 100.0 + a if a // size == b // size else 10.0 + b / 10


def test_nodes_are_blocks_of_fast_pairs_whatever_hosts_are_called():
    found = find_domains(8, bandwidths(8, two_nodes(4)), hint=8)
    assert (found.sizes, found.node) == ((4, 8), 4)
    assert found.notes == ("gpus_per_node=4 by bandwidths of pairs, 8 by names of hosts: the first is taken",)


def test_one_slow_pair_inside_a_node_hides_it_not():
    rates = bandwidths(8, two_nodes(4)) | {(0, 1): 9.0}
    assert find_domains(8, rates, hint=4).sizes == (4, 8)


def test_one_slow_pair_of_equal_ranks_makes_no_nodes():
    rates = bandwidths(4, lambda a, b: 100.0) | {(1, 3): 10.0}
    assert find_domains(4, rates, hint=4).sizes == (4,)


def test_noise_makes_no_nodes():
    rates = bandwidths(4, lambda a, b: 190.0 if a // 2 == b // 2 else 100.0)
    assert find_domains(4, rates, hint=4).sizes == (4,)


def test_levels_inside_one_another_and_the_widest_gap_is_the_node():
    def rate(a, b):
        if a // 2 == b // 2:
            return 300.0  # NVLink pairs
        return 100.0 if a // 4 == b // 4 else 5.0

    found = find_domains(8, bandwidths(8, rate), hint=4)
    assert (found.sizes, found.node, found.notes) == ((2, 4, 8), 4, ())


def test_a_sample_of_the_pairs_is_enough():
    sample = {(a, b): rate for (a, b), rate in bandwidths(16, two_nodes(8)).items() if (b - a) in (1, 8, 15)}
    assert find_domains(16, sample, hint=16).sizes == (8, 16)


def test_hosts_decide_where_bandwidths_do_not():
    found = find_domains(4, bandwidths(4, lambda a, b: 100.0), hint=2)
    assert found.sizes == (2, 4)
    assert found.notes == ("gpus_per_node=2 as hosts are named: bandwidths of pairs show no blocks of ranks",)


@pytest.mark.parametrize(
    "node", [{0: 0, 1: 0, 2: 0, 3: 1}, {0: 0, 1: 1, 2: 0, 3: 1}], ids=["unequal", "not consecutive"]
)
def test_blocks_that_are_no_nodes_are_said_and_not_used(node):
    found = find_domains(4, bandwidths(4, lambda a, b: 100.0 if node[a] == node[b] else 10.0), hint=4)
    assert found.sizes == (4,)
    assert "10.0 times as fast" in found.notes[0]
    assert "start ranks node by node" in found.notes[0]
