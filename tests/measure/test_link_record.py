"""What is measured of links, put together as a cluster."""

from itertools import permutations

from shardwright.cluster import Cluster
from shardwright.measure.cells import Cell, kinds_of
from shardwright.measure.link_record import LinkRecord, write_whole
from shardwright.measure.nodes import Domains

ALONE, INSIDE = 30e6, 250e6


def record(domains, across):
    """Pairs of a world in which a rank alone has ALONE to another node, and ``across`` when all use it."""
    found = LinkRecord(domains.sizes[-1], "2026-11-30", domains=domains)
    node = domains.sizes[0]
    for a, b in permutations(range(found.world), 2):
        rate = INSIDE if a // node == b // node else ALONE
        found.add_pair(a, b, {"latencies": [1e-4], "there": [rate], "back": [rate]})
    main, _ = kinds_of(domains.sizes)
    for kind in main:
        rate = INSIDE if kind.members[0] == kind.members[-1] else across
        for size in (2**10, 2**20, 2**24):
            time = 2e-4 * (kind.members[-1] - 1) + 2 * (1 - 1 / kind.members[-1]) * size / rate
            cell = Cell("all_reduce", kind.members, kind.groups, size)
            found.add_point(cell, size, [[[time] * 3] * len(group) for group in kind.groups])
    return found


def test_a_link_that_ranks_of_a_node_divide_is_shared():
    cluster = record(Domains((2, 4), 2, ()), across=ALONE / 2).cluster()
    assert [level.shared for level in cluster.levels] == [False, True]
    assert abs(cluster.levels[1].link.bandwidth / ALONE - 1) < 0.01
    assert abs(cluster.intra_link.bandwidth / INSIDE - 1) < 0.01
    assert abs(cluster.inter_link.bandwidth / ALONE - 1) < 0.01


def test_links_of_ranks_of_their_own_are_nodes_and_a_network():
    cluster = record(Domains((2, 4), 2, ()), across=ALONE).cluster()
    assert (cluster.levels, cluster.gpus_per_node) == ((), 2)
    assert abs(cluster.inter_link.bandwidth / ALONE - 1) < 0.01


def test_of_a_pair_measured_twice_the_better_counts_and_slow_ones_are_told():
    found = record(Domains((2, 4), 2, ()), across=ALONE)
    found.add_pair(0, 1, {"latencies": [1e-3], "there": [1e6], "back": [2 * INSIDE]})
    assert found.pairs[0, 1].bandwidth == INSIDE
    assert found.pairs[1, 0].bandwidth == 2 * INSIDE
    assert found.slow_pairs(0.7) == []
    found.pairs[2, 0] = found.pairs[2, 0]._replace(bandwidth=ALONE / 2)
    assert found.slow_pairs(0.7) == [(0, 2)]


def test_what_is_written_reads_back(tmp_path):
    cluster = record(Domains((2, 4), 2, ("a note",)), across=ALONE).cluster()
    write_whole(cluster, tmp_path / "cluster.toml")
    assert Cluster.from_file(tmp_path / "cluster.toml") == cluster
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]
