"""Who is at fault by pairwise values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.doctor.pairs import locate

FIELD = {  # NVIDIA/nccl-tests#106, all-reduce over two nodes at a time [GB/s]
    ("n644", "n699"): 49.36,
    ("n632", "n641"): 88.36,
    ("n284", "n678"): 49.28,
    ("n641", "n644"): 49.30,
    ("n404", "n699"): 86.81,
}


def test_a_field_report_names_the_node_that_its_author_found():
    found = locate(FIELD)
    assert found.suspects == ("n644",)
    assert set(found.cleared) == {"n699", "n641", "n632", "n404"}
    assert found.undecided == (("n284", "n678"),)
    assert {frozenset(pair) for pair in found.next} == {
        frozenset(("n284", "n404")),
        frozenset(("n678", "n404")),
    }
    assert found.links == ()


def test_the_next_measurement_decides():
    assert locate(FIELD | {("n284", "n632"): 87.0}).suspects == ("n644", "n678")
    assert locate(FIELD | {("n284", "n632"): 49.0}).suspects == ("n284", "n644")


def test_a_slow_way_between_two_healthy_ends_is_a_link():
    values = {("a", "b"): 10.0, ("a", "c"): 100.0, ("b", "c"): 99.0}
    found = locate(values)
    assert (found.links, found.suspects, found.undecided) == ((("a", "b"),), (), ())


def test_alike_pairs_clear_everyone():
    found = locate({("a", "b"): 100.0, ("c", "d"): 90.0})
    assert (found.suspects, found.undecided, found.links) == ((), (), ())
    assert found.cleared == ("a", "b", "c", "d")


def test_no_pair_says_nothing():
    with pytest.raises(ValueError, match="at least one pair"):
        locate({})


@given(st.integers(3, 9), st.data())
def test_a_node_that_is_slow_with_all_others_is_found_and_no_other(count, data):
    names = [f"n{number}" for number in range(count)]
    faulty = data.draw(st.sampled_from(names))
    noise = st.floats(0.95, 1.05)
    values = {
        (a, b): (40.0 if faulty in (a, b) else 100.0) * data.draw(noise)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }
    found = locate(values)
    assert found.suspects == (faulty,)
    assert faulty not in found.cleared
