"""NCCL's topology as XML: classes as NCCL derives them, and what is refused."""

from pathlib import Path

import pytest

from shardwright.errors import EvidenceError
from shardwright.measure.topology_xml import is_topology_xml, read_topology_xml

FOLDER = Path(__file__).parent / "data" / "nccl_xml"

SWITCHES = "".join(
    f'<nvlink target="0000:0{at}:00.0" count="{count}" tclass="0x068000"/>'
    for at, count in ((5, 4), (6, 5), (7, 5), (8, 4))
)


def gpu(dev, bus, inner=SWITCHES, speed="32.0 GT/s PCIe"):
    return (
        f'<pci busid="{bus}" class="0x030200" vendor="0x10de" device="0x2335" link_speed="{speed}" '
        f'link_width="16"><gpu dev="{dev}" sm="90" rank="{dev}" gdr="1">{inner}</gpu></pci>\n'
    )


def nic(dev, bus, name, speed=400000):
    net = f'<net name="{name}" dev="{dev}" speed="{speed}" port="1" guid="0x1" maxconn="131072" gdr="1"/>'
    return f'<pci busid="{bus}" class="0x020000" link_speed="32.0 GT/s PCIe"><nic>{net}</nic></pci>\n'


def switch(bus, *inner):
    return f'<pci busid="{bus}" class="0x060400" link_speed="32.0 GT/s PCIe">{"".join(inner)}</pci>\n'


def cpu(numa, *inner, mask="00ffffff,00000000,00ffffff", host="0x1"):
    return (
        f'<cpu host_hash="{host}" numaid="{numa}" affinity="{mask}" arch="x86_64" vendor="GenuineIntel">\n'
        + "".join(inner)
        + "</cpu>\n"
    )


def system(*inner):
    return '<system version="1">\n' + "".join(inner) + "</system>\n"


DUMP = system(
    cpu(
        0,
        switch("0000:16:00.0", nic(1, "0000:19:00.0", "mlx5_1"), gpu(1, "0000:18:00.0")),
        switch(
            "0000:27:00.0", switch("0000:28:00.0", gpu(0, "0000:29:00.0")), nic(0, "0000:2a:00.0", "mlx5_0")
        ),
    ),
    cpu(1, gpu(2, "0000:9a:00.0"), nic(2, "0000:9b:00.0", "eth0", 10000), mask="ff000000"),
)


def one(text):
    (topology,) = read_topology_xml(text, "system.xml")
    return topology


def test_a_dump_has_its_devices_by_number_its_nics_their_speed_and_the_cores_of_its_cpus():
    found = one(DUMP)
    assert found.devices == ("GPU0", "GPU1", "GPU2")
    assert found.nics == ("mlx5_0", "mlx5_1", "eth0")
    assert found.nic_speeds == (50e9, 50e9, 1.25e9)
    assert found.affinity == ("0-23,64-87", "0-23,64-87", "24-31")
    assert found.numa == ("0", "0", "1")
    assert (found.capability, found.pci_device) == (90, "0x2335")
    assert found.pcie == pytest.approx(63.0e9, rel=1e-3)
    assert found.missing == ()


def test_nvlinks_through_switches_add_up():
    """As `nvidia-smi topo -m` prints such a machine: NV18 between all."""
    assert one(DUMP).device_classes == (("X", "NV18", "NV18"), ("NV18", "X", "NV18"), ("NV18", "NV18", "X"))


def test_nics_are_as_near_as_nccl_finds_them():
    """PIX below one switch, PXB through two, PHB over the CPU's bridge, SYS between CPUs."""
    assert one(DUMP).nic_classes == (("PXB", "PHB", "SYS"), ("PHB", "PIX", "SYS"), ("SYS", "SYS", "PHB"))


def test_straight_nvlinks_and_a_network_under_every_cpu():
    """Four devices with four NVLinks a pair, one a NUMA node: the driver prints NV4."""
    buses = ["0000:03:00.0", "0000:41:00.0", "0000:82:00.0", "0000:c1:00.0"]
    nodes = []
    for dev, bus in enumerate(buses):
        links = "".join(
            f'<nvlink target="{other.upper()}" count="4" tclass="0x030200"/>'
            for other in buses
            if other != bus
        )
        net = '<nic><net name="eth0" dev="0" speed="100000" gdr="0"/></nic>'
        nodes.append(cpu(3 - dev, gpu(dev, bus, links), net))
    found = one(system(*reversed(nodes)))
    assert found.device_classes[0] == ("X", "NV4", "NV4", "NV4")
    assert found.numa == ("3", "2", "1", "0")
    assert found.nics == ("eth0",)
    assert found.nic_classes == (("PHB",) * 4,)


def test_two_hosts_in_one_file_are_two_nodes():
    inner = gpu(0, "0000:18:00.0")
    first, second = read_topology_xml(system(cpu(0, inner, host="0xa"), cpu(0, inner, host="0xb")), "f")
    assert (first.host, second.host) == ("0xa", "0xb")


def test_a_provider_file_without_gpus_leaves_nvlinks_open_and_knows_the_nics():
    found = one((FOLDER / "ndv4-topo.xml").read_text())
    assert len(found.devices) == len(found.nics) == 8
    assert found.device_classes[0] == ("X", *("-",) * 7)
    assert found.nic_classes[0] == ("PIX", "PIX", *("SYS",) * 6)
    assert found.numa == ("0", "0", "1", "1", "2", "2", "3", "3")
    assert found.pcie == pytest.approx(31.5e9, rel=1e-3)
    assert any("no <gpu>" in words for words in found.missing)


def test_provider_files_have_the_nics_of_their_switches():
    """Of AWS: two GPUs and a NIC below each of four switches, two switches a socket."""
    found = one((FOLDER / "p4d-24xl-topo.xml").read_text())
    assert [[link == "PIX" for link in row] for row in found.nic_classes] == [
        [at // 2 == nic for at in range(8)] for nic in range(4)
    ]
    assert found.nic_classes[0][2:4] == ("PHB", "PHB")
    assert found.affinity[0] == "0-23,48-71"
    ndv2 = one((FOLDER / "ndv2-topo.xml").read_text())
    assert ndv2.nic_classes == (("PHB",) * 4 + ("SYS",) * 4,)


def test_nvlinks_that_lead_to_themselves_are_not_used_and_said():
    found = one((FOLDER / "ncv4-topo.xml").read_text())
    assert {link for row in found.device_classes for link in row} == {"X", "SYS"}
    assert found.missing[0] == "line 5: NVLinks of GPU0 lead to itself: they are not used"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('<system version="1">\n  <cpu numaid="0">\n</system>', r":3:3: is no XML: mismatched tag"),
        ('<system version="1">\n  <cpu numaid=0/>\n</system>', r":2:15: is no XML: not well-formed"),
        ('<!DOCTYPE x [<!ENTITY a "b">]>\n<system/>', r":1:\d+: a DOCTYPE or an entity"),
        ('<?xml version="1.0"?>\n<!DOCTYPE system SYSTEM "http://a/b">\n<system/>', r":2:\d+: a DOCTYPE"),
        ('<system version="1">&a;</system>', r":1:\d+: is no XML: undefined entity"),
        ("<graphs/>", r":1:1: the root is <graphs>"),
        (system(cpu(0)), r":1:1: there is no GPU in it"),
        (
            system(cpu(0, gpu(0, "0:1", '<nvlink target="0:9" count="x"/>'))),
            r":3:\d+: count='x' of an nvlink",
        ),
        (system(cpu(0, gpu(0, "0:1"), mask="xyz")), r":2:1: affinity='xyz' is no mask"),
        (
            system(
                cpu(
                    0,
                    gpu(0, "0:1", '<nvlink target="0:2" count="4" tclass="0x030200"/>'),
                    gpu(1, "0:2", '<nvlink target="0:1" count="2" tclass="0x030200"/>'),
                )
            ),
            r":3:\d+: GPU0 has 4 NVLinks to GPU1, which has 2 to GPU0",
        ),
        ("<a>" * 100, r":1:\d+: more than 64 elements"),
    ],
)
def test_what_is_malformed_or_contradicts_itself_is_refused_with_its_place(text, words):
    with pytest.raises(EvidenceError, match="^system.xml" + words):
        read_topology_xml(text, "system.xml")


def test_a_topology_is_known_by_its_beginning():
    assert is_topology_xml((FOLDER / "p4d-24xl-topo.xml").read_text())  # begins with a comment
    assert is_topology_xml('<?xml version="1.0"?>\n<system version="1">')
    assert not is_topology_xml('<graphs version="1">')
    assert not is_topology_xml("step: 1 <system>")
