"""What is measured, and in which order."""

from collections import Counter
from itertools import combinations

import pytest

from shardwright.measure.cells import (
    collective_cells,
    kinds_of,
    neighbours_of,
    pairs_in_order,
    sizes_up_to,
)
from shardwright.units import KiB, MiB

DOMAINS = [(4,), (2, 4), (4, 8), (2, 4, 8), (8, 32), (3, 6), (1, 4)]


@pytest.mark.parametrize("world", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_every_pair_comes_once(world, per_node):
    if world % per_node:
        return
    assert sorted(pairs_in_order(world, per_node)) == list(combinations(range(world), 2))


def test_the_first_pairs_cover_every_rank_and_every_two_nodes():
    world, per_node = 32, 8
    first = pairs_in_order(world, per_node)[: world + 6]
    assert {rank for pair in first for rank in pair} == set(range(world))
    assert {(a // per_node, b // per_node) for a, b in first} >= set(combinations(range(4), 2))


@pytest.mark.parametrize("domains", DOMAINS)
def test_members_are_what_a_count_of_ranks_by_domain_gives(domains):
    main, other = kinds_of(domains)
    for kind in [*main, *other, *neighbours_of(domains)]:
        for group in kind.groups:
            fullest = tuple(max(Counter(rank // size for rank in group).values()) for size in domains)
            assert fullest == kind.members
        ranks = [rank for group in kind.groups for rank in group]
        assert len(ranks) == len(set(ranks))  # all groups of a kind at once: no rank in two
    for kind in [*main, *other]:
        assert sorted(rank for group in kind.groups for rank in group) == list(range(domains[-1]))


def test_two_nodes_of_eight_have_the_groups_that_layouts_make():
    main, other = kinds_of((8, 16))
    assert [kind.members for kind in main] == [(8, 8), (8, 16), (1, 2)]
    assert [kind.members for kind in other] == [(2, 2), (4, 4), (4, 8), (2, 4)]
    assert next(kind for kind in other if kind.members == (4, 8)).groups[0] == (0, 2, 4, 6, 8, 10, 12, 14)
    assert [kind.members for kind in neighbours_of((8, 16))] == [(2, 2), (1, 2)]


def test_sizes_go_from_1_kib_in_fours_to_the_largest():
    assert sizes_up_to(64 * KiB) == [KiB, 4 * KiB, 16 * KiB, 64 * KiB]
    assert sizes_up_to(100 * KiB)[-2:] == [64 * KiB, 100 * KiB]


def test_what_a_plan_needs_most_comes_first_and_nothing_twice():
    cells = collective_cells((2, 4), 64 * MiB)
    assert len(cells) == len(set(cells))
    assert {cell.call for cell in cells[:9]} == {"all_reduce"}
    assert [cell.size for cell in cells[:9:3]] == [4 * KiB, MiB, 16 * MiB]
    assert {cell.members for cell in cells[:3]} == {(2, 2), (2, 4), (1, 2)}
    assert {cell.size for cell in cells} == set(sizes_up_to(64 * MiB))
