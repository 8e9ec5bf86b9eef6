"""Files as a cluster: levels by classes, what was assumed, what was refused, and the map's document."""

import json
from pathlib import Path

import numpy as np
import pytest

from shardwright.bandwidth_map import Curve, MapRecord, Pair
from shardwright.cluster import Cluster, cluster_of, device
from shardwright.errors import ClusterError, EvidenceError
from shardwright.measure.document import map_document
from shardwright.measure.files import read_cluster
from shardwright.plan.collectives import collective_time, route_through

DATA = Path(__file__).parent / "data"
BROKEN = DATA / "topo" / "t29_bad_matrix_hand_edited_missing_columns.txt"
GOOD = sorted({*DATA.glob("topo/*.txt")} - {BROKEN}) + sorted(DATA.glob("nccl_xml/*.xml"))


def path(name):
    (found,) = DATA.glob(f"topo/{name}_*.txt")
    return str(found)


def cluster(name, kind=None, nodes=None, base=None):
    found, refused = read_cluster([path(name)], kind and device(kind), nodes, base)
    assert refused == []
    return found


def levels(found):
    return [
        (level.name, level.ranks, round(level.link.bandwidth / 1e9), level.shared) for level in found.levels
    ]


@pytest.mark.parametrize("file", GOOD, ids=lambda file: file.name[:12])
def test_every_artefact_is_a_cluster_with_the_document_of_the_contract(file):
    found, refused = read_cluster([str(file)], None, 2, None)
    assert Cluster.from_toml(found.to_toml()) == found
    document = json.loads(json.dumps(map_document(found, [], refused)))
    assert {"nodes", "gpus_per_node", "pairs", "links", "nics", "findings"} <= set(document)
    assert document["nodes"] == 2
    assert len(document["pairs"]) == document["gpus_per_node"] == len(document["pairs"][0])
    assert all(link["bandwidth"] > 0 and {"kind", "latency"} <= set(link) for link in document["links"])
    assert [link["ranks"] for link in document["links"]][-1] == 2 * document["gpus_per_node"]
    assert all(len(nic["classes"]) == document["gpus_per_node"] for nic in document["nics"])


def test_pairs_of_nvlink_are_a_level_and_sockets_share_their_way():
    """nccl-tests issue 178: two of them 208 GB/s, three 20."""
    found = cluster("t24", "a100-pcie")
    assert levels(found) == [("nvlink", 2, 240, False), ("numa", 4, 20, False), ("node", 8, 16, True)]
    assert found.gpus_per_node == found.ranks == 8
    assert found.map.classes[0][:3] == ("X", "NV12", "NODE")
    assert found.map.numa == ("0",) * 4 + ("1",) * 4


@pytest.mark.parametrize("name", ["t14", "t20", "t21", "t27"])
def test_where_nvlink_joins_all_at_full_count_the_device_s_own_link_holds(name):
    assert cluster(name, "h20").levels == ()


def test_a_cube_mesh_has_a_ring_of_nvlinks_through_all():
    assert cluster("t04").levels == ()
    assert cluster("t04").device.name.startswith("v100-sxm")


def test_groups_that_are_no_equal_blocks_are_said():
    found = cluster("t32", "a100-pcie")
    assert levels(found) == [("numa", 3, 20, False), ("node", 6, 16, True)]
    assert any(words.startswith("pcie joins (0,1) (3,4):") for words in found.assumed)
    assert any(words.startswith("nvlink joins (0,1):") for words in cluster("t18").assumed)


def test_a_network_is_shared_by_the_devices_of_its_local_nics():
    """Four of six NICs are near to some of eight devices: half of 47 GB/s each."""
    found = cluster("t27", "h100-sxm", 4)
    assert levels(found)[-1] == ("network", 32, 24, False)
    assert found.nodes == 4
    assert any("4 NICs of 400 Gb/s for 8 devices" in words for words in found.assumed)


def test_the_speed_of_nics_is_used_where_it_is_said(tmp_path):
    file = tmp_path / "system.xml"
    inner = "".join(
        f'<pci busid="0:{at}"><pci busid="0:{at}1"><gpu dev="{at}" sm="90"/></pci><pci busid="0:{at}2">'
        f'<nic><net name="mlx5_{at}" dev="{at}" speed="200000"/></nic></pci></pci>'
        for at in range(2)
    )
    file.write_text(f'<system version="1"><cpu numaid="0">{inner}</cpu></system>')
    found, _ = read_cluster([str(file)], device("h100-pcie"), 2, None)
    assert found.map.nics[0].bandwidth == 25e9
    assert found.inter_link.bandwidth == pytest.approx(23.5e9)


def test_a_kind_that_nobody_names_is_assumed_aloud():
    found = cluster("t14")
    assert any("give --kind" in words for words in found.assumed)
    assert not any("give --kind" in words for words in cluster("t14", "h20").assumed)


def test_a_provider_file_names_the_device_by_its_pci_number():
    found, _ = read_cluster([str(DATA / "nccl_xml" / "ncv4-topo.xml")], None, None, None)
    assert found.device.name == "a100-pcie-80gb"
    assert not any("give --kind" in words for words in found.assumed)


def test_printouts_of_two_nodes_are_two_nodes():
    found, _ = read_cluster([path("t14"), path("t21")], device("h20"), None, None)
    assert (found.nodes, found.ranks) == (2, 16)
    other, _ = read_cluster([path("t24"), path("t09")], device("a100-pcie"), None, None)
    assert any(words.startswith("all nodes like the first: 1 are not") for words in other.assumed)


def test_a_measured_cluster_keeps_its_numbers_and_gains_the_topology():
    curve = Curve(collective="all_reduce", members=(8,), sizes=(1024,), times=(1e-5,))
    base = cluster_of("h20", 8).model_copy(
        update={"curves": (curve,), "map": MapRecord(pairs=(Pair(0, 1, 1e9, 1e-6),), source="nccl")}
    )
    found = cluster("t21", base=base)
    assert found.curves == (curve,)
    assert found.map.pairs == base.map.pairs
    assert len(found.map.nics) == 8
    assert found.map.source.startswith("nccl; ")
    with pytest.raises(ClusterError, match="has 2 devices in a node, the cluster given has gpus_per_node=8"):
        cluster("t03", base=base)


def test_one_refused_file_does_not_keep_another_from_being_read(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("nothing here\n")
    found, refused = read_cluster([str(BROKEN), str(other), path("t24")], None, None, None)
    assert found.gpus_per_node == 8
    assert [each["file"] for each in refused] == [str(BROKEN), str(other)]
    assert refused[0]["reason"].startswith(f"{BROKEN}:4:10: row GPU1 has X")
    assert "is no kind that is read here" in refused[1]["reason"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([str(BROKEN)], "t29.*:4:10: row GPU1"),
        (["nowhere.txt"], "cannot read nowhere.txt: No such file"),
        ([], "map --from needs files"),
    ],
)
def test_nothing_to_use_is_malformed_input(files, words):
    with pytest.raises(EvidenceError, match=words) as caught:
        read_cluster(files, None, None, None)
    assert caught.value.exit_status == 2


def test_windows_text_is_read(tmp_path):
    file = tmp_path / "topo.txt"
    file.write_bytes(Path(path("t24")).read_text().replace("\n", "\r\n").encode("utf-16"))
    found, _ = read_cluster([str(file)], None, None, None)
    assert found.map.classes == cluster("t24").map.classes


@pytest.mark.parametrize(
    ("members", "measured", "share"),
    [
        ((2, 2, 2), 208e9, 0.2),
        ((1, 2, 2), 20e9, 0.01),
    ],  # a bridged pair; the ring of three is bounded by PCIe
)
def test_the_planner_gives_an_all_reduce_over_a_topology_what_was_measured(members, measured, share):
    """nccl-tests issue 178, bus bandwidth of 1 GiB."""
    n, size = members[-1], 2**30
    spreads = [(np.array([m]), np.array([n // m])) for m in members]
    time = collective_time(
        "all_reduce", size, 1, route_through(np.array([n]), spreads, cluster("t24", "a100-pcie"))
    )
    assert 2 * (n - 1) / n * size / float(time[0]) == pytest.approx(measured, rel=share)
