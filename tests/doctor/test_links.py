"""What a map says is wrong: faults of known place are found, and noise is no fault."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_maps import between, made

from shardwright.bandwidth_map import Curve, MapRecord, Pair, Unmeasured
from shardwright.cluster import cluster_of
from shardwright.doctor.diagnose import diagnose
from shardwright.doctor.links import cluster_findings
from shardwright.measure.document import map_document

MiB = 2**20
GiB = 2**30

PUBLISHED = {
    "a100": {16: 109, 64: 167, 256: 214, 1024: 228, 8192: 232},
    "h100": {16: 234, 64: 362, 256: 423, 1024: 466, 8192: 479},
    "h200": {16: 240, 64: 368, 256: 432, 1024: 468, 8192: 480},
}
"""Bus bandwidth of all-reduces of 8 devices by MiB [GB/s]. Source: Azure's nccl-tests results, shared
FORMULAE 4.4."""


def causes(cluster):
    return [finding.cause for finding in cluster_findings(cluster)]


def the(cluster, cause):
    (finding,) = [finding for finding in cluster_findings(cluster) if finding.cause == cause]
    return finding


def all_reduce(device, sizes, rate, spread=()):
    """A cluster of one node whose all-reduces have the bus bandwidth ``rate(MiB)`` [GB/s]."""
    times = tuple(size * MiB * 1.75 / (rate(size) * 1e9) for size in sizes)
    curve = Curve(
        collective="all_reduce",
        members=(8,),
        sizes=tuple(size * MiB for size in sizes),
        times=times,
        spread=spread,
    )
    return cluster_of(device, 8, 8).model_copy(update={"curves": (curve,), "map": MapRecord()})


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_healthy_links_of_known_devices_are_good_news(nodes):
    assert causes(made(nodes)) == ["links_healthy"]
    assert not map_document(made(nodes), [f.document() for f in cluster_findings(made(nodes))])["fault"]


def test_healthy_ranks_on_cpus_have_nothing_to_be_compared_with():
    assert causes(made(1, 8, "cpu")) == []


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.integers(1, 6),
    per_node=st.sampled_from([1, 2, 4, 8]),
    noise=st.floats(0, 0.05),
    seed=st.integers(0, 2**32 - 1),
    rails_only=st.booleans(),
    device=st.sampled_from(["cpu", "h100"]),
)
def test_noise_accuses_nobody(nodes, per_node, noise, seed, rails_only, device):
    cluster = made(nodes, per_node, device, noise=noise, seed=seed, rails_only=rails_only)
    assert set(causes(cluster)) <= {"links_healthy"}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), noise=st.floats(0.1, 0.25))
def test_strong_noise_is_never_a_certain_fault(seed, noise):
    found = cluster_findings(made(2, 4, "cpu", noise=noise, seed=seed))
    assert not [finding for finding in found if finding.certainty == "certain"]


def test_a_slow_node_of_four_is_named_and_the_others_are_cleared():
    finding = the(made(4, fault=between(2), hosts=tuple(f"n{i // 8}" for i in range(32))), "slow_node")
    assert finding.certainty == "certain"
    assert finding.ranks == tuple(range(16, 24))
    assert finding.numbers["cleared"] == [0, 1, 3]
    assert finding.numbers["usual"] == pytest.approx(47e9, rel=0.1)
    assert finding.numbers["share"] == pytest.approx(0.5, rel=0.1)
    assert "node 2 (n2) to other nodes: 2" in finding.summary
    assert causes(made(4, fault=between(2))) == ["slow_node"]


def test_three_faulty_nodes_of_64_are_all_that_is_named():
    bad = (3, 17, 40)
    cluster = made(
        64, fault=lambda a, b: min(between(node)(a, b) for node in bad), rails_only=True, noise=0.05
    )
    found = cluster_findings(cluster)
    assert {finding.cause for finding in found} == {"slow_node"}
    assert sorted(finding.numbers["node"] for finding in found) == list(bad)


def test_links_inside_one_node():
    finding = the(made(4, fault=lambda a, b: 0.5 if a // 8 == b // 8 == 1 else 1), "slow_node")
    assert finding.ranks == tuple(range(8, 16))
    assert finding.summary.startswith("links inside node 1: ")


def test_a_slow_pair_is_no_fault_of_its_ends():
    cluster = made(1, fault=lambda a, b: 0.5 if {a, b} == {2, 5} else 1)
    assert causes(cluster) == ["slow_pair"]
    finding = the(cluster, "slow_pair")
    assert finding.ranks == (2, 5)
    assert finding.certainty == "likely"


def test_a_slow_rank_among_the_devices_of_a_node():
    finding = the(made(1, fault=lambda a, b: 0.5 if 6 in (a, b) else 1), "slow_rank")
    assert finding.ranks == (6,)
    assert finding.numbers["cleared"] == [0, 1, 2, 3, 4, 5, 7]


def test_one_nic_is_no_fault_of_its_node():
    cluster = made(4, rails_only=True, fault=lambda a, b: 0.5 if 11 in (a, b) and a // 8 != b // 8 else 1)
    assert causes(cluster) == ["slow_rank"]
    assert the(cluster, "slow_rank").ranks == (11,)


def test_equal_pairs_over_one_rail_at_half_of_another():
    """As NVIDIA/nccl issue 439: the same hardware, one NIC pair with half the rings of another."""
    cluster = made(4, rails_only=True, fault=lambda a, b: 0.5 if a % 8 == 3 and a // 8 != b // 8 else 1)
    assert causes(cluster) == ["slow_rail"]
    assert the(cluster, "slow_rail").ranks == (3, 11, 19, 27)


def test_a_rank_of_which_chance_lifts_a_pair_is_named_all_the_same():
    cluster = made(
        1, 8, "cpu", noise=0.01, fault=lambda a, b: 1.0 if {a, b} == {2, 7} else 0.6 if 2 in (a, b) else 1
    )
    assert causes(cluster) == ["slow_rank"]
    assert the(cluster, "slow_rank").ranks == (2,)


def test_two_ends_that_nothing_clears_and_what_would():
    rates = {(0, 1): 47e9, (2, 3): 23e9}
    pairs = tuple(Pair(*ends, rate, 1e-5) for a, rate in rates.items() for ends in (a, a[::-1]))
    cluster = made(4, 1, "cpu")
    cluster = cluster.model_copy(update={"map": cluster.map.model_copy(update={"pairs": pairs})})
    (finding,) = cluster_findings(cluster)
    assert (finding.cause, finding.certainty) == ("slow_ends_unknown", "cannot_tell")
    assert finding.summary.startswith("a pair of rank 2 or rank 3: 23.0 GB/s where 47.0 GB/s are usual")
    assert finding.collect == ("measure rank 2 with rank 0", "measure rank 3 with rank 0")


def test_one_direction():
    cluster = made(1, fault=lambda a, b: 0.4 if (a, b) == (2, 5) else 1)
    assert causes(cluster) == ["slow_direction"]
    finding = the(cluster, "slow_direction")
    assert finding.ranks == (2, 5)
    assert finding.summary.startswith("rank 2 sends to rank 5 at ")


def test_a_rank_that_receives_slowly():
    cluster = made(2, fault=lambda a, b: 0.5 if b == 3 and a // 8 == 1 else 1)
    assert causes(cluster) == ["slow_direction"]
    assert the(cluster, "slow_direction").ranks == (3,)
    assert the(cluster, "slow_direction").summary.startswith("rank 3 receives at ")


def test_islands_of_nvlink_are_no_fault():
    """4 NVLink pairs over PCIe, as NVIDIA/nccl-tests issue 178."""
    cluster = made(2, fault=lambda a, b: 1.0 if a // 2 == b // 2 or a // 8 != b // 8 else 0.1)
    assert "slow" not in " ".join(causes(cluster))
    tiers = map_document(cluster, [])["islands"]
    assert tiers[0]["groups"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert tiers[1]["groups"] == [list(range(8))]


def test_links_at_half_of_what_the_device_gives():
    finding = the(made(1, fault=lambda a, b: 0.45), "node_links_below_expected")
    assert finding.numbers["verdict"] == "below half"
    assert finding.numbers["expected"] == 367e9
    assert any("ACS" in action for action in finding.document()["actions"])


@pytest.mark.parametrize("device", PUBLISHED)
@pytest.mark.parametrize("largest", [64, 256, 1024, 8192])
def test_published_bandwidths_are_healthy_and_their_half_is_not(device, largest):
    rates = PUBLISHED[device]
    sizes = [size for size in rates if size <= largest]
    assert causes(all_reduce(device, sizes, rates.get)) == ["links_healthy"]
    slow = all_reduce(device, sizes, lambda size: rates[size] / 2)
    assert causes(slow) == ["node_links_below_expected"]


def test_what_was_not_measured_for_want_of_time_is_no_finding():
    late = Unmeasured(what="pair 3-7", ranks=(3, 7), reason="the time was up")
    assert causes(made(1, 8, "cpu", unmeasured=(late,))) == []


def test_a_dead_rank():
    gone = Unmeasured(what="rank 5", ranks=(5,), reason="stopped answering", failed=True)
    finding = the(made(1, 8, "cpu", unmeasured=(gone,)), "rank_gone")
    assert (finding.kind, finding.ranks, finding.certainty) == ("hang", (5,), "certain")
    assert finding.summary == "rank 5: stopped answering"


def test_hanging_pairs_that_have_a_rank_in_common():
    hung = tuple(
        Unmeasured(what=f"pair {a}-4", ranks=(a, 4), reason="no answer in 10 s", failed=True)
        for a in (0, 1, 2)
    )
    finding = the(made(1, 8, "cpu", unmeasured=hung), "link_hangs")
    assert finding.ranks == (4,)
    assert finding.summary == "pair 0-4: no answer in 10 s; 2 more like it; rank 4 is in all of them"
    alone = the(made(1, 8, "cpu", unmeasured=hung[:1]), "link_hangs")
    assert alone.ranks == (0, 4)


def test_a_wrong_payload():
    wrong = Unmeasured(what="payload of pairs", ranks=(1, 2), reason="on rank 2 3 of 4 differ", failed=True)
    finding = the(made(1, 8, "cpu", unmeasured=(wrong,)), "wrong_payload")
    assert (finding.kind, finding.ranks) == ("numbers", (1, 2))


def test_ranks_dealt_out_in_turn():
    hosts = tuple("ab"[rank % 2] for rank in range(8))
    finding = the(made(2, 4, "cpu", hosts=hosts), "ranks_scattered")
    assert "run on a, b" in finding.summary
    assert "ranks_scattered" not in causes(made(2, 4, "cpu", hosts=("a",) * 4 + ("b",) * 4))


def test_a_curve_of_chance():
    noisy = all_reduce("cpu", [1, 16, 64], lambda size: 1.0, spread=(0.9, 0.8, 0.9))
    finding = the(noisy, "links_noisy")
    assert finding.certainty == "cannot_tell"
    assert "all_reduce of 8 ranks" in finding.summary
    assert causes(all_reduce("cpu", [1, 16, 64], lambda size: 1.0, spread=(0.1, 0.1, 0.9))) == []


def test_the_doctor_reads_a_map_and_says_the_same(tmp_path):
    cluster = made(4, fault=between(2))
    path = tmp_path / "cluster.toml"
    path.write_text(cluster.to_toml())
    document = diagnose([str(path)])
    assert document["inputs"] == [{"file": str(path), "kind": "toml"}]
    assert [f["summary"] for f in document["findings"]] == [f.summary for f in cluster_findings(cluster)]
    assert document["findings"][0]["evidence"][0]["file"] == str(path)


def test_tp_groups_that_leave_the_islands_of_a_map(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(made(1, fault=lambda a, b: 1.0 if a // 2 == b // 2 else 0.1).to_toml())
    wide = diagnose([str(path)], given="gpus=8 gpus_per_node=8 tp=4")["findings"]
    (finding,) = [f for f in wide if f["cause"] == "tp_across_nodes"]
    assert finding["numbers"]["fast_ranks"] == 2
    assert finding["numbers"]["groups_across"] == 2
    narrow = diagnose([str(path)], given="gpus=8 gpus_per_node=8 tp=2")["findings"]
    assert "tp_across_nodes" not in [f["cause"] for f in narrow]
