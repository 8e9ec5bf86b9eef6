"""The order of an epoch is a permutation, its own for every seed and epoch, and without a visible pattern."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.run.shuffle import _permuted, _round_keys, shuffled


@settings(max_examples=150, deadline=None)
@given(count=st.integers(1, 700), seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6))
def test_every_index_is_met_once(count, seed, epoch):
    assert sorted(shuffled(index, count, seed, epoch) for index in range(count)) == list(range(count))


@pytest.mark.parametrize("bits", range(2, 13))
def test_the_network_is_a_bijection_of_its_domain(bits):
    found = {_permuted(value, bits, _round_keys(3, 1)) for value in range(1 << bits)}
    assert found == set(range(1 << bits))


@settings(max_examples=50, deadline=None)
@given(count=st.integers(2**33, 2**62), seed=st.integers(0, 99), first=st.integers(0, 2**32))
def test_a_corpus_of_any_size_needs_no_table(count, seed, first):
    found = [shuffled(first + i, count, seed, 0) for i in range(50)]
    assert len(set(found)) == 50
    assert all(0 <= index < count for index in found)


def test_the_order_is_the_same_on_every_machine():
    assert [shuffled(i, 10, 0, 0) for i in range(10)] == [3, 5, 7, 8, 2, 4, 6, 0, 9, 1]
    assert shuffled(5, 10**12, 7, 3) == 470_872_464_302


def test_each_position_gets_every_window_equally_often():
    count, epochs = 7, 7000
    seen = np.zeros((count, count))
    for epoch in range(epochs):
        for index in range(count):
            seen[index, shuffled(index, count, 11, epoch)] += 1
    expected = epochs / count
    assert abs(seen - expected).max() < 5 * expected**0.5


def test_neighbours_do_not_stay_neighbours():
    order = np.array([shuffled(index, 5000, 0, 0) for index in range(5000)])
    assert (abs(np.diff(order)) == 1).sum() < 10  # 2 are expected of a random order
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.05
